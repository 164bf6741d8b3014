"""Callers that wait for an offset of the log.

An answer may leave the controller only when everything it speaks of is committed. Owns the queue
of such answers; knows neither requests nor the log.
"""

import asyncio
from heapq import heapify, heappop, heappush


class ParkedAnswers:
    """Futures by the log offsets they wait for."""

    def __init__(self) -> None:
        self._parked: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, end_offset: int) -> asyncio.Future[None]:
        """Return a future that is done once everything below `end_offset` is reached."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1  # no two entries are equal, and the older comes first
        heappush(self._parked, (end_offset, self._count, future))
        return future

    def forget(self, future: asyncio.Future[None]) -> None:
        """Drop one that nobody waits for any more; takes time in proportion to their number."""
        self._parked = [entry for entry in self._parked if entry[2] is not future]
        heapify(self._parked)

    def release(self, end_offset: int) -> None:
        """Complete what waited for offsets up to `end_offset`."""
        while self._parked and self._parked[0][0] <= end_offset:
            _, _, future = heappop(self._parked)
            if not future.done():
                future.set_result(None)

    def fail_all(self, error: Exception) -> None:
        """Fail every waiting answer: its outcome is no longer known here."""
        parked, self._parked = self._parked, []
        for _, _, future in parked:
            if not future.done():
                future.set_exception(error)
                # The caller may have gone; an unread exception is no news then.
                future.exception()
