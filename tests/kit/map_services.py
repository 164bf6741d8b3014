"""The gRPC services of a map, for a controller in the test's own process."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir

import grpc

from streammeta.controller.lifecycle.broker_sessions import Sessions
from streammeta.controller.lifecycle.failover import Heartbeats
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.calls.memory_budget import MemoryBudget, MemoryGuard
from streammeta.controller.rpc.services.commit_pipeline import CommitPipeline
from streammeta.controller.rpc.services.contract import (
    MetadataHandlers,
    NodeHandlers,
    service_handler,
)
from streammeta.controller.rpc.services.routes import MAP_SERVICES, LeaderView, routed, routes
from streammeta.controller.rpc.services.snapshot_spool import SnapshotSpool
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.trust.audit.auditor import Auditor
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.rpc.contract import SERVICES


def map_services(
    cluster_id: str,
    controller: MetadataController,
    sessions: Sessions,
    clock: Clock,
    auditor: Auditor | None = None,
    *,
    memory: MemoryBudget | None = None,
    guard: MemoryGuard | None = None,
    answers: MemoryBudget | None = None,
    spool: SnapshotSpool | None = None,
    authenticator: Authenticator | None = None,
) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return every service of the contract that asks the map."""
    heartbeats = Heartbeats(controller, sessions, clock)
    view = LeaderView(sessions.state, heartbeats.compacted_by)
    unary = {
        name.rpartition(".")[2]: routed(route, controller)
        for name, route in routes(cluster_id, view).items()
    }
    unary |= NodeHandlers(heartbeats, controller.gate).unary()
    streams = MetadataHandlers(controller, spool or SnapshotSpool(Path(gettempdir()))).streams()
    pipelines = {"CommitPipeline": CommitPipeline(controller, memory=memory, guard=guard).handle}
    entrance = CallPipeline(
        authenticator or Authenticator(cluster_id), auditor, memory, guard=guard, answers=answers
    )
    return tuple(
        service_handler(service, entrance, unary, streams, pipelines)
        for service in (*MAP_SERVICES, SERVICES["MetadataService"])
    )
