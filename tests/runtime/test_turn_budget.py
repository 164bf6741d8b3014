"""Work beyond a turn's budget waits for the turns after it, in order."""

import asyncio

import pytest

from streammeta.controller.runtime.admission import TurnBudget


async def take_all(costs: list[int], per_turn: int) -> list[list[int]]:
    """Return the costs of tasks that all ask at once, by the turn in which they go on."""
    budget, turns = TurnBudget(per_turn), [list[int]()]

    async def work(cost: int) -> None:
        await budget.take(cost)
        turns[-1].append(cost)

    tasks = [asyncio.create_task(work(cost)) for cost in costs]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turns.append([])
    return [turn for turn in turns if turn]


@pytest.mark.parametrize(
    ("costs", "turns"),
    [
        ([3, 3, 3, 3, 3, 3, 3], [[3, 3, 3, 3], [3, 3, 3]]),
        ([1], [[1]]),
        ([10, 1, 1], [[10], [1, 1]]),
    ],
)
def test_a_turn_takes_work_until_its_budget_is_used(
    costs: list[int], turns: list[list[int]]
) -> None:
    assert asyncio.run(take_all(costs, per_turn=10)) == turns


async def test_work_larger_than_a_turn_is_paid_for_by_the_next_ones() -> None:

    budget = TurnBudget(10)
    await budget.take(35)
    later = asyncio.create_task(budget.take(1))
    for _ in range(3):
        await asyncio.sleep(0)
        assert not later.done()
    await later


async def test_a_task_that_gives_up_costs_nothing() -> None:

    budget = TurnBudget(10)
    await budget.take(10)
    gone, stays = (asyncio.create_task(budget.take(100)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await stays
