"""Queues of RocketMQ's shape on real controllers: restarts, fences, views."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from streammeta.brokers.rocketmq.cluster.cluster_metadata import TAG, MetadataFencedError
from streammeta.brokers.rocketmq.cluster.cluster_store import Backend, QueueStore, StoreConfig
from streammeta.brokers.rocketmq.cluster.segment_view import render
from streammeta.brokers.rocketmq.cluster.upload_pool import PoolConfig
from streammeta.brokers.rocketmq.dispatch import GroupCommit
from streammeta.brokers.rocketmq.fetch import FetchStatus
from streammeta.brokers.rocketmq.formats import metadata
from streammeta.brokers.rocketmq.formats.message import decode_message, with_physical_offset
from streammeta.brokers.rocketmq.formats.names import SegmentType, chunk_prefix, segment_path
from streammeta.brokers.rocketmq.key_index_service import IndexSizes, IndexStatus
from streammeta.brokers.rocketmq.message_file import FileSizes
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient
from streammeta.client.errors import NodeFencedError
from streammeta.storage.errors import BucketNotFoundError
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectStore
from tests.brokers.rocketmq_messages import STORED_MS, LocalMessages, key, message
from tests.kit.real_cluster import raise_level, running_cluster
from tests.kit.waiting import until

pytestmark = pytest.mark.process

_NODES = itertools.count(1)
CONFIG = StoreConfig(
    files=FileSizes(4000, 20 * 50),
    index=IndexSizes(50, 500),
    pool=PoolConfig(linger_s=0.02, record_bytes=700),
    groups=GroupCommit(count=30),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path_factory.mktemp("rocketmq"), 1) as found:
        raise_level(found, 3)
        yield found


@dataclass
class Broker:
    """Processes of one broker, one after the other; each fences those before."""

    cluster: LocalCluster
    node_id: int
    exits: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(
        self, config: StoreConfig = CONFIG, now_ms: int = STORED_MS + 100
    ) -> QueueStore:
        client = await self.exits.enter_async_context(
            await StreamClient.open(
                self.cluster.endpoints, self.cluster.store_uri, node_id=self.node_id
            )
        )
        store = await QueueStore.open(client, "c", f"b{self.node_id}", config, lambda: now_ms)
        self.exits.push_async_callback(store.close)
        return store


@pytest.fixture
async def broker(cluster: LocalCluster) -> AsyncIterator[Broker]:
    """Yield a broker of its own node, and end all its processes."""
    found = Broker(cluster, next(_NODES))
    async with found.exits:
        yield found


async def dispatched(store: QueueStore, ends: Mapping[tuple[str, int], int]) -> None:
    """Dispatch all messages of local queues, side by side."""

    async def one(topic: str, queue_id: int, end: int) -> None:
        local = LocalMessages(topic, queue_id, end)
        dispatcher = await store.dispatcher(topic, queue_id, local)
        dispatcher.local = local
        while dispatcher.file.commit_offset < end:
            await dispatcher.dispatch(force=True)

    await asyncio.gather(*(one(*queue, end) for queue, end in ends.items()))


async def assert_readable(store: QueueStore, topic: str, queue_id: int, end: int) -> None:
    """Assert that every message is there, under its physical offset."""
    file = store.files[metadata.Queue(store.broker, topic, queue_id)]
    found = await file.read(0, end)
    assert [decoded.queue_offset for decoded in found] == list(range(end))
    place = 0
    for one in found:
        assert one.data == with_physical_offset(message(topic, queue_id, one.queue_offset), place)
        place += len(one.data)


async def test_queues_share_commits_and_a_restart_has_all_of_it(broker: Broker) -> None:
    ends = {(topic, queue_id): 100 for topic in ("T", "U") for queue_id in range(4)}
    store = await broker.start()
    await dispatched(store, ends)
    writes = sum(2 * (end // 30) for end in ends.values())
    assert store.pool.groups < writes / 2
    assert store.pool.held_bytes == 0
    await store.checkpoint()
    await dispatched(store, dict.fromkeys(ends, 150))
    again = await broker.start()
    for topic, queue_id in ends:
        await assert_readable(again, topic, queue_id, 150)
    times = (STORED_MS + 100, STORED_MS + 149)
    queue = metadata.Queue(again.broker, "T", 0)
    segments = again.keeper.table.segments_of(queue.path, SegmentType.COMMIT_LOG)
    assert len(segments) > 3
    assert segments[0].begin_ms == STORED_MS
    assert times[0] < segments[-1].begin_ms <= segments[-1].end_ms == times[1]
    assert await again.fetcher.offset_at(queue, STORED_MS + 120) == 120
    with pytest.raises(NodeFencedError):
        await dispatched(store, {("T", 0): 151})


@pytest.mark.parametrize("saved", [0, 40])
async def test_keys_are_found_after_a_restart_whether_they_were_saved_or_not(
    broker: Broker, saved: int
) -> None:
    store = await broker.start()
    if saved:
        await dispatched(store, {("K", 0): saved})
        await store.checkpoint()
    await dispatched(store, {("K", 0): 90})
    again = await broker.start()
    for place in (0, 39, 41, 89):
        found = await again.fetcher.query("K", key(place), 99)
        offsets = sorted(decode_message(data).queue_offset for data in found)
        assert offsets == list(range(place // 10 * 10, place // 10 * 10 + 10))


async def test_full_index_files_are_uploaded_and_asked(broker: Broker) -> None:
    store = await broker.start()
    await dispatched(store, {("I", 0): 400})
    await store.checkpoint()
    assert store.index.statuses[0] is IndexStatus.UPLOAD
    again = await broker.start()
    assert again.index.statuses[0] is IndexStatus.UPLOAD
    assert len(await again.fetcher.query("I", key(0), 99)) == 10


async def test_expired_segments_and_destroyed_topics_leave_no_stream(broker: Broker) -> None:
    store = await broker.start()
    await dispatched(store, {("E", 0): 100, ("F", 0): 100})
    before = await _streams(store)
    await store.expire(STORED_MS + 50)
    queue = metadata.Queue(store.broker, "E", 0)
    first = await store.files[queue].first_offset()
    assert 0 < first <= 50
    assert (await store.fetcher.fetch(queue, 0, 1)).status is FetchStatus.OFFSET_TOO_SMALL
    await store.destroy("F")
    again = await broker.start()
    assert list(again.files) == [queue]
    assert await again.files[queue].first_offset() == first
    assert await _streams(again) < before
    named = {stream.stream_id for stream in again.keeper.streams.values()}
    assert await _streams(again) == named


async def test_a_store_deletes_by_itself_what_a_topic_reserves_no_more(broker: Broker) -> None:
    store = await broker.start()
    await store.set_reserve_time("X", 1)
    with pytest.raises(ValueError, match="hours"):
        await store.set_reserve_time("Y", 0)
    await dispatched(store, {("X", 0): 60, ("Y", 0): 60})
    short, default = (metadata.Queue(store.broker, topic, 0) for topic in ("X", "Y"))

    later = await broker.start(now_ms=STORED_MS + 20 * metadata.HOUR_MS)
    with pytest.raises(MetadataFencedError):
        await store.expiry.expire_due()
    await until(lambda: not later.files[short].commit_log.segments, "the expiry")
    await assert_readable(later, "Y", 0, 60)
    await dispatched(later, {("X", 0): 70})
    found = await later.files[short].read(0, 99)
    assert [message.queue_offset for message in found] == list(range(60, 70))

    # A clock that is a year ahead moves the store's time by a day.
    ahead = await broker.start(now_ms=STORED_MS + 9000 * metadata.HOUR_MS)
    await ahead.expiry.expire_due()
    await assert_readable(ahead, "Y", 0, 60)
    assert [ahead.files[queue].commit_offset for queue in (short, default)] == [70, 60]
    named = {stream.stream_id for stream in ahead.keeper.streams.values()}
    assert await _streams(ahead) == named


async def test_segments_in_chunks_of_a_bucket(broker: Broker, tmp_path: Path) -> None:
    """They take no stream, are merged by the store, and outlive restarts and other backends."""
    bucket = f"file://{tmp_path}/chunks"
    chunks = replace(CONFIG, index=IndexSizes(50, 100), backend=Backend.CHUNKS, bucket=bucket)

    keys = open_object_store(bucket)
    with pytest.raises(BucketNotFoundError):
        await broker.start(chunks)
    (tmp_path / "chunks").mkdir()
    store = await broker.start(chunks)
    await dispatched(store, {("B", 0): 120, ("B", 1): 60})
    await store.checkpoint()
    assert store.index.statuses[0] is IndexStatus.UPLOAD
    assert await _streams(store) == set()

    again = await broker.start(chunks)
    await until(lambda: _unmerged(again, keys) == set(), "the merges")
    for queue_id, end in ((0, 120), (1, 60)):
        await assert_readable(again, "B", queue_id, end)
    assert len(await again.fetcher.query("B", key(0), 99)) == 20
    table = await render(again, "c", tmp_path / "view")
    assert sum(segment.kind is SegmentType.COMMIT_LOG for segment in table.segments.values()) > 3
    with pytest.raises((NodeFencedError, MetadataFencedError)):
        await dispatched(store, {("B", 0): 121})  # leaves a message without an item

    with pytest.raises(ValueError, match=store.broker):
        await broker.start(CONFIG)
    streams = await broker.start(replace(chunks, backend=Backend.STREAMS))
    await dispatched(streams, {("B", 0): 240})
    found = await streams.files[metadata.Queue(streams.broker, "B", 0)].read(0, 240)
    assert [decode_message(decoded.data).queue_offset for decoded in found] == list(range(240))
    assert await _streams(streams)

    await streams.destroy("B")
    assert {info.key for info in keys.list_objects() if "/B/" in info.key} == set()
    assert not any(place[0].endswith("/B/0") for place in streams.keeper.streams)


def _unmerged(store: QueueStore, bucket: ObjectStore) -> set[str]:
    """Return the prefixes of sealed segments that have chunks."""
    sealed = {
        chunk_prefix("c", segment.path, segment.kind, segment.base_offset)
        for segment in store.keeper.table.segments.values()
        if segment.status is metadata.SegmentStatus.SEALED and segment.kind is not SegmentType.INDEX
    }
    return sealed & {info.key.partition("/chunk/")[0] for info in bucket.list_objects()}


async def _streams(store: QueueStore) -> set[int]:
    tag = f"c/{store.broker}"
    described = store.client.controllers.describe_streams()
    return {stream.stream_id async for stream in described if stream.tags.get(TAG) == tag}


async def test_a_stream_that_no_key_names_is_deleted_and_a_segment_without_one_forgotten(
    broker: Broker,
) -> None:
    store = await broker.start()
    await dispatched(store, {("S", 0): 60})
    queue = metadata.Queue(store.broker, "S", 0)
    (stray,) = await store.client.create_streams([{TAG: f"c/{store.broker}"}])
    (await store.client.open_streams([stray])).require_all()
    head = store.files[queue].commit_log.segments[0]
    await head.storage.destroy()  # and dies before the key is deleted
    again = await broker.start()
    assert stray not in await _streams(again)
    log = again.files[queue].commit_log
    assert log.segments[0].base_offset == head.commit_offset
    first = await again.files[queue].first_offset()
    assert first > 0
    found = await again.files[queue].read(first, 99)
    assert [decoded.queue_offset for decoded in found] == list(range(first, 60))


async def test_the_view_has_the_peers_files(broker: Broker, tmp_path: Path) -> None:
    store = await broker.start()
    await dispatched(store, {("V", 0): 120})
    table = await render(store, "c", tmp_path / "view")
    with pytest.raises(FileExistsError):
        await render(store, "c", tmp_path / "view")
    text = (tmp_path / "view" / metadata.METADATA_FILE).read_text()
    assert metadata.MetadataTable.decode(text) == table
    path = metadata.Queue(store.broker, "V", 0).path
    log = b""
    for segment in table.segments_of(path, SegmentType.COMMIT_LOG):
        file = tmp_path / "view/files" / segment_path("c", path, segment.kind, segment.base_offset)
        assert file.stat().st_size == segment.size
        log += file.read_bytes()
    place, wanted = 0, b""
    for offset in range(120):
        wanted += with_physical_offset(message("V", 0, offset), place)
        place = len(wanted)
    assert log == wanted


async def test_compaction_merges_the_objects_of_a_segment(broker: Broker) -> None:
    config = StoreConfig(pool=CONFIG.pool, groups=GroupCommit(count=10))
    store = await broker.start(config)
    await dispatched(store, {("C", 0): 200, ("D", 0): 200})
    report = await store.client.compact()
    assert not any(node_report.failures for node_report in report.set_objects)
    assert any(node_report.groups for node_report in report.set_objects)
    for topic in ("C", "D"):
        await assert_readable(store, topic, 0, 200)


async def test_a_segment_that_is_refused_holds_no_other_and_goes_on(broker: Broker) -> None:
    ends = dict.fromkeys((("R", 0), ("R", 1), ("R", 2)), 20)
    store = await broker.start()
    await dispatched(store, ends)
    broken = store.files[metadata.Queue(store.broker, "R", 1)]
    tail = broken.commit_log.segments[-1]
    stream = store.keeper.streams[broken.queue.path, tail.kind, tail.base_offset]
    closed = await store.client.session.close_streams({stream.stream_id: stream.epoch})
    closed.require_all()
    commits = []
    for queue_id in range(3):
        dispatcher = await store.dispatcher("R", queue_id, LocalMessages("R", queue_id, 40))
        dispatcher.local = LocalMessages("R", queue_id, 22)
        commits.append(dispatcher.dispatch(force=True))
    before = store.pool.groups
    await asyncio.gather(*commits)
    assert store.pool.groups > before
    found = [store.files[metadata.Queue(store.broker, "R", one)].commit_offset for one in range(3)]
    assert found == [22, 20, 22]
    await dispatched(store, dict.fromkeys(ends, 40))
    for _, queue_id in ends:
        await assert_readable(store, "R", queue_id, 40)


async def test_writes_wait_while_the_pool_is_full(broker: Broker) -> None:
    bounds = PoolConfig(linger_s=0.01, group_bytes=2000, max_bytes=6000)
    store = await broker.start(StoreConfig(CONFIG.files, CONFIG.index, bounds, CONFIG.groups))
    held = []

    async def watch() -> None:
        while True:
            held.append(store.pool.held_bytes)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    ends = {("W", queue_id): 60 for queue_id in range(8)}
    await dispatched(store, ends)
    watching.cancel()
    assert 2000 < max(held) <= 6000
    for _, queue_id in ends:
        await assert_readable(store, "W", queue_id, 60)
