"""Prometheus: metric families built at a scrape from existing values, and their text.

The text is written in pieces, so that a scrape never blocks the event loop for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import prometheus_client as prometheus
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from streammeta.controller.timings import PER_DOUBLING, Times, bound_s

PREFIX = "streammeta_"

Rows: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""Label values, and the value of their series."""

FINE = tuple(range(36, 97, PER_DOUBLING))
"""Classes of `Times` that end a bucket: from half a millisecond to 17 s, each twice the last."""

COARSE = tuple(range(36, 97, 3 * PER_DOUBLING))
"""Ends of wider buckets, each eight times the last: for histograms of many series."""


def value(name: str, text: str, number: float | None) -> Metric:
    """Return a gauge with one series, none if the number is None."""
    return GaugeMetricFamily(PREFIX + name, text, value=number)


def total(name: str, text: str, number: float | None) -> Metric:
    """Return a counter with one series, none if the number is None. `name` is without `_total`."""
    return CounterMetricFamily(PREFIX + name, text, value=number)


def gauge(name: str, text: str, label: str, numbers: Mapping[str, float]) -> Metric:
    """Return a gauge with one series for each value of its label."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for label_value, number in numbers.items():
        family.add_metric([label_value], float(number))
    return family


def counter_by(name: str, text: str, label: str, numbers: Mapping[str, float]) -> Metric:
    """Return a counter with one series for each value of its label."""
    return counter(name, text, [label], [([key], number) for key, number in numbers.items()])


def counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Return a counter. `name` is without `_total`."""
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, float(number))
    return family


def histogram(
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Times]],
    ends: Sequence[int] = FINE,
) -> Metric:
    """Return a histogram in seconds. `ends` are the classes of times that end a bucket."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for values, times in rows:
        family.add_metric(values, _buckets(times.counts, ends), times.sum_s)
    return family


def _buckets(counts: Sequence[int], ends: Sequence[int]) -> list[tuple[str, float]]:
    sums, below, begin = [], 0, 0
    for end in ends:
        # Buckets of Prometheus are cumulative, and each class is summed only once.
        below += sum(counts[begin : end + 1])
        begin = end + 1
        # Six digits: a bound printed differently by another version would be a new series.
        sums.append((f"{bound_s(end):.6g}", float(below)))
    return [*sums, ("+Inf", float(sum(counts)))]


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def new_registry(collector: Collector) -> prometheus.CollectorRegistry:
    """Return a registry of the metrics of a collector, the process and the interpreter."""
    # A `_created` series for each counter would double the number of series.
    prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    prometheus.ProcessCollector(registry=registry)
    prometheus.PlatformCollector(registry=registry)
    prometheus.GCCollector(registry=registry)
    return registry


class Exposition:
    """The text of a registry; callers that come while it is written share it."""

    def __init__(self, registry: prometheus.CollectorRegistry) -> None:
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
            parts.append(prometheus.generate_latest(_One(metric)))
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
