"""Bytes that arrive in a row and belong in many places: buffers filled one after the other.

Owns how far they are filled. Knows nothing of where the bytes come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

_PIECE_BYTES = 256 * 1024
"""Few enough to stay in the processor's cache between being received and being put in place."""


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Scatter:
    """Writable buffers, and where in them the next byte goes. Raises `ValueError` without room."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._views = deque(view.cast("B") for view in into if view.nbytes)
        self.room = sum(len(view) for view in self._views)
        if not self.room:
            raise ValueError("the buffers to read into have no room, wanted 1 byte or more")

    def next_views(self, most: int) -> list[memoryview]:
        """Give the first `most` of the places that are still to be filled, in order."""
        return list(islice(self._views, most))

    def skip(self, size: int) -> None:
        """Count the next `size` bytes, at most `room`, as filled."""
        self.room -= size
        while size:
            view = self._views.popleft()
            if len(view) > size:
                self._views.appendleft(view[size:])
            size -= min(size, len(view))

    def write(self, data: bytes | memoryview) -> None:
        """Put `data`, at most `room` bytes, where it belongs."""
        rest = memoryview(data)
        while rest:
            view = self._views[0]
            size = min(len(view), len(rest))
            view[:size] = rest[:size]
            self.skip(size)
            rest = rest[size:]

    def fill_from(self, stream: _Stream) -> int:
        """Read from `stream` until everything is filled or it ends; give how many bytes came."""
        received = 0
        while self.room:
            piece = stream.read(min(self.room, _PIECE_BYTES))
            if not piece:
                break
            self.write(piece)
            received += len(piece)
        return received
