"""Clock of a partition's log, so that a broker with a wrong clock deletes no records early.

See `stamped_time`. The stamps are the times at which segments were created and written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from streammeta.brokers.partition.segments import Segment
from streammeta.brokers.stamped_time import stamped_clock


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
    """Return the clock of a log. It starts at most a day after the newest of the segments."""
    stamps = (
        time_ms for segment in segments for time_ms in (segment.created_ms, segment.modified_ms)
    )
    return stamped_clock("a partition's log", stamps, wall_ms, timer_ms)
