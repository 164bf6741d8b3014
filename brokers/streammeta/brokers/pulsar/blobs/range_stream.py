"""Forward reads of a blob through a buffer. A seek inside of the buffer needs no request."""

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
        """Whether the buffer contains the whole range."""
        return self.start <= start and start + length <= self.start + len(self.data)


class RangeStream:
    """Position in a blob of `size` bytes, which `read(start, length)` reads.

    `ahead` is the read-ahead of an earlier stream of the same blob.
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
            # A long read takes the buffered bytes first, then requests the rest.
            if not self.ahead.holds(self.position, 1):
                await self._fill()

            at = self.position - self.ahead.start
            part = self.ahead.data[at : at + length]
            parts.append(part)
            self.position += len(part)
            length -= len(part)
        return b"".join(parts)

    async def peek(self, length: int) -> bytes:
        """Return the next bytes without moving, fewer only at the end of the blob."""
        wanted = min(length, self._size - self.position)
        if not self.ahead.holds(self.position, wanted):
            await self._fill(wanted)
        at = self.position - self.ahead.start
        return self.ahead.data[at : at + wanted]

    async def _fill(self, least: int = 1) -> None:
        # A range request after the end would fail.
        wanted = min(max(self._buffer_size, least), self._size - self.position)
        self.ahead = ReadAhead(self.position, await self._read(self.position, wanted))
        # The blob is shorter than its index says. An endless loop would follow.
        if not self.ahead.data:
            raise EOFError(f"blob ends at byte {self.position}, expected {self._size}")

    def seek_forward(self, position: int) -> None:
        """Move to a later position. Raise `OSError` for an earlier one."""
        if position < self.position:
            raise OSError(f"seek is to {position}, expected {self.position} or more")
        self.position = position
