"""When the steps of one commit happen: client, leader and followers by one clock.

One commit of one range at a time, each as soon as the last was answered. The controllers run under
`timed_controller`, which stamps the steps in memory; the client notes when it asked and when it was
answered. Steps are put together by the end offset of the commit's entry in the log, or, where a
step does not know it, by the time between question and answer. Stamping costs about a microsecond
a step. A tree that lacks a function that is a step shows no such row.
"""

import asyncio
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import psutil

from scripts.benchmarks.bench_cluster import in_thread, restart_changed, running_cluster
from scripts.benchmarks.commits import (
    PATIENT,
    Point,
    client_result,
    find_leader,
    start_client,
    wrapped,
)
from scripts.benchmarks.figures import Outcome, Table, percentile
from scripts.benchmarks.timed_controller import POINTS
from streammeta.cli.local_cluster import LocalCluster

Way: TypeAlias = Literal["unary", "pipelined"]
WAYS: tuple[Way, ...] = get_args(Way)
VOTERS = 3

Step: TypeAlias = tuple[str, str]
"""Where, and what."""
ASKED: Step = ("client", "asks")
ANSWERED: Step = ("client", "has the answer")
CAUSES: Mapping[Step, Step] = {
    ("leader", "journal begins"): ("leader", "batch is in the log"),
    ("leader", "flushed"): ("leader", "journal begins"),
    ("leader", "flush is reported"): ("leader", "flushed"),
    ("follower", "batch is read"): ("leader", "batch is with the transport"),
    ("follower", "journal begins"): ("follower", "batch is read"),
    ("follower", "flushed"): ("follower", "journal begins"),
    ("follower", "flush is reported"): ("follower", "flushed"),
    ("leader", "follower's Fetch is read"): ("follower", "next Fetch is with the transport"),
    ("leader", "high watermark passes it"): ("leader", "follower's Fetch is read"),
}
"""What a step follows, where that is not the step before it in time."""

Passing: TypeAlias = dict[Step, list[int]]
"""Times of one commit by step, in nanoseconds; a step of followers has one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    ways: Sequence[Way] = ("unary", "pipelined")
    seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step, over all commits; microseconds since the client asked."""

    where: str
    step: str
    p50_us: float
    """Of the process that comes to it first, where several do."""
    p90_us: float
    since_cause_us: float
    """Median time since the step that it follows, of the same commit."""
    second_p50_us: float | None
    """Of the other follower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU time and turns of the scheduler of a process, for each commit."""

    process: str
    cpu_us: float
    switches: float
    """How often a thread of it slept and was woken."""
    preempted: float


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure each way on a cluster of its own.

    Raises:
        ChildFailedError: a controller or the client ended early.
        UnhealthyError: the cluster was not in order.
    """
    tables: list[Table] = []
    figures: dict[str, float] = {}
    details: dict[str, Any] = {}
    for way in settings.ways:
        progress(f"timeline: {way}")
        rows, costs, commits = await _measure_way(root / way, way, settings.seconds)
        for row in rows:
            figures[f"{way} {row.where}: {row.step} us"] = row.p50_us
        details[way] = {
            "commits": commits,
            "steps": [asdict(row) for row in rows],
            "costs": [asdict(cost) for cost in costs],
        }
        tables += [_steps_table(way, commits, rows), _costs_table(way, costs)]
    return Outcome(
        benchmark="timeline",
        settings=asdict(settings),
        figures=figures,
        details=details,
        tables=tables,
    )


async def _measure_way(place: Path, way: Way, seconds: float) -> tuple[list[Row], list[Cost], int]:
    point = Point(way, 1, 1)
    times = place / "times.json"
    with running_cluster(place, VOTERS, PATIENT) as cluster:
        wrapper = wrapped(lambda node_id: ["timed_controller", str(_stamps(place, node_id))])
        await in_thread(restart_changed, cluster, wrapper)
        leader = await find_leader(cluster)
        client = start_client(
            way,
            cluster.endpoints[leader.node_id - 1],
            (1, 1, point.objects(seconds)),
            seconds,
            place / "client.log",
            ("--times", str(times)),
        )
        try:
            await asyncio.to_thread(client.wait_ready)
            before = _spent(cluster)
            await asyncio.to_thread(client.wait_ready)
            after = _spent(cluster)
            commits = (await asyncio.to_thread(client_result, client))["commits"]
        finally:
            client.stop()
        await in_thread(cluster.stop_all)
    asked = [[int(at * 1e9) for at in each] for each in json.loads(times.read_text())]
    stamps = {node_id: json.loads(_stamps(place, node_id).read_text()) for node_id in before}
    found = list(passings(asked, stamps, leader.node_id))
    costs = [
        Cost(
            process="leader" if node_id == leader.node_id else "follower",
            cpu_us=round((after[node_id][0] - before[node_id][0]) * 1e6 / commits, 1),
            switches=round((after[node_id][1] - before[node_id][1]) / commits, 2),
            preempted=round((after[node_id][2] - before[node_id][2]) / commits, 2),
        )
        for node_id in sorted(before, key=lambda each: each != leader.node_id)
    ]
    return summary(found), costs, len(found)


def _stamps(place: Path, node_id: int) -> Path:
    return place / f"controller-{node_id}.stamps"


def _spent(cluster: LocalCluster) -> dict[int, tuple[float, int, int]]:
    """Return CPU seconds, voluntary and other switches of each controller, all threads."""
    spent: dict[int, tuple[float, int, int]] = {}
    for node_id, child in cluster.children.items():
        times = psutil.Process(child.pid).cpu_times()
        counts = [0, 0]
        for status in Path(f"/proc/{child.pid}/task").glob("*/status"):
            for line in status.read_text().splitlines():
                for index, name in enumerate(("voluntary_ctxt", "nonvoluntary_ctxt")):
                    if line.startswith(name):
                        counts[index] += int(line.split()[1])
        spent[node_id] = (times.user + times.system, counts[0], counts[1])
    return spent


def passings(
    asked: Sequence[Sequence[int]], stamps: Mapping[int, Mapping[str, Any]], leader_id: int
) -> Iterator[Passing]:
    """Yield the steps of every commit that appended one entry between question and answer."""
    by_offset: dict[int, Passing] = defaultdict(lambda: defaultdict(list))
    by_time: list[tuple[int, Step]] = []
    for node_id, taken in stamps.items():
        role = "leader" if node_id == leader_id else "follower"
        seen: set[tuple[int, int]] = set()
        for number, at_ns, end_offset in taken["stamps"]:
            point = POINTS[number]
            if point.role not in (role, "each"):
                continue
            step = (role, point.step)
            if end_offset == 0:
                by_time.append((at_ns, step))
            elif role == "leader" or (number, end_offset) not in seen:
                seen.add((number, end_offset))
                by_offset[end_offset][step].append(at_ns)
    by_time.sort()
    appended = sorted(
        (passing[step][0], end_offset)
        for end_offset, passing in by_offset.items()
        for step in [("leader", "appended")]
        if step in passing
    )
    for began, ended in asked:
        found = appended[bisect_left(appended, (began,)) : bisect_left(appended, (ended,))]
        if len(found) != 1:
            continue
        passing = Passing(by_offset[found[0][1]])
        for at_ns, step in by_time[bisect_left(by_time, (began,)) : bisect_left(by_time, (ended,))]:
            passing.setdefault(step, []).append(at_ns)
        yield {ASKED: [began], **passing, ANSWERED: [ended]}


def summary(passings: Sequence[Passing]) -> list[Row]:
    """Return the steps that most commits took, in the order of their median times."""
    firsts: dict[Step, list[int]] = defaultdict(list)
    seconds: dict[Step, list[int]] = defaultdict(list)
    for passing in passings:
        (began,) = passing[ASKED]
        for step, times in passing.items():
            ordered = sorted(times)
            firsts[step].append(ordered[0] - began)
            if len(ordered) == VOTERS - 1:
                seconds[step].append(ordered[1] - began)
    usual = {step for step, since in firsts.items() if len(since) > len(passings) / 2}
    ordered_steps = sorted(usual, key=lambda step: percentile(firsts[step], 0.5))
    rows: list[Row] = []
    for above, step in zip([ASKED, *ordered_steps], ordered_steps, strict=False):
        before = CAUSES.get(step, above)
        both = [
            min(each[step]) - min(each[before])
            for each in passings
            if before in each and step in each
        ]
        has_second = len(seconds[step]) > len(passings) / 2
        rows.append(
            Row(
                where=step[0],
                step=step[1],
                p50_us=_us(percentile(firsts[step], 0.5)),
                p90_us=_us(percentile(firsts[step], 0.9)),
                since_cause_us=_us(percentile(both, 0.5)) if both else 0.0,
                second_p50_us=_us(percentile(seconds[step], 0.5)) if has_second else None,
            )
        )
    return rows


def _us(nanoseconds: float) -> float:
    return round(nanoseconds / 1000, 1)


def _steps_table(way: Way, commits: int, rows: Sequence[Row]) -> Table:
    return Table(
        title=f"{way}, one commit of one range at a time, {commits} commits: microseconds since "
        "the client asked",
        columns=("where", "step", "p50", "p90", "since its cause", "other follower's p50"),
        rows=tuple(
            (
                row.where,
                row.step,
                row.p50_us,
                row.p90_us,
                row.since_cause_us,
                "" if row.second_p50_us is None else row.second_p50_us,
            )
            for row in rows
        ),
    )


def _costs_table(way: Way, costs: Sequence[Cost]) -> Table:
    return Table(
        title=f"{way}: for each commit, all threads, stamping included",
        columns=("process", "CPU us", "sleeps", "preempted"),
        rows=tuple((cost.process, cost.cpu_us, cost.switches, cost.preempted) for cost in costs),
    )
