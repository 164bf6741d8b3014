"""Compactor of the demo: the product's command, in a separate process.

Owns the process and its final report. It compacts repeatedly for all brokers, while they upload
and others read.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.demonstration.callers import Caller
from streammeta.cli.local.local_cluster import Child, ChildFailedError, start_child

STOP_TIMEOUT_S = 60.0
GROWTH = "2"
"""The brokers upload little in such a short time, so it merges sooner than by default."""


class Compactor:
    """Process that repeats `streammeta compact` until it is stopped."""

    def __init__(
        self, root: Path, caller: Caller, store_uri: str, env: Mapping[str, str], interval: str
    ) -> None:
        self._root = root
        self._env = env
        self._interval = interval
        self._common = ("compact", "--all", *caller.words, "--store", store_uri)
        self._child: Child | None = None

    @property
    def last_pass(self) -> Sequence[str]:
        """Arguments of `streammeta` that merge all objects that can be merged, once."""
        return (*self._common, "--growth", "1")

    def start(self) -> None:
        """Start it; it runs until `stop`."""
        self._child = start_child(
            "compactor",
            [
                *(sys.executable, "-m", "streammeta.cli.main", *self._common),
                *("--growth", GROWTH, "--interval", self._interval, "--format", "json"),
            ],
            self._root / "compactor.log",
            self._env,
        )

    def stop(self) -> Mapping[str, Any]:
        """Let it finish its current work, and return its report.

        Raises:
            ChildFailedError: it failed, ended earlier, or does not end.
        """
        assert self._child is not None
        self._child.process.terminate()
        try:
            said, _ = self._child.process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ChildFailedError(
                f"the compactor did not end within {STOP_TIMEOUT_S:.0f} s"
            ) from None
        if self._child.process.returncode == -signal.SIGTERM:
            return {"commits": 0}  # it had not begun: a slow machine, and little to upload
        if self._child.process.returncode != 0:
            raise ChildFailedError(
                f"the compactor ended with exit code {self._child.process.returncode}: {said}\n"
                f"the end of its log {self._child.log_path}:\n{self._child.log_tail()}"
            )
        answer: Mapping[str, Any] = json.loads(said)
        return answer

    def kill(self) -> None:
        """End it at once if it still runs."""
        if self._child is not None:
            self._child.kill()
