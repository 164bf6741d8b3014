"""Restarts of controllers of a local cluster that have ended.

Owns the delay before each restart. It doubles while a controller keeps ending, up to a bound, so
that a broken controller does not use up the machine's time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from streammeta.cli.local.local_cluster import Child, ChildFailedError, LocalCluster

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
