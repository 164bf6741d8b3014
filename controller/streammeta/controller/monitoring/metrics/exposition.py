"""Metrics as text, written in pieces so that a scrape never holds the event loop for long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def new_registry(collector: Collector) -> CollectorRegistry:
    """Return a registry of the metrics of a collector, the process and the interpreter."""
    # A `_created` series for each counter would double the number of series.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class Exposition:
    """The text of a registry; callers that come while it is written share it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._writing: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """Return all metrics as of now, in the format that `CONTENT_TYPE` names."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        # A scrape that times out must not cancel the text that others wait for.
        return await asyncio.shield(self._writing)

    async def _write(self) -> bytes:
        parts = []
        for metric in self._registry.collect():
            parts.append(generate_latest(_One(metric)))
            # Lets commits and heartbeats run between two families.
            await asyncio.sleep(0)
        return b"".join(parts)


class _One(Collector):
    """A metric that has been collected."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        yield self._metric
