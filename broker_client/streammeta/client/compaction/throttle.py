"""Pace: at most so many bytes a second, and never before those who wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LOOK_AGAIN_S = 0.005


class Throttle:
    """Spaces out transfers so that they come to `rate` bytes a second; 0: no limit.

    Time that was not used is not saved up, so that there are no bursts.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def take(self, nbytes: int) -> None:
        """Wait for the turn of a transfer of `nbytes`; turns are given in the order of calls."""
        wait = self.reserve(nbytes, asyncio.get_running_loop().time())
        if wait > 0:
            await asyncio.sleep(wait)

    def reserve(self, nbytes: int, now: float) -> float:
        """Give a transfer the next turn; return in how many seconds that is."""
        if not self._rate:
            return 0.0
        turn = max(now, self._free_at)
        self._free_at = turn + nbytes / self._rate
        return turn - now


async def give_way(is_busy: Callable[[], bool], longest: float) -> None:
    """Wait while others are busy, but no longer than about `longest` seconds: work must go on."""
    for _ in range(int(longest / _LOOK_AGAIN_S)):
        if not is_busy():
            return
        await asyncio.sleep(_LOOK_AGAIN_S)
