"""The registry of objects: every id issued and not yet removed, and what each object holds.

Ids come from a counter and are never reused. Rows are in id order; a removed object's row stays as
a tombstone until garbage is collected. Streams appear here only as numbers in ranges. Commits are
decided in `commits`; this module prepares, expires, destroys and removes.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from controller.errors import ErrorCode, InvariantError
from controller.metadata.answers import PrepareObjectsAnswer
from controller.metadata.columns import Table, TableView, Undo
from controller.metadata.due import DueObjects
from controller.metadata.object_ranges import ObjectRanges
from controller.metadata.request_log import (
    REMOVED_OBJECTS_MAX,
    REQUESTS_MAX,
    IssuedIds,
    RequestKey,
    RequestKind,
    Window,
)
from controller.metadata.requests import PrepareObjects
from controller.metadata.values import Int64Column, ObjectKind, ObjectState, column
from controller.records.record import (
    ObjectsDestroyed,
    ObjectsPrepared,
    ObjectsRemoved,
    StreamObjectsCommitted,
    StreamSetObjectCommitted,
)

DEEP_DELETE_BIT = 1 << 18
"""In the attributes word: destroying a composite destroys what it links."""

_OBJECT_COLUMNS = {
    "object_id": np.int64,
    "state": np.int8,
    "kind": np.int8,
    "attributes": np.int32,
    "node_id": np.int32,
    "object_size": np.int64,
    "timestamp_ms": np.int64,
    "order_id": np.int64,
    "first_range": np.int32,
    "range_count": np.int32,
}
_GARBAGE_ROWS_MIN = 65_536

# Members of an enum are slow to look up; these are looked up for every commit.
_PREPARED = int(ObjectState.PREPARED)
_COMMITTED = int(ObjectState.COMMITTED)
_REMOVED = int(ObjectState.REMOVED)
_STREAM_SET = int(ObjectKind.STREAM_SET)
_UNCOMMITTED_CELLS = {
    "state": _PREPARED,
    "kind": int(ObjectKind.UNKNOWN),
    "attributes": 0,
    "node_id": -1,
    "object_size": 0,
    "order_id": -1,
    "first_range": 0,
    "range_count": 0,
}
"""What a prepared object's row holds, besides its id and deadline."""


class Objects:
    """Objects by id, the ranges they hold, and when they are due to expire or to be deleted."""

    def __init__(self) -> None:
        self._table = Table(_OBJECT_COLUMNS)
        self.ranges = ObjectRanges()
        self.next_object_id = 0
        self.requests: Window[RequestKey, IssuedIds] = Window(REQUESTS_MAX)
        self.removed: Window[int, None] = Window(REMOVED_OBJECTS_MAX)
        self.deadlines = DueObjects(self._still_prepared)
        self.destroyed = DueObjects(self._still_destroyed)
        self._tombstones = 0

    # ---- reading ----

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        return self._table[name]

    def __len__(self) -> int:
        return len(self._table) - self._tombstones

    @property
    def nbytes(self) -> int:
        """Bytes allocated for objects and their ranges."""
        return self._table.nbytes + self.ranges.nbytes

    def view(self) -> tuple[TableView, TableView]:
        """Return immutable views of the objects and of their ranges."""
        return self._table.view(), self.ranges.view()

    def row(self, object_id: int) -> int:
        """Return an object's row, or -1 if it was never issued or is removed."""
        ids = self._table["object_id"]
        # Ids are dense towards the end: most often the distance from the end is right.
        row = len(ids) - (self.next_object_id - object_id)
        if not (0 <= row < len(ids) and ids[row] == object_id):
            row = int(ids.searchsorted(object_id))
            if row == len(ids) or ids[row] != object_id:
                return -1
        return row if self._table["state"][row] != _REMOVED else -1

    def rows(self, object_ids: Int64Column) -> Int64Column:
        """Return objects' rows, -1 where there is none."""
        ids = self._table["object_id"]
        if not len(ids):
            return np.full(len(object_ids), -1, dtype=np.int64)
        rows = np.minimum(ids.searchsorted(object_ids), len(ids) - 1)
        found = (ids[rows] == object_ids) & (self._table["state"][rows] != ObjectState.REMOVED)
        return np.where(found, rows, -1)

    def states(self, object_ids: Int64Column) -> Int64Column:
        """Return `ObjectState` numbers, also of ids that were never issued or are removed."""
        rows = self.rows(object_ids)
        issued = np.where(
            object_ids < self.next_object_id, ObjectState.REMOVED, ObjectState.NOT_ISSUED
        )
        if not len(self._table):
            return issued
        return np.where(rows >= 0, self._table["state"][rows], issued)

    def was_committed(self, object_ids: Int64Column) -> npt.NDArray[np.bool_]:
        """Return which objects are, or within the window were, committed."""
        rows = self.rows(object_ids)
        committed = np.zeros(len(rows), dtype=np.bool_)
        present = rows >= 0
        committed[present] = self._table["kind"][rows[present]] != ObjectKind.UNKNOWN
        for index in np.flatnonzero(~present).tolist():
            committed[index] = int(object_ids[index]) in self.removed
        return committed

    def stream_object_rows(self, stream_id: int) -> Int64Column:
        """Return the range rows of a stream's stream objects, by end offset."""
        rows = self.ranges.rows_of_stream(stream_id)
        if not len(rows):
            return rows
        kinds = self._table["kind"][self.rows(self.ranges.object_ids(rows))]
        return np.compress(kinds == ObjectKind.STREAM, rows)

    def stream_object_run(self, stream_id: int) -> tuple[int, int]:
        """Return the first contiguous run (start, end) of a stream's stream objects, or (0, 0)."""
        rows = self.stream_object_rows(stream_id)
        if not len(rows):
            return 0, 0
        _, starts, ends = self.ranges.columns(rows)
        gaps = np.flatnonzero(starts[1:] != ends[:-1])
        last = int(gaps[0]) if len(gaps) else len(rows) - 1
        return int(starts[0]), int(ends[last])

    def _still_prepared(self, time_ms: int, ids: Int64Column) -> Int64Column:
        return self._still(ObjectState.PREPARED, time_ms, ids)

    def _still_destroyed(self, time_ms: int, ids: Int64Column) -> Int64Column:
        return self._still(ObjectState.MARK_DESTROYED, time_ms, ids)

    def _still(self, state: ObjectState, time_ms: int, ids: Int64Column) -> Int64Column:
        rows = self.rows(ids)
        ids, rows = ids[rows >= 0], rows[rows >= 0]
        right = (self._table["state"][rows] == state) & (
            self._table["timestamp_ms"][rows] == time_ms
        )
        return np.compress(right, ids)

    # ---- deciding ----

    def decide_prepare(
        self, request: PrepareObjects, now_ms: int
    ) -> tuple[ObjectsPrepared | None, PrepareObjectsAnswer]:
        """Issue ids. The node has been checked and the request is no repeat."""
        record = ObjectsPrepared(
            request_id=request.request_id,
            node_id=request.node.node_id,
            first_object_id=self.next_object_id,
            count=request.count,
            deadline_ms=now_ms + request.ttl_ms,
        )
        answer = PrepareObjectsAnswer(
            error=ErrorCode.NONE,
            first_object_id=record.first_object_id,
            deadline_ms=record.deadline_ms,
        )
        return record, answer

    def decide_expire(self, now_ms: int, limit: int) -> ObjectsDestroyed | None:
        """Mark what is past its deadline; None if nothing is."""
        expired = self.deadlines.before(now_ms, limit)
        if not expired:
            return None
        return ObjectsDestroyed(object_id=column(expired), marked_at_ms=now_ms)

    def decide_remove(self, object_ids: Sequence[int]) -> ObjectsRemoved | None:
        """Forget those that are marked destroyed; None if none is."""
        ids = column(sorted(set(object_ids)))
        removable = ids[self.states(ids) == ObjectState.MARK_DESTROYED]
        return ObjectsRemoved(object_id=removable) if len(removable) else None

    # ---- replaying ----

    def replay_prepared(self, record: ObjectsPrepared, undo: Undo) -> None:
        """See `ObjectsPrepared`."""
        if record.first_object_id != self.next_object_id:
            raise InvariantError(
                f"record issues objects from {record.first_object_id}, "
                f"but the next object id is {self.next_object_id}"
            )
        rows = self._table.append(record.count, undo)
        first = record.first_object_id
        self._table.write("object_id", rows, np.arange(first, first + record.count))
        self._table.write("state", rows, ObjectState.PREPARED)
        self._table.write("node_id", rows, -1)
        self._table.write("order_id", rows, -1)
        self._table.write("timestamp_ms", rows, record.deadline_ms)
        self._set_next(first + record.count, undo)
        self.deadlines.add(record.deadline_ms, first, record.count)
        key = RequestKey(RequestKind.PREPARE_OBJECTS, record.node_id, record.request_id)
        self.requests.put(key, IssuedIds(first, record.count, record.deadline_ms), undo)

    def replay_set_object(self, record: StreamSetObjectCommitted, undo: Undo) -> int:
        """Commit a set object with its ranges; return the first range's row."""
        row = self.row(record.object_id)
        first = self.ranges.add(
            record.object_id, record.stream_id, record.start_offset, record.end_offset, undo
        )
        deadline_ms = self._table["timestamp_ms"][row]
        self._commit_cells(row, _STREAM_SET, first, len(record.stream_id), record)
        self._table.write("node_id", row, record.node_id)
        self._table.write("order_id", row, record.order_id)
        self._table.write("object_size", row, record.object_size)
        undo.append(lambda: self._restore_prepared(row, deadline_ms))
        return first

    def replay_stream_objects(self, record: StreamObjectsCommitted, undo: Undo) -> int:
        """Commit stream objects with their ranges; return the first range's row."""
        rows = self.rows(record.object_id)
        first = self.ranges.add(
            record.object_id, record.stream_id, record.start_offset, record.end_offset, undo
        )
        deadlines_ms = self._table["timestamp_ms"][rows]
        range_rows = np.arange(first, first + len(rows))
        self._commit_cells(rows, ObjectKind.STREAM, range_rows, 1, record)
        self._table.write("object_size", rows, record.object_size)
        undo.append(lambda: self._restore_prepared(rows, deadlines_ms))
        return first

    def replay_destroyed(self, record: ObjectsDestroyed, undo: Undo) -> None:
        """See `ObjectsDestroyed`."""
        rows = self.rows(record.object_id)
        self._drop_ranges(rows, undo)
        before = self._cells(rows)
        self._table.write("state", rows, ObjectState.MARK_DESTROYED)
        self._table.write("timestamp_ms", rows, record.marked_at_ms)
        self._table.write("range_count", rows, 0)
        self._table.write("first_range", rows, 0)
        if record.deep:
            attributes = self._table["attributes"][rows] | DEEP_DELETE_BIT
            self._table.write("attributes", rows, attributes)
        undo.append(lambda: self._restore_cells(rows, before))
        self.destroyed.add_ids(record.marked_at_ms, record.object_id)

    def replay_removed(self, record: ObjectsRemoved, undo: Undo) -> None:
        """See `ObjectsRemoved`."""
        rows = self.rows(record.object_id)
        committed = self._table["kind"][rows] != ObjectKind.UNKNOWN
        for object_id in record.object_id[committed].tolist():
            self.removed.put(object_id, None, undo)
        before = self._cells(rows)
        self._table.write("state", rows, ObjectState.REMOVED)
        self._tombstones += len(rows)
        undo.append(lambda: self._restore_removed(rows, before))

    def collect_garbage(self) -> None:
        """Drop tombstones and dead ranges where that pays; only when nothing can be undone."""
        if self._tombstones > max(_GARBAGE_ROWS_MIN, len(self._table) // 2):
            self._table.keep(self._table["state"] != ObjectState.REMOVED)
            self._tombstones = 0
        if self.ranges.garbage():
            live = np.zeros(len(self.ranges), dtype=np.bool_)
            live[range_rows(self._table["first_range"], self._table["range_count"])] = True
            moved = self.ranges.collect_garbage(live)
            holding = np.flatnonzero(self._table["range_count"])
            rows = self._table["first_range"][holding]
            self._table.write("first_range", holding, moved[rows])

    def load(
        self, columns: dict[str, Int64Column], ranges: dict[str, Int64Column], next_object_id: int
    ) -> None:
        """Fill an empty registry with objects in id order and their ranges in the same order.

        `ranges` has, besides its columns, `indexed`: whether the row's stream exists.
        """
        self.next_object_id = next_object_id
        if not len(columns["object_id"]):
            return
        count = columns["range_count"]
        first = np.where(count > 0, np.cumsum(count) - count, 0)
        self._table.load({**columns, "first_range": first})
        self.ranges.load(
            ranges["object_id"],
            ranges["stream_id"],
            ranges["start_offset"],
            ranges["end_offset"],
            ranges["indexed"].astype(np.bool_),
        )
        for state, due in (
            (ObjectState.PREPARED, self.deadlines),
            (ObjectState.MARK_DESTROYED, self.destroyed),
        ):
            rows = np.flatnonzero(columns["state"] == state)
            times = columns["timestamp_ms"][rows]
            for time_ms in np.unique(times).tolist():
                due.add_ids(time_ms, columns["object_id"][rows[times == time_ms]])

    # ---- cells ----

    def _commit_cells(
        self,
        rows: int | Int64Column,
        kind: int,
        first_range: int | Int64Column,
        range_count: int,
        record: StreamSetObjectCommitted | StreamObjectsCommitted,
    ) -> None:
        self._table.write("state", rows, _COMMITTED)
        self._table.write("kind", rows, kind)
        self._table.write("attributes", rows, record.attributes)
        self._table.write("timestamp_ms", rows, record.committed_at_ms)
        self._table.write("first_range", rows, first_range)
        self._table.write("range_count", rows, range_count)

    def _restore_prepared(
        self, rows: int | Int64Column, deadlines_ms: npt.NDArray[np.int64]
    ) -> None:
        for name, value in _UNCOMMITTED_CELLS.items():
            self._table.write(name, rows, value)
        self._table.write("timestamp_ms", rows, deadlines_ms)
        self._due_again(rows)

    def _cells(self, rows: int | Int64Column) -> dict[str, npt.NDArray[np.int64]]:
        return {name: self._table[name][rows] for name in _OBJECT_COLUMNS}

    def _restore_cells(
        self, rows: int | Int64Column, before: dict[str, npt.NDArray[np.int64]]
    ) -> None:
        for name, values in before.items():
            self._table.write(name, rows, values)
        self._due_again(rows)

    def _due_again(self, rows: int | Int64Column) -> None:
        # Entries of what was prepared or destroyed may have been dropped since.
        for row in np.atleast_1d(rows).tolist():
            due = {
                int(ObjectState.PREPARED): self.deadlines,
                int(ObjectState.MARK_DESTROYED): self.destroyed,
            }.get(int(self._table["state"][row]))
            if due is not None:
                time_ms = int(self._table["timestamp_ms"][row])
                due.add(time_ms, int(self._table["object_id"][row]), 1)

    def _restore_removed(self, rows: Int64Column, before: dict[str, npt.NDArray[np.int64]]) -> None:
        self._restore_cells(rows, before)
        self._tombstones -= len(rows)

    def _drop_ranges(self, rows: Int64Column, undo: Undo) -> None:
        held = range_rows(self._table["first_range"][rows], self._table["range_count"][rows])
        if not len(held):
            return
        streams, _, _ = self.ranges.columns(held)
        for stream_id, row in zip(streams.tolist(), held.tolist(), strict=True):
            self.ranges.unlink(stream_id, row, undo)
        self.ranges.mark_dead(len(held), undo)

    def _set_next(self, next_object_id: int, undo: Undo) -> None:
        before = self.next_object_id
        self.next_object_id = next_object_id
        undo.append(lambda: setattr(self, "next_object_id", before))


def range_rows(first: npt.NDArray[np.int64], count: npt.NDArray[np.int64]) -> Int64Column:
    """Return the row numbers `first[i] .. first[i] + count[i] - 1` of every i, in order."""
    total = int(count.sum())
    ends = np.cumsum(count, dtype=np.int64)
    shift: Int64Column = np.repeat(first.astype(np.int64) - (ends - count), count)
    return np.arange(total, dtype=np.int64) + shift
