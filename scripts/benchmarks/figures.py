"""Results of a benchmark, and the arithmetic of its figures."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Progress: TypeAlias = Callable[[str], None]
"""Shows what is being measured."""
Bound: TypeAlias = Literal["at most", "at least"]


class BenchmarkError(Exception):
    """A benchmark can't be run, or a system under load gave a wrong answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows for people; every number in them is also among the figures or the details."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    @classmethod
    def of(cls, title: str, items: Iterable[Any], columns: str) -> "Table":
        """Return a row for each item, with floats rounded.

        `columns` are separated by "|", and each is `TITLE = FIELD`, or a field that is also the
        title. A field is a key or an attribute of the items; an item without it gets an empty cell.
        """
        pairs = [column.strip().rpartition(" = ") for column in columns.split("|")]
        rows = tuple(tuple(_cell(item, name) for _, _, name in pairs) for item in items)
        return cls(title=title, columns=tuple(title or name for title, _, name in pairs), rows=rows)

    def is_numeric(self, index: int) -> bool:
        """Whether column `index` has numbers only."""
        return all(isinstance(row[index], int | float) for row in self.rows)


def _cell(item: Any, name: str) -> object:
    value = item.get(name, "") if isinstance(item, Mapping) else getattr(item, name)
    return round(value, 2 if abs(value) >= 1 else 3) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its bound."""

    figure: str
    bound: Bound
    wanted: float
    measured: float

    @property
    def is_met(self) -> bool:
        """Whether the figure is within its bound."""
        if self.bound == "at most":
            return self.measured <= self.wanted
        return self.measured >= self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One benchmark's result.

    `figures` are flat and can be compared between two commits by ratio. Their names end in the
    unit. `details` contain the single values. `settings` are added to the command line's.
    """

    benchmark: str
    figures: Mapping[str, float]
    settings: Mapping[str, object] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    targets: Sequence[Target] = ()

    def all_tables(self) -> list[Table]:
        """Return the tables, and one of the targets if there are any."""
        rows = tuple(
            (
                *(target.figure, f"{target.bound} {target.wanted:,g}"),
                *(f"{target.measured:,.6g}", "met" if target.is_met else "missed"),
            )
            for target in self.targets
        )
        columns = ("figure", "target", "measured", "")
        table = Table(title="Against the targets", columns=columns, rows=rows)
        return [*self.tables, *([table] if self.targets else [])]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` (0 to 1) of them do not exceed."""
    if not values:
        raise ValueError("values: empty; a percentile needs at least one")
    # Nearest rank: every percentile is a value that was measured.
    rank = max(1, math.ceil(share * len(values)))
    return sorted(values)[rank - 1]


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median over all runs of each figure that the first run has."""
    return {name: median([run[name] for run in runs]) for name in runs[0]}


def spread(prefix: str, unit: str, values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90 and max of `values` under names such as `failover_p50_s`."""
    return {
        f"{prefix}_p50_{unit}": round(percentile(values, 0.5), 4),
        f"{prefix}_p90_{unit}": round(percentile(values, 0.9), 4),
        f"{prefix}_max_{unit}": round(max(values), 4),
    }


def latencies(values_s: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return p50, p99 and max of times in seconds, as milliseconds."""
    return {
        "p50_ms": round(percentile(values_s, 0.5) * 1000, digits),
        "p99_ms": round(percentile(values_s, 0.99) * 1000, digits),
        "max_ms": round(max(values_s) * 1000, digits),
    }
