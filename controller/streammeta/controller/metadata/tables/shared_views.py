"""Dictionaries and bounded windows with immutable views that are almost free.

`SharedDict` distributes its entries over a fixed number of small dictionaries (pages) by the hash
of their key. `Window` keeps its entries in pages by order of arrival. `view()` shares the pages,
and the first later write to a page copies only that page. Freezing therefore takes a few
microseconds regardless of the number of entries, and a later write costs at most one copied page.
Views may be read in another thread, since a shared page is never written again.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from streammeta.controller.metadata.tables.tables import Undo

_PAGES = 4_096
_MASK = _PAGES - 1
_PAGE_SHIFT = 10
_PAGE_MASK = (1 << _PAGE_SHIFT) - 1

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class SharedDictView(Generic[_K, _V]):
    """The entries of a `SharedDict` at one moment, in no particular order."""

    def __init__(self, pages: list[dict[_K, _V]], size: int) -> None:
        self._pages = pages
        self._size = size

    def __len__(self) -> int:
        return self._size

    def items(self) -> Iterator[tuple[_K, _V]]:
        """Yield (key, value) pairs."""
        for page in filter(None, self._pages):  # most pages of a small dictionary are empty
            yield from page.items()


class SharedDict(SharedDictView[_K, _V]):
    """Values by key. Iteration is in no particular order, so sort if order matters.

    It must not be written during an iteration.
    """

    def __init__(self) -> None:
        nothing: dict[_K, _V] = {}
        super().__init__([nothing] * _PAGES, 0)
        self._owned = bytearray(_PAGES)

    def __contains__(self, key: _K) -> bool:
        return key in self._pages[hash(key) & _MASK]

    def __getitem__(self, key: _K) -> _V:
        return self._pages[hash(key) & _MASK][key]

    def get(self, key: _K) -> _V | None:
        """Return a key's value, or None."""
        return self._pages[hash(key) & _MASK].get(key)

    def __setitem__(self, key: _K, value: _V) -> None:
        page = self._page_to_write(key)
        before = len(page)
        page[key] = value
        self._size += len(page) - before

    def pop(self, key: _K) -> _V | None:
        """Remove a key and return its value, or None if it was absent."""
        if key not in self:
            return None
        self._size -= 1
        return self._page_to_write(key).pop(key)

    def keys(self) -> Iterator[_K]:
        """Yield keys."""
        for page in filter(None, self._pages):
            yield from page

    def load(self, entries: Iterable[tuple[_K, _V]]) -> None:
        """Add entries."""
        for key, value in entries:
            self[key] = value

    def view(self) -> SharedDictView[_K, _V]:
        """Return an immutable view of the present entries."""
        # All pages are shared from now on, so the next write to each must copy it.
        self._owned = bytearray(_PAGES)
        return SharedDictView(self._pages.copy(), self._size)

    def _page_to_write(self, key: _K) -> dict[_K, _V]:
        number = hash(key) & _MASK
        if not self._owned[number]:
            self._pages[number] = self._pages[number].copy()
            self._owned[number] = 1
        return self._pages[number]


class WindowView(Generic[_K, _V]):
    """The entries of a window at one moment, oldest first. May be read in another thread."""

    def __init__(self, pages: dict[int, list[tuple[_K, _V]]], first: int, end: int) -> None:
        self._pages = pages
        self._first = first
        self._end = end

    def __len__(self) -> int:
        return self._end - self._first

    def __iter__(self) -> Iterator[tuple[_K, _V]]:
        for place in range(self._first, self._end):
            yield self._pages[place >> _PAGE_SHIFT][place & _PAGE_MASK]


class Window(WindowView[_K, _V]):
    """The last `size` entries. Adding a key again keeps its place.

    Pages contain entries in order of arrival. A view shares the pages, and the first later write to
    a page copies only that page.
    """

    def __init__(self, size: int) -> None:
        super().__init__({}, 0, 0)
        self._size = size
        self._places: dict[_K, int] = {}
        self._shared: set[int] = set()

    def __contains__(self, key: _K) -> bool:
        return key in self._places

    def get(self, key: _K) -> _V | None:
        """Return the value of a key in the window, or None."""
        place = self._places.get(key)
        return None if place is None else self._pages[place >> _PAGE_SHIFT][place & _PAGE_MASK][1]

    def view(self) -> WindowView[_K, _V]:
        """Return an immutable view of the present entries."""
        self._shared = set(self._pages)
        return WindowView(self._pages.copy(), self._first, self._end)

    def load(self, entries: Iterable[tuple[_K, _V]]) -> None:
        """Fill an empty window, oldest first."""
        for key, value in entries:
            self._add(key, value)

    def put(self, key: _K, value: _V, undo: Undo) -> None:
        """Add or replace an entry, and evict the oldest if there are too many."""
        place = self._places.get(key)
        if place is not None:
            before = self._pages[place >> _PAGE_SHIFT][place & _PAGE_MASK][1]
            self._write(place, (key, value))
            undo.append(lambda: self._write(place, (key, before)))
            return
        self._add(key, value)
        undo.append(lambda: self._take_back(key))
        if len(self) > self._size:
            self._drop_oldest(undo)

    def _add(self, key: _K, value: _V) -> None:
        self._places[key] = self._end
        self._write(self._end, (key, value))
        self._end += 1

    def _take_back(self, key: _K) -> None:
        # The entry stays in its page, out of reach, until the next one overwrites it.
        del self._places[key]
        self._end -= 1

    def _drop_oldest(self, undo: Undo) -> None:
        place = self._first
        number = place >> _PAGE_SHIFT
        page = self._pages[number]
        key, _ = page[place & _PAGE_MASK]
        del self._places[key]
        self._first += 1
        # This was the last entry of its page.
        if self._first >> _PAGE_SHIFT != number:
            del self._pages[number]
        undo.append(lambda: self._restore(place, key, page))

    def _restore(self, place: int, key: _K, page: list[tuple[_K, _V]]) -> None:
        self._first = place
        self._places[key] = place
        # A view may share the page.
        self._shared.add(place >> _PAGE_SHIFT)
        self._pages.setdefault(place >> _PAGE_SHIFT, page)

    def _write(self, place: int, entry: tuple[_K, _V]) -> None:
        number, at = place >> _PAGE_SHIFT, place & _PAGE_MASK
        page = self._pages.setdefault(number, [])
        if number in self._shared:
            page = self._pages[number] = page.copy()
            self._shared.discard(number)
        if at < len(page):
            page[at] = entry
        else:
            page.append(entry)
