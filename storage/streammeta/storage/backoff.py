"""Exponential backoff, the formula for all waits between attempts. Pure: the caller sleeps."""

from __future__ import annotations

from dataclasses import dataclass

# Keeps the power below the range of a float for any number of attempts.
_MOST_DOUBLINGS = 30


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first` up to `longest`, both in the unit of the caller's choice.

    `jitter` is the random share of a wait, 0..1. It separates callers that failed together.
    """

    first: float
    longest: float
    jitter: float = 0.5

    def wait(self, attempt: int, random_unit: float = 1.0) -> float:
        """Return the wait after failed attempt `attempt`, 0-based.

        `random_unit` is a random number in [0, 1). The default gives the longest possible wait.
        """
        whole = min(self.longest, self.first * 2.0 ** min(attempt, _MOST_DOUBLINGS))
        return whole * (1 - self.jitter + self.jitter * random_unit)
