"""Controllers as child processes of this one, for `streammeta dev`, the demo and process tests.

Owns their directories, start, ready lines and end. Each child is stopped by its own pid, and none
survives this process, however it ends.
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
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.journal.directory import META_NAME, format_directory
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.tls.files import TlsFiles

READY_PREFIX = "ready "
"""First word of the line that a server prints on standard output once it serves."""

PROGRAM = (sys.executable, "-P", "-m", "streammeta.cli.main")
"""The `streammeta` command of this installation. -P removes the working directory from the module
path, because a folder there may be called `controller` too.
"""

_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Asks Linux to end the next program when its parent dies, even by `kill -9`. It is a separate
program, because code between fork and exec crashes while gRPC's threads run.
"""

_SPAWNER = concurrent.futures.ThreadPoolExecutor(1, "spawner")
"""Starts all children. Linux considers the starting thread the parent of a child, and threads of
callers end early. This thread lasts as long as the process.
"""


_STEADY_PORTS = range(12_000, 30_000)

_HOLDERS: deque[socket.socket] = deque()
"""Sockets that reserve the ports given out, the oldest first."""

# Bounds the sockets that this process keeps open.
_HOLDERS_MAX = 256


class ChildFailedError(Exception):
    """A child ended or stayed silent before it was ready. The message ends with its log."""


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
        """Whether the child is still running."""
        return self.process.poll() is None

    def read_line(self) -> str:
        """Return the child's next line on standard output, or an empty string once it has ended."""
        assert self.process.stdout is not None
        try:
            return self.process.stdout.readline().rstrip("\n")
        except ValueError:  # closed meanwhile: another thread has ended the child
            return ""

    def wait_ready(self) -> str:
        """Return the text after `READY_PREFIX` on the child's ready line."""
        while line := self.read_line():
            if line.startswith(READY_PREFIX):
                return line.removeprefix(READY_PREFIX)
        self._reap()
        raise ChildFailedError(
            f"{self.name} ended with exit code {self.process.returncode} before it was ready. "
            f"The end of its log {self.log_path}:\n{self.log_tail()}"
        )

    def log_tail(self, line_count: int = 15) -> str:
        """Return the last lines of the child's log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-line_count:])

    def kill(self) -> None:
        """Kill the child at once, as `kill -9` does, and reap it."""
        if self.is_running:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self._reap()

    def stop(self, timeout_s: float = 10.0) -> int:
        """Ask the child to end, kill it after `timeout_s`, and return its exit code."""
        self.ask_to_end()
        return self.wait_end(timeout_s)

    def ask_to_end(self) -> None:
        """Ask the child to end in good order. Asked twice, a controller hurries."""
        if self.is_running:
            # A paused process handles SIGTERM only after it continues.
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()

    def wait_end(self, timeout_s: float) -> int:
        """Wait for the child's end, kill it after `timeout_s`, and return its exit code."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return self._reap()

    def _reap(self) -> int:
        """Wait for the child's end, close its output, and return its exit code."""
        code = self.process.wait()
        # Otherwise the pipe stays open until the garbage collector finds it.
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


def start_child(
    name: str,
    command: Sequence[str],
    log_path: Path,
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start `command`. Its standard error is appended to `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)

    # The child has its own descriptor of the log, so this one is closed at once.
    with log_path.open("ab") as log:
        process = _SPAWNER.submit(
            subprocess.Popen[str],
            # The launcher needs no packages. -I and -S make it start without looking for any.
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=None if env is None else {**os.environ, **env},
            start_new_session=True,  # the terminal's Ctrl-C reaches the parent alone
        ).result()
    return Child(name, process, log_path)


Starter: TypeAlias = Callable[[str, Sequence[str], Path, Mapping[str, str] | None], Child]
"""Signature of `start_child`, for callers that start children in another way."""


def free_ports(count: int) -> list[int]:
    """Return `count` different free loopback TCP ports that nobody received lately.

    They are below the range from which systems choose ports for outgoing connections (32768 on
    Linux, 49152 by IANA), so none of those can use one before its process listens. Until then this
    process reserves the UDP port of the same number, for the next 256 ports that it gives out: no
    other call, in this process or another, returns the port.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.choice(_STEADY_PORTS)
        # Reserve last, because a reservation keeps a socket open.
        if port not in ports and _is_free(port) and _reserve(port):
            ports.append(port)
    return ports


def taken_ports(ports: Sequence[int]) -> list[int]:
    """Return the loopback `ports` on which another process listens."""
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


def _reserve(port: int) -> bool:
    """Reserve the UDP port. Return False if another process has it."""
    # UDP, so that the later process can still listen on the TCP port.
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

    `ports` are for clients, `peer_ports` for the other controllers, by default free ones. The first
    start formats all directories with all controllers as voters. Later starts format a missing
    directory, or the directory of a new controller, without voters: it becomes an observer, which
    `streammeta quorum add-voter` makes a voter. `peer_overrides` give the addresses at which one
    controller finds the others. `tls` are the TLS files of controllers, `own_options` further
    options of each. `starter` starts each one, as `start_child` does.
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
        """Addresses of all controllers for their peers, running or not."""
        return [f"127.0.0.1:{port}" for port in self.peer_ports]

    @property
    def connect(self) -> str:
        """Endpoints in the form of `--connect`."""
        return ",".join(self.endpoints)

    @property
    def node_ids(self) -> range:
        """The ids of all controllers."""
        return range(1, len(self.ports) + 1)

    @property
    def is_formatted(self) -> bool:
        """Whether a controller's directory is formatted, so that the cluster was started before."""
        return any(self._is_formatted(node_id) for node_id in self.node_ids)

    def data_dir(self, node_id: int) -> Path:
        """Return the directory of one controller."""
        return self.root / f"controller-{node_id}"

    def start_all(self) -> None:
        """Start every controller and wait until each one listens."""
        # Start all before waiting for the first, so that they start in parallel.
        for node_id in self.node_ids:
            self.spawn(node_id)
        for child in self.children.values():
            child.wait_ready()

    def start(self, node_id: int) -> None:
        """Start or restart one controller and wait until it listens."""
        self.spawn(node_id)
        self.children[node_id].wait_ready()

    def spawn(self, node_id: int) -> None:
        """Start one controller without waiting for it, on a formatted directory."""
        # Only a new cluster names its voters. A controller that has lost its disk must not vote
        # again.
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
        """Start one more controller, an observer. Wait until it listens and return its id."""
        self.ports.extend(_others(1, self.ports + self.peer_ports))
        self._add_peer_ports()
        self.start(len(self.ports))
        return len(self.ports)

    def wipe(self, node_id: int) -> None:
        """Delete the disk of a controller that is not running."""
        # A running controller would continue with deleted files.
        if node_id in self.children and self.children[node_id].is_running:
            raise ValueError(f"controller {node_id} still runs. Stop it before its disk is wiped")
        shutil.rmtree(self.data_dir(node_id))

    def stop_all(self) -> None:
        """Stop every controller that still runs, all at once."""
        running = [child for child in self.children.values() if child.is_running]
        # Ask all first, so that they end at the same time and share one timeout.
        for child in running:
            child.ask_to_end()
        deadline = time.monotonic() + 10
        # A controller that is late still gets a moment before it is killed.
        for child in running:
            child.wait_end(max(0.1, deadline - time.monotonic()))

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
            # Later options override earlier ones.
            *self.options,
            *self.own_options.get(node_id, ()),
        ]


def tls_words(files: TlsFiles, option: str = "tls") -> Sequence[str]:
    """Return the TLS options of a controller or a command."""
    return (
        *(f"--{option}-ca", str(files.ca), f"--{option}-cert", str(files.certificate)),
        *(f"--{option}-key", str(files.key)),
    )


def _others(count: int, taken: Sequence[int]) -> list[int]:
    """Return `count` free ports that are not in the given ones."""
    # So many that enough remain, even if every taken port is among them.
    return [port for port in free_ports(count + len(taken)) if port not in taken][:count]


def _peers(endpoints: Mapping[int, str]) -> str:
    return ",".join(f"{node_id}@{endpoint}" for node_id, endpoint in endpoints.items())


DELAY_MIN_S = 0.5
"""Delay of the first restart of a controller, in seconds."""

DELAY_MAX_S = 10.0
"""Longest delay in seconds, for a controller that keeps ending."""

STEADY_AFTER_S = 30.0
"""Uptime in seconds after which the delay starts again with the shortest one."""


@dataclass(slots=True)
class _Restart:
    """Times of one controller, by the supervisor's clock."""

    started_at: float
    delay_s: float = DELAY_MIN_S
    due_at: float | None = None
    """None if the controller ran at the last look."""


@dataclass(slots=True)
class Supervisor:
    """Restarts ended controllers of `cluster`, and reports through `report`, a line at a time."""

    cluster: LocalCluster
    report: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _restarts: dict[int, _Restart] = field(default_factory=dict)

    def look(self) -> None:
        """Schedule a restart of each ended controller, and carry out the due restarts."""
        now = self.clock()
        for node_id, child in list(self.cluster.children.items()):
            restart = self._restarts.setdefault(node_id, _Restart(now))
            if restart.due_at is not None:
                if now >= restart.due_at:
                    self._start(node_id, restart, now)
            elif not child.is_running:
                self._schedule(child, restart, now)

    def _schedule(self, child: Child, restart: _Restart, now: float) -> None:
        # After a long run, this end has probably another cause than the previous one.
        if now - restart.started_at > STEADY_AFTER_S:
            restart.delay_s = DELAY_MIN_S
        restart.due_at = now + restart.delay_s
        self.report(
            f"{child.name} ended ({_describe_end(child.process.returncode)}),"
            f" restarting in {restart.delay_s:g} s. Its log is {child.log_path}"
        )
        # Another end soon after this one waits twice as long.
        restart.delay_s = min(2 * restart.delay_s, DELAY_MAX_S)

    def _start(self, node_id: int, restart: _Restart, now: float) -> None:
        restart.started_at, restart.due_at = now, None
        self.cluster.spawn(node_id)
        child = self.cluster.children[node_id]
        # Another controller may end while this one starts, and Ctrl-C must not wait for it.
        threading.Thread(target=self._report_ready, args=(child,), daemon=True).start()

    def _report_ready(self, child: Child) -> None:
        try:
            child.wait_ready()
        except ChildFailedError:
            return  # the next look reports the end
        self.report(f"{child.name} runs again, pid {child.pid}")


def _describe_end(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
