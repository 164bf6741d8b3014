"""Reads a blob forward through a buffer; a seek inside of the buffer costs no request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

DEFAULT_BUFFER_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Bytes of a blob from `start` on."""

    start: int = 0
    data: bytes = b""

    def holds(self, start: int, length: int) -> bool:
        """Whether all of a range is here."""
        return self.start <= start and start + length <= self.start + len(self.data)


class RangeStream:
    """A position in a blob of `size` bytes, read by `read(start, length)`.

    `ahead` is what an earlier stream of the same blob has read, to begin with.
    """

    def __init__(
        self,
        read: Callable[[int, int], Awaitable[bytes]],
        size: int,
        buffer_size: int = DEFAULT_BUFFER_SIZE,
        position: int = 0,
        ahead: ReadAhead | None = None,
    ) -> None:
        self._read = read
        self._size = size
        self._buffer_size = buffer_size
        self.ahead = ahead or ReadAhead()
        self.position = position

    async def read(self, length: int) -> bytes:
        """Return the next bytes, fewer only at the end of the blob."""
        parts = []
        while length > 0 and self.position < self._size:
            if not self.ahead.holds(self.position, 1):
                await self._fill()
            at = self.position - self.ahead.start
            part = self.ahead.data[at : at + length]
            parts.append(part)
            self.position += len(part)
            length -= len(part)
        return b"".join(parts)

    async def peek(self, length: int) -> bytes:
        """Return the next bytes, and stay before them; fewer only at the end of the blob."""
        wanted = min(length, self._size - self.position)
        if not self.ahead.holds(self.position, wanted):
            await self._fill(wanted)
        at = self.position - self.ahead.start
        return self.ahead.data[at : at + wanted]

    async def _fill(self, least: int = 1) -> None:
        wanted = min(max(self._buffer_size, least), self._size - self.position)
        self.ahead = ReadAhead(self.position, await self._read(self.position, wanted))
        if not self.ahead.data:
            raise EOFError(f"blob ends at byte {self.position}, wanted {self._size}")

    def seek_forward(self, position: int) -> None:
        """Go to a later position; raise `OSError` if it lies behind this one."""
        if position < self.position:
            raise OSError(f"seek is to {position}, wanted {self.position} or more")
        self.position = position
