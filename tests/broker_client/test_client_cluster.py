"""Writers and readers of real controllers: order, no gaps, killed leaders, full disks, compaction.

A file size limit stands for a full disk, as in `tests/chaos`: the system call fails alike.
`STREAMMETA_SEED` replays the order of the appends.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import ReaderConfig, StreamClient, StreamClientConfig, WriterConfig
from streammeta.client.controllers import methods
from streammeta.client.errors import OffsetTrimmedError
from streammeta.client.model import node_message
from streammeta.client.parts import StreamReader, StreamWriter
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.built_objects import ObjectBuilder
from tests.kit.fake_broker import check_streams, payload_of
from tests.kit.real_cluster import leader_of, prepare_object, running_cluster
from tests.kit.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

SEED = int(os.environ.get("STREAMMETA_SEED", "7"))
BUFFER_BYTES = 1 << 20
LARGE = WriterConfig(linger_s=0.02, upload_bytes=256 * 1024, max_buffer_bytes=16 << 20)


@asynccontextmanager
async def writing_to(
    cluster: LocalCluster, streams: int, config: WriterConfig = LARGE
) -> AsyncIterator[tuple[StreamWriter, dict[int, int]]]:
    """Yield a writer, and how many records each of its streams gets; then read them all back."""
    place = (cluster.endpoints, cluster.store_uri)
    log = cluster.root / "wal" if config.durability == "wal" else None
    settings = StreamClientConfig(writer=config, wal_directory=log)
    async with await StreamClient.open(*place, node_id=1001, config=settings) as client:
        ids = await client.create_streams([{}] * streams)
        (await client.open_streams(ids)).require_all()
        counts = dict.fromkeys(ids, 0)
        yield client.writer, counts
        await client.writer.close()
        await check_streams(client.controllers, client.store, counts)


@dataclass
class Load:
    """Appends that go on until they are told to stop, and what was acknowledged of them."""

    writer: StreamWriter
    counts: dict[int, int]
    acks: list[asyncio.Future[int]] = field(default_factory=list)
    stopped: bool = False

    async def run(self) -> None:
        """Append to the streams at random; an append that is refused ends it."""
        rng, ids = random.Random(SEED), list(self.counts)
        while not self.stopped:
            for _ in ids:
                stream_id = rng.choice(ids)
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
async def loaded(
    cluster: LocalCluster, streams: int, config: WriterConfig = LARGE
) -> AsyncIterator[Load]:
    """Run a load on `cluster`; none of its appends may fail."""
    async with writing_to(cluster, streams, config) as (writer, counts):
        load = Load(writer, counts)
        running = asyncio.create_task(load.run())
        try:
            await load.progress()
            yield load
        finally:
            load.stopped = True
            await running
        await writer.flush()
        failed = [ack.exception() for ack in load.acks if ack.exception() is not None]
        assert not failed, f"{len(failed)} of {len(load.acks)} failed, first {failed[0]!r}"


@pytest.mark.parametrize(
    "total", [50_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_small_records_of_many_streams_keep_their_order(tmp_path: Path, total: int) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        async with writing_to(cluster, 100) as (writer, counts):
            rng = random.Random(total)
            ids = list(counts)
            written = 0
            pending: dict[asyncio.Future[int], int] = {}
            while written < total:
                stream_id = rng.choice(ids)
                some = rng.choice([1, 1, 1, 7, 30])
                at = counts[stream_id]
                payloads = [payload_of(stream_id, at + i) for i in range(some)]
                if some == 1:
                    ack = await writer.append(stream_id, payloads[0])
                else:
                    ack = await writer.append_many(stream_id, payloads)
                pending[ack] = at
                counts[stream_id] += some
                written += some
            await writer.flush()
            assert [ack.result() for ack in pending] == list(pending.values())


@pytest.mark.parametrize(
    "kills", [1, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_killed_leaders_lose_and_repeat_nothing(tmp_path: Path, kills: int) -> None:
    with running_cluster(tmp_path, 3) as cluster:
        async with loaded(cluster, 20) as load:
            for _ in range(kills):
                await load.progress(500)
                leader = await asyncio.to_thread(leader_of, cluster)
                await asyncio.to_thread(cluster.children[leader].kill)
                await load.progress(500)
                await asyncio.to_thread(cluster.start, leader)


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


def small(durability: str) -> WriterConfig:
    return WriterConfig(
        linger_s=0.02,
        upload_bytes=64 * 1024,
        max_buffer_bytes=BUFFER_BYTES,
        durability=durability,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("durability", ["object", "wal"])
async def test_a_leader_with_a_full_disk_is_replaced(tmp_path: Path, durability: str) -> None:
    with running_cluster(tmp_path, 3) as cluster:
        async with loaded(cluster, 8, small(durability)) as load:
            leader = await asyncio.to_thread(leader_of, cluster)
            with full_disk(cluster, leader):
                await load.progress()
                await load.writer.flush()
                assert await asyncio.to_thread(leader_of, cluster) != leader


@pytest.mark.parametrize("controllers", [1, 3])
@pytest.mark.parametrize("durability", ["object", "wal"])
async def test_writers_wait_for_space(tmp_path: Path, durability: str, controllers: int) -> None:
    """No controller has room: nothing is committed, and no append fails."""
    with running_cluster(tmp_path, controllers) as cluster:
        async with loaded(cluster, 8, small(durability)) as load:
            with ExitStack() as disks:
                for node_id in cluster.node_ids:
                    disks.enter_context(full_disk(cluster, node_id))
                if durability == "wal":
                    await load.progress()
                else:
                    await until(lambda: is_held(load), "appends that wait for room", 60)
                assert all(ack.exception() is None for ack in load.acks if ack.done())
                assert load.writer.buffered_bytes <= BUFFER_BYTES
            await load.progress()


def is_held(load: Load) -> bool:
    """Tell whether the buffer has no room for another append."""
    return load.writer.buffered_bytes > BUFFER_BYTES - 4 * 1024


ROUNDS = 12
PER_ROUND = 20
TIME = 1_700_000_000_000


def timed_payload(offset: int) -> bytes:
    return f"record {offset} ".encode() * 20


def time_of(record: RecordBatch) -> int:
    return TIME + record.base_offset * 10


async def append(writer: StreamWriter, stream_id: int) -> None:
    """Commit one object."""
    for _ in range(PER_ROUND):
        offset = writer.next_offset(stream_id)
        await writer.append(stream_id, timed_payload(offset), timestamp_ms=TIME + offset * 10)
    await writer.flush()


async def compact(client: StreamClient, stream_id: int, end: int) -> None:
    """Put one object in the place of all that lie below `end`."""
    call, session = client.controllers.call, client.session
    node = node_message(session.node)
    query = objects_pb2.ObjectQuery(stream_id=stream_id, end_offset=end)
    request = objects_pb2.GetObjectsRequest(queries=[query])
    (held,) = (await call(methods.GET_OBJECTS, request)).results
    start, end = held.objects[0].start_offset, held.objects[-1].end_offset
    builder = ObjectBuilder(1_000)
    builder.write([record async for record in client.iterate(stream_id, start, end)])
    built = builder.finish()
    object_id = await prepare_object(session)
    client.store.put(key_for(object_id, session.namespace), built.data)
    commit = objects_pb2.CommitStreamObjectRequest(
        node=node,
        object_id=object_id,
        object_size=built.size,
        stream_id=stream_id,
        stream_epoch=1,
        start_offset=start,
        end_offset=end,
        source_object_ids=[piece.object_id for piece in held.objects],
        operations=[objects_pb2.SOURCE_OPERATION_DELETE] * len(held.objects),
    )
    answer = await call(methods.COMMIT_STREAM_OBJECT, commit)
    assert answer.error == common_pb2.ERROR_CODE_NONE
    gone = key_for(held.objects[0].object_id, session.namespace)
    await until(lambda: not is_stored(client.store, gone), "deletion of a compacted object")


def is_stored(store: ObjectStore, key: str) -> bool:
    return any(info.key == key for info in store.list_objects(key))


async def read_until_refused(reader: StreamReader, stream_id: int, offset: int) -> None:
    """Read again and again: what the reader knows may be behind for a moment."""
    while True:
        await reader.read(stream_id, offset)


async def test_readers_of_a_real_cluster_see_every_record_once(tmp_path: Path) -> None:
    slow = ReaderConfig(poll_interval_s=60.0)
    config = StreamClientConfig(writer=WriterConfig(linger_s=60.0, block_bytes=900), reader=slow)
    wanted = ROUNDS * PER_ROUND
    with running_cluster(tmp_path, 1) as cluster:
        place = (cluster.endpoints, cluster.store_uri)
        async with (
            await StreamClient.open(*place, node_id=1000, config=config) as client,
            await StreamClient.open(*place, config=config) as other,
        ):
            (stream_id,) = await client.create_streams([{}])
            (await client.open_streams({stream_id: 1})).require_all()
            tails = [client.tail(stream_id, 0) for _ in range(5)]

            async def follow(place: int) -> list[RecordBatch]:
                return [await anext(tails[place]) for _ in range(wanted)]

            following = [asyncio.create_task(follow(place)) for place in range(len(tails))]
            for number in range(ROUNDS):
                await append(client.writer, stream_id)
                if number % 4 == 3:
                    await compact(client, stream_id, number * PER_ROUND)
            async with asyncio.timeout(60):
                for got in await asyncio.gather(*following):
                    assert [row.payload for row in got] == list(map(timed_payload, range(wanted)))
            read = [record async for record in other.iterate(stream_id)]
            assert [record.payload for record in read] == list(map(timed_payload, range(wanted)))
            look_up = other.reader.offset_for_timestamp
            found = await look_up(stream_id, TIME + 555, timestamp_of=time_of)
            assert found.offset == 56
            (await client.trim_streams({stream_id: 100})).require_all()

            with pytest.raises(OffsetTrimmedError, match="100"):
                await asyncio.wait_for(read_until_refused(client.reader, stream_id, 99), 60)
            assert (await look_up(stream_id, TIME, timestamp_of=time_of)).offset == 100
