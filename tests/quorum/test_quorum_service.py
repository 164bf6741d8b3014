"""The gRPC face of a replica: what is under way is bounded, a bad request gets no further."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.ids import ClusterId, Epoch, NodeId
from streammeta.controller.quorum import messages
from streammeta.controller.rpc.quorum_service import PeerServicer, QuorumServicer
from streammeta.controller.rpc.services import service_handler
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.rpc.connections import REQUEST_BYTES_MAX, client_channel
from streammeta.rpc.failures import RpcFailure, read_failure
from streammeta.v1 import quorum_pb2 as pb
from streammeta.v1.quorum_pb2_grpc import QuorumServiceStub
from tests.kit.grpc_servers import served as serving

FETCHES_MAX = 256
HEADER = pb.QuorumRequestHeader(sender=pb.ReplicaKey(node_id=0), receiver=pb.ReplicaKey(node_id=3))


class Driver:
    """Answers votes and lets every Fetch wait, until `release` is set."""

    def __init__(self) -> None:
        self.waiting = 0
        self.changed = asyncio.Event()
        self.release = asyncio.Event()

    def endpoints(self, node_id: NodeId) -> Endpoints:
        """Return the addresses of controller 3."""
        return Endpoints("10.0.0.3:1", "10.0.0.3:2") if node_id == NodeId(3) else Endpoints()

    async def handle(self, request: messages.Request) -> messages.VoteResponse:
        if isinstance(request, messages.FetchRequest):
            self.waiting += 1
            self.changed.set()
            await self.release.wait()
            raise NotLeaderError
        assert isinstance(request, messages.VoteRequest)
        header = messages.ResponseHeader(
            sender=NodeId(0),
            receiver=request.header.sender.node_id,
            epoch=Epoch(1),
            leader_id=NodeId(2) if request.pre_vote else NodeId(3),
            error=messages.QuorumError.NONE,
            incarnation=request.header.incarnation,
            request_id=request.header.request_id,
        )
        return messages.VoteResponse(header=header, pre_vote=request.pre_vote, granted=True)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Driver, Any]]:
    driver: Any = Driver()
    operators = QuorumServicer(driver, ClusterId("c")).unary()
    unary = {**PeerServicer(driver).unary(), **operators}
    service = pb.DESCRIPTOR.services_by_name["QuorumService"]
    handler = service_handler(service, unary, {})
    async with serving(handler) as endpoint, client_channel(endpoint) as channel:
        yield driver, QuorumServiceStub(channel)


async def failure_of(call: Awaitable[object]) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return read_failure(caught.value)


async def test_a_flood_of_fetches_leaves_room_for_votes() -> None:
    async with served() as (driver, stub):
        fetches = [
            asyncio.ensure_future(stub.Fetch(pb.FetchRequest(header=HEADER)))
            for _ in range(FETCHES_MAX)
        ]
        while driver.waiting < FETCHES_MAX:
            driver.changed.clear()
            await driver.changed.wait()

        failure = await failure_of(stub.Fetch(pb.FetchRequest(header=HEADER)))
        assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
        assert (await stub.Vote(pb.VoteRequest(header=HEADER))).granted

        driver.release.set()
        for fetch in fetches:
            assert (await failure_of(fetch)).reason == "NOT_LEADER"
        assert (await failure_of(stub.Fetch(pb.FetchRequest(header=HEADER)))).reason == "NOT_LEADER"


async def test_the_leader_is_named_with_its_own_addresses_or_none() -> None:
    """Whatever else is known meanwhile."""
    async with served() as (_, stub):
        same = (await stub.Vote(pb.VoteRequest(header=HEADER, pre_vote=False))).header
        changed = (await stub.Vote(pb.VoteRequest(header=HEADER, pre_vote=True))).header
        assert (same.leader_id, same.leader_endpoint) == (3, "10.0.0.3:1")
        assert same.leader_client_endpoint == "10.0.0.3:2"
        assert (changed.leader_id, changed.leader_endpoint) == (2, "")
        assert changed.leader_client_endpoint == ""


async def test_a_bad_request_does_not_reach_the_replica() -> None:
    async with served() as (driver, stub):
        failure = await failure_of(stub.Fetch(pb.FetchRequest(header=HEADER, fetch_offset=-1)))
        assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert "fetch_offset: -1" in failure.message
        huge = pb.EndQuorumEpochRequest(
            header=pb.QuorumRequestHeader(cluster_id="x" * REQUEST_BYTES_MAX)
        )
        failure = await failure_of(stub.EndQuorumEpoch(huge))
        assert failure.code.name == "RESOURCE_EXHAUSTED"
        assert driver.waiting == 0


async def test_bytes_that_are_no_message_are_the_callers_mistake() -> None:
    async with served() as (driver, stub):
        for call in (stub.Fetch, stub.DescribeQuorum):
            malformed: Any = call
            malformed._request_serializer = bytes
            failure = await failure_of(malformed(b"\xff\xff\xff"))
            assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert driver.waiting == 0
