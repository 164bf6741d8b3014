"""Three real controllers: nothing acknowledged is lost, whichever is killed, whenever."""

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
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.rpc.connections import operator_channel
from streammeta.rpc.contract import SERVICES
from streammeta.storage.cluster_files.bucket_marker import is_own_key
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import (
    common_pb2,
    objects_pb2,
    objects_pb2_grpc,
)
from tests.kit.real_cluster import (
    claims_to_lead,
    describe,
    leader_of,
    prepare_object,
    running_cluster,
)
from tests.kit.waiting import wait_until

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
        keys = (one.key for one in store.list_objects())
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
