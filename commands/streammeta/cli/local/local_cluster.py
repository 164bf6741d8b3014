"""Controllers as child processes of this one, for `streammeta dev`, the demo and process tests.

Owns their directories, their start, their ready lines and their end. Each child is stopped by its
own pid, and none outlives this process, however it ends.
"""

import atexit
import concurrent.futures
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.journal.directory import META_NAME, format_directory
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.tls.files import TlsFiles

READY_PREFIX = "ready "
"""First word of the line a server prints on standard output once it serves."""

PROGRAM = (sys.executable, "-P", "-m", "streammeta.cli.main")
"""The `streammeta` command of this installation. -P keeps the working directory off the path of
modules: a folder there that is called `controller` is not ours."""

_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Asks Linux to end the program it becomes when its parent dies, even by `kill -9`. A program of
its own, because code between fork and exec crashes where gRPC's threads run."""

_SPAWNER = concurrent.futures.ThreadPoolExecutor(1, "spawner")
"""Starts all children. Linux takes a child's parent to be the thread that started it, and threads
of callers come and go; this one lasts as long as the process."""


_STEADY_PORTS = range(12_000, 30_000)

_HOLDERS: deque[socket.socket] = deque()
"""Sockets whose ports stand for those that were given out, the oldest first."""

_HOLDERS_MAX = 256


class ChildFailedError(Exception):
    """A child ended, or stayed silent, before it was ready; the message ends with its log."""


@dataclass(slots=True)
class Child:
    """One child process, its log file and the line it prints when ready."""

    name: str
    process: subprocess.Popen[str]
    log_path: Path

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the child has not ended yet."""
        return self.process.poll() is None

    def read_line(self) -> str:
        """Return the child's next line on standard output, "" once it has ended."""
        assert self.process.stdout is not None
        try:
            return self.process.stdout.readline().rstrip("\n")
        except ValueError:  # closed meanwhile: another thread has ended the child
            return ""

    def wait_ready(self) -> str:
        """Return what follows `READY_PREFIX` on the child's ready line."""
        while line := self.read_line():
            if line.startswith(READY_PREFIX):
                return line.removeprefix(READY_PREFIX)
        self._reap()
        raise ChildFailedError(
            f"{self.name} ended with exit code {self.process.returncode} before it was ready; "
            f"the end of its log {self.log_path}:\n{self.log_tail()}"
        )

    def log_tail(self, line_count: int = 15) -> str:
        """Return the last lines of the child's log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-line_count:])

    def kill(self) -> None:
        """End the child at once, as `kill -9` does, and reap it."""
        if self.is_running:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self._reap()

    def stop(self, timeout_s: float = 10.0) -> int:
        """Ask the child to end, insist after `timeout_s`, and return its exit code."""
        if self.is_running:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self._reap()

    def _reap(self) -> int:
        """Wait for the child's end, let go of its output, and return its exit code."""
        code = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


def start_child(
    name: str,
    command: Sequence[str],
    log_path: Path,
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start `command`; its standard error goes to `log_path`, which is appended to."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = _SPAWNER.submit(
            subprocess.Popen[str],
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=None if env is None else {**os.environ, **env},
            start_new_session=True,  # the terminal's Ctrl-C reaches the parent alone
        ).result()
    return Child(name, process, log_path)


class Starter(Protocol):
    """What `start_child` does, for those that start children in another way."""

    def __call__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `command`; its standard error goes to `log_path`, which is appended to."""


def free_ports(count: int) -> list[int]:
    """Return `count` different loopback TCP ports that are free and were given to nobody lately.

    They lie below the range from which systems take ports for outgoing connections (32768 on
    Linux, 49152 by IANA), so none of those takes one before its process listens. Until it does,
    the UDP port of the same number is held, for the next 256 ports that this process gives out:
    no other call gives the port away, in this process or another one.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.choice(_STEADY_PORTS)
        if port not in ports and _is_free(port) and _hold(port):
            ports.append(port)
    return ports


def taken_ports(ports: Sequence[int]) -> list[int]:
    """Return those of `ports` on loopback that another process listens on."""
    # Connections of an ended process may linger at a port, and a listener takes it nevertheless.
    return [port for port in ports if not _is_free(port, may_linger=True)]


def _is_free(port: int, *, may_linger: bool = False) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, may_linger)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _hold(port: int) -> bool:
    """Hold the UDP port; return whether nobody else does."""
    holder = socket.socket(type=socket.SOCK_DGRAM)
    try:
        holder.bind(("127.0.0.1", port))
    except OSError:
        holder.close()
        return False
    _HOLDERS.append(holder)
    if len(_HOLDERS) > _HOLDERS_MAX:
        _HOLDERS.popleft().close()
    return True


@atexit.register
def _let_go() -> None:
    while _HOLDERS:
        _HOLDERS.popleft().close()


@dataclass(slots=True)
class LocalCluster:
    """Controllers 1..N on loopback, each with its own data directory under `root`.

    `ports` are those for clients, `peer_ports` those for the other controllers, by default free
    ones.
    The first start formats all directories with all controllers as voters. A directory that is
    missing later, or that of a controller that joined, is formatted without: it becomes an
    observer, which `streammeta quorum add-voter` makes a voter. `peer_overrides` say for a
    controller where it must look for the others. `tls` are the files of each that speaks TLS,
    `own_options` further options of each. `starter` starts each one, as `start_child` does.
    """

    root: Path
    cluster_id: str
    store_uri: str
    ports: list[int]
    options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    peer_overrides: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    tls: Mapping[int, TlsFiles] = field(default_factory=dict)
    own_options: Mapping[int, Sequence[str]] = field(default_factory=dict)
    children: dict[int, Child] = field(default_factory=dict)
    peer_ports: list[int] = field(default_factory=list)
    starter: Starter = start_child

    def __post_init__(self) -> None:
        self._add_peer_ports()

    @property
    def endpoints(self) -> list[str]:
        """Addresses of all controllers for clients, running or not."""
        return [f"127.0.0.1:{port}" for port in self.ports]

    @property
    def peer_endpoints(self) -> list[str]:
        """Where the other controllers reach every one, whether it runs or not."""
        return [f"127.0.0.1:{port}" for port in self.peer_ports]

    @property
    def connect(self) -> str:
        """The endpoints as `--connect` takes them."""
        return ",".join(self.endpoints)

    @property
    def node_ids(self) -> range:
        """The ids of all controllers."""
        return range(1, len(self.ports) + 1)

    @property
    def is_formatted(self) -> bool:
        """Whether any controller's directory is formatted: the cluster was started before."""
        return any(self._is_formatted(node_id) for node_id in self.node_ids)

    def data_dir(self, node_id: int) -> Path:
        """Return the directory of one controller."""
        return self.root / f"controller-{node_id}"

    def start_all(self) -> None:
        """Start every controller and wait until each one listens."""
        for node_id in self.node_ids:
            self.spawn(node_id)
        for child in self.children.values():
            child.wait_ready()

    def start(self, node_id: int) -> None:
        """Start, or start again, one controller and wait until it listens."""
        self.spawn(node_id)
        self.children[node_id].wait_ready()

    def spawn(self, node_id: int) -> None:
        """Start one controller without waiting for it, on a formatted directory."""
        if not self.is_formatted:
            for voter_id in self.node_ids:
                self._format(voter_id, self.peer_endpoints)
        if not self._is_formatted(node_id):
            self._format(node_id, [])
        self.children[node_id] = self.starter(
            f"controller {node_id}",
            self._command(node_id),
            self.root / f"controller-{node_id}.log",
            self.env,
        )

    def join(self) -> int:
        """Start one more controller, an observer; wait until it listens and return its id."""
        self.ports.extend(_others(1, self.ports + self.peer_ports))
        self._add_peer_ports()
        self.start(len(self.ports))
        return len(self.ports)

    def wipe(self, node_id: int) -> None:
        """Lose the disk of a controller that is not running."""
        if node_id in self.children and self.children[node_id].is_running:
            raise ValueError(f"controller {node_id} still runs; end it before its disk is wiped")
        shutil.rmtree(self.data_dir(node_id))

    def stop_all(self) -> None:
        """Stop every controller that still runs, all at once."""
        running = [child for child in self.children.values() if child.is_running]
        for child in running:
            child.process.send_signal(signal.SIGCONT)
            child.process.terminate()
        deadline = time.monotonic() + 10
        for child in running:
            child.stop(max(0.1, deadline - time.monotonic()))

    def _add_peer_ports(self) -> None:
        missing = len(self.ports) - len(self.peer_ports)
        self.peer_ports.extend(_others(missing, self.ports + self.peer_ports))

    def _is_formatted(self, node_id: int) -> bool:
        return (self.data_dir(node_id) / META_NAME).exists()

    def _format(self, node_id: int, voters: Sequence[str]) -> None:
        format_directory(
            self.data_dir(node_id),
            cluster_id=ClusterId(self.cluster_id),
            node_id=NodeId(node_id),
            bootstrap_voters=VoterSet(
                tuple(
                    Voter(ReplicaKey(NodeId(voter_id)), endpoint)
                    for voter_id, endpoint in enumerate(voters, start=1)
                )
            ),
        )

    def _command(self, node_id: int) -> list[str]:
        overrides = self.peer_overrides.get(node_id, {})
        return [
            *PROGRAM,
            "controller",
            *("--node-id", str(node_id), "--cluster-id", self.cluster_id),
            *("--listen", self.endpoints[node_id - 1]),
            *("--peer-listen", self.peer_endpoints[node_id - 1]),
            *("--seeds", _peers(dict(zip(self.node_ids, self.peer_endpoints, strict=True)))),
            *(("--peer-override", _peers(overrides)) if overrides else ()),
            *("--data-dir", str(self.data_dir(node_id))),
            *("--store", self.store_uri),
            *(tls_words(self.tls[node_id]) if node_id in self.tls else ()),
            *self.options,
            *self.own_options.get(node_id, ()),
        ]


def tls_words(files: TlsFiles, option: str = "tls") -> Sequence[str]:
    """Return the options by which a controller, or a command, gets its files for TLS."""
    return (
        *(f"--{option}-ca", str(files.ca), f"--{option}-cert", str(files.certificate)),
        *(f"--{option}-key", str(files.key)),
    )


def _others(count: int, taken: Sequence[int]) -> list[int]:
    """Return `count` free ports besides those that are taken already."""
    return [port for port in free_ports(count + len(taken)) if port not in taken][:count]


def _peers(endpoints: Mapping[int, str]) -> str:
    return ",".join(f"{node_id}@{endpoint}" for node_id, endpoint in endpoints.items())
