"""Snapshots, members and disks over real gRPC: whoever was away, joins or is empty catches up."""

from collections.abc import Awaitable

import grpc
import pytest

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.config import QuorumLimits
from streammeta.controller.quorum.messages import QuorumError
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.controller.runtime.checkpointer import CheckpointLimits
from streammeta.controller.runtime.quorum_errors import TransferRefusedError, VoterChangeError
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import read_failure
from streammeta.v1 import quorum_pb2 as pb
from streammeta.v1.quorum_pb2_grpc import QuorumServiceStub
from tests.quorum.tcp_quorum import CLUSTER, Node, TcpQuorum, eventually, quorum_with

SMALL = CheckpointLimits(log_bytes=20_000)
CHUNKS = QuorumLimits(snapshot_chunk_bytes=3_000, tail_bytes=5_000)
PAYLOAD_BYTES = 500


async def write(quorum: TcpQuorum, count: int) -> list[bytes]:
    """Append and commit `count` payloads at the leader; return everything it has committed."""
    node = quorum.nodes[await quorum.leader()]
    for number in range(count):
        payload = b"%06d" % number + b"x" * PAYLOAD_BYTES
        end = node.driver.append([payload], required_base_offset=node.driver.next_offset)
        await eventually(lambda end=end: node.machine.high_watermark >= end, 10, "commit")  # type: ignore[misc]
    return list(node.machine.committed)


async def has_everything(node: Node, wanted: list[bytes]) -> None:
    await eventually(lambda: node.machine.committed == wanted, 20, "it has everything")


async def trimmed(quorum: TcpQuorum, above: int) -> None:
    """Write until the leader's log begins above an offset."""
    node = quorum.nodes[await quorum.leader()]
    for _ in range(50):
        if node.driver.describe().log_start_offset > above:
            return
        await write(quorum, 20)
    raise AssertionError(f"the leader's log begins at {node.driver.describe().log_start_offset}")


async def observer_key(quorum: TcpQuorum, node_id: int) -> ReplicaKey:
    """The key of a node that fetches without a vote, once the leader knows it."""
    leader = quorum.nodes[await quorum.leader()].driver
    wanted = quorum.nodes[node_id].journal.identity.directory_id

    def known() -> bool:
        return any(seen.key.directory_id == wanted for seen in leader.describe().observers)

    await eventually(known, 10, "the leader knows the observer")
    return ReplicaKey(NodeId(node_id), wanted)


def voter_ids(quorum: TcpQuorum, node_id: int) -> set[int]:
    return {int(seen.key.node_id) for seen in quorum.nodes[node_id].driver.describe().voters}


@quorum_with(checkpoints=SMALL, limits=CHUNKS)
async def test_a_voter_that_was_away_for_long_loads_a_snapshot(quorum: TcpQuorum) -> None:
    leader = await quorum.settled_leader()
    away = (leader + 1) % 3
    await write(quorum, 5)
    await quorum.kill(away)
    await trimmed(quorum, above=20)
    wanted = await write(quorum, 5)
    node = await quorum.start(away)
    await has_everything(node, wanted)
    assert node.machine.loaded, "it was a snapshot that brought what it lacked"


@quorum_with(size=1, spare=1, checkpoints=SMALL, limits=CHUNKS)
async def test_a_joining_node_is_made_a_voter_and_votes(quorum: TcpQuorum) -> None:
    await quorum.leader()
    await trimmed(quorum, above=0)
    node = await quorum.start(1)
    key = await observer_key(quorum, 1)
    (observer,) = quorum.nodes[0].driver.describe().observers
    assert observer.endpoint == quorum.client_endpoints[1]
    await quorum.nodes[0].driver.add_voter(Voter(key, quorum.endpoints[1]), 10_000)
    await has_everything(node, await write(quorum, 3))
    assert node.machine.loaded
    assert voter_ids(quorum, 0) == voter_ids(quorum, 1) == {0, 1}

    await quorum.settled_leader()
    described = {seen.endpoint for seen in quorum.nodes[0].driver.describe().voters}
    assert described == set(quorum.client_endpoints), "the new voter has told where clients find it"
    await quorum.nodes[0].driver.transfer_leadership(NodeId(1), 10_000)
    await eventually(lambda: quorum.nodes[1].driver.is_leader, 10, "the new voter leads")
    await quorum.nodes[1].driver.remove_voter(quorum_key(quorum, 0), 10_000)
    await quorum.stop(0)
    assert len(await write(quorum, 3)) > 3
    assert voter_ids(quorum, 1) == {1}


def quorum_key(quorum: TcpQuorum, node_id: int) -> ReplicaKey:
    return ReplicaKey(NodeId(node_id), quorum.nodes[node_id].journal.identity.directory_id)


async def test_a_lost_disk_does_not_vote_until_it_is_added_again(quorum: TcpQuorum) -> None:
    leader = await quorum.settled_leader()
    lost = (leader + 1) % 3
    old = quorum_key(quorum, lost)
    await write(quorum, 5)
    await quorum.kill(lost)
    quorum.wipe(lost)
    node = await quorum.start(lost)
    new = await observer_key(quorum, lost)
    assert new != old
    driver = quorum.nodes[await quorum.leader()].driver
    with pytest.raises(VoterChangeError) as refused:
        await driver.add_voter(Voter(new, quorum.endpoints[lost]), 5_000)
    assert refused.value.error is QuorumError.DUPLICATE_VOTER
    await driver.remove_voter(old, 10_000)
    await driver.add_voter(Voter(new, quorum.endpoints[lost]), 10_000)
    await has_everything(node, await write(quorum, 3))
    seen = driver.describe().voters
    assert {voter.key for voter in seen} == {quorum_key(quorum, each) for each in range(3)}


async def test_operators_hear_why_a_change_is_refused(quorum: TcpQuorum) -> None:
    leader = await quorum.settled_leader()
    follower = (leader + 1) % 3
    voter = pb.Voter(key=pb.ReplicaKey(node_id=9, directory_id="d"), endpoint="127.0.0.1:1")
    nobody = pb.ReplicaKey(node_id=9)
    good = pb.AddVoterRequest(cluster_id=CLUSTER, voter=voter, timeout_ms=1000)
    async with (
        client_channel(quorum.client_endpoints[leader]) as to_leader,
        client_channel(quorum.client_endpoints[follower]) as to_follower,
    ):
        leads, follows = QuorumServiceStub(to_leader), QuorumServiceStub(to_follower)

        async def refusal(call: Awaitable[object]) -> tuple[str, str, str]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            failure = read_failure(caught.value)
            named = failure.metadata.get("field", failure.metadata.get("leader_id", ""))
            return failure.code.name, failure.reason, named

        bad = ("INVALID_ARGUMENT", "INVALID_FIELD")
        other = pb.AddVoterRequest(cluster_id="other", voter=voter)
        assert await refusal(leads.AddVoter(other)) == (*bad, "cluster_id")
        nameless = pb.Voter(key=nobody, endpoint="127.0.0.1:1")
        diskless = pb.AddVoterRequest(cluster_id=CLUSTER, voter=nameless)
        assert await refusal(leads.AddVoter(diskless)) == (*bad, "voter.key.directory_id")
        placeless = pb.AddVoterRequest(
            cluster_id=CLUSTER, voter=pb.Voter(key=voter.key, endpoint="nowhere")
        )
        assert await refusal(leads.AddVoter(placeless)) == (*bad, "voter.endpoint")
        lost = pb.Voter(key=voter.key, endpoint="h:1", client_endpoint="nowhere")
        lost_to_clients = pb.AddVoterRequest(cluster_id=CLUSTER, voter=lost)
        assert await refusal(leads.AddVoter(lost_to_clients)) == (*bad, "voter.client_endpoint")
        hasty = pb.AddVoterRequest(cluster_id=CLUSTER, voter=voter, timeout_ms=-1)
        assert await refusal(leads.AddVoter(hasty)) == (*bad, "timeout_ms")
        status, reason, _ = await refusal(leads.AddVoter(good))
        assert status in ("FAILED_PRECONDITION", "DEADLINE_EXCEEDED")
        assert reason in QuorumError.__members__
        unknown = pb.RemoveVoterRequest(cluster_id=CLUSTER, key=nobody)
        assert await refusal(leads.RemoveVoter(unknown)) == ("NOT_FOUND", "VOTER_NOT_FOUND", "")
        elsewhere = ("UNAVAILABLE", "NOT_LEADER", str(leader))
        assert await refusal(follows.AddVoter(good)) == elsewhere
        described = pb.DescribeQuorumRequest(leader_only=True)
        assert await refusal(follows.DescribeQuorum(described)) == elsewhere
    assert voter_ids(quorum, leader) == {0, 1, 2}


async def test_leadership_is_not_handed_to_who_cannot_take_it(quorum: TcpQuorum) -> None:
    leader = await quorum.settled_leader()
    driver = quorum.nodes[leader].driver
    with pytest.raises(TransferRefusedError):
        await driver.transfer_leadership(NodeId(9), 5_000)
    assert driver.is_leader
