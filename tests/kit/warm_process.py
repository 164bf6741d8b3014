"""Program behind `warm_start`: loads modules, then becomes each command asked for, by a fork.

Its arguments are the modules to load, its standard input is the socket over which it is asked. A
request is JSON: `words`, the first of which is a module, `environment` and `directory`. With it
come three descriptors: standard output, standard error, and where the child's pid is told and later
its exit code. It ends when nobody can ask any more, and its children with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
from select import select
from typing import Any

from streammeta.cli.main import COLLECTED_EVERY, GRPC_SETTINGS

NUMBER = struct.Struct("<i")
"""A pid, or an exit code: negative is the signal that ended the child."""

_REQUEST_BYTES_MAX = 128 * 1024

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


class _Server:
    """Forks, and tells how children ended."""

    def __init__(self) -> None:
        self._asked = socket.socket(fileno=sys.stdin.fileno())
        self._told: dict[int, int] = {}
        """Where each child's exit code is told, by pid."""
        self._ends, self._end_of_one = socket.socketpair()
        for end in (self._ends, self._end_of_one):
            end.setblocking(False)
        signal.set_wakeup_fd(self._end_of_one.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> list[str]:
        """Return in each child what it is to run, and nothing here in the end."""
        while True:
            ready, _, _ = select([self._asked, self._ends], [], [])
            if self._ends in ready:
                self._ends.recv(4096)
                self._reap()
            if self._asked in ready:
                message, descriptors, _, _ = socket.recv_fds(self._asked, _REQUEST_BYTES_MAX, 3)
                if not message:
                    return []
                request = json.loads(message)
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    self._become(request, descriptors, parent)
                    words: list[str] = request["words"]
                    return words
                *streams, told = descriptors
                for stream in streams:
                    os.close(stream)
                os.write(told, NUMBER.pack(pid))
                self._told[pid] = told

    def _reap(self) -> None:
        while self._told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            told = self._told.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                os.write(told, NUMBER.pack(os.waitstatus_to_exitcode(status)))
            os.close(told)

    def _become(self, request: Any, descriptors: list[int], parent: int) -> None:
        """Give this process, a new child, what a program finds when it has been started."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
        self._asked.detach()
        self._ends.close()
        self._end_of_one.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        output, errors, told = descriptors
        for stream, source in enumerate((nothing, output, errors)):
            os.dup2(source, stream)
        for number in (nothing, output, errors, told, *self._told.values()):
            os.close(number)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in searched if path and path not in sys.path]


def main() -> None:
    """Load the modules and serve; run in each child what was asked for."""
    gc.set_threshold(COLLECTED_EVERY)
    os.environ.update(GRPC_SETTINGS | os.environ)  # read when gRPC is loaded
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    words = _Server().serve()
    if words:
        sys.argv = words
        sys.modules.pop(words[0], None)  # runpy warns of a program that is imported already
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
