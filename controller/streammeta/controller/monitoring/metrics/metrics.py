"""Metrics of one controller, read at each scrape from counters and states that exist anyway.

Nothing is paid between scrapes. Labels have closed sets of values, and series whose values are
known stand from the start, so that rates see the first event. Opens nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from streammeta.controller.backup.uploader import BackupStatus
from streammeta.controller.features import SUPPORTED
from streammeta.controller.lifecycle.deletion import DeletionStatus
from streammeta.controller.metadata.api.answers import MetadataSize
from streammeta.controller.monitoring.metrics.families import counter, gauge, histogram, value
from streammeta.controller.monitoring.metrics.reconcile_runs import ReportedRuns
from streammeta.controller.monitoring.metrics.work_metrics import WorkSources, of_work
from streammeta.controller.runtime.replication.operations import QuorumDescription
from streammeta.controller.runtime.writer.commit_tally import CommitTally
from streammeta.controller.tls.manager import CertificateState
from streammeta.controller.trust.audit.writer import AuditWriter

ROLES = ("unattached", "prospective", "candidate", "follower", "leader", "resigned")
"""Parts of a controller in the quorum; an observer is unattached or a follower."""

_LISTENER = ("handshake_failed", "too_many_handshakes", "too_many_connections")

CAUSES: Mapping[str, Sequence[str]] = {
    "peers": (*_LISTENER, "connection_broken", "hello_refused", "certificate_denied"),
    "http": (*_LISTENER, "connection_broken"),
}
"""Reasons to refuse a connection, by plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a scrape reads; every call is cheap and of the event loop."""

    version: str
    quorum: Callable[[], QuorumDescription]
    applied: Callable[[], int]
    metadata_size: Callable[[], MetadataSize]
    certificates: Callable[[], Sequence[CertificateState]]
    connections: Callable[[], Mapping[str, int]]
    """Open connections by plane."""
    refused_connections: Mapping[str, Mapping[str, int]]
    """Connections refused by plane and cause, kept by their listeners."""
    handshakes: Callable[[], int]
    """TLS handshakes begun by clients."""
    refused_calls: Mapping[str, int]
    """Calls that ended with an error, by reason."""
    commits: CommitTally
    request_bytes: Callable[[], int]
    request_bytes_max: int
    memory_limit: int
    """Memory at which calls are refused, in bytes."""
    audit: AuditWriter | None
    backup: Callable[[], BackupStatus | None]
    """The backup as the leader knows it; None elsewhere, and without a backup store."""
    deletion: Callable[[], DeletionStatus]
    feature_level: Callable[[], int]
    lease_left_ms: Callable[[], int]
    """Time for which changes may be acknowledged without another look at the bucket's marker."""
    reconcile_runs: Callable[[], ReportedRuns]
    work: WorkSources


class ControllerCollector(Collector):
    """Gives the metrics of a controller."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its values of now."""
        yield gauge(
            "build_info",
            "Version of the program; always 1.",
            ["version"],
            [([self._sources.version], 1)],
        )
        yield from _of_quorum(self._sources.quorum(), self._sources.applied())
        yield from _of_metadata(self._sources.metadata_size())
        yield from _of_calls(self._sources)
        yield from _of_connections(self._sources)
        yield from _of_certificates(self._sources.certificates())
        yield from _of_memory(self._sources)

        yield from _of_audit(self._sources.audit)
        yield from _of_backup(self._sources.backup())
        yield from _of_deletion(self._sources.deletion())
        yield value(
            "marker_lease_seconds",
            "Time for which changes may be acknowledged without seeing the bucket's marker.",
            self._sources.lease_left_ms() / 1000,
        )
        yield from _of_reconcile(self._sources.reconcile_runs())
        yield value("feature_level", "Feature level in force.", self._sources.feature_level())
        yield value(
            "feature_level_max", "Highest feature level of this version.", SUPPORTED.highest
        )
        yield from of_work(self._sources.work, self._sources.deletion())


def _of_quorum(seen: QuorumDescription, applied: int) -> Iterator[Metric]:
    yield gauge(
        "quorum_state",
        "1 for the part that this controller has in the quorum, else 0.",
        ["state"],
        [([role], seen.role == role) for role in ROLES],
    )
    yield value("quorum_is_leader", "1 while this controller leads.", seen.role == "leader")
    yield value(
        "quorum_has_leader",
        "1 while this controller leads, or has answers of a leader.",
        seen.has_leader,
    )
    yield gauge(
        "quorum_leader_id",
        "Id of the known leader; no value without one.",
        [],
        [] if seen.leader_id is None else [([], seen.leader_id)],
    )
    yield value("quorum_epoch", "Epoch of the quorum.", seen.epoch)
    yield value(
        "quorum_high_watermark", "End of what is known to be committed.", seen.high_watermark
    )
    yield value("log_start_offset", "First offset in the log on disk.", seen.log_start_offset)

    yield value("log_end_offset", "End of the log.", seen.end_offset)
    yield value("log_flushed_offset", "End of what is flushed to the disk.", seen.flushed_end)
    yield value("log_applied_offset", "End of what is applied to the map.", applied)
    yield value("quorum_voters", "Voters.", len(seen.voters))
    yield value("quorum_observers", "Observers, as the leader sees them.", len(seen.observers))
    yield value(
        "quorum_repairing", "1 while lost entries are copied from the others.", seen.is_repairing
    )
    yield value("disk_full", "1 while writes fail for want of disk space.", seen.is_disk_full)
    yield from _of_replicas(seen)


def _of_replicas(seen: QuorumDescription) -> Iterator[Metric]:
    """Yield what the leader alone knows of the log and of the others."""
    leads = seen.role == "leader"
    replicas = [(str(replica.key.node_id), replica) for replica in (*seen.voters, *seen.observers)]
    yield gauge(
        "quorum_uncommitted_offsets",
        "Entries that are appended and not known to be committed; given by the leader alone.",
        [],
        [([], seen.end_offset - seen.high_watermark)] if leads else [],
    )

    yield gauge(
        "quorum_replica_lag_offsets",
        "Entries that a replica is behind the leader; given by the leader alone.",
        ["peer"],
        [
            ([peer], seen.end_offset - replica.end_offset)
            for peer, replica in replicas
            if leads and replica.end_offset is not None
        ],
    )
    yield gauge(
        "quorum_replica_last_caught_up_age_seconds",
        "Time since a replica had all of the log; given by the leader alone.",
        ["peer"],
        [
            ([peer], replica.last_caught_up_age_ms / 1000)
            for peer, replica in replicas
            if leads and replica.last_caught_up_age_ms is not None
        ],
    )
    yield gauge(
        "quorum_replica_last_fetch_age_seconds",
        "Time since a replica fetched; given by the leader alone.",
        ["peer"],
        [
            ([peer], replica.last_fetch_age_ms / 1000)
            for peer, replica in replicas
            if leads and replica.last_fetch_age_ms is not None
        ],
    )


def _of_metadata(size: MetadataSize) -> Iterator[Metric]:
    yield value("map_streams", "Streams.", size.streams)
    yield value("map_nodes", "Brokers.", size.nodes)
    yield value("map_keys", "Keys.", size.keys)

    yield gauge(
        "map_objects",
        "Objects by state.",
        ["state"],
        [
            (["prepared"], size.prepared_objects),
            (["committed"], size.committed_objects),
            (["mark_destroyed"], size.destroyed_objects),
        ],
    )
    yield value("map_set_objects", "Committed stream set objects.", size.stream_set_objects)
    yield value("map_object_bytes", "Size of committed objects.", size.committed_bytes)


def _of_calls(sources: Sources) -> Iterator[Metric]:
    yield counter(
        "requests_refused",
        "Calls that ended with an error, by the reason given.",
        ["reason"],
        [([reason], count) for reason, count in sources.refused_calls.items()],
    )
    yield counter(
        "commits",
        "Commits of uploads that were answered here, by verdict.",
        ["verdict"],
        [(["accepted"], sources.commits.accepted), (["refused"], sources.commits.refused)],
    )
    yield histogram(
        "commit_latency_seconds",
        "Time from the decision on a commit of an upload until it was committed, by verdict.",
        ["verdict"],
        [
            (["accepted"], sources.commits.accepted_times),
            (["refused"], sources.commits.refused_times),
        ],
    )


def _of_connections(sources: Sources) -> Iterator[Metric]:
    yield gauge(
        "connections",
        "Open connections.",
        ["plane"],
        [([plane], count) for plane, count in sources.connections().items()],
    )
    yield counter(
        "connections_refused",
        "Connections refused, or ended because the other side broke the protocol; of the planes of "
        "peers and http.",
        ["plane", "cause"],
        [
            ([plane, cause], sources.refused_connections[plane].get(cause, 0))
            for plane, causes in CAUSES.items()
            for cause in causes
        ],
    )
    yield counter(
        "tls_handshakes_begun",
        "TLS handshakes begun on the plane of clients, however they end.",
        [],
        [([], sources.handshakes())],
    )


def _of_certificates(certificates: Sequence[CertificateState]) -> Iterator[Metric]:
    yield gauge(
        "tls_certificate_not_after_timestamp_seconds",
        "End of the certificate in use.",
        ["plane"],
        [([certificate.plane], certificate.not_after.timestamp()) for certificate in certificates],
    )
    yield counter(
        "tls_reloads",
        "Replaced certificate files, by whether they came into use.",
        ["plane", "result"],
        [
            ([certificate.plane, result], count)
            for certificate in certificates
            for result, count in (
                ("replaced", certificate.replaced),
                ("refused", certificate.refused),
            )
        ],
    )


def _of_memory(sources: Sources) -> Iterator[Metric]:
    yield value(
        "request_memory_bytes",
        "Size of requests that have arrived and are not answered.",
        sources.request_bytes(),
    )
    yield value(
        "request_memory_limit_bytes",
        "Limit of streammeta_request_memory_bytes.",
        sources.request_bytes_max,
    )
    yield value(
        "memory_limit_bytes",
        "Resident memory at which calls are refused; those that take much of it, before.",
        sources.memory_limit,
    )


def _of_audit(writer: AuditWriter | None) -> Iterator[Metric]:
    """Yield what concerns the audit log; without one the series have no values."""
    known = [] if writer is None else [writer]
    yield gauge(
        "audit_failing",
        "1 while the audit log can't be written.",
        [],
        [([], bool(status.failure)) for status in known],
    )

    yield counter(
        "audit_lines",
        "Lines written to the audit log since it was begun.",
        [],
        [([], writer.head.seq) for writer in known],
    )
    yield counter(
        "audit_dropped",
        "Lines that found no room in the queue and are lost.",
        [],
        [([], writer.lost) for writer in known],
    )


def _of_backup(status: BackupStatus | None) -> Iterator[Metric]:
    """Yield what concerns the backup; without a status the series have no values."""
    known = [] if status is None else [status]
    yield gauge(
        "backup_end_offset",
        "End of the log in the backup; of the backup the leader alone gives values.",
        [],
        [([], status.end_offset) for status in known],
    )

    yield gauge(
        "backup_lag_offsets",
        "Committed entries that are not in the backup.",
        [],
        [([], status.behind_entries) for status in known],
    )
    yield gauge(
        "backup_lag_seconds",
        "Time since everything committed was in the backup; 0 while it is.",
        [],
        [([], status.behind_ms / 1000) for status in known],
    )
    yield gauge(
        "backup_failing",
        "1 while nothing can be copied to the backup.",
        [],
        [([], bool(status.problem)) for status in known],
    )


def _of_deletion(status: DeletionStatus) -> Iterator[Metric]:
    yield value(
        "deletions_unbacked",
        "Objects whose bytes wait until the backup knows that they are destroyed.",
        status.unbacked,
    )
    yield value(
        "deletions_unbacked_age_seconds",
        "Time since which the first of streammeta_deletions_unbacked waits; 0 if none does.",
        status.unbacked_ms / 1000,
    )


def _of_reconcile(told: ReportedRuns) -> Iterator[Metric]:
    """Yield what runs of reconciliation told; without any the series have no values."""
    runs = told.runs
    yield gauge(
        "reconcile_last_success_timestamp_seconds",
        "End of the last run of reconciliation that left nothing to find out or to settle.",
        [],
        [([], runs.last_success_ms / 1000)] if runs.last_success_ms else [],
    )

    yield gauge(
        "reconcile_orphan_bytes",
        "Size of the orphans that the last plan or round found.",
        [],
        [] if runs.orphan_bytes is None else [([], runs.orphan_bytes)],
    )
    yield gauge(
        "reconcile_missing_objects",
        "Objects that the last plan or round found missing or damaged, confirmed.",
        [],
        [] if runs.missing is None else [([], runs.missing)],
    )
