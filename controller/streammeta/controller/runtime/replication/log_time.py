"""Log time: the time that a leader writes into the log and compares such timestamps with.

It starts at the wall clock when a term begins, and advances with the monotonic clock. Within a term
the wall clock moves it by at most a tenth of the elapsed time, so a jump of one machine's clock
neither expires objects nor makes deadlines unreachable. Timestamps of earlier terms may come from a
wrong clock. Users of log time bound their effect, see `lifecycle`.
"""

import structlog

from streammeta.controller.runtime.clock import Clock
from streammeta.storage.steady_time import SteadyTime

JUMP_MS = 3_600_000
"""Difference of two machines' clocks from which a timestamp is ignored, in milliseconds."""

_SLEW = 10

_log = structlog.get_logger(component="runtime")


class LogTime:
    """Log time of one controller. Before its first term it is the wall clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begin_term()

    def begin_term(self) -> None:
        """Start from the wall clock, because this node begins to lead."""
        self.began_ms = self._clock.wall_ms()
        """Log time at which the term began."""
        # Kept apart from log time, since slewing would distort intervals.
        self._term_ms = self._clock.monotonic_ms()
        self._steady = SteadyTime(
            self._clock.monotonic_ms,
            self._clock.wall_ms,
            _report_jump,
            start_ms=self.began_ms,
            slew=_SLEW,
        )

    @property
    def elapsed_ms(self) -> int:
        """Monotonic time since the term began, in milliseconds."""
        return self._clock.monotonic_ms() - self._term_ms

    def now_ms(self) -> int:
        """Return log time in milliseconds since 1970. It never decreases within a term."""
        return self._steady.now_ms()


def _report_jump(jump_ms: int, ahead_ms: int) -> None:
    _log.warning("wall_clock_jumped", jump_ms=jump_ms, log_time_behind_ms=ahead_ms)
