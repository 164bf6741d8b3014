"""Registry of objects: issues ids and replays prepare, commit, link, destroy and remove.

Commits are decided in `uploads` and `compactions`, the leader's own requests in `maintenance`. The
stored objects and queries about them are in `object_queries`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import ErrorCode, InvariantError
from streammeta.controller.metadata.api.answers import PrepareObjectsAnswer
from streammeta.controller.metadata.api.request_identity import (
    NO_DIGEST,
    IssuedIds,
    RequestKey,
    RequestKind,
)
from streammeta.controller.metadata.api.requests import PrepareObjects
from streammeta.controller.metadata.registries.object_descriptions import ObjectDescriptions
from streammeta.controller.metadata.registries.object_indexes import exact_sum
from streammeta.controller.metadata.registries.object_queries import UNUSED
from streammeta.controller.metadata.tables import section_checks
from streammeta.controller.metadata.tables.object_facts import Facts
from streammeta.controller.metadata.tables.stream_index import range_rows
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import (
    COMPOSITE_BITS,
    KIND_MASK,
    Int64Column,
    Mask,
    ObjectKind,
    ObjectState,
)
from streammeta.controller.records import record as rec

DEEP_DELETE_BIT = 1 << 18
"""In the attributes word: destroying a composite destroys its linked objects."""

# Looking enum members up is slow, and every commit needs these.
_PREPARED = int(ObjectState.PREPARED)
_COMMITTED = int(ObjectState.COMMITTED)
_DESTROYED = int(ObjectState.MARK_DESTROYED)
_LINKED = int(ObjectState.LINKED)
_STREAM_SET = int(ObjectKind.STREAM_SET)
_STREAM = int(ObjectKind.STREAM)
_COMPOSITE = int(ObjectKind.COMPOSITE)
_NAMED = int(ObjectKind.NAMED)
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
"""Cells of a prepared object's row, except its id and deadline."""
_DESTROYED_CELLS = ("state", "timestamp_ms", "attributes", "first_range", "range_count")


class Objects(ObjectDescriptions):
    """The stored objects, with all methods that write them."""

    # ---- deciding ----

    def decide_prepare(
        self, request: PrepareObjects, now_ms: int
    ) -> tuple[Sequence[rec.ObjectsPrepared], PrepareObjectsAnswer]:
        """Issue ids. A repeat returns the first answer. The node has been checked."""
        key = RequestKey(RequestKind.PREPARE_OBJECTS, request.node.node_id, request.request_id)
        issued = self.find_issued(key)
        if issued is None:
            record = rec.ObjectsPrepared(
                request_id=request.request_id,
                node_id=request.node.node_id,
                first_object_id=self.next_object_id,
                count=request.count,
                deadline_ms=now_ms + request.ttl_ms,
            )
            first_id, deadline_ms = record.first_object_id, record.deadline_ms
        else:
            issued.require_count(key, request.count)
            first_id, deadline_ms = issued.first_id, issued.deadline_ms
        answer = PrepareObjectsAnswer(
            error=ErrorCode.NONE, first_object_id=first_id, deadline_ms=deadline_ms
        )
        return (record,) if issued is None else (), answer

    # ---- replaying ----

    def replay_prepared(self, record: rec.ObjectsPrepared, undo: Undo) -> None:
        """Replay `ObjectsPrepared`."""
        first, count = record.first_object_id, record.count
        if first != self.next_object_id:
            raise InvariantError(
                f"record issues objects from {first}, "
                f"but the next object id is {self.next_object_id}"
            )

        rows = self._unused_rows(count)
        self._table.write("object_id", rows, np.arange(first, first + count))
        self._table.write("timestamp_ms", rows, record.deadline_ms)
        self._table.write_cells(rows, _UNCOMMITTED_CELLS)
        self._directory.append(first, rows)
        self._counts.change(_PREPARED, count)
        self._deadlines.add(record.deadline_ms, first, count)
        undo.append(lambda: self._take_back(first, rows))

        key = RequestKey(RequestKind.PREPARE_OBJECTS, record.node_id, record.request_id)
        self._requests.put(key, IssuedIds(first, count, record.deadline_ms), undo)

    def replay_reclaimed(self, record: rec.ObjectsReclaimed, undo: Undo) -> None:
        """Replay `ObjectsReclaimed`."""
        ids, count = record.object_id, len(record.object_id)
        rows = self._unused_rows(count)
        self._table.write("object_id", rows, ids)
        self._table.write("timestamp_ms", rows, record.deadline_ms)
        self._table.write_cells(rows, _UNCOMMITTED_CELLS)
        self._directory.insert(ids, rows)
        self._counts.change(_PREPARED, count)
        self._deadlines.add_ids(record.deadline_ms, ids)
        undo.append(lambda: self._give_up(ids, rows))

    def _give_up(self, ids: Int64Column, rows: Int64Column) -> None:
        self._table.write("state", rows, UNUSED)
        self._unused.give(1, rows)
        self._directory.remove(ids)
        self._counts.change(_PREPARED, -len(rows))

    def _unused_rows(self, count: int) -> Int64Column:
        rows = self._unused.take(1, count)
        # The table keeps these rows after an undo, which returns them as unused.
        fresh = self._table.extend(count - len(rows))
        if fresh.stop > fresh.start:
            rows = np.concatenate((rows, np.arange(fresh.start, fresh.stop, dtype=np.int64)))
        return rows

    def _take_back(self, first_id: int, rows: Int64Column) -> None:
        self._table.write("state", rows, UNUSED)
        self._unused.give(1, rows)
        self._directory.truncate(first_id)
        self._counts.change(_PREPARED, -len(rows))

    def replay_stream_set_objects(
        self, record: rec.StreamSetObjectsCommitted, undo: Undo
    ) -> Int64Column:
        """Replay `StreamSetObjectsCommitted` and return the row of every range."""
        rows = self._rows_of_record(record.object_id)
        firsts, range_rows_ = self._ranges.add(
            record.object_id, record.range_count, record.ranges, undo
        )

        # Undo restores the deadlines, which the commit times replace.
        deadlines_ms = self._table["timestamp_ms"][rows]
        cells: dict[str, int | Int64Column] = {
            "kind": _STREAM_SET,
            "node_id": record.node_id,
            "order_id": record.order_id,
            "data_time_ms": record.data_time_ms,
            "range_count": record.range_count,
        }

        self._commit_cells(rows, firsts, record, cells)
        self._facts.put(rows, record)
        self._count_commit(rows, deadlines_ms, record.object_size, undo)
        self._set_objects.add(record.node_id, record.object_id, undo)
        return range_rows_

    def replay_stream_objects(self, record: rec.StreamObjectsCommitted, undo: Undo) -> Int64Column:
        """Replay `StreamObjectsCommitted` and return the row of every range."""
        rows = self._rows_of_record(record.object_id)
        # A stream object has exactly one range.
        ones = np.ones(len(rows), dtype=np.int64)
        firsts, range_rows_ = self._ranges.add(record.object_id, ones, record, undo)

        deadlines_ms = self._table["timestamp_ms"][rows]
        composite = (record.attributes & KIND_MASK) == COMPOSITE_BITS
        cells: dict[str, int | Int64Column] = {
            "kind": np.where(composite, _COMPOSITE, _STREAM),
            "range_count": 1,
        }

        self._commit_cells(rows, firsts, record, cells)
        self._facts.put(rows, record)
        self._count_commit(rows, deadlines_ms, record.object_size, undo)
        return range_rows_

    def replay_named(self, record: rec.NamedObjectsCommitted, undo: Undo) -> None:
        """Replay `NamedObjectsCommitted`."""
        rows = self._rows_of_record(record.object_id)
        deadlines_ms = self._table["timestamp_ms"][rows]
        cells: dict[str, int | Int64Column] = {
            "state": _COMMITTED,
            "kind": _NAMED,
            "object_size": record.object_size,
            "timestamp_ms": record.committed_at_ms,
            "content_digest": record.content_digest,
        }
        self._table.write_cells(rows, cells)
        self._facts.put(rows, Facts(crc32c=record.crc32c))
        self._count_commit(rows, deadlines_ms, record.object_size, undo)

    def link_ranges(
        self,
        streams: Int64Column,
        rows: Int64Column,
        newest: Mask,
        undo: Undo,
    ) -> None:
        """Add range rows to the lists of their streams.

        `newest` marks rows whose end is above all others of their stream, at most one per stream.
        """
        if np.count_nonzero(newest) == len(newest):
            self._ranges.link_last(streams, rows, undo)
            return
        if newest.any():
            self._ranges.link_last(streams[newest], rows[newest], undo)
        self._ranges.link_many(streams[~newest], rows[~newest], undo)

    def link_range(
        self, stream: Int64Column, row: Int64Column, undo: Undo, *, is_newest: bool
    ) -> None:
        """Add one range row to the list of its stream, as `link_ranges` does."""
        link = self._ranges.link_last if is_newest else self._ranges.link_many
        link(stream, row, undo)

    def replay_linked(self, record: rec.ObjectsLinked, undo: Undo) -> None:
        """Replay `ObjectsLinked`."""
        ids = record.object_id
        rows = self._rows_of_record(ids)
        before = self._cells(rows, ("state", "order_id"))
        was_linked = before["state"] == _LINKED

        if np.count_nonzero(was_linked):
            self._links.remove(before["order_id"][was_linked], ids[was_linked], undo)
        # Linked objects are read through their composite, not through the index of the stream.
        if np.count_nonzero(was_linked) < len(rows):
            self._ranges.unlink(self._table["first_range"][rows[~was_linked]], undo)

        self._table.write("state", rows, _LINKED)
        self._table.write("order_id", rows, record.composite_id)
        self._recount(rows, before, undo)
        self._links.add(record.composite_id, ids, undo)

    def replay_attributes(self, record: rec.ObjectAttributesSet, undo: Undo) -> None:
        """Replay `ObjectAttributesSet`."""
        self._table.put("attributes", self.row(record.object_id), record.attributes, undo)

    def replay_destroyed(self, record: rec.ObjectsDestroyed, undo: Undo) -> None:
        """Replay `ObjectsDestroyed`."""
        rows = self._rows_of_record(record.object_id)
        before = self._cells(rows, _DESTROYED_CELLS)
        self._drop_ranges(rows, before, undo)

        linked = before["state"] == _LINKED
        if np.count_nonzero(linked):
            composites = self._table["order_id"][rows[linked]]
            self._links.remove(composites, record.object_id[linked], undo)

        # Only committed SSOs are counted for their node.
        in_set = (before["state"] == _COMMITTED) & (self._table["kind"][rows] == _STREAM_SET)
        if np.count_nonzero(in_set):
            owners = self._table["node_id"][rows[in_set]]
            self._set_objects.remove(owners, record.object_id[in_set], undo)

        self._table.write("state", rows, _DESTROYED)
        self._table.write("timestamp_ms", rows, record.marked_at_ms)
        # The ranges' rows are released, and must not be reachable from here.
        self._table.write("range_count", rows, 0)
        self._table.write("first_range", rows, 0)
        if record.deep:
            self._table.write("attributes", rows, before["attributes"] | DEEP_DELETE_BIT)

        self._recount(rows, before, undo)
        self._destroyed.add_ids(record.marked_at_ms, record.object_id)

    def _drop_ranges(
        self, rows: Int64Column, cells: dict[str, npt.NDArray[np.int64]], undo: Undo
    ) -> None:
        firsts, counts = cells["first_range"], cells["range_count"]
        if not np.count_nonzero(counts):
            return
        self._ranges.release(firsts, counts, undo)
        # Linked and destroyed objects are in no stream's list.
        listed = cells["state"] == _COMMITTED
        held = range_rows(firsts[listed], counts[listed])
        if len(held):
            self._ranges.unlink(held, undo)
            if self._swept:
                streams, _, _ = self._ranges.columns(held)
                self._end_sweeps(np.unique(streams), undo)

    def drop_streams(self, stream_ids: Int64Column, undo: Undo) -> None:
        """Drop SSO ranges of deleted streams. Stream objects remain until they are swept."""
        ordered = np.sort(stream_ids)
        counts, listed = self._ranges.lists_of(ordered)
        kept = self._of_one_stream(listed)
        if np.count_nonzero(kept):
            owners = np.repeat(ordered, counts)[kept]
            swept = set(np.unique(owners).tolist())
            self._swept |= swept
            undo.append(lambda: self._swept.difference_update(swept))
        self._ranges.keep_rows(ordered, kept, undo)

    def _end_sweeps(self, stream_ids: Int64Column, undo: Undo) -> None:
        counts, _ = self._ranges.lists_of(stream_ids)
        ended = self._swept.intersection(stream_ids[counts == 0].tolist())
        if ended:
            self._swept -= ended
            undo.append(lambda: self._swept.update(ended))

    def replay_removed(self, record: rec.ObjectsRemoved, undo: Undo) -> None:
        """Replay `ObjectsRemoved`."""
        ids = record.object_id
        rows = self._rows_of_record(ids)
        # Repeats of these commits must still be recognised.
        committed = self._table["kind"][rows] != ObjectKind.UNKNOWN
        digests = self._table["content_digest"][rows[committed]]
        for object_id, digest in zip(ids[committed].tolist(), digests.tolist(), strict=True):
            self._removed.put(object_id, digest, undo)

        self._table.write("state", rows, ObjectState.REMOVED)
        self._directory.toggle(ids)
        self._counts.change(_DESTROYED, -len(rows))

        # The row is not reused, and the id only hidden, until the record can no longer be undone.
        undo.append(lambda: self._bring_back(ids, rows))
        undo.when_committed.append(lambda: self._forget(ids, rows))

    def _bring_back(self, ids: Int64Column, rows: Int64Column) -> None:
        self._table.write("state", rows, _DESTROYED)
        self._directory.toggle(ids)
        self._counts.change(_DESTROYED, len(rows))
        self._file_again(rows)

    def _forget(self, ids: Int64Column, rows: Int64Column) -> None:
        self._table.write("state", rows, UNUSED)
        self._facts.clear(rows)
        self._directory.remove(ids)
        self._unused.give(1, rows)

    def load(
        self,
        columns: dict[str, Int64Column],
        ranges: dict[str, Int64Column],
        exists: Callable[[npt.NDArray[np.integer]], Mask],
        visible_from: section_checks.VisibleFrom,
        next_object_id: int,
    ) -> None:
        """Fill an empty registry with objects in id order and their ranges in the same order.

        `exists` returns whether streams with these ids exist. Raises `DamagedMetadataError` if
        two ranges share a visible offset.
        """
        ids, count, state = columns["object_id"], columns["range_count"], columns["state"]
        self._directory.load(ids, next_object_id)
        if not len(ids):
            return

        found = self._find_by_stream(columns, ranges["stream_id"], exists)
        first_range = self._ranges.load(ranges, count, found, visible_from)
        self._table.load({**columns, "first_range": first_range})

        for rows in section_checks.windows(len(ids)):
            self._counts.add(state[rows], columns["object_size"][rows], 1)
        in_set = (columns["kind"] == _STREAM_SET) & (state == _COMMITTED)
        self._set_objects.load(columns["node_id"][in_set], ids[in_set])

        linked = state == _LINKED
        self._links.load(columns["order_id"][linked], ids[linked])
        for due_state, due in ((_PREPARED, self._deadlines), (_DESTROYED, self._destroyed)):
            chosen = state == due_state
            due.load(columns["timestamp_ms"][chosen], ids[chosen])

    def _find_by_stream(
        self,
        columns: dict[str, Int64Column],
        stream_id: npt.NDArray[np.integer],
        exists: Callable[[npt.NDArray[np.integer]], Mask],
    ) -> Mask:
        """Return which ranges are found by their streams, and note streams left to sweep."""
        found = np.empty(len(stream_id), dtype=np.bool_)

        committed = columns["state"] == _COMMITTED
        in_set = columns["kind"] == _STREAM_SET
        # Per object: 0 is not indexed, 1 is a stream object or composite, 2 is an SSO.
        ways = committed.astype(np.int8) + (committed & in_set)
        for place, way in section_checks.repeat_in_parts(ways, columns["range_count"]):
            ids = stream_id[place : place + len(way)]
            gone = ~exists(ids)
            # SSO ranges of deleted streams are not indexed: nothing remains to sweep.
            found[place : place + len(way)] = (way == 1) | ((way == 2) & ~gone)
            self._swept.update(np.unique(ids[(way == 1) & gone]).tolist())
        return found

    def load_windows(
        self,
        requests: Iterable[tuple[RequestKey, IssuedIds]],
        removed: Iterable[tuple[int, int]],
    ) -> None:
        """Fill the windows of remembered requests and of removed objects' digests."""
        self._requests.load(requests)
        self._removed.load(removed)

    def load_facts(self, object_ids: Int64Column, facts: Facts) -> None:
        """Set the known facts of loaded objects."""
        if len(object_ids):
            self._facts.put(self._rows_of_record(object_ids), facts)

    # ---- cells ----

    def _rows_of_record(self, object_ids: Int64Column) -> Int64Column:
        rows = self.rows(object_ids)
        # One row is the common case, and needs no vector operation.
        if not (len(rows) == 1 and rows.item() >= 0) and len(rows) and np.minimum.reduce(rows) < 0:
            object_id = int(object_ids[np.argmin(rows)])
            raise InvariantError(f"record names object {object_id}, which does not exist")
        return rows

    def _commit_cells(
        self,
        rows: Int64Column,
        first_range: Int64Column,
        record: rec.StreamSetObjectsCommitted | rec.StreamObjectsCommitted,
        others: Mapping[str, int | Int64Column],
    ) -> None:
        cells: dict[str, int | Int64Column] = {
            "state": _COMMITTED,
            "attributes": record.attributes,
            "object_size": record.object_size,
            "timestamp_ms": record.committed_at_ms,
            "first_range": first_range,
            **others,
        }
        digest = record.content_digest
        # Records of older versions have no digest, and the cell keeps "unknown".
        if isinstance(digest, int) or len(digest):
            cells["content_digest"] = digest
        self._table.write_cells(rows, cells)

    def _count_commit(
        self, rows: Int64Column, deadlines_ms: Int64Column, sizes: Int64Column, undo: Undo
    ) -> None:
        count = len(rows)
        size = int(sizes[0]) if count == 1 else exact_sum(sizes)
        self._counts.change(_PREPARED, -count)
        self._counts.change(_COMMITTED, count, size)
        undo.append(lambda: self._take_back_commit(rows, deadlines_ms, size))

    def _take_back_commit(self, rows: Int64Column, deadlines_ms: Int64Column, size: int) -> None:
        self._table.write_cells(rows, _UNCOMMITTED_CELLS)
        self._table.write("timestamp_ms", rows, deadlines_ms)
        self._facts.clear(rows)
        self._counts.change(_PREPARED, len(rows))
        self._counts.change(_COMMITTED, -len(rows), -size)
        self._file_again(rows)

    def _cells(self, rows: Int64Column, names: Sequence[str]) -> dict[str, npt.NDArray[np.int64]]:
        return {name: self._table[name][rows] for name in names}

    def _recount(
        self, rows: Int64Column, before: dict[str, npt.NDArray[np.int64]], undo: Undo
    ) -> None:
        """Update the counts after a change of state. Undo restores these cells."""
        sizes = self._table["object_size"][rows]
        after = self._table["state"][rows]
        self._counts.add(before["state"], sizes, -1)
        self._counts.add(after, sizes, 1)
        undo.append(lambda: self._restore_cells(rows, before, after))

    def _restore_cells(
        self,
        rows: Int64Column,
        before: dict[str, npt.NDArray[np.int64]],
        states: npt.NDArray[np.int64],
    ) -> None:
        sizes = self._table["object_size"][rows]
        self._counts.add(states, sizes, -1)
        self._counts.add(before["state"], sizes, 1)
        self._table.write_cells(rows, before)
        self._file_again(rows)

    def _file_again(self, rows: Int64Column) -> None:
        # The expiry indexes may have dropped these ids since the objects changed their states.
        for state, due in ((_PREPARED, self._deadlines), (_DESTROYED, self._destroyed)):
            again = rows[self._table["state"][rows] == state]
            due.load(self._table["timestamp_ms"][again], self._table["object_id"][again])
