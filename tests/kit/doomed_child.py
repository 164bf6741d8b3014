"""Child processes of tests that take themselves away, as kill -9 does, at an ordered step."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.kit.waiting import PATIENCE_S

ResultT = TypeVar("ResultT")

REPOSITORY = Path(__file__).parents[2]


class Executioner:
    """Counts the steps and ends the process at the `at`-th time of the ordered one.

    The step "time" comes by itself, after `at` ms from `start`.
    """

    def __init__(self, step: str, at: int) -> None:
        self._step = step
        self._left = at
        self._lock = threading.Lock()

    def made(self, step: str, call: Callable[[], ResultT]) -> ResultT:
        self.pass_by(step)
        result = call()
        self.pass_by(step)
        return result

    def pass_by(self, step: str) -> None:
        with self._lock:
            if step == self._step:
                self._left -= 1
                if self._left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    def start(self) -> None:
        if self._step == "time":
            timer = threading.Timer(self._left / 1000, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()


async def run_child(module: str, settings: str, *, may_die: bool) -> tuple[bool, bytes]:
    """Run a module of the tests to its end; return whether it was killed, and what it printed."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module, settings),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            out, err = await child.communicate()
    except BaseException:
        child.kill()
        await child.wait()
        raise
    wanted = (0, -signal.SIGKILL) if may_die else (0,)
    assert child.returncode in wanted, f"{settings}: {err.decode()}"
    return child.returncode != 0, out
