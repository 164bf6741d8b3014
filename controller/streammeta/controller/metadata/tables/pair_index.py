"""Index of a table's rows by two numeric key columns, with vector operations.

An open-addressed hash table of row numbers. The keys stay in the table, so a row costs 6 to 12
bytes here. A removed row leaves a mark, which later insertions reuse. When rows and marks fill two
thirds of it, a new table begins, and each insertion moves a part of the old one, since no commit
may wait for all of it. It has no undo: callers invert their calls.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.tables.tables import Table
from streammeta.controller.metadata.tables.values import Int64Column

_BITS_MIN = 10
_EMPTY = 0
_REMOVED = -1
_FILLED_NUMERATOR, _FILLED_DENOMINATOR = 2, 3

_MOVED_MIN = 4096
_MOVED_PER_ROW = 16

_Slots: TypeAlias = npt.NDArray[np.int32]
_NO_SLOTS: _Slots = np.zeros(0, dtype=np.int32)

Hashes = npt.NDArray[np.uint64]


def hash_pairs(first: npt.NDArray[np.integer], second: npt.NDArray[np.integer]) -> Hashes:
    """Return a well mixed 64-bit hash of each pair."""
    mixed = first.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += second.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return mixed


class PairIndex:
    """Rows of `table` by the columns `first` and `second`."""

    def __init__(self, table: Table, first: str, second: str) -> None:
        self._table = table
        self._first = first
        self._second = second
        self._count = 0
        self._slots = np.zeros(1 << _BITS_MIN, dtype=np.int32)  # row + 1, or a mark
        self._filled = 0  # slots that are not empty
        self._old_slots = _NO_SLOTS
        self._moved = 0  # old slots before it are in the new table

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._slots.nbytes + self._old_slots.nbytes

    def find(self, first: Int64Column, second: Int64Column) -> Int64Column:
        """Return the row of each pair, -1 if it is not in the index."""
        rows, _ = self._find(self._slots, first, second)
        if len(self._old_slots):
            missing = np.flatnonzero(rows < 0)
            rows[missing], _ = self._find(self._old_slots, first[missing], second[missing])
        return rows

    def insert(self, rows: Int64Column) -> None:
        """Add rows, whose keys are in the table. Their pairs are distinct and not indexed."""
        self._count += len(rows)
        capacity = len(self._slots) * _FILLED_NUMERATOR // _FILLED_DENOMINATOR
        if self._filled + len(rows) > capacity:
            self._begin_larger()
        self._insert(rows)
        if len(self._old_slots):
            # The new table has room for further rows until everything has moved.
            self._move(max(_MOVED_MIN, _MOVED_PER_ROW * len(rows)))

    def remove(self, rows: Int64Column) -> None:
        """Remove indexed rows, whose keys are still in the table."""
        self._count -= len(rows)
        firsts, seconds = self._table[self._first][rows], self._table[self._second][rows]
        found, places = self._find(self._slots, firsts, seconds)
        self._slots[places[found >= 0]] = _REMOVED
        missing = np.flatnonzero(found < 0)
        if len(missing):
            _, places = self._find(self._old_slots, firsts[missing], seconds[missing])
            self._old_slots[places] = _REMOVED

    def _begin_larger(self) -> None:
        """Begin a new table, and finish the move before it, if there still is one."""
        self._move(len(self._old_slots))
        bits = _BITS_MIN
        # Nearly full, it would have to be replaced after a few insertions and removals.
        while self._count * 8 * _FILLED_DENOMINATOR > (1 << bits) * 7 * _FILLED_NUMERATOR:
            bits += 1
        self._old_slots, self._moved = self._slots, 0
        self._slots, self._filled = np.zeros(1 << bits, dtype=np.int32), 0

    def _move(self, count: int) -> None:
        """Move the rows of the next `count` old slots to the new table."""
        end = min(self._moved + count, len(self._old_slots))
        part = self._old_slots[self._moved : end]
        is_row = part > _EMPTY
        self._insert(part[is_row].astype(np.int64) - 1)
        # A search of the old table must pass the slot, and not find the row twice.
        part[is_row] = _REMOVED
        self._moved = end
        if end == len(self._old_slots):
            self._old_slots, self._moved = _NO_SLOTS, 0

    def _insert(self, rows: Int64Column) -> None:
        slots, mask = self._slots, len(self._slots) - 1
        firsts, seconds = self._table[self._first][rows], self._table[self._second][rows]
        places = _places(slots, firsts, seconds)
        step = 0
        while len(rows):
            found = slots[places]
            free = found <= _EMPTY
            # Several rows may aim at one place, and the last one gets it.
            slots[places[free]] = rows[free] + 1
            won = slots[places] == rows + 1
            self._filled += int(np.count_nonzero(won & (found == _EMPTY)))
            rows = rows[~won]
            step += 1
            places = (places[~won] + step) & mask

    def _find(
        self, slots: _Slots, first: Int64Column, second: Int64Column
    ) -> tuple[Int64Column, Int64Column]:
        """Return the row of each pair, -1 without one, and the place of each row found."""
        mask = len(slots) - 1
        firsts, seconds = self._table[self._first], self._table[self._second]
        rows = np.full(len(first), -1, dtype=np.int64)
        found_at = np.zeros(len(first), dtype=np.int64)
        if not len(firsts):
            return rows, found_at

        asked = np.arange(len(first))
        places = _places(slots, first, second)
        step = 0
        while len(asked):
            found = slots[places].astype(np.int64) - 1
            # A mark has no row, so some row stands in for it and is not taken for a match.
            row = np.maximum(found, 0)
            same = (firsts[row] == first) & (seconds[row] == second) & (found >= 0)
            rows[asked[same]] = found[same]
            found_at[asked[same]] = places[same]
            # Most pairs are found at once.
            left = np.flatnonzero(~same & (found != _EMPTY - 1))
            step += 1
            asked, places = asked[left], (places[left] + step) & mask
            first, second = first[left], second[left]
        return rows, found_at


def _places(
    slots: _Slots, first: npt.NDArray[np.integer], second: npt.NDArray[np.integer]
) -> Int64Column:
    # The highest bits are mixed best.
    shift = np.uint64(64 - (len(slots).bit_length() - 1))
    return (hash_pairs(first, second) >> shift).astype(np.int64)
