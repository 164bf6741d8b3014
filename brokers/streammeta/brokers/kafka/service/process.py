"""A whole broker in a process: client of streams, broker, groups and listener, in order.

A broker whose session has ended while it was silent, and whose partitions others have taken, joins
again as a new process of its node behind the same listener. One that a newer process has replaced
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol.tally import BrokerTally
from streammeta.brokers.kafka.service.listener import KafkaListener
from streammeta.brokers.kafka.service.server import KafkaServer
from streammeta.brokers.kafka.service.state import BrokerState
from streammeta.brokers.kafka.service.users import Users
from streammeta.client import (
    BrokerClientError,
    ClientMetrics,
    NodeEpochExpiredError,
    ReaderStats,
    StorageError,
    StreamClient,
    StreamClientConfig,
    TlsFiles,
    WriterConfig,
)
from streammeta.client.resources.tally import ClientTally, snapshot

DEFAULT_LINGER_S = 0.05
DEFAULT_SESSION_S = 6.0
"""Session of a broker: short, since a dead one leaves nothing that others have to upload first."""
_WRITER_CLOSED_WITHIN_S = 1.0
"""Time for pending uploads once the partitions are closed or given up."""
_REJOINED_AFTER_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig:
    """Configuration of a broker. `advertised` is the address that clients are told, HOST:PORT.

    Records wait up to `linger_s` seconds for others of the same object. A broker that is silent for
    `session_s` seconds, at least 2, is replaced. Port 0 stands for a free one, also in what is
    advertised. `listen_tls` are the files by which clients are spoken to: they have to show
    certificates of its authorities, unless `users` names a file of users: then they authenticate by
    SASL/PLAIN, and need none. The files may be replaced meanwhile. At `http`, HOST and port, probes
    and metrics are served.
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


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker that serves at the address that clients are told, until `replaced` is done.

    The result of `replaced` says which newer process has taken its node id. `http` is the address
    of probes and metrics, empty without them.
    """

    host: str
    port: int
    replaced: asyncio.Task[NodeEpochExpiredError]
    http: str = ""


@asynccontextmanager
async def running_broker(config: KafkaConfig) -> AsyncIterator[RunningBroker]:
    """Run a broker; yield once it serves.

    Raises `OSError` if it can't listen, `TlsError` and `UsersFileError` for files, what
    `StreamClient.open` raises, and `MissingPackageError` for `http` without its packages.
    """
    users = None if config.users is None else Users(config.users)
    door = _Door()
    listener = KafkaListener(door.serve, config.listen_tls, is_mutual=users is None)
    door.listener = listener
    bound = await listener.start(config.host, config.port)
    host, port = config.advertised or (config.host, bound)
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    lives = asyncio.create_task(_live(config, users, door, (host, port or bound), ready))
    http = contextlib.AsyncExitStack()
    try:
        at = "" if config.http is None else await _serve_http(config.http, door, http)
        first: list[asyncio.Future[Any]] = [lives, ready]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise await lives
        yield RunningBroker(host, port or bound, lives, at)
    finally:
        await listener.close()
        await http.aclose()
        lives.cancel()
        with contextlib.suppress(asyncio.CancelledError, BrokerClientError, StorageError):
            await lives


class _Door:
    """Leads connections to the server of the present life; they wait while there is none.

    `tally` counts over all lives.
    """

    def __init__(self) -> None:
        self._server: asyncio.Future[KafkaServer] = asyncio.get_running_loop().create_future()
        self._life: _Life | None = None
        self._counted = snapshot(ClientTally(), ReaderStats())
        self.tally = BrokerTally()
        self.listener: KafkaListener | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection, once there is a server; end it if the process ends before that."""
        try:
            server = await asyncio.shield(self._server)
        except asyncio.CancelledError:  # asyncio logs a callback that raises
            writer.close()
            return
        await server.serve(reader, writer)

    def open(self, life: _Life) -> None:
        """Lead to the server of a life."""
        self._life = life
        self.tally.lives += 1
        self._server.set_result(life.server)

    def close(self) -> None:
        """Let connections wait."""
        if self._server.done():
            self._server = asyncio.get_running_loop().create_future()
        self._life = None

    def state(self) -> BrokerState:
        """Return the state of the present life."""
        life = self._life
        ends_s = None if self.listener is None else self.listener.certificate_ends_s
        if life is None:
            return BrokerState(certificate_ends_s=ends_s)
        broker = life.broker
        return BrokerState(
            is_serving=True,
            view_age_s=broker.view_age_s,
            leader_silent_s=broker.client.controllers.router.silent_s,
            connections=life.server.connections,
            partitions=len(broker.logs),
            groups=len(life.groups.groups),
            recoveries=len(broker.view.recoveries.get(broker.node_id, ())),
            unavailable=broker.unavailable,
            certificate_ends_s=ends_s,
        )

    def client_metrics(self) -> ClientMetrics:
        """Return what the client of the present life has counted; of the last one without any."""
        if self._life is not None:
            self._counted = self._life.broker.client.metrics()
        return self._counted


@dataclass(frozen=True, slots=True)
class _Life:
    """The parts of a broker between joining the cluster and leaving it."""

    broker: Broker
    groups: Groups
    server: KafkaServer


async def _serve_http(
    address: tuple[str, int], door: _Door, closing: contextlib.AsyncExitStack
) -> str:
    """Serve probes and metrics until `closing` ends; return the address, HOST:PORT."""
    from streammeta.brokers.kafka.service.metrics import registry_of, serving_http

    registry = registry_of(door.tally, door.state, door.client_metrics)
    port = await closing.enter_async_context(serving_http(address, registry, door.state))
    return f"{address[0]}:{port}"


async def _live(
    config: KafkaConfig,
    users: Users | None,
    door: _Door,
    address: tuple[str, int],
    ready: asyncio.Future[None],
) -> NodeEpochExpiredError:
    """Live again and again, until cancelled or replaced by a newer process, which is returned.

    The first life raises what opening it raises; later ones are tried until they begin.
    """
    while True:
        try:
            fenced = await _one_life(config, users, door, address, ready)
        except NodeEpochExpiredError as error:
            fenced = error
        except (BrokerClientError, StorageError) as error:
            if not ready.done():
                raise
            fenced = error
        if isinstance(fenced, NodeEpochExpiredError):
            return fenced
        _log.warning("node %d joins again: %s", config.node_id, fenced)
        await asyncio.sleep(_REJOINED_AFTER_S)


async def _one_life(
    config: KafkaConfig,
    users: Users | None,
    door: _Door,
    address: tuple[str, int],
    ready: asyncio.Future[None],
) -> Exception:
    """Serve as a new process of the node; return what fenced it."""
    writer = WriterConfig(linger_s=config.linger_s, close_deadline_s=_WRITER_CLOSED_WITHIN_S)
    settings = StreamClientConfig(writer=writer, session_timeout_s=config.session_s)
    client = await StreamClient.open(
        config.controllers, config.store, node_id=config.node_id, tls=config.tls, config=settings
    )
    async with client:
        broker = await Broker.open(client, *address, door.tally)
        broker.default_partitions = config.default_partitions
        broker.creates_topics = config.creates_topics
        async with Groups(broker) as groups:
            server = KafkaServer(broker, groups, users, door.tally)
            door.open(_Life(broker, groups, server))
            if not ready.done():
                ready.set_result(None)
            fenced = None
            try:
                fenced = await client.writer.until_fenced()
            finally:
                door.close()
                await server.close()
                await (broker.close() if fenced is None else broker.abandon())
    return fenced
