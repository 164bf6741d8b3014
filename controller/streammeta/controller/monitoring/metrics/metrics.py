"""Metrics of one controller, computed at each scrape from its counters and states.

They cost nothing between scrapes. Labels have closed sets of values. Series with known label values
exist from the start, so that a rate includes the first event. Does no I/O.

Every caller with write access to the product's key namespace can write reports of reconciliation
runs. An unreadable report is therefore shown as such and is not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from streammeta.controller.backup.uploader import BackupStatus
from streammeta.controller.features import SUPPORTED
from streammeta.controller.lifecycle.deletion import DeletionStatus
from streammeta.controller.metadata.api.answers import MetadataSize
from streammeta.controller.monitoring.metrics.families import (
    counter,
    counter_by,
    gauge,
    histogram,
    total,
    value,
)
from streammeta.controller.monitoring.metrics.work_metrics import WorkSources, of_work
from streammeta.controller.runtime.replication.operations import QuorumDescription
from streammeta.controller.runtime.writer.submission import CommitTally
from streammeta.controller.tls.manager import CertificateState
from streammeta.controller.trust.audit.writer import AuditWriter
from streammeta.storage.cluster_files.reconcile_runs import Runs, RunsError, decode


@dataclass(frozen=True, slots=True)
class ReportedRuns:
    """Reported runs. `problem` says why they can't be read, empty if they can."""

    runs: Runs = field(default_factory=Runs)
    problem: str = ""


def read_told(value: bytes | None) -> ReportedRuns:
    """Parse the stored value. None means that there is no value."""
    if value is None:
        return ReportedRuns()
    try:
        return ReportedRuns(decode(value))
    # A scrape must not fail because of a value that another program wrote.
    except RunsError as error:
        return ReportedRuns(problem=str(error))


ROLES = ("unattached", "prospective", "candidate", "follower", "leader", "resigned")
"""Roles of a controller in the quorum. An observer is unattached or a follower."""

_LISTENER = ("handshake_failed", "too_many_handshakes", "too_many_connections")

CAUSES: Mapping[str, Sequence[str]] = {
    "peers": (*_LISTENER, "connection_broken", "hello_refused", "certificate_denied"),
    "http": (*_LISTENER, "connection_broken"),
}
"""Causes of rejected connections, by plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources(WorkSources):
    """Inputs of a scrape. Every call is cheap and runs on the event loop."""

    version: str
    quorum: Callable[[], QuorumDescription]
    applied: Callable[[], int]
    metadata_size: Callable[[], MetadataSize]
    certificates: Callable[[], Sequence[CertificateState]]
    connections: Callable[[], Mapping[str, int]]
    """Open connections by plane."""
    refused_connections: Mapping[str, Mapping[str, int]]
    """Rejected connections by plane and cause, counted by their listeners."""
    handshakes: Callable[[], int]
    """TLS handshakes that clients started."""
    refused_calls: Mapping[str, int]
    """Calls that ended with an error, by reason."""
    commits: CommitTally
    request_bytes: Callable[[], int]
    request_bytes_max: int
    memory_limit: int
    """Resident memory at which calls are rejected, in bytes."""
    audit: AuditWriter | None
    backup: Callable[[], BackupStatus | None]
    """Status of the backup at the leader. None at other controllers and without a backup store."""
    deletion: Callable[[], DeletionStatus]
    feature_level: Callable[[], int]
    lease_left_ms: Callable[[], int]
    """Milliseconds for which changes may be acknowledged without another check of the marker."""
    reconcile_runs: Callable[[], ReportedRuns]


class ControllerCollector(Collector):
    """Collector of a controller's metrics."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current values."""
        yield gauge(
            "build_info", "Version of the program, always 1.", "version", {self._sources.version: 1}
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
            "Time for which changes may be acknowledged without a check of the bucket's marker.",
            self._sources.lease_left_ms() / 1000,
        )
        yield from _of_reconcile(self._sources.reconcile_runs())
        yield value("feature_level", "Feature level in force.", self._sources.feature_level())
        yield value(
            "feature_level_max", "Highest feature level of this version.", SUPPORTED.highest
        )
        yield from of_work(self._sources, self._sources.deletion())


def _of_quorum(seen: QuorumDescription, applied: int) -> Iterator[Metric]:
    # All roles, so that a query for a role never finds a gap.
    yield gauge(
        "quorum_state",
        "1 for the role of this controller in the quorum, else 0.",
        "state",
        {role: seen.role == role for role in ROLES},
    )
    yield value("quorum_is_leader", "1 while this controller leads.", seen.role == "leader")
    yield value(
        "quorum_has_leader",
        "1 while this controller leads or receives answers from a leader.",
        seen.has_leader,
    )
    # 0 is a valid id, so no leader means no series.
    yield value(
        "quorum_leader_id", "Id of the leader, without a value while it is unknown.", seen.leader_id
    )
    yield value("quorum_epoch", "Epoch of the quorum.", seen.epoch)
    yield value(
        "quorum_high_watermark",
        "End of the known committed entries.",
        seen.high_watermark,
    )
    yield value("log_start_offset", "First offset in the log on disk.", seen.log_start_offset)

    yield value("log_end_offset", "End of the log.", seen.end_offset)
    yield value("log_flushed_offset", "End of the flushed log.", seen.flushed_end)
    yield value("log_applied_offset", "End of the applied entries.", applied)
    yield value("quorum_voters", "Voters.", len(seen.voters))
    yield value("quorum_observers", "Observers, as the leader sees them.", len(seen.observers))
    yield value(
        "quorum_repairing",
        "1 while lost entries are copied from the others.",
        seen.is_repairing,
    )
    yield value("disk_full", "1 while writes fail because the disk is full.", seen.is_disk_full)
    yield from _of_replicas(seen)


def _of_replicas(seen: QuorumDescription) -> Iterator[Metric]:
    """Yield metrics of the log and the replicas that only the leader has."""
    leads = seen.role == "leader"
    replicas = [(str(replica.key.node_id), replica) for replica in (*seen.voters, *seen.observers)]
    # A follower cannot know which of its entries will be committed.
    yield value(
        "quorum_uncommitted_offsets",
        "Entries that are appended and not known to be committed. Only at the leader.",
        seen.end_offset - seen.high_watermark if leads else None,
    )

    # A former leader has old numbers, which would show a lag that is no longer true.
    yield gauge(
        "quorum_replica_lag_offsets",
        "Entries of the leader that a replica does not have yet. Only at the leader.",
        "peer",
        {
            peer: seen.end_offset - replica.end_offset
            for peer, replica in replicas
            if leads and replica.end_offset is not None
        },
    )
    yield gauge(
        "quorum_replica_last_caught_up_age_seconds",
        "Time since a replica had the whole log. Only at the leader.",
        "peer",
        {
            peer: replica.last_caught_up_age_ms / 1000
            for peer, replica in replicas
            if leads and replica.last_caught_up_age_ms is not None
        },
    )
    yield gauge(
        "quorum_replica_last_fetch_age_seconds",
        "Time since the last fetch of a replica. Only at the leader.",
        "peer",
        {
            peer: replica.last_fetch_age_ms / 1000
            for peer, replica in replicas
            if leads and replica.last_fetch_age_ms is not None
        },
    )


def _of_metadata(size: MetadataSize) -> Iterator[Metric]:
    yield value("map_streams", "Streams.", size.streams)
    yield value("map_nodes", "Brokers.", size.nodes)
    yield value("map_keys", "Keys.", size.keys)

    yield gauge(
        "map_objects",
        "Objects by state.",
        "state",
        {
            "prepared": size.prepared_objects,
            "committed": size.committed_objects,
            "mark_destroyed": size.destroyed_objects,
        },
    )
    yield value("map_set_objects", "Committed stream set objects.", size.stream_set_objects)
    yield value("map_object_bytes", "Size of committed objects.", size.committed_bytes)


def _of_calls(sources: Sources) -> Iterator[Metric]:
    yield counter_by(
        "requests_refused",
        "Calls that ended with an error, by reason.",
        "reason",
        sources.refused_calls,
    )
    yield counter_by(
        "commits",
        "Commits of uploads that this controller answered, by verdict.",
        "verdict",
        {"accepted": sources.commits.accepted, "refused": sources.commits.refused},
    )
    yield histogram(
        "commit_latency_seconds",
        "Time from the decision on a commit of an upload until it is committed, by verdict.",
        ["verdict"],
        [
            (["accepted"], sources.commits.accepted_times),
            (["refused"], sources.commits.refused_times),
        ],
    )


def _of_connections(sources: Sources) -> Iterator[Metric]:
    yield gauge("connections", "Open connections.", "plane", sources.connections())
    yield counter(
        "connections_refused",
        "Connections of the planes peers and http that were rejected, or closed for breaking the "
        "protocol.",
        ["plane", "cause"],
        [
            # Zeros are stated, so that a rate includes the first event.
            ([plane, cause], sources.refused_connections[plane].get(cause, 0))
            for plane, causes in CAUSES.items()
            for cause in causes
        ],
    )
    yield total(
        "tls_handshakes_begun",
        "TLS handshakes that clients started, including failed ones.",
        sources.handshakes(),
    )


def _of_certificates(certificates: Sequence[CertificateState]) -> Iterator[Metric]:
    yield gauge(
        "tls_certificate_not_after_timestamp_seconds",
        "End of the certificate in use.",
        "plane",
        {certificate.plane: certificate.not_after.timestamp() for certificate in certificates},
    )
    yield counter(
        "tls_reloads",
        "Changes of certificate files, by whether they were loaded.",
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
        "Size of requests in flight.",
        sources.request_bytes(),
    )
    yield value(
        "request_memory_limit_bytes",
        "Limit of streammeta_request_memory_bytes.",
        sources.request_bytes_max,
    )
    yield value(
        "memory_limit_bytes",
        "Resident memory at which calls are rejected, expensive ones earlier.",
        sources.memory_limit,
    )


def _of_audit(writer: AuditWriter | None) -> Iterator[Metric]:
    """Yield metrics of the audit log, without values if there is none."""
    yield value(
        "audit_failing",
        "1 while the audit log can't be written.",
        None if writer is None else bool(writer.failure),
    )

    yield total(
        "audit_lines",
        "Lines written to the audit log since its creation.",
        None if writer is None else writer.head.seq,
    )
    yield total(
        "audit_dropped",
        "Lines that were lost because the queue was full.",
        None if writer is None else writer.lost,
    )


def _of_backup(status: BackupStatus | None) -> Iterator[Metric]:
    """Yield metrics of the backup, without values if its status is unknown."""
    yield value(
        "backup_end_offset",
        "End of the log in the backup. Only at the leader, as all metrics of the backup.",
        None if status is None else status.end_offset,
    )

    yield value(
        "backup_lag_offsets",
        "Committed entries that are not in the backup.",
        None if status is None else status.behind_entries,
    )
    yield value(
        "backup_lag_seconds",
        "Time since the backup had all committed entries, 0 while it has them.",
        None if status is None else status.behind_ms / 1000,
    )
    yield value(
        "backup_failing",
        "1 while copies to the backup fail.",
        None if status is None else bool(status.problem),
    )


def _of_deletion(status: DeletionStatus) -> Iterator[Metric]:
    yield value(
        "deletions_unbacked",
        "Objects that are not deleted yet because the backup does not have their destruction.",
        status.unbacked,
    )
    yield value(
        "deletions_unbacked_age_seconds",
        "Waiting time of the oldest of streammeta_deletions_unbacked, 0 without one.",
        status.unbacked_ms / 1000,
    )


def _of_reconcile(reported: ReportedRuns) -> Iterator[Metric]:
    """Yield metrics that reconciliation runs reported, without values before the first run."""
    runs = reported.runs
    # 0 would be 1970, and an alarm on its age would fire before the first run.
    yield value(
        "reconcile_last_success_timestamp_seconds",
        "End of the last reconciliation run that left no finding unsettled.",
        runs.last_success_ms / 1000 if runs.last_success_ms else None,
    )

    yield value(
        "reconcile_orphan_bytes",
        "Size of the orphans found by the last plan or round.",
        runs.orphan_bytes,
    )
    yield value(
        "reconcile_missing_objects",
        "Objects that the last plan or round confirmed as missing or damaged.",
        runs.missing,
    )
