"""Checkpoints come when enough log or time lies behind the last, and only with something new."""

import pytest

from streammeta.controller.runtime.persistence.checkpointer import (
    WHOLE_SIZE_MAX,
    CheckpointLimits,
    CheckpointSchedule,
)

LIMITS = CheckpointLimits(log_bytes=100, interval_ms=1_000, retry_ms=50)


def test_bytes_make_one_due_at_once() -> None:
    schedule = CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_committed(99)
    assert not schedule.is_due(10)
    schedule.record_committed(1)
    assert schedule.is_due(10)


def test_a_checkpoint_waits_for_as_much_log_as_the_last_one_is_large() -> None:
    schedule = CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_start(0)
    schedule.record_written(500)
    schedule.record_committed(499)
    assert not schedule.is_due(10)
    schedule.record_committed(1)
    assert schedule.is_due(10)
    schedule.record_start(10)
    schedule.record_written(20)
    schedule.record_committed(100)
    assert schedule.is_due(10)


@pytest.mark.parametrize(
    ("size", "log_bytes"),
    [
        (WHOLE_SIZE_MAX, WHOLE_SIZE_MAX),
        (WHOLE_SIZE_MAX + 2, WHOLE_SIZE_MAX),
        (4 * WHOLE_SIZE_MAX, 2 * WHOLE_SIZE_MAX),
    ],
)
def test_a_large_checkpoint_waits_for_half_its_size_of_log(size: int, log_bytes: int) -> None:
    schedule = CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_start(0)
    schedule.record_written(size)
    schedule.record_committed(log_bytes - 1)
    assert not schedule.is_due(10)
    schedule.record_committed(1)
    assert schedule.is_due(10)


def test_time_makes_one_due_only_with_something_new() -> None:
    schedule = CheckpointSchedule(LIMITS, now_ms=0)
    assert schedule.deadline() is None
    assert not schedule.is_due(10_000)
    schedule.record_committed(1)
    assert schedule.deadline() == 1_000
    assert not schedule.is_due(999)
    assert schedule.is_due(1_000)
    schedule.record_start(1_000)
    assert schedule.deadline() is None


def test_a_failed_one_is_still_owed_after_a_pause() -> None:
    schedule = CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_committed(100)
    schedule.record_start(5)
    schedule.record_failure(10)
    assert schedule.deadline() == 60
    schedule.record_committed(1_000)
    assert not schedule.is_due(59)
    assert schedule.is_due(60)


def test_a_request_does_not_wait_for_the_pause() -> None:
    schedule = CheckpointSchedule(LIMITS, now_ms=0)
    schedule.record_failure(10)
    schedule.request(11)
    assert schedule.is_due(11)


@pytest.mark.parametrize("name", ["log_bytes", "interval_ms", "retry_ms"])
def test_limits_that_would_never_or_always_be_due_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 0"):
        CheckpointLimits(**{name: 0})
