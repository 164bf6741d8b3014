"""A dictionary whose immutable views cost next to nothing.

Entries are spread over a fixed number of small dictionaries (pages) by the hash of their key.
`view()` shares the pages; the first write to a page since then copies that page alone. So freezing
takes the same few microseconds whatever the dictionary holds, and no write after it takes longer
than copying one page. Views may be read in another thread: a shared page is never written again.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

_PAGES = 4_096
_MASK = _PAGES - 1

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class SharedDictView(Generic[_K, _V]):
    """The entries a `SharedDict` had at one moment, in no particular order."""

    def __init__(self, pages: list[dict[_K, _V]], size: int) -> None:
        self._pages = pages
        self._size = size

    def __len__(self) -> int:
        return self._size

    def items(self) -> Iterator[tuple[_K, _V]]:
        """Yield (key, value) pairs."""
        for page in self._pages:
            yield from page.items()


class SharedDict(Generic[_K, _V]):
    """Values by key. Iteration is in no particular order: sort where order matters."""

    def __init__(self) -> None:
        nothing: dict[_K, _V] = {}
        self._pages = [nothing] * _PAGES
        self._owned = bytearray(_PAGES)
        self._size = 0

    def __len__(self) -> int:
        return self._size

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
        """Take a key out; return its value, or None if it was not there."""
        if key not in self:
            return None
        self._size -= 1
        return self._page_to_write(key).pop(key)

    def items(self) -> Iterator[tuple[_K, _V]]:
        """Yield (key, value) pairs; the dictionary must not be written meanwhile."""
        for page in self._pages:
            yield from page.items()

    def keys(self) -> Iterator[_K]:
        """Yield keys; the dictionary must not be written meanwhile."""
        for page in self._pages:
            yield from page

    def load(self, entries: Iterable[tuple[_K, _V]]) -> None:
        """Put entries in."""
        for key, value in entries:
            self[key] = value

    def view(self) -> SharedDictView[_K, _V]:
        """Return an immutable view of the entries as they are now."""
        self._owned = bytearray(_PAGES)
        return SharedDictView(self._pages.copy(), self._size)

    def _page_to_write(self, key: _K) -> dict[_K, _V]:
        number = hash(key) & _MASK
        if not self._owned[number]:
            self._pages[number] = self._pages[number].copy()
            self._owned[number] = 1
        return self._pages[number]
