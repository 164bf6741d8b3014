"""Calls with tokens over TLS: what a listener for tokens takes, and how a watch ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.trust.policy import parse_policy
from streammeta.controller.trust.tokens import LEEWAY_S
from streammeta.rpc.connections import client_channel, operator_channel
from streammeta.rpc.failures import RpcFailure, read_failure
from streammeta.tls.files import TlsError, TlsFiles, TokenFiles
from streammeta.v1 import common_pb2, kv_pb2, metadata_pb2, nodes_pb2
from tests.kit.certificates import Authority
from tests.trust.test_token_door import POLICY
from tests.trust.token_issuer import Issuer
from tests.trust.trusted_server import CLUSTER, TrustedServer, trusting

GET_NODES = "/streammeta.v1.NodeService/GetNodes"
PUT_KVS = "/streammeta.v1.KVService/PutKVs"
WATCH = "/streammeta.v1.MetadataService/Watch"


@pytest_asyncio.fixture
async def server(authority: Authority) -> AsyncIterator[TrustedServer]:
    async with trusting(authority) as server:
        yield server


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


def take_tokens(server: TrustedServer, issuer: Issuer, ahead_s: float = 0.0) -> None:
    async def learn() -> None:
        server.authenticator.use_keys(issuer.keys)

    server.authenticator.use_policy(parse_policy(POLICY, CLUSTER, "policy.toml"))
    server.authenticator.accept_tokens(issuer.verifier(lambda: time.time() + ahead_s), learn)


def file_of(folder: Path, authority: Authority, token: str) -> TokenFiles:
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(f"{token}\n")
    return TokenFiles(authority.ca, path)


async def called(
    channel: grpc.Channel, method: str, request: bytes = b"", **more: Any
) -> bytes | RpcFailure:
    """Make a call in a thread; return its answer or its failure."""

    def call() -> bytes | RpcFailure:
        try:
            send: Any = channel.unary_unary(method)
            answer: bytes = send(request, timeout=60, **more)
        except grpc.RpcError as error:
            return read_failure(error)
        return answer

    return await asyncio.to_thread(call)


async def refused(channel: grpc.Channel, method: str, **more: Any) -> RpcFailure:
    found = await called(channel, method, **more)
    assert isinstance(found, RpcFailure)
    return found


async def test_a_token_is_as_good_as_a_certificate(
    server: TrustedServer, issuer: Issuer, tmp_path: Path
) -> None:
    take_tokens(server, issuer)
    files = file_of(tmp_path, server.authority, issuer.token(department="data"))
    with operator_channel(server.token_endpoint, files) as channel:
        assert isinstance(await called(channel, GET_NODES), bytes)
        item = kv_pb2.KVToPut(namespace="a", key="k", value=b"v")
        request = kv_pb2.PutKVsRequest(items=[item]).SerializeToString()
        denied = await refused(channel, PUT_KVS, request=request)
        assert (denied.reason, denied.metadata["principal"]) == ("ROLE_LACKS_CALL", "user/alice")
        # The file is read for each call.
        files.token.write_text(issuer.token(groups=["storage-admins"]))
        assert isinstance(await called(channel, PUT_KVS, request), bytes)
        files.token.write_text(issuer.token(lasts_s=-1000))
        late = await refused(channel, GET_NODES)
        assert (late.reason, late.metadata) == ("NO_IDENTITY", {"shown": "token"})
        assert "it has expired" in late.message
        files.token.write_text("")
        assert "token-file: " in (await refused(channel, GET_NODES)).message


async def test_a_reader_by_token_does_not_see_where_write_ahead_logs_are(
    server: TrustedServer, issuer: Issuer, tmp_path: Path
) -> None:
    take_tokens(server, issuer)
    node = common_pb2.NodeIdentity(node_id=1007, node_epoch=1)
    await (await server.by("broker/1007")).register(node)
    files = file_of(tmp_path, server.authority, issuer.token(department="data"))
    with operator_channel(server.token_endpoint, files) as channel:
        answer = await called(channel, GET_NODES)
    assert isinstance(answer, bytes)
    (found,) = nodes_pb2.GetNodesResponse.FromString(answer).nodes
    assert (found.node_id, found.wal_config) == (1007, "")


async def test_a_listener_for_tokens_asks_for_one_and_sees_no_certificate(
    server: TrustedServer, issuer: Issuer
) -> None:
    take_tokens(server, issuer)
    with operator_channel(server.token_endpoint, server.authority.issue("admin/alice")) as channel:
        for method in (GET_NODES, PUT_KVS):
            found = await refused(channel, method)
            assert (found.code.name, found.reason) == ("UNAUTHENTICATED", "NO_IDENTITY")
            assert found.metadata == {"shown": "token"}


async def test_a_listener_for_certificates_takes_no_token_in_place_of_one(
    server: TrustedServer, issuer: Issuer, tmp_path: Path
) -> None:
    take_tokens(server, issuer)
    token = issuer.token(groups=["storage-admins"])
    with operator_channel(server.endpoint, file_of(tmp_path, server.authority, token)) as channel:
        assert (await refused(channel, GET_NODES)).code is grpc.StatusCode.UNAVAILABLE
    beside = (("authorization", f"Bearer {token}"),)
    with operator_channel(server.endpoint, server.authority.issue("reader/spark")) as channel:
        assert isinstance(await called(channel, GET_NODES, metadata=beside), bytes)
        denied = await refused(channel, PUT_KVS, metadata=beside)
        assert denied.metadata["principal"] == "reader/spark"


@pytest.mark.parametrize("for_tokens", ["127.0.0.1:9093", ""])
async def test_a_follower_sends_callers_to_the_port_that_takes_what_they_show(
    for_tokens: str,
    server: TrustedServer,
    issuer: Issuer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_tokens(server, issuer)
    hint = NotLeaderError(2, "127.0.0.1:9091", 7, for_tokens)
    monkeypatch.setattr(server.log, "leader_hint", lambda: hint)
    server.controller.on_leadership_lost()
    request = nodes_pb2.GetNodesRequest().SerializeToString()
    told = {}
    for endpoint, tls in (
        (
            server.token_endpoint,
            file_of(tmp_path, server.authority, issuer.token(department="data")),
        ),
        (server.endpoint, server.authority.issue("reader/spark")),
    ):
        with operator_channel(endpoint, tls) as channel:
            found = await refused(channel, GET_NODES, request=request)
            assert found.reason == "NOT_LEADER"
            told[type(tls)] = found.metadata["leader_endpoint"]
    assert told == {TokenFiles: for_tokens, TlsFiles: "127.0.0.1:9091"}


async def test_a_huge_token_reaches_nothing(
    server: TrustedServer, issuer: Issuer, tmp_path: Path
) -> None:
    take_tokens(server, issuer)
    good = issuer.token(department="data")
    files = file_of(tmp_path, server.authority, good)
    with operator_channel(server.token_endpoint, files) as channel:
        for size in (7_000, 20_000, 1 << 20):
            files.token.write_text("x" * size)
            code = (await refused(channel, GET_NODES)).code.name
            assert code == ("UNAUTHENTICATED" if size == 7_000 else "RESOURCE_EXHAUSTED")
        files.token.write_text(good)
        assert isinstance(await called(channel, GET_NODES), bytes)


async def test_a_watch_ends_when_its_token_expires(server: TrustedServer, issuer: Issuer) -> None:
    take_tokens(server, issuer, ahead_s=60 + LEEWAY_S - 1)
    token = issuer.token(lasts_s=60, department="data")
    async with client_channel(
        server.token_endpoint, server.authority.issue("reader/spark")
    ) as channel:
        send: Any = channel.unary_stream(WATCH)
        request = metadata_pb2.WatchRequest().SerializeToString()
        watch = send(request, metadata=(("authorization", f"Bearer {token}"),))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(_left(watch), 60)
    failure = read_failure(ended.value)
    assert (failure.code.name, failure.reason) == ("UNAUTHENTICATED", "NO_IDENTITY")
    assert "it has expired" in failure.message


async def _left(watch: Any) -> None:
    while await watch.read() is not grpc.aio.EOF:
        pass


def test_what_is_wrong_with_a_token_file_is_told_before_a_call(
    authority: Authority, tmp_path: Path
) -> None:
    files = file_of(tmp_path, authority, "a.b.c")
    for content in ("two words", "", "tök"):
        files.token.write_text(content)
        with pytest.raises(TlsError, match="token-file"):
            files.load()
    files.token.chmod(0o640)
    with pytest.raises(TlsError, match=r"token-file.*0640"):
        files.load()
    files.token.unlink()
    with pytest.raises(TlsError, match="token-file"):
        files.load()
    token = file_of(tmp_path, authority, "a.b.c").token
    with pytest.raises(TlsError, match="tls-ca"):
        TokenFiles(token, token).load()
