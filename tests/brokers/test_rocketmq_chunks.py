"""Segments as chunks in a bucket: merges, crashes, other writers, and reads meanwhile."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from streammeta.brokers.rocketmq.cluster.cluster_metadata import MetadataFencedError
from streammeta.brokers.rocketmq.cluster.cluster_store import Backend, StoreConfig
from streammeta.brokers.rocketmq.dispatch import Dispatcher
from streammeta.brokers.rocketmq.formats.message import queue_offset_of
from streammeta.brokers.rocketmq.formats.metadata import SegmentStatus
from streammeta.brokers.rocketmq.formats.names import SegmentType, chunk_prefix
from streammeta.brokers.rocketmq.message_file import FileSizes, MessageFile
from streammeta.brokers.rocketmq.segments import flat_file
from streammeta.brokers.rocketmq.segments.chunk_store import ChunkStore
from streammeta.brokers.rocketmq.segments.chunked_segment import Chunk, ChunkedSegment, part_groups
from streammeta.brokers.rocketmq.segments.file_segment import AppendResult, FileSegment
from streammeta.storage.errors import ObjectNotFoundError, StoreUnavailableError
from streammeta.storage.object_store.protocol.base import MAX_PARTS, MIN_PART_SIZE, Body, Tags
from tests.brokers.rocketmq_messages import DurableKeeper, Local, stored
from tests.conformance.rocketmq_files import NOW_MS, QUEUE, open_index
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.seeds import seeds
from tests.kit.waiting import until

SIZES = FileSizes(commit_log=490, consume_queue=20 * 4)
_TIMES = (1, 1)
_DOWN = StoreUnavailableError("told to fail")


@dataclass
class Process:
    """A process of a broker over a bucket; `crash` begins the next one."""

    bucket: MemoryObjectStore = field(default_factory=MemoryObjectStore)
    keeper: DurableKeeper = field(default_factory=DurableKeeper)

    def __post_init__(self) -> None:
        self.chunks = ChunkStore(self.bucket, self.keeper, "c", "broker", retry_s=(0.001, 0.01))
        place = flat_file.FlatFilePlace(self.chunks, self.keeper, lambda: NOW_MS)
        self.file = MessageFile(place, QUEUE, SIZES)

    async def open(self) -> MessageFile:
        await self.file.open()
        if not self.file.is_initialised:
            await self.file.init_offset(0)
        return self.file

    async def crash(self) -> Process:
        await self.chunks.close()
        after = Process(self.bucket, self.keeper.after_restart())
        await after.open()
        return after

    async def merge(self) -> None:
        """Let the store merge until no sealed segment has chunks."""
        self.chunks.start()
        await until(lambda: not self.chunks_of_sealed(), "the merges")

    def chunks_of_sealed(self) -> list[str]:
        """Return the keys of chunks of segments that are sealed."""
        sealed = tuple(
            chunk_prefix("c", *place) + "/chunk/"
            for place, noted in self.keeper.table.segments.items()
            if noted.status is SegmentStatus.SEALED
        )
        return [key for key in self.bucket.objects() if key.startswith(sealed)]


def next_of(file: MessageFile) -> bytes:
    """Return the message that follows; one is stored each millisecond."""
    return stored(file.append_offset, stored_ms=NOW_MS + file.append_offset)


async def append(file: MessageFile, count: int) -> None:
    for _ in range(count):
        assert await file.append(next_of(file), 0) is AppendResult.SUCCESS
        assert await file.commit()


async def begin_with(count: int) -> tuple[Process, MessageFile]:
    process = Process()
    file = await process.open()
    await append(file, count)
    return process, file


async def assert_whole(file: MessageFile, count: int) -> None:
    found: list[int] = []
    while messages := await file.read(len(found), 100):
        found += [queue_offset_of(message.data) for message in messages]
    assert found == list(range(count))


# ---- merges by the store ----


async def test_sealed_segments_are_merged_and_unsealed_ones_are_not() -> None:
    process = Process()
    file = await process.open()
    process.chunks.start()
    await append(file, 22)
    await until(lambda: not process.chunks_of_sealed(), "the merges")
    await assert_whole(file, 22)
    keys = sorted(process.bucket.objects())
    assert "99/c/broker/TopicTest/0/CONSUME_QUEUE/seg-0/segment/segment-0" in keys
    assert "99/c/broker/TopicTest/0/CONSUME_QUEUE/seg-400/chunk/chunk-20" in keys
    await process.chunks.close()


async def test_what_was_not_merged_is_merged_after_a_restart() -> None:
    process, _ = await begin_with(22)
    assert process.chunks_of_sealed()
    again = await process.crash()
    upload = process.bucket.start_multipart(chunk_prefix("c", QUEUE.path, SegmentType.INDEX, 0))
    await again.merge()
    assert upload not in process.bucket.list_multipart_uploads()
    await assert_whole(again.file, 22)
    await append(again.file, 3)
    await assert_whole(again.file, 25)
    await again.chunks.close()


async def test_a_full_segment_that_was_not_sealed_is_sealed_and_merged_at_start() -> None:
    process, _ = await begin_with(
        4
    )  # a full segment of items, and one of messages without room for another
    assert not process.chunks_of_sealed()
    again = await process.crash()
    closed = {
        file.kind: file.segments[0].closed
        for file in (again.file.commit_log, again.file.consume_queue)
    }
    assert closed == {SegmentType.COMMIT_LOG: True, SegmentType.CONSUME_QUEUE: True}
    await again.merge()
    merged = [key for key in process.bucket.objects() if key.endswith("segment-0")]
    assert len(merged) == 2
    await append(again.file, 1)
    await assert_whole(again.file, 5)
    await again.chunks.close()


async def test_a_segment_that_is_not_full_goes_on_after_a_restart() -> None:
    process, _ = await begin_with(2)
    again = await process.crash()
    await append(again.file, 1)
    assert [segment.base_offset for segment in again.file.consume_queue.segments] == [0]
    await assert_whole(again.file, 3)


async def test_merges_can_be_switched_off_and_are_made_up_for_later() -> None:
    process = Process()
    process.chunks = ChunkStore(process.bucket, process.keeper, "c", "broker", merges=False)
    place = flat_file.FlatFilePlace(process.chunks, process.keeper, lambda: NOW_MS)
    process.file = MessageFile(place, QUEUE, SIZES)
    process.chunks.start()
    await append(await process.open(), 9)
    await assert_whole(process.file, 9)
    assert not any(key.endswith("segment-0") for key in process.bucket.objects())

    again = await process.crash()
    await again.merge()
    await assert_whole(again.file, 9)
    await again.chunks.close()


async def test_a_merge_that_fails_is_repeated_and_holds_up_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process, _ = await begin_with(22)
    process.bucket.fail_next("complete_multipart", _DOWN, times=3)
    again = await process.crash()
    process.bucket.fail_next("list_objects", _DOWN)
    await again.merge()
    assert "merging chunks of broker broker failed, retrying in" in caplog.text
    await assert_whole(again.file, 22)
    await again.chunks.close()


async def test_a_merge_by_another_process_is_taken_over() -> None:
    process = Process()
    await append(await process.open(), 22)
    place = (QUEUE.path, SegmentType.CONSUME_QUEUE, 0)
    segment = process.chunks.segment(*place)
    process.bucket.fail_next("complete_multipart", _DOWN)
    with pytest.raises(StoreUnavailableError):
        await segment.merge()
    await (await ChunkedSegment.open(process.bucket, chunk_prefix("c", *place))).seal()
    with pytest.raises(ObjectNotFoundError):
        await segment.merge()
    await segment.merge()
    await assert_whole(process.file, 22)


async def test_expired_and_destroyed_segments_leave_no_object() -> None:
    process = Process()
    file = await process.open()
    process.chunks.start()
    await append(file, 22)
    await file.expire(NOW_MS + 9)
    first = await file.first_offset()
    assert first > 0
    found = await file.read(first, 99)
    assert [message.queue_offset for message in found] == list(range(first, 22))
    await file.destroy()
    await process.chunks.close()
    assert process.bucket.objects() == {}
    assert process.keeper.durable.segments == {}


async def test_a_bucket_that_lost_a_chunk_is_not_taken_for_a_shorter_queue() -> None:
    process, _ = await begin_with(2)
    key = chunk_prefix("c", QUEUE.path, SegmentType.CONSUME_QUEUE, 0) + "/chunk/chunk-20"
    process.bucket.delete_many([key])
    again = Process(process.bucket, process.keeper.after_restart())
    with pytest.raises(flat_file.SegmentCutError, match=r"20.*40"):
        await again.open()


async def test_a_bucket_that_does_not_answer_is_not_empty() -> None:
    process = Process()
    await append(await process.open(), 2)
    again = Process(process.bucket, process.keeper.after_restart())
    process.bucket.fail_next("list_objects", _DOWN)
    with pytest.raises(flat_file.SizeUnknownError):
        await again.open()


# ---- crashes ----


class Unreliable(MemoryObjectStore):
    """A bucket whose writes fail now and then, before or after they have happened."""

    rng = random.Random(0)
    fails = False

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        with self._unreliable():
            super().put(key, data, if_absent=if_absent, tags=tags)

    def complete_multipart(self, upload: Any, parts: Any) -> None:
        with self._unreliable():
            super().complete_multipart(upload, parts)

    def delete_many(self, keys: Any) -> Any:
        with self._unreliable():
            return super().delete_many(keys)

    def _unreliable(self) -> Any:
        return _Outcome(self.rng.random() if self.fails else 1.0)


class _Outcome:
    def __init__(self, chance: float) -> None:
        self._chance = chance

    def __enter__(self) -> None:
        if self._chance < 0.1:
            raise _DOWN

    def __exit__(self, *error: object) -> None:
        if self._chance < 0.2 and error == (None, None, None):
            raise _DOWN


@pytest.mark.parametrize("seed", seeds(3, slow=7))
async def test_no_failure_of_the_bucket_and_no_crash_loses_or_repeats_a_message(seed: int) -> None:
    rng = random.Random(seed)
    bucket = Unreliable()
    bucket.rng, bucket.fails = rng, True
    process = Process(bucket)
    await process.open()
    process.chunks.start()
    committed = 0
    for _ in range(60):
        file = process.file
        if file.append_offset == file.commit_offset:
            await file.append(next_of(file), 0)
        await file.commit()
        assert file.commit_offset >= committed
        committed = file.commit_offset
        await asyncio.sleep(0)
        if rng.random() < 0.15:
            await process.chunks.close()
            process = Process(bucket, process.keeper.after_restart())
            await process.open()
            process.chunks.start()
            assert process.file.commit_offset >= committed
            committed = process.file.commit_offset

    bucket.fails = False
    await until(lambda: not process.chunks_of_sealed(), "the merges")
    await assert_whole(process.file, committed)
    assert committed > 15
    await process.chunks.close()


# ---- one segment ----


async def _a_segment(
    store: MemoryObjectStore, sizes: tuple[int, ...] = (5, 6, 7)
) -> tuple[ChunkedSegment, bytes]:
    segment, wanted = await ChunkedSegment.open(store, "s"), b""
    for size in sizes:
        data = bytes([65 + size]) * size
        await segment.write(len(wanted), data, _TIMES)
        wanted += data
    return segment, wanted


async def test_reads_within_and_over_chunks() -> None:
    segment, wanted = await _a_segment(MemoryObjectStore(), (1, 5, 2, 9, 1))
    for start in range(len(wanted) + 1):
        for end in range(start, len(wanted) + 3):
            assert await segment.read(start, end - start) == wanted[start:end]


async def test_a_reader_follows_a_merge_by_another() -> None:
    store = MemoryObjectStore()
    merging, wanted = await _a_segment(store)
    reading = await ChunkedSegment.open(store, "s")
    await merging.seal()
    assert await reading.read(3, 10) == wanted[3:13]
    assert reading.is_sealed


async def test_chunks_that_are_not_deleted_after_a_merge_go_later() -> None:
    store = MemoryObjectStore()
    segment, wanted = await _a_segment(store)
    store.fail_next("delete_many", _DOWN, times=2)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await segment.seal()
    assert await segment.read(0, 99) == wanted
    store.fail_next("delete_many", _DOWN)
    again = await ChunkedSegment.open(store, "s")
    assert len(store.objects()) == 4
    assert await again.read(0, 99) == wanted
    await again.seal()
    assert list(store.objects()) == ["s/segment/segment-0"]


async def test_a_chunk_behind_the_merged_object_stays() -> None:
    """It is not in the merged object, so deleting it would lose it."""
    store = MemoryObjectStore()
    segment, wanted = await _a_segment(store)
    await segment.seal()
    store.put(f"s/chunk/chunk-{len(wanted)}", b"behind")
    store.put("s/chunk/chunk-0", wanted[:5])
    again = await ChunkedSegment.open(store, "s")
    assert sorted(store.objects()) == [f"s/chunk/chunk-{len(wanted)}", "s/segment/segment-0"]
    assert again.end == len(wanted)
    await again.destroy()
    assert store.objects() == {}


class Cutting(MemoryObjectStore):
    """A bucket that loses the last part of an upload."""

    def complete_multipart(self, upload: Any, parts: Any) -> None:
        super().complete_multipart(upload, parts)
        self.put(upload.key, self.get_range(upload.key)[:-1])


async def test_a_merged_object_of_another_size_replaces_no_chunk() -> None:
    store = Cutting()
    segment, wanted = await _a_segment(store)
    with pytest.raises(StoreUnavailableError, match=r"17.*18"):
        await segment.seal()
    assert len([key for key in store.objects() if "/chunk/" in key]) == 3
    assert await segment.read(0, 99) == wanted
    # Nor is it taken for the segment after a restart.
    again = await ChunkedSegment.open(store, segment._prefix)
    assert await again.read(0, 99) == wanted


class NoAnswer(MemoryObjectStore):
    """A bucket that stores `instead` of what is put, and does not answer."""

    instead: bytes | None = None

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        if self.instead is None:
            super().put(key, data, if_absent=if_absent, tags=tags)
            return
        instead, self.instead = self.instead, None
        if instead:
            super().put(key, instead)
        raise _DOWN


@pytest.mark.parametrize(
    ("instead", "committed"),
    [(b"mine", True), (b"", True), (b"hers", False)],
    ids=["stored", "lost", "another writer's"],
)
async def test_a_write_without_an_answer_counts_by_its_bytes(
    instead: bytes, committed: bool
) -> None:
    store = NoAnswer()
    store.instead = instead
    segment = FileSegment(SegmentType.CONSUME_QUEUE, 0, await ChunkedSegment.open(store, "s"))
    segment.append(b"mine", 1)
    assert not await segment.commit()
    assert [await segment.commit() for _ in range(2)] == [committed] * 2
    assert segment.commit_position == (4 if committed else 0)
    assert store.objects() == {"s/chunk/chunk-0": instead or b"mine"}


def test_an_object_has_no_more_parts_than_a_bucket_takes() -> None:
    def chunks(count: int, size: int) -> list[Chunk]:
        return [Chunk(str(number), number * size, size) for number in range(count)]

    for count, size in ((3 * MAX_PARTS, MIN_PART_SIZE), (MAX_PARTS, MIN_PART_SIZE), (7, 3 << 20)):
        groups = list(part_groups(chunks(count, size)))
        assert len(groups) <= MAX_PARTS
        assert sum(len(group) for group in groups) == count
        sizes = [sum(chunk.size for chunk in group) for group in groups]
        assert min(sizes[:-1]) >= MIN_PART_SIZE


# ---- options ----


def test_chunks_need_a_bucket() -> None:
    with pytest.raises(ValueError, match="bucket"):
        StoreConfig(backend=Backend.CHUNKS)


# ---- another process of the broker ----


@pytest.mark.parametrize("kind", ["log", "items too"])
async def test_a_chunk_of_a_replaced_process_holds_no_queue_up(kind: str) -> None:
    """Its write was under way when the next process took over."""
    process = Process()
    await append(await process.open(), 1)
    again = await process.crash()
    former = process.file
    await former.append(stored(1), 0)
    await (former.commit_log.commit() if kind == "log" else former.commit())

    index = await open_index(again.chunks)
    dispatcher = Dispatcher(Local(3), again.file, index, 1, lambda: NOW_MS)
    for _ in range(6):
        await dispatcher.dispatch(force=True)
    await assert_whole(again.file, 3)
    last = await Process(process.bucket, again.keeper.after_restart()).open()
    await assert_whole(last, 3)


async def test_a_process_that_knows_that_it_was_replaced_writes_no_chunk() -> None:
    process, file = await begin_with(1)
    before = process.bucket.objects()

    def replaced() -> None:
        raise MetadataFencedError("k")

    process.keeper.require_owner = replaced  # type: ignore[method-assign]
    await file.append(stored(1), 0)
    with pytest.raises(MetadataFencedError):
        await file.commit()
    assert process.bucket.objects() == before
