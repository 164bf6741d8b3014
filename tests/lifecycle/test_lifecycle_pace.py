"""Deletion keeps to its rate, halves it for an overloaded store, and finds its way back."""

import random

from streammeta.controller.lifecycle.deletion import (
    HALVING_PAUSE_MS,
    LONGEST_PAUSE_MS,
    RATE_MIN,
    RECOVERY_MS,
    STUCK_AFTER,
    RateLimiter,
    RetryQueue,
)

RATE = 2_000.0


def taken(pace: RateLimiter, start_ms: int, duration_ms: int, step_ms: int = 100) -> int:
    """Take whatever is offered, again and again; return the sum."""
    total = 0
    for now_ms in range(start_ms, start_ms + duration_ms, step_ms):
        offered = pace.available(now_ms)
        pace.take(offered)
        total += offered
    return total


def test_over_any_time_no_more_than_the_rate_and_one_burst() -> None:
    pace = RateLimiter(RATE, 0)
    assert taken(pace, 0, 10_000) <= RATE * 10 + RATE
    assert 0.95 * RATE * 10 <= taken(pace, 10_000, 10_000) <= RATE * 10 + 1


def test_an_idle_bucket_holds_one_second() -> None:
    assert RateLimiter(RATE, 0).available(3_600_000) == RATE


def test_an_overload_halves_the_rate_once_for_all_requests_under_way() -> None:
    pace = RateLimiter(RATE, 0)
    for _ in range(4):
        pace.slow_down(5_000)
    assert pace.rate == RATE / 2
    assert pace.available(5_000) == 0
    pace.slow_down(5_000 + HALVING_PAUSE_MS)
    assert RATE / 4 <= pace.rate < RATE / 3


def test_under_overload_for_ever_it_still_goes_on_and_then_recovers() -> None:
    pace = RateLimiter(RATE, 0)
    for now_ms in range(0, 600_000, HALVING_PAUSE_MS):
        pace.slow_down(now_ms)
    assert RATE_MIN <= pace.rate < RATE / 10
    assert taken(pace, 600_000, 5_000) > 0
    pace.available(605_000 + RECOVERY_MS)
    assert pace.rate == RATE


def test_a_slow_pace_lets_single_objects_through() -> None:
    pace = RateLimiter(0.5, 0)
    assert 49 <= taken(pace, 0, 100_000) <= 52
    pace.slow_down(100_000)
    assert pace.rate == 0.5


def test_a_refused_key_waits_longer_each_time_and_is_stuck_in_the_end() -> None:
    retries = RetryQueue(random.Random(1))
    now_ms, pauses = 0, []
    for attempt in range(1, 2 * STUCK_AFTER + 8):
        newly_stuck = retries.refuse({7: f"no {attempt}"}, now_ms)
        assert bool(newly_stuck) == (attempt == STUCK_AFTER)
        assert [one.object_id for one in retries.stuck()] == [7] * (attempt >= STUCK_AFTER)
        start_ms = now_ms
        while not retries.take_due(now_ms, 10):
            now_ms += 100
        pauses.append(now_ms - start_ms)
    growing = pauses[:10]
    assert all(later >= earlier for earlier, later in zip(growing, growing[2:], strict=False))
    assert LONGEST_PAUSE_MS / 2 <= pauses[-1] <= LONGEST_PAUSE_MS
    assert retries.stuck()[0].reason == f"no {attempt}"


def test_a_forgotten_key_is_not_tried_again() -> None:
    retries = RetryQueue(random.Random(1))
    retries.refuse({1: "no", 2: "no"}, 0)
    retries.forget([1])
    assert retries.take_due(60_000, 10) == (2,)
    assert retries.take_due(60_000, 10) == ()
    assert 2 in retries


def test_one_bad_key_among_many_is_found_out() -> None:
    """Requests in which it is are refused as a whole; the others get through without it."""
    for seed in range(5):
        retries = RetryQueue(random.Random(seed))
        left = set(range(1_000))
        bad, now_ms, requests = 617, 0, 0
        retries.refuse(dict.fromkeys(left, "rejected"), now_ms)
        while left != {bad}:
            now_ms += 500
            while batch := retries.take_due(now_ms, 1_000):
                requests += 1
                if bad in batch:
                    retries.refuse(dict.fromkeys(batch, "rejected"), now_ms)
                else:
                    retries.forget(batch)
                    left.difference_update(batch)
            assert now_ms < 1_200_000, f"seed {seed}: {len(left)} left"
        assert requests < 200, f"seed {seed}"


def test_what_was_taken_and_not_judged_comes_again() -> None:
    retries = RetryQueue(random.Random(1))
    retries.refuse({1: "no"}, 0)
    assert retries.take_due(60_000, 10) == (1,)
    retries.postpone([1, 2], 61_000)
    assert retries.take_due(60_999, 10) == ()
    assert retries.take_due(61_000, 10) == (1,)
