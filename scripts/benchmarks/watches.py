"""A bystander's commits while many watch the leader, or hold commit pipelines open at it.

Three controllers with the product's timeouts. A client process opens watches or pipelines, uses
them, and drops its connections at once (`follower_load`); meanwhile one client puts small values at
a bounded rate. Measured are the time to the bystander's answers, elections, and
the longest delay of the leader's event loop. The cluster is new for each level.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.benchmarks.bench_cluster import (
    in_thread,
    restart_changed,
    running_cluster,
    watching,
)
from scripts.benchmarks.commits import client_result, find_leader, observed, read_counters
from scripts.benchmarks.figures import Outcome, Table, Target, percentile, targets_table
from scripts.benchmarks.follower_load import PHASES
from streammeta.cli.local_cluster import Child, start_child
from streammeta.client import ControllerClient
from streammeta.client.methods import PUT_KVS
from streammeta.v1 import kv_pb2

VOTERS = 3
COMMITS_A_SECOND = 10
CONNECTIONS = 100
CLIENT_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Numbers of watches and of pipelines, each measured alone."""

    watches: Sequence[int] = (0, 100, 1_000)
    pipelines: Sequence[int] = (0, 1_000, 10_000)
    connections: int = CONNECTIONS
    seconds: float = 5.0

    def points(self) -> "Iterator[Point]":
        """Yield the levels to measure; none of either is one level."""
        if 0 in self.watches or 0 in self.pipelines:
            yield Point("watches", 0)
        for count in self.watches:
            if count:
                yield Point("watches", count)
        for count in self.pipelines:
            if count:
                yield Point("pipelines", count)


@dataclass(frozen=True, slots=True)
class Point:
    """Counts by kind."""

    kind: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Figures of one point."""

    kind: str
    count: int
    opened: int
    refused: int
    missing: int
    messages: int
    changes: int
    fewest: int
    commits: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    phase_max_ms: dict[str, float]
    elections: int
    stall_max_ms: float


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure every level.

    Raises:
        ChildFailedError: a controller or the client ended early.
        UnhealthyError: the cluster was not in order before or after.
    """
    levels: list[Level] = []
    for number, point in enumerate(settings.points()):
        progress(f"watches: {point.count} {point.kind}")
        place = root / f"level-{number}"
        with running_cluster(place, VOTERS) as cluster:
            await in_thread(restart_changed, cluster, observed(place))
            before = await find_leader(cluster)
            endpoint = cluster.endpoints[before.node_id - 1]
            async with bystander(cluster.endpoints) as commits:
                with _load(point, settings, endpoint, place) as client:
                    for phase in PHASES:
                        await asyncio.to_thread(client.wait_ready)
                        commits.end_phase(phase)
                    counts = await asyncio.to_thread(client_result, client)
            async with watching(cluster.endpoints) as watch:
                after = await watch.wait_healthy()
            stall_ns = read_counters(place, before).stall_max_ns
        levels.append(
            Level(
                kind=point.kind,
                count=point.count,
                **counts,
                commits=len(commits.latencies_ms),
                p50_ms=round(percentile(commits.latencies_ms, 0.5), 2),
                p99_ms=round(percentile(commits.latencies_ms, 0.99), 2),
                max_ms=round(max(commits.latencies_ms), 2),
                phase_max_ms=commits.phase_max_ms,
                elections=after.epoch - before.epoch,
                stall_max_ms=round(stall_ns / 1e6, 1),
            )
        )
    return _outcome(settings, levels)


@contextlib.contextmanager
def _load(point: Point, settings: Settings, endpoint: str, place: Path) -> Iterator[Child]:
    client = start_child(
        "follower load",
        [
            *(sys.executable, "-m", "scripts.benchmarks.follower_load"),
            *("--kind", point.kind, "--endpoint", endpoint, "--count", str(point.count)),
            *("--connections", str(settings.connections), "--seconds", str(settings.seconds)),
        ],
        place / "client.log",
    )
    try:
        yield client
    finally:
        client.stop()


class Bystander:
    """Puts a value, waits for the answer and the rest of its interval, and goes on."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._phase_ms: list[float] = []
        self.latencies_ms: list[float] = []
        self.phase_max_ms: dict[str, float] = {}

    def end_phase(self, phase: str) -> None:
        """Begin the next phase: latencies of the first, which prepares, do not count."""
        if phase == PHASES[0]:
            self.latencies_ms.clear()
        else:
            self.phase_max_ms[phase] = round(max(self._phase_ms, default=0.0), 2)
        self._phase_ms = []

    async def commit_on(self) -> None:
        """Go on until cancelled."""
        item = kv_pb2.KVToPut(namespace="bench", key="bystander", value=bytes(100), overwrite=True)
        while True:
            asked = time.monotonic()
            await self._client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
            latency_s = time.monotonic() - asked
            self.latencies_ms.append(latency_s * 1000)
            self._phase_ms.append(latency_s * 1000)
            await asyncio.sleep(max(0.0, 1 / COMMITS_A_SECOND - latency_s))


@contextlib.asynccontextmanager
async def bystander(endpoints: Sequence[str]) -> AsyncIterator[Bystander]:
    """Run the bystander; its failure is raised at the end."""
    async with ControllerClient(endpoints) as client:
        commits = Bystander(client)
        running = asyncio.create_task(commits.commit_on())
        try:
            yield commits
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


COLUMNS = {
    "kind": "kind",
    "count": "number",
    "opened": "opened",
    "refused": "refused",
    "missing": "without answer",
    "commits": "bystander's commits",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "max_ms": "max ms",
    "elections": "elections",
    "stall_max_ms": "longest stall ms",
    "changes": "changes",
    "fewest": "fewest received",
}


def _outcome(settings: Settings, levels: Sequence[Level]) -> Outcome:
    figures: dict[str, float] = {}
    for level in levels:
        name = f"{level.count}_{level.kind}"
        figures[f"{name}_p50_ms"] = level.p50_ms
        figures[f"{name}_p99_ms"] = level.p99_ms
        figures[f"{name}_stall_max_ms"] = level.stall_max_ms
    facts = [asdict(level) for level in levels]
    table = Table(
        title="A bystander's commits beside watches and pipelines",
        columns=tuple(COLUMNS.values()),
        rows=tuple(tuple(fact[name] for name in COLUMNS) for fact in facts),
    )
    target = Target("elections at any level", "at most", 0, sum(each.elections for each in levels))
    return Outcome(
        benchmark="watches",
        settings=asdict(settings),
        figures=figures,
        details={"levels": facts},
        tables=(table, *targets_table([target])),
    )
