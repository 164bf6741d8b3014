"""An offset found by time is the right one, and is found with few requests."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.client import OffsetAtTime, ReaderConfig, kafka_timestamp
from streammeta.client.errors import StreamNotFoundError
from streammeta.client.parts import StreamReader
from streammeta.client.reading.lookups import Slice
from streammeta.client.reading.object_source import Block
from streammeta.client.reading.time_lookup import Bound, find_record
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1.common_pb2 import OBJECT_KIND_STREAM
from tests.kit.reader_world import BASE_TIME, Place, World, placed

BOUNDS: tuple[Bound, ...] = ("lower", "upper")
ItemT = TypeVar("ItemT")


class FakeObjects:
    """One stream, cut into objects and these into blocks of records with times."""

    def __init__(self, objects: Sequence[Sequence[Sequence[int]]]) -> None:
        self.slices: list[Slice] = []
        self.times: list[int] = []
        self.reads = 0
        self.opened = 0
        self._blocks: list[list[Block]] = []
        for object_id, blocks in enumerate(objects):
            start = len(self.times)
            held: list[Block] = []
            for block in blocks:
                first = len(self.times)
                self.times.extend(block)
                entry = IndexEntry(0, first, len(self.times), len(block), first, 10)
                held.append(Block(object_id, entry))
            self._blocks.append(held)
            inside = self.times[start:]
            bounds = (min(inside), max(inside))
            self.slices.append(
                Slice(object_id, OBJECT_KIND_STREAM, start, len(self.times), 100, *bounds)
            )

    def with_bounds(self, change: Callable[[int, int], tuple[int, int]]) -> list[Slice]:
        changed = ((one, change(one.min_timestamp_ms, one.max_timestamp_ms)) for one in self.slices)
        return [
            replace(object_id, min_timestamp_ms=low, max_timestamp_ms=high)
            for object_id, (low, high) in changed
        ]

    async def blocks_of(self, piece: Slice) -> list[Block]:
        self.opened += 1
        return list(self._blocks[piece.object_id])

    async def records_of(self, block: Block) -> list[RecordBatch]:
        self.reads += 1
        return [
            RecordBatch(0, 0, at, 1, b"")
            for at in range(block.entry.start_offset, block.entry.end_offset)
        ]

    async def found(self, slices: Sequence[Slice], time: int, bound: Bound) -> int | None:
        record = await find_record(
            self, slices, time, bound, lambda batch: self.times[batch.base_offset]
        )
        return None if record is None else record.base_offset


def slow(times: Sequence[int], time: int, bound: Bound) -> int | None:
    """Go through all records."""
    if bound == "lower":
        return next((at for at, record_time in enumerate(times) if record_time >= time), None)
    return next((at for at in reversed(range(len(times))) if times[at] <= time), None)


def is_crossing(times: Sequence[int], time: int, bound: Bound, found: int | None) -> bool:
    """Tell whether an answer is as documented for times that do not ascend."""
    if bound == "lower":
        if found is None:
            return not times or times[-1] < time
        return times[found] >= time and (found == 0 or times[found - 1] < time)
    if found is None:
        return not times or times[0] > time
    return times[found] <= time and (found == len(times) - 1 or times[found + 1] > time)


def cut(times: Sequence[int], rng: random.Random) -> list[list[list[int]]]:
    """Cut times into blocks and these into objects."""

    def pieces(items: Sequence[ItemT], most: int) -> Iterator[list[ItemT]]:
        left = iter(items)
        while piece := list(islice(left, rng.randint(1, most))):
            yield piece

    return list(pieces(list(pieces(times, 4)), 5))


def known_bounds(rng: random.Random, kind: str) -> Callable[[int, int], tuple[int, int]]:
    def change(low: int, high: int) -> tuple[int, int]:
        unknown = kind == "unknown" or (kind == "mixed" and rng.random() < 0.5)
        if unknown:
            return -1, -1
        slack = rng.randint(0, 20) if kind in ("outer", "mixed") else 0
        return max(0, low - slack), high + slack

    return change


@pytest.mark.parametrize("kind", ["exact", "outer", "unknown", "mixed"])
@given(
    times=st.lists(st.integers(0, 60), min_size=0, max_size=60),
    ascends=st.booleans(),
    time=st.integers(0, 62),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=120)
def test_what_is_found_is_what_a_search_of_all_records_finds(
    kind: str, times: list[int], ascends: bool, time: int, seed: int
) -> None:
    rng = random.Random(seed)
    wanted_times = sorted(times) if ascends else times
    objects = FakeObjects(cut(wanted_times, rng))
    slices = objects.with_bounds(known_bounds(rng, kind))
    for bound in BOUNDS:
        found = asyncio.run(objects.found(slices, time, bound))
        if ascends:
            assert found == slow(wanted_times, time, bound)
        assert is_crossing(wanted_times, time, bound, found)


@pytest.mark.parametrize("kind", ["exact", "unknown"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_few_objects_and_blocks_are_looked_at(kind: str, bound: Bound) -> None:
    times = range(0, 40_960, 1)
    blocks = [list(times[at : at + 10]) for at in range(0, 40_960, 10)]
    objects = FakeObjects([blocks[at : at + 16] for at in range(0, 4_096, 16)])
    slices = objects.with_bounds(known_bounds(random.Random(1), kind))
    for time in (-5, 0, 7, 20_000, 20_159, 20_160, 40_959, 50_000):
        objects.reads = objects.opened = 0
        assert asyncio.run(objects.found(slices, time, bound)) == slow(times, time, bound)
        assert objects.opened <= (1 if kind == "exact" else 18)
        assert objects.reads <= (8 if kind == "exact" else 50)


@asynccontextmanager
async def timed(
    times: Callable[[int], int], *, known: bool = True, objects: int = 20
) -> AsyncIterator[tuple[Place, World, StreamReader]]:
    """Yield streams 0 and 1 of `objects` x 10 records of two offsets each, in five blocks each."""
    async with placed() as place:
        world = place.world
        world.create(2)
        world.block_bytes, world.tells_times = 2_000, known
        world.time_of = lambda _stream, offset: BASE_TIME + times(offset)
        for _ in range(objects):
            world.commit({0: 10, 1: 10}, payload=1_000, span=2)
        config = ReaderConfig(block_cache_bytes=10_000)
        async with place.reader(config) as reader:
            yield place, world, reader


def time_of(world: World) -> Callable[[RecordBatch], int]:
    return lambda record: world.time_of(record.stream_id, record.base_offset)


@pytest.mark.parametrize("known", [True, False], ids=["known bounds", "unknown bounds"])
async def test_look_ups_in_a_cluster_find_the_same_with_few_requests(known: bool) -> None:
    async with timed(lambda offset: offset // 4 * 10, known=known) as (_, world, reader):
        stream = world.streams[1]
        times = [time_of(world)(record) for record in stream.records]
        for time in range(BASE_TIME - 10, BASE_TIME + 1_010, 35):
            for bound in BOUNDS:
                place = slow(times, time, bound)
                before = reader.stats.requests
                got = await reader.offset_for_timestamp(1, time, bound, timestamp_of=time_of(world))
                assert reader.stats.requests - before <= (7 if known else 30)
                if place is None:
                    end = stream.end if bound == "lower" else -1
                    assert got == OffsetAtTime(end, None)
                    continue
                record = stream.records[place]
                offset = record.base_offset if bound == "lower" else record.end_offset - 1
                assert got == OffsetAtTime(offset, times[place])


async def test_before_the_first_and_behind_the_last_record() -> None:
    async with timed(lambda offset: offset) as (_, world, reader):

        async def look(time: int, bound: Bound) -> OffsetAtTime:
            return await reader.offset_for_timestamp(0, time, bound, timestamp_of=time_of(world))

        first, last = BASE_TIME, BASE_TIME + 398
        assert await look(first - 1, "lower") == OffsetAtTime(0, first)
        assert await look(first, "lower") == OffsetAtTime(0, first)
        assert await look(last, "lower") == OffsetAtTime(398, last)
        assert await look(last + 1, "lower") == OffsetAtTime(400, None)
        assert await look(first - 1, "upper") == OffsetAtTime(-1, None)
        assert await look(first, "upper") == OffsetAtTime(1, first)
        assert await look(last + 1, "upper") == OffsetAtTime(399, last)
        world.trim(0, 103)  # inside a record, which is not the first of its block
        assert await look(first, "lower") == OffsetAtTime(103, BASE_TIME + 102)
        assert await look(first + 101, "upper") == OffsetAtTime(102, None)
        assert await look(first + 102, "upper") == OffsetAtTime(103, BASE_TIME + 102)
        world.trim(0, 400)
        assert await look(first, "lower") == OffsetAtTime(400, None)
        assert await look(last, "upper") == OffsetAtTime(399, None)
        with pytest.raises(StreamNotFoundError):
            await reader.offset_for_timestamp(9, 0, timestamp_of=time_of(world))
        with pytest.raises(ValueError, match=r"'lower'.*'upper'"):
            await reader.offset_for_timestamp(0, 0, "middle", timestamp_of=time_of(world))  # type: ignore[arg-type]


async def test_lost_offsets_and_objects_that_vanish_do_not_stop_a_look_up() -> None:
    async with timed(lambda offset: offset, objects=3) as (_, world, reader):
        world.close_beyond(0, 100)
        world.commit({0: 10, 1: 10}, payload=1_000, span=2)
        world.give_up(0, 60, 100)
        got = await reader.offset_for_timestamp(0, BASE_TIME + 61, timestamp_of=time_of(world))
        assert got == OffsetAtTime(100, BASE_TIME + 100)
        got = await reader.offset_for_timestamp(
            0, BASE_TIME + 99, "upper", timestamp_of=time_of(world)
        )
        assert got == OffsetAtTime(59, BASE_TIME + 58)

        def compact() -> None:
            world.once_answered = None
            world.compact(0, 0, 3)
            world.compact(1, 0, 3, composite=True)

        world.once_answered = compact
        got = await reader.offset_for_timestamp(0, BASE_TIME + 31, timestamp_of=time_of(world))
        assert got == OffsetAtTime(32, BASE_TIME + 32)
        got = await reader.offset_for_timestamp(1, BASE_TIME + 31, timestamp_of=time_of(world))
        assert got == OffsetAtTime(32, BASE_TIME + 32)


def test_the_time_of_a_kafka_batch_is_read_from_its_header() -> None:
    header = struct.pack(">qiibihiqq", 0, 49, 0, 2, 0, 0, 0, 1_111, 2_222) + bytes(18)
    assert len(header) == 61
    assert kafka_timestamp(RecordBatch(1, 0, 5, 1, header)) == 2_222
    for payload in (b"", header[:60], bytes(61)):
        with pytest.raises(ValueError, match="stream 1 "):
            kafka_timestamp(RecordBatch(1, 0, 5, 1, payload))
