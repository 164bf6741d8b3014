"""Sampling of a controller's states and counters for its history, and of the event loop's lag.

Rates and quantiles cover the time since the previous sample. Only cheap values are read, because
sampling runs every second for the lifetime of the process. The lag is how late a timer fires, ten
times a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram

from streammeta.controller.monitoring.history.history import Fold, History, Series
from streammeta.controller.monitoring.metrics.metrics import Sources
from streammeta.controller.runtime.replication.operations import QuorumDescription
from streammeta.controller.timings import quantile_s

INTERVAL_S = 1.0
"""Seconds between two samples."""

SERIES: Sequence[Series] = (
    Series("commits_accepted", "1/s"),
    Series("commits_refused", "1/s"),
    Series("commit_p50", "ms"),
    Series("commit_p99", "ms", Fold.MAX),
    Series("calls_refused", "1/s"),
    Series("entries_committed", "1/s"),
    Series("voter_lag", "entries", Fold.MAX),
    Series("apply_lag", "entries", Fold.MAX),
    Series("has_leader", ""),
    Series("is_leader", ""),
    Series("epoch", "", Fold.MAX),
    Series("streams", ""),
    Series("nodes", ""),
    Series("keys", ""),
    Series("objects_prepared", ""),
    Series("objects_committed", ""),
    Series("objects_destroyed", ""),
    Series("set_objects", ""),
    Series("object_bytes", "B"),
    Series("deletions_in_flight", ""),
    Series("deletions_stuck", "", Fold.MAX),
    Series("deletions_unbacked", "", Fold.MAX),
    Series("backup_lag", "s", Fold.MAX),
    Series("loop_lag", "ms", Fold.MAX),
    Series("cpu", "%"),
    Series("memory", "B", Fold.MAX),
    Series("request_memory", "B", Fold.MAX),
)
"""Series of the history. Counters are stored as rates. Only a leader knows some of the lags."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters at one time. Differences of two give the events between them."""

    time_s: float
    accepted: int
    refused: int
    calls_refused: int
    high_watermark: int
    cpu_s: float
    times: tuple[int, ...]


class Sampler:
    """Sampler that fills a history."""

    def __init__(
        self,
        sources: Sources,
        *,
        loop_lag: Callable[[], float],
        memory: Callable[[], int],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`loop_lag` returns the lag since its last call in seconds, `memory` bytes."""
        self.history = History(SERIES)
        self._sources = sources
        self._loop_lag = loop_lag
        self._memory = memory
        self._wall_s = wall_s
        # Rates start now. Counters from before would show as one huge first sample.
        self._before = self._totals()

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Add a sample of the current values."""
        now = self._totals()
        # No await in between, so that rates and states are of the same time.
        values = {**_rates(self._before, now), **self._state()}
        self.history.add(self._wall_s(), values)
        self._before = now

    def _totals(self) -> Totals:
        sources = self._sources
        return Totals(
            # The wall clock may be set back, and rates need a positive interval.
            time_s=time.monotonic(),
            accepted=sources.commits.accepted,
            refused=sources.commits.refused,
            calls_refused=sum(sources.refused_calls.values()),
            high_watermark=sources.quorum().high_watermark,
            cpu_s=time.process_time(),
            times=tuple(sources.commits.times),
        )

    def _state(self) -> Mapping[str, float]:
        sources = self._sources
        quorum, size, deletion = sources.quorum(), sources.metadata_size(), sources.deletion()

        backup = sources.backup()
        return {
            "voter_lag": voter_lag(quorum),
            "apply_lag": max(0, quorum.high_watermark - sources.applied()),
            "has_leader": quorum.has_leader,
            "is_leader": quorum.role == "leader",
            "epoch": quorum.epoch,
            "streams": size.streams,
            "nodes": size.nodes,
            "keys": size.keys,
            "objects_prepared": size.prepared_objects,
            "objects_committed": size.committed_objects,
            "objects_destroyed": size.destroyed_objects,
            "set_objects": size.stream_set_objects,
            "object_bytes": size.committed_bytes,
            "deletions_in_flight": deletion.in_flight,
            "deletions_stuck": deletion.stuck,
            "deletions_unbacked": deletion.unbacked,
            # Zero would claim that the backup is complete.
            "backup_lag": math.nan if backup is None else backup.behind_ms / 1000,
            "loop_lag": 1000 * self._loop_lag(),
            "memory": self._memory(),
            "request_memory": sources.request_bytes(),
        }


def voter_lag(quorum: QuorumDescription) -> float:
    """Return how many entries the slowest voter is missing, NaN unless this node leads."""
    if quorum.role != "leader":
        return math.nan
    # A new leader has not heard of every voter yet.
    ends = [voter.end_offset for voter in quorum.voters if voter.end_offset is not None]
    return max((quorum.end_offset - end for end in ends), default=math.nan)


def _rates(before: Totals, now: Totals) -> Mapping[str, float]:
    # Two samples of a stalled loop may follow each other at once.
    passed_s = max(now.time_s - before.time_s, 1e-3)
    times = [late - early for late, early in zip(now.times, before.times, strict=True)]
    return {
        "commits_accepted": (now.accepted - before.accepted) / passed_s,
        "commits_refused": (now.refused - before.refused) / passed_s,
        "calls_refused": (now.calls_refused - before.calls_refused) / passed_s,
        # A node that begins with a snapshot or a restore may report a lower end than before.
        "entries_committed": max(0, now.high_watermark - before.high_watermark) / passed_s,
        "cpu": 100 * (now.cpu_s - before.cpu_s) / passed_s,
        "commit_p50": 1000 * quantile_s(times, 0.5),
        "commit_p99": 1000 * quantile_s(times, 0.99),
    }


LAG_INTERVAL_S = 0.1
"""Time between two measurements, in seconds."""

LAG_BUCKETS = tuple(0.0005 * 2**power for power in range(16))
"""Bounds in seconds: from 0.5 ms on, each twice the one before."""


class LoopLag:
    """Histogram of the lag."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen = Histogram(
            "streammeta_loop_lag_seconds",
            "Time by which a timer of the event loop is late, measured ten times a second.",
            buckets=LAG_BUCKETS,
            registry=registry,
        )
        self._worst_s = 0.0

    def take_worst_s(self) -> float:
        """Return the largest lag since the last call, in seconds."""
        # Reset with each sample, so that every second of the history has its own maximum.
        worst, self._worst_s = self._worst_s, 0.0
        return worst

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            # Due times do not accumulate: after a long stall the next measurement begins afresh.
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            late_s = max(0.0, loop.time() - due)
            self._worst_s = max(self._worst_s, late_s)
            self._seen.observe(late_s)
