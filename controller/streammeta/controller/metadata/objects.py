"""The registry of objects: every id issued and not yet removed, and what each object holds.

Ids come from a counter and are never reused; rows are, so they are in no order, and `directory`
says which row an id has. A row is an object's unless its state is UNUSED or REMOVED (it becomes
unused once the removal is committed). Streams appear here only as numbers in ranges. Commits are
decided in `uploads` and `compactions`; this module prepares, expires, destroys and removes.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import ErrorCode, InvariantError
from streammeta.controller.metadata.answers import PrepareObjectsAnswer
from streammeta.controller.metadata.object_directory import ObjectDirectory
from streammeta.controller.metadata.object_facts import Facts, ObjectFacts
from streammeta.controller.metadata.object_indexes import (
    ExpiryIndex,
    NodeObjects,
    ObjectCounts,
    ObjectLinks,
    exact_sum,
    ids_of_spans,
)
from streammeta.controller.metadata.object_ranges import ObjectRanges
from streammeta.controller.metadata.request_identity import (
    NO_DIGEST,
    REMOVED_OBJECTS_MAX,
    REQUESTS_MAX,
    IssuedIds,
    RequestKey,
    RequestKind,
)
from streammeta.controller.metadata.requests import PrepareObjects
from streammeta.controller.metadata.shared_views import Window
from streammeta.controller.metadata.stream_index import range_rows
from streammeta.controller.metadata.tables import FreeBlocks, Table, TableView, Undo
from streammeta.controller.metadata.values import (
    COMPOSITE_BITS,
    EMPTY_COLUMN,
    KIND_MASK,
    Int64Column,
    ObjectKind,
    ObjectState,
    column,
)
from streammeta.controller.records.record import (
    ObjectAttributesSet,
    ObjectsDestroyed,
    ObjectsLinked,
    ObjectsPrepared,
    ObjectsRemoved,
    StreamObjectsCommitted,
    StreamSetObjectsCommitted,
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
    "order_id": np.int64,  # of a linked object: its composite
    "data_time_ms": np.int64,
    "first_range": np.int32,
    "range_count": np.int32,
    "content_digest": np.int64,  # of the commit, see `commit_digests`
}

UNUSED = 0
"""State of a row that no object has; no `ObjectState` has this number."""

# Members of an enum are slow to look up; these are looked up for every commit.
_PREPARED = int(ObjectState.PREPARED)
_COMMITTED = int(ObjectState.COMMITTED)
_DESTROYED = int(ObjectState.MARK_DESTROYED)
_LINKED = int(ObjectState.LINKED)
_STREAM_SET = int(ObjectKind.STREAM_SET)
_STREAM = int(ObjectKind.STREAM)
_COMPOSITE = int(ObjectKind.COMPOSITE)
_UNCOMMITTED_CELLS = {
    "state": _PREPARED,
    "kind": int(ObjectKind.UNKNOWN),
    "attributes": 0,
    "node_id": -1,
    "object_size": 0,
    "order_id": -1,
    "data_time_ms": -1,
    "first_range": 0,
    "range_count": 0,
    "content_digest": NO_DIGEST,
}
"""What a prepared object's row holds, besides its id and deadline."""
_SPANS_AT_ONCE = 32
"""Spans of ids that are looked at in one step of a listing."""
_DESTROYED_CELLS = ("state", "timestamp_ms", "attributes", "first_range", "range_count")


class Objects:
    """Objects by id, the ranges they hold, and when they are due to expire or to be deleted.

    `set_objects` knows each node's committed set objects.
    """

    def __init__(self, set_objects: NodeObjects | None = None) -> None:
        self._table = Table(_OBJECT_COLUMNS)
        self._unused = FreeBlocks()
        self.facts = ObjectFacts()
        self.directory = ObjectDirectory()
        self.ranges = ObjectRanges()
        self.links = ObjectLinks()
        self.counts = ObjectCounts()
        self.set_objects = NodeObjects() if set_objects is None else set_objects
        self.requests: Window[RequestKey, IssuedIds] = Window(REQUESTS_MAX)
        self.removed: Window[int, int] = Window(REMOVED_OBJECTS_MAX)
        """Digests of the commits of objects that are removed."""
        self.deadlines = ExpiryIndex(lambda ids: self._expiry_times(_PREPARED, ids))
        self.destroyed = ExpiryIndex(lambda ids: self._expiry_times(_DESTROYED, ids))
        self._swept: set[int] = set()

    # ---- reading ----

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        """Return a column over all rows, those that are no object's included."""
        return self._table[name]

    def __len__(self) -> int:
        return self.counts.present()

    @property
    def next_object_id(self) -> int:
        """The id that is issued next."""
        return self.directory.next_id

    @property
    def nbytes(self) -> int:
        """Bytes in use for objects and their ranges."""
        tables = self._table.nbytes + self.facts.nbytes + self.ranges.nbytes
        return tables + self.directory.nbytes

    def view(self) -> tuple[TableView, TableView, TableView]:
        """Return immutable views of the objects, of their ranges and of what is known of them."""
        return self._table.view(), self.ranges.view(), self.facts.view()

    def row(self, object_id: int) -> int:
        """Return an object's row; it is negative if it was never issued or is removed."""
        return self.directory.row(object_id)

    def rows(self, object_ids: Int64Column) -> Int64Column:
        """Return objects' rows, negative where there is none."""
        return self.directory.rows(object_ids)

    def range_rows_of(self, row: int) -> Int64Column:
        """Return the range rows of the object in a row."""
        first = int(self._table["first_range"][row])
        return np.arange(first, first + int(self._table["range_count"][row]), dtype=np.int64)

    def page_rows(self, first_id: int, size: int) -> tuple[Int64Column, int]:
        """Return the rows of the first `size` objects from an id on, and the id after them.

        The latter is -1 if there are no more.
        """
        found: list[Int64Column] = [EMPTY_COLUMN]
        count = 0
        for ids, rows in self.directory.from_id(first_id):
            if count + len(ids) > size:
                found.append(rows[: size - count])
                return np.concatenate(found), int(ids[size - count])
            found.append(rows)
            count += len(ids)
        return np.concatenate(found), -1

    def states(self, object_ids: Int64Column) -> Int64Column:
        """Return `ObjectState` numbers, also of ids that were never issued or are removed."""
        rows = self.rows(object_ids)
        present = rows >= 0
        if np.count_nonzero(present) == len(rows):
            return self._table["state"][rows].astype(np.int64)
        issued = object_ids < self.next_object_id
        states = np.where(issued, ObjectState.REMOVED, ObjectState.NOT_ISSUED).astype(np.int64)
        states[present] = self._table["state"][rows[present]]
        return states

    def was_committed(self, object_ids: Int64Column) -> npt.NDArray[np.bool_]:
        """Return which objects are, or within the window were, committed."""
        rows = self.rows(object_ids)
        committed = np.zeros(len(rows), dtype=np.bool_)
        present = rows >= 0
        committed[present] = self._table["kind"][rows[present]] != ObjectKind.UNKNOWN
        for index in np.flatnonzero(~present).tolist():
            committed[index] = int(object_ids[index]) in self.removed
        return committed

    def commit_digest(self, object_id: int) -> int | None:
        """Return the digest of the commit of an object; None if `was_committed` says no."""
        row = self.row(object_id)
        if row < 0:
            return self.removed.get(object_id)
        if self._table["kind"][row] == ObjectKind.UNKNOWN:
            return None
        return int(self._table["content_digest"][row])

    def stream_object_rows(self, stream_id: int) -> Int64Column:
        """Return the range rows of a stream's stream objects and composites, by end offset."""
        rows = self.ranges.rows_of_stream(stream_id)
        return rows[self._of_one_stream(rows)]

    def stream_object_run(self, stream_id: int) -> tuple[int, int]:
        """Return the first contiguous run (start, end) of a stream's stream objects, or (0, 0)."""
        rows = self.stream_object_rows(stream_id)
        if not len(rows):
            return 0, 0
        _, starts, ends = self.ranges.columns(rows)
        gaps = np.flatnonzero(starts[1:] != ends[:-1])
        last = int(gaps[0]) if len(gaps) else len(rows) - 1
        return int(starts[0]), int(ends[last])

    def set_objects_of(self, node_id: int, after_id: int, limit: int) -> Int64Column:
        """Return the ids of a node's first `limit` committed set objects above an id."""
        spans = self.set_objects.spans_from(node_id, after_id + 1)
        found: list[Int64Column] = [EMPTY_COLUMN]
        left = limit
        for first in range(0, len(spans), _SPANS_AT_ONCE):
            ids = ids_of_spans(spans[first : first + _SPANS_AT_ONCE])
            rows = self.rows(ids)
            present = (rows >= 0) & (ids > after_id)
            ids, rows = ids[present], rows[present]
            held = (self._table["node_id"][rows] == node_id) & (
                self._table["state"][rows] == _COMMITTED
            )
            found.append(ids[held][:left])
            left -= len(found[-1])
            if left <= 0:
                break
        return np.concatenate(found)

    def _of_one_stream(self, range_rows_: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Say which ranges are those of a stream object or composite."""
        if not len(range_rows_):
            return np.zeros(0, dtype=np.bool_)
        kinds = self._table["kind"][self.rows(self.ranges.object_ids(range_rows_))]
        of_one: npt.NDArray[np.bool_] = kinds != _STREAM_SET
        return of_one

    def _expiry_times(self, state: int, ids: Int64Column) -> Int64Column:
        times = np.full(len(ids), -1, dtype=np.int64)
        rows = self.rows(ids)
        present = np.flatnonzero(rows >= 0)
        present = present[self._table["state"][rows[present]] == state]
        times[present] = self._table["timestamp_ms"][rows[present]]
        return times

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

    def decide_sweep(self, now_ms: int, limit: int) -> ObjectsDestroyed | None:
        """Destroy what streams that are deleted have left; None if they have left nothing."""
        found: list[Int64Column] = []
        left = limit
        for stream_id in sorted(self._swept):
            if left <= 0:
                break
            found.append(self.to_destroy((stream_id,), left))
            left -= len(found[-1])
        if not found:
            return None
        return ObjectsDestroyed(object_id=np.concatenate(found), marked_at_ms=now_ms, deep=True)

    def to_destroy(self, stream_ids: Sequence[int], limit: int) -> Int64Column:
        """Return at most `limit` of what is destroyed with these streams.

        That is stream objects, composites, and before each composite what it links.
        """
        _, listed = self.ranges.listed(np.array(stream_ids, dtype=np.int64))
        ids = self.ranges.object_ids(listed[self._of_one_stream(listed)])[:limit]
        composites = np.flatnonzero(self._table["kind"][self.rows(ids)] == _COMPOSITE)
        if not len(composites):
            return ids
        parts: list[Int64Column] = []
        for part in np.split(ids, composites):
            if len(part):
                parts.extend((self.links.of(int(part[0])), part))
        return np.concatenate(parts)[:limit]

    def has_sweepings(self) -> bool:
        """Whether a stream that is deleted has left objects to destroy."""
        return bool(self._swept)

    # ---- replaying ----

    def replay_prepared(self, record: ObjectsPrepared, undo: Undo) -> None:
        """See `ObjectsPrepared`."""
        first, count = record.first_object_id, record.count
        if first != self.next_object_id:
            raise InvariantError(
                f"record issues objects from {first}, "
                f"but the next object id is {self.next_object_id}"
            )
        rows = self._unused.take(1, count)
        fresh = self._table.extend(count - len(rows))
        if fresh.stop > fresh.start:
            rows = np.concatenate((rows, np.arange(fresh.start, fresh.stop, dtype=np.int64)))
        self._table.write("object_id", rows, np.arange(first, first + count))
        self._table.write("timestamp_ms", rows, record.deadline_ms)
        for name, value in _UNCOMMITTED_CELLS.items():
            self._table.write(name, rows, value)
        self.directory.append(first, rows)
        self.counts.change(_PREPARED, count)
        self.deadlines.add(record.deadline_ms, first, count)
        undo.append(lambda: self._take_back(first, rows))
        key = RequestKey(RequestKind.PREPARE_OBJECTS, record.node_id, record.request_id)
        self.requests.put(key, IssuedIds(first, count, record.deadline_ms), undo)

    def _take_back(self, first_id: int, rows: Int64Column) -> None:
        self._table.write("state", rows, UNUSED)
        self._unused.give(1, rows)
        self.directory.truncate(first_id)
        self.counts.change(_PREPARED, -len(rows))

    def replay_set_objects(self, record: StreamSetObjectsCommitted, undo: Undo) -> Int64Column:
        """Commit set objects with their ranges; return the row of every range."""
        rows = self._rows_of_record(record.object_id)
        firsts, range_rows_ = self.ranges.add(
            record.object_id, record.range_count, record.ranges, undo
        )
        deadlines_ms = self._table["timestamp_ms"][rows]
        table = self._table
        table.write("node_id", rows, record.node_id)
        table.write("order_id", rows, record.order_id)
        table.write("data_time_ms", rows, record.data_time_ms)
        table.write("range_count", rows, record.range_count)
        self._commit_cells(rows, _STREAM_SET, firsts, record)
        self.facts.put(rows, record)
        self._count_commit(rows, deadlines_ms, record.object_size, undo)
        self.set_objects.add(record.node_id, record.object_id, undo)
        return range_rows_

    def replay_stream_objects(self, record: StreamObjectsCommitted, undo: Undo) -> Int64Column:
        """Commit stream objects with their ranges; return their range rows."""
        rows = self._rows_of_record(record.object_id)
        ones = np.ones(len(rows), dtype=np.int64)
        firsts, range_rows_ = self.ranges.add(record.object_id, ones, record, undo)
        deadlines_ms = self._table["timestamp_ms"][rows]
        composite = (record.attributes & KIND_MASK) == COMPOSITE_BITS
        self._table.write("range_count", rows, 1)
        self._commit_cells(rows, np.where(composite, _COMPOSITE, _STREAM), firsts, record)
        self.facts.put(rows, record)
        self._count_commit(rows, deadlines_ms, record.object_size, undo)
        return range_rows_

    def replay_linked(self, record: ObjectsLinked, undo: Undo) -> None:
        """See `ObjectsLinked`."""
        ids = record.object_id
        rows = self._rows_of_record(ids)
        before = self._cells(rows, ("state", "order_id"))
        was_linked = before["state"] == _LINKED
        if np.count_nonzero(was_linked):
            self.links.remove(before["order_id"][was_linked], ids[was_linked], undo)
        if np.count_nonzero(was_linked) < len(rows):
            self.ranges.unlink(self._table["first_range"][rows[~was_linked]], undo)
        self._table.write("state", rows, _LINKED)
        self._table.write("order_id", rows, record.composite_id)
        self._recount(rows, before, undo)
        self.links.add(record.composite_id, ids, undo)

    def replay_attributes(self, record: ObjectAttributesSet, undo: Undo) -> None:
        """See `ObjectAttributesSet`."""
        self._table.put("attributes", self.row(record.object_id), record.attributes, undo)

    def replay_destroyed(self, record: ObjectsDestroyed, undo: Undo) -> None:
        """See `ObjectsDestroyed`."""
        rows = self._rows_of_record(record.object_id)
        before = self._cells(rows, _DESTROYED_CELLS)
        self._drop_ranges(rows, before, undo)
        linked = before["state"] == _LINKED
        if np.count_nonzero(linked):
            composites = self._table["order_id"][rows[linked]]
            self.links.remove(composites, record.object_id[linked], undo)
        in_set = (before["state"] == _COMMITTED) & (self._table["kind"][rows] == _STREAM_SET)
        if np.count_nonzero(in_set):
            owners = self._table["node_id"][rows[in_set]]
            self.set_objects.remove(owners, record.object_id[in_set], undo)
        self._table.write("state", rows, _DESTROYED)
        self._table.write("timestamp_ms", rows, record.marked_at_ms)
        self._table.write("range_count", rows, 0)
        self._table.write("first_range", rows, 0)
        if record.deep:
            self._table.write("attributes", rows, before["attributes"] | DEEP_DELETE_BIT)
        self._recount(rows, before, undo)
        self.destroyed.add_ids(record.marked_at_ms, record.object_id)

    def _drop_ranges(
        self, rows: Int64Column, cells: dict[str, npt.NDArray[np.int64]], undo: Undo
    ) -> None:
        firsts, counts = cells["first_range"], cells["range_count"]
        if not np.count_nonzero(counts):
            return
        self.ranges.release(firsts, counts, undo)
        listed = cells["state"] == _COMMITTED
        held = range_rows(firsts[listed], counts[listed])
        if len(held):
            self.ranges.unlink(held, undo)
            if self._swept:
                streams, _, _ = self.ranges.columns(held)
                self._end_sweeps(np.unique(streams), undo)

    def drop_streams(self, stream_ids: Int64Column, undo: Undo) -> None:
        """Forget what set objects hold of deleted streams; stream objects stay to be swept."""
        ordered = np.sort(stream_ids)
        counts, listed = self.ranges.listed(ordered)
        kept = self._of_one_stream(listed)
        if np.count_nonzero(kept):
            owners = np.repeat(ordered, counts)[kept]
            swept = set(np.unique(owners).tolist())
            self._swept |= swept
            undo.append(lambda: self._swept.difference_update(swept))
        self.ranges.keep_listed(ordered, kept, undo)

    def _end_sweeps(self, stream_ids: Int64Column, undo: Undo) -> None:
        counts, _ = self.ranges.listed(stream_ids)
        ended = self._swept.intersection(stream_ids[counts == 0].tolist())
        if ended:
            self._swept -= ended
            undo.append(lambda: self._swept.update(ended))

    def replay_removed(self, record: ObjectsRemoved, undo: Undo) -> None:
        """See `ObjectsRemoved`."""
        ids = record.object_id
        rows = self._rows_of_record(ids)
        committed = self._table["kind"][rows] != ObjectKind.UNKNOWN
        digests = self._table["content_digest"][rows[committed]]
        for object_id, digest in zip(ids[committed].tolist(), digests.tolist(), strict=True):
            self.removed.put(object_id, digest, undo)
        self._table.write("state", rows, ObjectState.REMOVED)
        self.directory.hide(ids)
        self.counts.change(_DESTROYED, -len(rows))
        undo.append(lambda: self._bring_back(ids, rows))
        undo.when_committed.append(lambda: self._forget(ids, rows))

    def _bring_back(self, ids: Int64Column, rows: Int64Column) -> None:
        self._table.write("state", rows, _DESTROYED)
        self.directory.show(ids)
        self.counts.change(_DESTROYED, len(rows))
        self._file_again(rows)

    def _forget(self, ids: Int64Column, rows: Int64Column) -> None:
        self._table.write("state", rows, UNUSED)
        self.facts.clear(rows)
        self.directory.remove(ids)
        self._unused.give(1, rows)

    def load(
        self,
        columns: dict[str, Int64Column],
        ranges: dict[str, Int64Column],
        exists: npt.NDArray[np.bool_],
        starts: Int64Column,
        next_object_id: int,
    ) -> None:
        """Fill an empty registry with objects in id order and their ranges in the same order.

        `exists` has one entry a range: whether its stream exists; `starts` where what is visible
        of that stream begins. Raises `DamagedMapError` if visible offsets are in two ranges.
        """
        ids, count, state = columns["object_id"], columns["range_count"], columns["state"]
        self.directory.load(ids, np.arange(len(ids), dtype=np.int64), next_object_id)
        if not len(ids):
            return
        listed = np.repeat(state == _COMMITTED, count)
        left = listed & ~exists & np.repeat(columns["kind"] != _STREAM_SET, count)
        self._swept = set(np.unique(ranges["stream_id"][left]).tolist())
        first = self.ranges.load(ranges, count, listed & exists | left, starts)
        self._table.load({**columns, "first_range": np.where(count > 0, first, 0)})
        self.counts.add(state, columns["object_size"], 1)
        in_set = (columns["kind"] == _STREAM_SET) & (state == _COMMITTED)
        self.set_objects.load(columns["node_id"][in_set], ids[in_set])
        linked = state == _LINKED
        self.links.load(columns["order_id"][linked], ids[linked])
        for due_state, due in ((_PREPARED, self.deadlines), (_DESTROYED, self.destroyed)):
            chosen = state == due_state
            due.load(columns["timestamp_ms"][chosen], ids[chosen])

    def load_facts(self, object_ids: Int64Column, facts: Facts) -> None:
        """Say what is known of objects that were loaded."""
        if len(object_ids):
            self.facts.put(self._rows_of_record(object_ids), facts)

    # ---- cells ----

    def _rows_of_record(self, object_ids: Int64Column) -> Int64Column:
        rows = self.rows(object_ids)
        if len(rows) and np.minimum.reduce(rows) < 0:
            object_id = int(object_ids[np.argmin(rows)])
            raise InvariantError(f"record names object {object_id}, which there is not")
        return rows

    def _commit_cells(
        self,
        rows: Int64Column,
        kind: int | Int64Column,
        first_range: Int64Column,
        record: StreamSetObjectsCommitted | StreamObjectsCommitted,
    ) -> None:
        table = self._table
        table.write("state", rows, _COMMITTED)
        table.write("kind", rows, kind)
        table.write("attributes", rows, record.attributes)
        table.write("object_size", rows, record.object_size)
        table.write("timestamp_ms", rows, record.committed_at_ms)
        table.write("first_range", rows, first_range)
        digest = record.content_digest
        if isinstance(digest, int) or len(digest):
            table.write("content_digest", rows, digest)

    def _count_commit(
        self, rows: Int64Column, deadlines_ms: Int64Column, sizes: Int64Column, undo: Undo
    ) -> None:
        count = len(rows)
        size = int(sizes[0]) if count == 1 else exact_sum(sizes)
        self.counts.change(_PREPARED, -count)
        self.counts.change(_COMMITTED, count, size)
        undo.append(lambda: self._take_back_commit(rows, deadlines_ms, size))

    def _take_back_commit(self, rows: Int64Column, deadlines_ms: Int64Column, size: int) -> None:
        for name, value in _UNCOMMITTED_CELLS.items():
            self._table.write(name, rows, value)
        self._table.write("timestamp_ms", rows, deadlines_ms)
        self.facts.clear(rows)
        self.counts.change(_PREPARED, len(rows))
        self.counts.change(_COMMITTED, -len(rows), -size)
        self._file_again(rows)

    def _cells(self, rows: Int64Column, names: Sequence[str]) -> dict[str, npt.NDArray[np.int64]]:
        return {name: self._table[name][rows] for name in names}

    def _recount(
        self, rows: Int64Column, before: dict[str, npt.NDArray[np.int64]], undo: Undo
    ) -> None:
        """Count what has changed its state, and have undo restore these cells."""
        sizes = self._table["object_size"][rows]
        after = self._table["state"][rows]
        self.counts.add(before["state"], sizes, -1)
        self.counts.add(after, sizes, 1)
        undo.append(lambda: self._restore_cells(rows, before, after))

    def _restore_cells(
        self,
        rows: Int64Column,
        before: dict[str, npt.NDArray[np.int64]],
        states: npt.NDArray[np.int64],
    ) -> None:
        sizes = self._table["object_size"][rows]
        self.counts.add(states, sizes, -1)
        self.counts.add(before["state"], sizes, 1)
        for name, values in before.items():
            self._table.write(name, rows, values)
        self._file_again(rows)

    def _file_again(self, rows: Int64Column) -> None:
        # What was prepared or destroyed may have been dropped from where it was filed since.
        for state, due in ((_PREPARED, self.deadlines), (_DESTROYED, self.destroyed)):
            again = rows[self._table["state"][rows] == state]
            due.load(self._table["timestamp_ms"][again], self._table["object_id"][again])
