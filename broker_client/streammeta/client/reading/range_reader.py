"""Range reads: locate, find blocks through indexes, fetch them, check continuity, prefetch.

Owns the check that indexes contain the offsets of the metadata, the limit on the memory of a plan,
and the retry after a change of metadata or store. A missing object invalidates the cached lookup.
It is an error only if a new lookup still lists it. Lost offsets are skipped. Does not wait for
future records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from streammeta.client.config import ReaderStats
from streammeta.client.errors import CorruptObjectError, MissingObjectError
from streammeta.client.reading.block_cache import Cursor, Cursors
from streammeta.client.reading.block_fetcher import BlockFetcher
from streammeta.client.reading.lookups import Located, Slice, StreamQuery
from streammeta.client.reading.object_source import Block, ObjectIndex, ObjectSource
from streammeta.client.reading.slice_cache import SliceCache
from streammeta.client.resources.resources import all_of
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import ObjectNotFoundError
from streammeta.storage.object_format.index_block import UNLIMITED
from streammeta.storage.object_format.object_key import OwnKey, parse_key
from streammeta.storage.object_format.record import RecordBatch

NO_BOUND = 1 << 62

_INDEXES_AT_ONCE = 8


def _payload_from(block: Block, offset: int) -> int:
    """Return the estimated payload of a block from an offset in it on, in bytes."""
    entry = block.entry
    return (
        entry.payload_size * (entry.end_offset - offset) // (entry.end_offset - entry.start_offset)
    )


class BlockPlanner:
    """Finds blocks through the indexes of `source`.

    With `with_small_objects` the bytes of small objects are fetched together with their indexes.
    """

    def __init__(self, source: ObjectSource, *, with_small_objects: bool = False) -> None:
        self._source = source
        self._with_small_objects = with_small_objects

    async def find(
        self,
        query: StreamQuery,
        slices: Sequence[Slice],
        max_bytes: int = NO_BOUND,
        max_cost: int = NO_BOUND,
    ) -> list[Block]:
        """List the blocks of `[start, end)` of a stream, or of its beginning.

        The list ends after `max_bytes` of payload or `max_cost` bytes of memory, but not before the
        first block. Raises `CorruptObjectError`, `streammeta.storage.errors.ObjectNotFoundError`.
        """
        blocks: list[Block] = []
        at, left, memory = query.start, max_bytes, max_cost
        # Indexes are fetched in growing groups: most reads need one, scans need many.
        done, ahead = 0, 1

        while done < len(slices):
            part = slices[done : done + ahead]
            indexes = await self._indexes(part, query.stream_id)
            for piece, index in zip(part, indexes, strict=True):
                if left <= 0 or (query.end != UNLIMITED and at >= query.end):
                    return blocks
                for block in self._blocks_of(query, piece, index, at, left):
                    memory -= block.cost
                    if blocks and (memory < 0 or left <= 0):
                        return blocks
                    blocks.append(block)
                    left -= _payload_from(block, at)
                    at = block.entry.end_offset
            done, ahead = done + ahead, min(ahead * 2, _INDEXES_AT_ONCE)

        return blocks

    def iterate_known(
        self, object_ids: Collection[int], query: StreamQuery, slices: Sequence[Slice], most: int
    ) -> Iterator[Block]:
        """Yield blocks of a stream in these objects, up to about `most` bytes of the stream.

        No index is fetched: objects without an index in memory are skipped. Raises
        `CorruptObjectError`.
        """
        for piece in slices:
            known = piece.object_id in object_ids
            index = self._source.cache.get(piece.object_id) if known else None
            if index is None:
                continue
            start = max(query.start, piece.start_offset)
            for block in self._blocks_of(query, piece, index, start, NO_BOUND):
                entry = block.entry
                offsets = entry.end_offset - entry.start_offset
                if (entry.start_offset - query.start) * entry.payload_size > most * offsets:
                    return
                yield block

    async def _indexes(self, slices: Sequence[Slice], stream_id: int) -> list[ObjectIndex]:
        return await all_of(
            self._source.index(piece, stream_id, with_small_objects=self._with_small_objects)
            for piece in slices
        )

    def _blocks_of(
        self, query: StreamQuery, piece: Slice, index: ObjectIndex, at: int, left: int
    ) -> list[Block]:
        """List the blocks of one object from offset `at` on."""
        end = piece.end_offset if query.end == UNLIMITED else min(query.end, piece.end_offset)
        if not index.fits(query.stream_id, piece.end_offset - piece.start_offset):
            has = f"its index counts {index.index.end_of(query.stream_id)} offsets from 0 on"
            raise self._mismatch(piece, query, has)
        blocks = index.find(query.stream_id, at, end, left, slice_start=piece.start_offset)
        for block in blocks:
            joins = block.entry.start_offset == at
            # Only the first block of a read may start before the requested offset.
            if not joins and (block is not blocks[0] or at > query.start):
                raise self._mismatch(piece, query, f"a block starts below offset {at}")
            at = block.entry.end_offset
            left -= block.entry.payload_size
        if at < end and left > 0:
            raise self._mismatch(piece, query, f"its index has no block at offset {at}")
        return blocks

    def _mismatch(self, piece: Slice, query: StreamQuery, found: str) -> CorruptObjectError:
        return CorruptObjectError(
            self._source.key(piece.object_id),
            piece.object_id,
            query.stream_id,
            f"{found}, but the metadata lists [{piece.start_offset}, {piece.end_offset}) in it",
        )


_VANISHED_RETRIES = 3
_VANISHED_WAITS = Backoff(first=0.05, longest=0.4, jitter=0.0)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Consecutive record batches, the offset of the next read, and the stream's bounds.

    `start_offset` and `end_offset` are the stream's at the last lookup.
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
    """Wait before another lookup, or raise `MissingObjectError` after enough of them."""
    if attempt < _VANISHED_RETRIES:
        await asyncio.sleep(_VANISHED_WAITS.wait(attempt))
        return
    raise MissingObjectError(error.key, _id_of(error, namespace), stream_id) from error


def _id_of(error: ObjectNotFoundError, namespace: str) -> int:
    """Return the id of the missing object, -1 if its key is not in `namespace`."""
    parsed = parse_key(error.key, namespace)
    return parsed.object_id if isinstance(parsed, OwnKey) else -1


@dataclass(eq=False)
class RangeReader:
    """Reads ranges of streams. A read plans for at most `max_cost` bytes of memory."""

    _namespace: str
    _slices: SliceCache
    _source: ObjectSource
    _fetcher: BlockFetcher
    _cursors: Cursors
    _stats: ReaderStats
    _max_cost: int
    _ahead: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._planner = BlockPlanner(self._source, with_small_objects=True)

    async def read(self, query: StreamQuery, max_bytes: int) -> Fetched:
        """Read the beginning of `[start, end)`: about `max_bytes` of payload, at least one batch.

        At the stream's end no batch is returned. Raises `StreamNotFoundError`,
        `OffsetTrimmedError`, `CorruptObjectError`, `MissingObjectError`.
        """
        attempt = 0
        while True:
            cursor = self._cursors.take(query.stream_id, query.start)
            try:
                return await self._read_once(query, max_bytes, cursor)
            except ObjectNotFoundError as error:
                await self.look_again(error, query.stream_id, attempt)
            finally:
                self._cursors.put_back(cursor)
            attempt += 1

    async def look_again(self, error: ObjectNotFoundError, stream_id: int, attempt: int) -> None:
        """Drop the cached lookup of a missing object, and pause before the next attempt.

        Raises `MissingObjectError` after the last attempt.
        """
        object_id = _id_of(error, self._namespace)
        self._stats.vanished_objects += 1
        # A compaction may have replaced the object since the lookup.
        self._slices.forget(stream_id)
        self._source.cache.forget(object_id)
        self._fetcher.forget(object_id)
        await pause_or_raise(error, stream_id, attempt, self._namespace)

    async def locate(self, stream_id: int, offset: int, end: int) -> tuple[Located, int]:
        """Locate `offset`, or the next one that is not lost. Also return that offset."""
        located = await self._slices.locate(stream_id, offset)
        while located.lost_end_offset > offset and (end == UNLIMITED or offset < end):
            _log.warning(
                "stream %d [%d, %d) was abandoned by its node and is skipped",
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
        # The plan is limited by memory as well as by payload, since records may be tiny.
        blocks = await self._planner.find(wanted, located.slices, max_bytes, self._max_cost)
        if not blocks:
            return Fetched([], start, located.start_offset, located.end_offset)
        continues = cursor.goes_on and blocks[-1].entry.end_offset < located.end_offset
        if continues and any(self._fetcher.is_absent(block) for block in blocks):
            for other, beside in self._find_neighbours(cursor, blocks):
                self._run_in_background(self._fetcher.read_beside(beside, other))

        found, waited = await self._fetcher.read(blocks, cursor)
        by_block = [read_block.records for read_block in found]
        records = select_batches(by_block, wanted.start, wanted.end, max_bytes)
        next_offset = records[-1].end_offset if records else start

        # Several tails of a stream read the same blocks one after the other.
        keep = self._slices.is_waited_for_by_others(query.stream_id)
        self._fetcher.settle(cursor, found, next_offset, keep=keep)
        # `put_back` files the cursor under this offset, where the next read looks for it.
        cursor.next_offset = next_offset
        if waited:
            self._cursors.note_missing(cursor)
        self._read_ahead(cursor)
        return Fetched(records, next_offset, located.start_offset, located.end_offset)

    def _read_ahead(self, cursor: Cursor) -> None:
        wanted = self._cursors.bytes_to_prefetch(cursor)
        if not wanted or cursor.is_read_ahead:
            return
        # One prefetch per reader at a time, or they would compete for the same blocks.
        cursor.is_read_ahead = True
        self._run_in_background(self._fetch_ahead(cursor, wanted))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)

    async def _fetch_ahead(self, cursor: Cursor, max_bytes: int) -> None:
        """Prefetch the blocks that follow, as far as they are committed."""
        try:
            start = max(cursor.next_offset, cursor.ahead_offset)
            known = self._slices.get(cursor.stream_id, start)
            if known is None or start >= known.end_offset:
                return  # the read that gets there looks it up

            if not known.slices:
                known = await self._slices.locate(cursor.stream_id, start)
            query = StreamQuery(cursor.stream_id, start)
            blocks = await self._planner.find(query, known.slices, max_bytes, max_bytes * 8)
            neighbours = self._find_neighbours(cursor, blocks)
            await all_of(
                (
                    self._fetcher.read_ahead(blocks, cursor),
                    *(self._fetcher.read_beside(near, other) for other, near in neighbours),
                )
            )
        except Exception as error:  # noqa: BLE001 - a read requests them again and gets the error
            _log.debug("stream %d could not be read ahead: %s", cursor.stream_id, error)
        finally:
            cursor.is_read_ahead = False

    def _find_neighbours(
        self, cursor: Cursor, blocks: Sequence[Block]
    ) -> list[tuple[Cursor, list[Block]]]:
        """List the blocks that other readers will soon want of the same objects.

        Streams written together are neighbours in an object: one request serves all readers.
        """
        others, most = self._cursors.others(cursor)
        found, object_ids = [], {block.object_id for block in blocks}
        for other in others:
            query = StreamQuery(other.stream_id, other.next_offset)
            known = self._slices.get(other.stream_id, other.next_offset)
            if known is not None:
                # Corruption is reported by the other stream's own read.
                with contextlib.suppress(CorruptObjectError):
                    near = self._planner.iterate_known(object_ids, query, known.slices, most)
                    found.append((other, list(near)))
        return found


def select_batches(
    by_block: Sequence[Sequence[RecordBatch]], start: int, end: int, max_bytes: int
) -> list[RecordBatch]:
    """Select the batches that overlap `[start, end)`, up to `max_bytes` of payload."""
    selected: list[RecordBatch] = []
    left = max_bytes
    for records in by_block:
        first = bisect_right(records, start, key=attrgetter("end_offset"))
        last = len(records)
        if end != UNLIMITED:
            last = bisect_left(records, end, key=attrgetter("base_offset"))
        for record in records[first:last]:
            # After a whole batch, as batches are not split.
            if left <= 0:
                return selected
            selected.append(record)
            left -= len(record.payload)
    return selected
