"""A complete broker process: stream client, broker, groups and listener, started in order.

A broker whose session expired and whose partitions have moved to others rejoins as a new process of
its node, with the same listener. A broker replaced by a newer process of its node ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol.tally import BrokerTally
from streammeta.brokers.kafka.service.metrics import BrokerState
from streammeta.brokers.kafka.service.server import KafkaServer
from streammeta.brokers.kafka.service.users import Users
from streammeta.client import (
    ClientMetrics,
    StreamClient,
    StreamClientConfig,
    WriterConfig,
)
from streammeta.client.errors import BrokerClientError, NodeEpochExpiredError, StorageError
from streammeta.client.parts import run_blocking
from streammeta.tls.files import TlsError, TlsFiles, WatchedTls

# Listener for Kafka clients, in plain text or over TLS, with files that are reloaded.
#
# New connections use the certificate and the authorities that are in the files at that time. Open
# connections are not affected.

CHECK_INTERVAL_S = 5.0
"""Interval between two checks of the files, in seconds."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class KafkaListener:
    """Listener that passes connections to `serve`.

    `files` enable TLS, `is_mutual` requires client certificates.
    """

    def __init__(self, serve: Serve, files: TlsFiles | None, *, is_mutual: bool = True) -> None:
        """Read the files. Raises `TlsError`."""
        self._serve = serve
        self._is_mutual = is_mutual
        self._watched = None if files is None else WatchedTls(files, "listen-tls")
        self._servers: list[asyncio.Server] = []
        self._looking: asyncio.Task[None] | None = None

    @property
    def certificate_ends_s(self) -> float | None:
        """End of the current certificate's validity, in seconds since 1970; None if not known."""
        facts = None if self._watched is None else self._watched.contents.facts
        return None if facts is None else facts.not_after.timestamp()

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, a free one if `port` is 0. Raises `OSError`."""
        server = await asyncio.start_server(self._serve, host, port, ssl=self._context())
        self._servers = [server]
        if self._watched is not None:
            self._looking = asyncio.create_task(self._look_again(self._watched))
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop accepting connections."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        for server in self._servers:
            server.close()

    def _context(self) -> ssl.SSLContext | None:
        if self._watched is None:
            return None
        context = self._watched.contents.context(ssl.PROTOCOL_TLS_SERVER)
        if not self._is_mutual:
            context.verify_mode = ssl.CERT_NONE
        return context

    async def _look_again(self, watched: WatchedTls) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                if await run_blocking(watched.look):
                    await self._renew()
                    _log.info("loaded the new certificate for new connections")
            except (TlsError, OSError) as error:
                _log.error(
                    "loading the new certificate failed, keeping the previous one: %s", error
                )

    async def _renew(self) -> None:
        """Accept connections on the same sockets with the current files."""
        # A duplicated socket keeps accepting, so clients see no interruption while the server
        # changes.
        former, context = self._servers, self._context()
        sockets = [sock.dup() for server in former for sock in server.sockets]
        self._servers = [
            await asyncio.start_server(self._serve, sock=sock, ssl=context) for sock in sockets
        ]
        for server in former:
            server.close()


DEFAULT_LINGER_S = 0.05
DEFAULT_SESSION_S = 6.0
"""Session timeout of a broker. It is short because a dead broker leaves no pending uploads to
others.
"""
_WRITER_CLOSE_TIMEOUT_S = 1.0
"""Time for pending uploads after the partitions are closed or abandoned."""
_REJOIN_DELAY_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig:
    """Configuration of a broker. `advertised` is the address announced to clients, HOST:PORT.

    Records wait up to `linger_s` seconds to share an object with others. A broker that is silent
    for `session_s` seconds, at least 2, is replaced. Port 0 selects a free port, also in the
    advertised address. `listen_tls` are the files of the TLS listener. Clients must present
    certificates of its authorities, unless `users` names a file of users: then they authenticate by
    SASL/PLAIN and need no certificate. The files may be replaced at run time. `http`, host and
    port, is the address of probes and metrics. A broker that `is_shared` serves topics without
    leaders, from feature level 5 on. It names brokers of its `rack` as their leaders.
    """

    controllers: Sequence[str]
    store: str
    node_id: int
    host: str = "127.0.0.1"
    port: int = 9092
    advertised: tuple[str, int] | None = None
    linger_s: float = DEFAULT_LINGER_S
    session_s: float = DEFAULT_SESSION_S
    default_partitions: int = 1
    creates_topics: bool = True
    tls: TlsFiles | None = None
    listen_tls: TlsFiles | None = None
    users: Path | None = None
    http: tuple[str, int] | None = None
    rack: str | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker that serves at its advertised address until `replaced` is done.

    The result of `replaced` names the newer process that uses its node id. `http` is the address of
    probes and metrics, empty without them.
    """

    host: str
    port: int
    replaced: asyncio.Task[NodeEpochExpiredError]
    http: str = ""


@asynccontextmanager
async def running_broker(config: KafkaConfig) -> AsyncIterator[RunningBroker]:
    """Run a broker, and yield once it serves.

    Raises `OSError` if it can't listen, `TlsError` and `UsersFileError` for invalid files, the
    errors of `StreamClient.open`, and `MissingPackageError` for `http` without its packages.
    """
    users = None if config.users is None else Users(config.users)
    # The listener starts first: its port must be known before the broker joins with its address.
    router = _ConnectionRouter()
    listener = KafkaListener(router.serve, config.listen_tls, is_mutual=users is None)
    router.listener = listener
    bound = await listener.start(config.host, config.port)
    host, port = config.advertised or (config.host, bound)
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    incarnations = asyncio.create_task(
        _run_incarnations(config, users, router, (host, port or bound), ready)
    )
    http = contextlib.AsyncExitStack()
    try:
        http_address = "" if config.http is None else await _serve_http(config.http, router, http)
        outcomes: list[asyncio.Future[Any]] = [incarnations, ready]
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            # The first incarnation failed before it served: its error is the caller's.
            raise await incarnations

        yield RunningBroker(host, port or bound, incarnations, http_address)
    finally:
        # Stop accepting connections before the broker leaves the cluster.
        await listener.close()
        await http.aclose()
        incarnations.cancel()
        with contextlib.suppress(asyncio.CancelledError, BrokerClientError, StorageError):
            await incarnations


class _ConnectionRouter:
    """Routes connections to the current server. They wait while the broker rejoins.

    `tally` counts across all incarnations.
    """

    def __init__(self) -> None:
        self._server: asyncio.Future[KafkaServer] = asyncio.get_running_loop().create_future()
        self._current: _Incarnation | None = None
        self._counted = ClientMetrics.empty()
        self.tally = BrokerTally()
        self.listener: KafkaListener | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection once there is a server. End it if the process ends first."""
        try:
            # The future is shared by all waiting connections, and one that ends must not cancel it.
            server = await asyncio.shield(self._server)
        except asyncio.CancelledError:  # asyncio logs a callback that raises
            writer.close()
            return
        await server.serve(reader, writer)

    def open(self, incarnation: _Incarnation) -> None:
        """Route connections to the server of an incarnation."""
        self._current = incarnation
        self.tally.lives += 1
        self._server.set_result(incarnation.server)

    def close(self) -> None:
        """Make connections wait for the next server."""
        if self._server.done():
            self._server = asyncio.get_running_loop().create_future()
        self._current = None

    def state(self) -> BrokerState:
        """Return the state of the current incarnation."""
        incarnation = self._current
        ends_s = None if self.listener is None else self.listener.certificate_ends_s
        if incarnation is None:
            return BrokerState(certificate_ends_s=ends_s)

        broker = incarnation.broker

        return BrokerState(
            is_serving=True,
            view_age_s=broker.view_age_s,
            leader_silent_s=broker.client.controllers.router.silent_s,
            connections=incarnation.server.connections,
            partitions=len(broker.logs),
            groups=len(incarnation.groups.groups),
            recoveries=len(broker.view.recoveries.get(broker.node_id, ())),
            unavailable=broker.unavailable,
            certificate_ends_s=ends_s,
        )

    def client_metrics(self) -> ClientMetrics:
        """Return the counters of the current client, or of the last one during a rejoin."""
        if self._current is not None:
            self._counted = self._current.broker.client.metrics()
        return self._counted


@dataclass(frozen=True, slots=True)
class _Incarnation:
    """The parts of a broker between joining the cluster and leaving it."""

    broker: Broker
    groups: Groups
    server: KafkaServer


async def _serve_http(
    address: tuple[str, int], router: _ConnectionRouter, closing: contextlib.AsyncExitStack
) -> str:
    """Serve probes and metrics until `closing` ends, and return the address, HOST:PORT."""
    from streammeta.brokers.kafka.service.metrics import registry_of, serve_http

    registry = registry_of(router.tally, router.state, router.client_metrics)
    port = await closing.enter_async_context(serve_http(address, registry, router.state))
    return f"{address[0]}:{port}"


async def _run_incarnations(
    config: KafkaConfig,
    users: Users | None,
    router: _ConnectionRouter,
    address: tuple[str, int],
    ready: asyncio.Future[None],
) -> NodeEpochExpiredError:
    """Join the cluster again after each fencing, until cancelled or replaced by a newer process.

    Return the error that names the newer process. The first incarnation raises its startup errors.
    Later ones are retried until they start.
    """
    while True:
        try:
            fenced = await _run_incarnation(config, users, router, address, ready)
        except NodeEpochExpiredError as error:
            fenced = error
        except (BrokerClientError, StorageError) as error:
            if not ready.done():
                raise
            fenced = error
        # Rejoining would fence the newer process, which would then do the same to this one.
        if isinstance(fenced, NodeEpochExpiredError):
            return fenced
        _log.warning("node %d was fenced and joins again: %s", config.node_id, fenced)
        await asyncio.sleep(_REJOIN_DELAY_S)


async def _run_incarnation(
    config: KafkaConfig,
    users: Users | None,
    router: _ConnectionRouter,
    address: tuple[str, int],
    ready: asyncio.Future[None],
) -> Exception:
    """Serve as a new process of the node, and return the error that fenced it."""
    # A fenced process may no longer upload, so closing the writer must not wait long.
    writer = WriterConfig(
        linger_s=config.linger_s,
        shared_linger_ms=round(config.linger_s * 1000),
        close_deadline_s=_WRITER_CLOSE_TIMEOUT_S,
    )
    settings = StreamClientConfig(writer=writer, session_timeout_s=config.session_s)
    client = await StreamClient.open(
        config.controllers, config.store, node_id=config.node_id, tls=config.tls, config=settings
    )
    async with client:
        broker = await Broker.open(
            client, *address, router.tally, rack=config.rack, is_shared=config.is_shared
        )
        broker.default_partitions = config.default_partitions
        broker.creates_topics = config.creates_topics
        async with Groups(broker) as groups:
            server = KafkaServer(broker, groups, users, router.tally)
            router.open(_Incarnation(broker, groups, server))
            if not ready.done():
                ready.set_result(None)
            fenced = None
            try:
                fenced = await client.writer.until_fenced()
            finally:
                router.close()
                await server.close()
                # A fenced broker has lost its partitions: writing final state would fail, so it
                # drops them.
                await (broker.close() if fenced is None else broker.abandon())

    return fenced
