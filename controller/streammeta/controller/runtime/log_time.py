"""Log time: the time that a leader stamps into the log and compares stamps with.

It begins with the wall clock when a term begins, and advances with the monotonic clock. Within a
term the wall clock moves it by at most a tenth of the time that passes, so a jump of one machine's
clock neither expires objects nor moves deadlines out of reach. Stamps of earlier terms may come
from a wrong clock: users of log time bound their effect, see `lifecycle`.
"""

import structlog

from streammeta.controller.runtime.clock import Clock

JUMP_MS = 3_600_000
"""Difference between two machines' clocks from which a stamp is not believed, in milliseconds."""

REPORTED_JUMP_MS = 60_000
"""Smallest jump of the wall clock within a term that is logged, in milliseconds."""

_SLEW = 10

_log = structlog.get_logger(component="runtime")


class LogTime:
    """Log time of one controller; before its first term it is the wall clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.began_ms = clock.wall_ms()
        """Log time at which the term began."""
        self._term_ms = self._read_ms = clock.monotonic_ms()
        self._now_ms = self.began_ms
        self._ahead_ms = 0

    def begin_term(self) -> None:
        """Start from the wall clock: this node begins to lead."""
        self.began_ms = self._now_ms = self._clock.wall_ms()
        self._term_ms = self._read_ms = self._clock.monotonic_ms()
        self._ahead_ms = 0

    @property
    def elapsed_ms(self) -> int:
        """Monotonic time since the term began, in milliseconds."""
        return self._clock.monotonic_ms() - self._term_ms

    def now_ms(self) -> int:
        """Return log time in milliseconds since 1970; it never runs backwards within a term."""
        read_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        passed_ms = read_ms - self._read_ms
        ahead_ms = wall_ms - self._now_ms - passed_ms
        self._report(ahead_ms)

        # The part of a correction that is less than a tenth of this interval waits for the next.
        most = passed_ms // _SLEW
        correction_ms = max(-most, min(most, ahead_ms))
        if most:
            self._now_ms += passed_ms + correction_ms
            self._read_ms = read_ms
            self._ahead_ms = ahead_ms - correction_ms
            return self._now_ms
        return self._now_ms + passed_ms

    def _report(self, ahead_ms: int) -> None:
        """Log a jump of the wall clock once, with its size."""
        jump_ms = ahead_ms - self._ahead_ms
        if abs(jump_ms) >= REPORTED_JUMP_MS:
            self._ahead_ms = ahead_ms
            _log.warning("wall_clock_jumped", jump_ms=jump_ms, log_time_behind_ms=ahead_ms)
