"""Connections by which no call comes: counted, and told of in one line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from streammeta.controller.grpc_server.server import new_server
from streammeta.controller.rpc.calls import tally
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.calls.tally import UncalledConnections
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.rpc.connections import client_channel
from streammeta.tls.server_certificates import ServerCertificates
from tests.attack.hostile import client_hello
from tests.kit.certificates import Authority
from tests.kit.grpc_servers import listening
from tests.kit.waiting import until
from tests.trust.conftest import authority, stranger
from tests.trust.trusted_server import CLUSTER

__all__ = ["authority", "stranger"]
_METHOD = "streammeta.v1.KVService.GetKVs"


class Served(grpc.GenericRpcHandler):
    """One method behind an entrance."""

    def __init__(self, connections: UncalledConnections) -> None:
        async def answer(_: bytes, __: Any) -> bytes:
            return b""

        entrance = CallPipeline(Authenticator(CLUSTER), connections=connections)
        self._call: Any = entrance.wrap(_METHOD, answer)

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._call)


@asynccontextmanager
async def served(
    certificates: ServerCertificates | None, connections: UncalledConnections
) -> AsyncIterator[str]:
    server = new_server()
    server.add_generic_rpc_handlers([Served(connections)])
    async with listening(server, certificates) as endpoint:
        yield endpoint


async def sent(endpoint: str, data: bytes) -> None:
    """Send bytes that are no handshake, or half of one, and close."""
    host, _, port = endpoint.partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def test_connections_without_a_call_are_counted_and_others_are_not(
    authority: Authority, stranger: Authority
) -> None:
    """A call that the authenticator rejects is one; a foreign certificate does not get as far."""
    certificates = ServerCertificates(authority.issue("controller/1").load())
    connections = UncalledConnections(lambda: certificates.handshakes)
    hello = client_hello()
    async with served(certificates, connections) as endpoint:
        for principal in ("broker/7", "monitor/m"):
            async with client_channel(endpoint, authority.issue(principal)) as channel:
                call: Any = channel.unary_unary("/streammeta.v1.KVService/GetKVs")
                for _ in range(3):
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await call(b"")
        assert connections.look() == 0
        for data in (b"GET / HTTP/1.1\r\n\r\n", hello[:50], hello):
            await sent(endpoint, data)
        await until(lambda: certificates.handshakes == 5, "three more handshakes")
        assert [connections.look(), connections.look()] == [3, 0]
        foreign = stranger.issue("admin/eve")
        async with client_channel(endpoint, foreign) as channel:
            call = channel.unary_unary("/streammeta.v1.KVService/GetKVs")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"")
        assert connections.look() == certificates.handshakes - 5


async def test_calls_in_plain_text_make_up_for_no_connection_over_tls(authority: Authority) -> None:
    """A controller that is moved to TLS listens for both for a while."""
    certificates = ServerCertificates(authority.issue("controller/1").load())
    connections = UncalledConnections(lambda: certificates.handshakes)
    async with (
        served(None, connections) as plain,
        served(certificates, connections) as encrypted,
        client_channel(plain) as channel,
    ):
        call: Any = channel.unary_unary("/streammeta.v1.KVService/GetKVs")
        await call(b"")
        await sent(encrypted, client_hello())
        await until(lambda: certificates.handshakes == 1, "a handshake")
        assert connections.look() == 1


def test_a_connection_whose_call_comes_late_makes_up_for_one_that_has_none() -> None:
    begun = 1
    connections = UncalledConnections(lambda: begun)
    assert connections.look() == 1
    for _ in range(2):
        connections.called("ipv4:127.0.0.1:1")
    assert connections.look() == 0
    begun += 2
    assert connections.look() == 1


def test_the_oldest_connections_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "KNOWN_MAX", 2)
    connections = UncalledConnections(lambda: 5)
    for port in (1, 2, 3, 2, 3, 1):
        connections.called(f"ipv4:127.0.0.1:{port}")
    assert connections.look() == 1


async def test_one_line_tells_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "INTERVAL_S", 0.001)
    begun = 7
    connections = UncalledConnections(lambda: begun)
    with capture_logs() as logs:
        running = asyncio.create_task(connections.run())
        await until(lambda: bool(logs), "a line")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    told = [(log["event"], log["connections"]) for log in logs]
    assert told == [("client_connections_without_call", 7)]
