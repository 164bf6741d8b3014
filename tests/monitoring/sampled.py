"""Registries of metrics with sample values: a leading controller's, a client's, a broker's."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry

from streammeta.brokers.kafka.protocol.tally import BrokerTally
from streammeta.brokers.kafka.service.metrics import BrokerState, KafkaCollector
from streammeta.client import ReaderStats
from streammeta.client.prometheus import ClientCollector
from streammeta.client.resources.tally import ClientMetrics, ClientTally, snapshot
from streammeta.controller.backup.uploader import BackupStatus
from streammeta.controller.ids import DirectoryId, EndOffset, NodeId
from streammeta.controller.lifecycle.broker_sessions import NodeState
from streammeta.controller.lifecycle.deletion import DeletionStatus
from streammeta.controller.metadata.api.answers import MetadataSize
from streammeta.controller.monitoring.history.sampling import LoopLag
from streammeta.controller.monitoring.metrics.families import new_registry
from streammeta.controller.monitoring.metrics.metrics import (
    ControllerCollector,
    ReportedRuns,
    Sources,
)
from streammeta.controller.monitoring.metrics.work_metrics import Leaderships
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.controller.rpc.calls.tally import RequestTally
from streammeta.controller.runtime.load.admission import Admission
from streammeta.controller.runtime.persistence.checkpointer import CheckpointTally
from streammeta.controller.runtime.replication.operations import ReplicaDescription
from streammeta.controller.runtime.writer.submission import CommitTally
from streammeta.controller.timings import Times
from streammeta.controller.tls.manager import CertificateState
from streammeta.controller.trust.audit.writer import AuditWriter
from streammeta.rpc.contract import SERVICES
from streammeta.storage.cluster_files.reconcile_runs import Runs
from streammeta.storage.object_store.protocol.calls import OperationMetrics, StoreMetrics
from tests.monitoring.test_http_plane import QUORUM

END = datetime(2027, 1, 1, tzinfo=UTC)


def times(*took_s: float) -> Times:
    made = Times()
    for seconds in took_s:
        made.add(seconds)
    return made


async def _answer(_data: bytes, _context: object) -> bytes:
    return b""


def replica(node_id: int, end_offset: int | None) -> ReplicaDescription:
    return ReplicaDescription(
        key=ReplicaKey(NodeId(node_id), DirectoryId(str(node_id))),
        endpoint="",
        peer_endpoint="",
        end_offset=None if end_offset is None else EndOffset(end_offset),
        last_fetch_age_ms=None if end_offset is None else 10,
        last_caught_up_age_ms=None if end_offset is None else 250,
    )


LEADING = replace(
    QUORUM,
    role="leader",
    leader_id=NodeId(1),
    voters=(replica(1, 50_000), replica(2, 49_990), replica(3, None)),
)

REQUESTS = RequestTally()
for _service in SERVICES.values():
    for _method in _service.methods:
        _lasts = _method.server_streaming
        REQUESTS.wrap(_method.full_name, _answer, lasts=_lasts)

SOURCES = Sources(
    version="1.2.3",
    quorum=lambda: LEADING,
    applied=lambda: 49_000,
    metadata_size=lambda: MetadataSize(
        streams=1,
        objects=9,
        prepared_objects=2,
        committed_objects=3,
        destroyed_objects=4,
        stream_set_objects=5,
        nodes=6,
        keys=7,
        committed_bytes=8,
    ),
    certificates=lambda: [CertificateState(plane="http", not_after=END, replaced=1, refused=2)],
    connections=lambda: {"clients": 3, "peers": 2, "http": 1},
    refused_connections={"peers": {"hello_refused": 3}, "http": {}},
    handshakes=lambda: 11,
    refused_calls={"BUSY": 0, "NO_IDENTITY": 5},
    commits=CommitTally(20, 1, times(*[0.004] * 20), times(0.1)),
    request_bytes=lambda: 4096,
    request_bytes_max=1 << 29,
    memory_limit=1 << 30,
    audit=None,
    backup=lambda: BackupStatus(49_900, 100, 2_500, "the bucket is away"),
    deletion=lambda: DeletionStatus(
        in_flight=0,
        refused=0,
        stuck=0,
        sample=(),
        rate=2_000.0,
        unbacked=12,
        unbacked_ms=70_500,
        ahead=4,
        ahead_sample=(("0a00/test/10", "offsets 5 to 10 of stream 3 lie beyond the end 5"),),
        deleted=30,
        failed=2,
    ),
    feature_level=lambda: 2,
    lease_left_ms=lambda: 25_000,
    reconcile_runs=lambda: ReportedRuns(Runs(last_success_ms=5_000, orphan_bytes=70, missing=3)),
    requests=REQUESTS,
    admission=Admission(),
    leaderships=Leaderships(begun=2, ended=1),
    peer_failures={NodeId(2): 3},
    flushes=times(0.001, 0.001, 0.003),
    appended_bytes=lambda: 1_000,
    log_bytes=lambda: 900,
    free_bytes=lambda: 1 << 40,
    checkpoints=CheckpointTally(times(2.0), 1, 5_000, 4_000),
    now_ms=lambda: 10_000,
    metadata_used=lambda: {"streams": 1, "kv_keys": 7},
    metadata_limits={"streams": 10, "kv_keys": 70},
    bucket=lambda: StoreMetrics({"put": OperationMetrics(calls=9, failures=1, seconds=0.5)}),
    sessions=lambda: {NodeState.ACTIVE: 5, NodeState.FENCED: 1},
    fenced=lambda: 4,
    recoveries=lambda: 1,
    compactions=lambda: 2,
)


def registry_of(sources: Sources = SOURCES) -> CollectorRegistry:
    registry = new_registry(ControllerCollector(sources))
    LoopLag(registry)
    return registry


def audited(writer: AuditWriter) -> CollectorRegistry:
    """Return the registry of a controller with an audit log."""
    return registry_of(replace(SOURCES, audit=writer))


def nothing_yet() -> ClientMetrics:
    return snapshot(ClientTally(), ReaderStats())


def client_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ClientCollector(nothing_yet))
    return registry


def kafka_registry() -> CollectorRegistry:
    """Return what a broker gives beside the metrics of its client and of the process."""
    registry = CollectorRegistry()
    registry.register(KafkaCollector(BrokerTally(), BrokerState))
    return registry
