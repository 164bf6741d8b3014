"""Metrics of a controller's work: calls, log, checkpoints, bucket, sessions and lifecycle.

Read at each scrape, like the others in `metrics`; those of the lifecycle are of the leader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from streammeta.controller.ids import NodeId
from streammeta.controller.lifecycle.broker_sessions import NodeState
from streammeta.controller.lifecycle.deletion import DeletionStatus
from streammeta.controller.monitoring.metrics.families import (
    COARSE,
    counter,
    gauge,
    histogram,
    value,
)
from streammeta.controller.rpc.calls.tally import RESULTS, RequestTally
from streammeta.controller.runtime.load.admission import Admission
from streammeta.controller.runtime.persistence.checkpointer import CheckpointTally
from streammeta.controller.timings import Times
from streammeta.rpc.method_facts import RequestClass
from streammeta.storage.object_store.protocol.calls import OperationMetrics, StoreMetrics

OPERATIONS = ("put", "get_range", "head", "list_objects", "copy", "delete_many")
"""Calls of an object store that a controller makes."""


@dataclass(slots=True)
class Leaderships:
    """Terms of this process in which it served."""

    begun: int = 0
    ended: int = 0

    def changed(self, leads: bool) -> None:
        """Note that a term began, or ended."""
        if leads:
            self.begun += 1
        else:
            self.ended += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSources:
    """Where a scrape reads; every call is cheap, and of the event loop."""

    requests: RequestTally
    admission: Admission
    leaderships: Leaderships = field(default_factory=Leaderships)
    peer_failures: Mapping[NodeId, int]
    """Requests without an answer, by the peer they were for."""
    flushes: Times
    appended_bytes: Callable[[], int]
    log_bytes: Callable[[], int]
    free_bytes: Callable[[], int]
    """Room on the disk of the data directory."""
    checkpoints: CheckpointTally
    now_ms: Callable[[], int]
    """Monotonic milliseconds, as in `checkpoints`."""
    metadata_used: Callable[[], Mapping[str, int]]
    metadata_limits: Mapping[str, int]
    bucket: Callable[[], StoreMetrics]
    sessions: Callable[[], Mapping[NodeState, int]]
    fenced: Callable[[], int]
    recoveries: Callable[[], int]
    compactions: Callable[[], int]


def of_work(sources: WorkSources, deletion: DeletionStatus) -> Iterator[Metric]:
    """Yield the metrics with their values of now."""
    yield from _of_requests(sources)
    yield from _of_admission(sources)
    yield from _of_quorum(sources)
    yield from _of_log(sources)
    yield from _of_checkpoints(sources)
    yield from _of_limits(sources)
    yield from _of_bucket(sources.bucket())
    yield from _of_nodes(sources)
    yield from _of_deletion(deletion)


def _of_requests(sources: WorkSources) -> Iterator[Metric]:
    methods = sources.requests.methods
    yield counter(
        "requests",
        "Calls that have ended, by result; abandoned ones were given up by their caller.",
        ["method", "result"],
        [
            ([method, result], tally.ended[result])
            for method, tally in methods.items()
            for result in RESULTS
        ],
    )

    yield histogram(
        "request_duration_seconds",
        "Time from a call's arrival to its end; not of those that last, as watches do.",
        ["method"],
        [([method], tally.times) for method, tally in methods.items() if tally.times is not None],
        COARSE,
    )
    yield gauge(
        "requests_under_way",
        "Calls that have come and not ended; of MetadataService.Watch and "
        "ObjectService.CommitPipeline these are the watches and pipelines there are.",
        ["method"],
        [([method], tally.under_way) for method, tally in methods.items()],
    )


def _of_admission(sources: WorkSources) -> Iterator[Metric]:
    admission = sources.admission
    kinds = [(kind, kind.name.lower()) for kind in RequestClass]

    yield gauge(
        "admission_running",
        "Calls that were admitted and have not ended, by class.",
        ["class"],
        [([name], admission.running(kind)) for kind, name in kinds],
    )
    yield gauge(
        "admission_waiting",
        "Calls that wait to be admitted.",
        ["class"],
        [([name], admission.waiting(kind)) for kind, name in kinds],
    )
    yield counter(
        "admission_refused",
        "Calls refused because too many of their class waited.",
        ["class"],
        [([name], admission.refused(kind)) for kind, name in kinds],
    )


def _of_quorum(sources: WorkSources) -> Iterator[Metric]:
    yield counter(
        "quorum_leaderships_begun",
        "Times that this controller began to take writes.",
        [],
        [([], sources.leaderships.begun)],
    )
    yield counter(
        "quorum_leaderships_ended",
        "Times that this controller ceased to take writes.",
        [],
        [([], sources.leaderships.ended)],
    )
    yield counter(
        "peer_requests_failed",
        "Requests to another controller that got no answer.",
        ["peer"],
        [([str(peer)], count) for peer, count in sorted(sources.peer_failures.items())],
    )


def _of_log(sources: WorkSources) -> Iterator[Metric]:
    yield counter(
        "log_appended_bytes",
        "Bytes appended to the log.",
        [],
        [([], sources.appended_bytes())],
    )
    yield histogram(
        "log_flush_duration_seconds",
        "Time to make what was appended durable.",
        [],
        [([], sources.flushes)],
    )

    yield value("log_bytes", "Size of the log on disk.", sources.log_bytes())
    yield value(
        "data_dir_free_bytes", "Room on the disk of the data directory.", sources.free_bytes()
    )


def _of_checkpoints(sources: WorkSources) -> Iterator[Metric]:
    tally = sources.checkpoints
    newest = [] if tally.newest_bytes is None else [tally.newest_bytes]
    yield histogram(
        "checkpoint_duration_seconds",
        "Time to write a checkpoint of the map, which rests more than it works.",
        [],
        [([], tally.times)],
    )

    yield counter(
        "checkpoints_put_off",
        "Checkpoints that found no room on the disk.",
        [],
        [([], tally.put_off)],
    )
    yield gauge(
        "checkpoint_bytes",
        "Size of the newest checkpoint that was written or loaded; no value before the first.",
        [],
        [([], size) for size in newest],
    )
    yield gauge(
        "checkpoint_age_seconds",
        "Time since it was written or loaded; grows while nothing is committed, too.",
        [],
        [([], (sources.now_ms() - tally.newest_ms) / 1000) for _ in newest],
    )


def _of_limits(sources: WorkSources) -> Iterator[Metric]:
    used = sources.metadata_used()
    yield gauge(
        "map_used",
        "What the map holds of what is limited, in numbers or bytes.",
        ["quota"],
        [([quota], used[quota]) for quota in sources.metadata_limits],
    )
    yield gauge(
        "map_limit",
        "Limit of streammeta_map_used at this controller.",
        ["quota"],
        [([quota], limit) for quota, limit in sources.metadata_limits.items()],
    )


def _of_bucket(bucket: StoreMetrics) -> Iterator[Metric]:
    names = sorted({*OPERATIONS, *bucket.operations})
    operations = [(name, bucket.of(name)) for name in names]

    def counted(name: str, text: str, part: Callable[[OperationMetrics], float]) -> Metric:
        return counter(
            name, text, ["operation"], [([name], part(operation)) for name, operation in operations]
        )

    yield counted("bucket_calls", "Calls of the bucket of objects.", lambda one: one.calls)
    yield counted(
        "bucket_calls_failed", "Calls that failed after all retries.", lambda one: one.failures
    )
    yield counted(
        "bucket_retries", "Requests repeated within these calls.", lambda one: one.retries
    )
    yield counted(
        "bucket_throttled",
        "Answers of the bucket that asked for fewer requests.",
        lambda one: one.throttled,
    )
    yield counted(
        "bucket_seconds", "Time of these calls, retries and waiting included.", lambda o: o.seconds
    )


def _of_nodes(sources: WorkSources) -> Iterator[Metric]:
    sessions = sources.sessions()
    yield gauge(
        "node_sessions",
        "Brokers that send heartbeats, by state of their session; of the leader.",
        ["state"],
        [([state.name.lower()], sessions.get(state, 0)) for state in NodeState],
    )

    yield counter(
        "node_sessions_expired",
        "Brokers fenced because they were silent, while this controller led.",
        [],
        [([], sources.fenced())],
    )
    yield value(
        "recoveries_assigned",
        "Brokers whose data another one is to recover; of the leader.",
        sources.recoveries(),
    )
    yield value(
        "compactions_assigned",
        "Brokers whose set objects another one is to compact; of the leader.",
        sources.compactions(),
    )


def _of_deletion(status: DeletionStatus) -> Iterator[Metric]:
    yield value("deletions_in_flight", "Objects in requests to delete them.", status.in_flight)
    yield value(
        "deletions_refused", "Objects whose deletion failed and is tried again.", status.refused
    )
    yield value("deletions_stuck", "Those of them that failed again and again.", status.stuck)

    yield value(
        "deletions_ahead",
        "Objects never committed that stay: their offsets lie beyond the streams of the map.",
        status.ahead,
    )
    yield value(
        "deletions_unproven",
        "Objects never committed that stay for a day: their bytes prove nothing.",
        status.unproven,
    )
    yield value("deletion_rate_limit", "Objects a second that may be deleted.", status.rate)
    yield counter(
        "deletions",
        "Objects that requests were to delete from the bucket, by result.",
        ["result"],
        [(["deleted"], status.deleted), (["failed"], status.failed)],
    )
