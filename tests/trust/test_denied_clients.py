"""Clients refused for their identity: they ask one controller, once, and name the needed role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.methods import PREPARE_OBJECTS
from streammeta.client.errors import PermissionDeniedError
from streammeta.rpc.blocking_client import BlockingClient, LeaderCallError
from streammeta.v1 import common_pb2, nodes_pb2, objects_pb2
from streammeta.v1.nodes_pb2_grpc import NodeServiceStub
from tests.kit.certificates import Authority
from tests.trust.trusted_server import TrustedServer, trusting


@pytest_asyncio.fixture
async def server(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[TrustedServer, list[str]]]:
    """Yield a leader, and the calls that come to its authenticator."""
    async with trusting(authority) as server:
        entered: list[str] = []
        authenticate = server.authenticator.authenticate

        def counted(method: str, context: Any) -> Any:
            entered.append(method)
            return authenticate(method, context)

        monkeypatch.setattr(server.authenticator, "authenticate", counted)
        yield server, entered


def endpoints(server: TrustedServer) -> list[str]:
    """Return two ways to the leader, as if they were two controllers."""
    return [server.endpoint, server.endpoint.replace("127.0.0.1", "localhost")]


async def test_the_brokers_client_asks_once(server: tuple[TrustedServer, list[str]]) -> None:
    leader, entered = server
    request = objects_pb2.PrepareObjectsRequest(
        node=common_pb2.NodeIdentity(node_id=1008, node_epoch=1), count=1, ttl_ms=60_000
    )
    for principal, needs in (("broker/1007", "broker/1008"), ("reader/spark", "role broker")):
        entered.clear()
        client = ControllerClient(endpoints(leader), tls=leader.authority.issue(principal))
        async with client:
            with pytest.raises(PermissionDeniedError, match=needs):
                await client.call(PREPARE_OBJECTS, request)
        assert len(entered) == 1


async def test_the_commands_client_asks_once(server: tuple[TrustedServer, list[str]]) -> None:
    leader, entered = server

    def ask() -> LeaderCallError:
        tls = leader.authority.issue("reader/spark")
        request = nodes_pb2.LockNodeRequest(node_id=1007)

        def lock(channel: grpc.Channel, left_s: float) -> nodes_pb2.LockNodeResponse:
            return NodeServiceStub(channel).LockNode(request, timeout=left_s)

        with (
            BlockingClient(endpoints(leader), tls=tls) as client,
            pytest.raises(LeaderCallError) as raised,
        ):
            client.call_leader(lock, 20.0)
        return raised.value

    error = await asyncio.to_thread(ask)
    assert error.is_final
    assert error.failure.code is grpc.StatusCode.PERMISSION_DENIED
    assert error.failure.metadata == {"principal": "reader/spark", "needs": "role admin"}
    assert len(entered) == 1
