"""Uploads: judges each range of a commit against the map, and replays what was accepted.

All rows are judged at once, in columns, against the state before the request. A range must
continue its stream at the stream's end; what lies below the stream's start, or belongs to a stream
that was deleted, is accepted without effect, because its bytes are in the object anyway.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from controller.errors import ErrorCode
from controller.metadata.answers import CommitStreamSetObjectAnswer
from controller.metadata.columns import Undo
from controller.metadata.nodes import Nodes
from controller.metadata.objects import Objects
from controller.metadata.request_log import REJECTED_ROWS_MAX, Window
from controller.metadata.requests import CommitStreamSetObject
from controller.metadata.streams import DELETED, Streams
from controller.metadata.values import (
    EMPTY_COLUMN,
    Int64Column,
    ObjectState,
    OnConflict,
    RangeColumns,
    StreamObjectColumns,
    StreamState,
)
from controller.records.record import (
    CommitRowsRejected,
    ObjectsDestroyed,
    Record,
    StreamObjectsCommitted,
    StreamSetObjectCommitted,
)

# Members of an enum are slow to look up; these are looked up for every commit.
_NONE = ErrorCode.NONE
_PREPARED = int(ObjectState.PREPARED)
_OPENED = int(StreamState.OPENED)
_STREAM_NOT_EXIST = int(ErrorCode.STREAM_NOT_EXIST)


class _ObjectIs(Enum):
    PREPARED = 0
    COMMITTED = 1
    MISSING = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Verdicts:
    """One `ErrorCode` number a row."""

    ranges: Int64Column
    stream_objects: Int64Column

    def first_error(self) -> ErrorCode:
        """Return the first row's error that is one, or NONE."""
        for verdicts in (self.ranges, self.stream_objects):
            if np.count_nonzero(verdicts):
                return ErrorCode(int(verdicts[np.argmax(verdicts != 0)]))
        return _NONE

    def any_valid(self) -> bool:
        """Return whether some row is accepted."""
        return not (self.ranges.all() and self.stream_objects.all())


class Commits:
    """Decides and replays CommitStreamSetObject."""

    def __init__(self, nodes: Nodes, streams: Streams, objects: Objects) -> None:
        self._nodes = nodes
        self._streams = streams
        self._objects = objects
        self.rejected: Window[tuple[int, int], int] = Window(REJECTED_ROWS_MAX)

    # ---- deciding ----

    def decide(
        self, request: CommitStreamSetObject, now_ms: int
    ) -> tuple[list[Record], CommitStreamSetObjectAnswer]:
        """Judge an upload; the request is well-formed."""
        error = self._nodes.check(request.node, fence_failover=not request.failover)
        if error is not _NONE:
            return [], _failed(request, error)
        state = self._state_of(request)
        if state is _ObjectIs.COMMITTED:
            return [], self._first_answer(request)
        if state is _ObjectIs.MISSING:
            return [], _failed(request, ErrorCode.OBJECT_NOT_EXIST)
        verdicts = self._judge(request)
        error = verdicts.first_error()
        if error is not _NONE and (
            request.on_conflict is OnConflict.REJECT_ALL or not verdicts.any_valid()
        ):
            return [], _answer(error, verdicts)
        records = self._records(request, verdicts, now_ms)
        return records, _answer(_NONE, verdicts)

    def _state_of(self, request: CommitStreamSetObject) -> "_ObjectIs":
        """Say whether the commit can be made, was made before, or has no object to make it with."""
        objects = self._objects
        if request.object_id < 0:
            committed = objects.was_committed(request.stream_objects.object_id)
            return _ObjectIs.COMMITTED if committed.any() else _ObjectIs.PREPARED
        row = objects.row(request.object_id)
        if row >= 0 and objects["state"][row] == _PREPARED:
            return _ObjectIs.PREPARED
        if objects.was_committed(np.array([request.object_id]))[0]:
            return _ObjectIs.COMMITTED
        return _ObjectIs.MISSING

    def _first_answer(self, request: CommitStreamSetObject) -> CommitStreamSetObjectAnswer:
        """Return what this commit was answered when it was made."""
        rows = request.stream_objects
        owners = np.full(len(request.ranges.stream_id), request.object_id)
        verdicts = _Verdicts(
            self._remembered(owners, request.ranges.stream_id),
            self._remembered(rows.object_id, rows.stream_id),
        )
        return _answer(_NONE, verdicts)

    def _remembered(self, object_id: Int64Column, stream_id: Int64Column) -> Int64Column:
        if not len(self.rejected):
            return np.zeros(len(object_id), dtype=np.int64)
        keys = zip(object_id.tolist(), stream_id.tolist(), strict=True)
        return np.array([self.rejected.get(key) or 0 for key in keys], dtype=np.int64)

    def _judge(self, request: CommitStreamSetObject) -> _Verdicts:
        node_id = request.node.node_id
        ranges = self._continuity(node_id, request.ranges)
        rows = request.stream_objects
        if not len(rows.stream_id):
            return _Verdicts(ranges, EMPTY_COLUMN)
        verdicts = self._continuity(node_id, rows)
        # The object comes before the stream: a row without an object can't be committed at all.
        states = self._objects.states(rows.object_id)
        verdicts[states != ObjectState.PREPARED] = ErrorCode.OBJECT_NOT_EXIST
        verdicts[self._objects.was_committed(rows.object_id)] = ErrorCode.INVALID_REQUEST
        return _Verdicts(ranges, verdicts)

    def _continuity(self, node_id: int, rows: RangeColumns | StreamObjectColumns) -> Int64Column:
        """Judge rows against their streams."""
        ids, streams = rows.stream_id, self._streams
        if not len(ids):
            return EMPTY_COLUMN
        issued = ids < len(streams)
        if np.count_nonzero(issued) < len(ids):
            # A stream that was never created is an error; one that is gone is not.
            verdicts = np.full(len(ids), _STREAM_NOT_EXIST)
            verdicts[issued] = self._continuity_of_issued(node_id, rows, issued)
            return verdicts
        return self._continuity_of_issued(node_id, rows, slice(None))

    def _continuity_of_issued(
        self,
        node_id: int,
        rows: RangeColumns | StreamObjectColumns,
        chosen: npt.NDArray[np.bool_] | slice,
    ) -> Int64Column:
        streams, at = self._streams, rows.stream_id[chosen]
        first, end = rows.start_offset[chosen], rows.end_offset[chosen]
        state, owner = streams["state"][at], streams["node_id"][at]
        stream_end = streams["end_offset"][at]
        good = (first == stream_end) & (state == _OPENED) & (owner == node_id)
        epochs = streams["epoch"][at]
        given = rows.stream_epoch[chosen] if len(rows.stream_epoch) else epochs
        good &= epochs == given
        if np.count_nonzero(good) == len(at):
            return np.zeros(len(at), dtype=np.int64)
        stream_start = streams["start_offset"][at]
        crosses_trim = (stream_end == stream_start) & (first < stream_start)
        # The last one that holds is the verdict.
        return _last_of(
            (~((first == stream_end) | crosses_trim), ErrorCode.OFFSET_NOT_MATCHED),
            (owner != node_id, ErrorCode.STREAM_FENCED),
            (state != _OPENED, ErrorCode.STREAM_NOT_OPENED),
            (epochs < given, ErrorCode.STREAM_INNER_ERROR),
            (epochs > given, ErrorCode.STREAM_FENCED),
            ((state == DELETED) | (end <= stream_start), ErrorCode.NONE),
        )

    def _records(
        self, request: CommitStreamSetObject, verdicts: _Verdicts, now_ms: int
    ) -> list[Record]:
        records: list[Record] = []
        ranges, rows = request.ranges, request.stream_objects
        valid = verdicts.ranges == 0
        if request.object_id >= 0:
            records.append(
                StreamSetObjectCommitted(
                    object_id=request.object_id,
                    node_id=request.node.node_id,
                    order_id=request.order_id,
                    object_size=request.object_size,
                    attributes=request.attributes,
                    committed_at_ms=now_ms,
                    stream_id=_take(ranges.stream_id, valid),
                    start_offset=_take(ranges.start_offset, valid),
                    end_offset=_take(ranges.end_offset, valid),
                )
            )
        if len(rows.stream_id):
            records.extend(self._stream_object_records(rows, verdicts.stream_objects == 0, now_ms))
        rejected = self._rejected(request, verdicts)
        return [*records, rejected] if rejected is not None else records

    def _stream_object_records(
        self, rows: StreamObjectColumns, valid: npt.NDArray[np.bool_], now_ms: int
    ) -> list[Record]:
        if not valid.any():
            return []
        attributes = rows.attributes if len(rows.attributes) else np.zeros_like(rows.object_id)
        stream_id = _take(rows.stream_id, valid)
        object_id = _take(rows.object_id, valid)
        committed = StreamObjectsCommitted(
            committed_at_ms=now_ms,
            object_id=object_id,
            object_size=_take(rows.object_size, valid),
            attributes=_take(attributes, valid),
            stream_id=stream_id,
            start_offset=_take(rows.start_offset, valid),
            end_offset=_take(rows.end_offset, valid),
        )
        gone = ~self._existing(stream_id)
        if not gone.any():
            return [committed]
        # Nobody will ever read or compact an object of a stream that is gone.
        return [
            committed,
            ObjectsDestroyed(object_id=object_id[gone], marked_at_ms=now_ms, deep=True),
        ]

    def _rejected(
        self, request: CommitStreamSetObject, verdicts: _Verdicts
    ) -> CommitRowsRejected | None:
        bad, bad_objects = verdicts.ranges != 0, verdicts.stream_objects != 0
        if not (np.count_nonzero(bad) or np.count_nonzero(bad_objects)):
            return None
        rows = request.stream_objects
        owners = np.full(int(np.count_nonzero(bad)), request.object_id)
        return CommitRowsRejected(
            object_id=np.concatenate((owners, rows.object_id[bad_objects])),
            stream_id=np.concatenate((request.ranges.stream_id[bad], rows.stream_id[bad_objects])),
            error=np.concatenate((verdicts.ranges[bad], verdicts.stream_objects[bad_objects])),
        )

    def _existing(self, stream_id: Int64Column) -> npt.NDArray[np.bool_]:
        existing: npt.NDArray[np.bool_] = self._streams["state"][stream_id] != DELETED
        return existing

    # ---- replaying ----

    def replay_set_object(self, record: StreamSetObjectCommitted, undo: Undo) -> None:
        """See `StreamSetObjectCommitted`."""
        first = self._objects.replay_set_object(record, undo)
        self._advance(record, first, undo)

    def replay_stream_objects(self, record: StreamObjectsCommitted, undo: Undo) -> None:
        """See `StreamObjectsCommitted`."""
        first = self._objects.replay_stream_objects(record, undo)
        self._advance(record, first, undo)

    def replay_rejected(self, record: CommitRowsRejected, undo: Undo) -> None:
        """See `CommitRowsRejected`."""
        for object_id, stream_id, error in zip(
            record.object_id.tolist(), record.stream_id.tolist(), record.error.tolist(), strict=True
        ):
            self.rejected.put((object_id, stream_id), error, undo)

    def _advance(
        self, record: StreamSetObjectCommitted | StreamObjectsCommitted, first: int, undo: Undo
    ) -> None:
        """Raise streams' ends and put the range rows from `first` on into their lists."""
        streams, ends = record.stream_id, record.end_offset
        rows = np.arange(first, first + len(streams), dtype=np.int64)
        existing = self._existing(streams)
        if np.count_nonzero(existing) < len(existing):
            streams, ends, rows = streams[existing], ends[existing], rows[existing]
        if not len(streams):
            return
        before = self._streams.raise_ends(streams, ends, undo)
        newest = ends > before
        if np.count_nonzero(newest) == len(newest):
            self._objects.ranges.link_last(streams, rows, undo)
            return
        if newest.any():
            self._objects.ranges.link_last(streams[newest], rows[newest], undo)
        for stream_id, row in zip(streams[~newest].tolist(), rows[~newest].tolist(), strict=True):
            self._objects.ranges.link(stream_id, row, undo)


def _last_of(*cases: tuple[npt.NDArray[np.bool_], ErrorCode]) -> Int64Column:
    verdicts = np.zeros(len(cases[0][0]), dtype=np.int64)
    for rows, error in cases:
        verdicts[rows] = int(error)
    return verdicts


def _take(values: Int64Column, valid: npt.NDArray[np.bool_]) -> Int64Column:
    return values if np.count_nonzero(valid) == len(valid) else values[valid]


def _answer(error: ErrorCode, verdicts: _Verdicts) -> CommitStreamSetObjectAnswer:
    return CommitStreamSetObjectAnswer(
        error=error, range_errors=verdicts.ranges, stream_object_errors=verdicts.stream_objects
    )


def _failed(request: CommitStreamSetObject, error: ErrorCode) -> CommitStreamSetObjectAnswer:
    return CommitStreamSetObjectAnswer(
        error=error,
        range_errors=np.full(len(request.ranges.stream_id), int(error)),
        stream_object_errors=np.full(len(request.stream_objects.stream_id), int(error)),
    )
