"""Exponential backoff: the one formula for waits between attempts. Pure; the caller sleeps."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 30


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first` up to `longest`, both in the unit of the caller's choice.

    `jitter` is the share of a wait that is random, 0..1: callers that failed together then do not
    return together.
    """

    first: float
    longest: float
    jitter: float = 0.5

    def wait(self, attempt: int, random_unit: float = 1.0) -> float:
        """Return the wait behind failed attempt `attempt`, 0-based.

        `random_unit` is a random number in [0, 1); left out, the wait is the longest possible one.
        """
        whole = min(self.longest, self.first * 2.0 ** min(attempt, _MOST_DOUBLINGS))
        return whole * (1 - self.jitter + self.jitter * random_unit)
