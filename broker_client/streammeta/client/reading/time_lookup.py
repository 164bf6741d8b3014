"""Offset lookup by time: time bounds of objects first, then the records inside one.

A `lower` lookup finds the first record that is not older than a time, an `upper` lookup the last
one that is not newer, as in RIP-65 of RocketMQ. The caller's function returns the time of a record.
If the times of a stream ascend, equal ones allowed, the answer is exact. If they do not, it is a
place where they cross the requested time: the found record fits, the one before it (`lower`) or
after it (`upper`) does not. No record is found if the last record (`lower`) or the first one
(`upper`) of the stream does not fit, though others may.

Objects whose bounds exclude an answer are never opened. Bounds cover all streams of an object and
may be missing. The other objects, and the blocks of an object, are searched by bisection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from streammeta.client.reading.block_fetcher import BlockFetcher
from streammeta.client.reading.lookups import UNKNOWN_TIME, Lookups, Slice, StreamQuery
from streammeta.client.reading.object_source import Block, ObjectSource
from streammeta.client.reading.range_reader import BlockPlanner, RangeReader
from streammeta.storage.errors import ObjectNotFoundError
from streammeta.storage.object_format.record import RecordBatch

_KAFKA_HEADER_SIZE = 61
_KAFKA_MAGIC_AT = 16
_KAFKA_MAGIC = 2
_KAFKA_MAX_TIMESTAMP_AT = 35
_KAFKA_TIMESTAMP = struct.Struct(">q")

Bound: TypeAlias = Literal["lower", "upper"]
TimestampOf: TypeAlias = Callable[[RecordBatch], int]


@dataclass(frozen=True, slots=True)
class OffsetAtTime:
    """Result of a lookup: an offset, and the time of its record in ms.

    A `lower` lookup returns the first offset of the record, an `upper` one its last.
    `timestamp_ms` is None if no record fits. Then a `lower` lookup returns the end of the stream,
    the offset of the next record, and an `upper` one the offset before the stream's first, which
    may be -1. So `[lower(a).offset, upper(b).offset + 1)` always has the records of times `[a, b]`.
    """

    offset: int
    timestamp_ms: int | None


def kafka_timestamp(record: RecordBatch) -> int:
    """Return the largest timestamp of a Kafka record batch of format 2, from its header.

    Raises `ValueError` for any other payload.
    """
    payload = record.payload
    magic = payload[_KAFKA_MAGIC_AT] if len(payload) >= _KAFKA_HEADER_SIZE else None
    if magic != _KAFKA_MAGIC:
        raise ValueError(
            f"record of stream {record.stream_id} at offset {record.base_offset} has"
            f" {len(payload)} bytes with magic {magic}, expected a Kafka record batch of format 2"
        )
    (timestamp,) = _KAFKA_TIMESTAMP.unpack_from(payload, _KAFKA_MAX_TIMESTAMP_AT)
    return int(timestamp)


class TimedObjects(Protocol):
    """Source of the blocks and records of a search."""

    async def blocks_of(self, piece: Slice) -> list[Block]:
        """List the blocks of the stream in an object, at least one."""

    async def records_of(self, block: Block) -> list[RecordBatch]:
        """Read the visible records of a block, at least one."""


async def find_record(
    objects: TimedObjects,
    slices: Sequence[Slice],
    timestamp_ms: int,
    bound: Bound,
    timestamp_of: TimestampOf,
) -> RecordBatch | None:
    """Find the first record in `slices` that is not older (`lower`), or the last not newer.

    `slices` are in offset order.
    """
    if bound == "lower":
        search = _Search(objects, lambda record: timestamp_of(record) >= timestamp_ms, step=1)
        newest = ((piece, piece.max_timestamp_ms) for piece in slices)
        # Bounds cover whole objects, so a candidate may still have no fitting record.
        candidates = [piece for piece, ms in newest if ms == UNKNOWN_TIME or ms >= timestamp_ms]
    else:
        search = _Search(objects, lambda record: timestamp_of(record) <= timestamp_ms, step=-1)
        oldest = ((piece, piece.min_timestamp_ms) for piece in reversed(slices))
        candidates = [piece for piece, ms in oldest if ms == UNKNOWN_TIME or ms <= timestamp_ms]
    return await search.first_in(candidates)


class _Search:
    """Searches for the first record that fits, forward or backward through the stream.

    It assumes that records after a fitting one fit too, and so reads few objects and blocks. For
    any times, the record just before the result does not fit.
    """

    def __init__(
        self, objects: TimedObjects, fits: Callable[[RecordBatch], bool], step: int
    ) -> None:
        self._objects = objects
        self._fits = fits
        self._step = step

    async def first_in(self, slices: Sequence[Slice]) -> RecordBatch | None:
        """Search at growing distances from the front, then by bisection between two objects.

        The bounds of objects have excluded most records before the answer.
        """
        low, high, distance = -1, len(slices), 1
        found: RecordBatch | None = None
        while found is None and low < len(slices) - 1:
            # The distance doubles: an answer near the front costs few objects, and a far one only a
            # logarithm of their number.
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
        """Find the first record that fits, None if the last one doesn't."""
        # In the direction of the search, so one algorithm serves both bounds.
        blocks = (await self._objects.blocks_of(piece))[:: self._step]
        # The last record decides for the object: if it does not fit, no earlier one is assumed to.
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
        # No record of the lower block fits, so the answer is the first one of the next block.
        return (await self._records(blocks[high]))[0]

    async def _records(self, block: Block) -> list[RecordBatch]:
        return (await self._objects.records_of(block))[:: self._step]


OBJECTS_PER_PAGE = 5_000


@dataclass(eq=False)
class TimedStreams:
    """Finds offsets of streams by time. Each search looks the stream up again."""

    _lookups: Lookups
    _source: ObjectSource
    _fetcher: BlockFetcher
    _ranges: RangeReader

    async def find(
        self, stream_id: int, timestamp_ms: int, bound: Bound, timestamp_of: TimestampOf
    ) -> OffsetAtTime:
        """Find the first record not older than a time (`lower`), or the last one not newer."""
        # Objects may be replaced by a compaction between the lookup and the read.
        attempt = 0
        while True:
            try:
                return await self._find_once(stream_id, timestamp_ms, bound, timestamp_of)
            except ObjectNotFoundError as error:
                await self._ranges.look_again(error, stream_id, attempt)
            attempt += 1

    async def _find_once(
        self, stream_id: int, timestamp_ms: int, bound: Bound, timestamp_of: TimestampOf
    ) -> OffsetAtTime:
        stream = (await self._lookups.list_all([stream_id], OBJECTS_PER_PAGE))[stream_id]
        start = stream.start_offset
        objects = _StreamObjects(stream_id, start, self._source, self._fetcher)
        found = await find_record(objects, stream.slices, timestamp_ms, bound, timestamp_of)
        if found is None:
            return OffsetAtTime(stream.end_offset if bound == "lower" else start - 1, None)
        # The record may begin below the first visible offset.
        offset = max(start, found.base_offset) if bound == "lower" else found.end_offset - 1
        return OffsetAtTime(offset, timestamp_of(found))


class _StreamObjects:
    """Objects of one stream, from its first visible offset on."""

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
