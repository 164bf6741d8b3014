"""The loop flushes what is small, with an idle thread and a quick disk; else the thread does."""

import pytest

from streammeta.controller.runtime.persistence.flush_scheduling import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    QUICK_S,
    REMEMBERED,
    SLOW_S,
    SMALL_BYTES,
    STALL_SHARE,
    FlushPlace,
)


@pytest.fixture
def place() -> FlushPlace:
    return FlushPlace()


def test_the_loop_flushes_small_batches_from_the_beginning(place: FlushPlace) -> None:
    assert place.is_loop(SMALL_BYTES, 0.0)
    assert not place.is_loop(SMALL_BYTES + 1, 0.0)


def test_nothing_overtakes_what_the_thread_was_given(place: FlushPlace) -> None:
    for _ in range(3):
        place.record_work()
    place.record_results(2, is_disk_full=False)
    assert not place.is_loop(1, 0.0)
    place.record_results(1, is_disk_full=False)
    assert place.is_loop(1, 0.0)


def test_a_full_disk_is_left_to_the_thread(place: FlushPlace) -> None:
    place.record_work()
    place.record_results(1, is_disk_full=True)
    assert not place.is_loop(1, 0.0)
    place.record_results(0, is_disk_full=False)  # it looked again by itself
    assert place.is_loop(1, 0.0)


def test_a_disk_that_is_slow_on_average_is_left_to_the_thread(place: FlushPlace) -> None:
    for _ in range(REMEMBERED):
        place.record_flush(QUICK_S * 1.5)
    assert not place.is_loop(1, 0.0)
    for _ in range(REMEMBERED // 4):
        place.record_flush(QUICK_S / 4)
    assert not place.is_loop(1, 0.0)
    for _ in range(REMEMBERED // 4):
        place.record_flush(QUICK_S / 4)
    assert place.is_loop(1, 0.0)


def test_one_flush_counts_no_more_than_a_slow_one(place: FlushPlace) -> None:
    for _ in range(REMEMBERED - 1):
        place.record_flush(QUICK_S / 4)
    place.record_flush(1e6)
    assert place.is_loop(1, 0.0)
    assert SLOW_S < REMEMBERED * QUICK_S / 4


BACKOFFS = [min(FIRST_BACKOFF_S * 2**n, LONGEST_BACKOFF_S) for n in range(9)]


def flush_slowly(place: FlushPlace, now: float) -> float:
    """Let the loop meet a slow flush, then quick ones elsewhere; return for how long it stops."""
    assert place.is_loop(1, now)
    place.record_loop_flush(SLOW_S, now)
    for _ in range(REMEMBERED):
        place.record_flush(QUICK_S / 4)
    stops_s: float = next(each for each in BACKOFFS if place.is_loop(1, now + each))
    assert not place.is_loop(1, now + stops_s * 0.99)
    return stops_s


def test_after_slow_flushes_the_loop_stops_for_longer_and_longer(place: FlushPlace) -> None:
    now = 0.0
    for backoff_s in BACKOFFS:
        place.record_loop_flush(QUICK_S / 4, now)
        assert flush_slowly(place, now) == backoff_s
        now += backoff_s


def test_the_pause_is_short_again_after_as_long_without_a_slow_flush(place: FlushPlace) -> None:
    now = flush_slowly(place, 0.0)
    now += flush_slowly(place, now)
    now += 2.1 * FIRST_BACKOFF_S
    assert flush_slowly(place, now) == FIRST_BACKOFF_S


def test_flushes_of_seconds_take_the_loop_a_small_share_of_its_time(place: FlushPlace) -> None:
    now = stalled_s = 0.0
    for _ in range(2000):
        if place.is_loop(1, now):
            stalled_s += 2.0
            place.record_loop_flush(2.0, now := now + 2.0)
        for _ in range(REMEMBERED):
            place.record_flush(QUICK_S / 4)
        now += 0.1
    assert 0 < stalled_s <= now / STALL_SHARE
