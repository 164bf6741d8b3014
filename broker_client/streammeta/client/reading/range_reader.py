"""One read: locate, find blocks, get them, check the join, read ahead of who goes on.

Owns what happens when the map or the store has changed meanwhile: an object that is gone makes it
forget what it knew and ask again, and only one that the map goes on listing is an error; offsets
that were given up are passed over. Knows nothing of waiting for what is not there yet.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.client.errors import MissingObjectError
from streammeta.client.object_source import ObjectSource
from streammeta.client.reading.block_fetcher import BlockFetcher
from streammeta.client.reading.block_planner import BlockPlanner
from streammeta.client.reading.cursors import Cursor, Cursors
from streammeta.client.reading.lookups import StreamQuery
from streammeta.client.reading.reader_stats import ReaderStats
from streammeta.client.reading.slice_cache import Located, SliceCache
from streammeta.storage.errors import ObjectNotFoundError
from streammeta.storage.object_format.index_block import UNLIMITED
from streammeta.storage.object_format.object_key import OwnKey, parse_key
from streammeta.storage.object_format.record import RecordBatch

VANISHED_RETRIES = 3
VANISHED_WAIT_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Record batches that follow each other, where to read on, and the stream's bounds.

    `start_offset` and `end_offset` are those of the stream as last heard of.
    """

    records: list[RecordBatch]
    next_offset: int
    start_offset: int
    end_offset: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of payload in all records."""
        return sum(len(record.payload) for record in self.records)


async def pause_or_raise(
    error: ObjectNotFoundError, stream_id: int, attempt: int, namespace: str
) -> None:
    """Wait before the map is asked again, unless that was done often enough."""
    if attempt < VANISHED_RETRIES:
        await asyncio.sleep(VANISHED_WAIT_S * 2**attempt)
        return
    raise MissingObjectError(error.key, id_of(error, namespace), stream_id) from error


def id_of(error: ObjectNotFoundError, namespace: str) -> int:
    """Return which object was not found; -1 if it is none of `namespace`."""
    parsed = parse_key(error.key, namespace)
    return parsed.object_id if isinstance(parsed, OwnKey) else -1


class RangeReader:
    """Reads ranges of streams; a read plans for at most `max_cost` bytes of memory."""

    def __init__(
        self,
        namespace: str,
        slices: SliceCache,
        source: ObjectSource,
        fetcher: BlockFetcher,
        cursors: Cursors,
        stats: ReaderStats,
        max_cost: int,
    ) -> None:
        self._namespace = namespace
        self._slices = slices
        self._source = source
        self._planner = BlockPlanner(source, with_small_objects=True)
        self._fetcher = fetcher
        self._cursors = cursors
        self._stats = stats
        self._max_cost = max_cost
        self._ahead: set[asyncio.Task[None]] = set()

    async def read(self, query: StreamQuery, max_bytes: int) -> Fetched:
        """Read the front of `[start, end)`: about `max_bytes` of payload, at least one batch.

        Nothing is returned where the stream has nothing yet. Raises `StreamNotFoundError`,
        `OffsetTrimmedError`, `CorruptObjectError`, `MissingObjectError`.
        """
        for attempt in range(VANISHED_RETRIES + 1):
            cursor = self._cursors.take(query.stream_id, query.start)
            try:
                return await self._read_once(query, max_bytes, cursor)
            except ObjectNotFoundError as error:
                self._stats.vanished_objects += 1
                self._forget(query.stream_id, id_of(error, self._namespace))
                await pause_or_raise(error, query.stream_id, attempt, self._namespace)
            finally:
                self._cursors.park(cursor)
        raise AssertionError("the last attempt returns or raises")

    async def locate(self, stream_id: int, offset: int, end: int) -> tuple[Located, int]:
        """Locate `offset`, or what follows if it is lost; also tell which offset that is."""
        located = await self._slices.locate(stream_id, offset)
        while located.lost_end_offset > offset and (end == UNLIMITED or offset < end):
            _log.warning(
                "stream %d [%d, %d) was given up by the node that owed it, and is passed over",
                stream_id,
                offset,
                located.lost_end_offset,
            )
            self._stats.lost_offsets += located.lost_end_offset - offset
            offset = located.lost_end_offset
            located = await self._slices.locate(stream_id, offset)
        return located, offset

    def close(self) -> None:
        """Stop reading ahead."""
        for task in self._ahead:
            task.cancel()

    async def _read_once(self, query: StreamQuery, max_bytes: int, cursor: Cursor) -> Fetched:
        located, start = await self.locate(query.stream_id, query.start, query.end)
        if query.end != UNLIMITED and start >= query.end:
            return Fetched([], start, located.start_offset, located.end_offset)
        wanted = StreamQuery(query.stream_id, start, query.end)
        blocks = await self._planner.find(wanted, located.slices, max_bytes, self._max_cost)
        if not blocks:
            return Fetched([], start, located.start_offset, located.end_offset)
        found, waited = await self._fetcher.read(blocks, cursor)
        by_block = [one.records for one in found]
        records = trimmed(by_block, wanted.start, wanted.end, max_bytes)
        next_offset = records[-1].end_offset if records else start
        keep = self._slices.is_waited_for_by_others(query.stream_id)
        self._fetcher.settle(cursor, found, next_offset, keep=keep)
        cursor.next_offset = next_offset
        if waited:
            self._cursors.note_missing(cursor)
        self._read_ahead(cursor)
        return Fetched(records, next_offset, located.start_offset, located.end_offset)

    def _read_ahead(self, cursor: Cursor) -> None:
        wanted = self._cursors.wanted_ahead(cursor)
        if not wanted or cursor.is_read_ahead:
            return
        cursor.is_read_ahead = True
        task = asyncio.create_task(self._fetch_ahead(cursor, wanted))
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)

    async def _fetch_ahead(self, cursor: Cursor, max_bytes: int) -> None:
        """Fetch what follows, as far as it is committed."""
        try:
            start = max(cursor.next_offset, cursor.ahead_offset)
            known = self._slices.remembered(cursor.stream_id, start)
            if known is None or start >= known.end_offset:
                return  # whoever gets there asks the map
            if not known.slices:
                known = await self._slices.locate(cursor.stream_id, start)
            query = StreamQuery(cursor.stream_id, start)
            blocks = await self._planner.find(query, known.slices, max_bytes, max_bytes * 8)
            await self._fetcher.read_ahead(blocks, cursor)
        except Exception as error:  # noqa: BLE001 - whoever reads on meets it himself
            _log.debug("stream %d could not be read ahead: %s", cursor.stream_id, error)
        finally:
            cursor.is_read_ahead = False

    def _forget(self, stream_id: int, object_id: int) -> None:
        self._slices.forget(stream_id)
        self._source.forget(object_id)
        self._fetcher.forget(object_id)


def trimmed(
    by_block: Sequence[Sequence[RecordBatch]], start: int, end: int, max_bytes: int
) -> list[RecordBatch]:
    """Keep the batches that overlap `[start, end)`, until `max_bytes` of payload are spent."""
    kept: list[RecordBatch] = []
    left = max_bytes
    for records in by_block:
        first = bisect_right(records, start, key=_end_offset)
        last = len(records)
        if end != UNLIMITED:
            last = bisect_left(records, end, key=_base_offset)
        for record in records[first:last]:
            if left <= 0:
                return kept
            kept.append(record)
            left -= len(record.payload)
    return kept


def _end_offset(record: RecordBatch) -> int:
    return record.end_offset


def _base_offset(record: RecordBatch) -> int:
    return record.base_offset
