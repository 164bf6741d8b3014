"""How fast the quorum's simulator goes over a fixed range of seeds.

`scripts/simulate` says how many events there were; time and CPU are measured here, with its start.
"""

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks.figures import Outcome, Table
from streammeta.cli.local_cluster import start_child

SIMULATE = Path(__file__).resolve().parent.parent / "simulate"
TIMEOUT_S = 900.0
_RESULT = re.compile(r"(?P<events>\d+) events in [\d.]+ s")


class SimulatorError(Exception):
    """The simulator failed, took too long, or printed something else than it used to."""


async def measure(root: Path, seeds: str, progress: Callable[[str], None]) -> Outcome:
    """Run the simulator once over `seeds`, given as FROM:TO."""
    progress(f"simulator: seeds {seeds}")
    child = start_child(
        "simulator", [sys.executable, str(SIMULATE), "--seeds", seeds], root / "simulate.log"
    )
    began, cpu_s = time.monotonic(), _children_cpu_s()
    try:
        said, _ = await asyncio.to_thread(child.process.communicate, None, TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SimulatorError(
            f"scripts/simulate --seeds {seeds} was not done after {TIMEOUT_S:.0f} s; try fewer"
        ) from None
    finally:
        if child.is_running:
            os.killpg(child.pid, signal.SIGTERM)  # with the processes it runs seeds in
        child.stop()
    seconds, cpu_s = time.monotonic() - began, _children_cpu_s() - cpu_s
    found = _RESULT.search(said)
    if child.process.returncode != 0 or found is None:
        raise SimulatorError(
            f"scripts/simulate --seeds {seeds} ended with exit code {child.process.returncode}; "
            f"it said:\n{said[-2000:]}{child.log_tail()}"
        )
    events = int(found["events"])
    per_s, per_cpu_s = round(events / seconds, 1), round(events / cpu_s, 1)
    return Outcome(
        benchmark="simulator",
        settings={"seeds": seeds, "profile": "swarm"},
        figures={"simulator_events_per_s": per_s, "simulator_events_per_cpu_s": per_cpu_s},
        details={"events": events, "seconds": round(seconds, 1), "cpu_s": round(cpu_s, 1)},
        tables=(
            Table(
                title=f"Simulator, seeds {seeds}, every invariant checked after every event",
                columns=("events", "seconds", "events/s", "CPU seconds", "events/CPU s"),
                rows=((events, round(seconds, 1), per_s, round(cpu_s, 1), per_cpu_s),),
            ),
        ),
    )


def _children_cpu_s() -> float:
    """Return the CPU time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
