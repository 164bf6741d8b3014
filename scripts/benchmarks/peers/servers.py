"""ZooKeeper and etcd as children of the benchmark, from their Debian packages.

Each runs with its defaults in a temporary directory on free ports, and flushes to disk before it
acknowledges. etcd's limit of operations in one transaction is raised, because it would reject the
load. The packages are zookeeper and etcd-server, which need not run as services.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmarks.figures import BenchmarkError, Table
from scripts.benchmarks.peers import etcd_client
from streammeta.cli.local.local_cluster import Child, free_ports, start_child

READY_WITHIN_S = 60.0
_POLL_S = 0.1
ZOOKEEPER_JAR = Path("/usr/share/java/zookeeper.jar")
ZOOKEEPER_CONFIG = Path("/etc/zookeeper/conf")
PACKAGES = {"zookeeper": "zookeeper", "etcd": "etcd-server"}
"""Package to install, by system."""


class PeerError(BenchmarkError):
    """A peer is not installed, or did not start."""


@dataclass(slots=True)
class PeerCluster:
    """A peer's servers. `children` and `endpoints` are by number from 1."""

    system: str
    root: Path
    children: dict[int, Child] = field(default_factory=dict)
    endpoints: dict[int, str] = field(default_factory=dict)

    def start(self, number: int, port: int, command: Sequence[str]) -> None:
        """Start a server that listens at `port`."""
        log = self.root / f"{self.system}-{number}.log"
        # Nobody reads standard output, so it goes to the log.
        words = ["sh", "-c", 'exec "$@" >&2', "sh", *command]
        self.children[number] = start_child(f"{self.system} {number}", words, log)
        self.endpoints[number] = f"127.0.0.1:{port}"

    def stop_all(self) -> None:
        """Stop every server."""
        for child in self.children.values():
            child.stop()

    async def find_leader(self) -> int:
        """Return the number of the leading server once there is one.

        Raises:
            PeerError: there was none in time, or a server ended.
        """
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            for number, child in self.children.items():
                if not child.is_running:
                    raise PeerError(f"{child.name} ended; its log:\n{child.log_tail()}")
                if await _is_leader(self.system, self.endpoints[number]):
                    return number
            await asyncio.sleep(_POLL_S)
        raise PeerError(f"{self.system} had no leader within {READY_WITHIN_S:.0f} s")


def missing(system: str) -> str:
    """Return the package to install for `system`, "" if it is installed."""
    is_installed = {
        "zookeeper": ZOOKEEPER_JAR.exists() and shutil.which("java") is not None,
        "etcd": shutil.which("etcd") is not None,
    }
    return "" if is_installed[system] else PACKAGES[system]


def missing_table(left_out: Mapping[str, str]) -> list[Table]:
    """Return a table of systems that are not installed, with their packages, if there are any."""
    title, columns = "Not measured: not installed", ("system", "install")
    rows = tuple(left_out.items())
    return [Table(title=title, columns=columns, rows=rows)] if left_out else []


@contextlib.contextmanager
def running_peer(system: str, root: Path, count: int) -> Iterator[PeerCluster]:
    """Run `count` servers of `system` in `root` until the block ends."""
    start = {"zookeeper": _start_zookeeper, "etcd": _start_etcd}
    root.mkdir(parents=True)
    cluster = PeerCluster(system, root)
    try:
        start[system](cluster, root, count)
        yield cluster
    finally:
        cluster.stop_all()


def _start_zookeeper(cluster: PeerCluster, root: Path, count: int) -> None:
    ports, quorum_ports, election_ports = (free_ports(count * 3)[at::3] for at in range(3))
    voters = "".join(
        f"server.{number}=127.0.0.1:{quorum}:{election}\n"
        for number, (quorum, election) in enumerate(
            zip(quorum_ports, election_ports, strict=True), start=1
        )
    )

    for number, port in enumerate(ports, start=1):
        data = root / f"zookeeper-{number}"
        data.mkdir()
        (data / "myid").write_text(f"{number}\n")
        config = root / f"zookeeper-{number}.cfg"
        config.write_text(
            "tickTime=2000\ninitLimit=10\nsyncLimit=5\nadmin.enableServer=false\n"
            f"4lw.commands.whitelist=srvr\ndataDir={data}\nclientPort={port}\n"
            f"clientPortAddress=127.0.0.1\n{voters if count > 1 else ''}"
        )
        command = (
            *("java", "-cp", f"{ZOOKEEPER_CONFIG}:{ZOOKEEPER_JAR}"),
            f"-Dzookeeper.log.dir={root}",
            "-Dzookeeper.root.logger=WARN,CONSOLE",
            *("org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config)),
        )
        cluster.start(number, port, command)


def _start_etcd(cluster: PeerCluster, root: Path, count: int) -> None:
    ports, peer_ports = (free_ports(count * 2)[at::2] for at in range(2))
    members = ",".join(
        f"etcd-{number}=http://127.0.0.1:{port}" for number, port in enumerate(peer_ports, start=1)
    )

    for number, (port, peer_port) in enumerate(zip(ports, peer_ports, strict=True), start=1):
        client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        command = (
            *("etcd", "--name", f"etcd-{number}", "--data-dir", str(root / f"etcd-{number}")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", members, "--initial-cluster-state", "new"),
            # The defaults would reject transactions of a thousand ranges, and 2 GiB fill up.
            *("--max-txn-ops", "100000", "--max-request-bytes", str(32 << 20)),
            *("--quota-backend-bytes", str(8 << 30), "--log-level", "error"),
        )
        cluster.start(number, port, command)


async def _is_leader(system: str, endpoint: str) -> bool:
    try:
        async with asyncio.timeout(1.0):
            if system == "etcd":
                return await etcd_client.is_leader(endpoint)
            return await _zookeeper_mode(endpoint) == "leader"
    except OSError:
        return False


async def _zookeeper_mode(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"srvr")
        answer = (await reader.read()).decode()
    finally:
        writer.close()
    modes = [line for line in answer.splitlines() if line.startswith("Mode: ")]
    return modes[0].removeprefix("Mode: ") if modes else ""
