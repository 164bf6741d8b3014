"""Batches of pipelines rest while more messages come, and never when no other would join."""

import asyncio

import pytest

from streammeta.controller.runtime.writer import group_commit
from streammeta.controller.runtime.writer.group_commit import ENOUGH_BYTES, GroupCommitDelay
from tests.kit.waiting import PATIENCE_S

SIZE = ENOUGH_BYTES // 8
"""Of one message."""


@pytest.fixture(autouse=True)
def _rests_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "REST_S", 3600.0)


async def is_over(rests: GroupCommitDelay) -> bool:
    """Whether a batch may begin; what waits for it goes on waiting."""
    waiting = asyncio.ensure_future(rests.wait())
    for _ in range(3):
        await asyncio.sleep(0)
    is_done = waiting.done()
    waiting.cancel()
    return is_done


def begin(rests: GroupCommitDelay, *sizes: int) -> None:
    rests.start_batch()
    for size in sizes:
        rests.record_departure(size)


async def begun(*sizes: int) -> GroupCommitDelay:
    """Return rests after a batch with messages that came alone."""
    rests = GroupCommitDelay()
    for size in sizes:
        rests.record_arrival(size)
        begin(rests, size)
    return rests


async def test_messages_that_come_one_after_the_other_never_rest() -> None:
    rests = GroupCommitDelay()
    for size in (SIZE, 1, SIZE // 2):
        rests.record_arrival(size)
        assert await is_over(rests)
        begin(rests, size)
        rests.record_answer(size)


async def test_a_message_behind_another_rests() -> None:
    rests = await begun(SIZE)
    rests.record_arrival(1)
    assert not await is_over(rests)
    rests.record_answer(SIZE)
    assert not await is_over(rests)


async def test_a_rest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "REST_S", 0.001)
    rests = await begun(SIZE)
    rests.record_arrival(1)
    await asyncio.wait_for(rests.wait(), PATIENCE_S)


async def test_all_that_rest_go_on_together_once_they_are_worth_a_batch() -> None:
    rests = await begun(SIZE)
    rests.record_arrival(1)
    resting = [asyncio.ensure_future(rests.wait()) for _ in range(3)]
    resting[0].cancel()  # its caller has gone
    await asyncio.sleep(0)
    assert not any(task.done() for task in resting[1:])
    rests.record_arrival(ENOUGH_BYTES)
    await asyncio.wait_for(asyncio.gather(*resting[1:]), PATIENCE_S)


async def test_callers_that_wait_for_answers_rest_only_until_all_have_come() -> None:
    rests = GroupCommitDelay()
    for _ in range(4):
        rests.record_arrival(SIZE)
    begin(rests, *[SIZE] * 4)
    for _ in range(4):
        rests.record_answer(SIZE)
    for count in range(1, 4):
        rests.record_arrival(SIZE)
        assert await is_over(rests) == (count == 3)


async def test_a_batch_after_one_that_was_shared_rests_too() -> None:
    rests = await begun(SIZE)
    rests.record_arrival(SIZE)
    begin(rests, SIZE)
    rests.record_answer(SIZE)
    rests.record_answer(SIZE)
    rests.record_arrival(1)
    assert not await is_over(rests)
    begin(rests, 1)
    rests.record_answer(1)
    rests.record_arrival(1)
    assert await is_over(rests)
