"""Costs and benefits of compaction: requests, bytes, objects, reads, speed and memory.

Four parts: the example of the documentation and a stream's objects through a real controller, a day
of a busy node on a virtual clock, and runs in a separate process.
"""

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks import (
    compaction_example,
    compaction_stream_objects,
    compaction_throughput,
    compaction_workload,
)
from scripts.benchmarks.compaction_throughput import LARGE_BUDGET_MIB, LARGE_MIB
from scripts.benchmarks.figures import Outcome, Progress
from scripts.benchmarks.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Length of the day, and runs for speed and memory."""

    hours: int = option(26, "hours of a busy node on a virtual clock")
    total_mib: int = option(1024, "MiB that are written and compacted")
    budgets_mib: tuple[int, ...] = option((64, 200), "memory budgets to compact with, in MiB")
    large: bool = option(False, f"compact {LARGE_MIB:,} MiB with {LARGE_BUDGET_MIB} MiB too")
    profile: bool = option(False, "profile the event loop too")


async def measure(root: Path, settings: Settings, progress: Progress) -> list[Outcome]:
    """Measure all parts."""
    throughput = compaction_throughput.Throughput(
        total_mib=settings.total_mib,
        budgets_mib=settings.budgets_mib,
        large=settings.large,
        profile=settings.profile,
    )
    workload = compaction_workload.Workload(hours=settings.hours)

    return [
        await compaction_example.measure(root / "example", compaction_example.Example(), progress),
        await compaction_stream_objects.measure(
            root / "stream-objects", compaction_stream_objects.StreamObjects(), progress
        ),
        await _measure_day(workload, progress),
        await compaction_throughput.measure(root / "throughput", throughput, progress),
    ]


async def _measure_day(workload: compaction_workload.Workload, progress: Progress) -> Outcome:
    stop = threading.Event()
    try:
        return await asyncio.to_thread(compaction_workload.measure, workload, progress, stop)
    finally:
        # A thread can't be cancelled, so it ends at its next report of progress.
        stop.set()
