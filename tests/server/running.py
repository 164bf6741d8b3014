"""Real controllers for tests: child processes on loopback over a directory as the bucket."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streammeta.cli.client import ControllerClient
from streammeta.cli.local_cluster import Child, LocalCluster, free_ports, start_child
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.journal.directory import format_directory
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.rpc.connections import operator_channel
from streammeta.v1 import admin_pb2, admin_pb2_grpc
from tests.server.quorum_tools import wait_until

_LIFECYCLE = ("--lifecycle-interval-ms", "50", "--delete-delay-ms", "200")

FAST = ("--election-timeout-ms", "400", "--fetch-timeout-ms", "1000", *_LIFECYCLE)
"""Failures are seen soon. Leadership also moves when a busy machine holds a controller up."""

STEADY = ("--election-timeout-ms", "400", "--fetch-timeout-ms", "6000", *_LIFECYCLE)
"""Leadership stays where it is unless its controller ends or hands it over."""


@contextlib.contextmanager
def running_cluster(
    root: Path, count: int = 3, options: Sequence[str] = FAST
) -> Iterator[LocalCluster]:
    """Start `count` controllers over `root`/bucket; stop those that still run at the end."""
    bucket = root / "bucket"
    bucket.mkdir(exist_ok=True)
    cluster = LocalCluster(root, "test", f"file://{bucket}", free_ports(count), options)
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


def describe(
    cluster: LocalCluster, node_id: int | None = None
) -> admin_pb2.DescribeClusterResponse:
    """Ask one controller, or any, about the cluster."""
    asked = cluster.endpoints if node_id is None else [cluster.endpoints[node_id - 1]]
    with ControllerClient(asked) as client:
        return client.call(
            lambda channel: admin_pb2_grpc.AdminServiceStub(channel).DescribeCluster,
            admin_pb2.DescribeClusterRequest(),
        )


def leader_of(cluster: LocalCluster) -> int:
    """Return who leads and serves, by its own word; waits for it."""
    claims: list[int] = []

    def is_claimed() -> bool:
        claims[:] = (each for each in cluster.node_ids if claims_to_lead(cluster, each))
        return bool(claims)

    wait_until(is_claimed, "a controller to lead and serve")
    return claims[0]


def claims_to_lead(cluster: LocalCluster, node_id: int) -> bool:
    """Whether a controller says that it leads and serves; False if it does not answer."""
    with operator_channel(cluster.endpoints[node_id - 1]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service="leader"), timeout=5)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def controller_command(root: Path, **options: str) -> list[str]:
    """Return a command line for one controller alone; `options` replace its defaults."""
    (port,) = free_ports(1)
    bucket = root / "bucket"
    bucket.mkdir(exist_ok=True)
    settings = {
        "node-id": "1",
        "cluster-id": "test",
        "listen": f"127.0.0.1:{port}",
        "data-dir": str(root / "data"),
        "store": f"file://{bucket}",
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return ["-m", "streammeta.cli.main", "controller", *words]


def format_data(root: Path, endpoint: str = "127.0.0.1:1") -> None:
    """Make `root`/data ready for node 1 of cluster "test", the only voter."""
    format_directory(
        root / "data",
        cluster_id=ClusterId("test"),
        node_id=NodeId(1),
        bootstrap_voters=VoterSet((Voter(ReplicaKey(NodeId(1)), endpoint),)),
    )


def start_python(
    name: str, arguments: list[str], root: Path, env: Mapping[str, str] | None = None
) -> Child:
    """Start this Python with `arguments`; its log is `root`/`name`.log."""
    return start_child(name, [sys.executable, *arguments], root / f"{name}.log", env)
