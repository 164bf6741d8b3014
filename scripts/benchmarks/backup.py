"""Cost and lag of a continuous backup, and the time and memory of a restore.

Two clusters of three controllers, one with a backup store in a directory and one without, take the
same load in alternating turns: commits of one range on one stream of messages, at a fixed rate. The
lag is what the leader's metrics say, read twenty times a second. Restores are in `backup_restore`,
adoptions in `backup_adoption`.
"""

import asyncio
import contextlib
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from scripts.benchmarks import backup_adoption, backup_restore
from scripts.benchmarks.bench_cluster import in_thread, restart_changed, running_cluster
from scripts.benchmarks.commits import PATIENT, client_result, find_leader
from scripts.benchmarks.figures import Outcome, Table, Target, median, percentile, targets_table
from streammeta.cli.local_cluster import LocalCluster, free_ports, start_child

VOTERS = 3
SAMPLE_S = 0.05
P99_RATIO_MAX = 1.05
LARGE = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The load of the two clusters, and the sizes of what is restored."""

    commits_per_s: int = 10_000
    seconds: float = 5.0
    """Of one turn."""
    rounds: int = 3
    """Turns of each cluster."""
    interval_ms: int = 1_000
    """Between two copies; the product's own is ten times that."""
    sizes: Sequence[int] = (1_000_000,)
    """Streams, and as many objects, that are restored."""
    adoptions: Sequence[int] = (10_000,)
    """Objects that are adopted."""
    large: bool = False
    """Whether to restore `LARGE` too."""

    def all_sizes(self) -> list[int]:
        """Return the sizes, ascending."""
        return sorted({*self.sizes, *([LARGE] if self.large else [])})


@dataclass(slots=True)
class _Side:
    """One of the two clusters, and what its turns gave."""

    cluster: LocalCluster
    http_ports: Sequence[int]
    has_backup: bool
    turns: list[dict[str, Any]] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure all of it.

    Raises:
        ChildFailedError: a controller, a client or a restore ended early.
        UnhealthyError: a cluster was not in order.
    """
    restores = []
    for size in settings.all_sizes():
        progress(f"backup: a restore of {size} streams and objects")
        place = root / f"restore-{size}"
        place.mkdir(parents=True)
        restores.append(await asyncio.to_thread(backup_restore.measure, place, size))
    adoptions = []
    for count in sorted({*settings.adoptions}):
        progress(f"backup: an adoption of {count} objects")
        place = root / f"adoption-{count}"
        place.mkdir(parents=True)
        adoptions.append(await asyncio.to_thread(backup_adoption.measure, place, count))
    with _side(root / "without", None) as without, _side(root / "with", settings) as with_backup:
        sides = (without, with_backup)
        for side in sides:
            await in_thread(restart_changed, side.cluster, _with_http(side.http_ports))
        for turn in range(settings.rounds):
            for side in sides:
                progress(f"backup: turn {turn + 1}, {'with' if side.has_backup else 'without'}")
                await _turn(side, settings, root)
    return _outcome(settings, without, with_backup, restores, adoptions)


@contextlib.contextmanager
def _side(root: Path, settings: Settings | None) -> Iterator[_Side]:
    """Run a cluster, with a backup if there are settings for it."""
    options: tuple[str, ...] = PATIENT
    if settings is not None:
        store = root / "backups"
        store.mkdir(parents=True)
        options += ("--backup-store", f"file://{store}")
        options += ("--backup-interval-ms", str(settings.interval_ms))
    with running_cluster(root, VOTERS, options) as cluster:
        yield _Side(cluster, free_ports(VOTERS), settings is not None)


def _with_http(ports: Sequence[int]) -> Callable[[int, list[str]], list[str]]:
    def change(node_id: int, command: list[str]) -> list[str]:
        return [*command, "--http-listen", f"127.0.0.1:{ports[node_id - 1]}"]

    return change


async def _turn(side: _Side, settings: Settings, root: Path) -> None:
    leader = await find_leader(side.cluster)
    words = [
        *(sys.executable, "-m", "scripts.benchmarks.broker_load", "commits"),
        *("--leader", side.cluster.endpoints[leader.node_id - 1]),
        *("--rate", str(settings.commits_per_s), "--seconds", str(settings.seconds)),
        *("--output", str(root / "acknowledged.npz")),
    ]
    client = start_child("commits", words, root / "commits.log")
    try:
        await asyncio.to_thread(client.wait_ready)
        async with _sampling(side, side.http_ports[leader.node_id - 1]):
            await asyncio.to_thread(client.wait_ready)
        side.turns.append(await asyncio.to_thread(client_result, client))
    finally:
        await asyncio.to_thread(client.stop)


@contextlib.asynccontextmanager
async def _sampling(side: _Side, port: int) -> AsyncIterator[None]:
    """Read the leader's metrics meanwhile, on both sides, so that both pay for it."""

    async def sample() -> None:
        while True:
            side.lags_s += await asyncio.to_thread(_lag_s, port)
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sample())
    try:
        yield
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])


def _lag_s(port: int) -> list[float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "streammeta_backup_lag_seconds"
        for sample in family.samples
    ]


def _outcome(
    settings: Settings,
    without: _Side,
    with_backup: _Side,
    restores: Sequence[backup_restore.Restore],
    adoptions: Sequence[backup_adoption.Adoption],
) -> Outcome:
    lags = with_backup.lags_s
    ratio = _median(with_backup, "p99_ms") / _median(without, "p99_ms")
    figures = {
        "lag_p50_s": percentile(lags, 0.5),
        "lag_p99_s": percentile(lags, 0.99),
        "p99_with_over_without": round(ratio, 3),
    }
    for name, side in (("without", without), ("with", with_backup)):
        figures |= {f"{name}_{what}": _median(side, what) for what in side.turns[0]}
    for each in restores:
        figures |= {f"restore_{each.entities}_{name}": value for name, value in each.figures()}
    for one in adoptions:
        figures |= {f"adoption_{one.objects}_{name}": value for name, value in one.figures()}
    load = Table(
        title=f"Commits with and without a backup every {settings.interval_ms} ms, medians",
        columns=("backup", "commits/s", "p50 ms", "p99 ms", "lag p50 s", "lag p99 s"),
        rows=(
            ("without", *_row(without), "", ""),
            ("with", *_row(with_backup), figures["lag_p50_s"], figures["lag_p99_s"]),
        ),
    )
    target = Target("commit p99 with a backup over that without", "at most", P99_RATIO_MAX, ratio)
    return Outcome(
        benchmark="backup",
        settings=asdict(settings),
        figures=figures,
        details={
            "without": without.turns,
            "with": with_backup.turns,
            "lags_s": lags,
            "restores": [asdict(each) for each in restores],
            "adoptions": [asdict(one) for one in adoptions],
        },
        tables=(
            *(load, backup_restore.table(restores), backup_adoption.table(adoptions)),
            *targets_table([target]),
        ),
    )


def _median(side: _Side, what: str) -> float:
    return median([turn[what] for turn in side.turns])


def _row(side: _Side) -> tuple[float, ...]:
    return tuple(_median(side, what) for what in ("commits_per_s", "p50_ms", "p99_ms"))
