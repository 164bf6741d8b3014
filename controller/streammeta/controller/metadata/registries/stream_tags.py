"""Registry of the tags of streams, and their look-up by an index of 8 bytes a tag of a stream.

The index contains no texts. An entry is the checksum of a tag in the upper 32 bits, and the id of a
stream in the lower 32 bits. The streams of a tag are therefore neighbours in id order. Tags with
equal checksums are neighbours too, so a caller compares the tags of each stream that it finds. The
index is derived from the tags. It is not part of a snapshot, and is built when one is loaded.
"""

import bisect
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from streammeta.controller.metadata.tables.shared_views import SharedDict, SharedDictView
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import Int64Column, Tags, column

RUN_ENTRIES = 1_024
"""Maximum number of entries in a run. A full one is split in two."""

_LOADED_ENTRIES = RUN_ENTRIES * 7 // 8
"""Number of entries in a run that is loaded, so that it has room for a few more."""

_ID_BITS = 32
"""Bits of a stream id. The rows of 2 ** 32 streams would need more than 100 GB."""

_Place = tuple[int, int]
"""Number of a run, and a position in it."""


class TagIndex:
    """A sorted set of entries, in runs of bounded length."""

    def __init__(self) -> None:
        self._runs: list[array[int]] = []
        self._firsts: list[int] = []

    def load(self, tags: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Fill an empty index with the flattened tags of streams."""
        every = (entry for stream_id, texts in tags for entry in _entries(stream_id, texts))
        ordered = np.fromiter(every, dtype=np.uint64)
        ordered.sort()
        for first in range(0, len(ordered), _LOADED_ENTRIES):
            run = array("Q")
            run.frombytes(ordered[first : first + _LOADED_ENTRIES].tobytes())
            self._runs.append(run)
            self._firsts.append(run[0])

    def add(self, stream_id: int, texts: Sequence[str]) -> None:
        """Add a stream with its flattened tags."""
        for entry in _entries(stream_id, texts):
            self._insert(entry)

    def remove(self, stream_id: int, texts: Sequence[str]) -> None:
        """Remove a stream with its flattened tags."""
        for entry in _entries(stream_id, texts):
            # The last run that begins at or below an existing entry contains it.
            number = bisect.bisect_right(self._firsts, entry) - 1
            run = self._runs[number]
            del run[bisect.bisect_left(run, entry)]
            if run:
                self._firsts[number] = run[0]
            else:
                del self._runs[number], self._firsts[number]

    def find(self, tags: Tags, first_id: int) -> Iterator[int]:
        """Yield streams from `first_id` on that may have all tags, by id.

        They are the streams of the tag that the fewest have. The index must not change meanwhile.
        """
        bounds = (self._bounds(_checksum(key, value), first_id) for key, value in tags)
        return self._ids_between(*min(bounds, key=_distance))

    def _ids_between(self, start: _Place, stop: _Place) -> Iterator[int]:
        mask = (1 << _ID_BITS) - 1
        previous = -1
        for number in range(start[0], min(stop[0] + 1, len(self._runs))):
            begin = start[1] if number == start[0] else 0
            end = stop[1] if number == stop[0] else None
            for entry in self._runs[number][begin:end]:
                # Two tags of a stream with the same checksum are equal entries.
                if entry != previous:
                    yield entry & mask
                previous = entry

    def _bounds(self, checksum: int, first_id: int) -> tuple[_Place, _Place]:
        last_id = 1 << _ID_BITS
        start = checksum << _ID_BITS | min(first_id, last_id - 1)
        return self._place(start), self._place((checksum + 1) << _ID_BITS)

    def _place(self, entry: int) -> _Place:
        """Return the place of the first entry that is not below this one."""
        number = max(0, bisect.bisect_left(self._firsts, entry) - 1)
        if number >= len(self._runs):
            return number, 0
        position = bisect.bisect_left(self._runs[number], entry)
        at_end = position == len(self._runs[number])
        return (number + 1, 0) if at_end else (number, position)

    def _insert(self, entry: int) -> None:
        if not self._runs:
            self._runs, self._firsts = [array("Q", (entry,))], [entry]
            return

        number = max(0, bisect.bisect_right(self._firsts, entry) - 1)
        run = self._runs[number]
        position = bisect.bisect_left(run, entry)
        run.insert(position, entry)
        self._firsts[number] = run[0]

        if len(run) > RUN_ENTRIES:
            cut = len(run) // 2
            if position > cut and run[position - 1] >> _ID_BITS == entry >> _ID_BITS:
                # Ids only grow, so later streams of a common tag follow this entry. A cut after it
                # lets them fill the run.
                cut = min(position + 1, len(run) - 1)
            self._runs.insert(number + 1, run[cut:])
            self._firsts.insert(number + 1, run[cut])
            del run[cut:]


def _distance(bounds: tuple[_Place, _Place]) -> int:
    """Return about the number of entries between two places."""
    start, stop = bounds
    return (stop[0] - start[0]) * RUN_ENTRIES + stop[1] - start[1]


def _entries(stream_id: int, texts: Sequence[str]) -> list[int]:
    return [
        _checksum(key, value) << _ID_BITS | stream_id
        for key, value in zip(texts[::2], texts[1::2], strict=True)
    ]


def _checksum(key: str, value: str) -> int:
    """Return the same number for a tag on every controller."""
    return zlib.crc32(f"{key}={value}".encode())


EXAMINED_MAX = 4_096
"""Maximum number of streams that a page of a look-up examines."""


class StreamTags:
    """Tags by stream id. Texts are interned, since many streams share keys and values."""

    def __init__(self) -> None:
        self._tags: SharedDict[int, tuple[str, ...]] = SharedDict()
        self._index = TagIndex()
        self._characters = 0

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._tags

    @property
    def characters(self) -> int:
        """Number of characters in all tags."""
        return self._characters

    def of_stream(self, stream_id: int) -> Tags:
        """Return a stream's tags, sorted by key."""
        flat = self._tags.get(stream_id) or ()
        return tuple(zip(flat[::2], flat[1::2], strict=True))

    def page(
        self, tags: Tags, first: int, size: int, is_wanted: Callable[[int], bool] = lambda _: True
    ) -> tuple[Int64Column, int]:
        """Return the first `size` wanted streams with all these tags, from the id `first` on.

        Also returns the id where the next page begins, or -1. A page whose tags many streams have,
        but never together, ends after `EXAMINED_MAX` streams.
        """
        wanted = set(tags)
        found: list[int] = []

        for examined, stream_id in enumerate(self._index.find(tags, first)):
            if examined == EXAMINED_MAX:
                return column(found), stream_id
            # The index contains streams whose tags only have the same checksum.
            if wanted.issubset(self.of_stream(stream_id)) and is_wanted(stream_id):
                if len(found) == size:
                    return column(found), stream_id
                found.append(stream_id)

        return column(found), -1

    def view(self) -> SharedDictView[int, tuple[str, ...]]:
        """Return an immutable view of the flattened tags."""
        return self._tags.view()

    def load(self, tags: Mapping[int, tuple[str, ...]]) -> None:
        """Fill an empty registry with flattened tags."""
        self._tags.load((owner, tuple(map(sys.intern, texts))) for owner, texts in tags.items())
        self._index.load(tags.items())
        self._characters = sum(len(text) for texts in tags.values() for text in texts)

    def set(self, stream_id: int, tags: Tags, undo: Undo) -> None:
        """Set the tags of a stream without tags."""
        if not tags:
            return
        texts = tuple(sys.intern(text) for tag in tags for text in tag)
        self._put(stream_id, texts)
        undo.append(lambda: self._remove(stream_id, texts))

    def drop(self, stream_id: int, undo: Undo) -> None:
        """Remove the tags of a stream, if it has any."""
        texts = self._tags.get(stream_id)
        if texts is not None:
            self._remove(stream_id, texts)
            undo.append(lambda: self._put(stream_id, texts))

    def _put(self, stream_id: int, texts: tuple[str, ...]) -> None:
        self._tags[stream_id] = texts
        self._index.add(stream_id, texts)
        self._characters += sum(map(len, texts))

    def _remove(self, stream_id: int, texts: tuple[str, ...]) -> None:
        self._tags.pop(stream_id)
        self._index.remove(stream_id, texts)
        self._characters -= sum(map(len, texts))
