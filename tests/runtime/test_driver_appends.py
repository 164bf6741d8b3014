"""A leader's appends: their batches and offsets, refusals, and the words for operators."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.controller.errors import NotLeaderError, OutcomeUnknownError
from streammeta.controller.features import UNTOLD
from streammeta.controller.ids import EndOffset, NodeId
from streammeta.controller.metadata.api.requests import GetKVs, KVKey, KVToPut, PutKVs
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.config import QuorumLimits
from streammeta.controller.quorum.voters import Voter
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.services.contract import service_handler
from streammeta.controller.rpc.services.quorum import QuorumServicer
from streammeta.controller.runtime.persistence import flush_scheduling
from streammeta.controller.runtime.quorum_errors import RecordTooLargeError, UncommittedLogFullError
from streammeta.controller.runtime.replication import append_batching
from streammeta.controller.runtime.replication.peer_versions import PeerVersions
from streammeta.controller.runtime.writer.feature_updates import FeatureUpdates
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import RpcFailure, read_failure
from streammeta.v1 import quorum_pb2 as pb
from streammeta.v1.quorum_pb2_grpc import QuorumServiceStub
from tests.kit.grpc_servers import served
from tests.kit.memory_cluster import (
    CLUSTER,
    STEADY,
    MemoryCluster,
    Node,
    answered,
    create,
    is_fetch,
    stream_ids,
)
from tests.kit.waiting import PATIENCE_S, until


async def test_refused_appends_change_nothing(tmp_path: Path) -> None:
    limits = QuorumLimits(max_batch_bytes=1_000, max_uncommitted_bytes=1_500)
    async with MemoryCluster(tmp_path, limits=limits) as cluster:
        await cluster.fill("a", 1)
        leader = await cluster.leader()
        driver = cluster.nodes[leader].driver
        before = driver.next_offset
        with pytest.raises(RecordTooLargeError, match="1000") as refused:
            driver.append([b"x" * 1_000], required_base_offset=before)
        assert (refused.value.field, refused.value.limit) == ("request", 1_000)
        assert driver.next_offset == before
        cluster.isolate(leader)
        driver.append([b"x" * 900], required_base_offset=before)
        with pytest.raises(UncommittedLogFullError):
            driver.append([b"x" * 900], required_base_offset=before + 1)
        assert driver.next_offset == before + 1
        await until(lambda: not driver.is_leader, "check-quorum deposes a lone leader")


async def test_many_appends_of_one_turn_become_one_batch(lone: MemoryCluster) -> None:
    await lone.fill("a", 1)
    node = lone.nodes[await lone.leader()]
    start = node.driver.next_offset
    await asyncio.gather(*(node.controller.write(create(f"b-{i}")) for i in range(100)))
    (batch,) = node.journal.read(EndOffset(start), 1 << 20)
    assert len(batch.payloads) == 100


async def test_a_flush_begins_the_batch_in_the_same_turn(lone: MemoryCluster) -> None:
    await lone.fill("a", 1)
    driver = lone.nodes[await lone.leader()].driver
    start = driver.next_offset
    ends = []
    for _ in range(2):
        driver.append([b"x"], required_base_offset=driver.next_offset)
        ends.append(driver._core.log.end_offset)
        driver.flush()
        driver.flush()
        ends.append(driver._core.log.end_offset)
    assert ends == [start, start + 1, start + 1, start + 2]


def flush_on_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no flush be too slow for the event loop."""
    monkeypatch.setattr(flush_scheduling, "QUICK_S", float("inf"))
    monkeypatch.setattr(flush_scheduling, "SLOW_S", float("inf"))


async def test_a_follower_acknowledges_what_an_answer_brings_in_the_turn_of_that_answer(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush_on_loop(monkeypatch)
    await cluster.fill("a", 1)
    follower = cluster.nodes[await cluster.follower()]
    take, sent = follower.driver.on_response, follower.transport.send
    acknowledged: list[int] = []
    kept_up: list[bool] = []

    def send(request: messages.Request) -> None:
        if isinstance(request, messages.FetchRequest):
            acknowledged.append(request.fetch_offset)
        sent(request)

    def on_response(response: messages.Response) -> None:
        take(response)
        if isinstance(response, messages.FetchResponse) and response.batches:
            kept_up.append(acknowledged[-1:] == [response.batches[-1].end_offset])

    monkeypatch.setattr(follower.transport, "send", send)
    monkeypatch.setattr(follower.driver, "on_response", on_response)
    await cluster.fill("b", 3)
    await until(lambda: len(kept_up) >= 2, "the follower has fetched")
    assert any(kept_up), "the thread may have been at work before"


async def test_a_follower_whose_flush_fails_ends_and_acknowledges_nothing(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush_on_loop(monkeypatch)
    await cluster.fill("a", 1)
    leader = await cluster.leader()
    follower = next(node for node_id, node in cluster.nodes.items() if node_id != leader)
    sent = follower.transport.send
    acknowledged: list[int] = []

    def send(request: messages.Request) -> None:
        if isinstance(request, messages.FetchRequest):
            acknowledged.append(request.fetch_offset)
        sent(request)

    def fail() -> None:
        raise OSError(5, "disk on fire")

    await cluster.hash_at(follower.key.node_id, cluster.nodes[leader].controller.committed_end)
    monkeypatch.setattr(follower.transport, "send", send)
    monkeypatch.setattr(follower.journal._segments[-1], "sync", fail)
    flushed = follower.journal.flushed_end
    await cluster.fill("b", 1)
    with pytest.raises(OSError, match="on fire"):
        await asyncio.wait_for(follower.driver.fatal, 60)
    assert all(offset <= flushed for offset in acknowledged)


async def test_a_failed_flush_ends_the_replica(
    lone: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lone.fill("a", 1)
    node = lone.nodes[await lone.leader()]
    committed = node.controller.committed_end

    def fail() -> None:
        raise OSError(5, "disk on fire")

    monkeypatch.setattr(node.journal._segments[-1], "sync", fail)
    with pytest.raises(OutcomeUnknownError):
        await node.controller.write(create("b"))
    with pytest.raises(OSError, match="on fire"):
        await asyncio.wait_for(node.driver.fatal, 60)
    assert (node.driver.is_leader, node.controller.committed_end) == (False, committed)


async def test_a_follower_that_stops_leaves_the_others_at_work(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    await cluster.stop(await cluster.follower())
    assert stream_ids(await cluster.write(create("b"))) == (1,)


KEY = pb.ReplicaKey(node_id=9, directory_id="d")
VOTER = pb.Voter(key=KEY, endpoint="127.0.0.1:1")


def add_voter(**changes: Any) -> pb.AddVoterRequest:
    fields: dict[str, Any] = {"cluster_id": CLUSTER, "voter": VOTER, "timeout_ms": 1_000}
    return pb.AddVoterRequest(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cluster_id": "other"}, "cluster_id"),
        (
            {"voter": pb.Voter(key=pb.ReplicaKey(node_id=9), endpoint="127.0.0.1:1")},
            "voter.key.directory_id",
        ),
        ({"voter": pb.Voter(key=KEY, endpoint="nowhere")}, "voter.endpoint"),
        (
            {"voter": pb.Voter(key=KEY, endpoint="h:1", client_endpoint="nowhere")},
            "voter.client_endpoint",
        ),
        ({"timeout_ms": -1}, "timeout_ms"),
    ],
)
async def test_a_voter_that_is_not_well_described_is_refused_by_field(
    lone: MemoryCluster, changes: dict[str, Any], field: str
) -> None:
    await lone.fill("a", 1)
    async with operator_of(lone, 0) as stub:
        failure = await refusal(stub.AddVoter(add_voter(**changes)))
    assert (failure.code, failure.reason) == (INVALID, "INVALID_FIELD")
    assert failure.metadata["field"] == field


async def test_operators_hear_why_a_change_is_refused(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    leader = await cluster.leader()
    async with operator_of(cluster, leader) as stub:
        stranger = await refusal(stub.AddVoter(add_voter()))
        assert stranger.reason in messages.QuorumError.__members__
        other_disk = pb.ReplicaKey(node_id=leader, directory_id="of another machine")
        unknown = pb.RemoveVoterRequest(cluster_id=CLUSTER, key=other_disk)
        assert (await refusal(stub.RemoveVoter(unknown))).reason == "VOTER_NOT_FOUND"
    async with operator_of(cluster, next(i for i in cluster.nodes if i != leader)) as stub:
        asked = pb.DescribeQuorumRequest(leader_only=True)
        for call in (stub.AddVoter(add_voter()), stub.DescribeQuorum(asked)):
            failure = await refusal(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_LEADER")
            assert failure.metadata["leader_id"] == str(leader)


INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def refusal(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return read_failure(caught.value)


@asynccontextmanager
async def operator_of(cluster: MemoryCluster, node_id: int) -> AsyncIterator[Any]:
    """Serve the quorum of a node to operators; gives what they call."""
    service = pb.DESCRIPTOR.services_by_name["QuorumService"]
    node = cluster.nodes[node_id]
    versions = PeerVersions(NodeId(node_id), UNTOLD)
    features = FeatureUpdates(node.driver, node.controller, versions)
    unary = QuorumServicer(node.driver, CLUSTER, features).unary()
    async with (
        served(service_handler(service, CallPipeline(Authenticator(CLUSTER)), unary)) as endpoint,
        client_channel(endpoint) as channel,
    ):
        yield QuorumServiceStub(channel)


WAITING = 10


async def settle() -> None:
    """Let everything that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_nobody_waits_while_there_is_room() -> None:
    turns = append_batching.AppendTurns()
    await asyncio.wait_for(turns.wait(append_batching.BATCHES_UNDER_WAY_MAX - 1), PATIENCE_S)


async def test_who_waits_goes_on_together_and_nobody_overtakes() -> None:
    turns, done = append_batching.AppendTurns(), []

    async def append(name: str, under_way: int) -> None:
        await turns.wait(under_way)
        done.append(name)

    tasks = [
        asyncio.create_task(append("first", append_batching.BATCHES_UNDER_WAY_MAX)),
        asyncio.create_task(append("second", append_batching.BATCHES_UNDER_WAY_MAX)),
        asyncio.create_task(append("late", 0)),
    ]
    await settle()
    turns.give_if(append_batching.BATCHES_UNDER_WAY_MAX)
    await settle()
    assert done == []
    tasks[1].cancel()  # its caller has gone
    turns.give_if(append_batching.BATCHES_UNDER_WAY_MAX - 1)
    await settle()
    assert done == ["first", "late"]


async def test_many_that_waited_append_in_several_turns_of_the_event_loop() -> None:
    """All go on, whether or not those before them append anything."""
    turns, done = append_batching.AppendTurns(), []

    async def append(number: int) -> None:
        await turns.wait(append_batching.BATCHES_UNDER_WAY_MAX)
        done.append(number)

    tasks = [asyncio.create_task(append(number)) for number in range(1_000)]
    await settle()
    turns.give_if(0)
    before = 0
    while len(done) < len(tasks):
        await asyncio.sleep(0)
        assert len(done) - before <= append_batching.GIVEN_PER_TURN
        before = len(done)
    assert done == sorted(done)


async def test_writes_that_arrive_behind_two_batches_share_the_third(
    cluster: MemoryCluster,
) -> None:
    await cluster.fill("a", 1)
    node = cluster.nodes[await cluster.leader()]
    cluster.drops = lambda sender, other, request: is_fetch(request)
    begun = node.driver.next_offset
    writes = []
    for number in range(append_batching.BATCHES_UNDER_WAY_MAX + WAITING):
        writes.append(asyncio.create_task(node.controller.write(create(f"b{number}"))))
        await settle()  # so that each is a batch of its own if it may
    assert node.driver.next_offset == begun + append_batching.BATCHES_UNDER_WAY_MAX

    cluster.drops = lambda *_: False

    answers = await asyncio.gather(*writes)
    assert [stream_ids(answer) for answer in answers] == [
        (1 + number,) for number in range(len(writes))
    ]
    batches = node.journal.read(EndOffset(begun), 1 << 20)
    ends = [batch.end_offset for batch in batches]
    assert ends == [begun + 1, begun + 2, begun + len(writes)]


async def test_who_waits_when_leadership_is_lost_is_told(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    old = await cluster.leader()
    node = cluster.nodes[old]
    cluster.isolate(old)
    writes = []
    for number in range(append_batching.BATCHES_UNDER_WAY_MAX + 1):
        writes.append(asyncio.create_task(node.controller.write(create(f"b{number}"))))
        await settle()
    await until(lambda: not node.driver.is_leader, "it to resign")
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes[:-1]] == [
        OutcomeUnknownError
    ] * append_batching.BATCHES_UNDER_WAY_MAX
    with pytest.raises(NotLeaderError):
        await writes[-1]


def update_of(follower: Node, leader: Node) -> messages.UpdateVoterRequest:
    """What makes the leader write a record of its own: a voter that has moved."""
    header = messages.RequestHeader(
        cluster_id=CLUSTER,
        sender=follower.key,
        receiver=leader.key,
        epoch=leader.driver.epoch,
        incarnation=99,
        request_id=99,
    )
    return messages.UpdateVoterRequest(header=header, voter=Voter(follower.key, "moved:1"))


def is_settled(node: Node) -> bool:
    """Whether every voter's disk is recorded, and committed: no other record is on its way."""
    voters = node.driver.describe().voters
    core = node.driver._core
    return all(v.key.directory_id for v in voters) and core.high_watermark == core.log.end_offset


async def test_a_voter_record_between_an_append_and_its_flush_shifts_nothing(
    tmp_path: Path,
) -> None:
    async with MemoryCluster(tmp_path, timings=STEADY) as cluster:
        await cluster.fill("a", 2)
        leader = cluster.nodes[await cluster.leader()]
        await until(lambda: is_settled(leader), "every voter's disk is recorded")
        follower = next(node for node in cluster.nodes.values() if node is not leader)
        put = PutKVs(items=(KVToPut(key="k", value=b"v"),))
        # Both run in this turn of the event loop; what was put is flushed in the next.
        writing = asyncio.create_task(leader.controller.write(put))
        updating = asyncio.create_task(answered(leader.driver, update_of(follower, leader)))
        await updating
        endpoints = {voter.peer_endpoint for voter in leader.driver.describe().voters}
        assert "moved:1" in endpoints, "no record was written in between"
        written = await writing
        get = GetKVs(keys=(KVKey(key="k"),))
        for node in cluster.nodes.values():
            read = await node.controller.read(get, at_least=written.offset)
            assert read.answer == written.answer
