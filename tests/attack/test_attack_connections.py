"""Floods, silence and garbage at a leader's listeners, and connections for every descriptor.

Meanwhile the leader stays leader, the heartbeats and writes of a broker go on, and its memory stays
what it is. `--slow` attacks for longer, and with 5,000 connections.
"""

import asyncio
import contextlib
import itertools
import resource
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports, start_child
from streammeta.controller.process import operating_system
from streammeta.rpc.connections import operator_channel
from streammeta.v1 import admin_pb2
from streammeta.v1.admin_pb2_grpc import AdminServiceStub
from tests.attack.hostile import ON_CLIENTS, ON_HTTP, ON_PEERS, Attack, Target, idle, silent
from tests.attack.scene import Scene, shown
from tests.kit.certificates import Authority
from tests.kit.real_cluster import FAST, controller_command, format_data, put, values
from tests.kit.waiting import wait_until
from tests.monitoring.http_calls import get

pytestmark = pytest.mark.process

_SECONDS = 1.0
_SLOW_SECONDS = 20.0
_CONNECTIONS, _MANY = 300, 5_000
_IDLE_AT_HTTP = 1_000
_PROBER = "127.0.0.3"
"""Host of probes, another one than the attackers'."""


def _seconds(request: pytest.FixtureRequest) -> float:
    return _SLOW_SECONDS if request.config.getoption("slow") else _SECONDS


@pytest.mark.parametrize("attack", ON_CLIENTS, ids=lambda attack: attack.__name__)
async def test_a_leader_withstands_attacks_on_its_port_for_clients(
    scene: Scene, attack: Attack, request: pytest.FixtureRequest
) -> None:
    leader, _ = scene.epoch()
    endpoint = scene.cluster.endpoints[leader - 1]
    await scene.withstands(attack, endpoint, leader, seconds=_seconds(request))


@pytest.mark.parametrize("attack", ON_PEERS, ids=lambda attack: attack.__name__)
async def test_a_leader_withstands_attacks_on_its_port_for_peers(
    scene: Scene, attack: Attack, request: pytest.FixtureRequest
) -> None:
    leader, _ = scene.epoch()
    endpoint = scene.cluster.peer_endpoints[leader - 1]
    await scene.withstands(attack, endpoint, leader, seconds=_seconds(request))


@pytest.mark.parametrize(
    "count", [_CONNECTIONS, pytest.param(_MANY, marks=pytest.mark.slow)], ids=str
)
async def test_a_leader_withstands_many_connections_that_say_nothing(
    scene: Scene, count: int
) -> None:
    """Those above its bound are closed; they come again all the time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 3 * _MANY), hard))
    leader, _ = scene.epoch()
    endpoint = scene.cluster.endpoints[leader - 1]
    seconds = _SECONDS + count / 200
    await scene.withstands(idle, endpoint, leader, seconds=seconds, connections=count)


@asynccontextmanager
async def probed(scene: Scene, endpoint: str) -> AsyncIterator[None]:
    """Probe a controller from another host, and require that each probe is answered."""
    stop = threading.Event()
    answered = 0

    def probe() -> None:
        nonlocal answered
        while not stop.wait(0.1) or not answered:
            assert get(endpoint, "/livez", scene.monitor, source=_PROBER) == (200, "ok\n")
            answered += 1

    probing = asyncio.create_task(asyncio.to_thread(probe))
    try:
        yield
    finally:
        stop.set()
        await probing


@pytest.mark.parametrize("attack", ON_HTTP, ids=lambda attack: attack.__name__)
async def test_a_leader_withstands_attacks_on_its_port_for_http(
    scene: Scene, attack: Attack, request: pytest.FixtureRequest
) -> None:
    """Meanwhile it answers probes of other hosts."""
    leader, _ = scene.epoch()
    endpoint = scene.http_endpoints[leader - 1]
    target = Target(endpoint, shown(scene.monitor), connections=32)
    async with probed(scene, endpoint):
        await scene.outlasts(attack, target, leader, _seconds(request))


async def test_a_leader_withstands_many_connections_to_http_that_say_nothing(scene: Scene) -> None:
    leader, _ = scene.epoch()
    endpoint = scene.http_endpoints[leader - 1]
    target = Target(endpoint, shown(scene.monitor), connections=_IDLE_AT_HTTP)
    async with probed(scene, endpoint):
        await scene.outlasts(silent, target, leader, _SECONDS)


_LIMIT = 320
_WANTED = 600
_FLOOD = 400
"""Connections to each port, more than a process has descriptors."""
_HOSTS = [f"127.0.0.{last}" for last in range(2, 10)]
"""Hosts of attackers, each of which is allowed some connections."""
_DESCRIPTORS = 8_192


def limited(*command: str, limit: int = _LIMIT) -> list[str]:
    """Return a command that runs another with few file descriptors."""
    return ["sh", "-c", f'ulimit -Sn 128; ulimit -Hn {limit}; exec "$@"', "sh", *command]


class LimitedCluster(LocalCluster):
    """Controllers with few file descriptors each."""

    limit = _LIMIT

    def _command(self, node_id: int) -> list[str]:
        return limited(*LocalCluster._command(self, node_id), limit=self.limit)

    def descriptors(self, node_id: int) -> int:
        """Return how many a controller has in use."""
        return len([*Path(f"/proc/{self.children[node_id].pid}/fd").iterdir()])


def test_a_controller_with_few_descriptors_writes_and_takes_snapshots_amid_a_flood(
    tmp_path: Path,
) -> None:
    format_data(tmp_path)
    command = controller_command(tmp_path)
    endpoint = command[command.index("--listen") + 1]
    child = start_child("limited", limited(sys.executable, *command), tmp_path / "limited.log")
    host, _, port = endpoint.rpartition(":")
    with contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        child.wait_ready()
        client = stack.enter_context(ControllerClient([endpoint], timeout_s=60))
        put(client, "before", "1")
        for _ in range(_WANTED):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        put(client, "amid", "2")
        taken = client.call(
            lambda channel: AdminServiceStub(channel).TakeSnapshot,
            admin_pb2.TakeSnapshotRequest(),
        )
        assert taken.end_offset > 0
        assert values(client) == {"before": "1", "amid": "2"}
        assert child.process.poll() is None


class LimitedHttpCluster(LimitedCluster):
    """The same with a few more, since they serve HTTP too."""

    limit = _LIMIT + operating_system.DESCRIPTORS_FOR_HTTP


@asynccontextmanager
async def flooded(
    endpoints: Sequence[str],
    hosts: Sequence[str],
    stolen: ssl.SSLContext | None = None,
) -> AsyncIterator[set[int]]:
    """Hold as many connections to every port as it takes; those that are closed are made again.

    They come from other hosts than the controllers'. With a `stolen` certificate every other one
    is over TLS, and says no more. The set grows by each that was tried.
    """
    tried: set[int] = set()

    async def hold(number: int, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        context = stolen if number % 2 else None
        while True:
            with contextlib.suppress(OSError):
                try:
                    reader, writer = await asyncio.open_connection(
                        host, int(port), local_addr=(hosts[number % len(hosts)], 0), ssl=context
                    )
                finally:
                    tried.add(number)
                try:
                    await reader.read()
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.5)

    wanted = enumerate(itertools.chain(*[endpoints] * _FLOOD))
    holding = [asyncio.create_task(hold(number, endpoint)) for number, endpoint in wanted]
    try:
        yield tried
    finally:
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)


async def test_two_of_three_elect_a_leader_while_connections_want_all_descriptors(
    tmp_path: Path,
) -> None:
    cluster = LimitedCluster(tmp_path, "test", stored(tmp_path), free_ports(3), FAST)
    await outlives_its_leader(cluster, (), _HOSTS[:1])


async def test_connections_to_http_leave_the_log_and_the_peers_their_descriptors(
    tmp_path: Path, authority: Authority
) -> None:
    """They come from several hosts, and half of them show the stolen certificate of a broker."""
    tls = {node_id: authority.issue(f"controller/{node_id}") for node_id in (1, 2, 3)}
    http = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = LimitedHttpCluster(
        *(tmp_path, "test", stored(tmp_path), free_ports(3), FAST),
        tls=tls,
        own_options={node_id: ("--http-listen", http[node_id - 1]) for node_id in tls},
    )
    await outlives_its_leader(cluster, http, _HOSTS, authority)


def stored(root: Path) -> str:
    """Return the address of a bucket."""
    (root / "bucket").mkdir()
    return f"file://{root}/bucket"


async def outlives_its_leader(
    cluster: LimitedCluster,
    others: Sequence[str],
    hosts: Sequence[str],
    authority: Authority | None = None,
) -> None:
    """Flood all ports of a cluster, `others` too, and end the leader: another one must follow."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _DESCRIPTORS), hard))
    admin = stolen = None
    if authority is not None:
        admin = authority.issue("admin/alice")
        stolen = authority.issue("broker/7").load().context(ssl.PROTOCOL_TLS_CLIENT)
    endpoints = (*cluster.endpoints, *cluster.peer_endpoints, *others)
    try:
        cluster.start_all()
        async with contextlib.AsyncExitStack() as stack:
            # Connected before the flood: it may take all places of clients.
            asked = {
                node: stack.enter_context(operator_channel(cluster.endpoints[node - 1], admin))
                for node in cluster.node_ids
            }
            old: list[int] = []

            def is_led() -> bool:
                old[:] = (node_id for node_id, channel in asked.items() if leads(channel))
                return bool(old)

            await waited_for(is_led, "a leader")
            rest = [node_id for node_id in asked if node_id != old[0]]
            quiet = {node_id: cluster.descriptors(node_id) for node_id in rest}
            tried = await stack.enter_async_context(flooded(endpoints, hosts, stolen))

            def is_flooded() -> bool:
                are_full = (cluster.descriptors(node_id) > quiet[node_id] + 60 for node_id in rest)
                return len(tried) == len(endpoints) * _FLOOD and all(are_full)

            await waited_for(is_flooded, "the flood")
            cluster.children[old[0]].kill()
            await waited_for(lambda: any(leads(asked[node]) for node in rest), "another leader")
            assert all(cluster.children[node_id].is_running for node_id in rest)
    finally:
        cluster.stop_all()


def leads(channel: grpc.Channel) -> bool:
    """Whether a controller says that it leads and serves; it must answer."""
    request = health_pb2.HealthCheckRequest(service="leader")
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def waited_for(condition: Callable[[], bool], what: str) -> None:
    """Wait in a thread: the flood goes on."""
    await asyncio.to_thread(wait_until, condition, what)
