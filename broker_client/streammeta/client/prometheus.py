"""Metrics of a client for a registry of prometheus_client.

The only module of the client that needs the package. Import it where there is a registry. Reads the
counters at each scrape, and costs nothing between scrapes. No label names a stream, object or node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from streammeta.client.resources.tally import BOUNDS_S, ClientMetrics, TimesSeen
from streammeta.storage.installation import optional_packages

with optional_packages("a collector of the client's metrics"):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector

_PREFIX = "streammeta_client_"


class ClientCollector(Collector):
    """Exports the metrics of one client. `metrics` is `client.metrics`.

    Register it once for a process: `registry.register(ClientCollector(client.metrics))`.
    """

    def __init__(self, metrics: Callable[[], ClientMetrics]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current values."""
        # One snapshot for all families, so they are consistent.
        seen = self._metrics()
        yield from _of_writes(seen)
        yield from _of_calls(seen)
        yield from _of_reads(seen)
        yield from _of_log(seen)


def _of_writes(seen: ClientMetrics) -> Iterator[Metric]:
    yield _count("appends", "Accepted appends.", seen.appends)
    yield _count("append_records", "Appended records, one for each offset.", seen.append_records)
    yield _count("append_bytes", "Encoded size of the appended records.", seen.append_bytes)
    yield GaugeMetricFamily(
        f"{_PREFIX}buffered_bytes",
        "Memory of records that are neither committed nor failed.",
        value=seen.buffered_bytes,
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}oldest_unsettled_age_seconds",
        "Time since the oldest batch that is neither committed nor failed was sealed, 0 without"
        " one.",
        value=seen.oldest_unsettled_s,
    )
    yield _counter(
        "uploads",
        "Attempts to store an object, by result. A retry counts again.",
        "result",
        seen.uploads.items(),
    )
    yield _count("upload_bytes", "Size of the stored objects.", seen.upload_bytes)
    yield _histogram(
        "upload_duration_seconds",
        "Time to store an object, retries of the store's client included.",
        [],
        [([], seen.upload_times)],
    )
    yield _histogram(
        "commit_duration_seconds",
        "Time from the submission of a commit to its verdict. Unanswered commits had no verdict in"
        " time. Refused commits were rejected in full or in part.",
        ["verdict"],
        [([verdict], times) for verdict, times in seen.commits.items()],
    )


def _of_calls(seen: ClientMetrics) -> Iterator[Metric]:
    yield _counter(
        "retries",
        "Retries by reason: calls to controllers, uploads (upload), uploads under new ids"
        " (upload_anew), and reads of tails (tail).",
        "reason",
        seen.retries.items(),
    )
    yield _count(
        "leader_changes",
        "Number of times that another controller answered as the leader.",
        seen.leader_changes,
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}leader_silent_seconds",
        "Time for which calls to the leader have failed without an answer, 0 after an answer.",
        value=seen.leader_silent_s,
    )
    yield _count(
        "watch_restarts",
        "Number of times that a watch of the metadata was restarted.",
        seen.watch_restarts,
    )


def _of_reads(seen: ClientMetrics) -> Iterator[Metric]:
    yield _counter(
        "cache_hits",
        "Blocks and indexes of objects, and ranges of the metadata, that a read found in memory.",
        "cache",
        seen.cache_hits.items(),
    )
    yield _counter(
        "cache_misses",
        "Blocks, indexes and ranges that a read had to request.",
        "cache",
        seen.cache_misses.items(),
    )
    yield _count("fetches", "Requests of reads to the bucket.", seen.fetches)
    yield _count("fetched_bytes", "Bytes that reads fetched from the bucket.", seen.fetched_bytes)
    yield _counter(
        "store_requests",
        "All requests to the bucket by kind: put, get, list and delete, retries included.",
        "kind",
        seen.store_requests.items(),
    )


def _of_log(seen: ClientMetrics) -> Iterator[Metric]:
    yield _count("log_bytes", "Bytes made durable in the write-ahead log.", seen.log_bytes)
    yield _count("log_flushes", "Flushes of a log on a disk.", seen.log_flushes)
    yield _count("log_slots", "Stored objects of a log in the bucket.", seen.log_slots)
    yield GaugeMetricFamily(
        f"{_PREFIX}log_used_bytes",
        "Size of the write-ahead log's records that are not committed yet.",
        value=seen.log_used_bytes,
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}log_limit_bytes",
        "Limit of streammeta_client_log_used_bytes, 0 without a log.",
        value=seen.log_limit_bytes,
    )


def _count(name: str, text: str, number: int) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=number)


def _counter(name: str, text: str, label: str, rows: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for of_label, number in rows:
        family.add_metric([of_label], number)
    return family


def _histogram(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], TimesSeen]]
) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, text, labels=labels)
    for of_labels, times in rows:
        below = 0
        buckets = []
        for bound, count in zip((*BOUNDS_S, None), times.counts, strict=True):
            # Buckets are cumulative in Prometheus.
            below += count
            buckets.append(("+Inf" if bound is None else f"{bound:.6g}", float(below)))
        family.add_metric(of_labels, buckets, times.sum_s)
    return family
