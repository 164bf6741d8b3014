"""Child processes of the benchmarks: functions of these scripts, and other programs."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from streammeta.cli.local.local_cluster import Child, ChildFailedError, start_child


def command_of(function: Callable[..., Any], **arguments: Any) -> list[str]:
    """Return the command that calls `function` in a process that prints the result as JSON.

    The arguments have to be JSON values or paths, which become strings.
    """
    place = f"{function.__module__}:{function.__qualname__}"
    given = json.dumps(arguments, default=str)
    return [sys.executable, "-m", "scripts.benchmarks.worker", place, given]


@contextlib.asynccontextmanager
async def running(
    name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """Run a command until the block ends."""
    child = start_child(name, command, log, env)
    try:
        yield child
    finally:
        await asyncio.to_thread(child.stop)


def working(
    log: Path, function: Callable[..., Any], **arguments: Any
) -> contextlib.AbstractAsyncContextManager[Child]:
    """Run `function` in a separate process, at most until the block ends."""
    return running(function.__name__.strip("_"), command_of(function, **arguments), log)


async def run_worker(log: Path, function: Callable[..., Any], **arguments: Any) -> Any:
    """Return the result of `function`, called in a separate process.

    Raises:
        ChildFailedError: the process failed; the message ends with its log.
    """
    async with working(log, function, **arguments) as child:
        return await read_result(child)


async def wait_ready(child: Child) -> str:
    """Return the rest of the child's next ready line."""
    return await asyncio.to_thread(child.wait_ready)


async def read_result(child: Child, *, may_fail: bool = False) -> Any:
    """Return the JSON value on the last line that the child prints, once it has ended.

    Raises:
        ChildFailedError: it printed none, or failed although it must not.
    """

    def read() -> tuple[str, int]:
        last = ""
        while line := child.read_line():
            # Ready lines and events come before the result.
            last = line
        return last, child.process.wait()

    last, code = await asyncio.to_thread(read)
    with contextlib.suppress(ValueError):
        if code == 0 or may_fail:
            return json.loads(last)
    raise ChildFailedError(
        f"{child.name} ended with exit code {code}; its log:\n{child.log_tail()}"
    )


def cpu_s(pids: Iterable[int], *, with_children: bool = False) -> float:
    """Return the CPU seconds that running processes have used, in user and kernel mode."""
    total = 0.0
    for pid in pids:
        server = psutil.Process(pid)
        for process in (server, *(server.children(recursive=True) if with_children else ())):
            times = process.cpu_times()
            total += times.user + times.system
            if with_children:
                total += times.children_user + times.children_system
    return total


def thread_s(function: Callable[[], object]) -> float:
    """Return the CPU seconds that this thread needs for a call of `function`."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(psutil.Process(pid).memory_info().rss)


def status_bytes(name: str) -> int:
    """Return a size in bytes from this process's status.

    VmRSS is the present memory, VmHWM the peak. Both begin with the program, while the maximum of
    `getrusage` is inherited from the parent.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
