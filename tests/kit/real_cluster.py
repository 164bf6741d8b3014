"""Real controllers: child processes on loopback over a directory; commands and writes to them."""

import contextlib
import io
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.framework.output import run_cli
from streammeta.cli.local.local_cluster import Child, LocalCluster, free_ports
from streammeta.cli.root import cli
from streammeta.client.controllers.methods import PREPARE_OBJECTS
from streammeta.client.model import node_message
from streammeta.client.parts import BrokerSession
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.journal.directory import format_directory
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.rpc.connections import operator_channel
from streammeta.v1 import admin_pb2, admin_pb2_grpc, common_pb2, kv_pb2, objects_pb2
from streammeta.v1.kv_pb2_grpc import KVServiceStub
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

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
    cluster = LocalCluster(
        root, "test", f"file://{bucket}", free_ports(count), options, starter=start_warm
    )
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
    """Return the leader that serves, by its own word; waits for it."""
    claims: list[int] = []

    def is_claimed() -> bool:
        claims[:] = (node_id for node_id in cluster.node_ids if claims_to_lead(cluster, node_id))
        return bool(claims)

    wait_until(is_claimed, "a controller to lead and serve")
    return claims[0]


def claims_to_lead(cluster: LocalCluster, node_id: int) -> bool:
    """Whether a controller says that it leads and serves; False if it does not answer."""
    with operator_channel(cluster.endpoints[node_id - 1]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service="leader"), timeout=60)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def controller_command(root: Path, **options: str) -> list[str]:
    """Return a command line for one controller alone; `options` replace its defaults."""
    port, peer_port = free_ports(2)
    bucket = root / "bucket"
    bucket.mkdir(exist_ok=True)
    settings = {
        "node-id": "1",
        "cluster-id": "test",
        "listen": f"127.0.0.1:{port}",
        "peer-listen": f"127.0.0.1:{peer_port}",
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
    """Start this Python with `arguments`, by a fork if it can be; its log is `root`/`name`.log."""
    return start_warm(name, [sys.executable, *arguments], root / f"{name}.log", env)


def streammeta(*words: str) -> dict[str, Any]:
    """Run a command in this process; return its one json object, with `exit_code` added."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exit_code = run_cli(cli, [*words, "--format", "json"])
    answer: dict[str, Any] = json.loads(said.getvalue())
    return {**answer, "exit_code": exit_code}


def quorum(cluster: LocalCluster, *words: str, connect: str = "") -> dict[str, Any]:
    """Run `streammeta quorum`, which must succeed."""
    name, *more = words
    answer = streammeta("quorum", name, "--connect", connect or cluster.connect, *more)
    assert answer["ok"], answer
    assert answer["exit_code"] == 0
    return answer


def raise_level(cluster: LocalCluster, level: int) -> None:
    """Raise the feature level, once the leader knows the bucket and all controllers' versions."""

    def is_raised() -> bool:
        answer = streammeta("features", "upgrade", "--connect", cluster.connect, "--to", str(level))
        passing = ("FEATURE_LEVEL", "MARKER_UNSEEN")
        refused = answer["exit_code"] == 1 and answer["error"]["code"] in passing
        assert refused or answer["exit_code"] == 0, answer
        return not refused

    wait_until(is_raised, f"every controller to be seen as able to run at level {level}")


def replica(cluster: LocalCluster, node_id: int) -> dict[str, Any]:
    """How the leader sees one replica now; empty if it does not."""
    rows = quorum(cluster, "describe")["replicas"]
    return next((row for row in rows if row["node_id"] == node_id), {})


def put(client: ControllerClient, key: str, value: str) -> None:
    """Put one key and require that it was put."""
    item = kv_pb2.KVToPut(key=key, value=value.encode(), overwrite=True)
    answer = client.call(
        lambda channel: KVServiceStub(channel).PutKVs, kv_pb2.PutKVsRequest(items=[item])
    )
    assert answer.results[0].error == 0


def put_when_ready(client: ControllerClient, key: str, value: str) -> None:
    """Put one key as soon as a new leader has seen its marker in the bucket."""

    def is_put() -> bool:
        try:
            put(client, key, value)
        except CallError as error:
            if error.code != "MARKER_UNSEEN":
                raise
            return False
        return True

    wait_until(is_put, "the leader to see its marker")


def wait_superseded(client: ControllerClient) -> None:
    """Wait until a cluster refuses writes because another one was restored over it."""

    def is_superseded() -> bool:
        try:
            put(client, "from before", "1")
        except CallError as error:
            return error.code == "SUPERSEDED"
        return False

    wait_until(is_superseded, "the old cluster to notice")


def values(client: ControllerClient) -> dict[str, str]:
    """Every key of the default namespace, and its value."""
    found: dict[str, str] = {}
    request = kv_pb2.ListKVsRequest()
    while True:
        answer = client.call(lambda channel: KVServiceStub(channel).ListKVs, request)
        found |= {entry.key: entry.value.decode() for entry in answer.entries}
        if not answer.next_page_token:
            return found
        request.page.page_token = answer.next_page_token


async def prepare_object(session: BrokerSession, ttl_ms: int = 60_000, **options: Any) -> int:
    """Prepare one object in the name of a session; return its id."""
    request = objects_pb2.PrepareObjectsRequest(
        node=node_message(session.node), count=1, ttl_ms=ttl_ms
    )
    answer = await session.client.call(PREPARE_OBJECTS, request, **options)
    assert answer.error == common_pb2.ERROR_CODE_NONE
    return int(answer.first_object_id)


class Writes:
    """Puts one key after the other in a thread; `acknowledged` grows with every answer."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writes")
        self.acknowledged: list[str] = []
        self.longest_wait_s = 0.0
        """Longest time in seconds until some write was acknowledged, failed attempts included."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def expect_progress(self) -> None:
        """Wait until a write that began after this call has been acknowledged."""
        known = len(self.acknowledged) + 1
        wait_until(lambda: len(self.acknowledged) > known, "writes are acknowledged")

    def _run(self) -> None:
        number, since = 0, time.monotonic()
        while not self._stop.is_set():
            # Made anew after a failure: controllers that joined since are asked too.
            with (
                ControllerClient(self._cluster.endpoints) as client,
                contextlib.suppress(CallError),  # an unknown outcome is not counted
            ):
                while not self._stop.is_set():
                    number += 1
                    put(client, f"key-{number:06}", str(number))
                    self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - since)
                    self.acknowledged.append(f"key-{number:06}")
                    time.sleep(0.02)
                    since = time.monotonic()


@contextlib.contextmanager
def writes_going_on(cluster: LocalCluster) -> Iterator[Writes]:
    """Write all the while; at the end everything acknowledged must be there."""
    writes = Writes(cluster)
    writes.start()
    try:
        yield writes
        writes.expect_progress()
    finally:
        writes.stop()
    with ControllerClient(cluster.endpoints, timeout_s=60) as client:
        there = values(client)
    missing = [key for key in writes.acknowledged if key not in there]
    assert not missing, f"{len(missing)} of {len(writes.acknowledged)} acknowledged writes are lost"
