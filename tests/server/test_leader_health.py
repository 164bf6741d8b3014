"""The health service `leader` tells stock gRPC clients which controller leads."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.rpc.connections import operator_channel
from streammeta.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.grpc_servers import balanced_channel
from tests.kit.real_cluster import claims_to_lead, leader_of, quorum, running_cluster
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.process

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
