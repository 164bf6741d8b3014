"""Commits of shared rows: streammeta beside PostgreSQL, one node each, on one machine.

Both assign offsets to the rows of an object and check the sequences of idempotent producers, all or
nothing and durable when answered. streammeta has one voter and answers `CommitStreamSetObject`.
PostgreSQL answers a call of one function (`peers/postgresql_commit.sql`). They take turns at each
level, and begin each turn without data. It needs an installed PostgreSQL server.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from scripts.benchmarks.cluster import PATIENT, find_leader, running_cluster
from scripts.benchmarks.commits import Point
from scripts.benchmarks.committer import load_commits
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, median
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.peers.postgresql_server import running_postgresql
from scripts.benchmarks.processes import cpu_s, read_result, wait_ready, working

Way: TypeAlias = Literal["shared", "idempotent"]
Turn: TypeAlias = Mapping[str, float]
"""The client's report of one turn of one system."""

OURS, PEER = SYSTEMS = ("streammeta", "postgresql")
TARGET_ROWS = 1_000
TARGET_RATIO = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Levels to measure: all combinations."""

    ways: tuple[Way, ...] = option(("shared", "idempotent"), "rows without and with producers")
    rows: tuple[int, ...] = option((1, 100, 1_000), "rows of one commit, each of its own stream")
    in_flight: tuple[int, ...] = option((1, 16), "numbers of commits in flight")
    rounds: int = option(3, "turns of each system at each level")
    seconds: float = seconds(2.0, "of each turn")

    def points(self) -> Iterator[Point]:
        """Yield the levels."""
        for way in self.ways:
            for rows in self.rows:
                for in_flight in self.in_flight:
                    yield Point(way, rows, in_flight)


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure every level, each system in its turn."""
    levels: list[dict[str, Any]] = []
    async with running_postgresql(root / "postgresql") as (endpoint, pid):
        for point in settings.points():
            turns: dict[str, list[Turn]] = {system: [] for system in SYSTEMS}
            for number in range(1, settings.rounds + 1):
                progress(f"shared: {point}, round {number}")
                turns[OURS].append(await _run_streammeta(root / OURS, point, settings.seconds))
                load = {"endpoint": endpoint, **point.load(settings.seconds)}
                load["system"] = f"{PEER}-{point.way}"
                turns[PEER].append(await _run_load(root / "client.log", pid, load))
            levels.append(_level(point, settings.seconds, turns))
    return outcome_of(levels)


async def _run_streammeta(place: Path, point: Point, seconds: float) -> Turn:
    """Run the load on a new controller, and remove its files."""
    with running_cluster(place, 1, PATIENT) as cluster:
        leader = await find_leader(cluster)
        load = {"endpoint": leader.endpoint, **point.load(seconds)}
        turn = await _run_load(place / "client.log", cluster.children[1].pid, load)
    shutil.rmtree(place)
    return turn


async def _run_load(log: Path, pid: int, load: Mapping[str, Any]) -> Turn:
    """Run the client, and add the CPU time of the server and its children meanwhile."""
    async with working(log, load_commits, **load) as client:
        await wait_ready(client)
        before_s = cpu_s([pid], with_children=True)
        await wait_ready(client)
        spent_s = cpu_s([pid], with_children=True) - before_s
        turn: dict[str, float] = await read_result(client)
    return turn | {"server_us": spent_s * 1e6 / turn["commits"]}


def _level(point: Point, seconds: float, turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Return the medians of a level, and the ratios within the rounds."""
    level: dict[str, Any] = {
        "way": point.way,
        "rows": point.ranges,
        "in_flight": point.in_flight,
        "turns": turns,
    }
    for system, own in turns.items():
        level[f"{system}_rows_per_s"] = round(
            median([turn["commits_per_s"] for turn in own]) * point.ranges
        )
        for name in ("p50_ms", "p99_ms"):
            level[f"{system}_{name}"] = median([turn[name] for turn in own])
        server_us = median([turn["server_us"] for turn in own])
        level[f"{system}_cpu_us_a_row"] = round(server_us / point.ranges, 3)
        cores = median([turn["client_cpu_s"] for turn in own]) / seconds
        level[f"{system}_client_cores"] = round(cores, 2)
    pairs = zip(turns[OURS], turns[PEER], strict=True)
    ratios = [ours["commits_per_s"] / peer["commits_per_s"] for ours, peer in pairs]
    bounds = {"ratio_least": min(ratios), "ratio_most": max(ratios)}
    return level | bounds | {"ratio": round(median(ratios), 3)}


COLUMNS = (
    "way | rows | in flight = in_flight | streammeta, rows/s = streammeta_rows_per_s"
    " | PostgreSQL, rows/s = postgresql_rows_per_s | ratio | least = ratio_least"
    " | most = ratio_most"
    " | streammeta, p50 ms = streammeta_p50_ms | p99 ms = streammeta_p99_ms"
    " | PostgreSQL, p50 ms = postgresql_p50_ms | p99 ms = postgresql_p99_ms"
    " | CPU us a row, streammeta = streammeta_cpu_us_a_row"
    " | CPU us a row, PostgreSQL = postgresql_cpu_us_a_row"
    " | client cores, streammeta = streammeta_client_cores"
    " | client cores, PostgreSQL = postgresql_client_cores"
)


def outcome_of(levels: Sequence[Mapping[str, Any]]) -> Outcome:
    """Return the outcome of levels, whose ratios are streammeta's rows/s by PostgreSQL's."""
    figures: dict[str, float] = {}
    targets: list[Target] = []
    for level in levels:
        name = f"{level['way']}_{level['rows']}_rows_{level['in_flight']}_in_flight"
        for system in SYSTEMS:
            for unit in ("rows_per_s", "p50_ms", "p99_ms", "cpu_us_a_row"):
                figures[f"{name}_{system}_{unit}"] = level[f"{system}_{unit}"]
        figures[f"{name}_ratio"] = level["ratio"]
        if level["rows"] == TARGET_ROWS:
            figure = f"{level['way']}, {TARGET_ROWS:,} rows, {level['in_flight']} in flight: ratio"
            targets.append(Target(figure, "at least", TARGET_RATIO, level["ratio"]))
    return Outcome(
        benchmark="shared",
        figures=figures,
        details={"levels": levels},
        tables=[Table.of("Commits of shared rows, one node each, medians", levels, COLUMNS)],
        targets=targets,
    )
