"""Cost and lag of a continuous backup, and time and memory of restores and adoptions.

Two clusters of three controllers, one with a backup store in a directory and one without, get the
same load in alternating turns: commits of one range on one stream of messages, at a fixed rate. The
lag comes from the leader's metrics, read twenty times a second. Restores and adoptions are in
`backup_restore`.
"""

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from scripts.benchmarks import backup_restore
from scripts.benchmarks.backup_restore import ADOPTIONS, RANGES, RECORDS, RESTORES
from scripts.benchmarks.brokers import load_at_rate
from scripts.benchmarks.cluster import PATIENT, VOTERS, find_leader, http_options, running_cluster
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, medians, percentile
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.processes import read_result, wait_ready, working
from streammeta.cli.local.local_cluster import LocalCluster

SAMPLE_S = 0.05
P99_RATIO_MAX = 1.05
LARGE = 10_000_000
COLUMNS = (
    "backup | commits/s = commits_per_s | p50 ms = p50_ms | p99 ms = p99_ms"
    " | lag p50 s = lag_p50_s | lag p99 s = lag_p99_s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Load of the two clusters, and sizes of restores and adoptions."""

    commits_per_s: int = option(10_000, "pipelined commits of one range")
    interval_ms: int = option(1_000, "milliseconds between two copies")
    """The product's own default is ten times that."""
    seconds: float = seconds(5.0, "of each turn")
    rounds: int = option(3, "turns of each cluster")
    sizes: tuple[int, ...] = option((1_000_000,), "streams, and as many objects, to restore")
    adoptions: tuple[int, ...] = option((10_000,), "objects to adopt after a restore")
    large: bool = option(False, f"restore {LARGE:,} too")


@dataclass(slots=True)
class _Side:
    """One of the two clusters, and the figures of its turns."""

    cluster: LocalCluster
    http_ports: Mapping[int, int]
    turns: list[dict[str, float]] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure restores, adoptions and the two clusters."""
    restores, adoptions = [], []
    for size in sorted({*settings.sizes, *([LARGE] if settings.large else [])}):
        progress(f"backup: a restore of {size} streams and objects")
        place = root / f"restore-{size}"
        place.mkdir(parents=True)
        restores.append(await asyncio.to_thread(backup_restore.measure_restore, place, size))
    for count in sorted({*settings.adoptions}):
        progress(f"backup: an adoption of {count} objects")
        place = root / f"adoption-{count}"
        place.mkdir(parents=True)
        adoptions.append(await asyncio.to_thread(backup_restore.measure_adoption, place, count))

    store = root / "backups"
    store.mkdir()
    interval = ("--backup-interval-ms", str(settings.interval_ms))
    options = {"without": (), "with": ("--backup-store", f"file://{store}", *interval)}
    with contextlib.ExitStack() as stack:
        sides: dict[str, _Side] = {}
        for name, more in options.items():
            ports, own_options = http_options()
            cluster = stack.enter_context(
                running_cluster(root / name, VOTERS, (*PATIENT, *more), own_options)
            )
            sides[name] = _Side(cluster, ports)
        for turn in range(settings.rounds):
            for name, side in sides.items():
                progress(f"backup: turn {turn + 1}, {name} a backup")
                await _turn(side, settings, root)
    return _outcome(settings, sides, restores, adoptions)


async def _turn(side: _Side, settings: Settings, root: Path) -> None:
    leader = await find_leader(side.cluster)
    load = {"rate": settings.commits_per_s, "seconds": settings.seconds}
    output = root / "acknowledged.npz"
    async with working(
        root / "commits.log", load_at_rate, leader=leader.endpoint, output=output, **load
    ) as client:
        await wait_ready(client)
        async with _sampling(side, side.http_ports[leader.node_id]):
            await wait_ready(client)
        side.turns.append(await read_result(client))


@contextlib.asynccontextmanager
async def _sampling(side: _Side, port: int) -> AsyncIterator[None]:
    """Read the leader's metrics until the block ends, on both sides, so that both pay for it."""

    async def sample() -> None:
        while True:
            side.lags_s += await asyncio.to_thread(_read_lags_s, port)
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sample())
    try:
        yield
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])


def _read_lags_s(port: int) -> list[float]:
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
    sides: Mapping[str, _Side],
    restores: Sequence[Mapping[str, float]],
    adoptions: Sequence[Mapping[str, float]],
) -> Outcome:
    lags_s = sides["with"].lags_s
    found = {name: medians(side.turns) for name, side in sides.items()}
    ratio = found["with"]["p99_ms"] / found["without"]["p99_ms"]
    figures = {
        "lag_p50_s": percentile(lags_s, 0.5),
        "lag_p99_s": percentile(lags_s, 0.99),
        "p99_with_over_without": round(ratio, 3),
    }
    for name, turn in found.items():
        figures |= {f"{name}_{figure}": value for figure, value in turn.items()}
    for restore in restores:
        figures |= {f"restore_{restore['entities']}_{name}": at for name, at in restore.items()}
    for adoption in adoptions:
        figures |= {f"adoption_{adoption['objects']}_{name}": at for name, at in adoption.items()}
    lags = {name: figures[name] for name in ("lag_p50_s", "lag_p99_s")}
    rows = [{"backup": "without", **found["without"]}, {"backup": "with", **found["with"], **lags}]
    title = f"Commits with and without a backup every {settings.interval_ms} ms, medians"
    adopted = f"Adoptions of objects with {RANGES} ranges of {RECORDS} records each"
    target = "commit p99 with a backup, as a multiple of the p99 without"

    return Outcome(
        benchmark="backup",
        figures=figures,
        details={
            "without": sides["without"].turns,
            "with": sides["with"].turns,
            "lags_s": lags_s,
            "restores": restores,
            "adoptions": adoptions,
        },
        tables=[
            Table.of(title, rows, COLUMNS),
            Table.of("Restores of a checkpoint and the commits after it", restores, RESTORES),
            Table.of(adopted, adoptions, ADOPTIONS),
        ],
        targets=[Target(target, "at most", P99_RATIO_MAX, ratio)],
    )
