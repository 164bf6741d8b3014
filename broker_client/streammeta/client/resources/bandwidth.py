"""Bandwidth limit of a client by priority: uploads first, then reads, then compaction.

Each direction has one limit. An upload never waits, because appends wait for it. A read waits while
more than a moment of traffic is ahead of it, and compaction until none is. Both continue after a
bounded time, so that neither starves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

READ_SLACK_S = 0.25
"""Traffic ahead of a read that it does not wait for, in seconds at the full rate."""

LEAST_SHARE = 20
"""Compaction gets at least one part in this many of the rate, reads twice as much."""

UPLOADS_AHEAD_S = 10.0
"""Maximum upload traffic that others wait for, in seconds at the full rate."""

_LOOK_AGAIN_S = 0.05


class Grade(IntEnum):
    """Priority of a transfer, the most important first."""

    UPLOAD = 0
    READ = 1
    COMPACTION = 2


class Bandwidth:
    """One direction of a client's traffic with its object store, `rate` bytes per second.

    With a rate of 0 there is no limit. `now` and `sleep` are the event loop's unless given.
    """

    def __init__(
        self,
        rate: float,
        now: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.rate = rate
        self._now = now
        self._sleep = sleep
        self._free_at = 0.0
        self._turns = {grade: asyncio.Lock() for grade in Grade}
        self._waiting_reads = 0

    async def take(self, grade: Grade, nbytes: int) -> None:
        """Wait for the turn of a transfer of `nbytes`. Transfers of one grade are in order."""
        if not self.rate:
            return

        if grade is Grade.UPLOAD:
            # The rate may be lower than the uploads' rate, and the excess must not delay others
            # for ever.
            most_ahead = max(self._free_at, self._time() + UPLOADS_AHEAD_S)
            self._reserve(nbytes)
            self._free_at = min(self._free_at, most_ahead)
            return

        self._waiting_reads += grade is Grade.READ
        try:
            async with self._turns[grade]:
                await self._wait(grade, nbytes)
                self._reserve(nbytes)
        finally:
            self._waiting_reads -= grade is Grade.READ

    async def _wait(self, grade: Grade, nbytes: int) -> None:
        """Wait until little traffic is ahead, at most for the time at the least share."""
        share = LEAST_SHARE if grade is Grade.COMPACTION else LEAST_SHARE / 2
        ends_at = self._time() + share * nbytes / self.rate
        while (left_s := ends_at - self._time()) > 0:
            ahead_s = self._free_at - self._time()
            if grade is Grade.READ:
                ahead_s -= READ_SLACK_S
            # Reads come first even while the line is free.
            elif self._waiting_reads:
                ahead_s = max(ahead_s, _LOOK_AGAIN_S)
            if ahead_s <= 0:
                return
            await self._sleep(min(ahead_s, left_s))

    def _reserve(self, nbytes: int) -> None:
        self._free_at = max(self._time(), self._free_at) + nbytes / self.rate

    def _time(self) -> float:
        return asyncio.get_running_loop().time() if self._now is None else self._now()


class Network:
    """Both directions of a client's traffic with its object store."""

    def __init__(self, rate: float = 0.0) -> None:
        self.received = Bandwidth(rate)
        self.sent = Bandwidth(rate)
