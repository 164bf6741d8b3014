"""Rests between batches of commits, so that a moderate load has fewer and larger ones.

A batch costs every replica about the same however much it holds. Messages that come while others
are on their way therefore wait until the last batch is a few milliseconds old, and share the next.
Two things never rest: a message that comes alone, and messages that are already as many as come
together, since no others would join them. Knows neither messages nor the log, only sizes.
"""

from __future__ import annotations

import asyncio

REST_S = 0.008
"""Maximum time from the beginning of a batch to that of the next, in seconds."""

ENOUGH_BYTES = 512
"""Size of the messages that wait from which on a batch is worth its cost: some twenty commits."""

_PRESENT_SHARE = 0.75
"""Share of the bytes on their way at most since the last batch began, as which all count."""


class GroupCommitDelay:
    """Sizes of messages of pipelines, or of single calls, and the rest of those that wait."""

    def __init__(self) -> None:
        self._waiting = 0
        self._unanswered = 0
        self._most = 0  # bytes unanswered at once since the last batch began
        self._began_at = float("-inf")
        self._is_crowded = False
        self._was_crowded = False
        self._over: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def arrived(self, size: int) -> None:
        """Note a message that waits to be decided."""
        if self._unanswered:
            self._is_crowded = True
        self._waiting += size
        self._unanswered += size
        self._most = max(self._most, self._unanswered)
        if self._over is not None and self._is_enough():
            self._end()

    def left(self, size: int) -> None:
        """Note that a message waits no longer, since it is decided or its caller has gone."""
        self._waiting -= size

    def answered(self, size: int) -> None:
        """Note that a message is answered, or its caller has gone."""
        self._unanswered -= size

    def began(self) -> None:
        """Note that a batch begins with what waits now."""
        self._began_at = asyncio.get_running_loop().time()
        self._most = self._unanswered
        self._was_crowded, self._is_crowded = self._is_crowded, False

    @property
    def is_alone(self) -> bool:
        """Whether messages come one at a time: each when the one before is answered."""
        return not (self._is_crowded or self._was_crowded)

    async def over(self) -> None:
        """Return once a batch with what waits may begin, within `REST_S`."""
        if self.is_alone or self._is_enough():
            return
        if self._over is None:
            loop = asyncio.get_running_loop()
            ends_at = self._began_at + REST_S
            if loop.time() >= ends_at:
                return
            self._over = loop.create_future()
            self._alarm = loop.call_at(ends_at, self._end)
        await asyncio.shield(self._over)

    def _is_enough(self) -> bool:
        return self._waiting >= min(ENOUGH_BYTES, self._most * _PRESENT_SHARE)

    def _end(self) -> None:
        assert self._over is not None
        assert self._alarm is not None
        self._alarm.cancel()
        self._over.set_result(None)
        self._over = self._alarm = None
