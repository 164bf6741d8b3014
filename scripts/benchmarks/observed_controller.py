"""Runs a controller like `streammeta controller`, counts its flushes and times its event loop.

    python -m scripts.benchmarks.observed_controller COUNTERS PROFILE|- controller --node-id ...

COUNTERS is a file that `Counters` reads while the controller runs. PROFILE is a path for a profile
of the event loop's thread, by its CPU time from the start to the end, for `pstats`.
"""

import asyncio
import cProfile
import mmap
import os
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Self

from streammeta.cli import main as entry
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.messages import Batch

_LAYOUT = struct.Struct("<6q")
_FLUSHES, _STALL = struct.Struct("<5q"), struct.Struct("<q")
"""Parts of the layout, each of which one thread at a time writes."""
_STALL_POLL_S = 0.01
_LENGTH_BYTES = 4
"""Size of the length that precedes a payload in its batch."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Work of a controller's journal since the process began."""

    flushes: int = 0
    flush_ns: int = 0
    batches: int = 0
    payloads: int = 0
    """Entries appended to the log, one for each request that changed something."""
    payload_bytes: int = 0
    """Bytes of the payloads and their lengths, without headers of batches."""
    stall_max_ns: int = 0
    """Longest delay of a timer of the event loop since the process began."""

    def __sub__(self, earlier: Self) -> "Counters":
        """Return the counts since `earlier`. The longest stall stays as it is."""
        counts = [now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)]
        return replace(Counters(*counts), stall_max_ns=self.stall_max_ns)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the counters of a running controller."""
        return cls(*_LAYOUT.unpack(path.read_bytes()))


class _Counting:
    """Wraps `os.fdatasync` and `Journal.append`, which one thread at a time calls.

    A timer on the event loop records by how much it was late at most.
    """

    def __init__(self, path: Path) -> None:
        # Loads gRPC, whose settings have to be in the environment before.
        from streammeta.controller.process.server import ControllerNode

        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._flushes = self._flush_ns = self._batches = self._payloads = self._bytes = 0
        self._stall_max_ns = 0
        self._fdatasync = os.fdatasync
        self._node = ControllerNode
        self._run = ControllerNode.run
        self._append = Journal.append

    def install(self) -> None:
        """Count from now on."""
        counting = self

        def append(journal: Journal, batches: Sequence[Batch]) -> None:
            counting._append(journal, batches)
            counting._batches += len(batches)
            counting._payloads += sum(len(batch.payloads) for batch in batches)
            counting._bytes += sum(
                len(payload) + _LENGTH_BYTES for batch in batches for payload in batch.payloads
            )

        async def run(node: Any, *arguments: Any) -> None:
            counting._watch_loop(asyncio.get_running_loop(), time.perf_counter_ns())
            await counting._run(node, *arguments)

        self._node.run = run  # type: ignore[assignment, method-assign]
        os.fdatasync = self._timed_fdatasync
        Journal.append = append  # type: ignore[assignment, method-assign]

    def _timed_fdatasync(self, fd: Any) -> None:
        began = time.perf_counter_ns()
        self._fdatasync(fd)
        self._flush_ns += time.perf_counter_ns() - began
        # Only the journal's thread flushes, so the counters need no lock.
        self._flushes += 1
        counts = (self._flushes, self._flush_ns, self._batches, self._payloads, self._bytes)
        _FLUSHES.pack_into(self._shared, 0, *counts)

    def _watch_loop(self, loop: asyncio.AbstractEventLoop, due_ns: int) -> None:
        now_ns = time.perf_counter_ns()
        if now_ns - due_ns > self._stall_max_ns:
            self._stall_max_ns = now_ns - due_ns
            _STALL.pack_into(self._shared, _FLUSHES.size, self._stall_max_ns)
        next_ns = now_ns + int(_STALL_POLL_S * 1e9)
        loop.call_later(_STALL_POLL_S, self._watch_loop, loop, next_ns)


def main() -> int:
    """Run the controller named on the command line and return its exit code."""
    _, counters, profile_path, *arguments = sys.argv
    set_up_grpc()
    _Counting(Path(counters)).install()
    if profile_path == "-":
        return run_product(arguments)
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    try:
        return run_product(arguments)
    finally:
        profile.disable()
        profile.dump_stats(profile_path)


def set_up_grpc() -> None:
    """Set the product's gRPC settings in the environment, before any module loads gRPC."""
    os.environ.update(entry.GRPC_SETTINGS | os.environ)


def run_product(arguments: Sequence[str]) -> int:
    """Run `streammeta` with these words in this process and return its exit code."""
    sys.argv = ["streammeta", *arguments]
    try:
        entry.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
