"""Counters of one client, and their snapshot for its metrics.

Owns the counters, their closed sets of labels, and the classes of times. An event costs an addition
or two. Derived figures are computed when a snapshot is taken. Pure. Knows no metrics system.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from streammeta.client.config import ReaderStats
from streammeta.rpc.leader_router import FailureKind
from streammeta.storage.object_store.protocol.calls import OperationMetrics, StoreMetrics

BOUNDS_S = tuple(0.0005 * 2**power for power in range(16))
"""Longest time of each class in seconds, doubling from 0.5 ms to 16 s. A last one has the rest."""

RESULTS = ("stored", "failed")
"""Outcomes of an attempt to store an object."""

VERDICTS = ("accepted", "refused", "unanswered")
"""Outcomes of a commit: accepted in full, rejected in full or in part, or no answer in time.

An unanswered commit may have been accepted.
"""

UPLOAD, UPLOAD_ANEW, TAIL = "upload", "upload_anew", "tail"

REASONS = (*(kind.name.lower() for kind in FailureKind), UPLOAD, UPLOAD_ANEW, TAIL)
"""Reasons of a retry.

The names of `FailureKind` retry a call to the controllers. `upload` retries the preparation or
upload of an object. `upload_anew` uploads its records under a new id because the former id is no
longer usable. `tail` retries a read of a tail during an outage.
"""


STORE_KINDS = ("put", "get", "list", "delete")
"""Kinds of requests to the bucket, as providers bill them."""

_KIND_OF = {
    **dict.fromkeys(("put", "copy", "add_tags", "start_multipart", "upload_part"), "put"),
    **dict.fromkeys(("copy_part", "complete_multipart"), "put"),
    **dict.fromkeys(("head", "get_range", "read_into"), "get"),
    **dict.fromkeys(
        ("check", "list_objects", "list_multipart_uploads", "list_old_versions"), "list"
    ),
    **dict.fromkeys(("delete_many", "abort_multipart"), "delete"),
}
"""Kind by the store's method."""


@dataclass(slots=True)
class TimeCounts:
    """Times by class, see `BOUNDS_S`, and their sum in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, took_s: float) -> None:
        """Count one time."""
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s

    def frozen(self) -> TimesSeen:
        """Return a copy of the counts."""
        return TimesSeen(tuple(self.counts), self.sum_s)


@dataclass(frozen=True, slots=True)
class TimesSeen:
    """Number of times by class, one for each of `BOUNDS_S` and one for the rest, and their sum."""

    counts: tuple[int, ...]
    sum_s: float

    @property
    def total(self) -> int:
        """Number of all times."""
        return sum(self.counts)


@dataclass(slots=True)
class ClientTally:
    """Counters of one client's parts, used on its event loop."""

    appends: int = 0
    append_records: int = 0
    append_bytes: int = 0
    uploads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    upload_bytes: int = 0
    upload_times: TimeCounts = field(default_factory=TimeCounts)
    commits: dict[str, TimeCounts] = field(
        default_factory=lambda: {verdict: TimeCounts() for verdict in VERDICTS}
    )
    retries: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    watch_restarts: int = 0

    def count_append(self, records: int, size: int) -> None:
        """Count an append of `records` offsets, `size` bytes as encoded."""
        self.appends += 1
        self.append_records += records
        self.append_bytes += size

    def count_upload(self, size: int, took_s: float) -> None:
        """Count a stored object."""
        self.uploads["stored"] += 1
        self.upload_bytes += size
        self.upload_times.add(took_s)

    def count_failed_upload(self) -> None:
        """Count a failed attempt to store an object."""
        self.uploads["failed"] += 1

    def count_commit(self, verdict: str, took_s: float) -> None:
        """Count a commit that has ended."""
        self.commits[verdict].add(took_s)

    def count_failure(self, kind: FailureKind | None) -> None:
        """Count a failure after which a call is retried."""
        # Failures without a kind are final, and are not retried.
        if kind is not None:
            self.retries[kind.name.lower()] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMetrics:
    """Counters of one client since it was opened, at one moment.

    `append_records` counts one for each offset, `append_bytes` the bytes of the records in objects.
    `uploads` is by `RESULTS`. `upload_bytes` and `upload_times` cover stored objects. `commits` has
    the times by `VERDICTS`, each from the submission of the commit. `retries` is by `REASONS`.
    Calls to the leader have failed without an answer for `leader_silent_s` seconds.

    `cache_hits` and `cache_misses` are by the target of a read: `block` and `index` of objects, and
    `map` for ranges of the metadata. `fetched_bytes` were read from the bucket in `fetches`
    requests. `store_requests` is by `STORE_KINDS` and covers every use of the client's store.

    `log_bytes` were written to a write-ahead log, on disk in `log_flushes` or in the bucket in
    `log_slots`. `log_used_bytes` are not trimmed, of `log_limit_bytes`. `buffered_bytes` are
    admitted and not settled. Their oldest batch was sealed `oldest_unsettled_s` seconds ago.
    """

    appends: int
    append_records: int
    append_bytes: int
    buffered_bytes: int
    oldest_unsettled_s: float
    uploads: Mapping[str, int]
    upload_bytes: int
    upload_times: TimesSeen
    commits: Mapping[str, TimesSeen]
    retries: Mapping[str, int]
    leader_changes: int
    leader_silent_s: float
    watch_restarts: int
    cache_hits: Mapping[str, int]
    cache_misses: Mapping[str, int]
    fetches: int
    fetched_bytes: int
    store_requests: Mapping[str, int]
    log_bytes: int
    log_flushes: int
    log_slots: int
    log_used_bytes: int
    log_limit_bytes: int

    @classmethod
    def empty(cls) -> ClientMetrics:
        """Return the counters of a client that has done nothing."""
        return snapshot(ClientTally(), ReaderStats())


def snapshot(
    tally: ClientTally,
    reads: ReaderStats,
    *,
    store: StoreMetrics | None = None,
    buffered_bytes: int = 0,
    oldest_unsettled_s: float = 0.0,
    leader_changes: int = 0,
    leader_silent_s: float = 0.0,
    log_bytes: int = 0,
    log_flushes: int = 0,
    log_slots: int = 0,
    log_used_bytes: int = 0,
    log_limit_bytes: int = 0,
) -> ClientMetrics:
    """Return the counters of a client at this moment."""
    return ClientMetrics(
        appends=tally.appends,
        append_records=tally.append_records,
        append_bytes=tally.append_bytes,
        buffered_bytes=buffered_bytes,
        oldest_unsettled_s=oldest_unsettled_s,
        uploads=dict(tally.uploads),
        upload_bytes=tally.upload_bytes,
        upload_times=tally.upload_times.frozen(),
        commits={verdict: times.frozen() for verdict, times in tally.commits.items()},
        retries=dict(tally.retries),
        leader_changes=leader_changes,
        leader_silent_s=leader_silent_s,
        watch_restarts=tally.watch_restarts,
        # The labels of metrics are public and keep the name `map`.
        cache_hits={
            "block": reads.block_hits,
            "index": reads.index_hits,
            "map": reads.metadata_hits,
        },
        cache_misses={
            "block": reads.block_misses,
            "index": reads.indexes_fetched,
            "map": reads.lookups,
        },
        fetches=reads.requests,
        fetched_bytes=reads.bytes_fetched,
        store_requests=_by_kind({} if store is None else store.operations),
        log_bytes=log_bytes,
        log_flushes=log_flushes,
        log_slots=log_slots,
        log_used_bytes=log_used_bytes,
        log_limit_bytes=log_limit_bytes,
    )


def _by_kind(operations: Mapping[str, OperationMetrics]) -> dict[str, int]:
    requests = dict.fromkeys(STORE_KINDS, 0)
    for operation, sums in operations.items():
        requests[_KIND_OF[operation]] += sums.requests
    return requests
