"""The loop: time it did not run is not held against peers, and small flushes are its own."""

import asyncio
from collections.abc import Callable

import pytest

from streammeta.controller.quorum import events
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
from streammeta.controller.runtime.replication.core_loop import CoreLoop


class HandClock:
    def __init__(self) -> None:
        self.now = 1000

    def monotonic_ms(self) -> int:
        return self.now

    def wall_ms(self) -> int:
        raise AssertionError("no decision of the quorum is made by the time of day")


class NotingCore:
    """Notes its events; its next limit passes 100 ms after the last of them."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []
        self.limit = 1100

    def start(self, now: int) -> list[events.Effect]:
        return []

    def step(self, now: int, event: events.Event) -> list[events.Effect]:
        self.events.append(event)
        if isinstance(event, events.TimeLost):
            self.limit += event.lost_ms
        return []

    def next_deadline(self) -> int:
        return self.limit


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def core() -> NotingCore:
    return NotingCore()


def run(core: NotingCore, clock: HandClock, then: Callable[[CoreLoop], None]) -> None:
    def fail(error: BaseException) -> None:
        raise error

    async def live() -> None:
        loop = CoreLoop(
            core,  # type: ignore[arg-type]
            clock,
            take_appends=lambda: (),
            carry_out=lambda effects: None,
            on_error=fail,
        )
        loop.start()
        then(loop)
        loop.stop()

    asyncio.run(live())


def test_what_comes_after_a_stall_finds_the_lost_time_noted(
    core: NotingCore, clock: HandClock
) -> None:
    def stall(loop: CoreLoop) -> None:
        clock.now += 5000
        loop.feed(events.PeerConnectionLost(peer=1))  # type: ignore[arg-type]
        loop.feed(events.Tick())

    run(core, clock, stall)
    lost, *others = core.events
    assert lost == events.TimeLost(4900), "from the time at which the timer was due"
    assert [type(event) for event in others] == [events.PeerConnectionLost, events.Tick]
    assert core.limit >= clock.now


def test_a_late_timer_notes_the_lost_time_before_it_is_taken_for_the_time(
    core: NotingCore, clock: HandClock
) -> None:
    def stall(loop: CoreLoop) -> None:
        clock.now += 5000
        loop._wake()

    run(core, clock, stall)
    assert core.events[0] == events.TimeLost(4900)


def test_a_timer_that_is_a_little_late_is_no_stall(core: NotingCore, clock: HandClock) -> None:
    def linger(loop: CoreLoop) -> None:
        clock.now += 300
        loop.feed(events.Tick())

    run(core, clock, linger)
    assert core.events == [events.Tick()]


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
    stops_s: float = next(backoff for backoff in BACKOFFS if place.is_loop(1, now + backoff))
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
