"""Time that follows earlier stamps: a machine with a wrong clock deletes nothing early.

Retention compares the time with the times of the data. A machine whose clock is years ahead would
delete all of it at once. Data therefore have a time of their own: it begins at most a day after the
newest time that earlier owners stamped, and runs at most twice as fast as a timer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from streammeta.storage.steady_time import SteadyTime

AHEAD_MS = 24 * 3_600_000
"""Most that a start moves the time forward, in milliseconds."""

_log = logging.getLogger(__name__)


def stamped_clock(
    subject: str,
    stamps: Iterable[int],
    wall_ms: Callable[[], int],
    timer_ms: Callable[[], int],
) -> Callable[[], int]:
    """Return the clock of data with these stamps, in ms since 1970; `subject` names the data."""
    now_ms = wall_ms()
    newest_ms = max((time_ms for time_ms in stamps if time_ms <= now_ms), default=now_ms)
    start_ms = min(now_ms, newest_ms + AHEAD_MS)
    if start_ms < now_ms:
        _log.warning(
            "%s was last written %d ms before this machine's time; its own time follows from %d ms"
            " on; check the machine's clock unless it was idle",
            subject,
            now_ms - newest_ms,
            start_ms,
        )

    def report_jump(jump_ms: int, ahead_ms: int) -> None:
        _log.warning(
            "this machine's clock jumped by %d ms; %s follows %d ms slowly; check the clock",
            jump_ms,
            subject,
            ahead_ms,
        )

    return SteadyTime(timer_ms, wall_ms, report_jump, start_ms=start_ms, slew=1).now_ms
