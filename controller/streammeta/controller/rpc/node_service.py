"""NodeService.Heartbeat: the one call about nodes that is no request to the map."""

from collections.abc import Mapping

from streammeta.controller.lifecycle.failover import Heartbeats
from streammeta.controller.rpc.convert import error_out, node_identity
from streammeta.controller.rpc.door import UnaryHandler, guarded
from streammeta.controller.rpc.status import Context
from streammeta.controller.runtime.admission import Gate, RequestClass
from streammeta.v1 import common_pb2
from streammeta.v1 import nodes_pb2 as pb


class NodeHandlers:
    """Passes heartbeats on to the leader's sessions."""

    def __init__(self, heartbeats: Heartbeats, gate: Gate) -> None:
        self._heartbeats = heartbeats
        self._gate = gate

    def unary(self) -> Mapping[str, UnaryHandler]:
        """Return the handlers by method name."""
        return {"Heartbeat": guarded(self._heartbeat)}

    async def _heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        async with self._gate.admitted(RequestClass.HEARTBEAT, context.time_remaining()):
            answer = await self._heartbeats.heartbeat(
                node_identity(request.node), wants_shutdown=request.wants_shutdown
            )
        return pb.HeartbeatResponse(
            error=error_out(answer.error),
            may_shutdown=answer.may_shutdown,
            session_timeout_ms=answer.session_timeout_ms,
            recoveries=[
                pb.Recovery(
                    node_id=one.node_id, node_epoch=one.node_epoch, wal_config=one.wal_config
                )
                for one in answer.recoveries
            ],
            compactions=[
                common_pb2.NodeIdentity(node_id=gone.node_id, node_epoch=gone.node_epoch)
                for gone in answer.compactions
            ],
        )
