"""ZooKeeper, etcd and PostgreSQL as children of the benchmark, from their Debian packages.

Each runs with its defaults in a temporary directory on free ports, and flushes to disk before it
acknowledges. etcd's limit of operations in one transaction is raised, because it would reject the
load. The packages are zookeeper, etcd-server and postgresql, which need not run as services.
"""

import asyncio
import contextlib
import importlib.util
import os
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
POSTGRESQL_HOMES = Path("/usr/lib/postgresql")
POSTGRESQL_ACCOUNT = "postgres"
PACKAGES = {"zookeeper": "zookeeper", "etcd": "etcd-server", "postgresql": "postgresql"}
"""Package to install, by system."""
INSTALL_CLIENT = ".venv/bin/python -m pip install -c scripts/constraints.txt -e '.[peers]'"


class PeerError(BenchmarkError):
    """A peer is not installed, or did not start."""


@dataclass(slots=True)
class PeerCluster:
    """A peer's servers. `children`, `endpoints` and `commands` are by number from 1."""

    system: str
    root: Path
    children: dict[int, Child] = field(default_factory=dict)
    endpoints: dict[int, str] = field(default_factory=dict)
    commands: dict[int, list[str]] = field(default_factory=dict)

    def start(self, number: int) -> None:
        """Start a server, or start it again on its directory."""
        before = self.children.get(number)
        assert before is None or not before.is_running
        name = f"{self.system} {number}"
        log = self.root / f"{self.system}-{number}.log"
        self.children[number] = start_child(name, self.commands[number], log)

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
        "postgresql": _postgresql_home() is not None,
    }
    if not is_installed[system]:
        return PACKAGES[system]
    has_client = system != "postgresql" or importlib.util.find_spec("asyncpg") is not None
    return "" if has_client else f"asyncpg: {INSTALL_CLIENT}"


def missing_table(left_out: Mapping[str, str]) -> list[Table]:
    """Return a table of systems that are not installed, with their packages, if there are any."""
    title, columns = "Not measured: not installed", ("system", "install")
    rows = tuple(left_out.items())
    return [Table(title=title, columns=columns, rows=rows)] if left_out else []


@contextlib.contextmanager
def running_peer(system: str, root: Path, count: int) -> Iterator[PeerCluster]:
    """Run `count` servers of `system` in `root` until the block ends."""
    start = {"zookeeper": _start_zookeeper, "etcd": _start_etcd, "postgresql": _start_postgresql}
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
        _start(cluster, number, port, command)


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
        _start(cluster, number, port, command)


def _start_postgresql(cluster: PeerCluster, root: Path, count: int) -> None:
    if count != 1:
        raise PeerError(f"postgresql: got {count} servers, expected 1")
    home = _postgresql_home()
    assert home is not None
    data, (port,) = root / "data", free_ports(1)
    account = _as_ordinary_account(root)
    initialize = (
        *account,
        *(str(home / "bin/initdb"), "--pgdata", str(data), "--auth", "trust"),
        *("--username", POSTGRESQL_ACCOUNT, "--encoding", "UTF8", "--no-locale"),
    )
    made = start_child("initdb", _to_log(initialize), root / "initdb.log")
    if made.process.wait() != 0:
        raise PeerError(f"initdb failed; its log:\n{made.log_tail()}")
    command = (
        *account,
        *(str(home / "bin/postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1"),
        *("-k", str(root), "-c", "fsync=on", "-c", "synchronous_commit=on"),
        *("-c", "max_connections=200"),
    )
    _start(cluster, 1, port, command)


def _as_ordinary_account(root: Path) -> tuple[str, ...]:
    """Return the words that run a command as PostgreSQL's account, since root may not."""
    if os.geteuid() != 0:
        return ()
    shutil.chown(root, POSTGRESQL_ACCOUNT, POSTGRESQL_ACCOUNT)
    for folder in root.parents:
        # The benchmark's own directories are closed to other accounts. Others' are not changed.
        if folder.stat().st_mode & 0o777 == 0o700 and folder.is_relative_to(_own_root(root)):
            folder.chmod(0o711)
    return (
        *("setpriv", f"--reuid={POSTGRESQL_ACCOUNT}", f"--regid={POSTGRESQL_ACCOUNT}"),
        *("--clear-groups", "--pdeathsig", "TERM", "--"),
    )


def _own_root(path: Path) -> Path:
    return next((at for at in path.parents if at.name.startswith("streammeta-bench-")), path)


def _start(cluster: PeerCluster, number: int, port: int, command: Sequence[str]) -> None:
    cluster.commands[number] = _to_log(command)
    cluster.endpoints[number] = f"127.0.0.1:{port}"
    cluster.start(number)


def _to_log(command: Sequence[str]) -> list[str]:
    """Return the command with standard output in its log, since nobody reads the pipe."""
    return ["sh", "-c", 'exec "$@" >&2', "sh", *command]


def _postgresql_home() -> Path | None:
    homes = [path.parent.parent for path in POSTGRESQL_HOMES.glob("*/bin/postgres")]
    return max(homes, key=lambda home: float(home.name), default=None)


async def _is_leader(system: str, endpoint: str) -> bool:
    try:
        async with asyncio.timeout(1.0):
            match system:
                case "zookeeper":
                    return await _zookeeper_mode(endpoint) in ("leader", "standalone")
                case "etcd":
                    return await etcd_client.is_leader(endpoint)
                case _:
                    from scripts.benchmarks.peers import postgresql_client

                    await postgresql_client.check(endpoint)
                    return True
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
