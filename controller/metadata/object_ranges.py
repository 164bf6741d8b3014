"""Which objects hold which ranges of which streams.

One table row per range. A stream set object's rows are consecutive, sorted by stream id; a stream
object has one row. For each stream an index lists its rows by end offset, so that the object
holding an offset is found by binary search, and what follows it is the rest of the list: above a
stream's start offset ends grow strictly, because commits continue at the stream's end.

The index is derived from the table: lists live in one array of row numbers, in blocks whose
capacity doubles; a commit appends to the lists of all its streams with a few vector operations.
Neither what an object is nor what a stream is, is known here.
"""

import bisect
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from controller.metadata.columns import Table, TableView, Undo
from controller.metadata.values import Int64Column

_RANGE_COLUMNS = {
    "stream_id": np.int64,
    "start_offset": np.int64,
    "end_offset": np.int64,
    "object_id": np.int64,
}
_BLOCK_MIN = 2
_GARBAGE_ROWS_MIN = 65_536


class ObjectRanges:
    """The table of ranges and its index by stream."""

    def __init__(self) -> None:
        self._table = Table(_RANGE_COLUMNS)
        self._index = _StreamIndex()
        self._dead_rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._table.nbytes + self._index.nbytes

    def view(self) -> TableView:
        """Return an immutable view of the table."""
        return self._table.view()

    def add(
        self,
        object_id: int | Int64Column,
        stream_id: Int64Column,
        start: Int64Column,
        end: Int64Column,
        undo: Undo,
    ) -> int:
        """Append rows, one per element, and return the first row's number."""
        rows = self._table.append(len(stream_id), undo)
        for name, values in (
            ("stream_id", stream_id),
            ("start_offset", start),
            ("end_offset", end),
            ("object_id", object_id),
        ):
            self._table.write(name, rows, values)
        return int(rows.start)

    def link_last(self, stream_id: Int64Column, rows: Int64Column, undo: Undo) -> None:
        """Add rows to the ends of their streams' lists; no stream twice."""
        self._index.append(stream_id, rows, undo)

    def link(self, stream_id: int, row: int, undo: Undo) -> None:
        """Add a row to a stream's list where its end offset puts it."""
        ends, ids = self._table["end_offset"], self._table["object_id"]
        rows = self._index.rows(stream_id)
        key = (ends[row], ids[row])
        place = bisect.bisect_right(rows, key, key=lambda r: (ends[r], ids[r]))
        self._index.replace(stream_id, np.insert(rows, place, row), undo)

    def unlink(self, stream_id: int, row: int, undo: Undo) -> None:
        """Take a row out of a stream's list, if it is there."""
        rows = self._index.rows(stream_id)
        if row in rows:
            self._index.replace(stream_id, rows[rows != row], undo)

    def unlink_stream(self, stream_id: int, undo: Undo) -> None:
        """Empty a stream's list."""
        self._index.replace(stream_id, np.zeros(0, dtype=np.int32), undo)

    def mark_dead(self, count: int, undo: Undo) -> None:
        """Count rows that no object refers to any more; `collect_garbage` drops them."""
        self._dead_rows += count
        undo.append(lambda: self.mark_dead(-count, []))

    def rows_of_stream(self, stream_id: int) -> Int64Column:
        """Return a stream's rows, by end offset."""
        return self._index.rows(stream_id).astype(np.int64)

    def rows_from(
        self, stream_id: int, start: int, end: int, limit: int
    ) -> tuple[Int64Column, Int64Column, Int64Column]:
        """Return (object ids, starts, ends) that hold a stream contiguously from `start` on.

        The first one covers `start`, or the answer is empty. Stops at a gap, after `limit` rows,
        or when `end` is reached; `end` -1 means no end.
        """
        ends = self._table["end_offset"]
        rows = self._index.rows(stream_id)
        first = bisect.bisect_right(rows, start, key=lambda row: int(ends[row]))
        taken = rows[first : first + limit]
        starts, stops = self._table["start_offset"][taken], ends[taken]
        if not len(taken) or starts[0] > start:
            return starts[:0], starts[:0], starts[:0]
        goes_on = starts[1:] == stops[:-1]
        if end != -1:
            goes_on &= stops[:-1] < end
        count = 1 + (len(goes_on) if goes_on.all() else int(np.argmin(goes_on)))
        return self._table["object_id"][taken[:count]], starts[:count], stops[:count]

    def columns(self, rows: Int64Column | slice) -> tuple[Int64Column, Int64Column, Int64Column]:
        """Return (stream ids, starts, ends) of rows."""
        return (
            self._table["stream_id"][rows].copy(),
            self._table["start_offset"][rows].copy(),
            self._table["end_offset"][rows].copy(),
        )

    def object_ids(self, rows: Int64Column) -> Int64Column:
        """Return the objects rows belong to."""
        result: Int64Column = self._table["object_id"][rows]
        return result

    def load(
        self,
        object_id: Int64Column,
        stream_id: Int64Column,
        start: Int64Column,
        end: Int64Column,
        indexed: npt.NDArray[np.bool_],
    ) -> None:
        """Fill an empty table in the order given; `indexed` says which rows' streams exist."""
        if len(object_id):
            self._table.load(
                {
                    "stream_id": stream_id,
                    "start_offset": start,
                    "end_offset": end,
                    "object_id": object_id,
                }
            )
        rows = np.flatnonzero(indexed)
        order = np.lexsort((object_id[rows], end[rows], stream_id[rows]))
        self._index.load(stream_id[rows][order], rows[order])

    def garbage(self) -> bool:
        """Whether so many rows are dead that dropping them pays."""
        return self._dead_rows > max(_GARBAGE_ROWS_MIN, len(self._table) // 2)

    def collect_garbage(self, live: npt.NDArray[np.bool_]) -> Int64Column:
        """Drop rows not in `live`; return the new row number of each old row. Not undoable."""
        moved = np.cumsum(live, dtype=np.int64) - 1
        self._index.renumber(moved)
        self._table.keep(live)
        self._dead_rows = 0
        return moved

    def __len__(self) -> int:
        return len(self._table)


class _StreamIndex:
    """For each stream a list of row numbers, in blocks of one array."""

    def __init__(self) -> None:
        self._slots = np.zeros(1024, dtype=np.int32)
        self._used = 0
        self._base = np.zeros(1024, dtype=np.int64)
        self._count = np.zeros(1024, dtype=np.int32)
        self._capacity = np.zeros(1024, dtype=np.int32)
        self._free: defaultdict[int, list[Int64Column]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        arrays = (self._slots, self._base, self._count, self._capacity)
        return sum(array.nbytes for array in arrays)

    def rows(self, stream_id: int) -> npt.NDArray[np.int32]:
        """Return a stream's list; valid until the next change."""
        if stream_id >= len(self._base):
            return self._slots[:0]
        base = int(self._base[stream_id])
        return self._slots[base : base + int(self._count[stream_id])]

    def append(self, stream_id: Int64Column, rows: Int64Column, undo: Undo) -> None:
        """Append one row to each stream's list; no stream twice."""
        self._cover(int(np.maximum.reduce(stream_id)))
        count = self._count[stream_id]
        full = count == self._capacity[stream_id]
        if np.count_nonzero(full):
            self._grow(stream_id[full])
        self._slots[self._base[stream_id] + count] = rows
        self._count[stream_id] = count + 1
        undo.append(lambda: self._count.__setitem__(stream_id, count))

    def replace(self, stream_id: int, rows: npt.NDArray[np.int32], undo: Undo) -> None:
        """Replace a stream's list."""
        self._cover(stream_id)
        before = self.rows(stream_id).copy()
        self._write(stream_id, rows)
        undo.append(lambda: self._write(stream_id, before))

    def load(self, stream_id: Int64Column, rows: Int64Column) -> None:
        """Fill an empty index; `stream_id` is ascending, and equal ones are in list order."""
        if not len(stream_id):
            return
        self._cover(int(stream_id[-1]))
        streams, first, counts = np.unique(stream_id, return_index=True, return_counts=True)
        capacity = np.maximum(_BLOCK_MIN, 1 << np.ceil(np.log2(counts)).astype(np.int64))
        base = np.cumsum(capacity) - capacity
        self._used = int(capacity.sum())
        self._slots = np.zeros(self._used + 1024, dtype=np.int32)
        within = np.arange(len(stream_id)) - np.repeat(first, counts)
        self._slots[np.repeat(base, counts) + within] = rows
        self._base[streams], self._count[streams] = base, counts
        self._capacity[streams] = capacity

    def renumber(self, moved: Int64Column) -> None:
        """Replace every row number by `moved[row]`."""
        # Slots no list uses may hold any number; clip it.
        self._slots = moved[np.minimum(self._slots, len(moved) - 1)].astype(np.int32)

    def _write(self, stream_id: int, rows: npt.NDArray[np.int32]) -> None:
        while len(rows) > self._capacity[stream_id]:
            self._grow(np.array([stream_id]))
        base = int(self._base[stream_id])
        self._slots[base : base + len(rows)] = rows
        self._count[stream_id] = len(rows)
        if not len(rows) and self._capacity[stream_id]:
            self._free[int(self._capacity[stream_id])].append(np.array([base]))
            self._capacity[stream_id] = 0

    def _cover(self, stream_id: int) -> None:
        size = len(self._base)
        if stream_id < size:
            return
        size = max(stream_id + 1, size + (size >> 1))
        for name in ("_base", "_count", "_capacity"):
            array = getattr(self, name)
            grown = np.zeros(size, dtype=array.dtype)
            grown[: len(array)] = array
            setattr(self, name, grown)

    def _grow(self, stream_id: Int64Column) -> None:
        while len(stream_id):
            capacities = self._capacity[stream_id]
            capacity = int(capacities[0])
            alike = capacities == capacity
            streams, stream_id = stream_id[alike], stream_id[~alike]
            doubled = max(_BLOCK_MIN, 2 * capacity)
            bases = self._allocate(doubled, len(streams))
            old = self._base[streams]
            if capacity:
                within = np.arange(capacity)
                self._slots[bases[:, None] + within] = self._slots[old[:, None] + within]
                self._free[capacity].append(old)
            self._base[streams], self._capacity[streams] = bases, doubled

    def _allocate(self, capacity: int, count: int) -> Int64Column:
        reused = self._reuse(capacity, count)
        fresh = count - len(reused)
        first = self._used
        self._used += fresh * capacity
        if self._used > len(self._slots):
            grown = np.zeros(self._used + (self._used >> 1), dtype=np.int32)
            grown[:first] = self._slots[:first]
            self._slots = grown
        added = first + capacity * np.arange(fresh, dtype=np.int64)
        return np.concatenate((reused, added)) if len(reused) else added

    def _reuse(self, capacity: int, count: int) -> Int64Column:
        free = self._free[capacity]
        taken = [np.zeros(0, dtype=np.int64)]
        while free and count:
            bases = free.pop()
            taken.append(bases[:count])
            if len(bases) > count:
                free.append(bases[count:])
            count -= len(taken[-1])
        return np.concatenate(taken)
