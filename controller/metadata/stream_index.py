"""For each stream a list of row numbers, in blocks of one array whose sizes are powers of two.

An append to the lists of many streams is a few vector operations. Lists that shrink give their
block back. Undo never names a block: it puts lists back where they fit then.
"""

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from controller.metadata.columns import Undo, grown_array
from controller.metadata.values import Int64Column

Slots = npt.NDArray[np.int32]

_BLOCK_MIN = 2
_SHRINK_ABOVE = 64
"""A list gives up a block that is larger than this and hardly used."""


def range_rows(first: npt.NDArray[np.integer], count: npt.NDArray[np.integer]) -> Int64Column:
    """Return the row numbers `first[i] .. first[i] + count[i] - 1` of every i, in order."""
    ends = np.cumsum(count, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    shift: Int64Column = np.repeat(first.astype(np.int64) - (ends - count), count)
    shift += np.arange(total, dtype=np.int64)
    return shift


class StreamIndex:
    """Lists of row numbers by stream id."""

    def __init__(self) -> None:
        self._slots: Slots = np.zeros(1024, dtype=np.int32)
        self._used = 0
        self._covered = 0
        self._base = np.zeros(1024, dtype=np.int64)
        self._count = np.zeros(1024, dtype=np.int32)
        self._capacity = np.zeros(1024, dtype=np.int32)
        self._free: defaultdict[int, list[Int64Column]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        arrays = (self._base, self._count, self._capacity)
        per_stream = sum(array.itemsize for array in arrays)
        return self._used * self._slots.itemsize + self._covered * per_stream

    def rows(self, stream_id: int) -> Slots:
        """Return a stream's list; valid until the next change."""
        if stream_id >= self._covered:
            return self._slots[:0]
        base = int(self._base[stream_id])
        return self._slots[base : base + int(self._count[stream_id])]

    def lists(self, streams: Int64Column) -> tuple[Int64Column, Slots]:
        """Return the lengths of streams' lists, and the lists one behind the other."""
        if len(streams):
            self._cover(int(np.maximum.reduce(streams)))
        counts = self._count[streams].astype(np.int64)
        return counts, self._slots[range_rows(self._base[streams], counts)]

    def append(self, streams: Int64Column, rows: Int64Column, undo: Undo) -> None:
        """Append one row to each stream's list; no stream twice."""
        self._cover(int(np.maximum.reduce(streams)))
        count = self._count[streams]
        full = count == self._capacity[streams]
        if np.count_nonzero(full):
            self._grow(streams[full])
        self._slots[self._base[streams] + count] = rows
        self._count[streams] = count + 1
        undo.append(lambda: self._count.__setitem__(streams, count))

    def replace(
        self, streams: Int64Column, counts: Int64Column, rows: npt.NDArray[np.integer], undo: Undo
    ) -> None:
        """Replace lists, given as `lists` returns them; no stream twice."""
        before = self.lists(streams)
        self._write(streams, counts, rows)
        undo.append(lambda: self._write(streams, *before))

    def load(self, streams: Int64Column, rows: Int64Column) -> None:
        """Fill an empty index; stream ids ascend, and equal ones are in list order."""
        if not len(streams):
            return
        self._cover(int(streams[-1]))
        first = np.flatnonzero(np.concatenate(([True], streams[1:] != streams[:-1])))
        owners = streams[first]
        counts = np.diff(np.append(first, len(streams)))
        capacity = np.maximum(_BLOCK_MIN, 1 << np.ceil(np.log2(counts)).astype(np.int64))
        base = np.cumsum(capacity) - capacity
        self._used = int(capacity.sum())
        self._slots = grown_array(self._slots, self._used, 0)
        self._slots[range_rows(base, counts)] = rows
        self._base[owners], self._count[owners] = base, counts
        self._capacity[owners] = capacity

    def _write(
        self, streams: Int64Column, counts: Int64Column, rows: npt.NDArray[np.integer]
    ) -> None:
        self._fit(streams, counts)
        self._slots[range_rows(self._base[streams], counts)] = rows
        self._count[streams] = counts

    def _fit(self, streams: Int64Column, counts: Int64Column) -> None:
        """Give lists blocks that are large enough for `counts`, and not far too large."""
        capacity = self._capacity[streams]
        oversized = (capacity > _SHRINK_ABOVE) & (8 * counts < capacity) | (counts == 0)
        if np.count_nonzero(oversized):
            self._release(streams[oversized])
        while True:
            short = self._capacity[streams] < counts
            if not np.count_nonzero(short):
                return
            self._grow(streams[short])

    def _release(self, streams: Int64Column) -> None:
        capacity = self._capacity[streams]
        for size in np.unique(capacity[capacity > 0]).tolist():
            self._free[size].append(self._base[streams[capacity == size]])
        self._capacity[streams] = 0

    def _cover(self, stream_id: int) -> None:
        if stream_id < self._covered:
            return
        self._covered = stream_id + 1
        if self._covered <= len(self._base):
            return
        used = len(self._base)
        self._base = grown_array(self._base, self._covered, used)
        self._count = grown_array(self._count, self._covered, used)
        self._capacity = grown_array(self._capacity, self._covered, used)

    def _grow(self, streams: Int64Column) -> None:
        while len(streams):
            capacities = self._capacity[streams]
            capacity = int(capacities[0])
            alike = capacities == capacity
            chosen, streams = streams[alike], streams[~alike]
            doubled = max(_BLOCK_MIN, 2 * capacity)
            bases = self._allocate(doubled, len(chosen))
            old = self._base[chosen]
            if capacity:
                within = np.arange(capacity)
                self._slots[bases[:, None] + within] = self._slots[old[:, None] + within]
                self._free[capacity].append(old)
            self._base[chosen], self._capacity[chosen] = bases, doubled

    def _allocate(self, capacity: int, count: int) -> Int64Column:
        reused = self._reuse(capacity, count)
        fresh = count - len(reused)
        first = self._used
        self._used += fresh * capacity
        if self._used > len(self._slots):
            self._slots = grown_array(self._slots, self._used, first)
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
