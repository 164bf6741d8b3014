"""Ranges of ownership that have ended, oldest first within a stream.

A stream's current range is part of its row in `streams`; most streams have no other. Past ranges
form a chain through one table, newest first; `streams` keeps the chain's head. Links are row
numbers plus 1, so that 0 means none.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from streammeta.controller.metadata.columns import Table, TableView, Undo
from streammeta.controller.metadata.values import Int64Column

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
    """Chains of ended ranges."""

    def __init__(self) -> None:
        self._table = Table({**RANGE_COLUMNS, "previous": np.int32})
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._table.nbytes

    def view(self) -> TableView:
        """Return an immutable view; rows whose stream id is negative are unused."""
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
        """Put one range in front of each chain; return the new heads."""
        rows = self._allocate(len(heads), undo)
        for name, values in columns.items():
            self._table.put(name, rows, values, undo)
        self._table.put("previous", rows, heads, undo)
        return rows + 1

    def clip(self, row: int, start: int, undo: Undo) -> None:
        """Raise a range's start."""
        self._table.put("start_offset", row, start, undo)

    def remove(self, head: int, rows: set[int], undo: Undo) -> int:
        """Take rows out of a chain; return its new head."""
        if not rows:
            return head
        kept = [row for row in self.chain(head) if row not in rows]
        for row, older in itertools.zip_longest(kept, kept[1:], fillvalue=-1):
            self._table.put("previous", row, older + 1, undo)
        for row in sorted(rows):
            self._table.put("stream_id", row, _FREE, undo)
        self._free.extend(sorted(rows))
        undo.append(lambda: self._free.__delitem__(slice(-len(rows), None)))
        return kept[0] + 1 if kept else 0

    def load(self, columns: dict[str, Int64Column]) -> tuple[Int64Column, Int64Column]:
        """Fill an empty table, ordered by stream id and index; return (stream ids, their heads)."""
        stream_id = columns["stream_id"]
        if not len(stream_id):
            return stream_id, stream_id
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
