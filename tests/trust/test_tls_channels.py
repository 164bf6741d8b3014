"""Channels, listeners and sessions of TLS: who is let in, and what replaced certificates change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from streammeta.client.commits.messages import COMMITTED
from streammeta.client.commits.pipeline import CommitPipeline
from streammeta.controller.grpc_server.server import new_server
from streammeta.controller.tls.manager import PeerTls
from streammeta.rpc.connections import client_channel, operator_channel
from streammeta.tls.files import TlsContents, TlsFiles
from streammeta.tls.server_certificates import ServerCertificates
from tests.broker_client.test_commit_pipeline import piped, upload
from tests.kit.certificates import Authority
from tests.kit.grpc_servers import listening
from tests.kit.product import sources
from tests.server.test_server_watch import changes, following, kv, nodes

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
    async with listening(server, shown, at) as endpoint:
        yield endpoint


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


def client_of(pipeline: CommitPipeline) -> Any:
    return pipeline._client


async def test_a_pipeline_goes_on_when_its_channel_is_renewed() -> None:
    async with piped(attempt=30.0) as (cluster, pipeline):
        channels = client_of(pipeline)._channels
        channels._grace_s = 0.0
        assert await (await pipeline.upload(upload(0, 0, 0))) == COMMITTED

        began, release = asyncio.Event(), asyncio.Event()

        async def wait(*_: Any) -> None:
            began.set()
            await release.wait()

        cluster.answer_hook = wait
        held = await pipeline.upload(upload(1, 0, 10))
        await began.wait()
        await channels._renew()
        release.set()
        assert await held == COMMITTED
        assert await (await pipeline.upload(upload(2, 0, 20))) == COMMITTED
        assert cluster.ends == {0: 30}


async def test_a_watch_goes_on_when_its_channel_is_renewed() -> None:
    async with nodes(1) as (node,):
        node.commit(kv("a"))
        async with following([node.endpoint]) as watch:
            events = changes(watch)
            assert (await anext(events)).offset == 0
            channels = watch._client._channels
            channels._grace_s = 0.0
            waiting = asyncio.create_task(anext(events))
            await channels._renew()
            node.commit(kv("b"))
            assert (await asyncio.wait_for(waiting, 60)).offset == 1


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> TlsContents:
    authority = Authority(tmp_path_factory.mktemp("sessions"), "ours")
    return authority.issue("controller/1", cluster_id="ours").load()


def connected(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None
) -> ssl.SSLObject:
    """Shake hands in memory, and read what the server sends on its own; return the client's end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, session=session)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (ours, theirs):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    theirs.write(b"x")
    assert ours.read(1) == b"x"
    return ours


def test_a_session_is_never_resumed(contents: TlsContents) -> None:
    client = contents.context(ssl.PROTOCOL_TLS_CLIENT)
    peers, clients = PeerTls.of(contents), ServerCertificates(contents)
    http = contents.context(ssl.PROTOCOL_TLS_SERVER)
    clients_of = [clients.context(asks_clients=asks) for asks in (True, False)]
    for server in (peers.listening, http, *clients_of):
        assert server is not None
        first = connected(server, client, None)
        assert first.session is None or not first.session.has_ticket
        assert not connected(server, client, first.session).session_reused


def test_contexts_are_made_in_one_place() -> None:
    makers = ("ssl.SSLContext(", "create_default_context")
    found = {path for path, text in sources() if any(maker in text for maker in makers)}
    assert found == {"proto/streammeta/tls/files.py"}
