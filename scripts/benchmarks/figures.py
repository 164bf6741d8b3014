"""What a benchmark hands back, and the arithmetic of its figures.

Knows nothing of how they arose.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows for people; every number in them is also among the figures or the details."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def is_numeric(self, index: int) -> bool:
        """Whether column `index` holds numbers only."""
        return all(isinstance(row[index], int | float) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One benchmark's result.

    `figures` are flat and comparable between two commits by ratio, their names end in the unit;
    `details` hold every single value behind them.
    """

    benchmark: str
    settings: Mapping[str, object]
    figures: Mapping[str, float]
    details: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A figure with the bound it should keep to."""

    figure: str
    bound: Literal["at most", "at least"]
    wanted: float
    measured: float

    @property
    def is_met(self) -> bool:
        """Whether the figure keeps to its bound."""
        if self.bound == "at most":
            return self.measured <= self.wanted
        return self.measured >= self.wanted


def targets_table(targets: Iterable[Target]) -> tuple[Table, ...]:
    """Return a table of `targets`, or none if there are none."""
    rows = tuple(
        (
            target.figure,
            f"{target.bound} {target.wanted:,g}",
            f"{target.measured:,.6g}",
            "met" if target.is_met else "missed",
        )
        for target in targets
    )
    columns = ("figure", "target", "measured", "")
    return (Table(title="Against the targets", columns=columns, rows=rows),) if rows else ()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` (0 to 1) of them do not exceed."""
    if not values:
        raise ValueError("values: empty; a percentile needs at least one")
    rank = max(1, math.ceil(share * len(values)))
    return sorted(values)[rank - 1]


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def spread(prefix: str, unit: str, values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90 and max of `values` under names such as `failover_p50_s`."""
    return {
        f"{prefix}_p50_{unit}": round(percentile(values, 0.5), 4),
        f"{prefix}_p90_{unit}": round(percentile(values, 0.9), 4),
        f"{prefix}_max_{unit}": round(max(values), 4),
    }
