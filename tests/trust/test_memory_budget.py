"""Memory of requests: shares, what is never refused, and waiting for room."""

import asyncio

import pytest

from streammeta.controller.errors import BusyError
from streammeta.controller.rpc.calls.memory_budget import RETRY_AFTER_MS, MemoryBudget


def test_a_caller_has_a_fourth_and_all_together_have_the_whole() -> None:
    memory = MemoryBudget(400)
    memory.require("greedy", 60)
    memory.require("greedy", 40)
    with pytest.raises(BusyError, match=r"greedy.*100") as refused:
        memory.require("greedy", 1)
    assert refused.value.retry_after_ms == RETRY_AFTER_MS
    for caller in "abc":
        memory.require(caller, 100)
    with pytest.raises(BusyError, match="400"):
        memory.require("late", 1)
    assert memory.total == 400
    memory.give_back("a", 100)
    memory.require("late", 100)


def test_one_request_alone_may_be_larger_than_its_share() -> None:
    memory = MemoryBudget(400)
    memory.require("a", 900)
    with pytest.raises(BusyError):
        memory.require("b", 1)
    memory.give_back("a", 900)
    memory.require("b", 10)
    memory.require("a", 300)
    assert memory.total == 310


async def test_a_reader_waits_while_its_caller_or_all_hold_too_much() -> None:
    memory = MemoryBudget(400)
    await memory.room("a")
    memory.take("a", 150)  # a message is as large as it is
    waiting = asyncio.create_task(memory.room("a"))
    await memory.room("b")
    memory.take("b", 250)
    other = asyncio.create_task(memory.room("c"))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert not other.done()
    memory.give_back("a", 60)
    await asyncio.wait_for(asyncio.gather(waiting, other), 60)


async def test_what_is_given_back_wakes_all_who_wait() -> None:
    memory = MemoryBudget(4)
    memory.take("a", 4)
    waiting = [asyncio.create_task(memory.room(f"b{index}")) for index in range(5)]
    await asyncio.sleep(0)
    memory.give_back("a", 4)
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
