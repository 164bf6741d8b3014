"""Factory of all gRPC channels and servers: message sizes, keepalive, reconnecting.

Nothing else opens a channel or a port of gRPC, so that credentials have one place to enter. With
files for TLS both sides show a certificate; without, a connection is plain text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import grpc

# The package grpcio-channelz is made of this.
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from streammeta.rpc.tls import CallerFiles, TlsContents, TlsError, TlsFiles, TokenFiles

REQUEST_BYTES_MAX = 16 << 20
"""Largest request that a controller takes."""

ANSWER_BYTES_MAX = 64 << 20
"""Largest answer."""

STREAMS_MAX = 1_024
"""Calls under way on one connection; any more wait at their client.

When others end, gRPC may refuse those (UNAVAILABLE, REFUSED_STREAM) that come a moment too early;
so this is far above what a client has under way.
"""

CONNECTIONS_MAX = 4_096
"""Connections of one server; any more are closed at once."""

CALLS_MAX = 25_000
"""Calls under way at one server; any more are refused unread: the line behind admission control."""

WAITING_SOME, WAITING_MOST = 1_000, 2_000
"""Calls that wait to be begun: beyond the first number some more are refused, beyond the other all.

gRPC refuses them unread (CANCELLED), which costs next to nothing; to refuse them here would cost
half of what serving them does. As many as wait are served in about a second; all watches of a
controller may come at once.
"""

LOOKAHEAD_BYTES = 1 << 20
"""Bytes of a call's messages that may be on their way to a receiver that has not asked for them."""

AGE_GRACE_MS = 60_000
"""Time that the calls of a connection have left when it is too old."""

_ALL_SOCKETS = 1 << 20

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
    # Clients detect vanished hosts by pings. gRPC closes a connection of frequent ones by default,
    # which is what makes a flood of them an attack: while a write is under way each further ping
    # adds to an error that is copied as a whole, and threads that are busy with it for minutes
    # become more. A ping that is answered costs next to nothing, and nothing is read from a
    # connection that does not take the answers.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    # A connection that says nothing, or half a handshake, is closed; gRPC gives it two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A call that waited as long, in seconds, for a busy process has lost its caller.
    ("grpc.server_max_unrequested_time_in_server", 10),
    ("grpc.server.max_pending_requests", WAITING_SOME),
    ("grpc.server.max_pending_requests_hard_limit", WAITING_MOST),
    # Finds dead hosts that hold watches.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
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


def client_channel(endpoint: str, tls: TlsFiles | TlsContents | None = None) -> grpc.aio.Channel:
    """Return a broker's channel to a controller; it reconnects fast and detects dead hosts.

    Without `tls` it is plain text. A channel keeps the certificate that it was made with.

    Raises:
        TlsError: the files for TLS are of no use.
    """
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=_CLIENT)
    return grpc.aio.secure_channel(endpoint, _channel_credentials(tls), options=_CLIENT)


def operator_channel(endpoint: str, tls: CallerFiles | None = None) -> grpc.Channel:
    """Return a blocking channel to a controller, for commands and jobs; else as `client_channel`.

    With a token in `tls` each call shows it as it is then, over TLS, and no certificate.

    Raises:
        TlsError: the files for TLS are of no use.
    """
    if tls is None:
        return grpc.insecure_channel(endpoint, _OPERATOR)
    if isinstance(tls, TokenFiles):
        return grpc.secure_channel(endpoint, _bearer_credentials(tls), _OPERATOR)
    return grpc.secure_channel(endpoint, _channel_credentials(tls), _OPERATOR)


def new_server(
    connection_age_ms: int | None = None, connections_max: int | None = None
) -> grpc.aio.Server:
    """Return a server without services and ports.

    Each of its listeners has at most `connections_max` connections, `CONNECTIONS_MAX` for None.
    A connection takes no call once it is as old as `connection_age_ms`, and ends after a grace, so
    that clients come again with the certificates that they have by then; None: it never does.
    """
    ages: tuple[tuple[str, int], ...] = ()
    if connection_age_ms is not None:
        ages = (
            ("grpc.max_connection_age_ms", connection_age_ms),
            ("grpc.max_connection_age_grace_ms", min(AGE_GRACE_MS, connection_age_ms)),
        )
    options = dict((*_SERVER, *ages))
    if connections_max is not None:
        options["grpc.max_allowed_incoming_connections"] = connections_max
    return grpc.aio.server(options=tuple(options.items()), maximum_concurrent_rpcs=CALLS_MAX)


class _Details(NamedTuple):
    """The part of a call that its handler is found by."""

    method: str
    invocation_metadata: tuple[()] = ()


def add_services(
    server: grpc.aio.Server,
    handlers: Sequence[grpc.GenericRpcHandler],
    apart: Sequence[str] = (),
) -> None:
    """Add services to a server.

    Calls of the methods `apart`, such as `/streammeta.v1.NodeService/Heartbeat`, wait apart from
    all others, and are begun and refused whatever waits there. Each costs all others a little.

    Raises:
        ValueError: none of the services has such a method.
    """
    server.add_generic_rpc_handlers(handlers)
    for path in apart:
        details: Any = _Details(path)
        handler = next(filter(None, (each.service(details) for each in handlers)), None)
        if handler is None:
            raise ValueError(f"{path} is no method of the services")
        _, service, method = path.split("/")
        server.add_registered_method_handlers(service, {method: handler})


def new_blocking_server(threads: int) -> grpc.Server:
    """Return a server whose handlers run in a pool of `threads` threads."""
    return grpc.server(ThreadPoolExecutor(threads), options=_SERVER)


def open_connections() -> int:
    """Return how many connections the servers of this process have, handshakes aside."""
    servers = json.loads(cygrpc.channelz_get_servers(0)).get("server", ())
    return sum(_sockets(int(server["ref"]["serverId"])) for server in servers)


def _sockets(server_id: int) -> int:
    found = json.loads(cygrpc.channelz_get_server_sockets(server_id, 0, _ALL_SOCKETS))
    return len(found.get("socketRef", ()))


class ServerCertificates:
    """The certificate that a listener shows, and the authorities whose clients it takes.

    Replaced while it serves: connections made from then on see the new set.
    """

    def __init__(self, contents: TlsContents) -> None:
        self._current = _configuration(contents)
        self._begun = itertools.count(1)
        self.handshakes = 0
        """Handshakes begun; gRPC does not tell how they ended."""

    def replace(self, contents: TlsContents) -> None:
        """Show `contents` from now on."""
        self._current = _configuration(contents)

    def credentials(self, *, asks_clients: bool = True) -> grpc.ServerCredentials:
        """Return credentials of one listener, which demands a certificate of every client.

        One that `asks_clients` for none does not see those they have.
        """
        shown = self._current

        def changed() -> Any:
            # Runs on a thread of gRPC's before each handshake, and must not wait. None: unchanged,
            # which the types of gRPC leave out.
            nonlocal shown
            self.handshakes = next(self._begun)
            if shown is self._current:
                return None
            shown = self._current
            return shown

        return grpc.dynamic_ssl_server_credentials(
            shown, changed, require_client_authentication=asks_clients
        )


def listen(
    server: grpc.aio.Server | grpc.Server,
    address: str,
    tls: TlsFiles | ServerCertificates | None = None,
    *,
    asks_clients: bool = True,
) -> int:
    """Add `address`, HOST:PORT, to what a server listens on; return the port, chosen if it is 0.

    With `tls` every client must show a certificate of the authorities, unless `asks_clients` is
    False: then each call must name its caller. Without `tls` it is plain text.

    Raises:
        RuntimeError: the address is taken, or is none of this host's.
        TlsError: the files for TLS are of no use.
    """
    if tls is None:
        return server.add_insecure_port(address)
    shown = ServerCertificates(tls.load()) if isinstance(tls, TlsFiles) else tls
    return server.add_secure_port(address, shown.credentials(asks_clients=asks_clients))


def _channel_credentials(tls: TlsFiles | TlsContents) -> grpc.ChannelCredentials:
    contents = tls.load() if isinstance(tls, TlsFiles) else tls
    return grpc.ssl_channel_credentials(contents.ca, contents.key, contents.certificate)


def _bearer_credentials(files: TokenFiles) -> grpc.ChannelCredentials:
    return grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(files.load()),
        grpc.metadata_call_credentials(_Bearer(files), "bearer"),
    )


class _Bearer(grpc.AuthMetadataPlugin):
    """Adds the token of a file to each call; gRPC asks for it on a thread of its own."""

    def __init__(self, files: TokenFiles) -> None:
        self._files = files

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        try:
            shown = (("authorization", f"Bearer {self._files.read_token()}"),)
        except TlsError as error:
            callback((), error)
        else:
            callback(shown, None)


def _configuration(contents: TlsContents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(contents.key, contents.certificate)], contents.ca
    )
