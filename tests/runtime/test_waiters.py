"""Callers that wait for an offset are released or failed in order, a bounded number a turn."""

import asyncio

import pytest

from streammeta.controller.errors import OutcomeUnknownError
from streammeta.controller.runtime.waiters import COMPLETED_PER_TURN, OffsetWaiters


async def test_answers_leave_when_the_high_watermark_passes_them() -> None:
    waiters = OffsetWaiters()
    first, second, third = waiters.until(5), waiters.until(5), waiters.until(9)

    waiters.release(4)
    assert not first.done()

    waiters.release(5)
    assert first.done()
    assert second.done()
    assert not third.done()
    assert len(waiters) == 1


async def test_later_offsets_may_be_waited_for_first() -> None:
    waiters = OffsetWaiters()
    far, near = waiters.until(9), waiters.until(5)

    waiters.release(5)

    assert near.done()
    assert not far.done()


async def test_who_gives_up_is_forgotten_and_the_others_stay() -> None:
    waiters = OffsetWaiters()
    gone, stays, later = waiters.until(7), waiters.until(3), waiters.until(5)

    waiters.forget(gone)
    assert len(waiters) == 2
    waiters.release(4)

    assert stays.done()
    assert not later.done()
    assert not gone.done()


async def test_lost_leadership_fails_every_waiting_answer() -> None:
    waiters = OffsetWaiters()
    waiting = [waiters.until(offset) for offset in (1, 2, 3)]

    waiters.fail_all(OutcomeUnknownError("gone"))

    for future in waiting:
        with pytest.raises(OutcomeUnknownError):
            await future
    assert len(waiters) == 0


async def test_a_cancelled_caller_does_not_disturb_the_others() -> None:
    waiters = OffsetWaiters()
    gone, stays = waiters.until(1), waiters.until(1)
    gone.cancel()

    waiters.release(1)

    assert stays.done()
    assert not stays.cancelled()


async def test_a_turn_of_the_event_loop_completes_a_bounded_number_in_order() -> None:
    waiters, woken = OffsetWaiters(), list[int]()

    async def wait(number: int, future: asyncio.Future[None]) -> None:
        await future
        woken.append(number)

    tasks = [
        asyncio.create_task(wait(number, waiters.until(number // 100))) for number in range(1_000)
    ]
    await asyncio.sleep(0)
    waiters.release(4)
    waiters.release(9)
    before = 0
    while len(woken) < 1_000:
        await asyncio.sleep(0)
        assert len(woken) - before <= COMPLETED_PER_TURN
        before = len(woken)
    assert woken == sorted(woken)
    await asyncio.gather(*tasks)


async def test_what_was_released_is_answered_though_leadership_is_lost_before_its_turn() -> None:
    waiters = OffsetWaiters()
    waiting = [waiters.until(1 + number // 100) for number in range(200)]
    waiters.release(1)
    waiters.fail_all(OutcomeUnknownError("gone"))
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes[:100] == [None] * 100, "committed before"
    assert all(isinstance(each, OutcomeUnknownError) for each in outcomes[100:])
    assert len(waiters) == 0
