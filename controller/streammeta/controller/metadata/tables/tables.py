"""Growable numpy tables with undoable writes and immutable views, and the allocation of their rows.

A `Table` is a set of columns of equal length. Rows are appended and overwritten, never moved. Every
write goes through the table, which adds the inverse action to the caller's `Undo` list and keeps
views intact: `view()` shares the arrays, and the first later write to a page of a column saves the
old page into the view. Growth allocates new arrays, so arrays shared with a view do not change.

No commit may wait for the copy of a large table. A table that outgrows `RESERVE_ABOVE` rows
reserves address space for `RESERVED_ROWS` at once. The operating system provides zeroed memory when
a page is first touched, so unused rows cost nothing.

A view may be read in another thread while the table is written. The writer saves a page before it
writes. The reader first copies the column and then overlays the saved pages.

`FreeBlocks` keeps unused blocks (runs of consecutive rows) by size. Sizes are rounded up, so that
returned blocks fit later requests. If no block of the right size is left, a larger one is split.
The module is independent of streams and objects.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, cast
from weakref import ref

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, Int64Column

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = Int64Column | slice | int
_V = TypeVar("_V")


class Undo(list[Callable[[], None]]):
    """Actions that undo one log entry, in the order of its effects. Run them in reverse.

    `when_committed` runs instead once the entry is committed, to free resources that undoing it
    would have needed.
    """

    __slots__ = ("when_committed",)

    def __init__(self) -> None:
        super().__init__()
        self.when_committed: list[Callable[[], None]] = []

    def assign(self, owner: object, name: str, value: object) -> None:
        """Set an attribute. Undo restores its present value."""
        before = getattr(owner, name)
        setattr(owner, name, value)
        self.append(lambda: setattr(owner, name, before))

    def put(self, entries: dict[int, _V], key: int, value: _V | None) -> None:
        """Set an entry, or remove it with None. Undo restores the present one."""
        before = entries.get(key)
        _put(entries, key, value)
        self.append(lambda: _put(entries, key, before))


def _put(entries: dict[int, _V], key: int, value: _V | None) -> None:
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value


RESERVE_ABOVE = 65_536
RESERVED_ROWS = 1 << 24
_PAGE_SHIFT = 12
_PAGE_ROWS = 1 << _PAGE_SHIFT
_CAPACITY_MIN = 1024
_EXACT_BITS = 4
"""Blocks of fewer than 2 ** 4 rows are not rounded up."""


def grow_array(array: Array, size: int, used: int) -> Array:
    """Return an array of at least `size` elements with the first `used` of `array`, then zeros."""
    grown = _zeros(_capacity(max(size, len(array) + (len(array) >> 1)), size), array.dtype)
    grown[:used] = array[:used]
    return grown


def roomy_zeros(count: int, dtype: npt.DTypeLike) -> Array:
    """Return `count` zeros, to be written at once, in an array with room to grow at the end.

    A table that loads such a column uses it without a copy (see `Table.load`).
    """
    return _zeros(_capacity(count, count), np.dtype(dtype))[:count]


def whole_array(array: Array) -> Array:
    """Return an array of `roomy_zeros` including its room. Other arrays unchanged."""
    base = array.base
    if not isinstance(base, np.ndarray) or not _is_reserved(base):
        return array

    # A part from the middle of a reservation must not grow over its rest.
    is_begin = base.ctypes.data == array.ctypes.data and base.dtype == array.dtype
    return base if is_begin else array


def _is_reserved(array: Array) -> bool:
    memory = array.base
    return isinstance(memory, memoryview) and isinstance(memory.obj, mmap.mmap)


def _capacity(wanted: int, size: int) -> int:
    if wanted <= RESERVE_ABOVE:
        return wanted
    # Quadruple the reservation when it is exhausted: such a table is copied very rarely.
    reserved = RESERVED_ROWS
    while reserved < size:
        reserved *= 4
    return reserved


def _zeros(count: int, dtype: np.dtype[Any]) -> Array:
    """Return an array of zeros in pages of the smallest size.

    For a large array numpy requests huge pages. The first touch of each would clear all of it,
    which takes milliseconds in the middle of a commit.
    """
    if count <= RESERVE_ABOVE:
        return np.zeros(count, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=dtype)


class Table:
    """Columns of equal length. `specs` maps names to dtypes, and new rows are zeros."""

    def __init__(self, specs: Mapping[str, npt.DTypeLike]) -> None:
        self._arrays: dict[str, Array] = {
            name: np.zeros(_CAPACITY_MIN, dtype=dtype) for name, dtype in specs.items()
        }
        self._size = 0
        self._views: list[ref[TableView]] = []

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: str) -> Array:
        """Return a column's live rows, for reading only: writes go through the table."""
        return self._arrays[name][: self._size]

    def cell(self, name: str, row: int) -> int:
        """Return a live row's number in a column."""
        value: int = self._arrays[name].item(row)
        return value

    def cells(self, names: Iterable[str], row: int) -> list[int]:
        """Return a live row's numbers in several columns."""
        arrays = self._arrays
        return [arrays[name].item(row) for name in names]

    @property
    def nbytes(self) -> int:
        """Size of all rows ever used, in bytes. Reserved rows cost nothing."""
        return self._size * sum(array.itemsize for array in self._arrays.values())

    def extend(self, count: int) -> slice:
        """Add `count` zeroed rows without undo and return their slice."""
        first = self._size
        self._reserve(first + count)
        self._size = first + count
        return slice(first, first + count)

    def append(self, count: int, undo: Undo) -> slice:
        """Add `count` zeroed rows and return their slice."""
        added = self.extend(count)
        undo.append(lambda: self._truncate(added.start))
        return added

    def put(self, name: str, rows: Rows, values: Any, undo: Undo) -> None:
        """Overwrite `rows` (each named once) of a column."""
        array = self._arrays[name]
        old = array[rows]
        if isinstance(rows, slice):
            old = old.copy()
        self.write(name, rows, values)
        undo.append(lambda: self.write(name, rows, old))

    def write(self, name: str, rows: Rows, values: Any) -> None:
        """Overwrite `rows` of a column. The caller is responsible for undo."""
        self.write_cells(rows, {name: values})

    def write_cells(self, rows: Rows, cells: Mapping[str, Any]) -> None:
        """Overwrite `rows` of several columns, as `write` does."""
        # A single row is written several times faster by its number than by an index array.
        is_one = isinstance(rows, np.ndarray) and len(rows) == 1
        at = cast(Int64Column, rows).item() if is_one else rows
        if self._views:
            self._save_pages(cells, at)

        for name, given in cells.items():
            array, values = self._arrays[name], given
            if type(values) is np.ndarray:
                if values.dtype is not array.dtype:
                    # Two steps are several times faster than converting during the assignment.
                    values = values.astype(array.dtype)
                if is_one:
                    values = values.item()
            array[at] = values

    def load(self, columns: Mapping[str, Any]) -> None:
        """Fill an empty table with all its columns, which have equal lengths.

        A column made by `roomy_zeros` with the right dtype is not copied: the table owns it from
        now on.
        """
        size = len(next(iter(columns.values())))
        self._reserve(size)
        self._size = size
        for name, array in self._arrays.items():
            whole = whole_array(columns[name])
            # Adopting a reserved array saves a copy of the column.
            if whole.dtype == array.dtype and len(whole) == len(array):
                self._arrays[name] = whole
            else:
                array[:size] = columns[name]

    def view(self) -> "TableView":
        """Return an immutable view of all present rows."""
        view = TableView(dict(self._arrays), self._size)
        self._views.append(ref(view))
        return view

    def _truncate(self, size: int) -> None:
        # Freed rows must be zero when they are appended again.
        for name, array in self._arrays.items():
            self.write(name, slice(size, self._size), array.dtype.type(0))

        self._size = size

    def _reserve(self, size: int) -> None:
        capacity = len(next(iter(self._arrays.values())))
        if size <= capacity:
            return
        for name, array in self._arrays.items():
            self._arrays[name] = grow_array(array, size, self._size)
        # The old arrays no longer change, so their views need no more saved pages.
        self._views.clear()

    def _save_pages(self, names: Iterable[str], rows: Rows) -> None:
        pages = _pages_of(rows, self._size)
        # An unreferenced view needs no pages.
        views = [view for view in (weak() for weak in self._views) if view is not None]
        if len(views) < len(self._views):
            self._views = [ref(view) for view in views]
        for view in views:
            for name in names:
                view.save(name, pages)


class TableView:
    """An immutable view of a table at one moment, see the module's docstring."""

    def __init__(self, arrays: dict[str, Array], size: int) -> None:
        self._arrays = arrays
        self._size = size
        self._saved: dict[str, dict[int, Array]] = {name: {} for name in arrays}

    def __len__(self) -> int:
        return self._size

    def column(self, name: str) -> Array:
        """Return a copy of one column at the time of the view."""
        result = self._arrays[name][: self._size].copy()
        # Saved pages are newer than the copy or equal, never older: overlay them last.
        for page, rows in list(self._saved[name].items()):
            first = page << _PAGE_SHIFT
            result[first : first + len(rows)] = rows
        return result

    def save(self, name: str, pages: list[int]) -> None:
        """Save pages of a column. The table calls this before it overwrites them."""
        saved = self._saved[name]
        array = self._arrays[name]
        for page in pages:
            first = page << _PAGE_SHIFT
            if page not in saved and first < self._size:
                saved[page] = array[first : min(first + _PAGE_ROWS, self._size)].copy()


def _pages_of(rows: Rows, size: int) -> list[int]:
    if isinstance(rows, slice):
        first, stop, _ = rows.indices(size)
        return list(range(first >> _PAGE_SHIFT, (stop + _PAGE_ROWS - 1) >> _PAGE_SHIFT))
    if isinstance(rows, np.ndarray):
        pages: list[int] = np.flatnonzero(np.bincount(rows >> _PAGE_SHIFT)).tolist()
        return pages
    return [rows >> _PAGE_SHIFT]


def block_rows(counts: npt.NDArray[np.integer]) -> Int64Column:
    """Return the sizes of blocks for `counts` rows, at most an eighth larger."""
    if len(counts) and np.maximum.reduce(counts) < 1 << _EXACT_BITS:
        return counts.astype(np.int64)
    step = 1 << np.maximum(np.frexp(counts)[1].astype(np.int64) - _EXACT_BITS, 0)
    rows: Int64Column = -(-counts // step) * step
    return rows


def block_size(count: int) -> int:
    """Return `block_rows` of a single count."""
    step = 1 << max(count.bit_length() - _EXACT_BITS, 0)
    return -(-count // step) * step


class FreeBlocks:
    """Unused blocks, last in first out per size."""

    def __init__(self) -> None:
        self._stacks: dict[int, list[Int64Column]] = {}

    def __bool__(self) -> bool:
        """Return whether any block was ever unused."""
        return bool(self._stacks)

    def take(self, size: int, count: int) -> Int64Column:
        """Return the first rows of at most `count` blocks of `size` rows, splitting larger ones."""
        if not self._stacks:
            return EMPTY_COLUMN
        taken = [self.take_alike(size, count)]
        left = count - len(taken[0])
        while left and self._split(size):
            taken.append(self.take_alike(size, left))
            left -= len(taken[-1])
        return np.concatenate(taken) if len(taken) > 1 else taken[0]

    def take_alike(self, size: int, count: int) -> Int64Column:
        """Return the first rows of at most `count` blocks returned with exactly this size."""
        parts = self._stacks.get(size)
        taken: list[Int64Column] = []
        while parts and count:
            firsts = parts.pop()
            # A stack entry has several blocks, of which a part may suffice.
            if len(firsts) > count:
                parts.append(firsts[count:])
                firsts = firsts[:count]
            taken.append(firsts)
            count -= len(firsts)

        if not taken:
            return EMPTY_COLUMN
        return np.concatenate(taken) if len(taken) > 1 else taken[0]

    def give(self, size: int, firsts: Int64Column) -> None:
        """Return blocks of one size. Empty blocks are ignored."""
        if size and len(firsts):
            self._stacks.setdefault(size, []).append(firsts)

    def give_each(self, sizes: Int64Column, firsts: Int64Column) -> None:
        """Return blocks of different sizes."""
        for size in np.unique(sizes).tolist():
            self.give(size, firsts[sizes == size])

    def rows(self) -> int:
        """Return the number of unused rows."""
        return sum(size * len(part) for size, parts in self._stacks.items() for part in parts)

    def _split(self, size: int) -> bool:
        """Split a block of the next larger size. The remainder stays unused."""
        sizes = (other for other, parts in self._stacks.items() if other > size and parts)
        # The smallest larger size wastes least.
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
    step = 1 << max(rows.bit_length() - _EXACT_BITS, 0)
    return rows // step * step
