"""Speed of the quorum's simulator over a range of seeds.

`scripts/simulate` reports the number of events. Time and CPU are measured here, from its start.
"""

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.figures import BenchmarkError, Outcome, Progress, Table
from scripts.benchmarks.options import option
from scripts.benchmarks.processes import running

SIMULATE = Path(__file__).resolve().parent.parent / "simulate"
TIMEOUT_S = 900.0
_RESULT = re.compile(r"(?P<events>\d+) events in [\d.]+ s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Seeds, as FROM:TO."""

    seeds: str = option("0:200", "seeds, as FROM:TO")


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Run the simulator once over all seeds."""
    seeds = settings.seeds
    progress(f"simulator: seeds {seeds}")
    command = [sys.executable, str(SIMULATE), "--seeds", seeds]
    began, cpu_s = time.monotonic(), _children_cpu_s()
    async with running("simulator", command, root / "simulate.log") as child:
        try:
            said, _ = await asyncio.to_thread(child.process.communicate, None, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(
                f"scripts/simulate --seeds {seeds} ran longer than {TIMEOUT_S:.0f} s; try fewer"
            ) from None
        finally:
            if child.is_running:
                os.killpg(child.pid, signal.SIGTERM)  # with the processes that run seeds
    seconds, cpu_s = time.monotonic() - began, _children_cpu_s() - cpu_s

    found = _RESULT.search(said)
    if child.process.returncode != 0 or found is None:
        raise BenchmarkError(
            f"scripts/simulate --seeds {seeds} ended with exit code {child.process.returncode}; "
            f"its output:\n{said[-2000:]}{child.log_tail()}"
        )
    events = int(found["events"])
    per_s, per_cpu_s = round(events / seconds, 1), round(events / cpu_s, 1)
    return Outcome(
        benchmark="simulator",
        settings={"profile": "swarm"},
        figures={"simulator_events_per_s": per_s, "simulator_events_per_cpu_s": per_cpu_s},
        details={"events": events, "seconds": round(seconds, 1), "cpu_s": round(cpu_s, 1)},
        tables=[
            Table(
                title=f"Simulator, seeds {seeds}, every invariant checked after every event",
                columns=("events", "seconds", "events/s", "CPU seconds", "events/CPU s"),
                rows=((events, round(seconds, 1), per_s, round(cpu_s, 1), per_cpu_s),),
            )
        ],
    )


def _children_cpu_s() -> float:
    """Return the CPU time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
