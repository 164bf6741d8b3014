"""Commits a second, their latency and their cost, by voters, ranges and commits in flight.

A client process commits at the leader, each slot on streams of its own. The controllers run as the
product does, but for a long fetch timeout and a wrapper that counts flushes and what is appended
(`observed_controller`): two calls of Python for each flush. CPU is read from the operating system
for each process over the time that counts.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import psutil

from scripts.benchmarks.bench_cluster import (
    Leader,
    caller_of,
    in_thread,
    restart_changed,
    running_cluster,
    watching,
)
from scripts.benchmarks.figures import Outcome, Table, Target, targets_table
from scripts.benchmarks.observed_controller import Counters
from scripts.benchmarks.streammeta_client import has_pipeline
from streammeta.cli.local_cluster import Child, ChildFailedError, LocalCluster, start_child

Way: TypeAlias = Literal["unary", "pipelined", "product", "put"]
WAYS: tuple[Way, ...] = get_args(Way)

PATIENT = ("--fetch-timeout-ms", "10000")
"""Options of the controllers: other work on the machine must not cost the leader its place."""


STREAMS_MAX = 400_000
"""Levels with more streams (ranges times in flight) are left out: opening them takes too long."""

IDS_A_SECOND: dict[Way, int] = {
    "unary": 4_000,
    "pipelined": 40_000,
    "product": 20_000,
    "put": 0,
}
"""Object ids prepared beforehand for each second of commits of few ranges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure: all combinations."""

    ways: Sequence[Way] = ("unary", "pipelined")
    """A commit a call, many on one stream of messages, the same by the product's client, or a small
    PutKVs a call."""
    voters: Sequence[int] = (3,)
    ranges: Sequence[int] = (1, 10, 100, 1_000, 1_600, 20_000)
    in_flight: Sequence[int] = (1, 16, 64)
    seconds: float = 3.0
    tls: bool = False
    """Measure the same over TLS too."""
    audit: bool = False
    """Measure the same with an audit log too."""

    def kinds(self) -> Sequence[tuple[bool, bool]]:
        """Return the kinds of clusters: whether over TLS, and whether with an audit log."""
        several = [(False, False)]
        several += [(True, False)] * self.tls + [(self.tls, True)] * self.audit
        return several

    def points(self) -> "Iterator[Point]":
        """Yield the levels to measure at each number of voters."""
        for way in self.ways:
            if way in ("pipelined", "product") and not has_pipeline():
                continue
            for ranges in self.ranges if way != "put" else (1,):
                for in_flight in self.in_flight:
                    if ranges * in_flight <= STREAMS_MAX:
                        yield Point(way, ranges, in_flight)


@dataclass(frozen=True, slots=True)
class Point:
    """One way to commit, and how much at once."""

    way: Way
    ranges: int
    """Of one commit."""
    in_flight: int

    def objects(self, seconds: float) -> int:
        """Return how many object ids to prepare for so long."""
        commits = IDS_A_SECOND[self.way] * (seconds + 1) / max(1.0, self.ranges / 10)
        return int(commits if self.in_flight > 1 else commits / 10) + self.in_flight

    def __str__(self) -> str:
        return f"{self.way}, {self.ranges} ranges, {self.in_flight} in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One point at one number of voters."""

    voters: int
    over_tls: bool
    audited: bool
    way: Way
    ranges: int
    in_flight: int
    commits_per_s: float
    ranges_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    bytes_per_range: float
    """Appended to the leader's log."""
    batches_per_flush: float
    """On the leader; a batch is what one turn of its event loop appends."""
    payloads_per_flush: float
    """Log entries of requests; a message of many commits may be one."""
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
    """Measure every level; the cluster is new for each number of voters, and for TLS.

    Raises:
        ChildFailedError: a controller or the client ended early.
        UnhealthyError: the cluster was not in order.
    """
    levels: list[Level] = []
    for voters, (over_tls, audited) in itertools.product(settings.voters, settings.kinds()):
        shown = " over TLS" * over_tls + " audited" * audited
        place = root / f"voters-{voters}{shown.replace(' ', '-')}"
        with running_cluster(place, voters, PATIENT, over_tls=over_tls) as cluster:
            change = observed(place)
            await in_thread(
                restart_changed, cluster, recorded(place, change) if audited else change
            )
            for point in settings.points():
                progress(f"commits: {voters} voters{shown}, {point}")
                leader = await find_leader(cluster)
                run = await run_load(cluster, leader, place, point, settings.seconds)
                levels.append(
                    _level(point, settings.seconds, run, over_tls=over_tls, audited=audited)
                )
    return _outcome(settings, levels)


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
    cluster: LocalCluster, leader: Leader, place: Path, point: Point, seconds: float
) -> LoadRun:
    """Run the client against `leader` until it is done."""
    client = start_client(
        point.way,
        cluster.endpoints[leader.node_id - 1],
        (point.ranges, point.in_flight, point.objects(seconds)),
        seconds,
        place / "client.log",
        tls_options(cluster),
    )
    try:
        await asyncio.to_thread(client.wait_ready)
        cpu_s, counters = _cpu_s(cluster), read_counters(place, leader)
        loop_s = _loop_s(cluster, leader)
        await asyncio.to_thread(client.wait_ready)
        cpu_s_after, counters_after = _cpu_s(cluster), read_counters(place, leader)
        loop_s_after = _loop_s(cluster, leader)
        result = await asyncio.to_thread(client_result, client)
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


def start_client(
    system: str,
    endpoint: str,
    load: tuple[int, int, int],
    seconds: float,
    log: Path,
    options: Sequence[str] = (),
) -> Child:
    """Start the client process; `load` is ranges, commits in flight, object ids beforehand."""
    ranges, in_flight, objects = map(str, load)
    return start_child(
        "commit load",
        [
            *(sys.executable, "-m", "scripts.benchmarks.commit_load"),
            *("--system", system, "--endpoint", endpoint, "--ranges", ranges),
            *("--in-flight", in_flight, "--objects", objects, "--seconds", str(seconds)),
            *options,
        ],
        log,
    )


def tls_options(cluster: LocalCluster) -> Sequence[str]:
    """Return the words by which a client process loads a cluster; none in plain text."""
    caller = caller_of(cluster)
    if caller is None:
        return ()
    from streammeta.cli.local_cluster import tls_words

    return tls_words(caller)


def client_result(client: Child) -> dict[str, Any]:
    """Return what the client reports at its end."""
    line = client.read_line()
    if not line:
        client.process.wait()
        raise ChildFailedError(f"the client ended without a result; its log:\n{client.log_tail()}")
    result: dict[str, Any] = json.loads(line)
    return result


async def find_leader(cluster: LocalCluster) -> Leader:
    """Return the leader once all is in order."""
    async with watching(cluster.endpoints, caller_of(cluster)) as watch:
        return await watch.wait_healthy()


def observed(
    place: Path, profile: Callable[[int], Path] | None = None
) -> Callable[[int, list[str]], list[str]]:
    """Return how a controller's command changes to be observed, and profiled if `profile`."""

    def wrapper(node_id: int) -> list[str]:
        profiled = "-" if profile is None else str(profile(node_id))
        return ["observed_controller", str(_counters_path(place, node_id)), profiled]

    return wrapped(wrapper)


def recorded(
    place: Path, change: Callable[[int, list[str]], list[str]]
) -> Callable[[int, list[str]], list[str]]:
    """Return `change`, and an audit log beside it."""

    def also(node_id: int, command: list[str]) -> list[str]:
        return [*change(node_id, command), "--audit-log", str(place / f"audit-{node_id}.log")]

    return also


def wrapped(
    wrapper: Callable[[int], Sequence[str]],
) -> Callable[[int, list[str]], list[str]]:
    """Return how a controller's command changes to run in a module of these scripts.

    `wrapper` gives the module and its first words, by the controller's id.
    """

    def change(node_id: int, command: list[str]) -> list[str]:
        product = command.index("streammeta.cli.main")
        module, *words = wrapper(node_id)
        return [
            # -P keeps this tree off the path, and the wrapper is in it.
            *(word for word in command[:product] if word != "-P"),
            *(f"scripts.benchmarks.{module}", *words, *command[product + 1 :]),
        ]

    return change


def _counters_path(place: Path, node_id: int) -> Path:
    return place / f"controller-{node_id}.counters"


def read_counters(place: Path, leader: Leader) -> Counters:
    """Return the counters of a controller that runs as `observed` changed it."""
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


def _level(point: Point, seconds: float, run: LoadRun, *, over_tls: bool, audited: bool) -> Level:
    commits, commits_per_s = run.client["commits"], run.client["commits_per_s"]
    flushes = max(1, run.counters.flushes)
    cost_us = {node_id: cpu_s * 1e6 / commits for node_id, cpu_s in run.cpu_s.items()}
    leader_us = cost_us.pop(run.leader_id)
    return Level(
        voters=len(run.cpu_s),
        over_tls=over_tls,
        audited=audited,
        way=point.way,
        ranges=point.ranges,
        in_flight=point.in_flight,
        commits_per_s=commits_per_s,
        ranges_per_s=round(commits_per_s * point.ranges),
        p50_ms=run.client["p50_ms"],
        p99_ms=run.client["p99_ms"],
        max_ms=run.client["max_ms"],
        bytes_per_range=round(run.counters.payload_bytes / (commits * point.ranges), 1),
        batches_per_flush=round(run.counters.batches / flushes, 2),
        payloads_per_flush=round(run.counters.payloads / flushes, 2),
        flush_mean_ms=round(run.counters.flush_ns / flushes / 1e6, 3),
        leader_cpu_us=round(leader_us, 1),
        leader_loop_us=round(run.leader_loop_s * 1e6 / commits, 1),
        follower_cpu_us=round(sum(cost_us.values()) / max(1, len(cost_us)), 1),
        client_cpu_us=round(run.client["client_cpu_s"] * 1e6 / commits, 1),
        leader_cores=round(leader_us * commits_per_s / 1e6, 2),
        client_cores=round(run.client["client_cpu_s"] / seconds, 2),
    )


COLUMNS = {
    "voters": "voters",
    "over_tls": "TLS",
    "audited": "audit",
    "way": "way",
    "ranges": "ranges",
    "in_flight": "in flight",
    "commits_per_s": "commits/s",
    "ranges_per_s": "ranges/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "bytes_per_range": "B/range",
    "payloads_per_flush": "entries/flush",
    "leader_cpu_us": "leader us",
    "follower_cpu_us": "follower us",
    "client_cpu_us": "client us",
    "leader_cores": "leader cores",
    "client_cores": "client cores",
}


def _outcome(settings: Settings, levels: Sequence[Level]) -> Outcome:
    figures: dict[str, float] = {}
    for level in levels:
        name = (
            f"{level.way}_{level.voters}_voters_{level.ranges}_ranges_{level.in_flight}_in_flight"
            f"{'_tls' * level.over_tls}{'_audited' * level.audited}"
        )
        figures[f"{name}_per_s"] = level.commits_per_s
        figures[f"{name}_p50_ms"] = level.p50_ms
        figures[f"{name}_p99_ms"] = level.p99_ms
        figures[f"{name}_leader_us"] = level.leader_cpu_us
    facts = [asdict(level) for level in levels]
    table = Table(
        title="Commits by their ranges; us are CPU time for each commit",
        columns=tuple(COLUMNS.values()),
        rows=tuple(tuple(fact[name] for name in COLUMNS) for fact in facts),
    )
    return Outcome(
        benchmark="commits",
        settings=asdict(settings),
        figures=figures,
        details={"levels": facts},
        tables=(table, *targets_table(_targets(levels))),
    )


def _targets(levels: Sequence[Level]) -> Iterator[Target]:
    plain = [level for level in levels if not (level.over_tls or level.audited)]
    large = [level for level in plain if (level.voters, level.ranges) == (3, 1_600)]
    if alone := [level.p50_ms for level in large if level.in_flight == 1]:
        yield Target("1600 ranges, 3 voters, one in flight: p50 ms", "at most", 8.0, min(alone))
    if many := [level.ranges_per_s for level in large if level.in_flight == 64]:
        yield Target("1600 ranges, 3 voters, 64 in flight: ranges/s", "at least", 5e5, max(many))
