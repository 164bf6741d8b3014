"""Rate limit of a task's deletions, which a busy store lowers for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

# The limit of S3's DeleteObjects.
LARGEST_BATCH = 1000
"""Maximum number of keys in a request to delete."""


class Pacer:
    """Rate limiter: at most `keys_per_s` keys on average.

    Each time the store asks for fewer requests, the rate is halved, down to one key per second. It
    grows back by a sixteenth of the limit with each accepted batch.
    """

    def __init__(
        self,
        keys_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._whole = keys_per_s
        self._keys_per_s = keys_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    @property
    def batch_size(self) -> int:
        """Largest batch: the keys of one second."""
        return max(1, min(LARGEST_BATCH, int(self._keys_per_s)))

    def slow_down(self) -> None:
        """Halve the rate."""
        # Never 0: the run has to notice when the store recovers.
        self._keys_per_s = max(min(1.0, self._whole), self._keys_per_s / 2)

    def speed_up(self) -> None:
        """Raise the rate, up to the limit."""
        self._keys_per_s = min(self._whole, self._keys_per_s + self._whole / 16)

    def wait_for(self, keys: int) -> None:
        """Wait until the rate limit allows more keys, and count `keys`."""
        wait = self._free_at - self._clock()
        if wait > 0:
            self._sleep(wait)
        # Unused time does not accumulate, so a pause is not followed by a burst.
        self._free_at = max(self._free_at, self._clock()) + keys / self._keys_per_s
