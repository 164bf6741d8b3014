"""Controllers as child processes of this one, for `streammeta dev`, the demo and process tests.

Owns their start, their ready lines and their end. Each child is stopped by its own pid, and none
outlives this process, however it ends.
"""

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

READY_PREFIX = "ready "
"""First word of the line a server prints on standard output once it serves."""

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
        return self.process.stdout.readline().rstrip("\n")

    def wait_ready(self) -> str:
        """Return what follows `READY_PREFIX` on the child's ready line."""
        while line := self.read_line():
            if line.startswith(READY_PREFIX):
                return line.removeprefix(READY_PREFIX)
        self.process.wait()
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
        self.process.wait()

    def stop(self, timeout_s: float = 10.0) -> int:
        """Ask the child to end, insist after `timeout_s`, and return its exit code."""
        if self.is_running:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


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


def free_ports(count: int) -> list[int]:
    """Return `count` loopback TCP ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]


@dataclass(slots=True)
class LocalCluster:
    """Voters 1..N on loopback, each with its own data directory under `root`."""

    root: Path
    cluster_id: str
    store_uri: str
    ports: Sequence[int]
    options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    children: dict[int, Child] = field(default_factory=dict)

    @property
    def endpoints(self) -> list[str]:
        """Host and port of every controller, whether it runs or not."""
        return [f"127.0.0.1:{port}" for port in self.ports]

    @property
    def connect(self) -> str:
        """The endpoints as `--connect` takes them."""
        return ",".join(self.endpoints)

    def start_all(self) -> None:
        """Start every controller and wait until each one listens."""
        for node_id in range(1, len(self.ports) + 1):
            self.spawn(node_id)
        for child in self.children.values():
            child.wait_ready()

    def start(self, node_id: int) -> None:
        """Start, or start again, one controller and wait until it listens."""
        self.spawn(node_id)
        self.children[node_id].wait_ready()

    def spawn(self, node_id: int) -> None:
        """Start one controller without waiting for it."""
        self.children[node_id] = start_child(
            f"controller {node_id}",
            self._command(node_id),
            self.root / f"controller-{node_id}.log",
            self.env,
        )

    def stop_all(self) -> None:
        """Stop every controller that still runs, all at once."""
        running = [child for child in self.children.values() if child.is_running]
        for child in running:
            child.process.send_signal(signal.SIGCONT)
            child.process.terminate()
        deadline = time.monotonic() + 10
        for child in running:
            child.stop(max(0.1, deadline - time.monotonic()))

    def _command(self, node_id: int) -> list[str]:
        endpoint = self.endpoints[node_id - 1]
        voters = ",".join(f"{i}@{where}" for i, where in enumerate(self.endpoints, start=1))
        return [
            *(sys.executable, "-m", "controller.cli.main", "controller"),
            *("--node-id", str(node_id), "--cluster-id", self.cluster_id),
            *("--listen", endpoint, "--voters", voters),
            *("--data-dir", str(self.root / f"controller-{node_id}")),
            *("--store", self.store_uri),
            *self.options,
        ]
