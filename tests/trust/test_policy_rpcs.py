"""Calls over TLS as a policy judges them: namespaces, what readers see, and calls it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.trust.policy import parse_policy
from streammeta.rpc.failures import read_failure
from streammeta.storage.cluster_files.reconcile_runs import NAMESPACE
from streammeta.v1 import common_pb2, kv_pb2, metadata_pb2, nodes_pb2
from tests.kit.certificates import Authority
from tests.trust.trusted_server import CLUSTER, TrustedServer, trusting

NODE = common_pb2.NodeIdentity(node_id=1007, node_epoch=1)
SNAPSHOT = "/streammeta.v1.MetadataService/GetSnapshot"
WATCH = "/streammeta.v1.MetadataService/Watch"


@pytest_asyncio.fixture
async def server(authority: Authority) -> AsyncIterator[TrustedServer]:
    async with trusting(authority) as server:
        yield server


def put(namespace: str) -> kv_pb2.PutKVsRequest:
    item = kv_pb2.KVToPut(namespace=namespace, key="k", value=b"v", overwrite=True)
    return kv_pb2.PutKVsRequest(items=[item])


def requests_of(namespace: str) -> dict[str, Any]:
    key = kv_pb2.KVKey(namespace=namespace, key="k")
    return {
        "KVService/PutKVs": put(namespace),
        "KVService/GetKVs": kv_pb2.GetKVsRequest(keys=[key]),
        "KVService/DeleteKVs": kv_pb2.DeleteKVsRequest(keys=[key]),
        "KVService/ListKVs": kv_pb2.ListKVsRequest(namespace=namespace),
    }


async def test_keys_of_anothers_namespace_are_neither_read_nor_written(
    server: TrustedServer,
) -> None:
    text = '[[namespace]]\nprefix = "orders."\nprincipals = ["broker/1007"]'
    server.authenticator.use_policy(parse_policy(text, CLUSTER, "policy.toml"))
    owner, other = await server.by("broker/1007"), await server.by("broker/1008")
    admin = await server.by("admin/alice")
    await owner.ask(put("orders.eu"))
    await admin.ask(put("_streammeta/x"))
    await other.ask(put("free"))
    before = server.state()
    for namespace, needs in (
        ("orders.eu", "broker/1007 or role admin"),
        ("_streammeta/x", "role admin"),
    ):
        for method, request in requests_of(namespace).items():
            code, reason, metadata = await other.refusal(method, request)
            assert (code, reason) == ("PERMISSION_DENIED", "NOT_YOUR_NAMESPACE")
            assert metadata == {"principal": "broker/1008", "needs": needs}
    assert server.state() == before
    found = await owner.ask(requests_of("orders.eu")["KVService/GetKVs"])
    assert found.results[0].error == common_pb2.ERROR_CODE_NONE


async def test_a_reconciler_uses_the_namespace_of_its_runs_and_no_other_keys(
    server: TrustedServer,
) -> None:
    text = """
        [[grant]]
        principal = "reader/spark"
        roles = ["reconciler"]
        [[namespace]]
        prefix = "orders."
        principals = ["reconciler/weekly"]
        """
    server.authenticator.use_policy(parse_policy(text, CLUSTER, "policy.toml"))
    reconciler, granted = await server.by("reconciler/weekly"), await server.by("reader/spark")
    await (await server.by("broker/1007")).ask(put("free"))
    for rpcs in (reconciler, granted):
        await rpcs.ask(put(NAMESPACE))
        found = await rpcs.ask(requests_of(NAMESPACE)["KVService/GetKVs"])
        assert found.results[0].value == b"v"
    before = server.state()
    needs = {"principal": "reconciler/weekly", "needs": "role admin or broker"}
    # Neither a prefix of the policy, nor one beside its own namespace, gives it keys.
    for namespace in ("free", "orders.eu", f"{NAMESPACE}2", "_streammeta/named", "_streammeta/"):
        for method in ("KVService/PutKVs", "KVService/GetKVs"):
            refusal = await reconciler.refusal(method, requests_of(namespace)[method])
            assert refusal == ("PERMISSION_DENIED", "NOT_YOUR_NAMESPACE", needs)
        code, reason, _ = await granted.refusal("KVService/PutKVs", put(namespace))
        assert (code, reason) == ("PERMISSION_DENIED", "NOT_YOUR_NAMESPACE")
    mixed = kv_pb2.PutKVsRequest(items=[*put(NAMESPACE).items, *put("free").items])
    assert (await reconciler.refusal("KVService/PutKVs", mixed))[1] == "NOT_YOUR_NAMESPACE"
    for method in ("KVService/DeleteKVs", "KVService/ListKVs"):
        refusal = await reconciler.refusal(method, requests_of(NAMESPACE)[method])
        assert refusal[:2] == ("PERMISSION_DENIED", "ROLE_LACKS_CALL")
    # What another role allows, it allows as without the reconciler's.
    await granted.ask(requests_of("free")["KVService/GetKVs"])
    for caller, method in ((granted, "ListKVs"), (await server.by("broker/1007"), "PutKVs")):
        refusal = await caller.refusal(
            f"KVService/{method}", requests_of(NAMESPACE)[f"KVService/{method}"]
        )
        assert refusal[:2] == ("PERMISSION_DENIED", "NOT_YOUR_NAMESPACE")
    assert server.state() == before


async def test_a_reader_does_not_see_where_write_ahead_logs_are(server: TrustedServer) -> None:
    broker = await server.by("broker/1007")
    await broker.register(NODE)
    shown = {
        principal: (await (await server.by(principal)).ask(nodes_pb2.GetNodesRequest()))
        .nodes[0]
        .wal_config
        for principal in ("broker/1007", "admin/alice", "reader/spark")
    }
    assert shown == {"broker/1007": "wal-7", "admin/alice": "wal-7", "reader/spark": ""}


async def test_a_reader_holds_no_deletions(server: TrustedServer) -> None:
    before = server.state()
    request = metadata_pb2.GetSnapshotRequest(hold_ms=1_000).SerializeToString()

    async def copied(principal: str) -> int:
        send: Any = (await server.by(principal)).channel.unary_stream(SNAPSHOT)
        return len([chunk async for chunk in send(request)])

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await copied("reader/spark")
    failure = read_failure(raised.value)
    assert (failure.code.name, failure.reason) == ("PERMISSION_DENIED", "ROLE_LACKS_CALL")
    assert failure.metadata["needs"] == "role admin or backup or reconciler"
    assert server.state() == before
    assert await copied("reconciler/weekly") > 0


async def test_a_policy_that_denies_a_certificate_ends_its_streams_and_no_others(
    server: TrustedServer,
) -> None:
    reader, other = await server.by("reader/spark"), await server.by("reader/other")
    request = metadata_pb2.WatchRequest().SerializeToString()
    send: list[Any] = [caller.channel.unary_stream(WATCH) for caller in (reader, other)]
    watches = [call(request) for call in send]
    for watch in watches:
        await watch.read()  # it is under way
    fingerprint = server.authority.fingerprint("reader/spark")
    text = f'[deny]\nfingerprints = ["{fingerprint}"]'
    server.authenticator.use_policy(parse_policy(text, CLUSTER, "policy.toml"))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in _messages(watches[0]):
            pass
    assert read_failure(raised.value).reason == "NO_IDENTITY"
    refusal = await reader.refusal("NodeService/GetNodes", nodes_pb2.GetNodesRequest())
    assert refusal[:2] == ("UNAUTHENTICATED", "NO_IDENTITY")
    await (await server.by("broker/1007")).register(NODE)
    assert await asyncio.wait_for(watches[1].read(), 60)
    for watch in watches:
        watch.cancel()


async def _messages(watch: Any) -> AsyncIterator[bytes]:
    while (message := await watch.read()) is not grpc.aio.EOF:
        yield message
