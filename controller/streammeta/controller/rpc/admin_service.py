"""AdminService: what one controller knows of the cluster, and what operators ask it to do."""

from collections.abc import Mapping
from typing import Any

from streammeta.controller.config import ConfigError, ControllerConfig, check_controller_id
from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import NONE_ID, NodeId
from streammeta.controller.lifecycle.bucket_claim import BucketClaims
from streammeta.controller.rpc.door import UnaryHandler, guarded
from streammeta.controller.rpc.status import Context
from streammeta.controller.runtime.controller import MetadataController
from streammeta.controller.runtime.operations import QuorumDescription
from streammeta.controller.runtime.quorum_driver import QuorumDriver
from streammeta.v1 import admin_pb2 as pb

OBSERVER_PRESENT_MS = 10_000
"""An observer that has not fetched for so long is stopped, lost or another by now."""

TRANSFER_TIMEOUT_MS = 30_000
"""How long a transfer may take; the driver gives up long before if the successor is slow."""


class AdminHandlers:
    """Answers from this controller's own state, whether it leads or not, but for transfers."""

    def __init__(
        self,
        config: ControllerConfig,
        driver: QuorumDriver,
        controller: MetadataController,
        bucket: BucketClaims,
    ) -> None:
        self._config = config
        self._driver = driver
        self._controller = controller
        self._bucket = bucket

    def unary(self) -> Mapping[str, UnaryHandler]:
        """Return the handlers by method name."""
        return {
            "DescribeCluster": guarded(self._describe_cluster),
            "StateHash": guarded(self._state_hash),
            "TakeSnapshot": guarded(self._take_snapshot),
            "TransferLeadership": guarded(self._transfer_leadership),
        }

    async def _describe_cluster(self, _: Any, __: Context) -> pb.DescribeClusterResponse:
        leader = self._driver.leader
        seen = self._driver.describe()
        size = self._controller.cluster_map.size()
        return pb.DescribeClusterResponse(
            cluster_id=self._config.cluster_id,
            leader_id=-1 if leader is None else leader[0],
            leader_endpoint="" if leader is None else leader[1],
            epoch=self._driver.epoch,
            high_watermark=self._driver.high_watermark,
            answered_by=self._config.node_id,
            controllers=_controllers(seen),
            size=pb.MapSize(
                streams=size.streams,
                objects=size.objects,
                prepared_objects=size.prepared_objects,
                committed_objects=size.committed_objects,
                destroyed_objects=size.destroyed_objects,
                stream_set_objects=size.stream_set_objects,
                nodes=size.nodes,
                keys=size.keys,
                committed_bytes=size.committed_bytes,
            ),
            object_namespace=self._config.namespace,
            cluster_uuid=self._bucket.cluster_uuid,
            bucket_problem=self._bucket.problem,
        )

    async def _state_hash(self, request: pb.StateHashRequest, _: Context) -> pb.StateHashResponse:
        seen = await self._controller.state_hash(request.at_offset)
        return pb.StateHashResponse(
            offset=seen.offset,
            hash=seen.digest,
            answered_by=self._config.node_id,
            log_hash=seen.log_hash,
        )

    async def _take_snapshot(
        self, _: pb.TakeSnapshotRequest, __: Context
    ) -> pb.TakeSnapshotResponse:
        taken = await self._driver.take_snapshot()
        return pb.TakeSnapshotResponse(
            end_offset=taken.end_offset, epoch=taken.epoch, answered_by=self._config.node_id
        )

    async def _transfer_leadership(
        self, request: pb.TransferLeadershipRequest, context: Context
    ) -> pb.TransferLeadershipResponse:
        successor = None
        if request.to_node_id != NONE_ID:
            successor = _controller_id("to_node_id", request.to_node_id)
        await self._driver.transfer_leadership(successor, TRANSFER_TIMEOUT_MS)
        return pb.TransferLeadershipResponse()


def _controllers(seen: QuorumDescription) -> list[pb.Controller]:
    """Voters, and observers that fetch; a leader remembers those that are gone for a while."""
    present = [(voter, True) for voter in seen.voters]
    present += [
        (observer, False)
        for observer in seen.observers
        if observer.last_fetch_age_ms is not None
        and observer.last_fetch_age_ms < OBSERVER_PRESENT_MS
    ]
    return [
        pb.Controller(node_id=replica.key.node_id, endpoint=replica.endpoint, voter=is_voter)
        for replica, is_voter in sorted(present, key=lambda item: item[0].key.node_id)
    ]


def _controller_id(field: str, node_id: int) -> NodeId:
    try:
        check_controller_id(field, node_id)
    except ConfigError as error:
        raise InvalidRequestError(field, str(error).removeprefix(f"{field}: ")) from None
    return NodeId(node_id)
