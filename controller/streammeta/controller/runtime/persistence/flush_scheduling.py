"""Flush placement: appended batches are flushed on the event loop or on the journal's thread.

The round trip to the thread takes longer than a good disk needs for a small batch, while a slow
flush on the loop blocks all other work. The loop therefore flushes only while the thread is idle,
the batch is small and recent flushes were fast. After a slow flush it leaves them to the thread for
an increasing time.
"""

from __future__ import annotations

from collections import deque

SMALL_BYTES = 8 << 10
"""Maximum payload flushed on the loop, in bytes."""

QUICK_S = 0.001
"""Maximum mean duration of recent flushes for the loop to flush the next one, in seconds."""

REMEMBERED = 64
"""Number of recent flushes, in either place, that the mean covers."""

SLOW_S = 0.01
"""Duration of a single flush that moves the next ones to the thread, in seconds."""

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0
"""Time for which the thread flushes after a slow flush on the loop, in seconds. It doubles with
each slow flush, and starts again once the loop has flushed for as long without one."""

STALL_SHARE = 20
"""Minimum time on the thread after a slow flush, as a multiple of that flush's duration. Flushes of
seconds therefore block all other work for at most a twentieth of the time."""


class FlushPlace:
    """The rule and its memory. All calls are made on the event loop."""

    def __init__(self) -> None:
        self._at_thread = 0
        self._is_disk_full = False
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self._sum_s = 0.0
        self._backoff_s = 0.0
        self._thread_until = float("-inf")

    # -- work of the thread

    def record_work(self) -> None:
        """Record that the thread was given work, and with it the journal."""
        self._at_thread += 1

    def record_results(self, count: int, *, is_disk_full: bool) -> None:
        """Record that the thread has finished and reported `count` items of work.

        On a full disk it continues by itself as soon as there is room.
        """
        # Results come in rounds that may cover several items.
        self._at_thread -= count
        self._is_disk_full = is_disk_full

    # -- the rule

    def is_loop(self, size: int, now: float) -> bool:
        """Whether the loop itself may append and flush `size` bytes at this time, in seconds."""
        if self._at_thread or self._is_disk_full:
            return False  # appends must not overtake earlier work
        is_quick = self._sum_s <= QUICK_S * len(self._last) or not self._last
        return is_quick and size <= SMALL_BYTES and now >= self._thread_until

    def record_flush(self, took_s: float) -> None:
        """Record the duration of a flush in either place."""
        if len(self._last) == REMEMBERED:
            self._sum_s -= self._last[0]
        # A single stall must not dominate the mean for the next flushes.
        took_s = min(took_s, SLOW_S)
        self._last.append(took_s)
        self._sum_s += took_s

    def record_loop_flush(self, took_s: float, now: float) -> None:
        """Record a flush that just ended on the loop.

        After a slow one the thread flushes for a while.
        """
        self.record_flush(took_s)
        if took_s < SLOW_S:
            return
        # The loop has flushed long enough without a stall, so earlier ones are forgotten.
        has_recovered = now - self._thread_until > self._backoff_s
        longer_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        self._backoff_s = FIRST_BACKOFF_S if has_recovered else longer_s
        # A flush of seconds must not repeat on the loop after half a second.
        self._thread_until = now + max(self._backoff_s, STALL_SHARE * took_s)
