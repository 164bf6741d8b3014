"""Offset ranges of streams besides the current one: past ownership, pending uploads, lost offsets.

`PastRanges` chains the ended ranges of a stream through one table, newest first. `streams` keeps
the head of each chain. Links are row numbers plus 1, so 0 means none.

`PendingUploads` lists per node the ranges that it acknowledged before a fast close and has not
committed yet. `LostRanges` contains offsets that were given up permanently. Both use immutable
columns sorted by stream id and replaced as a whole: views share them, undo restores the old ones. A
list may contain completed entries, whose stream was deleted or trimmed past them. `streams` can
tell them apart.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.tables.stream_index import bisect_each
from streammeta.controller.metadata.tables.tables import Table, TableView, Undo
from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, Int64Column


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
        """Return some of the rows, in the given order."""
        return StreamSpans(self.stream_id[rows], self.start_offset[rows], self.end_offset[rows])

    def of_streams(self, stream_id: Int64Column) -> "StreamSpans":
        """Return the rows of these streams."""
        return self.take(np.isin(self.stream_id, stream_id))

    def without(self, stream_id: Int64Column) -> "StreamSpans":
        """Return the rows of all other streams."""
        return self.take(~np.isin(self.stream_id, stream_id))

    def join(self, other: "StreamSpans") -> "StreamSpans":
        """Return the rows of both."""
        both = StreamSpans(
            np.concatenate((self.stream_id, other.stream_id)),
            np.concatenate((self.start_offset, other.start_offset)),
            np.concatenate((self.end_offset, other.end_offset)),
        )
        return both.take(np.lexsort((both.start_offset, both.stream_id)))

    def merge(self) -> "StreamSpans":
        """Return the same offsets with adjacent ranges merged. Ranges must not overlap."""
        touches = (self.stream_id[1:] == self.stream_id[:-1]) & (
            self.start_offset[1:] == self.end_offset[:-1]
        )
        # The slices keep the empty case empty.
        first = np.concatenate(([True], ~touches))[: len(self)]
        last = np.concatenate((~touches, [True]))[: len(self)]
        return StreamSpans(self.stream_id[first], self.start_offset[first], self.end_offset[last])

    def row_of(self, stream_id: Int64Column) -> Int64Column:
        """Return the row of each stream, -1 if missing. Requires one row per stream."""
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
        """Return a node's list, which contains a stream at most once."""
        return self._lists.get(node_id, NO_SPANS)

    def in_order(self) -> list[tuple[int, StreamSpans]]:
        """Return all non-empty lists, by node id."""
        return sorted(self._lists.items(), key=lambda item: item[0])

    def put(self, node_id: int, changed: StreamSpans, undo: Undo) -> None:
        """Set a node's entries of these streams. Empty ranges remove entries."""
        kept = self.of_node(node_id).without(changed.stream_id)
        owed = changed.take(changed.start_offset < changed.end_offset)
        joined = kept.join(owed)
        undo.put(self._lists, node_id, joined if len(joined) else None)

    def drop(self, node_id: int, undo: Undo) -> None:
        """Forget a node's list."""
        undo.put(self._lists, node_id, None)

    def load(self, lists: Iterable[tuple[int, StreamSpans]]) -> None:
        """Fill an empty registry."""
        self._lists = dict(lists)


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
        """Return the end of the lost range that contains an offset, or -1."""
        if not len(self.spans):
            return -1
        for start, end in self.of_stream(stream_id):
            if start <= offset < end:
                return end
        return -1

    def ends_at(self, stream_id: Int64Column, offset: Int64Column) -> Int64Column:
        """Return the result of `end_at` for each of many offsets."""
        spans = self.spans
        lows = spans.stream_id.searchsorted(stream_id)
        highs = spans.stream_id.searchsorted(stream_id, side="right")
        # Per stream, the number of ranges that begin at or below the offset: the last may hold it.
        after = bisect_each(
            lows, highs, lambda searched, at: spans.start_offset[at] <= offset[searched]
        )
        ends = np.full_like(stream_id, NONE_ID)
        inside = np.flatnonzero(after > lows)
        last = spans.end_offset[after[inside] - 1]
        ends[inside] = np.where(offset[inside] < last, last, NONE_ID)
        return ends

    def add(self, spans: StreamSpans, undo: Undo) -> None:
        """Add ranges that do not overlap existing ones."""
        undo.assign(self, "spans", self.spans.join(spans).merge())

    def trim(self, stream_id: Int64Column, start: Int64Column, undo: Undo) -> None:
        """Drop offsets below the starts of streams, each named once."""
        if not len(self.spans):
            return
        rows = np.flatnonzero(np.isin(self.spans.stream_id, stream_id))
        if not len(rows):
            return
        order = np.argsort(stream_id)
        # `order` finds each range's trim without requiring sorted streams.
        at = order[stream_id[order].searchsorted(self.spans.stream_id[rows])]
        starts = self.spans.start_offset.copy()
        starts[rows] = np.maximum(starts[rows], start[at])
        clipped = StreamSpans(self.spans.stream_id, starts, self.spans.end_offset)
        undo.assign(self, "spans", clipped.take(starts < self.spans.end_offset))

    def drop(self, stream_id: Int64Column, undo: Undo) -> None:
        """Forget streams."""
        if len(self.spans) and np.isin(self.spans.stream_id, stream_id).any():
            undo.assign(self, "spans", self.spans.without(stream_id))


RANGE_COLUMNS = {
    "stream_id": np.int64,
    "range_index": np.int32,
    "epoch": np.int64,
    "start_offset": np.int64,
    "end_offset": np.int64,
    "node_id": np.int32,
}
_FREE = -1


class PastRanges:
    """Chains of past ranges."""

    def __init__(self) -> None:
        self._table = Table({**RANGE_COLUMNS, "previous": np.int32})
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._table.nbytes

    def view(self) -> TableView:
        """Return an immutable view. Rows whose stream id is negative are unused."""
        return self._table.view()

    def chain(self, head: int) -> Iterator[int]:
        """Yield the rows of a chain, newest first."""
        previous = self._table["previous"]
        while head:
            row = head - 1
            yield row
            head = int(previous[row])

    def cell(self, name: str, row: int) -> int:
        """Return one value of one row."""
        return int(self._table[name][row])

    def cells(self, name: str, rows: Int64Column) -> Int64Column:
        """Return one value of each of several rows."""
        values: Int64Column = self._table[name][rows]
        return values

    def add(self, columns: dict[str, Int64Column], heads: Int64Column, undo: Undo) -> Int64Column:
        """Prepend one range to each chain and return the new heads."""
        rows = self._allocate(len(heads), undo)
        for name, values in columns.items():
            self._table.put(name, rows, values, undo)
        self._table.put("previous", rows, heads, undo)
        return rows + 1

    def clip(self, row: int, start: int, undo: Undo) -> None:
        """Raise a range's start."""
        self._table.put("start_offset", row, start, undo)

    def remove(self, head: int, rows: set[int], undo: Undo) -> int:
        """Remove rows from a chain and return its new head."""
        if not rows:
            return head
        kept = [row for row in self.chain(head) if row not in rows]

        for row, older in itertools.zip_longest(kept, kept[1:], fillvalue=-1):
            self._table.put("previous", row, older + 1, undo)
        for row in sorted(rows):
            # Views recognise unused rows by this mark.
            self._table.put("stream_id", row, _FREE, undo)
        self._free.extend(sorted(rows))
        undo.append(lambda: self._free.__delitem__(slice(-len(rows), None)))

        return kept[0] + 1 if kept else 0

    def load(self, columns: dict[str, Int64Column]) -> tuple[Int64Column, Int64Column]:
        """Fill an empty table, sorted by stream id and index, and return (stream ids, heads)."""
        stream_id = columns["stream_id"]
        if not len(stream_id):
            return stream_id, stream_id
        # Rows are in index order, so each links to the row before it unless the stream changes.
        same = np.concatenate(([False], stream_id[1:] == stream_id[:-1]))
        rows = np.arange(len(stream_id), dtype=np.int64)
        self._table.load({**columns, "previous": np.where(same, rows, 0)})
        last = np.concatenate((stream_id[1:] != stream_id[:-1], [True]))
        return stream_id[last], rows[last] + 1

    def _allocate(self, count: int, undo: Undo) -> Int64Column:
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        undo.append(lambda: self._free.extend(reversed(reused)))
        fresh = self._table.append(count - len(reused), undo)
        return np.concatenate(
            (np.array(reused, dtype=np.int64), np.arange(fresh.start, fresh.stop, dtype=np.int64))
        )
