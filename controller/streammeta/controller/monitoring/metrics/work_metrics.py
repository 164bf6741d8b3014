"""Metrics of a controller's work: calls, log, checkpoints, bucket, sessions and lifecycle.

They are computed at each scrape, as those in `metrics`. Only the leader has metrics of the
lifecycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from streammeta.controller.ids import NodeId
from streammeta.controller.lifecycle.broker_sessions import NodeState
from streammeta.controller.lifecycle.deletion import DeletionStatus
from streammeta.controller.monitoring.metrics import families
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
    """Number of terms in which this process led and served."""

    begun: int = 0
    ended: int = 0

    def changed(self, leads: bool) -> None:
        """Record that a term began or ended."""
        if leads:
            self.begun += 1
        else:
            self.ended += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSources:
    """Inputs of these metrics. Every call is cheap and runs on the event loop."""

    requests: RequestTally
    admission: Admission
    leaderships: Leaderships = field(default_factory=Leaderships)
    peer_failures: Mapping[NodeId, int]
    """Requests without an answer, by peer."""
    flushes: Times
    appended_bytes: Callable[[], int]
    log_bytes: Callable[[], int]
    free_bytes: Callable[[], int]
    """Free bytes on the disk of the data directory."""
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
    """Yield the metrics with their current values."""
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
    yield families.counter(
        "requests",
        "Calls that have ended, by result. The caller has cancelled abandoned calls.",
        ["method", "result"],
        [
            ([method, result], tally.ended[result])
            for method, tally in methods.items()
            # Every result from the start, so that a rate includes the first failure.
            for result in RESULTS
        ],
    )

    yield families.histogram(
        "request_duration_seconds",
        "Time from a call's arrival to its end, except for long calls such as watches.",
        ["method"],
        [([method], tally.times) for method, tally in methods.items() if tally.times is not None],
        families.COARSE,
    )
    yield families.gauge(
        "requests_under_way",
        "Calls in flight. For MetadataService.Watch and ObjectService.CommitPipeline this is the "
        "number of open watches and pipelines.",
        "method",
        {method: tally.under_way for method, tally in methods.items()},
    )


def _of_admission(sources: WorkSources) -> Iterator[Metric]:
    admission = sources.admission
    kinds = [(kind, kind.name.lower()) for kind in RequestClass]

    yield families.gauge(
        "admission_running",
        "Admitted calls in flight, by class.",
        "class",
        {name: admission.running(kind) for kind, name in kinds},
    )
    yield families.gauge(
        "admission_waiting",
        "Calls that wait for admission, by class.",
        "class",
        {name: admission.waiting(kind) for kind, name in kinds},
    )
    yield families.counter_by(
        "admission_refused",
        "Calls rejected because too many of their class were waiting.",
        "class",
        {name: admission.refused(kind) for kind, name in kinds},
    )


def _of_quorum(sources: WorkSources) -> Iterator[Metric]:
    yield families.total(
        "quorum_leaderships_begun",
        "Number of times that this controller started to accept writes as leader.",
        sources.leaderships.begun,
    )
    yield families.total(
        "quorum_leaderships_ended",
        "Number of times that this controller stopped accepting writes as leader.",
        sources.leaderships.ended,
    )
    yield families.counter_by(
        "peer_requests_failed",
        "Requests to another controller that got no answer.",
        "peer",
        {str(peer): count for peer, count in sorted(sources.peer_failures.items())},
    )


def _of_log(sources: WorkSources) -> Iterator[Metric]:
    yield families.total(
        "log_appended_bytes", "Bytes appended to the log.", sources.appended_bytes()
    )
    yield families.histogram(
        "log_flush_duration_seconds",
        "Time of one flush of the log.",
        [],
        [([], sources.flushes)],
    )

    yield families.value("log_bytes", "Size of the log on disk.", sources.log_bytes())
    yield families.value(
        "data_dir_free_bytes", "Free space on the disk of the data directory.", sources.free_bytes()
    )


def _of_checkpoints(sources: WorkSources) -> Iterator[Metric]:
    tally = sources.checkpoints
    yield families.histogram(
        "checkpoint_duration_seconds",
        "Time to write a checkpoint of the metadata, mostly pauses that leave the CPU to calls.",
        [],
        [([], tally.times)],
    )

    yield families.total(
        "checkpoints_put_off", "Checkpoints postponed because the disk was full.", tally.put_off
    )
    yield families.value(
        "checkpoint_bytes",
        "Size of the newest checkpoint, written or loaded, without a value before the first.",
        tally.newest_bytes,
    )
    # Without a checkpoint an age of 0 would not be true.
    has_one = tally.newest_bytes is not None
    yield families.value(
        "checkpoint_age_seconds",
        "Time since the newest checkpoint was written or loaded. It also grows without commits.",
        (sources.now_ms() - tally.newest_ms) / 1000 if has_one else None,
    )


def _of_limits(sources: WorkSources) -> Iterator[Metric]:
    used = sources.metadata_used()
    yield families.gauge(
        "map_used",
        "Used part of each limit of the metadata, as a count or in bytes.",
        "quota",
        {quota: used[quota] for quota in sources.metadata_limits},
    )
    yield families.gauge(
        "map_limit",
        "Limit of streammeta_map_used at this controller.",
        "quota",
        sources.metadata_limits,
    )


def _of_bucket(bucket: StoreMetrics) -> Iterator[Metric]:
    # Known operations exist from the start, and others appear with their first call.
    names = sorted({*OPERATIONS, *bucket.operations})
    operations = [(name, bucket.of(name)) for name in names]

    def counted(name: str, text: str, part: Callable[[OperationMetrics], float]) -> Metric:
        return families.counter_by(
            name, text, "operation", {name: part(operation) for name, operation in operations}
        )

    yield counted("bucket_calls", "Calls to the bucket of objects.", lambda calls: calls.calls)
    yield counted(
        "bucket_calls_failed", "Calls that failed after all retries.", lambda calls: calls.failures
    )
    yield counted(
        "bucket_retries", "Requests retried within these calls.", lambda calls: calls.retries
    )
    yield counted(
        "bucket_throttled",
        "Answers in which the bucket asked for fewer requests.",
        lambda calls: calls.throttled,
    )
    yield counted(
        "bucket_seconds",
        "Time of these calls with retries and waits.",
        lambda calls: calls.seconds,
    )


def _of_nodes(sources: WorkSources) -> Iterator[Metric]:
    sessions = sources.sessions()
    # States without a broker are 0 and not absent, or sums over states would have gaps.
    yield families.gauge(
        "node_sessions",
        "Brokers that send heartbeats, by state of their session. Only at the leader.",
        "state",
        {state.name.lower(): sessions.get(state, 0) for state in NodeState},
    )

    yield families.total(
        "node_sessions_expired",
        "Brokers that this controller fenced as leader because their heartbeats stopped.",
        sources.fenced(),
    )
    yield families.value(
        "recoveries_assigned",
        "Brokers whose data is assigned to another broker for recovery. Only at the leader.",
        sources.recoveries(),
    )
    yield families.value(
        "compactions_assigned",
        "Brokers whose stream set objects another broker is to compact. Only at the leader.",
        sources.compactions(),
    )


def _of_deletion(status: DeletionStatus) -> Iterator[Metric]:
    yield families.value(
        "deletions_in_flight", "Objects in deletion requests in flight.", status.in_flight
    )
    yield families.value(
        "deletions_refused", "Objects whose deletion failed and is retried.", status.refused
    )
    yield families.value(
        "deletions_stuck",
        "Objects whose deletion failed repeatedly.",
        status.stuck,
    )

    yield families.value(
        "deletions_ahead",
        "Uncommitted objects kept because their offsets are after the end of their streams.",
        status.ahead,
    )
    yield families.value(
        "deletions_unproven",
        "Uncommitted objects kept for a day because their origin can't be verified.",
        status.unproven,
    )
    yield families.value("deletion_rate_limit", "Maximum deletions per second.", status.rate)
    yield families.counter_by(
        "deletions",
        "Objects in finished deletion requests, by result.",
        "result",
        {"deleted": status.deleted, "failed": status.failed},
    )
