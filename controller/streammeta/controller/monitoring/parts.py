"""Parts of a controller that its metrics, status and pages are computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streammeta.controller.backup.uploader import Backup
from streammeta.controller.journal.journal import Journal
from streammeta.controller.lifecycle.broker_sessions import Sessions
from streammeta.controller.lifecycle.bucket_claim import BucketClaims
from streammeta.controller.lifecycle.deletion import Deletion
from streammeta.controller.lifecycle.failover import Heartbeats
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.registries.limits import MetadataLimits
from streammeta.controller.monitoring.http.probes import Phase
from streammeta.controller.peers.server import PeerServer
from streammeta.controller.peers.transport import TcpPeerTransport
from streammeta.controller.rpc.calls.memory_budget import MemoryBudget
from streammeta.controller.rpc.calls.tally import RequestTally
from streammeta.controller.rpc.services.routes import LeaderView
from streammeta.controller.runtime.load.process_memory import ProcessMemory
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.tls.manager import TlsManager
from streammeta.controller.trust.audit.writer import AuditWriter
from streammeta.storage.object_store.protocol.base import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a controller that monitoring observes."""

    phase: Callable[[], Phase]
    driver: QuorumDriver
    controller: MetadataController
    peers: PeerServer
    tls: TlsManager
    memory: ProcessMemory
    request_memory: MemoryBudget
    audit: AuditWriter | None
    backup: Backup | None
    deletion: Deletion
    requests: RequestTally
    journal: Journal
    data_dir: Path
    transport: TcpPeerTransport
    store: ObjectStore
    sessions: Sessions
    heartbeats: Heartbeats
    metadata_limits: MetadataLimits
    cluster_id: str
    bucket: BucketClaims
    view: LeaderView
    shows_status: bool
    """Whether the status and its pages are served."""

    def cluster_metadata(self) -> ClusterMetadata:
        """Return the metadata. Call it each time, because a snapshot may replace the metadata."""
        return self.controller.cluster_metadata
