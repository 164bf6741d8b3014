"""How fast objects may be deleted: a token bucket that slows down when the store asks for it.

Additive increase, multiplicative decrease: each time the store is overloaded the rate halves, at
most once a second, and it grows back to its maximum within a minute. Pure; times come with calls.
"""

RATE_MIN = 10.0
"""Objects per second below which the rate never falls."""

RECOVERY_MS = 60_000
"""Time in which the rate grows by its maximum."""

HALVING_PAUSE_MS = 1_000
"""Calls that were under way together report the same overload; it counts once."""


class Pace:
    """A bucket that holds one second's worth of objects."""

    def __init__(self, rate_max: float, now_ms: int) -> None:
        self._rate_max = rate_max
        self._rate = rate_max
        self._tokens = rate_max
        self._now_ms = now_ms
        self._halved_ms = now_ms - HALVING_PAUSE_MS

    @property
    def rate(self) -> float:
        """Objects per second allowed now."""
        return self._rate

    def available(self, now_ms: int) -> int:
        """Return how many objects may be taken at once now."""
        self._advance(now_ms)
        return int(self._tokens)

    def take(self, count: int) -> None:
        """Use up what `available` offered."""
        self._tokens -= count

    def slow_down(self, now_ms: int) -> None:
        """The store asked for fewer requests."""
        self._advance(now_ms)
        if now_ms - self._halved_ms >= HALVING_PAUSE_MS:
            self._halved_ms = now_ms
            self._rate = max(min(RATE_MIN, self._rate_max), self._rate / 2)
            self._tokens = min(self._tokens, 0.0)

    def _advance(self, now_ms: int) -> None:
        passed_ms = now_ms - self._now_ms
        self._now_ms = now_ms
        self._rate = min(self._rate_max, self._rate + self._rate_max * passed_ms / RECOVERY_MS)
        # At least one fits, however slow the pace.
        room = max(1.0, self._rate)
        self._tokens = min(room, self._tokens + self._rate * passed_ms / 1_000)
