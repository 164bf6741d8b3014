"""Segments of flat files: chunks, writers that meet, and the settlement of failed commits."""

from __future__ import annotations

import pytest

from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.chunked_segment import ChunkedSegment, ChunkLayoutError
from streammeta.brokers.rocketmq.segments.file_segment import (
    AppendResult,
    FileSegment,
    SegmentReadError,
)
from streammeta.brokers.rocketmq.segments.storage import SegmentWriteError, TimeBounds
from streammeta.storage.errors import StoreUnavailableError
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.memory_stores import MemorySegment

_TIMES = (1, 1)


# ---- chunks ----


@pytest.mark.parametrize("second", [4, 6], ids=["overlap", "gap"])
async def test_chunks_that_do_not_follow_each_other_are_refused(second: int) -> None:
    store = MemoryObjectStore()
    store.put("s/chunk/chunk-0", b"hello")
    store.put(f"s/chunk/chunk-{second}", b"world")
    with pytest.raises(ChunkLayoutError, match=f"{second}.*5"):
        await ChunkedSegment.open(store, "s")


async def test_chunks_of_others_are_not_taken_for_those_of_the_segment() -> None:
    store = MemoryObjectStore()
    store.put("s/chunk/chunk-0", b"hello")
    store.put("s/chunk/chunk-5.tmp", b"unfinished")
    store.put("s2/chunk/chunk-5", b"another segment")
    segment = await ChunkedSegment.open(store, "s")
    assert await segment.read(0, 100) == b"hello"
    await segment.destroy()
    assert sorted(store.objects()) == ["s/chunk/chunk-5.tmp", "s2/chunk/chunk-5"]


async def test_a_chunk_of_another_writer_stays_and_is_not_taken_for_the_own_one() -> None:
    store = MemoryObjectStore()
    first, second = await ChunkedSegment.open(store, "s"), await ChunkedSegment.open(store, "s")
    await first.write(0, b"first", _TIMES)
    behind = FileSegment(SegmentType.CONSUME_QUEUE, 0, second)
    behind.append(b"other", 1)  # as many bytes: their number alone says nothing
    assert [await behind.commit() for _ in range(3)] == [False] * 3
    assert behind.commit_position == 0
    assert store.objects() == {"s/chunk/chunk-0": b"first"}


async def test_a_chunk_that_a_write_without_an_answer_has_stored_is_its_own() -> None:
    store = MemoryObjectStore()
    segment = await ChunkedSegment.open(store, "s")
    store.put("s/chunk/chunk-0", b"first")
    await segment.write(0, b"first", _TIMES)
    assert segment.end == 5


async def test_a_store_that_can_not_be_listed_is_not_empty() -> None:
    store = MemoryObjectStore()
    segment = await ChunkedSegment.open(store, "s")
    await segment.write(0, b"first", _TIMES)
    store.fail_next("list_objects", StoreUnavailableError("down"), times=2)
    assert await segment.size() is None
    with pytest.raises(StoreUnavailableError):
        await ChunkedSegment.open(store, "s")


async def test_a_sealed_segment_takes_nothing_and_says_where_it_ends() -> None:
    segment = await ChunkedSegment.open(MemoryObjectStore(), "s")
    await segment.write(0, b"first", _TIMES)
    with pytest.raises(SegmentWriteError, match="expected 5") as illegal:
        await segment.write(4, b"x", _TIMES)
    await segment.seal()
    with pytest.raises(SegmentWriteError, match="sealed") as sealed:
        await segment.write(5, b"x", _TIMES)
    assert (illegal.value.position, sealed.value.position) == (5, 5)
    assert await segment.size() == 5


# ---- commits of a segment ----


class FailingSegment(MemorySegment):
    """A backend whose next writes store `kept` bytes, fail, and give `size_said` for their size."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = 0
        self.kept = 0
        self.size_said: int | None = -1

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        if not self.fails:
            await super().write(position, data, times)
            return
        self.fails -= 1
        await super().write(position, data[: self.kept], times)
        raise SegmentWriteError("down")

    async def size(self) -> int | None:
        return await super().size() if self.size_said == -1 else self.size_said


def _segment() -> tuple[FileSegment, FailingSegment]:
    storage = FailingSegment()
    return FileSegment(SegmentType.CONSUME_QUEUE, 0, storage), storage


@pytest.mark.parametrize("kept", [0, 7, 20])
async def test_a_commit_that_failed_goes_on_where_the_backend_is(kept: int) -> None:
    segment, storage = _segment()
    segment.append(b"0123456789" * 2, 1)
    storage.fails, storage.kept = 1, kept
    assert not await segment.commit()
    segment.append(b"later", 2)
    while segment.needs_commit:
        assert await segment.commit()
    assert bytes(storage.data) == b"0123456789" * 2 + b"later"
    assert segment.commit_position == segment.append_position == 25


@pytest.mark.parametrize("said", [None, 19, 41, 10**6])
async def test_a_size_that_can_not_be_is_not_believed(said: int | None) -> None:
    segment, storage = _segment()
    segment.append(b"x" * 20, 1)
    assert await segment.commit()
    segment.append(b"y" * 20, 1)
    storage.fails, storage.size_said = 1, said
    assert not await segment.commit()
    assert not await segment.commit()
    assert segment.commit_position == 20
    storage.size_said = -1
    assert await segment.commit()
    assert bytes(storage.data) == b"x" * 20 + b"y" * 20


async def test_a_backend_at_another_position_is_not_a_commit() -> None:
    segment, storage = _segment()
    segment.append(b"x" * 20, 1)
    storage.data += b"foreign"
    assert not await segment.commit()
    assert segment.commit_position == 0
    assert bytes(storage.data) == b"foreign"


async def test_only_committed_bytes_are_read() -> None:
    segment, _ = _segment()
    segment.append(b"x" * 20, 1)
    for position, length in ((0, 1), (-1, 1), (20, 1)):
        with pytest.raises(SegmentReadError):
            await segment.read(position, length)
    assert await segment.commit()
    segment.append(b"y", 1)
    assert await segment.read(15, 100) == b"x" * 5
    for position, length in ((0, 0), (-1, 1), (20, 1)):
        with pytest.raises(SegmentReadError):
            await segment.read(position, length)


async def test_a_commit_under_way_is_not_joined() -> None:
    segment, storage = _segment()
    segment.append(b"x", 1)
    assert segment.hold()
    assert not await segment.commit()
    segment.release()
    assert await segment.commit()
    assert bytes(storage.data) == b"x"


async def test_limits_of_a_segment() -> None:
    segment = FileSegment(SegmentType.CONSUME_QUEUE, 0, MemorySegment(), 10, max_buffers=2)
    assert segment.append(b"x" * 11, 1) is AppendResult.FILE_FULL
    assert segment.append(b"x" * 4, 5) is AppendResult.SUCCESS
    assert segment.append(b"x" * 6, 3) is AppendResult.SUCCESS
    assert (segment.min_timestamp_ms, segment.max_timestamp_ms) == (5, 5)
    assert segment.append(b"", 1) is AppendResult.BUFFER_FULL
    segment.close()
    assert segment.append(b"", 1) is AppendResult.FILE_CLOSED
    assert not await segment.commit()
