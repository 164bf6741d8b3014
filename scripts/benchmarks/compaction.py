"""What compaction costs and brings: requests, bytes, objects, reads, speed and memory.

Four parts: the example of the documentation and a stream's objects through a real controller, a day
of a busy node on a virtual clock, and runs in a process of their own.
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks import (
    compaction_example,
    compaction_stream_objects,
    compaction_throughput,
    compaction_workload,
)
from scripts.benchmarks.compaction_settings import Settings
from scripts.benchmarks.figures import Outcome


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> list[Outcome]:
    """Measure all parts."""
    return [
        await compaction_example.measure(root / "example", settings.example, progress),
        await compaction_stream_objects.measure(
            root / "stream-objects", settings.stream_objects, progress
        ),
        await _day(settings, progress),
        await compaction_throughput.measure(root / "throughput", settings.throughput, progress),
    ]


async def _day(settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure the day in a thread, which ends soon after the wait for it was given up."""
    is_over = threading.Event()

    def say(text: str) -> None:
        if is_over.is_set():
            raise InterruptedError("the measurement was given up")
        progress(text)

    try:
        return await asyncio.to_thread(compaction_workload.measure, settings.workload, say)
    finally:
        is_over.set()
