"""Reads a blob forward through a buffer; a seek inside of the buffer costs no request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

DEFAULT_BUFFER_SIZE = 1 << 20


class RangeStream:
    """A position in a blob of `size` bytes, read by `read(start, length)`."""

    def __init__(
        self,
        read: Callable[[int, int], Awaitable[bytes]],
        size: int,
        buffer_size: int = DEFAULT_BUFFER_SIZE,
        position: int = 0,
    ) -> None:
        self._read = read
        self._size = size
        self._buffer_size = buffer_size
        self._buffer = b""
        self._buffer_at = 0
        self.position = position

    async def read(self, length: int) -> bytes:
        """Return the next bytes, fewer only at the end of the blob."""
        parts = []
        while length > 0 and self.position < self._size:
            at = self.position - self._buffer_at
            if not 0 <= at < len(self._buffer):
                await self._fill()
                at = 0
            part = self._buffer[at : at + length]
            parts.append(part)
            self.position += len(part)
            length -= len(part)
        return b"".join(parts)

    async def _fill(self) -> None:
        wanted = min(self._buffer_size, self._size - self.position)
        self._buffer = await self._read(self.position, wanted)
        self._buffer_at = self.position
        if not self._buffer:
            raise EOFError(f"blob ends at byte {self.position}, wanted {self._size}")

    def seek_forward(self, position: int) -> None:
        """Go to a later position; raise `OSError` if it lies behind this one."""
        if position < self.position:
            raise OSError(f"seek is to {position}, wanted {self.position} or more")
        self.position = position
