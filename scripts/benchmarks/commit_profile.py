"""Where a controller's event loop spends its CPU time while it commits: a profile by function.

Runs the commit load once more under `cProfile`, by CPU time of the event loop's thread, from the
controllers' start to their end. The profiler makes Python's calls dearer than they are, and gRPC's
C code cheaper by comparison: read the shares, and take totals from the unprofiled run. The
journal's thread is not in it, what the loop writes to the journal itself is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.benchmarks.bench_cluster import in_thread, restart_changed, running_cluster
from scripts.benchmarks.commits import PATIENT, Point, Settings, find_leader, observed, run_load
from scripts.benchmarks.figures import Outcome, Table
from scripts.benchmarks.thread_profile import Cost, costs_by_function, costs_by_package

VOTERS = 3
IN_FLIGHT = 64
PACKAGE_ROWS = 12
FUNCTION_ROWS = 25


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


def _outcome(point: Point, profiles: Mapping[str, Path], commits: int) -> Outcome:
    figures: dict[str, float] = {}
    tables: list[Table] = []
    for role, profile in profiles.items():
        packages, functions = (
            costs_by_package(profile, commits),
            costs_by_function(profile, commits),
        )
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
