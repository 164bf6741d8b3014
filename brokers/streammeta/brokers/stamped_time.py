"""Clock that follows earlier stamps, so that a machine with a wrong clock deletes nothing early.

Retention compares the current time with the times of the data. A machine whose clock is years ahead
would delete all of it immediately. Therefore data has a separate clock: it starts at most a day
after the newest stamp of earlier owners, and runs at most twice as fast as a timer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from streammeta.storage.steady_time import SteadyTime

AHEAD_MS = 24 * 3_600_000
"""Maximum distance between the newest stamp and the start of the clock, in milliseconds."""

_log = logging.getLogger(__name__)


def stamped_clock(
    subject: str,
    stamps: Iterable[int],
    wall_ms: Callable[[], int],
    timer_ms: Callable[[], int],
) -> Callable[[], int]:
    """Return the clock of data with these stamps, in ms since 1970. Logs name the `subject`."""
    now_ms = wall_ms()
    # Stamps in the future come from an owner whose clock was wrong, and prove nothing.
    newest_ms = max((time_ms for time_ms in stamps if time_ms <= now_ms), default=now_ms)
    start_ms = min(now_ms, newest_ms + AHEAD_MS)
    if start_ms < now_ms:
        _log.warning(
            "%s was last written %d ms before this machine's time. Its clock follows and is"
            " %d ms now. Check the machine's clock unless the data was idle",
            subject,
            now_ms - newest_ms,
            start_ms,
        )

    def report_jump(jump_ms: int, ahead_ms: int) -> None:
        _log.warning(
            "this machine's clock jumped by %d ms, %s follows %d ms slowly. Check the clock",
            jump_ms,
            subject,
            ahead_ms,
        )

    return SteadyTime(timer_ms, wall_ms, report_jump, start_ms=start_ms, slew=1).now_ms
