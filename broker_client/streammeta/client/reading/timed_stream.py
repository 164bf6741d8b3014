"""Look-ups by time on the cluster: lists the objects of a stream and opens those that matter."""

from __future__ import annotations

from streammeta.client.object_source import Block, ObjectSource
from streammeta.client.reading.block_fetcher import BlockFetcher
from streammeta.client.reading.block_planner import BlockPlanner
from streammeta.client.reading.lookups import Lookups, StreamQuery, check_located
from streammeta.client.reading.range_reader import VANISHED_RETRIES, id_of, pause_or_raise
from streammeta.client.reading.slice_cache import SliceCache
from streammeta.client.reading.stream_slices import Slice, slice_of
from streammeta.client.reading.time_lookup import (
    Bound,
    OffsetAtTime,
    TimestampOf,
    find_lower,
    find_upper,
)
from streammeta.storage.errors import ObjectNotFoundError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import common_pb2

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
            if answer.error == common_pb2.OFFSET_NOT_MATCHED and answer.stream_start_offset > at:
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
