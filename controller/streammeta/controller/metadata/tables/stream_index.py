"""For each stream a list of row numbers, in chains of blocks of one array.

A list begins with one block. When its newest block is full, the list gets another one that doubles
its capacity, so growing never copies, and an append to the lists of many streams takes a few vector
operations. Every block except the oldest has an extra slot in front, which contains the end of the
previous block. Undo never refers to blocks: lists are restored wherever they fit.
"""

import bisect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.tables.section_checks import windows
from streammeta.controller.metadata.tables.tables import (
    FreeBlocks,
    Undo,
    grow_array,
    roomy_zeros,
    whole_array,
)
from streammeta.controller.metadata.tables.values import Int64Column, Mask

Slots = npt.NDArray[np.int32]
Entries: TypeAlias = Callable[[slice], tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]]
"""Returns (stream ids, rows) of a part of a sequence of pairs."""

_BLOCK_MIN = 2
_FEW = 8
"""Up to this number of lists a loop is as fast as arrays."""
_SHRINK_ABOVE = 64
"""A list returns a larger block than this if it is hardly used."""


def range_rows(first: npt.NDArray[np.integer], count: npt.NDArray[np.integer]) -> Int64Column:
    """Return the row numbers `first[i] .. first[i] + count[i] - 1` of every i, in order."""
    ends = np.cumsum(count, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    shift: Int64Column = np.repeat(first.astype(np.int64) - (ends - count), count)
    shift += np.arange(total, dtype=np.int64)
    return shift


def bisect_each(
    lows: Int64Column, highs: Int64Column, is_before: Callable[[Int64Column, Int64Column], Mask]
) -> Int64Column:
    """Return for each search between `lows` and `highs` the first place that is not before it.

    `is_before` is called with numbers of searches and one place for each.
    """
    lows, highs = lows.copy(), highs.copy()
    while len(searched := np.flatnonzero(lows < highs)):
        middle = (lows[searched] + highs[searched]) >> 1
        before = is_before(searched, middle)
        lows[searched[before]] = middle[before] + 1
        highs[searched[~before]] = middle[~before]
    return lows


def _block_lengths(counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the lengths of blocks for lists: the next power of two."""
    if len(counts) and np.maximum.reduce(counts) <= _BLOCK_MIN:
        return np.full_like(counts, _BLOCK_MIN)
    exponents = np.frexp(counts - 1)[1].astype(counts.dtype)
    lengths: npt.NDArray[Any] = np.maximum(_BLOCK_MIN, 1 << exponents)
    return lengths


def _whole_lists(count: int, stream_at: Callable[[int], int]) -> Iterator[slice]:
    """Yield slices that cover `count` entries, sorted by stream, without splitting a list."""
    start = 0
    for window in windows(count):
        if window.stop > start:
            last = stream_at(window.stop - 1)
            end = bisect.bisect_right(range(count), last, lo=window.stop, key=stream_at)
            yield slice(start, end)
            start = end


class ManyLists:
    """The lists of many streams, by position, valid until the index changes.

    Position p of a list with capacity h is in its newest block if it is in the upper half of h, in
    the previous block if it is in the upper half of the rest, and so on.
    """

    def __init__(self, slots: Slots, held: Int64Column, ends: Int64Column, older: Slots) -> None:
        self._slots = slots
        self._held = held
        self._older = older
        self._exponents = np.frexp(held)[1] - 1
        deepest = int(older.max()) if len(older) else 0
        self._ends = np.zeros((deepest + 1, len(held)), dtype=np.int64)
        self._ends[0] = ends
        # Follow the links of all lists in parallel, one block deeper per round.
        for number in range(deepest):
            more = np.flatnonzero(older > number)
            firsts = self._ends[number, more] - (held[more] >> (number + 1))
            self._ends[number + 1, more] = slots[firsts - 1]

    def rows(self, which: Int64Column, positions: Int64Column) -> Slots:
        """Return one row of each of the lists `which`, at these positions."""
        above = self._exponents[which] - np.frexp(positions)[1]
        number = np.minimum(above, self._older[which])
        block_end = self._ends[number, which]
        rows: Slots = self._slots[block_end - (self._held[which] >> number) + positions]
        return rows


class StreamIndex:
    """Lists of row numbers by stream id.

    Columns per stream: the slot of its next row (`_next`), the end of its newest block (`_end`),
    the capacity of all its blocks (`_held`, 0 or a power of two), and the number of blocks before
    the newest (`_older`), which has half of the capacity if there are several. All blocks before
    the newest are full, and the newest of several is never empty.

    numpy is several times slower if it converts values while indexing, so indexes are int64 and
    values are converted to the column's type first.
    """

    def __init__(self) -> None:
        self._slots: Slots = np.zeros(1024, dtype=np.int32)
        self._used = 0
        self._unused = FreeBlocks()
        self._covered = 0
        self._next = np.zeros(1024, dtype=np.int32)
        self._end = np.zeros(1024, dtype=np.int32)
        self._held = np.zeros(1024, dtype=np.int32)
        self._older = np.zeros(1024, dtype=np.int8)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        arrays = (self._next, self._end, self._held, self._older)
        per_stream = sum(array.itemsize for array in arrays)
        return self._used * self._slots.itemsize + self._covered * per_stream

    # ---- reading ----

    def rows(self, stream_id: int) -> Slots:
        """Return a stream's list, valid until the index changes."""
        if stream_id >= self._covered:
            return self._slots[:0]
        end, stop = self._end.item(stream_id), self._next.item(stream_id)
        held = self._held.item(stream_id)
        # From the newest block to the oldest, over the links in front of the blocks.
        parts = []
        for _ in range(self._older.item(stream_id)):
            held //= 2
            parts.append(self._slots[end - held : stop])
            end = stop = self._slots.item(end - held - 1)

        oldest = self._slots[end - held : stop]
        return np.concatenate((oldest, *reversed(parts))) if parts else oldest

    def lengths(self) -> npt.NDArray[np.int32]:
        """Return the lengths of all lists, by stream id. Missing streams have none."""
        held, ends = self._held[: self._covered], self._end[: self._covered]
        lengths: npt.NDArray[np.int32] = held - (ends - self._next[: self._covered])
        return lengths

    def lists(self, streams: Int64Column) -> tuple[Int64Column, Slots]:
        """Return the lengths of streams' lists, and the concatenated lists."""
        if len(streams):
            self._cover(int(np.maximum.reduce(streams)))

        held = self._held[streams].astype(np.int64)
        ends = self._end[streams].astype(np.int64)
        stops = self._next[streams].astype(np.int64)
        older = self._older[streams]
        counts = held - (ends - stops)
        if not np.count_nonzero(older):
            return counts, self._slots[range_rows(ends - held, counts)]

        places = np.cumsum(counts)
        lists = np.empty(int(places[-1]), dtype=np.int32)
        while len(ends):
            # Newest blocks first, then their predecessors if any.
            more = older > 0
            held = np.where(more, held >> 1, held)
            firsts = ends - held
            length = stops - firsts
            places = places - length
            lists[range_rows(places, length)] = self._slots[range_rows(firsts, length)]
            ends = stops = self._slots[firsts[more] - 1].astype(np.int64)
            held, places, older = held[more], places[more], older[more] - 1
        return counts, lists

    def many(self, streams: Int64Column) -> tuple[Int64Column, ManyLists]:
        """Return the lengths of streams' lists, and the lists. Streams may repeat."""
        known = streams < self._covered
        at = np.where(known, streams, 0)
        held = np.where(known, self._held[at], 0).astype(np.int64)
        older = np.where(known, self._older[at], 0)
        ends = self._end[at].astype(np.int64)
        counts = np.where(known, held - (ends - self._next[at]), 0)
        return counts, ManyLists(self._slots, held, ends, older)

    # ---- changing ----

    def append(self, streams: Int64Column, rows: Int64Column, undo: Undo) -> None:
        """Append one row to each stream's list. Requires distinct streams."""
        if len(streams) == 1:
            self._append_one(streams.item(), rows.item())
        else:
            self._append_each(streams, rows)
        undo.append(lambda: self._shorten(streams))

    def _append_one(self, stream_id: int, row: int) -> None:
        self._cover(stream_id)
        if self._next.item(stream_id) == self._end.item(stream_id):
            self._grow_one(stream_id)
        at = self._next.item(stream_id)
        self._slots[at] = row
        self._next[stream_id] = at + 1

    def _append_each(self, streams: Int64Column, rows: Int64Column) -> None:
        self._cover(int(np.maximum.reduce(streams)))
        at = self._next[streams]
        full = at == self._end[streams]
        count = np.count_nonzero(full)
        if count:
            self._grow(streams if count == len(streams) else streams[np.flatnonzero(full)])
            at = self._next[streams]
        self._slots[at.astype(np.int64)] = rows.astype(np.int32)
        self._next[streams] = at + 1

    def replace(
        self, streams: Int64Column, counts: Int64Column, rows: npt.NDArray[np.integer], undo: Undo
    ) -> None:
        """Replace lists, given as `lists` returns them. Requires distinct streams."""
        before = self.lists(streams)
        self._write(streams, counts, rows)
        undo.append(lambda: self._write(streams, *before))

    def load(self, count: int, entries: Entries) -> None:
        """Fill an empty index with `count` pairs, sorted by stream id, equal ids in list order.

        The pairs are requested in parts, so that computing them needs little memory.
        """
        if not count:
            return

        def stream_at(place: int) -> int:
            return int(entries(slice(place, place + 1))[0][0])

        self._covered = stream_at(count - 1) + 1
        covered = max(self._covered, len(self._next))
        self._next, self._end, self._held, self._older = (
            whole_array(roomy_zeros(covered, column.dtype))
            for column in (self._next, self._end, self._held, self._older)
        )
        # Blocks are less than twice as long as their lists, except the shortest.
        self._slots = whole_array(roomy_zeros(max(_BLOCK_MIN * count, len(self._slots)), np.int32))
        for part in _whole_lists(count, stream_at):
            self._load_lists(*entries(part))

    def _load_lists(self, streams: npt.NDArray[np.integer], rows: npt.NDArray[np.integer]) -> None:
        """Append one block for each list, in order."""
        begins = np.empty(len(streams) + 1, dtype=np.bool_)
        begins[0] = begins[-1] = True
        np.not_equal(streams[1:], streams[:-1], out=begins[1:-1])
        first = np.flatnonzero(begins)
        names, counts = streams[first[:-1]].astype(np.int64), np.diff(first)

        # Blocks get room to grow, so that the next appends need no new one.
        lengths = _block_lengths(counts)
        ends = np.cumsum(lengths) + self._used
        firsts = ends - lengths

        self._held[names] = lengths.astype(np.int32)
        self._end[names] = ends.astype(np.int32)
        self._next[names] = (firsts + counts).astype(np.int32)
        self._slots[range_rows(firsts, counts)] = rows.astype(np.int32)
        self._used = int(ends[-1])

    def _write(
        self, streams: Int64Column, counts: Int64Column, rows: npt.NDArray[np.integer]
    ) -> None:
        self._fit(streams, counts)
        firsts = self._end[streams] - self._held[streams]
        self._slots[range_rows(firsts, counts)] = rows.astype(np.int32)
        self._next[streams] = firsts + counts.astype(np.int32)

    def _shorten(self, streams: Int64Column) -> None:
        """Remove the last row of lists that have one. Requires distinct streams."""
        at = self._next[streams] - 1
        self._next[streams] = at
        held = self._held[streams]
        empty = (self._older[streams] > 0) & (self._end[streams] - at == held >> 1)
        # The newest of several blocks must not be empty: return it and continue before it.
        if not np.count_nonzero(empty):
            return

        streams, links, held = streams[empty], at[empty].astype(np.int64) - 1, held[empty] >> 1
        self._unused.give_each(held.astype(np.int64) + 1, links)
        self._next[streams] = self._end[streams] = self._slots[links]
        self._held[streams] = held
        self._older[streams] -= 1

    # ---- blocks ----

    def _fit(self, streams: Int64Column, counts: Int64Column) -> None:
        """Give each list one block that is large enough for `counts`, but not far too large."""
        held = self._held[streams]
        right = (self._older[streams] == 0) & (counts <= held) & ((counts > 0) | (held == 0))
        # A large block that is mostly empty is returned.
        right &= (held <= _SHRINK_ABOVE) | (8 * counts >= held)
        if np.count_nonzero(right) == len(right):
            return

        self._release(streams[~right])
        new = ~right & (counts > 0)
        streams = streams[new]
        lengths = _block_lengths(counts[new])
        self._held[streams] = lengths
        self._end[streams] = self._allocate(lengths) + lengths

    def _release(self, streams: Int64Column) -> None:
        streams = streams[self._held[streams] > 0]
        held = self._held[streams].astype(np.int64)
        ends, older = self._end[streams].astype(np.int64), self._older[streams]
        # Every block but the oldest has one more slot for the link.
        while len(ends):
            more = older > 0
            held = np.where(more, held >> 1, held)
            lengths = held + more
            firsts = ends - lengths
            self._unused.give_each(lengths, firsts)
            ends = self._slots[firsts[more]].astype(np.int64)
            held, older = held[more], older[more] - 1
        for column in (self._next, self._end, self._held, self._older):
            column[streams] = 0

    def _cover(self, stream_id: int) -> None:
        if stream_id < self._covered:
            return
        self._covered = stream_id + 1
        used = len(self._next)
        if self._covered <= used:
            return
        self._next = grow_array(self._next, self._covered, used)
        self._end = grow_array(self._end, self._covered, used)
        self._held = grow_array(self._held, self._covered, used)
        self._older = grow_array(self._older, self._covered, used)

    def _grow(self, streams: Int64Column) -> None:
        """Add a block to full lists. Requires distinct streams."""
        if len(streams) <= _FEW:
            for stream_id in streams.tolist():
                self._grow_one(stream_id)
            return

        held = self._held[streams].astype(np.int64)
        linked = held > 0
        added = np.maximum(held, _BLOCK_MIN)
        firsts = self._allocate(added + linked)
        # The extra slot in front links to the end of the previous block.
        if np.count_nonzero(linked):
            older = np.flatnonzero(linked)
            self._slots[firsts[older]] = self._end[streams[older]]
            self._older[streams] += linked
            firsts += linked

        self._next[streams] = firsts.astype(np.int32)
        self._end[streams] = (firsts + added).astype(np.int32)
        self._held[streams] = (held + added).astype(np.int32)

    def _grow_one(self, stream_id: int) -> None:
        held = int(self._held[stream_id])
        added = held or _BLOCK_MIN
        length = added + (held > 0)
        reused = self._unused.take_alike(length, 1)
        first = int(reused[0]) if len(reused) else self._extend(length)
        if held:
            self._slots[first] = self._end[stream_id]
            self._older[stream_id] += 1
            first += 1

        self._next[stream_id] = first
        self._end[stream_id] = first + added
        self._held[stream_id] = held + added

    def _allocate(self, lengths: Int64Column) -> Int64Column:
        """Return the first slots of blocks with these lengths."""
        ends = np.cumsum(lengths)
        if not self._unused:
            return self._extend(int(ends[-1])) + ends - lengths

        firsts = np.zeros(len(lengths), dtype=np.int64)
        for length in np.flatnonzero(np.bincount(lengths)).tolist():
            alike = np.flatnonzero(lengths == length)
            # Blocks of the same length are taken together, fresh ones are consecutive.
            reused = self._unused.take_alike(length, len(alike))
            fresh = len(alike) - len(reused)
            first = self._extend(fresh * length)
            firsts[alike[: len(reused)]] = reused
            firsts[alike[len(reused) :]] = first + length * np.arange(fresh)
        return firsts

    def _extend(self, count: int) -> int:
        first = self._used
        self._used += count
        if self._used > len(self._slots):
            self._slots = grow_array(self._slots, self._used, first)
        return first
