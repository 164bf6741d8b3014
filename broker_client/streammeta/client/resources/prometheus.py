"""What a client counts, as metrics for a registry of prometheus_client.

The one module of the client that needs the package; import it where there is a registry. Reads the
counts at each scrape, and pays nothing between two. No label names a stream, an object or a node.
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
    """Gives the metrics of one client; `metrics` is `client.metrics`.

    Register it once for a process: `registry.register(ClientCollector(client.metrics))`.
    """

    def __init__(self, metrics: Callable[[], ClientMetrics]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its values of now."""
        seen = self._metrics()
        yield from _of_writes(seen)
        yield from _of_calls(seen)
        yield from _of_reads(seen)
        yield from _of_log(seen)


def _of_writes(seen: ClientMetrics) -> Iterator[Metric]:
    yield _count("appends", "Appends taken.", seen.appends)
    yield _count("append_records", "Records of these, one for each offset.", seen.append_records)
    yield _count("append_bytes", "Their size as encoded.", seen.append_bytes)
    yield GaugeMetricFamily(
        f"{_PREFIX}buffered_bytes",
        "Memory of what is appended and neither committed nor failed.",
        value=seen.buffered_bytes,
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}oldest_unsettled_age_seconds",
        "Time since the oldest batch that is neither committed nor failed was closed; 0 without"
        " one.",
        value=seen.oldest_unsettled_s,
    )
    yield _counter(
        "uploads",
        "Attempts to store an object, by result; a repetition is another.",
        "result",
        seen.uploads.items(),
    )
    yield _count("upload_bytes", "Size of the objects that were stored.", seen.upload_bytes)
    yield _histogram(
        "upload_duration_seconds",
        "Time to store an object, retries of the store's client included.",
        [],
        [([], seen.upload_times)],
    )
    yield _histogram(
        "commit_duration_seconds",
        "Time from handing in a commit to its verdict; unanswered is one without, refused one of"
        " which a part was.",
        ["verdict"],
        [([verdict], times) for verdict, times in seen.commits.items()],
    )


def _of_calls(seen: ClientMetrics) -> Iterator[Metric]:
    yield _counter(
        "retries",
        "Repetitions by reason: of calls to controllers, of upload, of uploads under new ids"
        " (upload_anew), and of reads of tails (tail).",
        "reason",
        seen.retries.items(),
    )
    yield _count(
        "leader_changes",
        "Times that another controller answered as the leader than before.",
        seen.leader_changes,
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}leader_silent_seconds",
        "Time for which calls to the leader have failed without an answer between them; 0 after an"
        " answer.",
        value=seen.leader_silent_s,
    )
    yield _count(
        "watch_restarts",
        "Times that a watch of the map ended and was begun anew.",
        seen.watch_restarts,
    )


def _of_reads(seen: ClientMetrics) -> Iterator[Metric]:
    yield _counter(
        "cache_hits",
        "Blocks and indexes of objects, and ranges of the map, that a read found in memory.",
        "cache",
        seen.cache_hits.items(),
    )
    yield _counter(
        "cache_misses", "Those that a read had to ask for.", "cache", seen.cache_misses.items()
    )
    yield _count("fetches", "Requests of reads to the bucket.", seen.fetches)
    yield _count("fetched_bytes", "Bytes that these brought.", seen.fetched_bytes)
    yield _counter(
        "store_requests",
        "All requests to the bucket by kind: put, get, list and delete, repetitions included.",
        "kind",
        seen.store_requests.items(),
    )


def _of_log(seen: ClientMetrics) -> Iterator[Metric]:
    yield _count("log_bytes", "Bytes made durable in the write-ahead log.", seen.log_bytes)
    yield _count("log_flushes", "Flushes of one on a disk.", seen.log_flushes)
    yield _count("log_slots", "Objects stored of one in the bucket.", seen.log_slots)
    yield GaugeMetricFamily(
        f"{_PREFIX}log_used_bytes",
        "Size of what the write-ahead log keeps until it is committed.",
        value=seen.log_used_bytes,
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}log_limit_bytes",
        "Limit of streammeta_client_log_used_bytes; 0 without a log.",
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
            below += count
            buckets.append(("+Inf" if bound is None else f"{bound:.6g}", float(below)))
        family.add_metric(of_labels, buckets, times.sum_s)
    return family
