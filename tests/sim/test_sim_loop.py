"""The simulator's event loop: turns in order, timers of the node's clock, nothing after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from streammeta.controller.errors import NotLeaderError
from tests.sim.sim_node import SimNode
from tests.sim.sim_world import World


class Fixture:
    """One node of a calm world, in which nothing else happens."""

    def __init__(self) -> None:
        self.world = World(1, "calm")
        self.node: SimNode = self.world.nodes[0]
        self.node.start()
        self.seen: list[Any] = []

    def begin(self, call: Coroutine[Any, Any, Any]) -> None:
        def create() -> None:
            self.node.loop.create_task(call)

        self.world.act(self.node, create)

    def run(self, for_ms: int) -> None:
        self.world.timeline.run_until(lambda: False, for_ms)


def test_calls_made_in_a_turn_are_carried_out_in_order_in_the_next() -> None:
    fixture = Fixture()

    async def call(name: str) -> None:
        fixture.seen.append(name)
        await asyncio.sleep(0)
        fixture.seen.append(name)

    fixture.begin(call("a"))
    fixture.begin(call("b"))
    assert fixture.seen == []
    fixture.run(5)
    assert fixture.seen == ["a", "b", "a", "b"]
    fixture.world.close()


def test_timers_go_by_the_clock_of_the_node() -> None:
    fixture = Fixture()

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(0.1)
        fixture.seen.append(round((loop.time() - began) * 1000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await loop.create_future()
        fixture.seen.append(round((loop.time() - began) * 1000))

    fixture.begin(wait())
    fixture.run(99)
    assert fixture.seen == []
    fixture.run(300)
    first, second = fixture.seen
    assert 100 <= first <= 102
    assert 150 <= second <= 155
    fixture.world.close()


def test_a_paused_node_goes_on_when_it_wakes_up() -> None:
    fixture = Fixture()

    async def call() -> None:
        fixture.seen.append(fixture.world.timeline.now)

    fixture.begin(call())
    fixture.world.pause(fixture.node, 50)
    fixture.run(100)
    assert fixture.seen == [50]
    fixture.world.close()


def test_a_thread_is_a_step_some_time_later() -> None:
    fixture = Fixture()

    async def call() -> None:
        began = fixture.world.timeline.now
        fixture.seen.append(await asyncio.to_thread(lambda: "done"))
        fixture.seen.append(fixture.world.timeline.now > began)

    fixture.begin(call())
    fixture.run(1000)
    assert fixture.seen == ["done", True]
    fixture.world.close()


def test_nothing_of_a_life_happens_after_its_crash() -> None:
    fixture = Fixture()

    async def call() -> None:
        try:
            await asyncio.sleep(0.01)
            fixture.seen.append("still there")
        finally:
            fixture.seen.append("closed")

    async def never_begun() -> None:
        fixture.seen.append("begun")

    fixture.begin(call())
    fixture.run(3)
    fixture.begin(never_begun())
    fixture.node.crash(power=False)
    fixture.run(100)
    assert fixture.seen == ["closed"]
    fixture.world.close()


def test_errors_of_the_product_are_answers_and_all_others_end_the_run() -> None:
    async def fail(error: Exception) -> None:
        raise error

    fixture = Fixture()
    fixture.begin(fail(NotLeaderError()))
    fixture.run(5)
    fixture.begin(fail(KeyError("a defect")))
    with pytest.raises(KeyError):
        fixture.run(5)
    fixture.world.close()


def test_no_loop_is_left_running() -> None:
    fixture = Fixture()
    fixture.run(50)
    fixture.world.close()
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
