"""Newest batches of a partition in memory, for consumers at the end of the log."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

TAIL_BYTES = 4 * 1024 * 1024


class TailCache:
    """Consecutive batches of up to `max_bytes`, and the newest in any case."""

    def __init__(self, max_bytes: int = TAIL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, int, bytes]] = deque()
        self._size = 0

    def add(self, base_offset: int, next_offset: int, batch: bytes) -> None:
        """Add the next batch."""
        self._batches.append((base_offset, next_offset, batch))
        self._size += len(batch)
        while self._size > self._max_bytes and len(self._batches) > 1:
            self._size -= len(self._batches.popleft()[2])

    def read(self, offset: int, below: int, max_bytes: int) -> list[bytes] | None:
        """Return batches from the one with `offset` on, which end at or before `below`.

        They have at most `max_bytes`, or are a single batch. None if the first is not in memory.
        """
        if not self._batches or offset < self._batches[0][0]:
            return None
        found: list[bytes] = []
        size = 0
        first = bisect_right(self._batches, offset, key=lambda one: one[0]) - 1
        for index in range(first, len(self._batches)):
            _, next_offset, batch = self._batches[index]
            size += len(batch)
            if next_offset > below or (found and size > max_bytes):
                break
            found.append(batch)
        return found
