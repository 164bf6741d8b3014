"""Channels and listeners with certificates: callers that are let in, and refusals of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from streammeta.controller.grpc_server.server import new_server
from streammeta.rpc.connections import client_channel, operator_channel
from streammeta.tls.files import TlsContents, TlsFiles
from streammeta.tls.server_certificates import ServerCertificates
from tests.kit.certificates import Authority

CALL = "/test.Who/Who"


async def who(_request: bytes, context: Any) -> bytes:
    """Answer with the URIs of the caller's certificate."""
    return b" ".join(context.auth_context().get("peer_uri", ()))


@asynccontextmanager
async def serving(
    tls: TlsFiles | TlsContents | None, at: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    server = new_server()
    handlers: Any = {"Who": grpc.unary_unary_rpc_method_handler(who)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Who", handlers),))
    shown = ServerCertificates(tls) if isinstance(tls, TlsContents) else tls
    port = server.listen(at, shown)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def asked(endpoint: str, tls: TlsFiles | TlsContents | None) -> bytes:
    async with client_channel(endpoint, tls) as channel:
        call: Any = channel.unary_unary(CALL)
        answer: bytes = await call(b"", timeout=60)
        return answer


async def test_the_listener_knows_who_calls(authority: Authority) -> None:
    alice = authority.issue("admin/alice")
    async with serving(authority.issue("controller/1")) as endpoint:
        assert await asked(endpoint, alice) == b"streammeta://test/admin/alice"
        assert await asked(endpoint, authority.issue("broker/7")) == b"streammeta://test/broker/7"


async def test_a_plain_listener_knows_nobody() -> None:
    async with serving(None) as endpoint:
        assert await asked(endpoint, None) == b""


async def test_blocking_channels_show_certificates_too(authority: Authority) -> None:
    async with serving(authority.issue("controller/1")) as endpoint:
        with operator_channel(endpoint, authority.issue("admin/alice")) as channel:
            call: Any = channel.unary_unary(CALL)
            answer = await asyncio.to_thread(call, b"", 5)
    assert answer == b"streammeta://test/admin/alice"


async def test_who_shows_no_certificate_of_the_authority_is_refused(
    authority: Authority, stranger: Authority
) -> None:
    theirs = stranger.issue("admin/alice")
    async with serving(authority.issue("controller/1")) as endpoint:
        for tls in (None, theirs):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asked(endpoint, tls)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
