"""Clock of one partition's log: a broker with a wrong clock deletes no records early.

Retention compares the time with the records' own. A broker whose clock is years ahead would delete
every closed segment at once. The log therefore has a time of its own: it begins at most a day after
the newest time that earlier owners stamped, and runs at most twice as fast as a timer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from streammeta.brokers.partition.segments import Segment
from streammeta.storage.steady_time import SteadyTime

AHEAD_MS = 24 * 3_600_000
"""Most that opening a log moves its time forward, in milliseconds."""

_log = logging.getLogger(__name__)


def wall_clock_ms() -> int:
    """Return the time in ms since 1970."""
    return time.time_ns() // 1_000_000


def _timer_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def log_clock(
    segments: Sequence[Segment],
    wall_ms: Callable[[], int] = wall_clock_ms,
    timer_ms: Callable[[], int] = _timer_ms,
) -> Callable[[], int]:
    """Return the clock of a log with these segments; at most a day after them when it is opened."""
    stamps = (time_ms for one in segments for time_ms in (one.created_ms, one.modified_ms))
    now_ms = wall_ms()
    newest_ms = max((time_ms for time_ms in stamps if time_ms <= now_ms), default=now_ms)
    start_ms = min(now_ms, newest_ms + AHEAD_MS)
    if start_ms < now_ms:
        _log.warning(
            "a partition's log was last written %d ms before this machine's time; its own time"
            " follows from %d ms on; check the machine's clock unless the partition was idle",
            now_ms - newest_ms,
            start_ms,
        )
    return SteadyTime(timer_ms, wall_ms, _report_jump, start_ms=start_ms, slew=1).now_ms


def _report_jump(jump_ms: int, ahead_ms: int) -> None:
    _log.warning(
        "this machine's clock jumped by %d ms; a partition's log follows %d ms slowly; check the"
        " clock",
        jump_ms,
        ahead_ms,
    )
