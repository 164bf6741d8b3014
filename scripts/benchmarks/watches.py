"""A bystander's commits while many clients watch the leader, or keep commit pipelines open.

Three controllers with the product's timeouts. A client process opens watches or pipelines, uses
them, and drops its connections at once (`follower_load`), while one client puts small values at a
bounded rate. Measured are the time to the bystander's answers, elections, and the longest delay of
the leader's event loop. The cluster is new for each level.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.cluster import counters_path, find_leader, observed, running_cluster
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, latencies
from scripts.benchmarks.follower_load import PHASES, Kind, follow
from scripts.benchmarks.observed_controller import Counters
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.processes import read_result, wait_ready, working
from streammeta.client import ControllerClient
from streammeta.client.controllers.methods import PUT_KVS
from streammeta.v1 import kv_pb2

COMMITS_A_SECOND = 10
COLUMNS = (
    "kind | number = count | opened | refused | without answer = missing"
    " | bystander's commits = commits | p50 ms = p50_ms | p99 ms = p99_ms | max ms = max_ms"
    " | elections | longest stall ms = stall_max_ms | changes | fewest received = fewest"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Numbers of watches and of pipelines, each measured alone."""

    watches: tuple[int, ...] = option((0, 100, 1_000), "numbers of watches", least=0)
    pipelines: tuple[int, ...] = option((0, 1_000, 10_000), "numbers of pipelines", least=0)
    connections: int = option(100, "connections for them")
    seconds: float = seconds(5.0, "of each level")

    def points(self) -> Iterator[tuple[Kind, int]]:
        """Yield kinds and counts to measure. None of either is one level."""
        if 0 in (*self.watches, *self.pipelines):
            yield "watches", 0
        yield from (("watches", count) for count in self.watches if count)
        yield from (("pipelines", count) for count in self.pipelines if count)


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure every level."""
    levels: list[dict[str, Any]] = []
    for number, (kind, count) in enumerate(settings.points()):
        progress(f"watches: {count} {kind}")
        place = root / f"level-{number}"
        with running_cluster(place, change=observed(place)) as cluster:
            before = await find_leader(cluster)
            load: dict[str, Any] = {"kind": kind, "count": count, "seconds": settings.seconds}
            load |= {"endpoint": before.endpoint, "connections": settings.connections}
            async with (
                bystander(cluster.endpoints) as commits,
                working(place / "client.log", follow, **load) as client,
            ):
                for phase in PHASES:
                    await wait_ready(client)
                    commits.end_phase(phase)
                counts = await read_result(client)
            after = await find_leader(cluster)
            stall_ns = Counters.read(counters_path(place, before.node_id)).stall_max_ns
        levels.append(
            {
                "kind": kind,
                "count": count,
                **counts,
                "commits": len(commits.latencies_s),
                **latencies(commits.latencies_s, 2),
                "phase_max_ms": commits.phase_max_ms,
                "elections": after.epoch - before.epoch,
                "stall_max_ms": round(stall_ns / 1e6, 1),
            }
        )
    title = "A bystander's commits during watches and pipelines"
    elections = sum(level["elections"] for level in levels)

    return Outcome(
        benchmark="watches",
        figures={
            f"{level['count']}_{level['kind']}_{name}": level[name]
            for level in levels
            for name in ("p50_ms", "p99_ms", "stall_max_ms")
        },
        details={"levels": levels},
        tables=[Table.of(title, levels, COLUMNS)],
        targets=[Target("elections at any level", "at most", 0, elections)],
    )


class Bystander:
    """Puts a value, waits for the answer and the rest of its interval, and repeats."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._phase_s: list[float] = []
        self.latencies_s: list[float] = []
        self.phase_max_ms: dict[str, float] = {}

    def end_phase(self, phase: str) -> None:
        """Begin the next phase. Latencies of the first phase, which prepares, do not count."""
        if phase == PHASES[0]:
            self.latencies_s.clear()
        else:
            self.phase_max_ms[phase] = round(max(self._phase_s, default=0.0) * 1000, 2)
        self._phase_s = []

    async def commit_on(self) -> None:
        """Commit until cancelled."""
        item = kv_pb2.KVToPut(namespace="bench", key="bystander", value=bytes(100), overwrite=True)
        while True:
            asked = time.monotonic()
            await self._client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
            latency_s = time.monotonic() - asked
            self.latencies_s.append(latency_s)
            self._phase_s.append(latency_s)
            await asyncio.sleep(max(0.0, 1 / COMMITS_A_SECOND - latency_s))


@contextlib.asynccontextmanager
async def bystander(endpoints: Sequence[str]) -> AsyncIterator[Bystander]:
    """Run the bystander until the block ends, and then raise its failure."""
    async with ControllerClient(endpoints) as client:
        commits = Bystander(client)
        running = asyncio.create_task(commits.commit_on())
        try:
            yield commits
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
