"""How fast compaction is and how much memory it takes, in a process of its own and on one core.

Streams of very different rates are written through a controller to a local directory and compacted
at once, under different budgets. A plain copy of the same objects says what the directory gives.
"""

import asyncio
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from scripts.benchmarks.compaction_place import (
    MIB,
    NODE_EPOCH,
    NODE_ID,
    Place,
    require_same,
    running_place,
)
from scripts.benchmarks.compaction_settings import LARGE_MIB, Throughput
from scripts.benchmarks.figures import Outcome, Table, Target, targets_table
from scripts.benchmarks.thread_profile import Cost, costs_by_function, costs_by_package
from streammeta.cli.local_cluster import ChildFailedError, start_child
from streammeta.client import WriterConfig

MOST_RESIDENT_LARGE_MIB = 300.0
MOST_RESIDENT_OF_BUDGET = 1.2
BATCH_BYTES = 16 * MIB
READ_STREAMS = 20
"""That are read cold, before and after."""
PROFILE_ROWS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One compaction; figures are as the probe names them."""

    total_mib: int
    budget_mib: int
    figures: dict[str, float]
    copy_figures: dict[str, float]
    set_objects_before: int
    gets_per_mib_before: float
    gets_per_mib_after: float

    @property
    def mib_per_s(self) -> float:
        """MiB written by compaction in a second."""
        return self.figures["bytes_written"] / MIB / self.figures["seconds"]

    @property
    def copy_mib_per_s(self) -> float:
        """MiB copied in a second by the plain copy."""
        return self.copy_figures["bytes_written"] / MIB / self.copy_figures["seconds"]

    @property
    def added_mib(self) -> float:
        """What compaction took beside what the process had when it began, at its peak."""
        return self.figures["peak_resident_mib"] - self.figures["resident_before_mib"]

    @property
    def name(self) -> str:
        """How figures of this run are named."""
        return f"compaction_{self.total_mib}_mib_{self.budget_mib}_budget"


async def measure(root: Path, settings: Throughput, progress: Callable[[str], None]) -> Outcome:
    """Make every run, each in a directory of its own that is gone afterwards."""
    runs: list[Run] = []
    tables: list[Table] = []
    for total_mib, budget_mib in settings.runs():
        progress(f"compaction: {total_mib} MiB with a budget of {budget_mib} MiB")
        place = root / f"{total_mib}-{budget_mib}"
        runs.append(await _run(place, settings, total_mib, budget_mib))
        if settings.profile:
            tables += _profile_tables(place / "profile", runs[-1])
    return _outcome(settings, runs, tables)


async def _run(root: Path, settings: Throughput, total_mib: int, budget_mib: int) -> Run:
    config = WriterConfig(upload_bytes=BATCH_BYTES, split_bytes=2 * BATCH_BYTES, linger_s=600.0)
    async with running_place(root, settings.streams, config) as place:
        await _fill(place, settings, total_mib)
        step = max(1, settings.streams // READ_STREAMS)
        sample = place.stream_ids[::step]
        copied = await _probe(root, "--copy", "--store", place.store_uri)
        before, objects = await place.read(sample), len(await place.set_object_sizes())
        profile = ["--profile", str(root / "profile")] if settings.profile else []
        figures = await _probe(
            root,
            *("--endpoint", place.endpoint, "--store", place.store_uri),
            *("--node-id", str(NODE_ID), "--node-epoch", str(NODE_EPOCH)),
            *("--budget-mib", str(budget_mib), *profile),
        )
        after = await place.read(sample)
    require_same(before, after)
    return Run(
        total_mib=total_mib,
        budget_mib=budget_mib,
        figures=figures,
        copy_figures=copied,
        set_objects_before=objects,
        gets_per_mib_before=before.gets_per_mib,
        gets_per_mib_after=after.gets_per_mib,
    )


async def _fill(place: Place, settings: Throughput, total_mib: int) -> None:
    """Write streams whose rates fall with their rank, a batch at a time."""
    shares = 1 / np.arange(1, settings.streams + 1)
    shares /= shares.sum()
    batches = -(-total_mib * MIB // BATCH_BYTES)
    payload = random.Random(1).randbytes(settings.record_bytes)
    written = np.zeros(settings.streams, dtype=np.int64)
    for batch in range(1, batches + 1):
        until = (shares * batch * BATCH_BYTES / settings.record_bytes).astype(np.int64)
        acks: list[asyncio.Future[int]] = []
        for stream_id, count in zip(place.stream_ids, (until - written).tolist(), strict=True):
            if count:
                acks.append(await place.writer.append_many(stream_id, [payload] * count))
        await place.writer.flush()
        await asyncio.gather(*acks)
        written = until


async def _probe(root: Path, *arguments: str) -> dict[str, float]:
    child = start_child(
        "compaction probe",
        [sys.executable, "-m", "scripts.benchmarks.compaction_probe", *arguments],
        root / "probe.log",
    )
    try:
        said, _ = await asyncio.to_thread(child.process.communicate)
    finally:
        await asyncio.to_thread(child.stop)
    if child.process.returncode != 0:
        raise ChildFailedError(f"the compaction's measurement failed; its log:\n{child.log_tail()}")
    figures: dict[str, float] = json.loads(said)
    return figures


def _outcome(settings: Throughput, runs: Sequence[Run], profiles: Sequence[Table]) -> Outcome:
    figures: dict[str, float] = {}
    targets: list[Target] = []
    for run in runs:
        figures |= {
            f"{run.name}_mib_per_s": round(run.mib_per_s, 1),
            f"{run.name}_share_of_copy": round(run.mib_per_s / run.copy_mib_per_s, 3),
            f"{run.name}_peak_resident_mib": round(run.figures["peak_resident_mib"], 1),
            f"{run.name}_added_mib": round(run.added_mib, 1),
        }
        most = run.budget_mib * MOST_RESIDENT_OF_BUDGET
        targets.append(Target(f"{run.name}_added_mib", "at most", most, run.added_mib))
        if run.total_mib == LARGE_MIB:
            name, peak = f"{run.name}_peak_resident_mib", run.figures["peak_resident_mib"]
            targets.append(Target(name, "at most", MOST_RESIDENT_LARGE_MIB, peak))
    return Outcome(
        benchmark="compaction-throughput",
        settings=asdict(settings),
        figures=figures,
        details={"runs": [asdict(run) for run in runs]},
        tables=(_table(settings, runs), _work_table(runs), *targets_table(targets), *profiles),
    )


def _table(settings: Throughput, runs: Sequence[Run]) -> Table:
    columns = (
        *("MiB", "budget MiB", "MiB/s", "of a plain copy", "peak RSS MiB", "RSS before"),
        *("seconds", "user s", "system s", "set objects", "set / stream objects after"),
        *("cold GETs/MiB", "after"),
    )
    rows = tuple(
        (
            *(run.total_mib, run.budget_mib, round(run.mib_per_s, 1)),
            round(run.mib_per_s / run.copy_mib_per_s, 2),
            *(round(run.figures["peak_resident_mib"]), round(run.figures["resident_before_mib"])),
            *(round(run.figures[name], 1) for name in ("seconds", "user_s", "system_s")),
            run.set_objects_before,
            f"{run.figures['set_objects']:.0f} / {run.figures['stream_objects']:.0f}",
            *(run.gets_per_mib_before, run.gets_per_mib_after),
        )
        for run in runs
    )
    title = f"Compaction of {settings.streams} streams in a local directory, on one core"
    return Table(title=title, columns=columns, rows=rows)


def _work_table(runs: Sequence[Run]) -> Table:
    names = ("commits", "iterations", "gets", "puts", "multiparts", "parts")
    return Table(
        title="What it took",
        columns=(
            *("MiB", "budget MiB", "commits", "iterations", "GET", "PUT", "uploads in parts"),
            *("parts", "MiB read", "MiB written"),
        ),
        rows=tuple(
            (
                *(run.total_mib, run.budget_mib, *(int(run.figures[name]) for name in names)),
                *(round(run.figures[f"bytes_{name}"] / MIB) for name in ("read", "written")),
            )
            for run in runs
        ),
    )


def _profile_tables(profile: Path, run: Run) -> list[Table]:
    gib = run.total_mib / 1024
    packages, functions = costs_by_package(profile, gib), costs_by_function(profile, gib)
    title = f"Event loop of the compaction of {run.total_mib} MiB, budget {run.budget_mib} MiB"
    return [
        _profile_table(f"{title}, by package", packages),
        _profile_table(f"{title}, by function", functions),
    ]


def _profile_table(title: str, costs: Sequence[Cost]) -> Table:
    return Table(
        title=f"{title}; CPU for each GiB, under the profiler",
        columns=("where", "calls", "own ms", "share %"),
        rows=tuple(
            (cost.where, cost.calls, round(cost.own_us / 1000, 2), cost.share_percent)
            for cost in costs[:PROFILE_ROWS]
        ),
    )
