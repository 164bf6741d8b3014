"""Runs many seeds, in this process or in several, and adds up what came of them."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streammeta.cli.local.local_cluster import start_child
from tests.sim.sim_run import Failure, simulate

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "simulate"
_CHUNKS_PER_JOB = 3
_CHUNK_MIN = 25


@dataclass
class Summary:
    """What came of some seeds; `seconds` are of one core's time, if run in one process."""

    seeds: int = 0
    events: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Summary) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.seconds += other.seconds
        self.counts += other.counts
        self.failures += other.failures

    def to_json(self) -> str:
        fields = {
            "seeds": self.seeds,
            "failed": len(self.failures),
            "events": self.events,
            "seconds": round(self.seconds, 3),
            "events_per_second": round(self.events / self.seconds) if self.seconds else 0,
            "counts": dict(sorted(self.counts.items())),
            "failures": [vars(failure) for failure in self.failures],
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Summary:
        fields: dict[str, Any] = json.loads(text)
        failures = [
            Failure(item["seed"], item["profile"], item["invariant"], tuple(item["trace"]))
            for item in fields["failures"]
        ]
        return cls(
            fields["seeds"],
            fields["events"],
            fields["seconds"],
            Counter(fields["counts"]),
            failures,
        )


def run_seeds(
    seeds: Iterable[int], profile: str, on_failure: Callable[[Failure], None] | None = None
) -> Summary:
    summary = Summary()
    started = time.monotonic()
    for seed in seeds:
        outcome = simulate(seed, profile)
        summary.seeds += 1
        summary.events += outcome.events
        summary.counts += outcome.counts
        if outcome.failure is not None:
            summary.failures.append(outcome.failure)
            if on_failure is not None:
                on_failure(outcome.failure)
    summary.seconds = time.monotonic() - started
    return summary


def run_in_parallel(
    seeds: range, profile: str, jobs: int, on_chunk: Callable[[Summary], None] | None = None
) -> Summary:
    """Run seeds in `jobs` processes, which end with this one; `seconds` are those of the clock."""
    size = max(_CHUNK_MIN, -(-len(seeds) // (jobs * _CHUNKS_PER_JOB)))
    chunks = [seeds[at : at + size] for at in range(0, len(seeds), size)]
    summary = Summary()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(jobs) as pool:
        log = Path(directory) / "errors"
        for part in pool.map(lambda chunk: _run_chunk(chunk, profile, log), chunks):
            summary.add(part)
            if on_chunk is not None:
                on_chunk(part)
    summary.seconds = time.monotonic() - started
    return summary


def _run_chunk(seeds: range, profile: str, log: Path) -> Summary:
    command = [sys.executable, str(_SCRIPT), "--seeds", f"{seeds.start}:{seeds.stop}"]
    command += ["--profile", profile, "--jobs", "1", "--format", "json"]
    process = start_child("simulate", command, log).process
    output, _ = process.communicate()
    try:
        return Summary.from_json(output)
    except ValueError:
        errors = log.read_text() if log.exists() else ""
        raise RuntimeError(
            f"seeds {seeds.start}:{seeds.stop} ended with exit code {process.returncode} and "
            f"no result: {errors[-2000:]}"
        ) from None
