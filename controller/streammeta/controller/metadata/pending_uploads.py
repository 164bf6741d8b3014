"""What nodes acknowledged of streams before a fast close and have not committed yet.

Each node has a list of (stream, start, end), sorted by stream id, in immutable columns that are
replaced as a whole when it changes: views share them, undo puts the old ones back. A list may hold
entries that are over, because their stream was deleted or trimmed past them; `streams` knows.
What was given up for good is kept as lost ranges of streams, in columns of the same kind.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.columns import Undo
from streammeta.controller.metadata.values import EMPTY_COLUMN, Int64Column


@dataclass(frozen=True, slots=True, eq=False)
class StreamSpans:
    """Half-open offset ranges of streams, sorted by stream id, then start."""

    stream_id: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    start_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    end_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)

    def __len__(self) -> int:
        return len(self.stream_id)

    def rows(self) -> list[tuple[int, int, int]]:
        """Return (stream id, start, end) of every row."""
        columns = (self.stream_id, self.start_offset, self.end_offset)
        return list(zip(*(values.tolist() for values in columns), strict=True))

    def take(self, rows: npt.NDArray[np.bool_] | Int64Column) -> "StreamSpans":
        """Return some of the rows, in the order named."""
        return StreamSpans(self.stream_id[rows], self.start_offset[rows], self.end_offset[rows])

    def of_streams(self, stream_id: Int64Column) -> "StreamSpans":
        """Return the rows of these streams."""
        return self.take(np.isin(self.stream_id, stream_id))

    def without(self, stream_id: Int64Column) -> "StreamSpans":
        """Return the rows of all streams but these."""
        return self.take(~np.isin(self.stream_id, stream_id))

    def joined(self, other: "StreamSpans") -> "StreamSpans":
        """Return the rows of both."""
        both = StreamSpans(
            np.concatenate((self.stream_id, other.stream_id)),
            np.concatenate((self.start_offset, other.start_offset)),
            np.concatenate((self.end_offset, other.end_offset)),
        )
        return both.take(np.lexsort((both.start_offset, both.stream_id)))

    def merged(self) -> "StreamSpans":
        """Return the same offsets with ranges that touch made one; none may overlap."""
        touches = (self.stream_id[1:] == self.stream_id[:-1]) & (
            self.start_offset[1:] == self.end_offset[:-1]
        )
        first = np.concatenate(([True], ~touches))[: len(self)]
        last = np.concatenate((~touches, [True]))[: len(self)]
        return StreamSpans(self.stream_id[first], self.start_offset[first], self.end_offset[last])

    def row_of(self, stream_id: Int64Column) -> Int64Column:
        """Return the row of each stream, -1 where there is none; no stream may have two rows."""
        if not len(self):
            return np.full(len(stream_id), -1, dtype=np.int64)
        rows = np.minimum(self.stream_id.searchsorted(stream_id), len(self) - 1)
        return np.where(self.stream_id[rows] == stream_id, rows, -1)


NO_SPANS = StreamSpans()


class PendingUploads:
    """Lists of pending uploads by node."""

    def __init__(self) -> None:
        self._lists: dict[int, StreamSpans] = {}

    def of_node(self, node_id: int) -> StreamSpans:
        """Return a node's list; no stream is in it twice."""
        return self._lists.get(node_id, NO_SPANS)

    def in_order(self) -> list[tuple[int, StreamSpans]]:
        """Return all lists that are not empty, by node id."""
        return sorted(self._lists.items(), key=lambda item: item[0])

    def put(self, node_id: int, changed: StreamSpans, undo: Undo) -> None:
        """Set a node's entries of these streams; empty ranges take them off the list."""
        kept = self.of_node(node_id).without(changed.stream_id)
        owed = changed.take(changed.start_offset < changed.end_offset)
        self._replace(node_id, kept.joined(owed), undo)

    def drop(self, node_id: int, undo: Undo) -> None:
        """Forget a node's list."""
        if node_id in self._lists:
            self._replace(node_id, NO_SPANS, undo)

    def load(self, lists: Iterable[tuple[int, StreamSpans]]) -> None:
        """Fill an empty registry."""
        self._lists = dict(lists)

    def _replace(self, node_id: int, spans: StreamSpans, undo: Undo) -> None:
        before = self.of_node(node_id)
        self._put(node_id, spans)
        undo.append(lambda: self._put(node_id, before))

    def _put(self, node_id: int, spans: StreamSpans) -> None:
        if len(spans):
            self._lists[node_id] = spans
        else:
            self._lists.pop(node_id, None)


class LostRanges:
    """Offsets of streams that were acknowledged once and will never be committed."""

    def __init__(self) -> None:
        self.spans = NO_SPANS

    def of_stream(self, stream_id: int) -> tuple[tuple[int, int], ...]:
        """Return a stream's lost ranges, by start."""
        first, last = self.spans.stream_id.searchsorted((stream_id, stream_id + 1)).tolist()
        starts, ends = self.spans.start_offset[first:last], self.spans.end_offset[first:last]
        return tuple(zip(starts.tolist(), ends.tolist(), strict=True))

    def end_at(self, stream_id: int, offset: int) -> int:
        """Return where the lost range that holds an offset ends, or -1 if none does."""
        if not len(self.spans):
            return -1
        for start, end in self.of_stream(stream_id):
            if start <= offset < end:
                return end
        return -1

    def add(self, spans: StreamSpans, undo: Undo) -> None:
        """Add ranges that overlap none."""
        self._set(self.spans.joined(spans).merged(), undo)

    def trim(self, stream_id: Int64Column, start: Int64Column, undo: Undo) -> None:
        """Drop what lies below streams' starts; no stream twice."""
        if not len(self.spans):
            return
        rows = np.flatnonzero(np.isin(self.spans.stream_id, stream_id))
        if not len(rows):
            return
        order = np.argsort(stream_id)
        at = order[stream_id[order].searchsorted(self.spans.stream_id[rows])]
        starts = self.spans.start_offset.copy()
        starts[rows] = np.maximum(starts[rows], start[at])
        clipped = StreamSpans(self.spans.stream_id, starts, self.spans.end_offset)
        self._set(clipped.take(starts < self.spans.end_offset), undo)

    def drop(self, stream_id: Int64Column, undo: Undo) -> None:
        """Forget streams."""
        if len(self.spans) and np.isin(self.spans.stream_id, stream_id).any():
            self._set(self.spans.without(stream_id), undo)

    def _set(self, spans: StreamSpans, undo: Undo) -> None:
        before = self.spans
        self.spans = spans
        undo.append(lambda: setattr(self, "spans", before))
