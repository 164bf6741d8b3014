"""Commits a second and their latency, by voters and by requests in flight, with what they cost.

A client process commits one range after the other on every one of its streams at the leader. The
controllers run as the product does, but for a long fetch timeout and a wrapper that counts flushes
(`observed_controller`): two calls of Python for each flush. CPU is read from the operating system
for each process over the time that counts.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from controller.cli.local_cluster import Child, ChildFailedError, LocalCluster, start_child
from scripts.benchmarks.bench_cluster import (
    Leader,
    in_thread,
    restart_changed,
    running_cluster,
    watching,
)
from scripts.benchmarks.figures import Outcome, Table
from scripts.benchmarks.observed_controller import Counters

Work: TypeAlias = Literal["commit", "put"]
WORKS: dict[Work, str] = {
    "commit": "CommitStreamSetObject of one range of one stream",
    "put": "PutKVs of one value of 100 bytes",
}

PATIENT = ("--fetch-timeout-ms", "10000")
"""Options of the controllers: other work on the machine must not cost the leader its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    work: Work = "commit"
    voters: Sequence[int] = (1, 3, 5)
    in_flight: Sequence[int] = (1, 16, 64)
    seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One number of requests in flight at one number of voters."""

    voters: int
    in_flight: int
    commits_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    batches_per_flush: float
    """On the leader; a batch is what one turn of its event loop appends."""
    commits_per_flush: float
    flush_mean_ms: float
    leader_cpu_us: float
    """CPU time for each commit, of all threads."""
    leader_loop_us: float
    """Of the event loop's thread alone."""
    follower_cpu_us: float
    """Of one follower, on average; 0 if there is none."""
    client_cpu_us: float
    leader_cores: float
    client_cores: float


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure every level; the cluster is new for each number of voters.

    Raises:
        ChildFailedError: a controller or the client ended early.
        UnhealthyError: the cluster was not in order.
    """
    levels: list[Level] = []
    for voters in settings.voters:
        place = root / f"voters-{voters}"
        with running_cluster(place, voters, PATIENT) as cluster:
            await in_thread(restart_changed, cluster, observed(place))
            for in_flight in settings.in_flight:
                progress(f"commits: {voters} voters, {in_flight} in flight")
                levels.append(await _measure_level(cluster, place, settings, in_flight))
    return _outcome(settings, levels)


async def _measure_level(
    cluster: LocalCluster, place: Path, settings: Settings, in_flight: int
) -> Level:
    leader = await find_leader(cluster)
    return _level(settings, in_flight, await run_load(cluster, leader, place, settings, in_flight))


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What the client reported, and what its time cost each controller."""

    leader_id: int
    client: Mapping[str, Any]
    cpu_s: Mapping[int, float]
    leader_loop_s: float
    counters: Counters
    """Of the leader, within the time."""
    counters_at_end: Counters
    """Of the leader, since its start."""


async def run_load(
    cluster: LocalCluster, leader: Leader, place: Path, settings: Settings, in_flight: int
) -> LoadRun:
    """Run the client against `leader` until it is done."""
    client = _start_client(cluster, leader, place, settings, in_flight)
    try:
        await asyncio.to_thread(client.wait_ready)
        cpu_s, counters = _cpu_s(cluster), _counters(place, leader)
        loop_s = _loop_s(cluster, leader)
        await asyncio.to_thread(client.wait_ready)
        cpu_s_after, counters_after = _cpu_s(cluster), _counters(place, leader)
        loop_s_after = _loop_s(cluster, leader)
        result = await asyncio.to_thread(_result, client)
    finally:
        client.stop()
    return LoadRun(
        leader.node_id,
        result,
        {node_id: cpu_s_after[node_id] - cpu_s[node_id] for node_id in cpu_s},
        loop_s_after - loop_s,
        counters_after - counters,
        counters_after,
    )


def _start_client(
    cluster: LocalCluster, leader: Leader, place: Path, settings: Settings, in_flight: int
) -> Child:
    return start_child(
        "commit load",
        [
            *(sys.executable, "-m", "scripts.benchmarks.commit_load"),
            *("--leader", cluster.endpoints[leader.node_id - 1]),
            *("--work", settings.work, "--in-flight", str(in_flight)),
            *("--seconds", str(settings.seconds)),
        ],
        place / "client.log",
    )


def _result(client: Child) -> dict[str, Any]:
    line = client.read_line()
    if not line:
        client.process.wait()
        raise ChildFailedError(f"the client ended without a result; its log:\n{client.log_tail()}")
    result: dict[str, Any] = json.loads(line)
    return result


async def find_leader(cluster: LocalCluster) -> Leader:
    """Return the leader once all is in order."""
    async with watching(cluster.endpoints) as watch:
        return await watch.wait_healthy()


def observed(
    place: Path, profile: Callable[[int], Path] | None = None
) -> Callable[[int, list[str]], list[str]]:
    """Return how a controller's command changes to be observed, and profiled if `profile`."""

    def change(node_id: int, command: list[str]) -> list[str]:
        product = command.index("controller.cli.main")
        return [
            *command[:product],
            *("scripts.benchmarks.observed_controller", str(_counters_path(place, node_id))),
            "-" if profile is None else str(profile(node_id)),
            *command[product + 1 :],
        ]

    return change


def _counters_path(place: Path, node_id: int) -> Path:
    return place / f"controller-{node_id}.counters"


def _counters(place: Path, leader: Leader) -> Counters:
    return Counters.read(_counters_path(place, leader.node_id))


def _cpu_s(cluster: LocalCluster) -> dict[int, float]:
    times = {
        node_id: psutil.Process(child.pid).cpu_times()
        for node_id, child in cluster.children.items()
    }
    return {node_id: float(spent.user + spent.system) for node_id, spent in times.items()}


def _loop_s(cluster: LocalCluster, leader: Leader) -> float:
    pid = cluster.children[leader.node_id].pid
    main_thread = next(thread for thread in psutil.Process(pid).threads() if thread.id == pid)
    return float(main_thread.user_time + main_thread.system_time)


def _level(settings: Settings, in_flight: int, run: LoadRun) -> Level:
    commits, commits_per_s = run.client["commits"], run.client["commits_per_s"]
    flushes = max(1, run.counters.flushes)
    cost_us = {node_id: cpu_s * 1e6 / commits for node_id, cpu_s in run.cpu_s.items()}
    leader_us = cost_us.pop(run.leader_id)
    return Level(
        voters=len(run.cpu_s),
        in_flight=in_flight,
        commits_per_s=commits_per_s,
        p50_ms=run.client["p50_ms"],
        p99_ms=run.client["p99_ms"],
        max_ms=run.client["max_ms"],
        batches_per_flush=round(run.counters.batches / flushes, 2),
        commits_per_flush=round(run.counters.payloads / flushes, 2),
        flush_mean_ms=round(run.counters.flush_ns / flushes / 1e6, 3),
        leader_cpu_us=round(leader_us, 1),
        leader_loop_us=round(run.leader_loop_s * 1e6 / commits, 1),
        follower_cpu_us=round(sum(cost_us.values()) / max(1, len(cost_us)), 1),
        client_cpu_us=round(run.client["client_cpu_s"] * 1e6 / commits, 1),
        leader_cores=round(leader_us * commits_per_s / 1e6, 2),
        client_cores=round(run.client["client_cpu_s"] / settings.seconds, 2),
    )


def _outcome(settings: Settings, levels: Sequence[Level]) -> Outcome:
    figures: dict[str, float] = {}
    for level in levels:
        name = f"{settings.work}_{level.voters}_voters_{level.in_flight}_in_flight"
        figures[f"{name}_per_s"] = level.commits_per_s
        figures[f"{name}_p50_ms"] = level.p50_ms
        figures[f"{name}_p99_ms"] = level.p99_ms
        figures[f"{name}_leader_us"] = level.leader_cpu_us
    columns = {
        "voters": "voters",
        "in_flight": "in flight",
        "commits_per_s": "commits/s",
        "p50_ms": "p50 ms",
        "p99_ms": "p99 ms",
        "commits_per_flush": "per flush",
        "batches_per_flush": "batches",
        "flush_mean_ms": "flush ms",
        "leader_cpu_us": "leader us",
        "leader_loop_us": "its loop us",
        "follower_cpu_us": "follower us",
        "client_cpu_us": "client us",
        "leader_cores": "leader cores",
        "client_cores": "client cores",
    }
    facts = [asdict(level) for level in levels]
    return Outcome(
        benchmark="commits",
        settings={
            "work": WORKS[settings.work],
            "seconds": settings.seconds,
            "voters": list(settings.voters),
            "in_flight": list(settings.in_flight),
        },
        figures=figures,
        details={"levels": facts},
        tables=(
            Table(
                title=f"{WORKS[settings.work]}; us are CPU time for each commit",
                columns=tuple(columns.values()),
                rows=tuple(tuple(fact[name] for name in columns) for fact in facts),
            ),
        ),
    )
