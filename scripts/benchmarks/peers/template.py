"""A request encoded once, whose holes are filled anew for every commit.

A request of a thousand ranges takes milliseconds to put together in Python; filling its holes takes
microseconds, so the client stays out of the measurement.
"""

import numpy as np
from numpy.typing import NDArray


class Template:
    """Bytes with holes; a name may stand for many holes of one size, which get the same bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._holes: dict[str, list[int]] = {}
        self._sizes: dict[str, int] = {}
        self._buffer: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._places: dict[str, NDArray[np.intp]] = {}

    def add(self, constant: bytes) -> None:
        """Append bytes that stay."""
        self._bytes += constant

    def hole(self, name: str, size: int) -> None:
        """Append `size` bytes that change."""
        if self._sizes.setdefault(name, size) != size:
            raise ValueError(f"hole {name!r} had {self._sizes[name]} bytes before, now {size}")
        self._holes.setdefault(name, []).append(len(self._bytes))
        self._bytes += bytes(size)

    def append(self, other: "Template") -> None:
        """Append another template, holes and all."""
        at = len(self._bytes)
        for name, starts in other._holes.items():
            self._holes.setdefault(name, []).extend(at + start for start in starts)
            self._sizes.setdefault(name, other._sizes[name])
        self._bytes += other._bytes

    def __len__(self) -> int:
        return len(self._bytes)

    def fill(self, **values: bytes) -> bytes:
        """Return the request with the named holes filled; the others are as they were before."""
        if len(self._buffer) != len(self._bytes):
            self._finish()
        for name, value in values.items():
            self._buffer[self._places[name]] = np.frombuffer(value, dtype=np.uint8)
        return self._buffer.tobytes()

    def _finish(self) -> None:
        self._buffer = np.frombuffer(bytes(self._bytes), dtype=np.uint8).copy()
        for name, starts in self._holes.items():
            self._places[name] = np.array(starts)[:, None] + np.arange(self._sizes[name])
