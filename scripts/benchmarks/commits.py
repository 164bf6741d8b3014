"""Commits a second, their latency and their cost, by voters, ranges and commits in flight.

A client process commits at the leader, each slot on its own streams. The controllers run as in
production, except for a long fetch timeout and a wrapper that counts flushes and appended bytes
(`observed_controller`), which costs two calls of Python for each flush. CPU time is the operating
system's, for each process over the time that counts.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from scripts.benchmarks.cluster import (
    PATIENT,
    VOTERS,
    Leader,
    audit_options,
    caller_of,
    counters_path,
    find_leader,
    observed,
    running_cluster,
    tls_paths,
)
from scripts.benchmarks.committer import load_commits
from scripts.benchmarks.figures import Outcome, Progress, Table, Target
from scripts.benchmarks.observed_controller import Counters
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.processes import cpu_s, read_result, wait_ready, working
from scripts.benchmarks.thread_profile import costs_by_function, costs_by_package
from streammeta.cli.local.local_cluster import LocalCluster

Way: TypeAlias = Literal["unary", "pipelined", "product", "shared", "idempotent", "put"]

STREAMS_MAX = 400_000
"""Levels with more streams (ranges times in flight) are left out: opening them takes too long."""

IDS_A_SECOND: dict[Way, int] = {
    "unary": 4_000,
    "pipelined": 40_000,
    "product": 20_000,
    "shared": 4_000,
    "idempotent": 4_000,
    "put": 0,
}
"""Object ids prepared beforehand for each second of commits of few ranges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Levels to measure: all combinations."""

    ways: tuple[Way, ...] = option(("unary", "pipelined"), "ways to commit")
    """A commit a call, many on one stream of messages, the same by the product's client, a commit
    of shared rows a call, the same of idempotent producers, or a small PutKVs a call."""
    voters: tuple[int, ...] = option((3,), "numbers of controllers")
    ranges: tuple[int, ...] = option((1, 10, 100, 1_000, 1_600, 20_000), "ranges of one commit")
    in_flight: tuple[int, ...] = option((1, 16, 64), "numbers of commits in flight")
    seconds: float = seconds(3.0, "of each level")
    tls: bool = option(False, "measure the same over TLS too")
    audit: bool = option(False, "measure the same with an audit log too")
    profile: bool = option(False, "profile the event loops too")

    def kinds(self) -> Sequence[tuple[bool, bool]]:
        """Return the kinds of clusters: whether over TLS, and whether with an audit log."""
        several = [(False, False)]
        several += [(True, False)] * self.tls + [(self.tls, True)] * self.audit
        return several

    def points(self) -> "Iterator[Point]":
        """Yield the levels to measure at each number of voters."""
        for way in self.ways:
            for ranges in self.ranges if way != "put" else (1,):
                for in_flight in self.in_flight:
                    if ranges * in_flight <= STREAMS_MAX:
                        yield Point(way, ranges, in_flight)


@dataclass(frozen=True, slots=True)
class Point:
    """A way to commit, the ranges of one commit, and the commits in flight."""

    way: Way
    ranges: int
    in_flight: int

    def load(self, seconds: float) -> dict[str, Any]:
        """Return the arguments of `load_commits` for so long."""
        commits = IDS_A_SECOND[self.way] * (seconds + 1) / max(1.0, self.ranges / 10)
        objects = int(commits if self.in_flight > 1 else commits / 10) + self.in_flight
        return {"system": self.way, "seconds": seconds, "objects": objects} | {
            "ranges": self.ranges,
            "in_flight": self.in_flight,
        }

    def __str__(self) -> str:
        return f"{self.way}, {self.ranges} ranges, {self.in_flight} in flight"


Level: TypeAlias = Mapping[str, Any]
"""Figures of one point at one number of voters. CPU times in us are for each commit."""


async def measure(root: Path, settings: Settings, progress: Progress) -> list[Outcome]:
    """Measure every level. The cluster is new for each number of voters, and for TLS."""
    levels: list[Level] = []
    for voters, (over_tls, audited) in itertools.product(settings.voters, settings.kinds()):
        shown = " over TLS" * over_tls + " audited" * audited
        place = root / f"voters-{voters}{shown.replace(' ', '-')}"
        own_options = audit_options(place, voters) if audited else None
        with running_cluster(
            place, voters, PATIENT, own_options, over_tls=over_tls, change=observed(place)
        ) as cluster:
            for point in settings.points():
                progress(f"commits: {voters} voters{shown}, {point}")
                run = await run_load(cluster, place, point, settings.seconds)
                levels.append(
                    _level(point, settings.seconds, run, over_tls=over_tls, audited=audited)
                )

    outcomes = [_outcome(levels)]
    if settings.profile:
        outcomes.append(await _profile(root / "profile", settings, progress))
    return outcomes


async def _profile(place: Path, settings: Settings, progress: Progress) -> Outcome:
    """Run the load once more under a profiler: the last way, with the first ranges.

    `cProfile` counts CPU time of the event loop's thread from the controllers' start to their end.
    It makes Python's calls more expensive, and C code cheaper by comparison: read the shares, and
    take totals from the unprofiled run. The journal's thread is not in the profile.
    """
    point = Point(list(settings.points())[-1].way, settings.ranges[0], 64)
    progress(f"commits: profile of {VOTERS} voters, {point}")

    def path_of(place: Path, node_id: int) -> Path:
        return place / f"controller-{node_id}.profile"

    with running_cluster(place, VOTERS, PATIENT, change=observed(place, path_of)) as cluster:
        run = await run_load(cluster, place, point, settings.seconds)
    commits, leader = run.client["commits_in_all"], run.leader.node_id
    figures: dict[str, float] = {}
    tables: list[Table] = []
    for role, node_id in (("leader", leader), ("follower", leader % VOTERS + 1)):
        packages = costs_by_package(path_of(place, node_id), commits)
        functions = costs_by_function(path_of(place, node_id), commits)
        figures[f"profiled_{role}_us"] = round(sum(cost.own_us for cost in packages), 1)
        for name, costs in (("package", packages[:12]), ("function", functions[:25])):
            title = f"Event loop of a {role} by {name}; us of CPU for each commit, profiled"
            columns = "where | calls | own us = own_us | share % = share_percent"
            tables.append(Table.of(title, costs, columns))
    return Outcome(
        benchmark="commits-profile",
        settings={"voters": VOTERS, **asdict(point)},
        figures=figures,
        details={"commits": commits},
        tables=tables,
    )


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Report of the client, and the controllers' costs during the time that counts."""

    leader: Leader
    client: Mapping[str, Any]
    cpu_s: Mapping[int, float]
    leader_loop_s: float
    counters: Counters
    """Counters of the leader."""


async def run_load(cluster: LocalCluster, place: Path, point: Point, seconds: float) -> LoadRun:
    """Run the client against the leader of observed controllers until it ends."""
    leader = await find_leader(cluster)
    files = tls_paths(caller_of(cluster))
    load = {"endpoint": leader.endpoint, "tls": files, **point.load(seconds)}

    def observe() -> tuple[dict[int, float], float, Counters]:
        spent = {node_id: cpu_s([child.pid]) for node_id, child in cluster.children.items()}
        loop_s = _loop_s(cluster.children[leader.node_id].pid)
        return spent, loop_s, Counters.read(counters_path(place, leader.node_id))

    async with working(place / "client.log", load_commits, **load) as client:
        await wait_ready(client)
        before_s, loop_before_s, before = observe()
        await wait_ready(client)
        after_s, loop_after_s, after = observe()
        result = await read_result(client)
    return LoadRun(
        leader,
        result,
        {node_id: after_s[node_id] - spent for node_id, spent in before_s.items()},
        loop_after_s - loop_before_s,
        after - before,
    )


def _loop_s(pid: int) -> float:
    main_thread = next(thread for thread in psutil.Process(pid).threads() if thread.id == pid)
    return float(main_thread.user_time + main_thread.system_time)


def _level(point: Point, seconds: float, run: LoadRun, *, over_tls: bool, audited: bool) -> Level:
    commits, commits_per_s = run.client["commits"], run.client["commits_per_s"]
    flushes = max(1, run.counters.flushes)
    cost_us = {node_id: spent * 1e6 / commits for node_id, spent in run.cpu_s.items()}
    leader_us = cost_us.pop(run.leader.node_id)

    return {
        "voters": len(run.cpu_s),
        "over_tls": over_tls,
        "audited": audited,
        **asdict(point),
        "commits_per_s": commits_per_s,
        "ranges_per_s": round(commits_per_s * point.ranges),
        **{name: run.client[name] for name in ("p50_ms", "p99_ms", "max_ms")},
        # Bytes and entries of the leader's log. A message of many commits may be one entry, and one
        # turn of the event loop appends one batch.
        "bytes_per_range": round(run.counters.payload_bytes / (commits * point.ranges), 1),
        "batches_per_flush": round(run.counters.batches / flushes, 2),
        "payloads_per_flush": round(run.counters.payloads / flushes, 2),
        "flush_mean_ms": round(run.counters.flush_ns / flushes / 1e6, 3),
        "leader_cpu_us": round(leader_us, 1),
        "leader_loop_us": round(run.leader_loop_s * 1e6 / commits, 1),
        "follower_cpu_us": round(sum(cost_us.values()) / max(1, len(cost_us)), 1),
        "client_cpu_us": round(run.client["client_cpu_s"] * 1e6 / commits, 1),
        "leader_cores": round(leader_us * commits_per_s / 1e6, 2),
        "client_cores": round(run.client["client_cpu_s"] / seconds, 2),
    }


COLUMNS = (
    "voters | TLS = over_tls | audit = audited | way | ranges | in flight = in_flight"
    " | commits/s = commits_per_s | ranges/s = ranges_per_s | p50 ms = p50_ms | p99 ms = p99_ms"
    " | B/range = bytes_per_range | entries/flush = payloads_per_flush | leader us = leader_cpu_us"
    " | follower us = follower_cpu_us | client us = client_cpu_us | leader cores = leader_cores"
    " | client cores = client_cores"
)


def _outcome(levels: Sequence[Level]) -> Outcome:
    figures: dict[str, float] = {}
    for level in levels:
        name = (
            f"{level['way']}_{level['voters']}_voters_{level['ranges']}_ranges"
            f"_{level['in_flight']}_in_flight{'_tls' * level['over_tls']}"
            f"{'_audited' * level['audited']}"
        )
        figures[f"{name}_per_s"] = level["commits_per_s"]
        figures[f"{name}_p50_ms"] = level["p50_ms"]
        figures[f"{name}_p99_ms"] = level["p99_ms"]
        figures[f"{name}_leader_us"] = level["leader_cpu_us"]
    title = "Commits by their ranges; us are CPU time for each commit"

    return Outcome(
        benchmark="commits",
        figures=figures,
        details={"levels": levels},
        tables=[Table.of(title, levels, COLUMNS)],
        targets=list(_targets(levels)),
    )


def _targets(levels: Sequence[Level]) -> Iterator[Target]:
    large = [
        level
        for level in levels
        if (level["voters"], level["ranges"]) == (3, 1_600)
        and not (level["over_tls"] or level["audited"])
    ]
    if alone := [level["p50_ms"] for level in large if level["in_flight"] == 1]:
        yield Target("1600 ranges, 3 voters, one in flight: p50 ms", "at most", 8.0, min(alone))
    if many := [level["ranges_per_s"] for level in large if level["in_flight"] == 64]:
        yield Target("1600 ranges, 3 voters, 64 in flight: ranges/s", "at least", 5e5, max(many))
