"""Floods, silence and garbage at a leader's listeners, in plain text and over TLS.

Meanwhile the leader stays leader, the heartbeats and writes of a broker go on, and its memory stays
what it is. `--slow` attacks for longer, and with 5,000 connections.
"""

import resource
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streammeta.cli.client import CallError, ControllerClient
from streammeta.cli.local_cluster import LocalCluster, free_ports
from streammeta.rpc.tls import TlsFiles
from streammeta.v1 import admin_pb2, common_pb2, kv_pb2, nodes_pb2
from tests.attack.hostile import ON_CLIENTS, ON_PEERS, Attack, Target, attacked, idle
from tests.kit.certificates import Authority
from tests.kit.real_cluster import wait_until
from tests.trust.audited_cluster import ask

pytestmark = pytest.mark.process

NODE = common_pb2.NodeIdentity(node_id=1007, node_epoch=1)
_QUIET = ("--election-timeout-ms", "1000", "--fetch-timeout-ms", "8000")
_SECONDS = 1.0
_SLOW_SECONDS = 20.0
_CALLS = 5
"""Calls of the broker that an attack must not hold up; they share a process with the attackers."""
_MIB = 1 << 20
_GROWTH_MAX = 200 * _MIB
_BYTES_A_CONNECTION = 100 << 10
"""Memory that a connection over TLS may cost."""
_CONNECTIONS, _MANY = 300, 5_000


@dataclass
class Honest:
    """A broker that writes and sends heartbeats in a thread."""

    client: ControllerClient
    done: int = 0
    failures: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                item = kv_pb2.KVToPut(key=f"k{self.done % 100}", value=bytes(100), overwrite=True)
                ask(self.client, kv_pb2.PutKVsRequest(items=[item]))
                ask(self.client, nodes_pb2.HeartbeatRequest(node=NODE))
            except CallError as error:
                self.failures.append(str(error))
            self.done += 1
            stop.wait(0.005)


@dataclass
class Scene:
    """Three controllers, one of which leads."""

    cluster: LocalCluster
    broker: TlsFiles | None
    admin: TlsFiles | None

    def epoch(self) -> tuple[int, int]:
        """Return the leader and its epoch."""
        with ControllerClient(self.cluster.endpoints, timeout_s=30, tls=self.admin) as client:
            seen = ask(client, admin_pb2.DescribeClusterRequest())
        return seen.leader_id, seen.epoch

    def memory(self, node_id: int) -> int:
        """Return the memory that a controller holds, in bytes."""
        pages = Path(f"/proc/{self.cluster.children[node_id].pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def context(self) -> ssl.SSLContext | None:
        """Return the stolen certificate of the broker."""
        if self.broker is None:
            return None
        context = ssl.create_default_context(cafile=str(self.broker.ca))
        context.load_cert_chain(self.broker.certificate, self.broker.key)
        context.check_hostname = False
        context.set_alpn_protocols(["h2"])
        return context

    @contextmanager
    def honest(self) -> Iterator[Honest]:
        """Let a broker work until the block ends."""
        stop = threading.Event()
        with ControllerClient(self.cluster.endpoints, timeout_s=30, tls=self.broker) as client:
            ask(client, nodes_pb2.RegisterNodeRequest(node=NODE))
            broker = Honest(client)
            thread = threading.Thread(target=broker.run, args=(stop,), name="honest")
            thread.start()
            try:
                yield broker
            finally:
                stop.set()
                thread.join()

    async def withstands(
        self, attack: Attack, endpoint: str, leader: int, *, seconds: float, connections: int = 8
    ) -> None:
        """Attack, and require that nothing comes of it."""
        before, memory = self.epoch(), self.memory(leader)
        target = Target(endpoint, self.context(), connections)
        with self.honest() as broker:
            ends, wanted = time.monotonic() + seconds, broker.done + _CALLS

            def is_enough() -> bool:
                is_over = time.monotonic() > ends and broker.done >= wanted
                return is_over and target.made >= connections // 2

            await attacked(attack, target, is_enough)
        assert not broker.failures, broker.failures[:3]
        assert self.epoch() == before, "leadership moved"
        grown = self.memory(leader) - memory
        assert grown < _GROWTH_MAX + connections * _BYTES_A_CONNECTION, (
            f"{grown / _MIB:.0f} MiB more"
        )


@pytest.fixture(scope="module", params=["plain text", "tls"])
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[Scene]:
    root = tmp_path_factory.mktemp("attacked")
    (root / "bucket").mkdir()
    store = f"file://{root}/bucket"
    cluster = LocalCluster(root, "test", store, free_ports(3), _QUIET)
    broker = admin = None
    if request.param == "tls":
        cluster.tls = {each: authority.issue(f"controller/{each}") for each in cluster.node_ids}
        broker, admin = authority.issue("broker/1007"), authority.issue("admin/alice")
    try:
        cluster.start_all()
        made = Scene(cluster, broker, admin)
        wait_until(lambda: made.epoch()[0] > 0, "a leader")
        yield made
    finally:
        cluster.stop_all()


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
