"""What has been answered already: bounded windows that make repeats harmless.

Entries come in by replay and leave in the order they came, so every replica forgets alike. Knows
neither what the answers mean nor what time it is.
"""

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from streammeta.controller.metadata.columns import Undo
from streammeta.controller.metadata.values import Tags

REQUESTS_MAX = 32_768
"""Create and Prepare requests remembered."""
REJECTED_ROWS_MAX = 65_536
"""Rows left out of commits remembered."""
REMOVED_OBJECTS_MAX = 131_072
"""Committed objects remembered after they are removed."""

_NO_TAGS = 1
_PAGE_SHIFT = 10
_PAGE_MASK = (1 << _PAGE_SHIFT) - 1

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class RequestKind(IntEnum):
    """Which call a remembered request was."""

    CREATE_STREAMS = 1
    PREPARE_OBJECTS = 2
    NEXT_NODE_ID = 3


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Two nodes may choose the same request id by accident; they are different requests."""

    kind: RequestKind
    node_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class IssuedIds:
    """The first answer: `count` ids from `first_id`; `deadline_ms` is -1 for streams.

    `content_digest` is that of the streams' tags, see `digest_of_tags`; 0: unknown, or no
    streams were created.
    """

    first_id: int
    count: int
    deadline_ms: int = -1
    content_digest: int = 0


def digest_of_tags(tags: Sequence[Tags]) -> int:
    """Return a number that tells the tags of some streams from others; it is never 0."""
    if not any(tags):
        return _NO_TAGS
    state = hashlib.blake2b(digest_size=8)
    for of_one in tags:
        texts = [text.encode() for tag in sorted(of_one) for text in tag]
        state.update(b"%d;" % len(texts))
        for text in texts:
            state.update(b"%d:" % len(text) + text)
    return int.from_bytes(state.digest(), "little", signed=True) or _NO_TAGS


class WindowView(Generic[_K, _V]):
    """The entries a window had at one moment, oldest first. May be read in another thread."""

    def __init__(self, pages: dict[int, list[tuple[_K, _V]]], first: int, end: int) -> None:
        self._pages = pages
        self._first = first
        self._end = end

    def __len__(self) -> int:
        return self._end - self._first

    def __iter__(self) -> Iterator[tuple[_K, _V]]:
        for place in range(self._first, self._end):
            yield self._pages[place >> _PAGE_SHIFT][place & _PAGE_MASK]


class Window(Generic[_K, _V]):
    """The last `size` entries put in, oldest out first. Putting a key again keeps its place.

    Entries are in pages by the order they came in. A view shares the pages, and the first write to
    a page since then copies that page alone.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._places: dict[_K, int] = {}
        self._pages: dict[int, list[tuple[_K, _V]]] = {}
        self._shared: set[int] = set()
        self._first = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    def __contains__(self, key: _K) -> bool:
        return key in self._places

    def get(self, key: _K) -> _V | None:
        """Return the value of a key that is still in the window, or None."""
        place = self._places.get(key)
        return None if place is None else self._pages[place >> _PAGE_SHIFT][place & _PAGE_MASK][1]

    def view(self) -> WindowView[_K, _V]:
        """Return an immutable view of the entries as they are now."""
        self._shared = set(self._pages)
        return WindowView(self._pages.copy(), self._first, self._end)

    def load(self, entries: Iterable[tuple[_K, _V]]) -> None:
        """Fill an empty window, oldest first."""
        for key, value in entries:
            self._add(key, value)

    def put(self, key: _K, value: _V, undo: Undo) -> None:
        """Put an entry in, and the oldest out when there are too many."""
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
        if self._first >> _PAGE_SHIFT != number:
            del self._pages[number]
        undo.append(lambda: self._restore(place, key, page))

    def _restore(self, place: int, key: _K, page: list[tuple[_K, _V]]) -> None:
        self._first = place
        self._places[key] = place
        # A view may hold the page.
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
