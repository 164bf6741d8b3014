"""Putting a new disk in a lost one's place, while anything else may be broken too.

Does by its calls what operators do with `streammeta quorum remove-voter` and `add-voter`: looks who
votes, asks whoever leads for the next step, and looks again, since the outcome of a change may be
unknown and an uncommitted one may be undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc

from streammeta.v1 import quorum_pb2 as pb
from tests.chaos.chaos_cluster import CLUSTER_ID
from tests.chaos.chaos_watch import LeaderWatch

_CHANGE_MS = 3_000
_CALL_S = _CHANGE_MS / 1000 + 1
_PAUSE_S = 0.1


async def replace_voter(watch: LeaderWatch, voter: pb.Voter, within_s: float) -> None:
    """Make a running observer the voter of its node id, in place of the disk that voted before.

    Raises TimeoutError.
    """
    deadline = time.monotonic() + within_s
    committed_at: int | None = None
    while time.monotonic() < deadline:
        leader = await watch.ask()
        view = None if leader is None else await watch.describe_quorum(leader)
        if leader is not None and view is not None:
            if voter.key not in [one.key for one in view.voters]:
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
