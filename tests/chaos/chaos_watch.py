"""Leader and voters, asked of every controller directly, past whatever the network suffers."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from streammeta.v1 import admin_pb2, admin_pb2_grpc, quorum_pb2_grpc
from streammeta.v1 import quorum_pb2 as pb
from tests.chaos.chaos_client import Channels
from tests.chaos.chaos_cluster import CLUSTER_ID

_ASK_S = 0.5
_TRANSFER_S = 2.0
_CHANGE_MS = 3_000
_CALL_S = _CHANGE_MS / 1000 + 1
_PAUSE_S = 0.1

Answer = TypeVar("Answer")


class LeaderWatch(Channels):
    """Asks controllers by id."""

    leader: int | None = None
    """The leader when last asked; a deposed one is not listened to."""

    async def describe(self, node_id: int) -> admin_pb2.DescribeClusterResponse | None:
        """What one controller knows; None if it does not answer."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channels[node_id])
        request = admin_pb2.DescribeClusterRequest()
        return await _answer(stub.DescribeCluster(request, timeout=_ASK_S))

    def quorum_stub(self, node_id: int) -> "quorum_pb2_grpc.QuorumServiceAsyncStub":
        return quorum_pb2_grpc.QuorumServiceStub(self._channels[node_id])

    async def describe_quorum(self, node_id: int) -> pb.DescribeQuorumResponse | None:
        """How one controller sees the quorum and itself; None if it does not answer."""
        request = pb.DescribeQuorumRequest()
        return await _answer(self.quorum_stub(node_id).DescribeQuorum(request, timeout=_ASK_S))

    async def transfer(self, node_id: int, to: int | None = None) -> None:
        """Ask a controller to hand over leadership, to any other unless said; it may refuse."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channels[node_id])
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.TransferLeadership(
                admin_pb2.TransferLeadershipRequest(to_node_id=to), timeout=_TRANSFER_S
            )

    async def ask(self) -> int | None:
        """Ask all; return the leader of the latest epoch by its own word, None if there is none."""
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
        """Return the leader as soon as there is one. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            leader = await self.ask()
            if leader is not None and leader != other_than:
                return leader
            await asyncio.sleep(0.02)
        raise TimeoutError(f"no leader within {within_s:.0f} s (other than {other_than})")


async def _answer(call: Awaitable[Answer]) -> Answer | None:
    try:
        return await call
    except grpc.aio.AioRpcError:
        return None


async def replace_voter(watch: LeaderWatch, voter: pb.Voter, within_s: float) -> None:
    """Make a running observer the voter of its node id, in place of the disk that voted before.

    Does by its calls what operators do with `streammeta quorum`, and looks again after each: the
    outcome of a change may be unknown, and an uncommitted one may be undone. Raises TimeoutError.
    """
    deadline = time.monotonic() + within_s
    committed_at: int | None = None
    while time.monotonic() < deadline:
        leader = await watch.ask()
        view = None if leader is None else await watch.describe_quorum(leader)
        if leader is not None and view is not None:
            if voter.key not in [voter.key for voter in view.voters]:
                committed_at = None
                await _ask_next_step(watch, leader, view, voter)
            elif committed_at is None:
                committed_at = view.end_offset
            elif view.high_watermark >= committed_at:
                return
        await asyncio.sleep(_PAUSE_S)
    raise TimeoutError(
        f"controller {voter.key.node_id} does not vote with its new disk after {within_s:.0f} s"
    )


async def _ask_next_step(
    watch: LeaderWatch, leader: int, view: pb.DescribeQuorumResponse, voter: pb.Voter
) -> None:
    """Ask for the old disk's removal, or if that is done for the new one's vote."""
    stub = watch.quorum_stub(leader)
    old = next((one.key for one in view.voters if one.key.node_id == voter.key.node_id), None)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if old is not None:
            await stub.RemoveVoter(
                pb.RemoveVoterRequest(cluster_id=CLUSTER_ID, key=old, timeout_ms=_CHANGE_MS),
                timeout=_CALL_S,
            )
        else:
            await stub.AddVoter(
                pb.AddVoterRequest(cluster_id=CLUSTER_ID, voter=voter, timeout_ms=_CHANGE_MS),
                timeout=_CALL_S,
            )
