"""Slice cache: cached lookups of streams, kept current by watched changes.

Owns the answers of lookups within a limit, and applies watched changes to them. A cached answer is
used while the watch is healthy, or for a limited time after its lookup. The end of a stream is
never answered from the cache. Changes of a stream wake the reads that wait for it.
"""

from __future__ import annotations

import time
from asyncio import Event
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from streammeta.client.config import ReaderStats
from streammeta.client.errors import RejectedError
from streammeta.client.reading.lookups import (
    Located,
    Lookups,
    Slice,
    StreamQuery,
    StreamSlices,
    check_located,
    located_of,
)
from streammeta.storage.object_format.object_key import ObjectKind
from streammeta.v1 import common_pb2, records_pb2

SLICES_PER_LOOKUP = 200
"""Slices per lookup."""

_KIND_MASK = 0b11
_CHANGES_KEPT = 1_000  # of one stream during a lookup of it

_Change: TypeAlias = Callable[[StreamSlices], bool]
"""Applies a change to a stream's slices. Returns whether they are still valid."""


class Freshness(Protocol):
    """Freshness of the watched changes, implemented by the metadata follower."""

    @property
    def caught_up_at(self) -> float:
        """Time of the clock when the changes last covered everything committed, in seconds."""

    def continuity(self, stream_id: int) -> int | None:
        """Return the number of the stream's unbroken sequence of changes, None without one."""

    def track(self, stream_id: int) -> None:
        """Follow a stream."""


@dataclass(slots=True)
class _Known:
    """Cached slices of a stream, and the time or the changes that confirm them."""

    slices: StreamSlices
    confirmed_at: float
    continuity: int | None


class SliceCache:
    """Caches at most `max_slices` slices, and uses them for at most `max_staleness_s` seconds.

    The time counts from the last confirmation by a lookup, or by a watch without lag.
    """

    def __init__(
        self,
        lookups: Lookups,
        stats: ReaderStats,
        max_slices: int,
        max_staleness_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookups = lookups
        self._stats = stats
        self._max_slices = max_slices
        self._max_staleness = max_staleness_s
        self._clock = clock
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._size = 0
        self._asking: defaultdict[int, list[list[_Change]]] = defaultdict(list)
        self._waiting: dict[int, set[Event]] = {}
        self._freshness: Freshness | None = None

    def follow(self, freshness: Freshness) -> None:
        """Use the watched changes from now on."""
        self._freshness = freshness

    @property
    def size(self) -> int:
        """Number of cached slices. A stream without any counts as one."""
        return self._size

    # ---- questions ----

    async def locate(self, stream_id: int, offset: int) -> Located:
        """Return the objects of a stream from `offset` on, cached or looked up.

        Raises `StreamNotFoundError`, `OffsetTrimmedError`, `ProtocolViolationError`.
        """
        cached = self.get(stream_id, offset)
        if cached is not None and cached.slices:
            self._stats.metadata_hits += 1
            return cached
        return await self._ask(stream_id, offset)

    def get(self, stream_id: int, offset: int) -> Located | None:
        """Return the usable cached slices, None if the stream is not cached.

        An answer without slices may be out of date.
        """
        known = self._known.get(stream_id)
        if known is None or not self._is_fresh(stream_id, known):
            return None
        # In the order of use: `_drop_oldest` takes the first one.
        self._known.move_to_end(stream_id)
        slices = known.slices
        run: list[Slice] = []
        # Trimmed offsets have no slices, and a lookup reports the trim.
        if offset >= slices.start_offset:
            run = slices.run_from(offset, SLICES_PER_LOOKUP)
        return Located(tuple(run), slices.start_offset, slices.end_offset)

    def ends_at(self, stream_id: int, offset: int) -> bool:
        """Return whether the stream is known to end at `offset`, and is followed."""
        known = self._known.get(stream_id)
        return (
            known is not None
            and self._freshness is not None
            and known.continuity is not None
            and known.continuity == self._freshness.continuity(stream_id)
            and known.slices.start_offset <= offset == known.slices.end_offset
        )

    def forget(self, stream_id: int) -> None:
        """Drop a stream. Its next read looks it up."""
        known = self._known.pop(stream_id, None)
        if known is not None:
            self._size -= _cost(known)

    def is_waited_for_by_others(self, stream_id: int) -> bool:
        """Return whether more than one read waits for changes of the stream."""
        return len(self._waiting.get(stream_id, ())) > 1

    @contextmanager
    def watch_changes(self, stream_id: int) -> Iterator[Event]:
        """Yield an event that every change of the stream sets, until the context ends."""
        # One event per waiting read, so that each can ignore earlier changes by itself.
        event = Event()
        self._waiting.setdefault(stream_id, set()).add(event)
        if self._freshness is not None:
            self._freshness.track(stream_id)
        try:
            yield event
        finally:
            waiting = self._waiting[stream_id]
            waiting.discard(event)
            if not waiting:
                del self._waiting[stream_id]

    async def _ask(self, stream_id: int, offset: int) -> Located:
        # Read before the lookup: changes after this moment are in `changes` or in the answer.
        continuity = None if self._freshness is None else self._freshness.continuity(stream_id)
        asked_at = self._clock()
        changes: list[_Change] = []
        self._asking[stream_id].append(changes)
        self._stats.lookups += 1
        try:
            query = StreamQuery(stream_id, offset, limit=SLICES_PER_LOOKUP)
            answer = await self._lookups.ask(query)
            check_located(query, answer)
        except RejectedError:
            self.forget(stream_id)
            raise
        finally:
            self._stop_asking(stream_id, changes)

        located = located_of(query, answer)
        self._learn(stream_id, located, _Known(_slices(located), asked_at, continuity), changes)
        return located

    def _stop_asking(self, stream_id: int, changes: list[_Change]) -> None:
        asking = self._asking[stream_id]
        asking[:] = [other for other in asking if other is not changes]
        if not asking:
            del self._asking[stream_id]

    def _learn(
        self, stream_id: int, located: Located, fresh: _Known, changes: list[_Change]
    ) -> None:
        """Cache an answer, after applying the changes that arrived during the lookup."""
        known = self._known.get(stream_id)
        if (
            known is not None
            and known.continuity is not None
            and known.continuity == fresh.continuity
            and len(known.slices) + len(fresh.slices) <= self._max_slices // 4
        ):
            known.slices.learn(located.slices, located.start_offset, located.end_offset)
            fresh = _Known(
                known.slices, min(known.confirmed_at, fresh.confirmed_at), known.continuity
            )

        self.forget(stream_id)
        if not all(change(fresh.slices) for change in changes):
            return
        self._known[stream_id] = fresh
        self._size += _cost(fresh)
        self._drop_oldest()
        if self._freshness is not None:
            self._freshness.track(stream_id)

    def _drop_oldest(self) -> None:
        while self._size > self._max_slices and self._known:
            self.forget(next(iter(self._known)))

    def _is_fresh(self, stream_id: int, known: _Known) -> bool:
        true_at = known.confirmed_at
        if (
            self._freshness is not None
            and known.continuity is not None
            and known.continuity == self._freshness.continuity(stream_id)
        ):
            true_at = max(true_at, self._freshness.caught_up_at)
        return self._clock() - true_at <= self._max_staleness

    # ---- changes ----

    def list_tracked(self) -> Collection[int]:
        """Return the streams to follow."""
        return self._known.keys() | self._waiting.keys() | self._asking.keys()

    def on_gap(self) -> None:
        """Drop the cache and wake all waiting reads, because changes were missed."""
        self._known.clear()
        self._size = 0
        for lookups in self._asking.values():
            for changes in lookups:
                changes.append(_invalidate_slices)
        for events in self._waiting.values():
            for event in events:
                event.set()

    def on_records(self, records: records_pb2.RecordSet) -> None:
        """Apply the changes of one log entry."""
        for record in records.records:
            match record.WhichOneof("kind"):
                case "stream_set_objects_committed":
                    self._add_stream_set_objects(record.stream_set_objects_committed)
                case "stream_objects_committed":
                    self._add_stream_objects(record.stream_objects_committed)
                case "streams_trimmed":
                    trimmed = record.streams_trimmed
                    for stream_id, start in _rows(trimmed.stream_id, trimmed.start_offset):
                        self._apply(stream_id, _trim_to(start))
                case "streams_closed":
                    self._close_streams(record.streams_closed)
                case "streams_deleted":
                    self._invalidate(record.streams_deleted.stream_id)
                # Abandoned offsets become a gap, which only a new lookup describes.
                case "uploads_abandoned":
                    self._invalidate(record.uploads_abandoned.stream_id)

    def _close_streams(self, record: records_pb2.StreamsClosedRecord) -> None:
        if not record.end_offset:  # the ends are unchanged
            return
        for stream_id, end in _rows(record.stream_id, record.end_offset):
            self._apply(stream_id, _close_at(end))

    def _add_stream_set_objects(self, record: records_pb2.StreamSetObjectsCommittedRecord) -> None:
        ranges = record.ranges
        rows = _rows(ranges.stream_id, ranges.start_offset, ranges.end_offset)
        at = 0
        kind = common_pb2.OBJECT_KIND_STREAM_SET
        facts = _facts(record)
        for (object_id, size, count), known in zip(
            _rows(record.object_id, record.object_size, record.range_count), facts, strict=True
        ):
            for stream_id, start, end in rows[at : at + count]:
                if self._matters(stream_id):
                    self._add(stream_id, Slice(object_id, kind, start, end, size, *known))
            at += count

    def _add_stream_objects(self, record: records_pb2.StreamObjectsCommittedRecord) -> None:
        rows = _rows(record.object_id, record.object_size, record.attributes)
        spans = _rows(record.stream_id, record.start_offset, record.end_offset)
        facts = _facts(record)
        for (object_id, size, word), (stream_id, *span), known in zip(
            rows, spans, facts, strict=True
        ):
            composite = word & _KIND_MASK == ObjectKind.COMPOSITE
            kind = common_pb2.OBJECT_KIND_COMPOSITE if composite else common_pb2.OBJECT_KIND_STREAM
            if self._matters(stream_id):
                self._add(stream_id, Slice(object_id, kind, span[0], span[1], size, *known))

    def _matters(self, stream_id: int) -> bool:
        # Most changes are of other streams, so slices are only built for streams in use.
        return stream_id in self._known or stream_id in self._waiting or stream_id in self._asking

    def _add(self, stream_id: int, slice_: Slice) -> None:
        self._apply(stream_id, lambda known: known.add_committed(slice_))

    def _invalidate(self, stream_ids: bytes) -> None:
        for (stream_id,) in _rows(stream_ids):
            self._apply(stream_id, _invalidate_slices)

    def _apply(self, stream_id: int, change: _Change) -> None:
        for changes in self._asking.get(stream_id, ()):
            # Too many changes during one lookup: the answer is used, but not cached.
            changes.append(change if len(changes) < _CHANGES_KEPT else _invalidate_slices)
        known = self._known.get(stream_id)
        if known is not None:
            self._size -= _cost(known)
            is_valid = change(known.slices)
            self._size += _cost(known)
            if not is_valid or len(known.slices) > self._max_slices // 4:
                self.forget(stream_id)
            self._drop_oldest()
        for event in self._waiting.get(stream_id, ()):
            event.set()


def _slices(located: Located) -> StreamSlices:
    slices = StreamSlices(located.start_offset, located.end_offset)
    slices.learn(located.slices, located.start_offset, located.end_offset)
    return slices


def _cost(known: _Known) -> int:
    return max(1, len(known.slices))


def _trim_to(start: int) -> _Change:
    return lambda known: known.trim(start)


def _close_at(end: int) -> _Change:
    return lambda known: known.close_at(end)


def _invalidate_slices(_: StreamSlices) -> bool:
    return False


def _rows(*columns: bytes) -> list[tuple[int, ...]]:
    """Decode columns of one record into rows."""
    numbers = (np.frombuffer(column, dtype="<i8").tolist() for column in columns)
    return list(zip(*numbers, strict=True))


def _facts(
    record: records_pb2.StreamSetObjectsCommittedRecord | records_pb2.StreamObjectsCommittedRecord,
) -> list[tuple[int, ...]]:
    """Decode time bounds and checksum of each object of a record. A column may be missing."""
    columns = (record.min_timestamp_ms, record.max_timestamp_ms, record.crc32c)
    # Leaders of older versions write no such columns.
    unknown = np.full(len(record.object_id) // 8, -1, dtype="<i8").tobytes()
    return _rows(*(column or unknown for column in columns))
