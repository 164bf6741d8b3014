"""Callers that wait for an offset of the log.

An answer may leave the controller only when everything it speaks of is committed. Owns the queue
of such answers; knows neither requests nor the log. However many an offset releases, a turn of the
event loop completes a bounded number: a caller's answer costs much more than its release, and the
quorum's messages go between.
"""

import asyncio
from collections import deque
from heapq import heapify, heappop, heappush

COMPLETED_PER_TURN = 32
"""Callers that one turn of the event loop wakes."""


class ParkedAnswers:
    """Futures by the log offsets they wait for."""

    def __init__(self) -> None:
        self._parked: list[tuple[int, int, asyncio.Future[None]]] = []
        self._failed: deque[tuple[asyncio.Future[None], Exception]] = deque()
        self._count = 0
        self._reached = 0
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._parked) + len(self._failed)

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
        """Complete what waited for offsets up to `end_offset`, in order, from this turn on."""
        self._reached = max(self._reached, end_offset)
        self._go_on()

    def fail_all(self, error: Exception) -> None:
        """Fail every answer not released yet: its outcome is no longer known here."""
        failed = sorted(entry for entry in self._parked if entry[0] > self._reached)
        self._parked = [entry for entry in self._parked if entry[0] <= self._reached]
        heapify(self._parked)
        self._failed.extend((future, error) for _, _, future in failed)
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_scheduled:
            self._complete_some()

    def _complete_some(self) -> None:
        self._is_scheduled = False
        for _ in range(COMPLETED_PER_TURN):
            if not self._complete_next():
                return
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._complete_some)

    def _complete_next(self) -> bool:
        """Complete one caller that still waits; False: no more are to be completed."""
        while self._parked and self._parked[0][0] <= self._reached:
            _, _, future = heappop(self._parked)
            if not future.done():
                future.set_result(None)
                return True
        while self._failed:
            future, error = self._failed.popleft()
            if not future.done():
                future.set_exception(error)
                # The caller may have gone; an unread exception is no news then.
                future.exception()
                return True
        return False
