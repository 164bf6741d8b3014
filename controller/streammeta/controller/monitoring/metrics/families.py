"""Metric families, built at a scrape from existing values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from streammeta.controller.timings import PER_DOUBLING, Times, bound_s

PREFIX = "streammeta_"

Rows: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""Label values, and the value of their series."""

FINE = tuple(range(36, 97, PER_DOUBLING))
"""Classes of `Times` that end a bucket: from half a millisecond to 17 s, each twice the last."""

COARSE = tuple(range(36, 97, 3 * PER_DOUBLING))
"""Ends of wider buckets, each eight times the last: for histograms of many series."""


def value(name: str, text: str, number: float) -> Metric:
    """Return a gauge with one series."""
    return gauge(name, text, [], [([], number)])


def gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Return a gauge. Label names are in the order of their values."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, float(number))
    return family


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
