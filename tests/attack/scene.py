"""A cluster that is attacked: its controllers, and a broker that works meanwhile."""

from __future__ import annotations

import resource
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.tls.files import TlsFiles
from streammeta.v1 import admin_pb2, common_pb2, kv_pb2, nodes_pb2
from tests.attack.hostile import Attack, Target, attacked
from tests.kit.certificates import Authority
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm
from tests.trust.audited_cluster import ask

NODE = common_pb2.NodeIdentity(node_id=1007, node_epoch=1)
_QUIET = ("--election-timeout-ms", "1000", "--fetch-timeout-ms", "8000")
_CALLS = 5
"""Calls of the broker that an attack must not hold up; they share a process with the attackers."""
_MIB = 1 << 20
_GROWTH_MAX = 200 * _MIB
_BYTES_A_CONNECTION = 100 << 10
"""Memory that a connection over TLS may cost."""


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
    """Three controllers, one of which leads; certificates are None in plain text."""

    cluster: LocalCluster
    http_endpoints: Sequence[str]
    broker: TlsFiles | None
    admin: TlsFiles | None
    monitor: TlsFiles | None

    def epoch(self) -> tuple[int, int]:
        """Return the leader and its epoch."""
        with ControllerClient(self.cluster.endpoints, timeout_s=60, tls=self.admin) as client:
            seen = ask(client, admin_pb2.DescribeClusterRequest())
        return seen.leader_id, seen.epoch

    def memory(self, node_id: int) -> int:
        """Return the memory that a controller holds, in bytes."""
        return resident(self.cluster.children[node_id].pid)

    @contextmanager
    def honest(self) -> Iterator[Honest]:
        """Let a broker work until the block ends."""
        stop = threading.Event()
        with ControllerClient(self.cluster.endpoints, timeout_s=60, tls=self.broker) as client:
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
        """Attack by the stolen certificate of the broker, and require that nothing comes of it."""
        target = Target(endpoint, shown(self.broker), connections)
        await self.outlasts(attack, target, leader, seconds)

    async def outlasts(self, attack: Attack, target: Target, leader: int, seconds: float) -> None:
        """Attack, and require that nothing comes of it."""
        before, memory = self.epoch(), self.memory(leader)
        connections = target.connections
        with self.honest() as broker:
            ends, wanted = time.monotonic() + seconds, broker.done + _CALLS

            def is_enough() -> bool:
                is_over = time.monotonic() > ends and broker.done >= wanted
                return is_over and target.made >= connections // 2

            await attacked(attack, target, is_enough)
        assert not broker.failures, broker.failures[:3]
        assert self.epoch() == before, "leadership moved"
        grown = self.memory(leader) - memory
        print(
            f"{attack.__name__}: {target.made} connections in {seconds:.0f} s, beside "
            f"{broker.done} writes and heartbeats; {grown / _MIB:.0f} MiB more"
        )
        assert grown < _GROWTH_MAX + connections * _BYTES_A_CONNECTION, (
            f"{grown / _MIB:.0f} MiB more"
        )


def resident(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def shown(files: TlsFiles | None) -> ssl.SSLContext | None:
    """Return what a caller with a certificate connects by; None: plain text."""
    if files is None:
        return None
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.certificate, files.key)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    return context


@contextmanager
def attackable(root: Path, authority: Authority | None) -> Iterator[Scene]:
    """Start three controllers that serve HTTP too; without an authority all is plain text."""
    (root / "bucket").mkdir()
    http = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = LocalCluster(
        *(root, "test", f"file://{root}/bucket", free_ports(3), _QUIET),
        own_options={node_id: ("--http-listen", http[node_id - 1]) for node_id in (1, 2, 3)},
        starter=start_warm,
    )
    broker = admin = monitor = None
    if authority is not None:
        cluster.tls = {node: authority.issue(f"controller/{node}") for node in cluster.node_ids}
        broker, admin = authority.issue("broker/1007"), authority.issue("admin/alice")
        monitor = authority.issue("monitor/m")
    try:
        cluster.start_all()
        made = Scene(cluster, http, broker, admin, monitor)
        wait_until(lambda: made.epoch()[0] > 0, "a leader")
        yield made
    finally:
        cluster.stop_all()
