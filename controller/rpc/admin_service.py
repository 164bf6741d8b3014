"""AdminService: what one controller knows of the cluster, and its map's hash."""

from collections.abc import Mapping
from typing import Any

from controller.config import ControllerConfig
from controller.loop.controller import MetadataController
from controller.loop.quorum_driver import QuorumDriver
from controller.rpc.door import UnaryHandler, guarded
from controller.rpc.status import Context
from proto import admin_pb2 as pb


class AdminHandlers:
    """Answers from this controller's own state, whether it leads or not."""

    def __init__(
        self, config: ControllerConfig, driver: QuorumDriver, controller: MetadataController
    ) -> None:
        self._config = config
        self._driver = driver
        self._controller = controller

    def unary(self) -> Mapping[str, UnaryHandler]:
        """Return the handlers by method name."""
        return {
            "DescribeCluster": guarded(self._describe_cluster),
            "StateHash": guarded(self._state_hash),
        }

    async def _describe_cluster(self, _: Any, __: Context) -> pb.DescribeClusterResponse:
        leader = self._driver.leader
        size = self._controller.cluster_map.size()
        return pb.DescribeClusterResponse(
            cluster_id=self._config.cluster_id,
            leader_id=-1 if leader is None else leader[0],
            leader_endpoint="" if leader is None else leader[1],
            epoch=self._driver.epoch,
            high_watermark=self._driver.high_watermark,
            answered_by=self._config.node_id,
            controllers=[
                pb.Controller(node_id=node_id, endpoint=endpoint, voter=True)
                for node_id, endpoint in sorted(self._config.voters.items())
            ],
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
        )

    async def _state_hash(self, request: pb.StateHashRequest, _: Context) -> pb.StateHashResponse:
        offset, digest = await self._controller.state_hash(request.at_offset)
        return pb.StateHashResponse(offset=offset, hash=digest, answered_by=self._config.node_id)
