"""Calls of brokers over TLS: by unary, in batches and in columns for their own node alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.trust.policy import parse_policy
from streammeta.rpc.failures import read_failure
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, objects_pb2
from tests.kit.certificates import Authority
from tests.trust.trusted_server import CLUSTER, TrustedServer, trusting

OWN = common_pb2.NodeIdentity(node_id=1007, node_epoch=1)
OTHER = common_pb2.NodeIdentity(node_id=1008, node_epoch=1)
PIPELINE = "/streammeta.v1.ObjectService/CommitPipeline"
DENIED = (
    "PERMISSION_DENIED",
    "NOT_YOUR_NODE",
    {
        "principal": "broker/1007",
        "needs": "broker/1008, or the recovery of node 1008 to be assigned to it",
    },
)


@pytest_asyncio.fixture
async def server(authority: Authority) -> AsyncIterator[TrustedServer]:
    """Yield a leader with the nodes 1007 and 1008."""
    async with trusting(authority) as server:
        for node in (OWN, OTHER):
            await (await server.by(f"broker/{node.node_id}")).register(node)
        yield server


def upload(node: common_pb2.NodeIdentity, object_id: int) -> objects_pb2.CommitPipelineRequest:
    return objects_pb2.CommitPipelineRequest(
        sequence=7,
        uploads=objects_pb2.UploadColumns(
            node=node, object_id=[object_id], object_size=[10], range_count=[0]
        ),
    )


def commit(
    node: common_pb2.NodeIdentity, object_id: int
) -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        node=node,
        object_id=object_id,
        object_size=10,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
    )


async def ended(channel: grpc.aio.Channel, *messages: Any) -> tuple[str, str, dict[str, str]]:
    """Return how a pipeline ends that is sent these messages."""
    while True:
        # An iterator, since a pipeline may have ended before the next message is written.
        sent = iter([message.SerializeToString() for message in messages])
        call: Any = channel.stream_stream(PIPELINE)(sent)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        failure = read_failure(raised.value)
        # grpc.aio's own, of that write, if it has not come to the status that is there.
        if failure.code is not grpc.StatusCode.INTERNAL or failure.reason:
            return failure.code.name, failure.reason, dict(failure.metadata)


async def test_unary_commits_speak_for_the_callers_node(server: TrustedServer) -> None:
    broker = await server.by("broker/1007")
    before = server.state()
    method = "ObjectService/CommitStreamSetObject"
    assert await broker.refusal(method, commit(OTHER, 0)) == DENIED
    assert server.state() == before


async def test_commits_that_arrive_together_are_judged_each(server: TrustedServer) -> None:
    mine, its = await server.by("broker/1007"), await server.by("broker/1008")
    before = server.state()
    calls = [mine.ask(commit(OTHER, number)) for number in range(5)]
    calls += [its.ask(commit(OWN, number)) for number in range(5)]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, grpc.aio.AioRpcError)
        assert read_failure(error).reason == "NOT_YOUR_NODE"
    assert server.state() == before


async def test_a_message_of_commits_is_refused_whole(server: TrustedServer) -> None:
    broker = await server.by("broker/1007")
    prepared = objects_pb2.PrepareObjectsRequest(request_id="ids", node=OWN, count=3, ttl_ms=60_000)
    first = (await broker.ask(prepared)).first_object_id
    before = server.state()
    message = objects_pb2.CommitPipelineRequest(
        sequence=7, commits=[commit(OWN, first), commit(OTHER, first + 1)]
    )
    code, reason, metadata = await ended(broker.channel, message)
    assert (code, reason, metadata) == (*DENIED[:2], {**DENIED[2], "sequence": "7"})
    assert server.state() == before


@pytest.mark.parametrize("count", [1, 3])
async def test_columns_speak_for_the_callers_node(server: TrustedServer, count: int) -> None:
    broker = await server.by("broker/1007")
    before = server.state()
    messages = [upload(OTHER, number) for number in range(count)]
    code, reason, metadata = await ended(broker.channel, *messages)
    assert (code, reason, metadata) == (*DENIED[:2], {**DENIED[2], "sequence": "7"})
    assert server.state() == before


async def test_a_compactor_speaks_for_any_node(server: TrustedServer) -> None:
    compactor = await server.by("compactor/night")
    prepared = await compactor.ask(
        objects_pb2.PrepareObjectsRequest(request_id="c", node=OTHER, count=1, ttl_ms=60_000)
    )
    assert prepared.error == common_pb2.ERROR_CODE_NONE
    code, reason, _ = await compactor.refusal(
        "NodeService/RegisterNode", nodes_pb2.RegisterNodeRequest(node=OTHER)
    )
    assert (code, reason) == ("PERMISSION_DENIED", "ROLE_LACKS_CALL")


async def test_heartbeats_and_registrations_are_the_nodes_own(server: TrustedServer) -> None:
    broker = await server.by("broker/1007")
    before = server.state()
    for method, request in (
        ("NodeService/Heartbeat", nodes_pb2.HeartbeatRequest(node=OTHER)),
        ("NodeService/RegisterNode", nodes_pb2.RegisterNodeRequest(node=OTHER)),
        ("NodeService/UnregisterNode", nodes_pb2.UnregisterNodeRequest(node=OTHER)),
    ):
        code, reason, _ = await broker.refusal(method, request)
        assert (code, reason) == ("PERMISSION_DENIED", "NOT_YOUR_NODE")
    assert server.state() == before
    assert (await broker.ask(nodes_pb2.HeartbeatRequest(node=OWN))).error == 0
    admin = await server.by("admin/alice")
    assert (await admin.ask(nodes_pb2.UnregisterNodeRequest(node=OTHER))).error == 0


async def test_a_new_broker_asks_for_an_id_and_for_nothing_else(server: TrustedServer) -> None:
    new = await server.by("broker/new")
    issued = await new.ask(nodes_pb2.GetNextNodeIdRequest(request_id="first"))
    assert issued.node_id >= 1_000
    for method, request in (
        ("NodeService/RegisterNode", nodes_pb2.RegisterNodeRequest(node=OTHER)),
        ("KVService/GetKVs", kv_pb2.GetKVsRequest()),
        ("ObjectService/GetObjects", objects_pb2.GetObjectsRequest()),
    ):
        code, reason, _ = await new.refusal(method, request)
        assert (code, reason) == ("PERMISSION_DENIED", "ROLE_LACKS_CALL")
    broker = await server.by("broker/1007")
    refusal = await broker.refusal("NodeService/GetNextNodeId", nodes_pb2.GetNextNodeIdRequest())
    assert refusal[1] == "ROLE_LACKS_CALL"


async def test_a_follower_refuses_before_it_names_the_leader(server: TrustedServer) -> None:
    server.log.lose_leadership(truncate=False)
    reader = await server.by("reader/spark")
    method = "NodeService/RegisterNode"
    refusal = await reader.refusal(method, nodes_pb2.RegisterNodeRequest(node=OWN))
    assert refusal[:2] == ("PERMISSION_DENIED", "ROLE_LACKS_CALL")
    assert "leader_endpoint" not in refusal[2]
    stranger = await server.by("admin/eve", cluster_id="other")
    refusal = await stranger.refusal(method, nodes_pb2.RegisterNodeRequest(node=OWN))
    assert refusal == ("UNAUTHENTICATED", "NO_IDENTITY", {})


async def test_bytes_that_are_no_request_are_not_read_of_one_who_may_not_call(
    server: TrustedServer,
) -> None:
    reader = await server.by("reader/spark")
    assert (await reader.refusal("NodeService/RegisterNode", b"\xff"))[1] == "ROLE_LACKS_CALL"
    assert (await reader.refusal("NodeService/GetNodes", b"\xff"))[1] == "INVALID_FIELD"


async def test_parts_of_a_commit_need_the_roles_and_namespaces_of_their_own_calls(
    server: TrustedServer,
) -> None:
    text = '[[namespace]]\nprefix = "orders."\nprincipals = ["broker/1008"]'
    server.authenticator.use_policy(parse_policy(text, CLUSTER, "policy.toml"))
    broker, compactor = await server.by("broker/1007"), await server.by("compactor/one")
    puts, trims, others, shared = (commit(OWN, 0) for _ in range(4))
    puts.kv_puts.add(key="k", value=b"v")
    trims.trims.add(stream_id=0, stream_epoch=1, new_start_offset=1)
    others.kv_puts.add(namespace="orders.eu", key="k", value=b"v")
    shared.shared_rows.stream_id.append(0)
    shared.shared_rows.record_count.append(1)
    before = server.state()
    method = "ObjectService/CommitStreamSetObject"
    for caller, request, reason in (
        (compactor, puts, "ROLE_LACKS_CALL"),
        (compactor, trims, "ROLE_LACKS_CALL"),
        (compactor, shared, "ROLE_LACKS_CALL"),
        (broker, others, "NOT_YOUR_NAMESPACE"),
    ):
        assert (await caller.refusal(method, request))[:2] == ("PERMISSION_DENIED", reason)
        message = objects_pb2.CommitPipelineRequest(sequence=7, commits=[commit(OWN, 0), request])
        assert (await ended(caller.channel, message))[:2] == ("PERMISSION_DENIED", reason)
    assert server.state() == before
