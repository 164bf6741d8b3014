"""Lag of the event loop: how late a timer fires, ten times a second."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Histogram

INTERVAL_S = 0.1
"""Time between two measurements, in seconds."""

BUCKETS = tuple(0.0005 * 2**power for power in range(16))
"""Bounds in seconds: from 0.5 ms on, each twice the one before."""


class LoopLag:
    """Histogram of the lag."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen = Histogram(
            "streammeta_loop_lag_seconds",
            "Time by which a timer of the event loop is late, measured ten times a second.",
            buckets=BUCKETS,
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
            due = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            late_s = max(0.0, loop.time() - due)
            self._worst_s = max(self._worst_s, late_s)
            self._seen.observe(late_s)
