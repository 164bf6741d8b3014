"""Shapes of reads: scatter buffers for a range, and merging of ranges into few requests.

A request has a fixed cost, and unused bytes cost bandwidth and memory. Both the span of a merged
range and its unused share are therefore limited. Does no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from streammeta.storage.object_store.protocol.base import check_range

_PIECE_BYTES = 256 * 1024
"""Piece size in bytes that stays in the CPU cache between receipt and copy."""


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Scatter:
    """Writable buffers filled in order. Raises `ValueError` if they have no room."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._views = deque(view.cast("B") for view in into if view.nbytes)
        self.room = sum(len(view) for view in self._views)
        if not self.room:
            raise ValueError("the buffers to read into have no room, expected 1 byte or more")

    def next_views(self, most: int) -> list[memoryview]:
        """Return the first `most` unfilled buffers, in order."""
        return list(islice(self._views, most))

    def skip(self, size: int) -> None:
        """Count the next `size` bytes, at most `room`, as filled."""
        self.room -= size
        while size:
            view = self._views.popleft()
            # Partly filled: the rest stays first in line.
            if len(view) > size:
                self._views.appendleft(view[size:])
            size -= min(size, len(view))

    def write(self, data: bytes | memoryview) -> None:
        """Write `data`, at most `room` bytes, into the next buffers."""
        rest = memoryview(data)
        while rest:
            view = self._views[0]
            size = min(len(view), len(rest))
            view[:size] = rest[:size]
            self.skip(size)
            rest = rest[size:]

    def fill_from(self, stream: _Stream) -> int:
        """Read from `stream` until the buffers are full or it ends, and return the byte count."""
        received = 0
        while self.room:
            # The stream returns new bytes each time. Small pieces stay in the cache until they are
            # copied.
            piece = stream.read(min(self.room, _PIECE_BYTES))
            if not piece:
                break
            self.write(piece)
            received += len(piece)
        return received


# One request of this size takes about as long to transfer as to start.
MAX_SPAN = 4 * 1024 * 1024
MAX_UNUSED = 0.5


@dataclass(frozen=True, slots=True)
class MergedRange:
    """Bytes `[start, end)` of an object that contain the ranges with the indices `members`."""

    start: int
    end: int
    members: tuple[int, ...]


def merge_ranges(
    ranges: Sequence[tuple[int, int]], *, max_span: int = MAX_SPAN, max_unused: float = MAX_UNUSED
) -> list[MergedRange]:
    """Group half-open `ranges`, in any order, into merged reads, ascending.

    A group of several ranges spans at most `max_span` bytes, and at most the share `max_unused`
    (0..1) of them belongs to no range. A larger single range is a group. Every range is in exactly
    one group. Raises `ValueError` unless `0 <= start < end`.
    """
    for start, end in ranges:
        check_range(start, end)

    groups: list[MergedRange] = []
    members: list[int] = []
    first = last = used = 0

    # By start, so that each range extends the current group or begins the next.
    for index in sorted(range(len(ranges)), key=lambda index: ranges[index]):
        start, end = ranges[index]
        span = max(last, end) - first
        # Overlapping bytes count once, so only the bytes after `last` are new.
        used_together = used + max(0, end - max(last, start))
        if members and span <= max_span and span - used_together <= max_unused * span:
            last, used = max(last, end), used_together
            members.append(index)
            continue
        if members:
            groups.append(MergedRange(first, last, tuple(members)))
        first, last, used, members = start, end, end - start, [index]

    if members:
        groups.append(MergedRange(first, last, tuple(members)))
    return groups
