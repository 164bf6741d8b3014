"""A broker with a wrong clock deletes no records that retention would keep."""

from __future__ import annotations

import logging

import pytest

from streammeta.brokers.partition.log_clock import log_clock
from streammeta.brokers.partition.segments import Retention, Segment, retained_from
from streammeta.brokers.stamped_time import AHEAD_MS

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
NOW_MS = 1_700_000_000_000
WEEK = Retention(age_ms=7 * DAY_MS, bytes=-1)


def daily_segments(days: int) -> list[Segment]:
    """A segment of each day until now, as brokers with right clocks wrote them."""
    return [
        Segment(
            base_offset=day,
            created_ms=NOW_MS - (days - day) * DAY_MS,
            modified_ms=NOW_MS - (days - day - 1) * DAY_MS,
            size=1,
            last_time=(NOW_MS - (days - day - 1) * DAY_MS, day),
        )
        for day in range(days)
    ]


class Machine:
    """A machine's wall clock and timer, moved by hand."""

    def __init__(self, wall_ahead_ms: int = 0) -> None:
        self.timer = 5_000
        self.wall_ahead_ms = wall_ahead_ms

    def timer_ms(self) -> int:
        return self.timer

    def wall_ms(self) -> int:
        return NOW_MS + self.timer - 5_000 + self.wall_ahead_ms


@pytest.mark.parametrize("ahead_ms", [30 * DAY_MS, 3_650 * DAY_MS])
def test_a_broker_that_starts_with_a_fast_clock_keeps_the_records(
    ahead_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    machine, segments = Machine(ahead_ms), daily_segments(20)
    with caplog.at_level(logging.WARNING):
        now_ms = log_clock(segments, machine.wall_ms, machine.timer_ms)
    assert now_ms() == NOW_MS + AHEAD_MS
    assert str(ahead_ms) in caplog.text
    kept = retained_from(segments, now_ms(), WEEK)
    assert kept == retained_from(segments, NOW_MS + DAY_MS, WEEK) == 13


def test_a_jump_while_a_broker_runs_moves_the_log_twice_as_fast_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine, segments = Machine(), daily_segments(20)
    now_ms = log_clock(segments, machine.wall_ms, machine.timer_ms)
    machine.timer += 90 * DAY_MS
    assert now_ms() == NOW_MS + 90 * DAY_MS

    machine.wall_ahead_ms = 30 * DAY_MS
    machine.timer += 20_000
    with caplog.at_level(logging.WARNING):
        assert now_ms() == NOW_MS + 90 * DAY_MS + 40_000
    assert f"jumped by {30 * DAY_MS} ms" in caplog.text
    machine.wall_ahead_ms = 0
    machine.timer += 20_000
    assert now_ms() == NOW_MS + 90 * DAY_MS + 40_000, "never backwards"
    machine.timer += 20_000
    assert now_ms() == NOW_MS + 90 * DAY_MS + 60_000


def test_an_idle_log_reaches_the_time_and_a_future_stamp_does_not_lead_it() -> None:
    machine, segments = Machine(9 * DAY_MS), daily_segments(3)
    now_ms = log_clock(segments, machine.wall_ms, machine.timer_ms)
    machine.timer += 8 * DAY_MS
    assert now_ms() == machine.wall_ms()

    fast = [*segments, Segment(base_offset=9, created_ms=NOW_MS + 400 * DAY_MS)]
    assert log_clock(fast, Machine().wall_ms, Machine().timer_ms)() == NOW_MS
