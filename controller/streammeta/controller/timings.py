"""Histograms of durations: cheap to update, and read by metrics.

Owns only the classes of durations, and does not know the measured work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PER_DOUBLING = 4
"""Classes per doubling of the duration, which makes a quantile exact to 19 %."""

CLASSES = 102
"""Number of classes: the first is up to a microsecond, the last half a minute or more."""


@dataclass(slots=True)
class Times:
    """Counts by class of duration, and their sum in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * CLASSES)
    sum_s: float = 0.0

    def add(self, took_s: float, count: int = 1) -> None:
        """Count `count` operations of `took_s` seconds each."""
        # Class 0 contains everything up to a microsecond.
        place = int(PER_DOUBLING * math.log2(took_s * 1e6)) + 1 if took_s > 1e-6 else 0
        self.counts[min(place, CLASSES - 1)] += count
        self.sum_s += took_s * count

    @property
    def total(self) -> int:
        """Number of operations."""
        return sum(self.counts)


def bound_s(place: int) -> float:
    """Return the upper bound of a class in seconds. The last class has none."""
    return 1e-6 * math.exp2(place / PER_DOUBLING)


def quantile_s(counts: Sequence[int], share: float) -> float:
    """Return the duration in seconds not exceeded by this share of `counts`, NaN if empty.

    `counts` belong to `Times`, or are differences of them.
    """
    wanted = share * sum(counts)
    if not wanted:
        return math.nan
    count = 0
    for place, of_class in enumerate(counts):
        count += of_class
        if count >= wanted:
            return bound_s(place)
    return math.nan
