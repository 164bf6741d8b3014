"""Writers and real controllers with a full disk: appends wait or are logged, and none is lost.

A file size limit stands for the full disk, as in `tests/chaos`: the system call fails alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from streammeta.cli.local_cluster import LocalCluster
from streammeta.client import (
    BrokerSession,
    ControllerClient,
    LogIdentity,
    StreamWriter,
    WriteAheadLog,
    WriterConfig,
)
from streammeta.storage.object_store.local import LocalObjectStore
from tests.kit.fake_broker import check_streams, payload_of, until
from tests.kit.real_cluster import leader_of, running_cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

NODE = 1001
STREAMS = 8
BUFFER_BYTES = 1 << 20

Durability = Literal["object", "wal"]


@contextmanager
def full_disk(cluster: LocalCluster, node_id: int) -> Iterator[None]:
    """Let every further write of a controller fail, of its log and of what it prints."""
    pid = cluster.children[node_id].pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)


@dataclass
class Load:
    """Appends that go on until they are told to stop, and what was acknowledged of them."""

    writer: StreamWriter
    streams: list[int]
    acks: list[asyncio.Future[int]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    stopped: bool = False

    async def run(self) -> None:
        """Append round the streams; an append that is refused ends it."""
        self.counts = dict.fromkeys(self.streams, 0)
        while not self.stopped:
            for stream_id in self.streams:
                payload = payload_of(stream_id, self.counts[stream_id])
                self.acks.append(await self.writer.append(stream_id, payload))
                self.counts[stream_id] += 1
            await asyncio.sleep(0.002)

    @property
    def acknowledged(self) -> int:
        """Appends whose acknowledgement has come."""
        return sum(ack.done() and ack.exception() is None for ack in self.acks)

    async def progress(self, more: int = 200) -> None:
        """Wait until all that is appended now, and `more`, is acknowledged."""
        wanted = len(self.acks) + more
        await until(lambda: self.acknowledged >= wanted, f"{wanted} acknowledgements", 60)


@asynccontextmanager
async def written(cluster: LocalCluster, root: Path, durability: Durability) -> AsyncIterator[Load]:
    """Run a load on `cluster`; at the end close the writer and read every record back."""
    store = LocalObjectStore(Path(cluster.store_uri.removeprefix("file://")))
    config = WriterConfig(
        linger_s=0.02, upload_bytes=64 * 1024, max_buffer_bytes=BUFFER_BYTES, durability=durability
    )
    async with ControllerClient(cluster.endpoints, rng=random.Random(3)) as client:
        epoch = time.time_ns()
        session = await BrokerSession.open(client, NODE, epoch)
        ids = await session.create_streams([{}] * STREAMS)
        opened = (await session.open_streams(dict.fromkeys(ids, 0))).require_all()
        log = None
        if durability == "wal":
            identity = LogIdentity(session.namespace, NODE, epoch)
            log = await WriteAheadLog.open(root / "wal", identity)
        async with StreamWriter(session, store, config, log=log) as writer:
            writer.attach(opened.values())
            load = Load(writer, ids)
            running = asyncio.create_task(load.run())
            try:
                await load.progress()
                yield load
            finally:
                load.stopped = True
                await running
        if log is not None:
            await log.close()
        failed = [ack.exception() for ack in load.acks if ack.exception() is not None]
        assert not failed, f"{len(failed)} of {len(load.acks)} failed, first {failed[0]!r}"
        await check_streams(client, store, load.counts)


@pytest.mark.parametrize("durability", ["object", "wal"])
def test_the_next_leader_takes_what_one_with_a_full_disk_refused(
    tmp_path: Path, durability: Durability
) -> None:
    async def run(cluster: LocalCluster) -> None:
        async with written(cluster, tmp_path, durability) as load:
            leader = await asyncio.to_thread(leader_of, cluster)
            with full_disk(cluster, leader):
                await load.progress()
                await load.writer.flush()
                assert await asyncio.to_thread(leader_of, cluster) != leader

    with running_cluster(tmp_path, 3) as cluster:
        asyncio.run(run(cluster))


@pytest.mark.parametrize("controllers", [1, 3])
@pytest.mark.parametrize("durability", ["object", "wal"])
def test_writers_go_on_when_the_room_returns(
    tmp_path: Path, durability: Durability, controllers: int
) -> None:
    """No controller has room: nothing is committed, and no append fails."""

    async def run(cluster: LocalCluster) -> None:
        async with written(cluster, tmp_path, durability) as load:
            with contextlib.ExitStack() as disks:
                for node_id in cluster.node_ids:
                    disks.enter_context(full_disk(cluster, node_id))
                if durability == "wal":
                    await load.progress()
                else:
                    await until(lambda: is_held(load), "appends that wait for room", 60)
                assert all(ack.exception() is None for ack in load.acks if ack.done())
                assert load.writer.buffered_bytes <= BUFFER_BYTES
            await load.progress()

    with running_cluster(tmp_path, controllers) as cluster:
        asyncio.run(run(cluster))


def is_held(load: Load) -> bool:
    """Tell whether the buffer has no room for another append."""
    return load.writer.buffered_bytes > BUFFER_BYTES - 4 * 1024
