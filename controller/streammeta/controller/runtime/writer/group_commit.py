"""Group-commit delay: under moderate load commits wait up to 8 ms to share a log batch.

A batch costs every replica about the same regardless of its size. Messages that arrive while others
are in flight therefore wait until the last batch is a few milliseconds old, and share the next one.
Two cases never wait: a message that arrives alone, and messages that are already as many as usually
arrive together, because no others would join them. Only message sizes are used here.
"""

from __future__ import annotations

import asyncio

REST_S = 0.008
"""Minimum interval between the starts of two batches under moderate load, in seconds."""

ENOUGH_BYTES = 512
"""Size of waiting messages that justifies a batch: about twenty commits."""

_PRESENT_SHARE = 0.75
"""Share of the in-flight peak that counts as all messages having arrived."""


class GroupCommitDelay:
    """Sizes of waiting and unanswered messages, and the delay before their batch."""

    def __init__(self) -> None:
        self._waiting = 0
        self._unanswered = 0
        self._most = 0  # peak of unanswered bytes since the last batch began
        self._began_at = float("-inf")
        self._is_crowded = False
        self._was_crowded = False
        self._over: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def record_arrival(self, size: int) -> None:
        """Record a message that waits to be decided."""
        if self._unanswered:
            # An unanswered message is in flight, so messages do not come one at a time.
            self._is_crowded = True
        self._waiting += size
        self._unanswered += size
        self._most = max(self._most, self._unanswered)
        if self._over is not None and self._is_enough():
            self._end()

    def record_departure(self, size: int) -> None:
        """Record that a message no longer waits: it is decided, or its caller has disconnected."""
        self._waiting -= size

    def record_answer(self, size: int) -> None:
        """Record that a message is answered, or that its caller has disconnected."""
        self._unanswered -= size

    def start_batch(self) -> None:
        """Record that a batch begins with the waiting messages."""
        self._began_at = asyncio.get_running_loop().time()
        # The peak is counted again for each batch, so that it follows a changing load.
        self._most = self._unanswered
        self._was_crowded, self._is_crowded = self._is_crowded, False

    @property
    def is_alone(self) -> bool:
        """Whether messages arrive one at a time, each after the previous one is answered."""
        # Two batches in a row must be free of overlap before a message counts as alone.
        return not (self._is_crowded or self._was_crowded)

    async def wait(self) -> None:
        """Return once a batch with the waiting messages may begin, within `REST_S`."""
        if self.is_alone or self._is_enough():
            return
        if self._over is None:
            loop = asyncio.get_running_loop()
            ends_at = self._began_at + REST_S
            # The last batch is old enough, so nothing is gained by waiting.
            if loop.time() >= ends_at:
                return
            self._over = loop.create_future()
            self._alarm = loop.call_at(ends_at, self._end)
        # Several callers share the future, so cancelling one must not cancel it.
        await asyncio.shield(self._over)

    def _is_enough(self) -> bool:
        return self._waiting >= min(ENOUGH_BYTES, self._most * _PRESENT_SHARE)

    def _end(self) -> None:
        assert self._over is not None
        assert self._alarm is not None
        self._alarm.cancel()
        self._over.set_result(None)
        self._over = self._alarm = None
