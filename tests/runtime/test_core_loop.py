"""Time in which the process did not run is not held against the peers."""

import asyncio
from collections.abc import Callable

import pytest

from streammeta.controller.quorum import events
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
