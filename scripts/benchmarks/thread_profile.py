"""CPU time of one thread by function and by package, from a profile of `cProfile`.

Builtins count for the package that called them.
"""

import pstats
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

PACKAGES = (*("streammeta", "grpc", "numpy", "google", "structlog", "asyncio"),)
BUILTIN = "~"

Place: TypeAlias = tuple[str, int, str]
Functions: TypeAlias = dict[
    Place, tuple[int, int, float, float, dict[Place, tuple[int, int, float, float]]]
]
"""Statistics of `pstats`: calls, own seconds, seconds and callers by file, line and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Own cost of a function or package for each unit of work, without the functions it called."""

    where: str
    calls: float
    own_us: float
    share_percent: float
    """Of the profiled thread's CPU time."""


def costs_by_function(profile: Path, units: float) -> list[Cost]:
    """Return functions by their own time, the most expensive first."""
    functions: Functions = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    return _costs(
        ((_name(*place), calls, own_s) for place, (_, calls, own_s, _, _) in functions.items()),
        units,
    )


def costs_by_package(profile: Path, units: float) -> list[Cost]:
    """Return packages by the own time of their functions and of the builtins these called."""
    functions: Functions = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    spent: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def add(place: Place, calls: int, own_s: float) -> None:
        before = spent[_package(place)]
        spent[_package(place)] = (before[0] + calls, before[1] + own_s)

    for place, (_, calls, own_s, _, callers) in functions.items():
        if place[0] == BUILTIN and callers:
            for caller, (_, caller_calls, caller_own_s, _) in callers.items():
                add(caller, caller_calls, caller_own_s)
        else:
            add(place, calls, own_s)
    return _costs(((name, *cost) for name, cost in spent.items()), units)


def _costs(spent: Iterable[tuple[str, int, float]], units: float) -> list[Cost]:
    listed = list(spent)
    total_s = sum(own_s for _, _, own_s in listed)
    costs = [
        Cost(
            where=where,
            calls=round(calls / units, 2),
            own_us=round(own_s * 1e6 / units, 1),
            share_percent=round(own_s / total_s * 100, 1),
        )
        for where, calls, own_s in listed
    ]
    return sorted(costs, key=lambda cost: -cost.own_us)


def _package(place: Place) -> str:
    file, _, function = place
    if file == BUILTIN:
        return "uvloop" if "uvloop" in function else "builtins called from C"
    parts = Path(file).parts
    for package in PACKAGES:
        if package in parts:
            folders = parts[len(parts) - parts[::-1].index(package) : -1]
            return ".".join([package, *folders[: 2 if package == "streammeta" else 1]])
    return "generated code" if file.startswith("<") else "standard library"


def _name(file: str, line: int, function: str) -> str:
    if file == "~":
        return function
    path = Path(file)
    return f"{'/'.join(path.parts[-2:])}:{line} {function}"
