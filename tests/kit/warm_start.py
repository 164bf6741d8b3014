"""Starts of the product's processes by fork from one that has loaded it, at a tenth of the CPU.

Loading modules is four fifths of what a controller spends until it is ready, and tests start
hundreds. What runs is the same: a process in a session of its own, with the command's words,
environment, directory and log, which ends with this process. What differs: modules are loaded
before the environment is set, and sets of strings have the order of the process it was forked from.
Two of those take turns, so that the controllers of one cluster still differ in that order. Tests of
the start itself, and scripts, start interpreters.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import select

from streammeta.cli.local.local_cluster import Child, start_child
from tests.kit.warm_process import NUMBER

_PROGRAM = Path(__file__).with_name("warm_process.py")

_SERVERS = 2

_MODULES = ("streammeta.cli.main", "tests.chaos.small_segments")
"""Programs that may find the product loaded."""

_COMMAND_LINE = ("streammeta.cli.framework.output", "streammeta.cli.root")

_LOADED = {
    "controller": (
        *_COMMAND_LINE,
        "streammeta.cli.controller.controller_command",
        "streammeta.controller.process.server",
    ),
    "kafka": (
        *_COMMAND_LINE,
        "streammeta.cli.brokers.kafka_command",
        "streammeta.brokers.kafka.service.process",
    ),
}
"""What is loaded ahead, by command."""

_READ_WHEN_LOADED = ("GRPC_", "OPENBLAS_", "PYTHON")
"""Settings in the environment that come too late for a process that is forked."""


def start_warm(
    name: str, command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
) -> Child:
    """Start `command` as `start_child` does, which starts those that can't be forked."""
    words = _words_to_fork(command)
    late = [key for key in env or () if key.startswith(_READ_WHEN_LOADED) and key != "PYTHONPATH"]
    if words is None or late:
        return start_child(name, command, log_path, env)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = _next_server(words[1]).start(words, log.fileno(), {**os.environ, **(env or {})})
    return Child(name, process, log_path)


def _words_to_fork(command: Sequence[str]) -> list[str] | None:
    """The module of a command and its words, None if it is none that can be forked."""
    interpreter, *words = command
    if interpreter != sys.executable:
        return None
    if words[0] == "-P":
        del words[0]
    option, module, *arguments = words
    if option != "-m" or module not in _MODULES or arguments[0] not in _LOADED:
        return None
    return [module, *arguments]


class ForkedProcess(subprocess.Popen[str]):
    """A process that another one has forked, by the methods of one that was started here."""

    def __init__(self, args: Sequence[str], told: int, output: int) -> None:
        self.args = list(args)
        self.stdin = self.stderr = None
        self.stdout = os.fdopen(output)
        self.returncode: int | None = None
        self._told = told
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, told)
        self.pid = self._next_number()

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with self._lock:
            if self.returncode is None and select([self._told], [], [], 0)[0]:
                self.returncode = self._next_number()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, `timeout` seconds at most; return the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended by then.
        """
        if self.returncode is None:
            select([self._told], [], [], timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _next_number(self) -> int:
        data = os.read(self._told, NUMBER.size)
        if not data:
            raise RuntimeError("the process that forks has ended; its standard error has why")
        number: int = NUMBER.unpack(data)[0]
        return number


class WarmServer:
    """A process that has loaded what a command needs, and forks."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with asked:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), *modules],
                stdin=asked.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a thread would not be forked
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start(self, words: Sequence[str], log: int, env: Mapping[str, str]) -> ForkedProcess:
        """Fork a process and have it run `words`, the first of which is a module."""
        request = {"words": words, "environment": dict(env), "directory": str(Path.cwd())}
        message = json.dumps(request).encode()
        told, tell = os.pipe()
        output, printed = os.pipe()
        try:
            socket.send_fds(self._asking, [message], [printed, log, tell])
        finally:
            os.close(printed)
            os.close(tell)
        return ForkedProcess(words, told, output)

    def end(self) -> None:
        """End it, and with it what it has forked."""
        self._asking.close()
        self._process.wait()


_LOCK = threading.Lock()
_servers: dict[str, list[WarmServer]] = {}


def _next_server(command: str) -> WarmServer:
    """The server whose turn it is; each is started when its first turn comes."""
    with _LOCK:
        servers = _servers.setdefault(command, [])
        if len(servers) < _SERVERS:
            servers.append(WarmServer(_LOADED[command]))
        else:
            servers.append(servers.pop(0))
        return servers[-1]


@atexit.register
def _end() -> None:
    for server in (server for servers in _servers.values() for server in servers):
        server.end()
