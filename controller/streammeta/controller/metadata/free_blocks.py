"""Blocks of table rows: which are unused, by size.

A block is a run of consecutive rows. Sizes are rounded up so that blocks given back fit what is
asked for later; a bigger block is split when none of the right size is left. Only the caller knows
the table; it extends it where nothing unused is left.
"""

import numpy as np

from streammeta.controller.metadata.values import EMPTY_COLUMN, Int64Column


def block_rows(counts: Int64Column) -> Int64Column:
    """Return how many rows blocks take that are to hold `counts` rows: an eighth more at most."""
    step = 1 << np.maximum(np.frexp(counts)[1].astype(np.int64) - 4, 0)
    rows: Int64Column = -(-counts // step) * step
    return rows


def block_size(count: int) -> int:
    """Return `block_rows` of one count."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


class FreeBlocks:
    """Unused blocks, last in first out within a size."""

    def __init__(self) -> None:
        self._stacks: dict[int, list[Int64Column]] = {}

    def __bool__(self) -> bool:
        """Whether there has been an unused block."""
        return bool(self._stacks)

    def take(self, size: int, count: int) -> Int64Column:
        """Return the first rows of at most `count` blocks of `size` rows; cuts larger ones."""
        if not self._stacks:
            return EMPTY_COLUMN
        taken = [self.take_alike(size, count)]
        left = count - len(taken[0])
        while left and self._split(size):
            taken.append(self.take_alike(size, left))
            left -= len(taken[-1])
        return np.concatenate(taken) if len(taken) > 1 else taken[0]

    def take_alike(self, size: int, count: int) -> Int64Column:
        """Return the first rows of at most `count` blocks that were given back as `size` rows."""
        parts = self._stacks.get(size)
        taken: list[Int64Column] = []
        while parts and count:
            firsts = parts.pop()
            if len(firsts) > count:
                parts.append(firsts[count:])
                firsts = firsts[:count]
            taken.append(firsts)
            count -= len(firsts)
        if not taken:
            return EMPTY_COLUMN
        return np.concatenate(taken) if len(taken) > 1 else taken[0]

    def give(self, size: int, firsts: Int64Column) -> None:
        """Take blocks of one size back; blocks of no rows are no blocks."""
        if size and len(firsts):
            self._stacks.setdefault(size, []).append(firsts)

    def give_each(self, sizes: Int64Column, firsts: Int64Column) -> None:
        """Take blocks of different sizes back."""
        for size in np.unique(sizes).tolist():
            self.give(size, firsts[sizes == size])

    def rows(self) -> int:
        """Return how many rows are unused."""
        return sum(size * len(part) for size, parts in self._stacks.items() for part in parts)

    def _split(self, size: int) -> bool:
        """Cut one block of the next bigger size there is; what is left over stays unused."""
        sizes = (other for other, parts in self._stacks.items() if other > size and parts)
        bigger = min(sizes, default=0)
        if not bigger:
            return False
        firsts = self._stacks[bigger].pop()
        if len(firsts) > 1:
            self._stacks[bigger].append(firsts[1:])
        start, pieces = int(firsts[0]), bigger // size
        self.give(size, start + size * np.arange(pieces, dtype=np.int64))
        self._give_rest(start + pieces * size, bigger % size)
        return True

    def _give_rest(self, first: int, rows: int) -> None:
        while rows:
            size = _largest_block(rows)
            self.give(size, np.array([first], dtype=np.int64))
            first, rows = first + size, rows - size


def _largest_block(rows: int) -> int:
    """Return the largest block size that fits into `rows` rows."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return rows // step * step
