"""Stored objects and queries about their rows, ranges and known facts.

Object ids come from a counter and are never reused. Rows are reused, so they are not ordered, and a
directory maps ids to rows. A row belongs to an object unless its state is UNUSED or REMOVED (it
becomes unused once the removal is committed). Streams appear here only as numbers in ranges.
`object_descriptions` adds descriptions and listings, `objects` the writing methods.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.api import request_identity
from streammeta.controller.metadata.api.object_slices import ObjectQueryColumns, ObjectSlices
from streammeta.controller.metadata.registries import object_indexes
from streammeta.controller.metadata.registries.object_directory import ObjectDirectory
from streammeta.controller.metadata.registries.object_ranges import ObjectRanges
from streammeta.controller.metadata.registries.stream_ranges import StreamSpans
from streammeta.controller.metadata.tables.object_facts import ObjectFacts
from streammeta.controller.metadata.tables.shared_views import Window, WindowView
from streammeta.controller.metadata.tables.stream_index import range_rows
from streammeta.controller.metadata.tables.tables import FreeBlocks, Table, TableView
from streammeta.controller.metadata.tables.values import (
    EMPTY_COLUMN,
    Int64Column,
    Mask,
    ObjectKind,
    ObjectState,
)

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
    "content_digest": np.int64,  # of the commit, see `request_identity`
}

UNUSED = 0
"""State of a row without an object. No `ObjectState` has this number."""

# Looking enum members up is slow, and every commit needs these.
_PREPARED = int(ObjectState.PREPARED)
_COMMITTED = int(ObjectState.COMMITTED)
_DESTROYED = int(ObjectState.MARK_DESTROYED)
_STREAM_SET = int(ObjectKind.STREAM_SET)
_COMPOSITE = int(ObjectKind.COMPOSITE)
_NAMED = int(ObjectKind.NAMED)
_SPANS_AT_ONCE = 32
"""Number of id spans examined in one step of a listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsView:
    """Immutable views of all tables of the registry of objects."""

    rows: TableView
    ranges: TableView
    facts: TableView
    next_object_id: int
    requests: WindowView[request_identity.RequestKey, request_identity.IssuedIds]
    removed: WindowView[int, int]


class ObjectQueries:
    """Stored objects by id, and all read-only queries about them.

    `rows` are row numbers as `rows()` returns them. `set_objects` counts the committed stream set
    objects of each node.
    """

    def __init__(self, set_objects: object_indexes.NodeObjects | None = None) -> None:
        self._table = Table(_OBJECT_COLUMNS)
        self._unused = FreeBlocks()
        self._facts = ObjectFacts()
        self._directory = ObjectDirectory()
        self._ranges = ObjectRanges()
        self._links = object_indexes.ObjectLinks()
        self._counts = object_indexes.ObjectCounts()
        self._set_objects = object_indexes.NodeObjects() if set_objects is None else set_objects
        self._requests: Window[request_identity.RequestKey, request_identity.IssuedIds] = Window(
            request_identity.REQUESTS_MAX
        )
        self._removed: Window[int, int] = Window(request_identity.REMOVED_OBJECTS_MAX)
        """Digests of the commits of removed objects."""
        self._deadlines = object_indexes.ExpiryIndex(lambda ids: self._expiry_times(_PREPARED, ids))
        self._destroyed = object_indexes.ExpiryIndex(
            lambda ids: self._expiry_times(_DESTROYED, ids)
        )
        self._swept: set[int] = set()

    # ---- reading ----

    def __len__(self) -> int:
        return self._counts.present()

    @property
    def next_object_id(self) -> int:
        """The id that is issued next. All smaller ones have been issued."""
        return self._directory.next_id

    @property
    def nbytes(self) -> int:
        """Bytes in use for objects and their ranges."""
        tables = self._table.nbytes + self._facts.nbytes + self._ranges.nbytes
        return tables + self._directory.nbytes

    def view(self) -> ObjectsView:
        """Return immutable views of the current registry."""
        return ObjectsView(
            rows=self._table.view(),
            ranges=self._ranges.view(),
            facts=self._facts.view(),
            next_object_id=self.next_object_id,
            requests=self._requests.view(),
            removed=self._removed.view(),
        )

    # ---- rows ----

    def row(self, object_id: int) -> int:
        """Return an object's row, negative if it was never issued or is removed."""
        return self._directory.row(object_id)

    def rows(self, object_ids: Int64Column) -> Int64Column:
        """Return objects' rows, negative where an object does not exist."""
        return self._directory.rows(object_ids)

    def row_states(self, rows: Int64Column) -> npt.NDArray[np.int8]:
        """Return the `ObjectState` number of each row."""
        states: npt.NDArray[np.int8] = self._table["state"][rows]
        return states

    def kinds(self, rows: Int64Column) -> npt.NDArray[np.int8]:
        """Return the `ObjectKind` number of each row."""
        kinds: npt.NDArray[np.int8] = self._table["kind"][rows]
        return kinds

    def attributes(self, rows: Int64Column) -> npt.NDArray[np.int32]:
        """Return the attributes word of each row."""
        words: npt.NDArray[np.int32] = self._table["attributes"][rows]
        return words

    def least_order_id(self, rows: Int64Column) -> int:
        """Return the smallest order id of stream set objects."""
        return int(self._table["order_id"][rows].min())

    def least_data_time_ms(self, rows: Int64Column) -> int:
        """Return the time of the oldest data in stream set objects."""
        return int(self._table["data_time_ms"][rows].min())

    def time_bounds(self, rows: Int64Column) -> tuple[int, int]:
        """Return the time bounds of all records in objects. (-1, -1) if any are unknown."""
        return self._facts.bounds(rows)

    def commit_time_ms(self, row: int) -> int:
        """Return when an object was committed, -1 if it is not, or is no longer, committed."""
        state, time_ms = self._table.cells(("state", "timestamp_ms"), row)
        return time_ms if state == _COMMITTED else -1

    def range_counts(self, rows: Int64Column) -> Int64Column:
        """Return the number of ranges in each object."""
        return self._table["range_count"][rows].astype(np.int64)

    def spans(self, rows: Int64Column) -> StreamSpans:
        """Return the ranges in objects, object by object."""
        held = range_rows(self._table["first_range"][rows], self._table["range_count"][rows])
        return StreamSpans(*self._ranges.columns(held))

    def are_in_state(self, rows: Int64Column, state: ObjectState) -> Mask:
        """Return which rows (negative: no object) are in a state."""
        fit = rows >= 0
        fit[fit] = self._table["state"][rows[fit]] == state
        return fit

    def are_stream_set_objects_of(self, rows: Int64Column, node_id: int) -> Mask:
        """Return which rows are committed stream set objects of a node."""
        fit = self.are_in_state(rows, ObjectState.COMMITTED)
        present = rows[fit]
        in_set = self._table["kind"][present] == _STREAM_SET
        fit[fit] = in_set & (self._table["node_id"][present] == node_id)
        return fit

    def are_objects_of_stream(self, rows: Int64Column, stream_id: int) -> Mask:
        """Return which rows are committed stream objects or composites of a stream."""
        fit = self.are_in_state(rows, ObjectState.COMMITTED)
        kinds = self._table["kind"][rows[fit]]
        fit[fit] = (kinds != _STREAM_SET) & (kinds != _NAMED)
        # Such an object has exactly one range, so its first row names the stream.
        streams, _, _ = self._ranges.columns(self._table["first_range"][rows[fit]])
        fit[fit] = streams == stream_id
        return fit

    # ---- ids ----

    def is_prepared(self, object_id: int) -> bool:
        """Return whether an object can be committed."""
        row = self._directory.row(object_id)
        return row >= 0 and self._table.cell("state", row) == _PREPARED

    def list_linked(self, composite_ids: Int64Column) -> Int64Column:
        """Return the ids of all objects linked to composites."""
        parts = [self._links.of(object_id) for object_id in composite_ids.tolist()]
        return np.concatenate((EMPTY_COLUMN, *parts))

    def find_issued(self, key: request_identity.RequestKey) -> request_identity.IssuedIds | None:
        """Return the answer to a remembered PrepareObjects, or None."""
        return self._requests.get(key)

    def list_expired(self, time_ms: int, limit: int, since_ms: int = 0) -> tuple[int, ...]:
        """Return at most `limit` prepared objects with an earlier deadline, earliest first.

        Deadlines before `since_ms` are skipped.
        """
        return self._deadlines.before(time_ms, limit, since_ms)

    def list_destroyed(self, time_ms: int, limit: int, since_ms: int = 0) -> tuple[int, ...]:
        """Return at most `limit` objects that were marked destroyed earlier, earliest first.

        Marks before `since_ms` are skipped.
        """
        return self._destroyed.before(time_ms, limit, since_ms)

    def newest_stamp_ms(self, most_ms: int) -> int:
        """Return the newest time of a commit or mark up to `most_ms`, or -1."""
        times = self._table["timestamp_ms"]
        # The time of a prepared object is its deadline, which lies in the future.
        chosen = (self._table["state"] != ObjectState.PREPARED) & (times <= most_ms)
        return int(times.max(initial=-1, where=chosen))

    def count(self, state: ObjectState) -> int:
        """Return the number of objects in a state."""
        return self._counts.of(state)

    def stream_set_object_count(self) -> int:
        """Return the number of committed stream set objects."""
        return self._set_objects.total()

    @property
    def committed_bytes(self) -> int:
        """Sum of the committed objects' sizes."""
        return self._counts.committed_bytes

    def require_room(self, object_size: int, others: Int64Column) -> None:
        """Raise `LimitExceededError` if objects of these sizes exceed the maximum total size."""
        self._counts.require_room(object_size, others)

    def page_rows(self, first_id: int, size: int) -> tuple[Int64Column, int]:
        """Return the rows of the first `size` objects from an id on, and the id after them.

        The id is -1 at the end.
        """
        found: list[Int64Column] = [EMPTY_COLUMN]
        count = 0
        for ids, rows in self._directory.from_id(first_id):
            # The next id becomes the token, so that the next page begins exactly there.
            if count + len(ids) > size:
                found.append(rows[: size - count])
                return np.concatenate(found), int(ids[size - count])
            found.append(rows)
            count += len(ids)
        return np.concatenate(found), -1

    def states(self, object_ids: Int64Column) -> Int64Column:
        """Return `ObjectState` numbers, including ids that were never issued or are removed."""
        rows = self.rows(object_ids)
        present = rows >= 0
        # The usual case, in which no id is missing.
        if np.count_nonzero(present) == len(rows):
            return self._table["state"][rows].astype(np.int64)
        issued = object_ids < self.next_object_id
        states = np.where(issued, ObjectState.REMOVED, ObjectState.NOT_ISSUED).astype(np.int64)
        states[present] = self._table["state"][rows[present]]
        return states

    def was_committed(self, object_ids: Int64Column) -> Mask:
        """Return which objects are, or within the window were, committed."""
        rows = self.rows(object_ids)
        committed = np.zeros(len(rows), dtype=np.bool_)
        present = rows >= 0
        committed[present] = self._table["kind"][rows[present]] != ObjectKind.UNKNOWN
        # Requests rarely name removed objects, so a loop is fast enough.
        for index in np.flatnonzero(~present).tolist():
            committed[index] = int(object_ids[index]) in self._removed
        return committed

    def commit_digest(self, object_id: int) -> int | None:
        """Return the digest of an object's commit, or None unless `was_committed`."""
        row = self.row(object_id)
        if row < 0:
            return self._removed.get(object_id)
        if self._table["kind"][row] == ObjectKind.UNKNOWN:
            return None
        return int(self._table["content_digest"][row])

    # ---- streams ----

    def range_rows_of_each(
        self, asked: ObjectQueryColumns, limits: Int64Column, most: int
    ) -> tuple[Int64Column, Int64Column]:
        """Return the ranges that answer many queries, see `ObjectRanges.rows_from_each`."""
        return self._ranges.rows_from_each(asked, limits, most)

    def slices_in(self, rows_of_ranges: Int64Column) -> ObjectSlices:
        """Return the contents of ranges, by their rows."""
        _, starts, ends = self._ranges.columns(rows_of_ranges)
        return self._slices(self._ranges.object_ids(rows_of_ranges), starts, ends)

    def slices(self, stream_id: int, start: int, end: int, limit: int) -> ObjectSlices:
        """Return the objects that contain a stream contiguously from `start` on.

        Stops at a gap, after `limit` objects, or at `end`. -1 means no end.
        """
        return self._slices(*self._ranges.rows_from(stream_id, start, end, limit))

    def _slices(self, ids: Int64Column, starts: Int64Column, ends: Int64Column) -> ObjectSlices:
        rows, table = self.rows(ids), self._table
        facts = self._facts.of(rows)
        return ObjectSlices(
            ids,
            table["kind"].take(rows),
            starts,
            ends,
            table["object_size"].take(rows),
            table["attributes"].take(rows),
            facts.min_timestamp_ms,
            facts.max_timestamp_ms,
            facts.crc32c,
        )

    def ranges_of_streams(self) -> npt.NDArray[np.int32]:
        """Return each stream's number of ranges in objects, see `ObjectRanges.counts`."""
        return self._ranges.counts()

    def owned_sizes(self, at_once: int) -> Iterator[tuple[Int64Column, Int64Column, Int64Column]]:
        """Yield (stream ids, node ids, sizes) of committed objects, from `at_once` rows at a time.

        The stream is -1 for objects that may contain several, the node for all but SSOs. The table
        may change between two pieces. Each reflects the moment it is requested. A piece of 65,536
        rows takes one or two milliseconds.
        """
        first = 0
        while first < len(self._table):
            # Read again each time, since the table may grow between two pieces.
            piece, table = slice(first, first + at_once), self._table
            rows = first + np.flatnonzero(table["state"][piece] == _COMMITTED)
            kinds = table["kind"][rows]
            is_alone = (kinds != _STREAM_SET) & (kinds != _NAMED) & (table["range_count"][rows] > 0)
            streams = np.full(len(rows), NONE_ID, dtype=np.int64)
            streams[is_alone] = self._ranges.columns(table["first_range"][rows[is_alone]])[0]
            yield streams, table["node_id"][rows].astype(np.int64), table["object_size"][rows]

            first += at_once

    def stream_objects(self, stream_id: int) -> tuple[Int64Column, Int64Column, Int64Column]:
        """Return (ids, starts, ends) of a stream's stream objects and composites, by end offset."""
        rows = self._ranges.rows_of_stream(stream_id)
        rows = rows[self._of_one_stream(rows)]
        _, starts, ends = self._ranges.columns(rows)
        return self._ranges.object_ids(rows), starts, ends

    def stream_object_run(self, stream_id: int) -> tuple[int, int]:
        """Return the first contiguous run (start, end) of a stream's stream objects, or (0, 0)."""
        _, starts, ends = self.stream_objects(stream_id)
        if not len(starts):
            return 0, 0
        # Ranges are ordered by end, so a gap is visible between neighbours.
        gaps = np.flatnonzero(starts[1:] != ends[:-1])
        last = int(gaps[0]) if len(gaps) else len(starts) - 1
        return int(starts[0]), int(ends[last])

    def stream_set_objects_of(self, node_id: int, after_id: int, limit: int) -> Int64Column:
        """Return the ids of a node's first `limit` committed SSOs above an id."""
        spans = self._set_objects.spans_from(node_id, after_id + 1)
        found: list[Int64Column] = [EMPTY_COLUMN]
        left = limit
        for first in range(0, len(spans), _SPANS_AT_ONCE):
            # Spans are only a superset: they may include other nodes' and destroyed objects.
            ids = object_indexes.ids_of_spans(spans[first : first + _SPANS_AT_ONCE])
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

    def _of_one_stream(self, range_rows_: npt.NDArray[np.integer]) -> Mask:
        """Return which ranges belong to a stream object or composite."""
        if not len(range_rows_):
            return np.zeros(0, dtype=np.bool_)
        kinds = self._table["kind"][self.rows(self._ranges.object_ids(range_rows_))]
        of_one: Mask = kinds != _STREAM_SET
        return of_one

    def _expiry_times(self, state: int, ids: Int64Column) -> Int64Column:
        times = np.full(len(ids), -1, dtype=np.int64)
        rows = self.rows(ids)
        present = np.flatnonzero(rows >= 0)
        present = present[self._table["state"][rows[present]] == state]
        times[present] = self._table["timestamp_ms"][rows[present]]
        return times

    def list_sweepings(self, limit: int) -> Int64Column:
        """Return at most `limit` objects left over from deleted streams."""
        found = [EMPTY_COLUMN]
        for stream_id in sorted(self._swept):
            if limit <= 0:
                break
            found.append(self.list_to_destroy((stream_id,), limit))
            limit -= len(found[-1])
        return np.concatenate(found)

    def list_to_destroy(self, stream_ids: Sequence[int], limit: int) -> Int64Column:
        """Return at most `limit` objects that are destroyed with these streams.

        These are stream objects, composites, and before each composite its linked objects.
        """
        _, listed = self._ranges.lists_of(np.array(stream_ids, dtype=np.int64))
        ids = self._ranges.object_ids(listed[self._of_one_stream(listed)])[:limit]
        composites = np.flatnonzero(self._table["kind"][self.rows(ids)] == _COMPOSITE)

        # Linked objects come first: a composite must not go before the objects it refers to.
        if not len(composites):
            return ids
        parts: list[Int64Column] = []
        for part in np.split(ids, composites):  # all but the first begin with a composite
            if len(part):
                parts.extend((self._links.of(int(part[0])), part))
        return np.concatenate(parts)[:limit]

    def has_sweepings(self) -> bool:
        """Return whether deleted streams have left objects to destroy."""
        return bool(self._swept)
