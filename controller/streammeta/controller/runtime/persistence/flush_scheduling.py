"""Flush placement: appended batches are flushed on the event loop or on the journal's thread.

The way to the thread and back takes longer than a good disk needs for a small batch, and a slow
flush on the loop holds up everything else. So the loop flushes only while the thread has nothing
to do, the batch is small and flushes have been quick of late; after one that was slow it leaves
them to the thread for a time that grows. Knows neither disk nor threads, only bytes, counts and
seconds.
"""

from __future__ import annotations

from collections import deque

SMALL_BYTES = 8 << 10
"""Maximum payload that is flushed on the loop at once, in bytes."""

QUICK_S = 0.001
"""Mean duration of the last flushes up to which the loop may wait for the next, in seconds."""

REMEMBERED = 64
"""Flushes, wherever they were made, by which the next is judged."""

SLOW_S = 0.01
"""Duration from which on one flush is enough to leave the next ones to the thread, in seconds."""

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0
"""Time for which the thread flushes after a slow flush on the loop, in seconds.

It doubles with each, and is the first one again when the loop flushed for as long without any.
"""

STALL_SHARE = 20
"""Times as long as a flush on the loop that the thread flushes after it, at least.

So flushes of seconds hold up everything else for a twentieth of the time at most.
"""


class FlushPlace:
    """The rule, with what it remembers; all calls are made on the event loop."""

    def __init__(self) -> None:
        self._at_thread = 0
        self._is_disk_full = False
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self._sum_s = 0.0
        self._backoff_s = 0.0
        self._thread_until = float("-inf")

    # -- what the thread has

    def given(self) -> None:
        """Note that the thread was given something to do, and with it the journal."""
        self._at_thread += 1

    def returned(self, count: int, *, is_disk_full: bool) -> None:
        """Note that the thread has done what it was given `count` times, and reported all of it.

        On a full disk it goes on by itself, as soon as there is room.
        """
        self._at_thread -= count
        self._is_disk_full = is_disk_full

    # -- the rule

    def is_loop(self, size: int, now: float) -> bool:
        """Whether the loop itself may append `size` bytes at this time, in seconds, and flush."""
        if self._at_thread or self._is_disk_full:
            return False  # appends must not overtake what was given before
        is_quick = self._sum_s <= QUICK_S * len(self._last) or not self._last
        return is_quick and size <= SMALL_BYTES and now >= self._thread_until

    def flushed(self, took_s: float) -> None:
        """Note how long a flush took, wherever it was made."""
        if len(self._last) == REMEMBERED:
            self._sum_s -= self._last[0]
        took_s = min(took_s, SLOW_S)
        self._last.append(took_s)
        self._sum_s += took_s

    def flushed_on_loop(self, took_s: float, now: float) -> None:
        """Note a flush on the loop that has ended now; after a slow one the thread has its turn."""
        self.flushed(took_s)
        if took_s < SLOW_S:
            return
        has_recovered = now - self._thread_until > self._backoff_s
        longer_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        self._backoff_s = FIRST_BACKOFF_S if has_recovered else longer_s
        self._thread_until = now + max(self._backoff_s, STALL_SHARE * took_s)
