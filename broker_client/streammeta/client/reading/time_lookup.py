"""Offset lookup by time: time bounds of objects first, then the records inside one.

A `lower` lookup finds the first record that is not older than a time, an `upper` lookup the last
one that is not newer, as in RIP-65 of RocketMQ. The caller's function gives the time of a record.
If the times of a stream ascend, equal ones allowed, the answer is exact. If they do not, it is a
place where they cross the time asked for: the record found fits, the one before it (`lower`) or
behind it (`upper`) does not; and none is found if the last record (`lower`) or the first one
(`upper`) of the stream does not fit, though others may.

Objects whose bounds exclude an answer are never opened. Bounds are outer ones, of all streams of an
object, and may be missing: the other objects, and the blocks of one, are searched by bisection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from streammeta.client.object_source import Block, ObjectSource
from streammeta.client.reading.block_fetcher import BlockFetcher
from streammeta.client.reading.lookups import (
    UNKNOWN_TIME,
    Lookups,
    Slice,
    StreamQuery,
    check_located,
    slice_of,
)
from streammeta.client.reading.range_reader import (
    VANISHED_RETRIES,
    BlockPlanner,
    id_of,
    pause_or_raise,
)
from streammeta.client.reading.slice_cache import SliceCache
from streammeta.storage.errors import ObjectNotFoundError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import common_pb2

_KAFKA_HEADER_SIZE = 61
_KAFKA_MAGIC_AT = 16
_KAFKA_MAGIC = 2
_KAFKA_MAX_TIMESTAMP_AT = 35
_KAFKA_TIMESTAMP = struct.Struct(">q")

Bound: TypeAlias = Literal["lower", "upper"]
TimestampOf: TypeAlias = Callable[[RecordBatch], int]


@dataclass(frozen=True, slots=True)
class OffsetAtTime:
    """What a look-up found: an offset, and the time of the record there, in ms.

    A `lower` one gives the first offset of the record, an `upper` one its last. `timestamp_ms` is
    None if no record fits: then a `lower` look-up gives the end of the stream, where the next
    record will be, and an `upper` one the offset before the stream's first, which may be -1. So
    the records of times `[a, b]` are `[lower(a).offset, upper(b).offset + 1)` in any case.
    """

    offset: int
    timestamp_ms: int | None


def kafka_timestamp(record: RecordBatch) -> int:
    """Return the largest timestamp of a Kafka record batch of format 2, as its header has it.

    Raises `ValueError` if the payload is none.
    """
    payload = record.payload
    magic = payload[_KAFKA_MAGIC_AT] if len(payload) >= _KAFKA_HEADER_SIZE else None
    if magic != _KAFKA_MAGIC:
        raise ValueError(
            f"record of stream {record.stream_id} at offset {record.base_offset} has"
            f" {len(payload)} bytes with magic {magic}, wanted a Kafka record batch of format 2"
        )
    (timestamp,) = _KAFKA_TIMESTAMP.unpack_from(payload, _KAFKA_MAX_TIMESTAMP_AT)
    return int(timestamp)


class TimedObjects(Protocol):
    """Where a search gets what it looks at."""

    async def blocks_of(self, piece: Slice) -> list[Block]:
        """List the blocks of the stream in an object, at least one."""

    async def records_of(self, block: Block) -> list[RecordBatch]:
        """Read the visible records of a block, at least one."""


async def find_lower(
    objects: TimedObjects, slices: Sequence[Slice], timestamp_ms: int, timestamp_of: TimestampOf
) -> RecordBatch | None:
    """Find the first record in `slices`, which are in offset order, that is not older."""
    candidates = [
        one for one in slices
        if one.max_timestamp_ms == UNKNOWN_TIME or one.max_timestamp_ms >= timestamp_ms
    ]  # fmt: skip
    search = _Search(objects, lambda record: timestamp_of(record) >= timestamp_ms, forward=True)
    return await search.first_in(candidates)


async def find_upper(
    objects: TimedObjects, slices: Sequence[Slice], timestamp_ms: int, timestamp_of: TimestampOf
) -> RecordBatch | None:
    """Find the last record in `slices`, which are in offset order, that is not newer."""
    candidates = [
        one for one in reversed(slices)
        if one.min_timestamp_ms == UNKNOWN_TIME or one.min_timestamp_ms <= timestamp_ms
    ]  # fmt: skip
    search = _Search(objects, lambda record: timestamp_of(record) <= timestamp_ms, forward=False)
    return await search.first_in(candidates)


class _Search:
    """Searches for the first record that fits, seen forward or backward through the stream.

    It takes what is seen later to fit if anything before it does, and so looks at few objects and
    blocks. Whatever the times are, what is seen just before the record found does not fit.
    """

    def __init__(
        self, objects: TimedObjects, fits: Callable[[RecordBatch], bool], *, forward: bool
    ) -> None:
        self._objects = objects
        self._fits = fits
        self._step = 1 if forward else -1

    async def first_in(self, slices: Sequence[Slice]) -> RecordBatch | None:
        """Look near the front first, at ever larger distances, then between two objects by halves.

        The bounds of objects have excluded most of what lies before the answer.
        """
        low, high, distance = -1, len(slices), 1
        found: RecordBatch | None = None
        while found is None and low < len(slices) - 1:
            high = min(low + distance, len(slices) - 1)
            found = await self._first_in_object(slices[high])
            if found is None:
                low, distance = high, distance * 2
        while found is not None and high - low > 1:
            middle = (low + high) // 2
            earlier = await self._first_in_object(slices[middle])
            if earlier is None:
                low = middle
            else:
                high, found = middle, earlier
        return found

    async def _first_in_object(self, piece: Slice) -> RecordBatch | None:
        """Find the first record that fits; None if the one seen last doesn't."""
        blocks = (await self._objects.blocks_of(piece))[:: self._step]
        if not self._fits((await self._records(blocks[-1]))[-1]):
            return None
        first = (await self._records(blocks[0]))[0]
        if self._fits(first):
            return first
        low, high = 0, len(blocks)
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits((await self._records(blocks[middle]))[0]):
                high = middle
            else:
                low = middle
        for record in await self._records(blocks[low]):
            if self._fits(record):
                return record
        return (await self._records(blocks[high]))[0]

    async def _records(self, block: Block) -> list[RecordBatch]:
        return (await self._objects.records_of(block))[:: self._step]


OBJECTS_PER_PAGE = 5_000


class TimedStreams:
    """Finds offsets of streams by time; asks the map anew for each look-up."""

    def __init__(
        self,
        namespace: str,
        lookups: Lookups,
        source: ObjectSource,
        fetcher: BlockFetcher,
        slices: SliceCache,
    ) -> None:
        self._namespace = namespace
        self._lookups = lookups
        self._source = source
        self._fetcher = fetcher
        self._slices = slices

    async def find(
        self, stream_id: int, timestamp_ms: int, bound: Bound, timestamp_of: TimestampOf
    ) -> OffsetAtTime:
        """Find the first record not older than a time (`lower`), or the last one not newer."""
        for attempt in range(VANISHED_RETRIES + 1):
            try:
                return await self._find_once(stream_id, timestamp_ms, bound, timestamp_of)
            except ObjectNotFoundError as error:
                object_id = id_of(error, self._namespace)
                self._slices.forget(stream_id)
                self._source.forget(object_id)
                self._fetcher.forget(object_id)
                await pause_or_raise(error, stream_id, attempt, self._namespace)
        raise AssertionError("the last attempt returns or raises")

    async def _find_once(
        self, stream_id: int, timestamp_ms: int, bound: Bound, timestamp_of: TimestampOf
    ) -> OffsetAtTime:
        slices, start, end = await self._objects_of(stream_id)
        objects = _StreamObjects(stream_id, start, self._source, self._fetcher)
        if bound == "lower":
            found = await find_lower(objects, slices, timestamp_ms, timestamp_of)
            if found is None:
                return OffsetAtTime(end, None)
            return OffsetAtTime(max(start, found.base_offset), timestamp_of(found))
        found = await find_upper(objects, slices, timestamp_ms, timestamp_of)
        if found is None:
            return OffsetAtTime(start - 1, None)
        return OffsetAtTime(found.end_offset - 1, timestamp_of(found))

    async def _objects_of(self, stream_id: int) -> tuple[list[Slice], int, int]:
        """List what holds the stream, in offset order, with its first offset and its end."""
        slices: list[Slice] = []
        first = at = 0
        while True:
            query = StreamQuery(stream_id, at, limit=OBJECTS_PER_PAGE)
            answer = await self._lookups.ask(query)
            if (
                answer.error == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED
                and answer.stream_start_offset > at
            ):
                first = at = answer.stream_start_offset  # what was listed is trimmed by now
                slices.clear()
                continue
            check_located(query, answer)
            first = max(first, answer.stream_start_offset)
            slices.extend(slice_of(piece) for piece in answer.objects)
            if answer.lost_end_offset > at:
                at = answer.lost_end_offset
            elif answer.objects and answer.objects[-1].end_offset < answer.stream_end_offset:
                at = answer.objects[-1].end_offset
            else:
                return slices, first, slices[-1].end_offset if slices else at


class _StreamObjects:
    """The objects of one stream, without what lies before its first visible offset."""

    def __init__(
        self, stream_id: int, start: int, source: ObjectSource, fetcher: BlockFetcher
    ) -> None:
        self._stream_id = stream_id
        self._start = start
        self._planner = BlockPlanner(source, with_small_objects=True)
        self._fetcher = fetcher

    async def blocks_of(self, piece: Slice) -> list[Block]:
        """List the blocks of the stream in an object, at least one."""
        start = max(self._start, piece.start_offset)
        return await self._planner.find(
            StreamQuery(self._stream_id, start, piece.end_offset), [piece]
        )

    async def records_of(self, block: Block) -> list[RecordBatch]:
        """Read the visible records of a block, at least one."""
        records = await self._fetcher.look_at(block)
        return [record for record in records if record.end_offset > self._start]
