"""Factory of all gRPC channels: message sizes, keepalive, reconnecting.

No other module opens a channel, so that credentials have only one place to enter. With TLS files
both sides present a certificate. Without them a connection is plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import grpc

from streammeta.tls.files import CallerFiles, TlsContents, TlsError, TlsFiles, TokenFiles

ANSWER_BYTES_MAX = 64 << 20
"""Largest accepted answer."""

LOOKAHEAD_BYTES = 1 << 20
"""Bytes of a call's messages in flight to a receiver that has not asked for them."""

_Options: TypeAlias = Sequence[tuple[str, int]]

_CHANNEL: _Options = (
    # To find the window by itself, gRPC answers data by a ping. That costs a rare small call, such
    # as a heartbeat, a sixth of its CPU; a fixed window serves neighbours as well.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    # Controllers are neighbours: a proxy meant for the internet only gets in the way.
    ("grpc.enable_http_proxy", 0),
    # The router decides on retries. gRPC's own would hide failures from it.
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
    # By default gRPC sends at most two pings.
    ("grpc.http2.max_pings_without_data", 0),
)
_OPERATOR: _Options = (
    *_CHANNEL,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A dead host must leave time to ask the others.
    ("grpc.min_reconnect_backoff_ms", 2000),
)


def client_channel(endpoint: str, tls: TlsFiles | TlsContents | None = None) -> grpc.aio.Channel:
    """Return a broker's channel to a controller, which reconnects fast and detects dead hosts.

    Without `tls` it is plain text. A channel keeps its initial certificate.

    Raises:
        TlsError: the TLS files are invalid.
    """
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=_CLIENT)
    return grpc.aio.secure_channel(endpoint, _channel_credentials(tls), options=_CLIENT)


def operator_channel(endpoint: str, tls: CallerFiles | None = None) -> grpc.Channel:
    """Return a blocking channel to a controller, for commands and jobs.

    It equals `client_channel`, except that with a token in `tls` each call sends the current token
    over TLS, without a certificate.

    Raises:
        TlsError: the TLS files are invalid.
    """
    if tls is None:
        return grpc.insecure_channel(endpoint, _OPERATOR)
    if isinstance(tls, TokenFiles):
        return grpc.secure_channel(endpoint, _bearer_credentials(tls), _OPERATOR)
    return grpc.secure_channel(endpoint, _channel_credentials(tls), _OPERATOR)


def _channel_credentials(tls: TlsFiles | TlsContents) -> grpc.ChannelCredentials:
    contents = tls.load() if isinstance(tls, TlsFiles) else tls
    return grpc.ssl_channel_credentials(contents.ca, contents.key, contents.certificate)


def _bearer_credentials(files: TokenFiles) -> grpc.ChannelCredentials:
    return grpc.composite_channel_credentials(
        # gRPC sends call credentials over TLS only.
        grpc.ssl_channel_credentials(files.load()),
        grpc.metadata_call_credentials(_Bearer(files), "bearer"),
    )


class _Bearer(grpc.AuthMetadataPlugin):
    """Adds the token of a file to each call. gRPC calls it on its own thread."""

    def __init__(self, files: TokenFiles) -> None:
        self._files = files

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        try:
            shown = (("authorization", f"Bearer {self._files.read_token()}"),)
        except TlsError as error:
            # An exception on gRPC's thread would be lost. The callback fails the call with it.
            callback((), error)
        else:
            callback(shown, None)
