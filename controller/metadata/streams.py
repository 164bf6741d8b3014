"""The streams: who owns each, from which offset to which it reaches, and its ranges of ownership.

A stream's row is its id: ids come from a counter and a deleted stream's row stays, empty. A row
holds the stream and its current range; ended ranges are in `past_ranges`. What objects hold of a
stream is asked of `objects`. Uploads are decided in `commits`.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from controller.errors import ErrorCode, InvariantError
from controller.metadata.answers import (
    CreateStreamsAnswer,
    OpenedStream,
    OpenStreamsAnswer,
    StreamErrorsAnswer,
)
from controller.metadata.columns import Table, TableView, Undo
from controller.metadata.objects import Objects
from controller.metadata.past_ranges import PastRanges
from controller.metadata.request_log import (
    REQUESTS_MAX,
    IssuedIds,
    RequestKey,
    RequestKind,
    Window,
)
from controller.metadata.requests import (
    CloseStreams,
    CreateStreams,
    DeleteStreams,
    OpenStreams,
    StreamToTrim,
    TrimStreams,
)
from controller.metadata.values import Int64Column, StreamState, Tags, column
from controller.records.record import (
    ObjectsDestroyed,
    RangesRemoved,
    Record,
    StreamsClosed,
    StreamsCreated,
    StreamsDeleted,
    StreamsOpened,
    StreamsReopened,
    StreamsTrimmed,
)

DELETED = -1
"""State of a row whose stream is gone."""

STREAM_COLUMNS = {
    "epoch": np.int64,
    "range_index": np.int32,
    "start_offset": np.int64,
    "end_offset": np.int64,
    "state": np.int8,
    "node_id": np.int32,
    "range_start": np.int64,
}


class _Head(NamedTuple):
    """What requests about a stream are judged by."""

    epoch: int
    state: int
    node_id: int
    start_offset: int
    end_offset: int


_HEAD_COLUMNS = _Head._fields


class Streams:
    """Streams by id."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._table = Table({**STREAM_COLUMNS, "past_head": np.int32})
        self.past = PastRanges()
        self.requests: Window[RequestKey, IssuedIds] = Window(REQUESTS_MAX)
        self._tags: dict[int, tuple[str, ...]] = {}

    # ---- reading ----

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        return self._table[name]

    def __len__(self) -> int:
        """Return the next stream id: how many streams there have ever been."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for rows and ranges, without tags."""
        return self._table.nbytes + self.past.nbytes

    def live_count(self) -> int:
        """Return how many streams exist."""
        return int(np.count_nonzero(self._table["state"] != DELETED))

    def exists(self, stream_id: int) -> bool:
        """Return whether the stream was created and not deleted."""
        return stream_id < len(self._table) and self._table["state"][stream_id] != DELETED

    def tags(self, stream_id: int) -> Tags:
        """Return a stream's tags, sorted by key."""
        flat = self._tags.get(stream_id, ())
        return tuple(zip(flat[::2], flat[1::2], strict=True))

    def view(self) -> tuple[TableView, TableView, dict[int, tuple[str, ...]]]:
        """Return immutable views of streams, past ranges and flattened tags."""
        return self._table.view(), self.past.view(), self._tags.copy()

    def _heads(self, stream_ids: Sequence[int]) -> list["_Head | None"]:
        """Return what requests are judged by, None where there is no such stream."""
        ids = np.array(stream_ids, dtype=np.int64)
        issued = ids < len(self._table)
        at = ids[issued]
        columns = (self._table[name][at].tolist() for name in _HEAD_COLUMNS)
        found = (
            None if head.state == DELETED else head
            for head in map(_Head._make, zip(*columns, strict=True))
        )
        return [next(found) if known else None for known in issued.tolist()]

    # ---- deciding; the node has been checked ----

    def decide_create(self, request: CreateStreams) -> tuple[list[Record], CreateStreamsAnswer]:
        """Issue ids for new streams; the request is no repeat."""
        first, count = len(self._table), len(request.streams)
        tags = tuple(tuple(sorted(stream.tags)) for stream in request.streams)
        record = StreamsCreated(
            request_id=request.request_id,
            node_id=request.node.node_id,
            first_stream_id=first,
            count=count,
            tags=tags if any(tags) else (),
        )
        ids = tuple(range(first, first + count))
        return [record], CreateStreamsAnswer(error=ErrorCode.NONE, stream_ids=ids)

    def decide_open(self, request: OpenStreams) -> tuple[list[Record], OpenStreamsAnswer]:
        """Give streams to the node; each is judged against the state before the request."""
        node_id = request.node.node_id
        opened, reopened, answers = [], [], []
        heads = self._heads([item.stream_id for item in request.streams])
        for item, head in zip(request.streams, heads, strict=True):
            error = _open_verdict(head, item.stream_epoch, node_id)
            if head is None or error is not ErrorCode.NONE:
                answers.append(OpenedStream(error))
                continue
            if head.epoch < item.stream_epoch:
                opened.append(item)
            elif head.state == StreamState.CLOSED:
                reopened.append(item.stream_id)
            answers.append(OpenedStream(error, head.start_offset, head.end_offset))
        records: list[Record] = []
        if opened:
            tags = tuple(tuple(sorted(item.tags)) for item in opened)
            ids = column([item.stream_id for item in opened])
            epochs = column([item.stream_epoch for item in opened])
            tag_sets = tags if any(tags) else ()
            records.append(
                StreamsOpened(node_id=node_id, stream_id=ids, stream_epoch=epochs, tags=tag_sets)
            )
            records.extend(self._removable_ranges(ids))
        if reopened:
            records.append(StreamsReopened(stream_id=column(reopened)))
        return records, OpenStreamsAnswer(streams=tuple(answers))

    def _removable_ranges(self, stream_ids: Int64Column) -> list[Record]:
        # What stream objects cover needs no range: nobody will look for its node's set objects.
        removed: list[tuple[int, int]] = []
        heads = self._table["past_head"][stream_ids]
        for stream_id in stream_ids[heads > 0].tolist():
            start, end = self._objects.stream_object_run(stream_id)
            if start == end:
                continue
            for row in self.past.chain(int(self._table["past_head"][stream_id])):
                low, high = self.past.cell("start_offset", row), self.past.cell("end_offset", row)
                if low == high or (start <= low and high <= end):
                    removed.append((stream_id, self.past.cell("range_index", row)))
        if not removed:
            return []
        ids, indexes = zip(*sorted(removed), strict=True)
        return [RangesRemoved(stream_id=column(ids), range_index=column(indexes))]

    def decide_close(self, request: CloseStreams) -> tuple[list[Record], StreamErrorsAnswer]:
        """Take streams from the node; closing a closed one is harmless."""
        errors, closed = [], []
        heads = self._heads([item.stream_id for item in request.streams])
        for item, head in zip(request.streams, heads, strict=True):
            error = _ownership(head, item.stream_epoch, request.node.node_id)
            errors.append(error)
            if error is ErrorCode.NONE and head is not None and head.state == StreamState.OPENED:
                closed.append(item.stream_id)
        records: list[Record] = [StreamsClosed(stream_id=column(closed))] if closed else []
        return records, StreamErrorsAnswer(errors=tuple(errors))

    def decide_trim(self, request: TrimStreams) -> tuple[list[Record], StreamErrorsAnswer]:
        """Raise streams' starts."""
        errors, trimmed = [], []
        heads = self._heads([item.stream_id for item in request.streams])
        for item, head in zip(request.streams, heads, strict=True):
            error = _trim_verdict(head, item, request.node.node_id)
            errors.append(error)
            moves = head is not None and item.new_start_offset > head.start_offset
            if error is ErrorCode.NONE and moves:
                trimmed.append((item.stream_id, item.new_start_offset))
        answer = StreamErrorsAnswer(errors=tuple(errors))
        if not trimmed:
            return [], answer
        ids, starts = zip(*trimmed, strict=True)
        return [StreamsTrimmed(stream_id=column(ids), start_offset=column(starts))], answer

    def decide_delete(
        self, request: DeleteStreams, now_ms: int
    ) -> tuple[list[Record], StreamErrorsAnswer]:
        """Delete closed streams and destroy their stream objects; set objects stay."""
        errors, deleted = [], []
        heads = self._heads([item.stream_id for item in request.streams])
        for item, head in zip(request.streams, heads, strict=True):
            error = _epoch_check(head, item.stream_epoch)
            if error is ErrorCode.STREAM_NOT_EXIST:
                errors.append(ErrorCode.NONE)
                continue
            if error is ErrorCode.NONE and head is not None and head.state != StreamState.CLOSED:
                error = ErrorCode.STREAM_NOT_CLOSED
            errors.append(error)
            if error is ErrorCode.NONE:
                deleted.append(item.stream_id)
        records: list[Record] = []
        if deleted:
            records.append(StreamsDeleted(stream_id=column(deleted)))
            held = self._stream_objects_of(deleted)
            if len(held):
                records.append(ObjectsDestroyed(object_id=held, marked_at_ms=now_ms, deep=True))
        return records, StreamErrorsAnswer(errors=tuple(errors))

    def _stream_objects_of(self, stream_ids: Sequence[int]) -> Int64Column:
        rows = [self._objects.stream_object_rows(stream_id) for stream_id in stream_ids]
        return self._objects.ranges.object_ids(np.concatenate(rows))

    # ---- replaying ----

    def replay_created(self, record: StreamsCreated, undo: Undo) -> None:
        """See `StreamsCreated`."""
        first = record.first_stream_id
        if first != len(self._table):
            raise InvariantError(
                f"record creates streams from {first}, but the next stream id is {len(self._table)}"
            )
        rows = self._table.append(record.count, undo)
        for name in ("epoch", "range_index", "node_id"):
            self._table.write(name, rows, -1)
        for stream_id, tags in enumerate(record.tags, first):
            self._set_tags(stream_id, tags, undo)
        key = RequestKey(RequestKind.CREATE_STREAMS, record.node_id, record.request_id)
        self.requests.put(key, IssuedIds(first, record.count), undo)

    def replay_opened(self, record: StreamsOpened, undo: Undo) -> None:
        """See `StreamsOpened`."""
        rows = record.stream_id
        self._end_ranges(rows[self._table["range_index"][rows] >= 0], undo)
        ends = self._table["end_offset"][rows]
        self._table.put("range_start", rows, ends, undo)
        self._table.put("range_index", rows, self._table["range_index"][rows] + 1, undo)
        self._table.put("epoch", rows, record.stream_epoch, undo)
        self._table.put("node_id", rows, record.node_id, undo)
        self._table.put("state", rows, StreamState.OPENED, undo)
        for stream_id, tags in zip(rows.tolist(), record.tags, strict=False):
            if stream_id not in self._tags:
                self._set_tags(stream_id, tags, undo)

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
        heads = self.past.add(ended, self._table["past_head"][rows], undo)
        self._table.put("past_head", rows, heads, undo)

    def replay_reopened(self, record: StreamsReopened, undo: Undo) -> None:
        """See `StreamsReopened`."""
        self._table.put("state", record.stream_id, StreamState.OPENED, undo)

    def replay_closed(self, record: StreamsClosed, undo: Undo) -> None:
        """See `StreamsClosed`."""
        self._table.put("state", record.stream_id, StreamState.CLOSED, undo)

    def replay_trimmed(self, record: StreamsTrimmed, undo: Undo) -> None:
        """See `StreamsTrimmed`."""
        rows, starts = record.stream_id, record.start_offset
        self._table.put("start_offset", rows, starts, undo)
        self._table.put(
            "range_start", rows, np.maximum(self._table["range_start"][rows], starts), undo
        )
        self.raise_ends(rows, starts, undo)
        has_past = self._table["past_head"][rows] > 0
        for row, start in zip(rows[has_past].tolist(), starts[has_past].tolist(), strict=True):
            self._trim_past(row, start, undo)

    def _trim_past(self, stream_id: int, start: int, undo: Undo) -> None:
        below = set()
        head = int(self._table["past_head"][stream_id])
        for row in self.past.chain(head):
            if self.past.cell("end_offset", row) <= start:
                below.add(row)
            elif self.past.cell("start_offset", row) < start:
                self.past.clip(row, start, undo)
        if below:
            self._table.put("past_head", stream_id, self.past.remove(head, below, undo), undo)

    def replay_ranges_removed(self, record: RangesRemoved, undo: Undo) -> None:
        """See `RangesRemoved`."""
        for stream_id in sorted(set(record.stream_id.tolist())):
            indexes = set(record.range_index[record.stream_id == stream_id].tolist())
            head = int(self._table["past_head"][stream_id])
            rows = {r for r in self.past.chain(head) if self.past.cell("range_index", r) in indexes}
            self._table.put("past_head", stream_id, self.past.remove(head, rows, undo), undo)

    def replay_deleted(self, record: StreamsDeleted, undo: Undo) -> None:
        """See `StreamsDeleted`."""
        rows = record.stream_id
        for stream_id in rows.tolist():
            head = int(self._table["past_head"][stream_id])
            self.past.remove(head, set(self.past.chain(head)), undo)
            self._objects.ranges.unlink_stream(stream_id, undo)
            self._drop_tags(stream_id, undo)
        for name in (*STREAM_COLUMNS, "past_head"):
            self._table.put(name, rows, DELETED if name == "state" else 0, undo)

    def raise_ends(self, rows: Int64Column, ends: Int64Column, undo: Undo) -> Int64Column:
        """Raise end offsets to at least `ends`; return what they were."""
        before = self._table["end_offset"][rows]
        self._table.write("end_offset", rows, np.maximum(before, ends))
        undo.append(lambda: self._table.write("end_offset", rows, before))
        return before

    def load(
        self,
        next_stream_id: int,
        streams: dict[str, Int64Column],
        ranges: dict[str, Int64Column],
        tags: dict[int, tuple[str, ...]],
    ) -> None:
        """Fill an empty registry: streams in id order, all ranges by stream and index."""
        if not next_stream_id:
            return
        rows = streams["stream_id"]
        full = {name: np.zeros(next_stream_id, dtype) for name, dtype in STREAM_COLUMNS.items()}
        full["past_head"] = np.zeros(next_stream_id, dtype=np.int32)
        full["state"][:] = DELETED
        for name in STREAM_COLUMNS:
            if name != "range_start":
                full[name][rows] = streams[name]
        of_range = ranges["stream_id"]
        is_current = ranges["range_index"] == full["range_index"][of_range]
        full["range_start"][of_range[is_current]] = ranges["start_offset"][is_current]
        ids, heads = self.past.load({n: values[~is_current] for n, values in ranges.items()})
        full["past_head"][ids] = heads
        self._table.load(full)
        self._tags = {owner: tuple(map(sys.intern, texts)) for owner, texts in tags.items()}

    # ---- tags ----

    def _set_tags(self, stream_id: int, tags: Tags, undo: Undo) -> None:
        if not tags:
            return
        # Many streams share keys and values; interning keeps one copy of each.
        self._tags[stream_id] = tuple(sys.intern(text) for tag in tags for text in tag)
        undo.append(lambda: self._tags.__delitem__(stream_id))

    def _drop_tags(self, stream_id: int, undo: Undo) -> None:
        tags = self._tags.pop(stream_id, None)
        if tags is not None:
            undo.append(lambda: self._tags.__setitem__(stream_id, tags))


def _epoch_check(head: _Head | None, epoch: int) -> ErrorCode:
    if head is None:
        return ErrorCode.STREAM_NOT_EXIST
    if head.epoch > epoch:
        return ErrorCode.STREAM_FENCED
    return ErrorCode.NONE if head.epoch == epoch else ErrorCode.STREAM_INNER_ERROR


def _ownership(head: _Head | None, epoch: int, node_id: int) -> ErrorCode:
    """Return NONE if `node_id` owns the stream under exactly this epoch."""
    error = _epoch_check(head, epoch)
    if error is ErrorCode.NONE and head is not None and head.node_id != node_id:
        return ErrorCode.STREAM_FENCED
    return error


def _open_verdict(head: _Head | None, epoch: int, node_id: int) -> ErrorCode:
    if head is None:
        return ErrorCode.STREAM_NOT_EXIST
    if head.epoch > epoch:
        return ErrorCode.STREAM_FENCED
    if head.epoch == epoch:
        return ErrorCode.NONE if head.node_id == node_id else ErrorCode.STREAM_FENCED
    opened = head.state == StreamState.OPENED
    return ErrorCode.STREAM_NOT_CLOSED if opened else ErrorCode.NONE


def _trim_verdict(head: _Head | None, item: StreamToTrim, node_id: int) -> ErrorCode:
    error = _ownership(head, item.stream_epoch, node_id)
    if error is not ErrorCode.NONE or head is None:
        return error
    if head.state != StreamState.OPENED:
        return ErrorCode.STREAM_NOT_OPENED
    below = item.new_start_offset < head.start_offset
    return ErrorCode.OFFSET_NOT_MATCHED if below else ErrorCode.NONE
