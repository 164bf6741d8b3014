"""A whole broker in a process: client of streams, broker, groups and listener, in order."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from streammeta.brokers.kafka.broker import Broker
from streammeta.brokers.kafka.group_calls import Groups
from streammeta.brokers.kafka.server import KafkaServer
from streammeta.client import StreamClient, StreamClientConfig, TlsFiles, WriterConfig

DEFAULT_LINGER_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig:
    """Configuration of a broker. `advertised` is the address that clients are told, HOST:PORT.

    Records wait up to `linger_s` seconds for others of the same object. Port 0 stands for a free
    one, also in what is advertised. `listen_tls` are the files by which clients are spoken to: they
    have to show certificates of its authorities.
    """

    controllers: Sequence[str]
    store: str
    node_id: int
    host: str = "127.0.0.1"
    port: int = 9092
    advertised: tuple[str, int] | None = None
    linger_s: float = DEFAULT_LINGER_S
    default_partitions: int = 1
    creates_topics: bool = True
    tls: TlsFiles | None = None
    listen_tls: TlsFiles | None = None


@asynccontextmanager
async def running_broker(config: KafkaConfig) -> AsyncIterator[tuple[str, int]]:
    """Run a broker; yield the address that clients are told once it serves.

    Raises `OSError` if it can't listen, `TlsError` for files, and what `StreamClient.open` raises.
    """
    context = None
    if config.listen_tls is not None:
        context = config.listen_tls.load("listen-tls").context(ssl.PROTOCOL_TLS_SERVER)
    writer = WriterConfig(linger_s=config.linger_s)
    settings = StreamClientConfig(writer=writer)
    client = await StreamClient.open(
        config.controllers, config.store, node_id=config.node_id, tls=config.tls, config=settings
    )
    async with client:
        ready: asyncio.Future[KafkaServer] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
            await (await ready).serve(reader, out)

        listener = await asyncio.start_server(serve, config.host, config.port, ssl=context)
        bound = listener.sockets[0].getsockname()[1]
        host, port = config.advertised or (config.host, bound)
        broker = await Broker.open(client, host, port or bound)
        broker.default_partitions = config.default_partitions
        broker.creates_topics = config.creates_topics
        async with Groups(broker) as groups:
            server = KafkaServer(broker, groups)
            ready.set_result(server)
            try:
                yield host, port or bound
            finally:
                listener.close()
                await server.close()
                await broker.close()
