"""What the client's tests share: running a scenario, and a cluster with a session and a store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from streammeta.client import OpenedStream, UploadObserver, WriterConfig, parts
from streammeta.storage.object_store.protocol.base import ObjectStore
from tests.kit.fake_cluster import NAMESPACE, FakeCluster
from tests.kit.memory_store import MemoryObjectStore

NEVER = 3600.0
"""A linger that no test waits for, in seconds."""


@dataclass
class Broker:
    cluster: FakeCluster
    client: parts.ControllerClient
    session: parts.BrokerSession
    store: MemoryObjectStore

    async def opened(self, count: int, epoch: int = 0) -> list[OpenedStream]:
        """Create and open `count` streams."""
        ids = await self.session.create_streams([{}] * count)
        return await self.reopened(ids, epoch)

    async def reopened(self, ids: Iterable[int], epoch: int) -> list[OpenedStream]:
        outcomes = await self.session.open_streams(dict.fromkeys(ids, epoch))
        return list(outcomes.require_all().values())

    async def steal(self, stream_id: int) -> None:
        """Let another node take a stream."""
        thief = await parts.BrokerSession.open(self.client, 1001, 1)
        (await thief.open_streams({stream_id: 5})).require_all()

    def hold(self, method: str = "CommitStreamSetObject") -> asyncio.Event:
        """Let calls of `method` wait from now on; the result lets them go on."""
        return self.cluster.hold(method)

    def reader(self) -> parts.StreamReader:
        return parts.StreamReader(self.client, self.store, NAMESPACE)

    async def payloads(self, stream_id: int) -> list[bytes]:
        """Read a whole stream back, with a reader that has cached nothing."""
        async with self.reader() as reader:
            return [record.payload async for record in reader.iterate(stream_id)]


@asynccontextmanager
async def writing(
    streams: int = 1,
    *,
    members: int = 1,
    deadline: float = 10.0,
    observer: UploadObserver | None = None,
    log: parts.WriteAheadLog | None = None,
    store: MemoryObjectStore | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Broker, parts.StreamWriter]]:
    """Yield a broker and its writer, with `streams` attached; it uploads at flush unless told."""
    async with broker(members, deadline=deadline) as b:
        b.store = store or b.store
        config = WriterConfig(**{"linger_s": NEVER, **settings})
        async with parts.StreamWriter(b.session, b.store, config, observer, log) as writer:
            writer.attach(await b.opened(streams))
            yield b, writer


@asynccontextmanager
async def broker(members: int = 1, *, deadline: float = 10.0) -> AsyncIterator[Broker]:
    """Yield a registered session, node 1000 at epoch 1, on a fake cluster and a memory store."""
    async with (
        FakeCluster(members) as cluster,
        parts.ControllerClient(
            cluster.endpoints, deadline_s=deadline, attempt_timeout_s=1.0, rng=random.Random(7)
        ) as client,
    ):
        session = await parts.BrokerSession.open(client, 1000, 1)
        yield Broker(cluster, client, session, MemoryObjectStore())


def payload_of(stream_id: int, offset: int) -> bytes:
    return b"%d/%d|" % (stream_id, offset) + b"." * 85


async def check_streams(
    client: parts.ControllerClient, store: ObjectStore, counts: dict[int, int]
) -> None:
    """Every stream holds the records of its offsets, from 0 to its count, once and in order."""
    async with parts.StreamReader(client, store, await client.object_namespace()) as reader:
        found = dict.fromkeys(counts, 0)
        async for stream_id, records in reader.read_streams(list(counts)):
            for record in records:
                assert record.base_offset == found[stream_id]
                assert record.payload == payload_of(stream_id, record.base_offset)
                found[stream_id] += 1
        assert found == counts
