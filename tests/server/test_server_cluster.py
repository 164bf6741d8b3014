"""Real controllers whose leader is killed or replaced: commits, tags and named objects survive."""

import asyncio
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from streammeta.cli.framework.client import ControllerClient as OperatorClient
from streammeta.cli.local.local_cluster import PROGRAM, LocalCluster, start_child
from streammeta.client import NamedObjects, OwnerKey, OwnerStream
from streammeta.client.controllers.methods import PUT_KVS, Method
from streammeta.client.errors import KeyConflictError, KeyNotFoundError, StreamNotFoundError
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.rpc.connections import operator_channel
from streammeta.rpc.contract import SERVICES
from streammeta.storage.cluster_files.bucket_marker import is_own_key
from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import common_pb2, kv_pb2, objects_pb2, objects_pb2_grpc, streams_pb2
from streammeta.v1.streams_pb2_grpc import StreamServiceStub
from tests.kit.real_cluster import (
    claims_to_lead,
    describe,
    leader_of,
    prepare_object,
    raise_level,
    running_cluster,
)
from tests.kit.waiting import until, wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Three controllers that run."""
    with running_cluster(tmp_path) as running:
        yield running


def test_kills_at_any_time_lose_nothing_acknowledged(cluster: LocalCluster) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    acknowledged: list[int] = []

    async def create_and_kill() -> None:
        async with ControllerClient(cluster.endpoints) as client:
            session = await BrokerSession.open(client, 1001, 1)
            creating = asyncio.create_task(create_streams(session, acknowledged))
            for _ in range(4):
                known = len(acknowledged)
                leader = await asyncio.to_thread(leader_of, cluster)
                victim = rng.choice([leader, 1, 2, 3])
                cluster.children[victim].kill()
                while len(acknowledged) <= known:
                    await asyncio.wait([creating], timeout=0.02)
                    assert not creating.done(), f"seed {seed}: {creating}"
                await asyncio.to_thread(cluster.start, victim)
            creating.cancel()
            await asyncio.wait([creating])

    asyncio.run(create_and_kill())
    for child in cluster.children.values():
        child.kill()
    cluster.start_all()
    leader_of(cluster)

    async def read() -> set[int]:
        async with ControllerClient(cluster.endpoints) as client:
            return {stream.stream_id async for stream in client.describe_streams()}

    there = asyncio.run(read())
    assert len(acknowledged) == len(set(acknowledged)), f"seed {seed}: an id was issued twice"
    assert set(acknowledged) <= there, f"seed {seed}"


async def create_streams(session: BrokerSession, acknowledged: list[int]) -> None:
    while True:
        acknowledged.extend(await session.create_streams([{}]))


def test_a_prepared_object_expires_and_its_bytes_are_deleted(cluster: LocalCluster) -> None:
    leader_of(cluster)
    store = open_object_store(cluster.store_uri)
    namespace = describe(cluster).object_namespace
    store.put("not/ours.txt", b"someone else's")

    async def prepare() -> int:
        async with ControllerClient(cluster.endpoints) as client:
            session = await BrokerSession.open(client, 1001, 1)
            return await prepare_object(session, ttl_ms=1_000)

    object_id = asyncio.run(prepare())
    store.put(key_for(object_id, namespace), b"uploaded, never committed")

    def others() -> list[str]:
        keys = (object_.key for object_ in store.list_objects())
        return [key for key in keys if not is_own_key(key, namespace)]

    wait_until(lambda: others() == ["not/ours.txt"], "the expired object's bytes to go")

    def state() -> int:
        with OperatorClient(cluster.endpoints) as client:
            answer = client.call(
                lambda channel: objects_pb2_grpc.ObjectServiceStub(channel).CheckObjects,
                objects_pb2.CheckObjectsRequest(object_ids=[object_id]),
            )
        assert answer.cluster_id == "test"
        return int(answer.states[0])

    wait_until(lambda: state() == common_pb2.OBJECT_STATE_REMOVED, "the map to forget it")


def test_health_tells_the_leader_from_the_others(cluster: LocalCluster) -> None:
    def claims() -> list[int]:
        return [node_id for node_id in cluster.node_ids if claims_to_lead(cluster, node_id)]

    # Leadership may move meanwhile, so the two are compared until they agree.
    wait_until(lambda: claims() == [describe(cluster).leader_id], "the leader alone says so")


def test_every_rpc_of_the_contract_is_served_to_clients_and_none_to_peers(
    cluster: LocalCluster,
) -> None:
    """Bytes that are no message are refused by the service that is called."""
    methods = [method for service in SERVICES.values() for method in service.methods]
    leader = leader_of(cluster) - 1

    for_clients = answers_to_nonsense(cluster.endpoints[leader], methods)
    for_peers = answers_to_nonsense(cluster.peer_endpoints[leader], methods[:1])

    assert set(for_clients.values()) == {grpc.StatusCode.INVALID_ARGUMENT}, for_clients
    assert set(for_peers.values()) == {grpc.StatusCode.UNAVAILABLE}, "peers speak no gRPC"


def answers_to_nonsense(
    endpoint: str, methods: Sequence[MethodDescriptor]
) -> dict[str, grpc.StatusCode]:
    """Return the status of a call of each method with bytes that are no message, by its name."""
    answers: dict[str, grpc.StatusCode] = {}
    with operator_channel(endpoint) as channel:
        for method in methods:
            path = f"/{method.containing_service.full_name}/{method.name}"
            begin: Any = channel.stream_stream(path)
            call = begin(iter([b"\xff\xff\xff"]), timeout=60)
            with pytest.raises(grpc.RpcError):
                list(call)
            answers[method.full_name] = call.code()
    return answers


def test_dev_runs_until_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a folder of the user's has the name of a package of ours."""
    (tmp_path / "streammeta").mkdir()
    (tmp_path / "streammeta" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    words = [*PROGRAM, "dev", "--data-dir", str(tmp_path / "dev")]
    child = start_child("dev", words, tmp_path / "dev.log")
    ready = dict(word.split("=", 1) for word in child.wait_ready().split())
    assert len(ready["connect"].split(",")) == 3

    child.process.send_signal(signal.SIGINT)

    assert child.process.wait(60) == 0
    child.stop()
    for endpoint in ready["connect"].split(","):
        channel = operator_channel(endpoint)
        with pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(0.3)
        channel.close()


def found_at(endpoint: str, offset: int) -> list[int]:
    """Return the streams that one controller finds, by a read at an offset."""
    request = streams_pb2.FindStreamsRequest(tags=[common_pb2.Tag(key="topic", value="orders")])
    after = (("streammeta-read-after", str(offset)),)
    with operator_channel(endpoint) as channel:
        answer = StreamServiceStub(channel).FindStreams(request, metadata=after, timeout=60)
    return [stream.stream_id for stream in answer.streams]


async def find(cluster: LocalCluster, **tags: str) -> list[int]:
    async with ControllerClient(cluster.endpoints) as client:
        return [stream.stream_id async for stream in client.find_streams(tags)]


async def test_every_controller_finds_streams_by_tag(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        async with ControllerClient(cluster.endpoints) as client:
            session = await BrokerSession.open(client, 1001, 1)
            tags = [{"topic": "orders", "zone": zone} for zone in "aba"]
            ids = await session.create_streams([*tags, {"topic": "payments", "zone": "a"}])
            await session.delete_streams({ids[0]: None})
            offset = client.seen_offset

        for endpoint in cluster.endpoints:
            assert found_at(endpoint, offset) == ids[1:3]
        assert await find(cluster, topic="orders", zone="a") == [ids[2]]

        leader = leader_of(cluster)
        cluster.children[leader].kill()
        assert await find(cluster, topic="orders") == ids[1:3]


LEDGER = OwnerKey("7", "ledgers")


def test_named_objects_are_read_by_name_and_their_bytes_go_with_the_owner(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        raise_level(cluster, 3)
        asyncio.run(_lives(cluster.endpoints, tmp_path / "bucket"))


async def _lives(endpoints: list[str], bucket: Path) -> None:
    store = LocalObjectStore(bucket)
    async with ControllerClient(endpoints) as client:
        session = await BrokerSession.open(client, 7, 1)
        named = NamedObjects(session, store)
        item = kv_pb2.KVToPut(namespace=LEDGER.namespace, key=LEDGER.key, value=b"open")
        await client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
        (stream_id,) = await session.create_streams([{}])
        data = await named.put("7-data", b"blocks", owner=LEDGER, metadata={"role": "data"})
        index = await named.put("7-index", b"index", owner=LEDGER)
        kept = await named.put("snapshot", b"kept", owner=OwnerStream(stream_id))
        assert await named.get("7-data") == b"blocks"
        (found,) = [object_ async for object_ in named.describe(prefix="7-d")]
        assert (found.object_id, found.owner, found.metadata) == (data, LEDGER, {"role": "data"})
        await _refusals(named)
        keys = {id_: key_for(id_, session.namespace) for id_ in (data, index, kept)}
        store.put(keys[index], b"other")
        with pytest.raises(CorruptObjectError):
            await named.get("7-index")
        await named.delete(["7-index", "absent"])
        await until(lambda: _is_gone(store, keys[index]), "deletion of a deleted object", 60.0)
        await _delete_key(client)
        await until(
            lambda: _is_gone(store, keys[data]), "deletion of an object without owner", 60.0
        )
        assert [object_.name async for object_ in named.describe()] == ["snapshot"]
        assert await named.get("snapshot") == b"kept"
        await _empty_owners(client, named, stream_id)


async def _empty_owners(client: ControllerClient, named: NamedObjects, stream_id: int) -> None:
    """Delete all objects of a stream and of a key, and the key with the last one."""
    item = kv_pb2.KVToPut(namespace=LEDGER.namespace, key=LEDGER.key, value=b"open")
    await client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
    for name in ("7-data", "7-index", "8-data"):
        await named.put(name, b"blocks", owner=LEDGER)
    assert not await named.delete_all_of(OwnerStream(stream_id))
    await named.delete([], with_owner_key=LEDGER)
    await named.delete(["8-data"], with_owner_key=LEDGER)
    assert [object_.name async for object_ in named.describe()] == ["7-data", "7-index"]
    assert await named.delete_all_of(LEDGER, with_owner_key=True)
    assert not [object_ async for object_ in named.describe()]
    with pytest.raises(KeyNotFoundError):
        await named.put("7-data", b"blocks", owner=LEDGER)


async def _refusals(named: NamedObjects) -> None:
    with pytest.raises(KeyConflictError):
        await named.put("7-data", b"again", owner=LEDGER)
    with pytest.raises(StreamNotFoundError):
        await named.put("other", b"", owner=OwnerStream(99))
    with pytest.raises(KeyNotFoundError):
        await named.get("other")


async def _delete_key(client: ControllerClient) -> None:
    delete = Method(kv_pb2.DeleteKVsRequest, kv_pb2.DeleteKVsResponse)
    key = kv_pb2.KVKey(namespace=LEDGER.namespace, key=LEDGER.key)
    await client.call(delete, kv_pb2.DeleteKVsRequest(keys=[key]))


def _is_gone(store: LocalObjectStore, key: str) -> bool:
    return key not in {object_.key for object_ in store.list_objects(key)}
