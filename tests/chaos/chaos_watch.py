"""Who leads, asked of every controller directly, past whatever the network suffers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

import grpc

from streammeta.rpc.connections import client_channel
from streammeta.v1 import admin_pb2, admin_pb2_grpc, quorum_pb2, quorum_pb2_grpc

_ASK_S = 0.5
_TRANSFER_S = 2.0


class LeaderWatch:
    """Asks controllers by id. Make it on the event loop that uses it; close it."""

    def __init__(self, endpoints: Mapping[int, str]) -> None:
        self._channels = {
            node_id: client_channel(endpoint) for node_id, endpoint in endpoints.items()
        }
        self.leader: int | None = None
        """Who led when last asked; a deposed one is not listened to."""

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()

    async def describe(self, node_id: int) -> admin_pb2.DescribeClusterResponse | None:
        """What one controller knows; None if it does not answer."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channels[node_id])
        try:
            answer: admin_pb2.DescribeClusterResponse = await stub.DescribeCluster(
                admin_pb2.DescribeClusterRequest(), timeout=_ASK_S
            )
        except grpc.aio.AioRpcError:
            return None
        return answer

    def quorum_stub(self, node_id: int) -> quorum_pb2_grpc.QuorumServiceAsyncStub:
        """The quorum service of one controller."""
        return quorum_pb2_grpc.QuorumServiceStub(self._channels[node_id])

    async def describe_quorum(self, node_id: int) -> quorum_pb2.DescribeQuorumResponse | None:
        """How one controller sees the quorum and itself; None if it does not answer."""
        try:
            answer: quorum_pb2.DescribeQuorumResponse = await self.quorum_stub(
                node_id
            ).DescribeQuorum(quorum_pb2.DescribeQuorumRequest(), timeout=_ASK_S)
        except grpc.aio.AioRpcError:
            return None
        return answer

    async def transfer(self, node_id: int, to: int | None = None) -> None:
        """Ask a controller to hand over leadership, to any other unless said; it may refuse."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channels[node_id])
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.TransferLeadership(
                admin_pb2.TransferLeadershipRequest(to_node_id=to), timeout=_TRANSFER_S
            )

    async def ask(self) -> int | None:
        """Ask everybody; return who leads the latest epoch by its own word, None if nobody does."""
        answers = await asyncio.gather(*(self.describe(node_id) for node_id in self._channels))
        claims = [
            (answer.epoch, answer.answered_by)
            for answer in answers
            if answer is not None
            and answer.HasField("leader_id")
            and answer.leader_id == answer.answered_by
        ]
        self.leader = max(claims)[1] if claims else None
        return self.leader

    async def watch(self, every_s: float) -> None:
        """Keep `leader` up to date until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(every_s)

    async def wait_for_leader(self, within_s: float, other_than: int | None = None) -> int:
        """Return who leads as soon as somebody does. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            leader = await self.ask()
            if leader is not None and leader != other_than:
                return leader
            await asyncio.sleep(0.02)
        raise TimeoutError(f"no leader within {within_s:.0f} s (other than {other_than})")
