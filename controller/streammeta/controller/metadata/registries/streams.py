"""Registry of streams: owner, offsets and current range of ownership.

A stream's row is its id, since ids come from a counter and the row of a deleted stream stays empty.
A row contains the stream and its current range. Ended ranges, pending uploads and lost offsets are
in `stream_ranges`, tags in `stream_tags`, the contents of objects in `objects`. Requests are
decided in `stream_decisions`, `uploads` and `compactions`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import ErrorCode, InvariantError
from streammeta.controller.metadata.api import request_identity
from streammeta.controller.metadata.api.answers import StreamRange
from streammeta.controller.metadata.registries import stream_ranges
from streammeta.controller.metadata.registries.object_indexes import NodeCounts
from streammeta.controller.metadata.registries.objects import Objects
from streammeta.controller.metadata.registries.stream_heads import DELETED, Head, check_owner
from streammeta.controller.metadata.registries.stream_tags import StreamTags
from streammeta.controller.metadata.tables import shared_views
from streammeta.controller.metadata.tables.section_checks import windows
from streammeta.controller.metadata.tables.tables import Array, Table, TableView, Undo, roomy_zeros
from streammeta.controller.metadata.tables.values import (
    EMPTY_COLUMN,
    INT64_MAX,
    SHARED_EPOCH,
    Int64Column,
    Mask,
    StreamState,
    Tags,
    page_of_rows,
)
from streammeta.controller.records import record as rec

STREAM_COLUMNS = {
    "epoch": np.int64,
    "range_index": np.int32,
    "start_offset": np.int64,
    "end_offset": np.int64,
    "state": np.int8,
    "node_id": np.int32,
    "range_start": np.int64,
}

_OPENED = int(StreamState.OPENED)

_HEAD_COLUMNS = Head._fields
_RANGE_CELLS = ("range_index", "epoch", "start_offset", "end_offset", "node_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsView:
    """Immutable views of all tables of the registry of streams. `tags` are flattened."""

    rows: TableView
    past_ranges: TableView
    tags: shared_views.SharedDictView[int, tuple[str, ...]]
    pending: list[tuple[int, stream_ranges.StreamSpans]]
    lost: stream_ranges.StreamSpans
    requests: shared_views.WindowView[request_identity.RequestKey, request_identity.IssuedIds]


class Streams:
    """Streams by id, the pending uploads of former owners, and lost offsets."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._pending = stream_ranges.PendingUploads()
        self._lost = stream_ranges.LostRanges()
        self._open_counts = NodeCounts()
        self._table = Table({**STREAM_COLUMNS, "past_head": np.int32})
        self._live = 0
        self._past = stream_ranges.PastRanges()
        self._requests: shared_views.Window[
            request_identity.RequestKey, request_identity.IssuedIds
        ] = shared_views.Window(request_identity.REQUESTS_MAX)
        self._tags = StreamTags()

    # ---- reading ----

    def __len__(self) -> int:
        """Return the next stream id, which is the number of streams ever created."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for rows and ranges, without tags."""
        return self._table.nbytes + self._past.nbytes

    @property
    def tag_characters(self) -> int:
        """Number of characters in all tags."""
        return self._tags.characters

    def tags_of(self, stream_id: int) -> Tags:
        """Return a stream's tags, sorted by key."""
        return self._tags.of_stream(stream_id)

    def find_by_tags(
        self, tags: Tags, owner: int | None, first: int, size: int
    ) -> tuple[Int64Column, int]:
        """Return the streams with all these tags, and this owner if set, as `StreamTags.page`."""
        cell = self._table.cell
        return self._tags.page(
            tags, first, size, lambda stream_id: owner in (None, cell("node_id", stream_id))
        )

    def live_count(self) -> int:
        """Return the number of existing streams."""
        return self._live

    def exists(self, stream_id: int) -> bool:
        """Return whether the stream was created and not deleted."""
        return stream_id < len(self._table) and self._table.cell("state", stream_id) != DELETED

    def offsets(self, stream_id: int) -> tuple[int, int]:
        """Return the start and the end of an existing stream."""
        start, end = self._table.cells(("start_offset", "end_offset"), stream_id)
        return start, end

    def heads(self, stream_ids: Sequence[int]) -> list[Head[int] | None]:
        """Return the heads of streams, None where a stream does not exist."""
        ids = np.array(stream_ids, dtype=np.int64)
        # Ids above the last issued one have no row.
        issued = ids < len(self._table)
        at = ids[issued]
        columns = (self._table[name][at].tolist() for name in _HEAD_COLUMNS)

        found = (
            None if state == DELETED else Head(epoch, state, *others)
            for epoch, state, *others in zip(*columns, strict=True)
        )

        return [next(found) if known else None for known in issued.tolist()]

    def ownership(self, stream_id: int, epoch: int, node_id: int) -> ErrorCode:
        """Return NONE if `node_id` owns the stream under exactly this epoch, open or closed."""
        return check_owner(self.heads((stream_id,))[0], epoch, node_id)

    def live_starts(self, spans: stream_ranges.StreamSpans) -> Int64Column:
        """Return the start of each range's visible part.

        It is at or above the range's end if nothing is visible or the stream is deleted.
        """
        exists = self._table["state"][spans.stream_id] != DELETED
        starts = np.maximum(self._table["start_offset"][spans.stream_id], spans.start_offset)
        return np.where(exists, starts, INT64_MAX)

    def active_uploads(self, node_id: int) -> stream_ranges.StreamSpans:
        """Return a node's pending uploads, each from the next offset to commit on."""
        spans = self._pending.of_node(node_id)
        if not len(spans):
            return spans
        starts = self.live_starts(spans)
        owed = stream_ranges.StreamSpans(spans.stream_id, starts, spans.end_offset)
        return owed.take(starts < spans.end_offset)

    def pending_of(self, node_id: int) -> stream_ranges.StreamSpans:
        """Return a node's list of pending uploads, including completed entries."""
        return self._pending.of_node(node_id)

    def nodes_with_pending(self) -> list[int]:
        """Return the nodes whose list of pending uploads is not empty, by id."""
        return [node_id for node_id, _ in self._pending.in_order()]

    def lost_of(self, stream_id: int) -> tuple[tuple[int, int], ...]:
        """Return a stream's lost ranges, by start."""
        return self._lost.of_stream(stream_id)

    def lost_end(self, stream_id: int, offset: int) -> int:
        """Return the end of the lost range that contains an offset, or -1."""
        return self._lost.end_at(stream_id, offset)

    def lost_ends(self, stream_id: Int64Column, offset: Int64Column) -> Int64Column:
        """Return the result of `lost_end` for each of many offsets."""
        return self._lost.ends_at(stream_id, offset)

    def open_count(self, node_id: int) -> int:
        """Return the number of streams that a node has open."""
        return self._open_counts.get(node_id)

    def find_issued(self, key: request_identity.RequestKey) -> request_identity.IssuedIds | None:
        """Return the answer to a remembered CreateStreams, or None."""
        return self._requests.get(key)

    def view(self) -> StreamsView:
        """Return immutable views of the current registry."""
        return StreamsView(
            rows=self._table.view(),
            past_ranges=self._past.view(),
            tags=self._tags.view(),
            pending=self._pending.in_order(),
            lost=self._lost.spans,
            requests=self._requests.view(),
        )

    def find_existing(self, ids: Int64Column) -> Int64Column:
        """Return the indexes in `ids` of existing streams."""
        issued = np.flatnonzero(ids < len(self._table))
        return issued[self.exist(ids[issued])]

    # ---- columns of many streams, by id; each id was issued ----

    def exist(self, ids: npt.NDArray[np.integer]) -> Mask:
        """Return which streams are not deleted."""
        live: Mask = self._table["state"][ids] != DELETED
        return live

    def are_opened_by(self, node_id: int, ids: Int64Column | slice) -> Mask:
        """Return which streams are open on a node."""
        table = self._table
        opened: Mask = (table["state"][ids] == _OPENED) & (table["node_id"][ids] == node_id)
        return opened

    def head_columns(self, ids: Int64Column) -> Head[Int64Column]:
        """Return the heads of issued streams. The state of a deleted stream is `DELETED`."""
        return Head._make(self._table[name][ids] for name in _HEAD_COLUMNS)

    def head_cells(self, stream_id: int) -> Head[int]:
        """Return the head of one issued stream."""
        return Head._make(self._table.cells(_HEAD_COLUMNS, stream_id))

    def epochs(self, ids: Int64Column) -> Int64Column:
        """Return streams' epochs."""
        return self._column("epoch", ids)

    def states(self, ids: Int64Column) -> Int64Column:
        """Return streams' states: `StreamState` numbers, or `DELETED`."""
        return self._column("state", ids)

    def start_offsets(self, ids: npt.NDArray[np.integer]) -> Int64Column:
        """Return the first visible offsets of streams."""
        return self._column("start_offset", ids)

    def end_offsets(self, ids: Int64Column) -> Int64Column:
        """Return streams' ends."""
        return self._column("end_offset", ids)

    def visible_from(self, ids: npt.NDArray[np.integer]) -> Int64Column:
        """Return the first visible offsets of streams, the maximum for deleted ones."""
        return np.where(self.exist(ids), self.start_offsets(ids), INT64_MAX)

    def range_indexes(self, ids: Int64Column) -> Int64Column:
        """Return the indexes of streams' current ranges. -1 means never opened."""
        return self._column("range_index", ids)

    def _column(self, name: str, ids: npt.NDArray[np.integer]) -> Int64Column:
        values: Int64Column = self._table[name][ids]
        return values

    # ---- ranges of ownership ----

    def past_ranges(self, stream_id: int) -> tuple[StreamRange, ...]:
        """Return a stream's ended ranges, oldest first."""
        past, head = self._past, int(self._table["past_head"][stream_id])
        ended = [
            StreamRange(*(past.cell(name, row) for name in _RANGE_CELLS))
            for row in past.chain(head)
        ]
        return tuple(reversed(ended))

    def ranges(self, stream_id: int) -> tuple[StreamRange, ...]:
        """Return all ranges of a stream, oldest first, none if it was never opened."""
        names = ("range_index", "epoch", "range_start", "end_offset", "node_id")
        cells = self._table.cells(names, stream_id)
        if cells[0] < 0:
            return ()
        return (*self.past_ranges(stream_id), StreamRange(*cells))

    def with_past_ranges(self, ids: Int64Column) -> Int64Column:
        """Return the streams that have ended ranges."""
        return ids[self._table["past_head"][ids] > 0]

    def owed_epochs(self, node_id: int, owed: stream_ranges.StreamSpans) -> Int64Column | None:
        """Return the epoch of the node's range that contains each upload.

        None if an upload has no such range or several, since its owner is ambiguous then.
        """
        table, past, at = self._table, self._past, owed.stream_id
        found = (
            (table["node_id"][at] == node_id)
            & (table["range_start"][at] <= owed.start_offset)
            & (table["end_offset"][at] == owed.end_offset)
        )
        epochs = np.where(found, table["epoch"][at], -1)
        count = found.astype(np.int64)

        heads = table["past_head"][at].copy()
        # Walk all chains of past ranges in parallel, one link per round.
        while np.count_nonzero(heads):
            on = np.flatnonzero(heads)
            rows = heads[on] - 1  # a head of 0 means none
            cells = {name: past.cells(name, rows) for name in _RANGE_CELLS}
            holds = (
                (cells["node_id"] == node_id)
                & (cells["start_offset"] <= owed.start_offset[on])
                & (cells["end_offset"] == owed.end_offset[on])
            )
            epochs[on[holds]] = cells["epoch"][holds]
            count[on] += holds
            heads[on] = past.cells("previous", rows)

        opened = self.are_opened_by(node_id, at)
        return epochs if np.count_nonzero((count == 1) & ~opened) == len(count) else None

    # ---- pages, in id order from an id on ----

    def page(self, first: int, size: int, owner: int | None) -> tuple[Int64Column, int]:
        """Return the first `size` streams, optionally of one owner, and the id after them."""

        def are_wanted(rows: slice) -> Mask:
            live: Mask = self._table["state"][rows] != DELETED
            return live if owner is None else live & (self._table["node_id"][rows] == owner)

        return page_of_rows(first, len(self), size, are_wanted)

    def page_opened_by(self, node_id: int, first: int, size: int) -> tuple[Int64Column, int]:
        """Return the first `size` streams that a node has open, and the id after them."""
        if not self._open_counts.get(node_id):
            return EMPTY_COLUMN, -1
        return page_of_rows(first, len(self), size, lambda rows: self.are_opened_by(node_id, rows))

    # ---- replaying ----

    def drop_pending(self, node_id: int, undo: Undo) -> None:
        """Forget a node's pending uploads."""
        self._pending.drop(node_id, undo)

    def replay_created(self, record: rec.StreamsCreated, undo: Undo) -> None:
        """Replay `StreamsCreated`."""
        first, next_id = record.first_stream_id, len(self._table)
        if first != next_id:
            raise InvariantError(f"creates streams from {first}, the next stream id is {next_id}")

        rows = self._table.append(record.count, undo)
        for name in ("epoch", "range_index", "node_id"):
            self._table.write(name, rows, -1)
        self._table.write("state", rows, StreamState.CLOSED)
        shared = np.flatnonzero(record.shared) + first
        self._table.write("state", shared, StreamState.SHARED)
        self._table.write("epoch", shared, SHARED_EPOCH)
        undo.assign(self, "_live", self._live + record.count)
        for stream_id, tags in enumerate(record.tags, first):
            self._tags.set(stream_id, tags, undo)

        kind = request_identity.RequestKind.CREATE_STREAMS
        key = request_identity.RequestKey(kind, record.node_id, record.request_id)
        digest = request_identity.digest_of_streams(record.tags, record.shared.tolist())
        issued = request_identity.IssuedIds(first, record.count, content_digest=digest)
        self._requests.put(key, issued, undo)

    def replay_opened(self, record: rec.StreamsOpened, undo: Undo) -> None:
        """Replay `StreamsOpened`."""
        rows = record.stream_id
        # A stream that was never opened has no range to end.
        self._end_ranges(rows[self._table["range_index"][rows] >= 0], undo)
        self._count_open(rows, -1, undo)

        ends = self._table["end_offset"][rows]
        self._table.put("range_start", rows, ends, undo)
        self._table.put("range_index", rows, self._table["range_index"][rows] + 1, undo)
        self._table.put("epoch", rows, record.stream_epoch, undo)
        self._table.put("node_id", rows, record.node_id, undo)
        self._table.put("state", rows, _OPENED, undo)
        self._count_open(rows, 1, undo)

        for stream_id, tags in zip(rows.tolist(), record.tags, strict=False):
            # Tags are set once, by the first owner that sends any.
            if stream_id not in self._tags:
                self._tags.set(stream_id, tags, undo)

    def _end_ranges(self, rows: Int64Column, undo: Undo) -> None:
        if not len(rows):
            return
        ended = {
            "stream_id": rows,
            "range_index": self._table["range_index"][rows],
            "epoch": self._table["epoch"][rows],
            "start_offset": self._table["range_start"][rows],
            "end_offset": self._table["end_offset"][rows],
            "node_id": self._table["node_id"][rows],
        }
        heads = self._past.add(ended, self._table["past_head"][rows], undo)
        self._table.put("past_head", rows, heads, undo)

    def replay_reopened(self, record: rec.StreamsReopened, undo: Undo) -> None:
        """Replay `StreamsReopened`."""
        self._table.put("state", record.stream_id, _OPENED, undo)
        self._count_open(record.stream_id, 1, undo)

    def replay_closed(self, record: rec.StreamsClosed, undo: Undo) -> None:
        """Replay `StreamsClosed`."""
        rows = record.stream_id
        self._count_open(rows, -1, undo)
        self._table.put("state", rows, StreamState.CLOSED, undo)
        if not len(record.end_offset):
            return

        before = self.raise_ends(rows, record.end_offset, undo)
        # A fast close promises the offsets between both ends.
        owed = record.end_offset > before
        spans = stream_ranges.StreamSpans(rows, before, record.end_offset)
        owners = self._table["node_id"][rows]
        for node_id in np.unique(owners[owed]).tolist():
            self._pending.put(node_id, spans.take(owed & (owners == node_id)), undo)

    def _count_open(self, rows: Int64Column, delta: int, undo: Undo) -> None:
        """Count the open streams among `rows` under their owners."""
        opened = rows[self._table["state"][rows] == _OPENED]
        self._open_counts.add_each(self._table["node_id"][opened], delta, undo)

    def replay_pending_set(self, record: rec.PendingUploadsSet, undo: Undo) -> None:
        """Replay `PendingUploadsSet`."""
        spans = stream_ranges.StreamSpans(record.stream_id, record.start_offset, record.end_offset)
        self._pending.put(record.node_id, spans, undo)

    def replay_abandoned(self, record: rec.UploadsAbandoned, undo: Undo) -> None:
        """Replay `UploadsAbandoned`."""
        spans = self.active_uploads(record.node_id).of_streams(record.stream_id)
        self._lost.add(spans, undo)
        # Empty ranges remove the entries from the list.
        nothing = np.zeros_like(record.stream_id)
        self._pending.put(
            record.node_id, stream_ranges.StreamSpans(record.stream_id, nothing, nothing), undo
        )

    def replay_trimmed(self, record: rec.StreamsTrimmed, undo: Undo) -> None:
        """Replay `StreamsTrimmed`."""
        rows, starts = record.stream_id, record.start_offset
        self._table.put("start_offset", rows, starts, undo)
        self._table.put(
            "range_start", rows, np.maximum(self._table["range_start"][rows], starts), undo
        )

        self.raise_ends(rows, starts, undo)
        self._lost.trim(rows, starts, undo)

        # Few streams have past ranges, so these are handled one by one.
        has_past = self._table["past_head"][rows] > 0
        for row, start in zip(rows[has_past].tolist(), starts[has_past].tolist(), strict=True):
            self._trim_past(row, start, undo)

    def _trim_past(self, stream_id: int, start: int, undo: Undo) -> None:
        below = set()
        head = int(self._table["past_head"][stream_id])
        for row in self._past.chain(head):
            if self._past.cell("end_offset", row) <= start:
                below.add(row)
            elif self._past.cell("start_offset", row) < start:
                self._past.clip(row, start, undo)
        if below:
            self._table.put("past_head", stream_id, self._past.remove(head, below, undo), undo)

    def replay_ranges_removed(self, record: rec.RangesRemoved, undo: Undo) -> None:
        """Replay `RangesRemoved`."""
        for stream_id in sorted(set(record.stream_id.tolist())):
            indexes = set(record.range_index[record.stream_id == stream_id].tolist())
            head = int(self._table["past_head"][stream_id])
            rows = {
                r for r in self._past.chain(head) if self._past.cell("range_index", r) in indexes
            }
            self._table.put("past_head", stream_id, self._past.remove(head, rows, undo), undo)

    def replay_deleted(self, record: rec.StreamsDeleted, undo: Undo) -> None:
        """Replay `StreamsDeleted`."""
        rows = record.stream_id
        self._count_open(rows, -1, undo)
        undo.assign(self, "_live", self._live - len(rows))
        self._lost.drop(rows, undo)

        for stream_id in rows.tolist():
            head = int(self._table["past_head"][stream_id])
            # The rows of past ranges are reused, so none may refer to the stream.
            self._past.remove(head, set(self._past.chain(head)), undo)
            self._tags.drop(stream_id, undo)

        self._objects.drop_streams(rows, undo)
        for name in (*STREAM_COLUMNS, "past_head"):
            self._table.put(name, rows, DELETED if name == "state" else 0, undo)

    def raise_ends(self, rows: Int64Column, ends: Int64Column, undo: Undo) -> Int64Column:
        """Raise end offsets to at least `ends` and return the previous ones."""
        before = self._table["end_offset"][rows]
        self._table.write("end_offset", rows, np.maximum(before, ends))
        undo.append(lambda: self._table.write("end_offset", rows, before))
        return before

    def raise_end(self, stream_id: int, end: int, undo: Undo) -> bool:
        """Raise a stream's end offset to at least `end` and return whether it was lower.

        Works on a single cell, because the vectors of `raise_ends` cost several times more.
        """
        before = self._table.cell("end_offset", stream_id)
        if before >= end:
            return False
        self._table.write("end_offset", stream_id, end)
        undo.append(lambda: self._table.write("end_offset", stream_id, before))
        return True

    def load(
        self,
        next_stream_id: int,
        streams: dict[str, Int64Column],
        ranges: dict[str, Int64Column],
        tags: dict[int, tuple[str, ...]],
    ) -> None:
        """Fill an empty registry with streams in id order, all ranges by stream and index."""
        if not next_stream_id:
            return
        self._live = len(streams["stream_id"])

        full = _rows_by_id(next_stream_id, streams)
        full["past_head"] = roomy_zeros(next_stream_id, np.int32)

        of_range, starts = ranges["stream_id"], ranges["start_offset"]
        if np.array_equal(of_range, streams["stream_id"]) and len(of_range) == next_stream_id:
            full["range_start"] = starts  # each stream has one range
        else:
            full["range_start"] = roomy_zeros(next_stream_id, np.int64)
            # The range with the stream's own index is the current one.
            is_current = ranges["range_index"] == full["range_index"][of_range]
            full["range_start"][of_range[is_current]] = starts[is_current]
            past = {name: values[~is_current] for name, values in ranges.items()}
            ids, heads = self._past.load(past)
            full["past_head"][ids] = heads

        self._table.load(full)
        for rows in windows(next_stream_id):
            self._open_counts.count(full["node_id"][rows][full["state"][rows] == _OPENED])

        self._tags.load(tags)

    def load_other(
        self,
        pending: Iterable[tuple[int, stream_ranges.StreamSpans]],
        lost: stream_ranges.StreamSpans,
        requests: Iterable[tuple[request_identity.RequestKey, request_identity.IssuedIds]],
    ) -> None:
        """Fill an empty registry with pending uploads, lost offsets and requests."""
        self._pending.load(pending)
        self._lost.spans = lost
        self._requests.load(requests)


def _rows_by_id(next_stream_id: int, streams: dict[str, Int64Column]) -> dict[str, Array]:
    """Return the columns of `streams` with one row per issued id. Missing ids are deleted.

    Without missing ids the same arrays are returned.
    """
    ids = streams["stream_id"]
    names = [name for name in STREAM_COLUMNS if name != "range_start"]
    if len(ids) == next_stream_id:
        return {name: streams[name] for name in names}
    full = {name: roomy_zeros(next_stream_id, STREAM_COLUMNS[name]) for name in names}
    full["state"][:] = DELETED
    for name in names:
        full[name][ids] = streams[name]
    return full
