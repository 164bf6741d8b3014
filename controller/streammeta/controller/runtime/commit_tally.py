"""Commits of uploads that were answered: by verdict, and by the time that they took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PER_DOUBLING = 4
"""Classes of time in which the longest is twice the shortest: a quantile is exact to 19 %."""

CLASSES = 102
"""Classes of time; the first is up to a microsecond, the last is of half a minute or more."""


@dataclass(slots=True)
class CommitTally:
    """Counts since the start; on the controller's event loop."""

    accepted: int = 0
    refused: int = 0
    times: list[int] = field(default_factory=lambda: [0] * CLASSES, compare=False)
    """Answers by class of time, from the decision of a message or call until it was committed."""

    def add(self, commits: int, refused: int, took_s: float) -> None:
        """Count commits that were answered together after `took_s` seconds, some refused."""
        self.accepted += commits - refused
        self.refused += refused
        place = int(PER_DOUBLING * math.log2(took_s * 1e6)) + 1 if took_s > 1e-6 else 0
        self.times[min(place, CLASSES - 1)] += 1


def quantile_s(times: Sequence[int], share: float) -> float:
    """Return the time in seconds that this share of answers did not exceed, NaN without answers.

    `times` counts answers by class of `CommitTally.times`.
    """
    wanted = share * sum(times)
    if not wanted:
        return math.nan
    count = 0
    for place, of_class in enumerate(times):
        count += of_class
        if count >= wanted:
            return 1e-6 * math.exp2(place / PER_DOUBLING)
    return math.nan
