"""Factory of all gRPC channels and servers: message sizes, keepalive, reconnecting.

Nothing else opens a channel or a port of gRPC, so that credentials have one place to enter. Every
connection of gRPC is plain text today.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import grpc

REQUEST_BYTES_MAX = 16 << 20
"""Largest request that a controller takes."""

ANSWER_BYTES_MAX = 64 << 20
"""Largest answer."""

LOOKAHEAD_BYTES = 1 << 20
"""Bytes of a call's messages that may be on their way to a receiver that has not asked for them."""

_Options: TypeAlias = Sequence[tuple[str, int]]

_BOTH_SIDES: _Options = (
    # To find the window by itself, gRPC answers data by a ping. That costs a rare small call, such
    # as a heartbeat, a sixth of its CPU; a fixed window serves neighbours as well.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
)
_SERVER: _Options = (
    *_BOTH_SIDES,
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
    # Two servers must not share a port unnoticed.
    ("grpc.so_reuseport", 0),
    # Clients detect vanished hosts by pings; gRPC treats frequent ones as an attack by default.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
_CHANNEL: _Options = (
    *_BOTH_SIDES,
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    # Controllers are neighbours: a proxy meant for the internet only gets in the way.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # Channels with equal options share a connection otherwise; bulk and control must not.
    ("grpc.use_local_subchannel_pool", 1),
)
# `min_reconnect_backoff_ms` bounds one attempt to connect, despite its name; 20 s by default.
_CLIENT: _Options = (
    *_CHANNEL,
    # A dead leader shows as a reset connection, at once. Reconnecting is cheap and tried often:
    # while a channel backs off, it fails calls without an attempt.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Pings detect hosts that vanish without a reset; they are sent only while a call waits.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The time that an unanswered ping is given, keepalive's too, is this one; 60 s by default.
    ("grpc.http2.ping_timeout_ms", 5_000),
    # gRPC sends two pings by default where nothing else is said, and no more.
    ("grpc.http2.max_pings_without_data", 0),
)
_OPERATOR: _Options = (
    *_CHANNEL,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A dead host must leave time to ask the others.
    ("grpc.min_reconnect_backoff_ms", 2000),
)


def client_channel(endpoint: str) -> grpc.aio.Channel:
    """Return a broker's channel to a controller; it reconnects fast and detects dead hosts."""
    return grpc.aio.insecure_channel(endpoint, options=_CLIENT)


def operator_channel(endpoint: str) -> grpc.Channel:
    """Return a blocking channel to a controller, for commands and jobs."""
    return grpc.insecure_channel(endpoint, _OPERATOR)


def new_server() -> grpc.aio.Server:
    """Return a server without services and ports."""
    return grpc.aio.server(options=_SERVER)


def new_blocking_server(threads: int) -> grpc.Server:
    """Return a server whose handlers run in a pool of `threads` threads."""
    return grpc.server(ThreadPoolExecutor(threads), options=_SERVER)


def listen(server: grpc.aio.Server | grpc.Server, address: str) -> int:
    """Add `address`, HOST:PORT, to what a server listens on; return the port, chosen if it is 0.

    Raises:
        RuntimeError: the address is taken, or is none of this host's.
    """
    return server.add_insecure_port(address)
