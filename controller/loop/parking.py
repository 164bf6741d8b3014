"""Answers that wait for the high watermark.

An answer may leave the controller only when everything it speaks of is committed. Owns the queue
of such answers; knows neither requests nor the log.
"""

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class _Parked:
    end_offset: int
    future: asyncio.Future[None]


class ParkedAnswers:
    """Futures in the order of the log offsets they wait for."""

    def __init__(self) -> None:
        self._parked: deque[_Parked] = deque()

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, end_offset: int) -> asyncio.Future[None]:
        """Return a future that is done once everything below `end_offset` is committed."""
        assert not self._parked or self._parked[-1].end_offset <= end_offset
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parked.append(_Parked(end_offset, future))
        return future

    def release(self, high_watermark: int) -> None:
        """Complete what waited for offsets below `high_watermark`."""
        while self._parked and self._parked[0].end_offset <= high_watermark:
            future = self._parked.popleft().future
            if not future.done():
                future.set_result(None)

    def fail_all(self, error: Exception) -> None:
        """Fail every waiting answer: its outcome is no longer known here."""
        while self._parked:
            future = self._parked.popleft().future
            if not future.done():
                future.set_exception(error)
                # The caller may have gone; an unread exception is no news then.
                future.exception()
