"""Times of the steps of one commit, in client, leader and followers, on one clock.

One commit of one range at a time, each as soon as the last one was answered. The controllers run
under `timed_controller`, which stamps the steps in memory, and the client records the times of
question and answer. Steps are matched by the end offset of the commit's entry in the log, or, where
a step does not know it, by the time between question and answer. Stamping costs about a microsecond
a step.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from scripts.benchmarks.cluster import (
    PATIENT,
    VOTERS,
    find_leader,
    in_thread,
    running_cluster,
    wrapped,
)
from scripts.benchmarks.commit_load import load_commits
from scripts.benchmarks.commits import Point
from scripts.benchmarks.figures import Outcome, Progress, Table, percentile
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.processes import cpu_s, read_result, wait_ready, working
from scripts.benchmarks.timed_controller import POINTS
from streammeta.cli.local.local_cluster import LocalCluster

Way: TypeAlias = Literal["unary", "pipelined"]
WAYS: tuple[Way, ...] = get_args(Way)

Step: TypeAlias = tuple[str, str]
"""Role of the process, and name of the step."""
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
"""Cause of a step, where that is not the step before it in time."""

Passing: TypeAlias = dict[Step, list[int]]
"""Times of one commit by step, in nanoseconds. A step of followers has one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Ways to commit, and the length of each."""

    ways: tuple[Way, ...] = option(WAYS, "ways to commit")
    seconds: float = seconds(5.0, "of each way")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step over all commits, in microseconds since the client asked."""

    where: str
    step: str
    p50_us: float
    """Time of the first process, where several take the step."""
    p90_us: float
    since_cause_us: float
    """Median time since the cause in the same commit."""
    second_p50_us: float | None
    """Time of the other follower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU time and context switches of a process, for each commit."""

    process: str
    cpu_us: float
    switches: float
    """Sleeps of its threads."""
    preempted: float


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure each way on its own cluster."""
    tables: list[Table] = []
    figures: dict[str, float] = {}
    details: dict[str, Any] = {}
    for way in settings.ways:
        progress(f"timeline: {way}")
        rows, costs, commits = await _measure_way(root / way, way, settings.seconds)
        figures |= {f"{way} {row.where}: {row.step} us": row.p50_us for row in rows}
        details[way] = {
            "commits": commits,
            "steps": [asdict(row) for row in rows],
            "costs": [asdict(cost) for cost in costs],
        }
        tables += _tables(way, commits, rows, costs)
    return Outcome(benchmark="timeline", figures=figures, details=details, tables=tables)


async def _measure_way(place: Path, way: Way, seconds: float) -> tuple[list[Row], list[Cost], int]:
    times = place / "times.json"

    change = wrapped(lambda node_id: ["timed_controller", str(_stamps(place, node_id))])
    with running_cluster(place, VOTERS, PATIENT, change=change) as cluster:
        leader = await find_leader(cluster)
        load = {"endpoint": leader.endpoint, **Point(way, 1, 1).load(seconds)}
        async with working(place / "client.log", load_commits, times=times, **load) as client:
            await wait_ready(client)
            before = _spent(cluster)
            await wait_ready(client)
            after = _spent(cluster)
            commits = (await read_result(client))["commits"]
        await in_thread(cluster.stop_all)

    asked = [[int(at * 1e9) for at in pair] for pair in json.loads(times.read_text())]
    stamps = {node_id: json.loads(_stamps(place, node_id).read_text()) for node_id in before}
    found = list(passings(asked, stamps, leader.node_id))
    costs = []
    for node_id in sorted(before, key=lambda node_id: node_id != leader.node_id):
        spent, sleeps, preempted = (
            (now - then) / commits
            for now, then in zip(after[node_id], before[node_id], strict=True)
        )
        costs.append(
            Cost(
                process="leader" if node_id == leader.node_id else "follower",
                cpu_us=round(spent * 1e6, 1),
                switches=round(sleeps, 2),
                preempted=round(preempted, 2),
            )
        )
    return summary(found), costs, len(found)


def _stamps(place: Path, node_id: int) -> Path:
    return place / f"controller-{node_id}.stamps"


def _spent(cluster: LocalCluster) -> dict[int, tuple[float, int, int]]:
    """Return CPU seconds, voluntary and other context switches of each controller's threads."""
    spent: dict[int, tuple[float, int, int]] = {}
    for node_id, child in cluster.children.items():
        counts = {"voluntary_ctxt_switches:": 0, "nonvoluntary_ctxt_switches:": 0}
        for status in Path(f"/proc/{child.pid}/task").glob("*/status"):
            for name, _, value in (
                line.partition("\t") for line in status.read_text().splitlines()
            ):
                if name in counts:
                    counts[name] += int(value)
        sleeps, preempted = counts.values()
        spent[node_id] = (cpu_s([child.pid]), sleeps, preempted)
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
            # A follower that repeats a Fetch takes the step again; only its first time counts.
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
        # Several entries, or none, can't be matched with one question.
        if len(found) != 1:
            continue
        passing = Passing(by_offset[found[0][1]])
        for at_ns, step in by_time[bisect_left(by_time, (began,)) : bisect_left(by_time, (ended,))]:
            passing.setdefault(step, []).append(at_ns)
        yield {ASKED: [began], **passing, ANSWERED: [ended]}


def summary(passings: Sequence[Passing]) -> list[Row]:
    """Return the steps of most commits, in the order of their median times."""
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
            min(passing[step]) - min(passing[before])
            for passing in passings
            if before in passing and step in passing
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


def _tables(way: Way, commits: int, rows: Sequence[Row], costs: Sequence[Cost]) -> Iterator[Table]:
    title = f"{way}, one commit of one range at a time, {commits} commits"
    steps = [{name: at for name, at in asdict(row).items() if at is not None} for row in rows]
    yield Table.of(
        f"{title}: microseconds since the client asked",
        steps,
        "where | step | p50 = p50_us | p90 = p90_us | since its cause = since_cause_us"
        " | other follower's p50 = second_p50_us",
    )
    yield Table.of(
        f"{way}: for each commit, all threads, with stamping",
        costs,
        "process | CPU us = cpu_us | sleeps = switches | preempted",
    )
