"""Where a controller's event loop spends its CPU time while it commits: a profile by function.

Runs the commit load once more under `cProfile`, by CPU time of the event loop's thread, from the
controllers' start to their end. The profiler makes Python's calls dearer than they are, and gRPC's
C code cheaper by comparison: read the shares, and take totals from the unprofiled run. The
journal's thread is not in it.
"""

import pstats
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from scripts.benchmarks.bench_cluster import in_thread, restart_changed, running_cluster
from scripts.benchmarks.commits import PATIENT, Point, Settings, find_leader, observed, run_load
from scripts.benchmarks.figures import Outcome, Table

VOTERS = 3
IN_FLIGHT = 64
PACKAGE_ROWS = 12
FUNCTION_ROWS = 25
PACKAGES = ("controller", "proto", "grpc", "numpy", "google", "structlog", "asyncio")
BUILTIN = "~"

Place: TypeAlias = tuple[str, int, str]
Functions: TypeAlias = dict[
    Place, tuple[int, int, float, float, dict[Place, tuple[int, int, float, float]]]
]
"""What `pstats` keeps: by file, line and name the calls, own seconds, seconds and callers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a function or package cost, without what it called, for each commit."""

    where: str
    calls: float
    own_us: float
    share_percent: float
    """Of the profiled thread's CPU time."""


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Profile the leader and a follower at one level: the first ranges, the last way."""
    way = list(settings.points())[-1].way
    point = Point(way, settings.ranges[0], IN_FLIGHT)
    progress(f"commits: profile of {VOTERS} voters, {point}")
    place = root / "profile"
    with running_cluster(place, VOTERS, PATIENT) as cluster:
        await in_thread(
            restart_changed, cluster, observed(place, lambda node_id: _profile(place, node_id))
        )
        leader = await find_leader(cluster)
        result = await run_load(cluster, leader, place, point, settings.seconds)
        cluster.stop_all()
    follower = next(node_id for node_id in cluster.children if node_id != leader.node_id)
    profiles = {"leader": leader.node_id, "follower": follower}
    return _outcome(
        point,
        {role: _profile(place, node_id) for role, node_id in profiles.items()},
        result.client["commits_in_all"],
    )


def _profile(place: Path, node_id: int) -> Path:
    return place / f"controller-{node_id}.profile"


def _by_function(profile: Path, commits: int) -> list[Cost]:
    """Return functions by their own time, the dearest first."""
    functions: Functions = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    return _costs(
        ((_name(*place), calls, own_s) for place, (_, calls, own_s, _, _) in functions.items()),
        commits,
    )


def _by_package(profile: Path, commits: int) -> list[Cost]:
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
    return _costs(((name, *cost) for name, cost in spent.items()), commits)


def _costs(spent: Iterable[tuple[str, int, float]], commits: int) -> list[Cost]:
    listed = list(spent)
    total_s = sum(own_s for _, _, own_s in listed)
    costs = [
        Cost(
            where=where,
            calls=round(calls / commits, 2),
            own_us=round(own_s * 1e6 / commits, 1),
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
            following = parts[parts.index(package) + 1 :]
            return f"{package}.{following[0]}" if len(following) > 1 else package
    return "generated code" if file.startswith("<") else "standard library"


def _name(file: str, line: int, function: str) -> str:
    if file == "~":
        return function
    path = Path(file)
    return f"{'/'.join(path.parts[-2:])}:{line} {function}"


def _outcome(point: Point, profiles: Mapping[str, Path], commits: int) -> Outcome:
    figures: dict[str, float] = {}
    tables: list[Table] = []
    for role, profile in profiles.items():
        packages, functions = _by_package(profile, commits), _by_function(profile, commits)
        figures[f"profiled_{role}_us"] = round(sum(cost.own_us for cost in packages), 1)
        tables.append(_table(f"Event loop of a {role} by package", packages[:PACKAGE_ROWS]))
        tables.append(_table(f"Event loop of a {role} by function", functions[:FUNCTION_ROWS]))
    return Outcome(
        benchmark="commits-profile",
        settings={"voters": VOTERS, **asdict(point)},
        figures=figures,
        details={"commits": commits},
        tables=tables,
    )


def _table(title: str, costs: Sequence[Cost]) -> Table:
    return Table(
        title=f"{title}; us of CPU for each commit, under the profiler",
        columns=("where", "calls", "own us", "share %"),
        rows=tuple((cost.where, cost.calls, cost.own_us, cost.share_percent) for cost in costs),
    )
