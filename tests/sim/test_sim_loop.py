"""The simulator's event loop: turns in order, timers of the node's clock, nothing after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from streammeta.controller.errors import NotLeaderError
from tests.sim.sim_node import SimNode
from tests.sim.sim_world import World


class Calm:
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


@pytest.fixture
def calm() -> Iterator[Calm]:
    calm = Calm()
    yield calm
    calm.world.close()


def test_calls_made_in_a_turn_are_carried_out_in_order_in_the_next(calm: Calm) -> None:
    async def call(name: str) -> None:
        calm.seen.append(name)
        await asyncio.sleep(0)
        calm.seen.append(name)

    calm.begin(call("a"))
    calm.begin(call("b"))
    assert calm.seen == []
    calm.run(5)
    assert calm.seen == ["a", "b", "a", "b"]


def test_timers_go_by_the_clock_of_the_node(calm: Calm) -> None:
    async def wait() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(0.1)
        calm.seen.append(round((loop.time() - began) * 1000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await loop.create_future()
        calm.seen.append(round((loop.time() - began) * 1000))

    calm.begin(wait())
    calm.run(99)
    assert calm.seen == []
    calm.run(300)
    first, second = calm.seen
    assert 100 <= first <= 102
    assert 150 <= second <= 155


def test_a_paused_node_goes_on_when_it_wakes_up(calm: Calm) -> None:
    async def call() -> None:
        calm.seen.append(calm.world.timeline.now)

    calm.begin(call())
    calm.world.pause(calm.node, 50)
    calm.run(100)
    assert calm.seen == [50]


def test_a_thread_is_a_step_some_time_later(calm: Calm) -> None:
    async def call() -> None:
        began = calm.world.timeline.now
        calm.seen.append(await asyncio.to_thread(lambda: "done"))
        calm.seen.append(calm.world.timeline.now > began)

    calm.begin(call())
    calm.run(1000)
    assert calm.seen == ["done", True]


def test_nothing_of_a_life_happens_after_its_crash(calm: Calm) -> None:
    async def call() -> None:
        try:
            await asyncio.sleep(0.01)
            calm.seen.append("still there")
        finally:
            calm.seen.append("closed")

    async def never_begun() -> None:
        calm.seen.append("begun")

    calm.begin(call())
    calm.run(3)
    calm.begin(never_begun())
    calm.node.crash(power=False)
    calm.run(100)
    assert calm.seen == ["closed"]


def test_errors_of_the_product_are_answers_and_all_others_end_the_run(calm: Calm) -> None:
    async def fail(error: Exception) -> None:
        raise error

    calm.begin(fail(NotLeaderError()))
    calm.run(5)
    calm.begin(fail(KeyError("a defect")))
    with pytest.raises(KeyError):
        calm.run(5)


def test_no_loop_is_left_running(calm: Calm) -> None:
    calm.run(50)
    calm.world.close()
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
