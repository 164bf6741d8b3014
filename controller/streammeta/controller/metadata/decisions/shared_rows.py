"""Rules for shared rows: batches whose offsets are assigned by the commit.

A row names a shared stream and a number of records. The rows of one stream in a commit stand or
fall together, so that they become one range of the object, which begins at the stream's end. A row
of an idempotent producer is checked against the producer's newest batches (see `producers`), after
Kafka's ProducerStateManager.

A repeat of the commit finds the offsets in the ranges of its object. Once a compaction has replaced
the object, only the offsets of idempotent producers are still known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api.answers import SharedRowResults
from streammeta.controller.metadata.decisions.left_out_rows import LeftOutRows
from streammeta.controller.metadata.registries.object_queries import ObjectQueries
from streammeta.controller.metadata.registries.producers import Producers
from streammeta.controller.metadata.registries.stream_heads import DELETED
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables.values import (
    EMPTY_COLUMN,
    INT64_MAX,
    Int64Column,
    Mask,
    RangeColumns,
    SharedRowColumns,
    StreamState,
)
from streammeta.controller.records import record as rec

_SHARED = int(StreamState.SHARED)
_DUPLICATE = int(ErrorCode.DUPLICATE_BATCH)
_NOT_EXIST = int(ErrorCode.STREAM_NOT_EXIST)
_UNKNOWN = int(ErrorCode.OFFSETS_UNKNOWN)


@dataclass(frozen=True, slots=True, eq=False)
class SharedVerdicts:
    """One `ErrorCode` number and one offset per row.

    The offset is the row's own if it is accepted, the first batch's if it is a duplicate, otherwise
    -1.
    """

    errors: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    start_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)

    def results(self, committed_at_ms: int) -> SharedRowResults | None:
        """Return the results of a commit at that time, or None without rows."""
        if not len(self.errors):
            return None
        is_committed = np.count_nonzero(self.errors) < len(self.errors)
        return SharedRowResults(
            errors=self.errors,
            start_offset=self.start_offset,
            committed_at_ms=committed_at_ms if is_committed else -1,
        )

    def rejected(self) -> SharedRowResults | None:
        """Return the results if the commit is rejected: only duplicates have an offset."""
        if not len(self.errors):
            return None
        offsets = np.where(self.errors == _DUPLICATE, self.start_offset, -1)
        return SharedRowResults(errors=self.errors, start_offset=offsets)


class SharedRows:
    """Decisions on the shared rows of commits, against the current state."""

    def __init__(
        self, streams: Streams, objects: ObjectQueries, producers: Producers, left_out: LeftOutRows
    ) -> None:
        self._streams = streams
        self._objects = objects
        self._producers = producers
        self._left_out = left_out

    def check(self, rows: SharedRowColumns) -> SharedVerdicts:
        """Return the verdicts on the rows of a new commit."""
        if not len(rows):
            return SharedVerdicts()
        firsts = _first_rows(rows.stream_id)
        errors, offsets = self._check_rows(rows, firsts)
        _reject_together(errors, firsts)

        accepted = errors == 0
        offsets[accepted] = self._next_offsets(rows, firsts)[accepted]
        return SharedVerdicts(errors, offsets)

    def _check_rows(
        self, rows: SharedRowColumns, firsts: Int64Column
    ) -> tuple[Int64Column, Int64Column]:
        """Return each row's own error, and the first offset of each duplicate, otherwise -1."""
        count = len(rows)
        errors, offsets = np.zeros(count, dtype=np.int64), np.full(count, -1)
        if len(rows.producer_id):
            errors, offsets = self._producers.check(
                rows.stream_id,
                rows.producer_id,
                rows.producer_epoch,
                rows.first_sequence,
                rows.record_count,
            )

        issued = rows.stream_id < len(self._streams)
        states = np.full(count, DELETED)
        states[issued] = self._streams.states(rows.stream_id[issued])
        if np.count_nonzero(states == _SHARED) < count:
            errors[states != _SHARED] = ErrorCode.STREAM_KIND_MISMATCH
            errors[states == DELETED] = _NOT_EXIST
            offsets[states != _SHARED] = -1

        lengths = np.add.reduceat(rows.record_count, firsts)
        is_live = states[firsts] == _SHARED
        ends = self._streams.end_offsets(np.where(is_live, rows.stream_id[firsts], 0))
        # A stream has 2**63 offsets. The sum of the rows does not overflow (see `validation`).
        is_full = is_live & (ends > INT64_MAX - lengths)
        if np.count_nonzero(is_full):
            errors[np.repeat(is_full, _counts(firsts, count))] = ErrorCode.OFFSET_NOT_MATCHED
        return errors, offsets

    def _next_offsets(self, rows: SharedRowColumns, firsts: Int64Column) -> Int64Column:
        """Return the offset of each row if all rows of its stream are appended."""
        ids = rows.stream_id
        issued = np.where(ids < len(self._streams), ids, 0)
        return _place(rows, firsts, self._streams.end_offsets(issued[firsts]))

    # ---- repeats ----

    def first_results(
        self, rows: SharedRowColumns, object_id: int, digest: int
    ) -> SharedRowResults | None:
        """Return the results that a commit of this object got the first time.

        Rows of rejected streams get today's verdicts: since then another object may have committed
        them.
        """
        if not len(rows):
            return None
        firsts, count = _first_rows(rows.stream_id), len(rows)
        counts = _counts(firsts, count)
        streams = rows.stream_id[firsts]
        bases, time_ms = self._bases(object_id, streams)

        errors, offsets = self._check_rows(rows, firsts)
        held = np.repeat(bases >= 0, counts)
        # The object is gone, or never contained the stream. Only the latter is remembered.
        owners = np.full(len(streams), object_id)
        was_left_out = self._left_out.verdicts(digest, owners, streams) != 0
        is_forgotten = ~held & np.repeat((time_ms < 0) & ~was_left_out, counts)

        is_known = is_forgotten & (errors == _DUPLICATE)
        errors[is_forgotten] = _UNKNOWN
        errors[held | is_known] = 0
        offsets = np.where(held, _place(rows, firsts, bases), offsets)
        # What would be accepted today was not accepted then.
        is_new = ~held & ~is_forgotten & (errors == 0)
        errors[is_new] = ErrorCode.STREAM_ROWS_REJECTED
        return SharedRowResults(errors=errors, start_offset=offsets, committed_at_ms=time_ms)

    def _bases(self, object_id: int, streams: Int64Column) -> tuple[Int64Column, int]:
        """Return where each stream begins in an object, -1 if nowhere, and its commit time.

        The time is -1 if the object's ranges are no longer known.
        """
        bases = np.full(len(streams), -1)
        row = self._objects.row(object_id)
        time_ms = self._objects.commit_time_ms(row) if row >= 0 else -1
        if time_ms >= 0:
            spans = self._objects.spans(np.array([row]))
            at = np.minimum(spans.stream_id.searchsorted(streams), len(spans) - 1)
            found = spans.stream_id[at] == streams if len(spans) else np.zeros(0, dtype=np.bool_)
            bases[found] = spans.start_offset[at[found]]
        return bases, time_ms


def failed_rows(rows: SharedRowColumns, error: ErrorCode) -> SharedRowResults | None:
    """Return the results of a commit that failed before its rows were examined."""
    if not len(rows):
        return None
    count = len(rows)
    return SharedRowResults(errors=np.full(count, int(error)), start_offset=np.full(count, -1))


def leaves_out(results: SharedRowResults) -> bool:
    """Return whether a commit with these results, once made, left rows out."""
    return bool(((results.errors != 0) & (results.errors != _UNKNOWN)).any())


def ranges_of(rows: SharedRowColumns, verdicts: SharedVerdicts) -> RangeColumns:
    """Return one range for each stream whose rows are accepted."""
    accepted = verdicts.errors == 0
    ids, starts = rows.stream_id[accepted], verdicts.start_offset[accepted]
    if not len(ids):
        return RangeColumns()
    firsts = _first_rows(ids)
    lengths = np.add.reduceat(rows.record_count[accepted], firsts)
    return RangeColumns(
        stream_id=ids[firsts], start_offset=starts[firsts], end_offset=starts[firsts] + lengths
    )


def merge_ranges(owned: RangeColumns, shared: RangeColumns) -> RangeColumns:
    """Return the ranges of both kinds of streams, sorted by stream, without epochs."""
    if not len(shared.stream_id):
        return owned
    columns = {
        name: np.concatenate((getattr(owned, name), getattr(shared, name)))
        for name in ("stream_id", "start_offset", "end_offset")
    }
    order = np.argsort(columns["stream_id"])
    return RangeColumns(**{name: values[order] for name, values in columns.items()})


def producer_records(
    rows: SharedRowColumns, verdicts: SharedVerdicts, now_ms: int
) -> Iterator[rec.ProducerBatchesCommitted]:
    """Yield the record of the accepted batches of idempotent producers, if there are any."""
    if not len(rows.producer_id):
        return
    chosen = (verdicts.errors == 0) & (rows.producer_id >= 0)
    if np.count_nonzero(chosen):
        yield rec.ProducerBatchesCommitted(
            committed_at_ms=now_ms,
            stream_id=rows.stream_id[chosen],
            producer_id=rows.producer_id[chosen],
            producer_epoch=rows.producer_epoch[chosen],
            first_sequence=rows.first_sequence[chosen],
            record_count=rows.record_count[chosen],
            start_offset=verdicts.start_offset[chosen],
        )


def left_out_streams(
    rows: SharedRowColumns, verdicts: SharedVerdicts
) -> tuple[Int64Column, Int64Column]:
    """Return the streams whose rows are rejected, and the first error of each."""
    bad = verdicts.errors != 0
    ids, errors = rows.stream_id[bad], verdicts.errors[bad]
    if not len(ids):
        return EMPTY_COLUMN, EMPTY_COLUMN
    firsts = _first_rows(ids)
    return ids[firsts], errors[firsts]


def _first_rows(stream_id: Int64Column) -> Int64Column:
    """Return the first row of each stream. Rows are sorted by stream."""
    is_first = np.ones(len(stream_id), dtype=np.bool_)
    is_first[1:] = stream_id[1:] != stream_id[:-1]
    return np.flatnonzero(is_first)


def _counts(firsts: Int64Column, count: int) -> Int64Column:
    return np.diff(firsts, append=count)


def _reject_together(errors: Int64Column, firsts: Int64Column) -> None:
    """Reject the valid rows of each stream that has an invalid one."""
    if not np.count_nonzero(errors):
        return
    is_bad: Mask = np.add.reduceat(errors != 0, firsts, dtype=np.int64) > 0
    rows = np.repeat(is_bad, _counts(firsts, len(errors)))
    errors[rows & (errors == 0)] = ErrorCode.STREAM_ROWS_REJECTED


def _place(rows: SharedRowColumns, firsts: Int64Column, bases: Int64Column) -> Int64Column:
    """Return the offset of each row if the rows of a stream follow each other from its base."""
    counts = _counts(firsts, len(rows))
    before = np.cumsum(rows.record_count) - rows.record_count
    offsets: Int64Column = np.repeat(bases - before[firsts], counts) + before
    return offsets
