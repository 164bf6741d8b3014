"""Speed and memory of compaction, in a separate process and on one core.

Streams of very different rates are written through a controller to a local directory and compacted
at once, with different budgets. A plain copy of the same objects shows the directory's speed.
"""

import asyncio
import cProfile
import os
import random
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.client_place import (
    MIB,
    NODE_EPOCH,
    NODE_ID,
    Place,
    require_same,
    running_place,
)
from scripts.benchmarks.committer import LoadError
from scripts.benchmarks.figures import Outcome, Progress, Table, Target
from scripts.benchmarks.processes import run_worker, status_bytes
from scripts.benchmarks.thread_profile import costs_by_function, costs_by_package
from streammeta.client import WriterConfig
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.report import CompactionReport
from streammeta.client.compaction.sso_compactor import SetObjectCompactor
from streammeta.client.parts import ControllerClient
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectStore

LARGE_MIB = 10 * 1024
LARGE_BUDGET_MIB = 200
MOST_RESIDENT_LARGE_MIB = 300.0
MOST_RESIDENT_OF_BUDGET = 1.2
BATCH_BYTES = 16 * MIB
READ_STREAMS = 20
"""Streams that are read cold, before and after."""
PROFILE_ROWS = 15
COPY_KEY = "copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Data to compact, and memory budgets."""

    streams: int = 200
    record_bytes: int = 16 * 1024
    total_mib: int = 1024
    budgets_mib: tuple[int, ...] = (64, 200)
    large: bool = False
    profile: bool = False

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield MiB written and budget of each run."""
        yield from ((self.total_mib, budget) for budget in self.budgets_mib)
        if self.large:
            yield LARGE_MIB, LARGE_BUDGET_MIB


async def measure(root: Path, settings: Throughput, progress: Progress) -> Outcome:
    """Make every run, each in its own directory."""
    runs: list[dict[str, Any]] = []
    tables: list[Table] = []
    for total_mib, budget_mib in settings.runs():
        progress(f"compaction: {total_mib} MiB with a budget of {budget_mib} MiB")
        place = root / f"{total_mib}-{budget_mib}"
        runs.append(await _run(place, settings, total_mib, budget_mib))
        if settings.profile:
            tables += _profile_tables(place / "profile", runs[-1])
    return _outcome(settings, runs, tables)


async def _run(root: Path, settings: Throughput, total_mib: int, budget_mib: int) -> dict[str, Any]:
    config = WriterConfig(upload_bytes=BATCH_BYTES, split_bytes=2 * BATCH_BYTES, linger_s=600.0)
    async with running_place(root, settings.streams, config) as place:
        await _fill(place, settings, total_mib)
        sample = place.stream_ids[:: max(1, settings.streams // READ_STREAMS)]
        log = root / "probe.log"
        copied = await run_worker(log, copy_objects, store_uri=place.store_uri)
        before, objects = await place.read(sample), await place.set_object_count()
        figures = await run_worker(
            log,
            compact_node,
            store_uri=place.store_uri,
            endpoint=place.endpoint,
            budget_mib=budget_mib,
            profile=root / "profile" if settings.profile else None,
        )
        after = await place.read(sample)
    require_same(before, after)
    mib_per_s = figures["bytes_written"] / MIB / figures["seconds"]

    return {
        "total_mib": total_mib,
        "budget_mib": budget_mib,
        "figures": figures,
        "copy_figures": copied,
        "set_objects_before": objects,
        "gets_per_mib_before": before.gets_per_mib,
        "gets_per_mib_after": after.gets_per_mib,
        "mib_per_s": mib_per_s,
        "share_of_copy": mib_per_s / (copied["bytes_written"] / MIB / copied["seconds"]),
        # Growth of the process from the beginning of compaction to its peak.
        "added_mib": figures["peak_resident_mib"] - figures["resident_before_mib"],
    }


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


def copy_objects(*, store_uri: str) -> dict[str, float]:
    """Copy every object of a store and delete the copy, on one core; return bytes and seconds."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    store, copied, began = open_object_store(store_uri), 0, time.monotonic()
    for info in list(store.list_objects()):
        data = bytearray(info.size)
        store.read_into(info.key, 0, [memoryview(data)])
        store.put(COPY_KEY, data)
        copied += info.size
    store.delete_many([COPY_KEY])
    return {"bytes_written": copied, "seconds": time.monotonic() - began}


def compact_node(
    *, store_uri: str, endpoint: str, budget_mib: int, profile: str | None
) -> dict[str, float]:
    """Compact all SSOs of the node, as many together as a group may have, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    store, before = open_object_store(store_uri), resource.getrusage(resource.RUSAGE_SELF)
    work = _compact(store, endpoint, budget_mib)
    if profile is None:
        report, resident_before = asyncio.run(work)
    else:
        # CPU time of the event loop's thread, because waiting is not work.
        profiler = cProfile.Profile(time.thread_time)
        report, resident_before = profiler.runcall(asyncio.run, work)
        profiler.dump_stats(profile)
    if report.failures or report.left_out:
        raise LoadError(f"compaction failed: {report.failures}, left out: {report.left_out}")

    after, done = resource.getrusage(resource.RUSAGE_SELF), report.figures
    names = ("bytes_read", "bytes_written", "gets", "puts", "multiparts", "parts")
    figures = {name: getattr(done, name) for name in (*names, "iterations", "commits")} | {
        "seconds": report.seconds,
        "sources": sum(len(group.source_ids) for group in report.groups),
        "set_objects": sum(len(group.set_object_ids) for group in report.groups),
        "stream_objects": sum(len(group.stream_object_ids) for group in report.groups),
        "resident_before_mib": resident_before / MIB,
        "user_s": after.ru_utime - before.ru_utime,
        "system_s": after.ru_stime - before.ru_stime,
        "peak_resident_mib": status_bytes("VmHWM") / MIB,
    }
    return {name: round(value, 3) for name, value in figures.items()}


async def _compact(
    store: ObjectStore, endpoint: str, budget_mib: int
) -> tuple[CompactionReport, int]:
    """Return the report, and the process's memory once everything was loaded and connected."""
    target = CompactionTarget(NODE_ID, NODE_EPOCH)
    config = CompactionConfig(memory_budget=budget_mib * MIB, selection=SelectionConfig(growth=1))
    async with ControllerClient([endpoint]) as client:
        namespace = await client.object_namespace()
        compactor = SetObjectCompactor(client, target.identity, namespace, store, config)
        try:
            # Imports, connections and the plan are not part of the memory of compaction.
            await compactor.plan(target)
            resident_before = status_bytes("VmRSS")
            return await compactor.run_once(target), resident_before
        finally:
            compactor.close()


def _outcome(
    settings: Throughput, runs: Sequence[Mapping[str, Any]], profiles: Sequence[Table]
) -> Outcome:
    figures: dict[str, float] = {}
    targets: list[Target] = []
    for run in runs:
        name = f"compaction_{run['total_mib']}_mib_{run['budget_mib']}_budget"
        peak_mib = run["figures"]["peak_resident_mib"]
        figures |= {
            f"{name}_mib_per_s": round(run["mib_per_s"], 1),
            f"{name}_share_of_copy": round(run["share_of_copy"], 3),
            f"{name}_peak_resident_mib": round(peak_mib, 1),
            f"{name}_added_mib": round(run["added_mib"], 1),
        }
        most = run["budget_mib"] * MOST_RESIDENT_OF_BUDGET
        targets.append(Target(f"{name}_added_mib", "at most", most, run["added_mib"]))
        if run["total_mib"] == LARGE_MIB:
            peak = f"{name}_peak_resident_mib"
            targets.append(Target(peak, "at most", MOST_RESIDENT_LARGE_MIB, peak_mib))
    rows = [
        {
            **run["figures"],
            **run,
            "objects": f"{run['figures']['set_objects']} / {run['figures']['stream_objects']}",
            "mib_read": run["figures"]["bytes_read"] / MIB,
            "mib_written": run["figures"]["bytes_written"] / MIB,
        }
        for run in runs
    ]
    speed = Table.of(
        f"Compaction of {settings.streams} streams in a local directory, on one core",
        rows,
        "MiB = total_mib | budget MiB = budget_mib | MiB/s = mib_per_s"
        " | of a plain copy = share_of_copy | peak RSS MiB = peak_resident_mib"
        " | RSS before = resident_before_mib | seconds | user s = user_s | system s = system_s"
        " | SSOs = set_objects_before | SSOs / stream objects after = objects"
        " | cold GETs/MiB = gets_per_mib_before | GETs/MiB after = gets_per_mib_after",
    )
    requests = Table.of(
        "Requests and bytes",
        rows,
        "MiB = total_mib | budget MiB = budget_mib | commits | iterations | GET = gets | PUT = puts"
        " | uploads in parts = multiparts | parts | MiB read = mib_read"
        " | MiB written = mib_written",
    )

    return Outcome(
        benchmark="compaction-throughput",
        settings=asdict(settings),
        figures=figures,
        details={"runs": runs},
        tables=[speed, requests, *profiles],
        targets=targets,
    )


def _profile_tables(profile: Path, run: Mapping[str, Any]) -> Iterator[Table]:
    gib = run["total_mib"] / 1024
    sizes = f"{run['total_mib']} MiB, budget {run['budget_mib']} MiB"
    for name, costs in (
        ("package", costs_by_package(profile, gib)),
        ("function", costs_by_function(profile, gib)),
    ):
        yield Table.of(
            f"Event loop of the compaction of {sizes}, by {name}; CPU for each GiB, profiled",
            costs[:PROFILE_ROWS],
            "where | calls | own us = own_us | share % = share_percent",
        )
