"""Real controllers miss a silent broker, let another recover, and tell health checks who leads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client.controllers import methods
from streammeta.client.errors import NodeFencedError, RejectedError
from streammeta.client.model import node_message
from streammeta.client.parts import BrokerSession, ControllerClient, Heartbeat
from streammeta.rpc.connections import operator_channel
from streammeta.v1 import common_pb2, kv_pb2, kv_pb2_grpc, nodes_pb2, objects_pb2, streams_pb2
from tests.kit.grpc_servers import balanced_channel
from tests.kit.real_cluster import (
    FAST,
    claims_to_lead,
    leader_of,
    prepare_object,
    quorum,
    running_cluster,
)
from tests.kit.waiting import until, wait_until

pytestmark = pytest.mark.process

SESSION_TIMEOUT_MS = 1_500
OPTIONS = (*FAST, "--session-timeout-ms", str(SESSION_TIMEOUT_MS))
FAILED, TARGET, QUIET = 1001, 1002, 1003
PATIENCE_S = 60.0


@asynccontextmanager
async def beating(session: BrokerSession) -> AsyncIterator[Heartbeat]:
    """Send a session's heartbeats as long as the test is inside."""
    heartbeat = Heartbeat(session, lambda _: None)
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        await heartbeat.close()


async def node(client: ControllerClient, node_id: int) -> nodes_pb2.NodeDescription:
    answer = await client.call(methods.GET_NODES, nodes_pb2.GetNodesRequest(node_ids=[node_id]))
    return answer.nodes[0]


async def upload(
    client: ControllerClient,
    owner: common_pb2.NodeIdentity,
    object_id: int,
    rows: dict[int, tuple[int, int]],
    *,
    failover: bool = False,
) -> common_pb2.ErrorCode.ValueType:
    """Commit an upload of (stream: start, end) in the name of `owner`."""
    request = objects_pb2.CommitStreamSetObjectRequest(
        node=owner,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        object_id=object_id,
        order_id=object_id,
        object_size=100,
        ranges=objects_pb2.RangeColumns(
            stream_id=sorted(rows),
            start_offset=[rows[stream_id][0] for stream_id in sorted(rows)],
            end_offset=[rows[stream_id][1] for stream_id in sorted(rows)],
        ),
        failover=failover,
    )
    return (await client.call(methods.COMMIT_STREAM_SET_OBJECT, request)).error


async def fast_close(session: BrokerSession, stream_id: int, end_offset: int) -> None:
    """Close a stream, owing the upload of what lies below `end_offset`."""
    closing = streams_pb2.StreamToClose(stream_id=stream_id, stream_epoch=1, end_offset=end_offset)
    request = streams_pb2.CloseStreamsRequest(node=node_message(session.node), streams=[closing])
    assert (await session.client.call(methods.CLOSE_STREAMS, request)).errors == [
        common_pb2.ERROR_CODE_NONE
    ]


async def owing(failed: BrokerSession) -> list[int]:
    """Leave behind: a stream with data and one without, both open, and one that owes [10, 20)."""
    streams = await failed.create_streams([{}] * 3)
    (await failed.open_streams(dict.fromkeys(streams, 1))).require_all()
    rows = {streams[0]: (0, 10), streams[2]: (0, 10)}
    assert (
        await upload(failed.client, node_message(failed.node), await prepare_object(failed), rows)
        == common_pb2.ERROR_CODE_NONE
    )
    await fast_close(failed, streams[2], 20)
    return streams


async def recover(client: ControllerClient, target: BrokerSession, streams: list[int]) -> None:
    """Do in the failed node's name what its recovery is made of."""
    owner = common_pb2.NodeIdentity(node_id=FAILED, node_epoch=1)
    request = streams_pb2.GetOpeningStreamsRequest(node=owner, failover=True)
    left = await client.call(methods.GET_OPENING_STREAMS, request)
    found = {id_.stream_id: (id_.end_offset, id_.upload_end_offset) for id_ in left.streams}
    assert found == {streams[0]: (10, 0), streams[1]: (0, 0), streams[2]: (10, 20)}
    owed = [stream.stream_id for stream in left.streams if stream.HasField("upload_end_offset")]
    assert owed == [streams[2]]
    # The log of the failed node held [10, 15) of the first stream, never committed.
    rows = {streams[0]: (10, 15), streams[2]: (10, 20)}
    object_id = await prepare_object(target)
    assert await upload(client, owner, object_id, rows) == common_pb2.ERROR_CODE_NODE_FENCED
    assert await upload(client, owner, object_id, rows, failover=True) == common_pb2.ERROR_CODE_NONE
    closing = streams_pb2.CloseStreamsRequest(
        node=owner,
        streams=[streams_pb2.StreamToClose(stream_id=i, stream_epoch=1) for i in streams[:2]],
    )
    assert (
        list((await client.call(methods.CLOSE_STREAMS, closing)).errors)
        == [common_pb2.ERROR_CODE_NONE] * 2
    )


async def compact(client: ControllerClient, target: BrokerSession, streams: list[int]) -> None:
    """Put what the failed node left into one set object, in its name."""
    listing = nodes_pb2.ListStreamSetObjectsRequest(node_id=FAILED)
    listed = await client.call(methods.LIST_STREAM_SET_OBJECTS, listing)
    object_id = await prepare_object(target)
    request = objects_pb2.CommitStreamSetObjectRequest(
        node=common_pb2.NodeIdentity(node_id=FAILED, node_epoch=1),
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        object_id=object_id,
        object_size=200,
        ranges=objects_pb2.RangeColumns(
            stream_id=[streams[0], streams[2]], start_offset=[0, 0], end_offset=[15, 20]
        ),
        compacted_object_ids=[object_.object_id for object_ in listed.objects],
        failover=True,
    )
    answer = await client.call(methods.COMMIT_STREAM_SET_OBJECT, request)
    assert answer.error == common_pb2.ERROR_CODE_NONE


async def scenario(cluster: LocalCluster) -> None:
    async with ControllerClient(cluster.endpoints) as client:
        failed = await BrokerSession.open(client, FAILED, 1, wal_config="file:///wal/1001")
        target = await BrokerSession.open(client, TARGET, 1)
        quiet = await BrokerSession.open(client, QUIET, 1)
        (untouched,) = await quiet.create_streams([{}])
        (await quiet.open_streams({untouched: 1})).require_all()
        streams = await owing(failed)
        async with beating(target) as heartbeat:
            await failed.heartbeat()
            assert (await node(client, FAILED)).state == nodes_pb2.NODE_STATE_ACTIVE

            async def is_assigned() -> bool:
                return [recovery.node_id for recovery in heartbeat.recoveries] == [FAILED]

            await until(is_assigned, "the failed node's data to be assigned")
            assert (await node(client, FAILED)).state == nodes_pb2.NODE_STATE_FENCED
            assert heartbeat.recoveries[0].wal_config == "file:///wal/1001"

            # The assignment outlives the leader that made it.
            leader = await asyncio.to_thread(leader_of, cluster)
            cluster.children[leader].kill()
            await recover(client, target, streams)
            await asyncio.to_thread(cluster.start, leader)
            with pytest.raises(NodeFencedError):
                await failed.heartbeat()

            async def is_over() -> bool:
                described = await node(client, FAILED)
                return not described.HasField("recovered_by") and not heartbeat.recoveries

            await until(is_over, "the assignment to end")
            described = await node(client, FAILED)
            assert not described.has_opening_streams
            assert described.pending_upload_count == 0
            assert described.stream_set_object_count == 2

            # Nothing is left to be recovered: the target is told to compact for the failed one.
            async def is_told() -> bool:
                told = (await target.heartbeat()).compactions
                return [(gone.node_id, gone.node_epoch) for gone in told] == [(FAILED, 1)]

            await until(is_told, "the failed node's set objects to be assigned")
            assert (await node(client, FAILED)).compacted_by == TARGET
            await compact(client, target, streams)
            assert (await node(client, FAILED)).stream_set_object_count == 1

            # The next owner of the streams goes on where the data ends.
            opened = (await target.open_streams(dict.fromkeys(streams, 2))).require_all()
            assert [opened[i].next_offset for i in streams] == [15, 0, 20]

        # A broker that never sent a heartbeat was let alone all the while.
        described = await node(client, QUIET)
        assert described.state == nodes_pb2.NODE_STATE_UNKNOWN
        assert described.has_opening_streams
        assert (
            await upload(
                client, node_message(quiet.node), await prepare_object(quiet), {untouched: (0, 5)}
            )
            == 0
        )


def test_a_silent_brokers_data_is_recovered_by_another(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=OPTIONS) as cluster:
        asyncio.run(scenario(cluster))


async def test_a_broker_has_the_session_that_its_heartbeats_ask_for(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1, options=FAST) as cluster:
        async with ControllerClient(cluster.endpoints) as client:
            short = await BrokerSession.open(client, FAILED, 1, timeout_s=2.0)
            assert (await short.heartbeat()).session_timeout_s == 2.0
            whole = await BrokerSession.open(client, TARGET, 1)
            assert (await whole.heartbeat()).session_timeout_s == 9.0
            async with beating(whole):

                async def is_fenced() -> bool:
                    return (await node(client, FAILED)).state == nodes_pb2.NODE_STATE_FENCED

                await until(is_fenced, "the silent broker to be fenced")
            negative = nodes_pb2.HeartbeatRequest(
                node=node_message(short.node), session_timeout_ms=-1
            )
            with pytest.raises(RejectedError, match="session_timeout_ms"):
                await client.call(methods.HEARTBEAT, negative)


LEADER = health_pb2.HealthCheckRequest(service="leader")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

BALANCED = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "leader"},
}
"""Service config of gRPC: calls go to the controllers whose service `leader` is SERVING."""


PUT = kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key="k", value=b"v", overwrite=True)])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path_factory.mktemp("leader")) as running:
        leader_of(running)
        yield running


def transfer(cluster: LocalCluster) -> None:
    former = leader_of(cluster)
    present = next(node_id for node_id in cluster.node_ids if node_id != former)
    quorum(cluster, "transfer", "--to", str(present))
    wait_until(lambda: claims_to_lead(cluster, present), f"{present} to lead")


def test_a_stock_client_reaches_the_leader_by_its_health(cluster: LocalCluster) -> None:
    target = f"ipv4:{','.join(cluster.endpoints)}"
    options = [("grpc.service_config", json.dumps(BALANCED))]
    with balanced_channel(target, options) as channel:
        stub = kv_pb2_grpc.KVServiceStub(channel)

        for _ in range(30):
            stub.PutKVs(PUT, timeout=60, wait_for_ready=True)

        transfer(cluster)
        # The client's own watches of health see the change a moment later.
        wait_until(lambda: is_answered(stub), "the client to find the present leader")
        for _ in range(30):
            stub.PutKVs(PUT, timeout=60, wait_for_ready=True)


def is_answered(stub: kv_pb2_grpc.KVServiceStub) -> bool:
    try:
        stub.PutKVs(PUT, timeout=60, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return True


def test_a_watch_of_the_leaders_health_follows_a_transfer(cluster: LocalCluster) -> None:
    former = leader_of(cluster)
    follower = next(node_id for node_id in cluster.node_ids if node_id != former)
    with (
        operator_channel(cluster.endpoints[former - 1]) as of_former,
        operator_channel(cluster.endpoints[follower - 1]) as of_follower,
        ThreadPoolExecutor(2) as pool,
    ):
        leading = health_pb2_grpc.HealthStub(of_former).Watch(LEADER, timeout=60)
        following = health_pb2_grpc.HealthStub(of_follower).Watch(LEADER, timeout=60)
        assert (next(leading).status, next(following).status) == (SERVING, NOT_SERVING)

        changes = [pool.submit(next, watch) for watch in (leading, following)]
        quorum(cluster, "transfer", "--to", str(follower))
        assert [change.result(20).status for change in changes] == [NOT_SERVING, SERVING]
        leading.cancel()
        following.cancel()
