"""Profile by function of a controller's event loop while it commits.

The load runs under `cProfile`, by CPU time of the event loop's thread, from the controllers' start
to their end. The profiler makes Python's calls more expensive, and C code cheaper by comparison:
read the shares, and take totals from the unprofiled run. The journal's thread is not in the
profile, but the loop's own writes to the journal are.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.benchmarks.figures import Outcome, Table
from scripts.benchmarks.thread_profile import Cost, costs_by_function, costs_by_package

VOTERS = 3
IN_FLIGHT = 64
PACKAGE_ROWS = 12
FUNCTION_ROWS = 25


def path_of(place: Path, node_id: int) -> Path:
    """Return the file of a controller's profile."""
    return place / f"controller-{node_id}.profile"


def outcome(place: Path, leader_id: int, commits: int, settings: Mapping[str, object]) -> Outcome:
    """Return the profiles of the leader and of a follower, for each of so many commits."""
    figures: dict[str, float] = {}
    tables: list[Table] = []
    for role, node_id in (("leader", leader_id), ("follower", leader_id % VOTERS + 1)):
        profile = path_of(place, node_id)
        packages = costs_by_package(profile, commits)
        figures[f"profiled_{role}_us"] = round(sum(cost.own_us for cost in packages), 1)
        functions = costs_by_function(profile, commits)[:FUNCTION_ROWS]
        tables += [
            _table(f"Event loop of a {role} by package", packages[:PACKAGE_ROWS]),
            _table(f"Event loop of a {role} by function", functions),
        ]
    return Outcome(
        benchmark="commits-profile",
        settings=settings,
        figures=figures,
        details={"commits": commits},
        tables=tables,
    )


def _table(title: str, costs: Sequence[Cost]) -> Table:
    columns = "where | calls | own us = own_us | share % = share_percent"
    return Table.of(f"{title}; us of CPU for each commit, under the profiler", costs, columns)
