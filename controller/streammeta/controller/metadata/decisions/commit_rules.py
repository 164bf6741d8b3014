"""Rules for commits: continuity of uploads, coverage of compactions, repeats.

A row of an upload continues its stream at the stream's end, or continues a pending upload left by a
fast close. A row below the stream's start, or of a deleted stream, is accepted without effect,
because its bytes are in the object anyway. A verdict is an `ErrorCode` number.

Compacted ranges must contain exactly the data of their sources. Coverage considers only live parts,
those above the start of an existing stream. Live ranges of objects never overlap, and neither do
outputs. A stream's ranges are therefore contiguous if their lengths add up to the distance from the
first start to the last end, and checking that needs no sorting.

An object remembers the digest of its commit, even after it was compacted away and, for a bounded
number of objects, after it was removed. `left_out_rows` remembers the verdicts of rows that commits
left out. An object without a known digest was committed by a version without digests, and its
repeats are accepted.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api.answers import CommitStreamSetObjectAnswer
from streammeta.controller.metadata.api.request_identity import NO_DIGEST
from streammeta.controller.metadata.api.requests import CommitStreamSetObject
from streammeta.controller.metadata.decisions.left_out_rows import LeftOutRows
from streammeta.controller.metadata.decisions.shared_rows import (
    SharedRows,
    SharedVerdicts,
    failed_rows,
    leaves_out,
)
from streammeta.controller.metadata.registries.object_queries import ObjectQueries
from streammeta.controller.metadata.registries.producers import Producers
from streammeta.controller.metadata.registries.stream_heads import DELETED, Head
from streammeta.controller.metadata.registries.stream_ranges import NO_SPANS, StreamSpans
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables import values

# Looking enum members up is slow, and every commit needs these.
_OPENED = int(values.StreamState.OPENED)
_SHARED = int(values.StreamState.SHARED)
_PREPARED = int(values.ObjectState.PREPARED)
_STREAM_NOT_EXIST = int(ErrorCode.STREAM_NOT_EXIST)


@dataclass(slots=True, eq=False)
class Ahead:
    """Effects of the preceding uploads of a batch.

    `owed` is the node's list of pending uploads, `ends` the new ends of streams.
    """

    owed: StreamSpans = NO_SPANS
    ends: dict[int, int] = field(default_factory=dict)


class Continuity:
    """Checks of ranges, at most one per stream, against the streams. Epochs are optional."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def all_continue(self, node_id: int, rows: values.RangeColumns, *, repeats: bool) -> bool:
        """Return whether every row continues its stream and the node has no pending upload.

        With `repeats` a stream may have several rows, each continuing the one before.
        """
        streams, ids = self._streams, rows.stream_id
        if len(ids) == 1:
            return self._continues(node_id, rows)
        # Such a stream does not exist, and has no row in the columns.
        if np.maximum.reduce(ids) >= len(streams):
            return False

        head = streams.head_columns(ids)
        # Internal commits carry no epochs: they use the present ones.
        given = rows.stream_epoch if len(rows.stream_epoch) else head.epoch
        if np.count_nonzero(_may_write(node_id, given, head)) < len(ids):
            return False
        if repeats:
            return _chains(rows, head.end_offset)
        return bool(np.count_nonzero(rows.start_offset == head.end_offset) == len(ids))

    def _continues(self, node_id: int, rows: values.RangeColumns) -> bool:
        """Do the same for a single row by its cells, because vectors cost several times more."""
        stream_id = rows.stream_id.item()
        if stream_id >= len(self._streams):
            return False
        head = self._streams.head_cells(stream_id)
        given = rows.stream_epoch.item() if len(rows.stream_epoch) else head.epoch
        is_good = _may_write(node_id, given, head) and rows.start_offset.item() == head.end_offset
        return bool(is_good)

    def check(self, node_id: int, rows: values.RangeColumns, ahead: Ahead) -> values.Int64Column:
        """Return one verdict per row."""
        ids = rows.stream_id
        if not len(ids):
            return values.EMPTY_COLUMN
        issued = ids < len(self._streams)
        if np.count_nonzero(issued) == len(ids):
            return self._check_issued(node_id, rows, ahead)
        # A stream that was never created is an error, a deleted one is not.
        verdicts = np.full(len(ids), _STREAM_NOT_EXIST)
        verdicts[issued] = self._check_issued(node_id, rows.ranges_at(issued), ahead)
        return verdicts

    def _check_issued(
        self, node_id: int, rows: values.RangeColumns, ahead: Ahead
    ) -> values.Int64Column:
        at = rows.stream_id
        epochs, state, owner, low, high = self._streams.head_columns(at)
        # A stream's end is where the uploads before this one have left it.
        if ahead.ends:
            pairs = zip(at.tolist(), high.tolist(), strict=True)
            high = np.array([ahead.ends.get(stream, end) for stream, end in pairs], np.int64)

        given = rows.stream_epoch if len(rows.stream_epoch) else epochs
        start, end = rows.start_offset, rows.end_offset
        # The upload was assembled before the stream was trimmed past its end.
        crosses_trim = (high == low) & (start < low)

        # Later cases override earlier ones, so the last match is the verdict.
        return _last_of(
            (~((start == high) | crosses_trim), ErrorCode.OFFSET_NOT_MATCHED),
            (owner != node_id, ErrorCode.STREAM_FENCED),
            (state != _OPENED, ErrorCode.STREAM_NOT_OPENED),
            (epochs < given, ErrorCode.STREAM_INNER_ERROR),
            (epochs > given, ErrorCode.STREAM_FENCED),
            *self._owed_cases(rows, low, ahead.owed),
            (state == _SHARED, ErrorCode.STREAM_KIND_MISMATCH),
            ((state == DELETED) | (end <= low), ErrorCode.NONE),
        )

    def _owed_cases(
        self, rows: values.RangeColumns, low: values.Int64Column, owed: StreamSpans
    ) -> tuple[tuple[values.Mask, ErrorCode], ...]:
        """Accept pending uploads of a node regardless of the stream's present owner."""
        if not len(owed):
            return ()

        at = owed.row_of(rows.stream_id)
        first, end = owed.start_offset[at], owed.end_offset[at]
        active = (at >= 0) & (np.maximum(low, first) < end)

        formed_before_trim = (first <= low) & (rows.start_offset < low)
        right = (rows.start_offset == np.maximum(low, first)) | formed_before_trim
        right &= rows.end_offset <= end
        return (
            (active & ~right, ErrorCode.OFFSET_NOT_MATCHED),
            (active & right, ErrorCode.NONE),
        )

    def advance_owed(
        self, owed: StreamSpans, stream_id: values.Int64Column, end: values.Int64Column
    ) -> StreamSpans:
        """Return a node's pending uploads after it uploaded streams up to `end`.

        The rows stay the same. Completed ones become empty.
        """
        at = owed.row_of(stream_id)
        live = self._streams.live_starts(owed)
        moved = (at >= 0) & (end > self._streams.start_offsets(np.where(at >= 0, stream_id, 0)))

        starts = owed.start_offset.copy()
        starts[at[moved]] = end[moved]
        # A trim or a deletion may have completed an upload as well.
        over = live >= owed.end_offset
        starts[over] = owed.end_offset[over]
        return StreamSpans(owed.stream_id, starts, owed.end_offset)


def _may_write(node_id: int, epoch: Any, head: Head[Any]) -> Any:
    """Return whether streams are open on a node in these epochs, for cells or columns."""
    return (head.state == _OPENED) & (head.node_id == node_id) & (head.epoch == epoch)


def has_twins(ids: values.Int64Column) -> bool:
    """Return whether an id appears twice."""
    ordered = np.sort(ids)
    return bool(np.count_nonzero(ordered[1:] == ordered[:-1]))


def _chains(rows: values.RangeColumns, ends: values.Int64Column) -> bool:
    """Return whether each row continues the row before it or else its stream's end."""
    if not has_twins(rows.stream_id):
        return bool(np.count_nonzero(rows.start_offset == ends) == len(ends))
    order = np.argsort(rows.stream_id, kind="stable")
    ids, expected = rows.stream_id[order], ends[order]
    again = ids[1:] == ids[:-1]
    expected[1:][again] = rows.end_offset[order[:-1]][again]
    return bool(np.count_nonzero(rows.start_offset[order] == expected) == len(ids))


def _last_of(*cases: tuple[values.Mask, ErrorCode]) -> values.Int64Column:
    verdicts = np.zeros(len(cases[0][0]), dtype=np.int64)
    for rows, error in cases:
        verdicts[rows] = int(error)
    return verdicts


def check_coverage(outputs: StreamSpans, sources: StreamSpans) -> tuple[values.Mask, bool]:
    """Return which outputs exceed a contiguous run of the sources, and whether all are covered.

    Both are live parts. Outputs are sorted by stream id and do not overlap each other, sources may
    be in any order. Sources are covered if the outputs contain every offset of them.
    """
    if not len(outputs):
        return np.zeros(0, dtype=np.bool_), not len(sources)

    # Fast path: per stream, outputs and sources span the same offsets without a hole.
    first = np.flatnonzero(np.concatenate(([True], np.diff(outputs.stream_id) > 0)))
    streams = outputs.stream_id[first]
    at = np.minimum(streams.searchsorted(sources.stream_id), len(streams) - 1)
    if np.array_equal(streams[at], sources.stream_id):
        low, high, held = _extents(at, sources, len(streams))
        exact = low == np.minimum.reduceat(outputs.start_offset, first)
        exact &= high == np.maximum.reduceat(outputs.end_offset, first)
        exact &= held == np.add.reduceat(outputs.end_offset - outputs.start_offset, first)
        exact &= held == high - low
        if np.count_nonzero(exact) == len(streams):
            return np.zeros(len(outputs), dtype=np.bool_), True

    return _check_coverage_by_runs(outputs, sources)


def _extents(
    owner: values.Int64Column, spans: StreamSpans, owners: int
) -> tuple[values.Int64Column, values.Int64Column, values.Int64Column]:
    """Return each owner's smallest start, largest end and total length of spans."""
    low = np.full(owners, values.INT64_MAX, dtype=np.int64)
    high = np.zeros(owners, dtype=np.int64)
    held = np.zeros(owners, dtype=np.int64)
    np.minimum.at(low, owner, spans.start_offset)
    np.maximum.at(high, owner, spans.end_offset)
    np.add.at(held, owner, spans.end_offset - spans.start_offset)
    return low, high, held


def _check_coverage_by_runs(outputs: StreamSpans, sources: StreamSpans) -> tuple[values.Mask, bool]:
    """Do as `check_coverage` if a stream is in several pieces, or to find the misfits."""
    order = np.lexsort((sources.start_offset, sources.stream_id))
    runs: dict[int, list[tuple[int, int]]] = {}
    missing = 0
    for stream_id, low, high in sources.take(order).merge().rows():
        runs.setdefault(stream_id, []).append((low, high))
        missing += high - low

    outside = np.zeros(len(outputs), dtype=np.bool_)
    for row, (stream_id, start, end) in enumerate(outputs.rows()):
        of_stream = runs.get(stream_id, [])
        place = bisect_right(of_stream, start, key=lambda run: run[0]) - 1
        outside[row] = place < 0 or end > of_stream[place][1]
        missing -= end - start
    # Disjoint outputs within the sources cover them if their total lengths are equal.
    return outside, not missing and not outside.any()


class Repeat(Enum):
    """Relation of a commit to earlier commits and to the objects it names."""

    NEW = 0
    SAME = 1
    OTHER_CONTENT = 2
    NO_OBJECT = 3


REJECTED = {
    Repeat.OTHER_CONTENT: ErrorCode.OBJECT_CONTENT_MISMATCH,
    Repeat.NO_OBJECT: ErrorCode.OBJECT_NOT_EXIST,
}


@dataclass(frozen=True, slots=True, eq=False)
class Verdicts:
    """One `ErrorCode` number per row. `covered`: the results contain all data of the sources."""

    ranges: values.Int64Column
    stream_objects: values.Int64Column = field(default_factory=lambda: values.EMPTY_COLUMN)
    covered: bool = True
    shared: SharedVerdicts = field(default_factory=SharedVerdicts)

    def error(self) -> ErrorCode:
        """Return the first error of a row, or the error for missing data, or NONE."""
        for verdicts in (self.ranges, self.stream_objects, self.shared.errors):
            if np.count_nonzero(verdicts):
                return ErrorCode(int(verdicts[np.argmax(verdicts != 0)]))
        return ErrorCode.NONE if self.covered else ErrorCode.OFFSET_NOT_MATCHED

    def any_valid(self) -> bool:
        """Return whether some row is accepted."""
        rows = (self.ranges, self.stream_objects, self.shared.errors)
        return not all(verdicts.all() for verdicts in rows)

    def answer(self, error: ErrorCode, committed_at_ms: int = -1) -> CommitStreamSetObjectAnswer:
        """Return the answer to the commit, made at that time unless there is an error."""
        is_made = error is ErrorCode.NONE
        return CommitStreamSetObjectAnswer(
            error=error,
            range_errors=self.ranges,
            stream_object_errors=self.stream_objects,
            shared=self.shared.results(committed_at_ms) if is_made else self.shared.rejected(),
        )


class Repeats:
    """Earlier commits, by the ids of their objects."""

    def __init__(self, streams: Streams, objects: ObjectQueries, producers: Producers) -> None:
        self._objects = objects
        self._left_out = LeftOutRows()
        self._shared = SharedRows(streams, objects, producers, self._left_out)

    @property
    def shared(self) -> SharedRows:
        """The rules for shared rows, whose repeats depend on more than their objects."""
        return self._shared

    @property
    def left_out(self) -> LeftOutRows:
        """The rows left out by commits."""
        return self._left_out

    def compare(self, object_ids: Iterable[int], digest: int) -> Repeat:
        """Compare a commit with the earlier commits of any of these objects.

        One equal digest suffices: an object left out by the first commit may have been committed
        by another since.
        """
        found = [self._objects.commit_digest(object_id) for object_id in object_ids]
        known = {made_with for made_with in found if made_with is not None}
        if not known:
            return Repeat.NEW
        return Repeat.SAME if digest in known or NO_DIGEST in known else Repeat.OTHER_CONTENT

    def compare_object(self, object_id: int, digest: int) -> Repeat:
        """Compare the commit of an object, which must be prepared, with its earlier commit."""
        if self._objects.is_prepared(object_id):
            return Repeat.NEW
        repeat = self.compare((object_id,), digest)
        return Repeat.NO_OBJECT if repeat is Repeat.NEW else repeat

    def reject_unusable(self, object_id: values.Int64Column, verdicts: values.Int64Column) -> None:
        """Overwrite the verdicts of rows whose stream object cannot be committed.

        This error takes precedence: a row without its object cannot be committed at all.
        """
        verdicts[self._objects.states(object_id) != _PREPARED] = ErrorCode.OBJECT_NOT_EXIST
        verdicts[self._objects.was_committed(object_id)] = ErrorCode.INVALID_REQUEST

    def first_answer(
        self, request: CommitStreamSetObject, digest: int
    ) -> CommitStreamSetObjectAnswer:
        """Return the answer that this commit got the first time.

        Under REJECT_ALL no rows can have been left out. If some were, it is a different commit.
        """
        rows = request.stream_objects
        ranges = self.range_verdicts(request.object_id, request.ranges.stream_id, digest)
        others = self._stream_object_verdicts(rows.object_id, rows.stream_id, digest)
        shared = self.shared.first_results(request.shared_rows, request.object_id, digest)
        left_out = ranges.any() or others.any() or (shared is not None and leaves_out(shared))
        if request.on_conflict is values.OnConflict.REJECT_ALL and left_out:
            return failed_commit(request, ErrorCode.OBJECT_CONTENT_MISMATCH)
        return CommitStreamSetObjectAnswer(
            error=ErrorCode.NONE, range_errors=ranges, stream_object_errors=others, shared=shared
        )

    def range_verdicts(
        self, object_id: int, stream_id: values.Int64Column, digest: int
    ) -> values.Int64Column:
        """Return the first verdict on each range of a committed stream set object."""
        owners = np.full(len(stream_id), object_id)
        verdicts = self._left_out.verdicts(digest, owners, stream_id)
        if np.count_nonzero(verdicts) and (row := self._objects.row(object_id)) >= 0:
            # Without a digest the verdict may belong to another commit that named this object.
            held = self._objects.spans(np.array([row])).stream_id
            verdicts[np.isin(stream_id, held)] = 0
        return verdicts

    def _stream_object_verdicts(
        self, object_id: values.Int64Column, stream_id: values.Int64Column, digest: int
    ) -> values.Int64Column:
        """Return the first verdict on each stream object of a committed request.

        An object committed together with the request was accepted. All others were left out, even
        if their verdicts are no longer remembered.
        """
        if not len(object_id):
            return values.EMPTY_COLUMN
        made_with = [self._objects.commit_digest(item) for item in object_id.tolist()]
        came = np.array([digest == of_object for of_object in made_with])
        may_have_come = came | np.array([of_object == NO_DIGEST for of_object in made_with])

        unknown = np.full(len(object_id), int(ErrorCode.OFFSET_NOT_MATCHED))
        self.reject_unusable(object_id, unknown)
        verdicts = self._left_out.verdicts(digest, object_id, stream_id)
        verdicts = np.where((verdicts == 0) & ~may_have_come, unknown, verdicts)
        verdicts[came] = 0
        return verdicts


def failed_commit(request: CommitStreamSetObject, error: ErrorCode) -> CommitStreamSetObjectAnswer:
    """Return the answer to a commit that failed before its rows were examined."""
    return CommitStreamSetObjectAnswer(
        error=error,
        range_errors=np.full(len(request.ranges.stream_id), int(error)),
        stream_object_errors=np.full(len(request.stream_objects.stream_id), int(error)),
        shared=failed_rows(request.shared_rows, error),
    )
