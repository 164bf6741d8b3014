"""Whatever compaction does, and wherever it is ended, every live offset reads the same.

Reads are checked before and after each call that a compactor makes, and again once the controllers
have deleted the bytes of what was replaced. Seeds are in the tests' names.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from streammeta.client.errors import BrokerClientError
from streammeta.storage.backoff import Backoff
from streammeta.storage.object_store.protocol.patience import Patience
from tests.compaction import compaction_lives
from tests.compaction.compaction_random import Shape, act, draws, random_world, short_and_long
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import (
    Fate,
    Fault,
    RandomFaults,
    Step,
    Steps,
    faults,
    may_clean_up,
)
from tests.compaction.compaction_world import World

SLOW = pytest.mark.slow


async def all_compacted(world: World, check: ReadCheck) -> None:
    """Compact all nodes undisturbed; what is replaced or expired goes, nothing else is left."""
    for node_id in world.nodes:
        report = await compaction_lives.compacted(world, node_id)
        assert not report.left_out, report.left_out
    await check.all_gone()


@pytest.mark.parametrize("seed", short_and_long(10, 30))
def test_reads_stay_at_every_step_of_any_history(seed: int) -> None:
    for rng in draws(seed):
        asyncio.run(reads_stay(rng))


async def reads_stay(rng: random.Random) -> None:
    world = await random_world(rng)
    check = ReadCheck(world)
    check.run()

    for _round in range(2):
        for node_id in world.nodes:
            config = replace(compaction_lives.TINY, memory_budget=rng.choice([400, 1_500, 50_000]))
            force_split = rng.random() < 0.3
            report = await compaction_lives.compact(
                world, node_id, Steps(hook=check.look), config, force_split=force_split
            )
            assert report is not None
            assert not report.left_out, report.left_out
            if force_split:
                assert not world.set_objects(node_id), "everything became stream objects"
            await world.sweep()
            check.run()
            assert not world.strays()
            assert not list(world.store.list_multipart_uploads())
        for _ in range(8):
            await act(world, rng, Shape())


async def small_world() -> World:
    """Two nodes, six set objects of the first: gaps, trims, a deletion, blocks of a few records."""
    world = World(block_bytes=120)
    await world.register(1000, 1001)
    a, b, c, d = await world.create(1000, 4)
    three = [(2, 30), (1, 40), (1, 10)]
    await world.upload(1000, {a: three, b: three, d: three})
    await world.upload(1000, {a: three, c: three})
    await world.move(b, 1001)
    await world.upload(1001, {b: three})
    await world.move(b, 1000)
    await world.upload(1000, {a: three, b: three})
    await world.upload(1000, {a: [(1, 300)], b: three, c: three}, apart=[c])
    await world.trim(a, 3)
    await world.delete(d)
    await world.upload(1000, {a: three, c: three})
    await world.upload(1000, {b: three})
    return world


@pytest.mark.parametrize("all_fates", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("force_split", [False, True])
async def test_a_step_that_fails_or_kills_loses_nothing_and_leaves_nothing(
    force_split: bool, all_fates: bool
) -> None:
    names = await compaction_lives.steps_of(await small_world(), force_split=force_split)
    wanted = {"get_range", "put", "upload_part", "complete_multipart", "CommitStreamSetObject"}
    assert wanted <= set(names)
    for fault in faults(len(names), all_fates=all_fates, first=force_split):
        await one_fault(fault, force_split=force_split)


async def one_fault(fault: Fault, *, force_split: bool) -> None:
    world = await small_world()
    check = ReadCheck(world)
    steps = Steps(fault)
    report = await compaction_lives.compact(world, 1000, steps, force_split=force_split)
    assert (report is None) == fault.fate.kills, f"{fault}: {steps.names}"
    await check.swept()
    if may_clean_up(fault, steps.names):
        assert not list(world.store.list_multipart_uploads()), f"{fault}: {steps.names}"
    await world.register(1000)
    await all_compacted(world, check)


async def test_a_store_that_asks_for_fewer_requests_delays_and_spoils_nothing() -> None:
    """Whole stretches of calls fail; what could not be done is done by a later run."""
    names = await compaction_lives.steps_of(await small_world())
    for at in range(1, len(names), 3):
        world = await small_world()
        check = ReadCheck(world)
        await compaction_lives.compact(world, 1000, Steps(Fault(at, Fate.FAIL, times=4)))
        check.run()
        await all_compacted(world, check)


@pytest.mark.parametrize("fate", [Fate.FAIL, Fate.LOSE_ANSWER])
async def test_a_store_that_turns_a_call_away_once_does_not_end_a_compaction(
    fate: Fate, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = Patience(Backoff(0.001, 0.01))
    monkeypatch.setattr("streammeta.client.compaction.store_calls._REJECTED", patience)
    patient = replace(compaction_lives.TINY, store_patience_s=5.0)

    names = await compaction_lives.steps_of(await small_world())
    for name in sorted(
        set(names) - {"complete_multipart"}
    ):  # a store in memory can do it only once
        world = await small_world()
        fault = Fault(names.index(name) + 1, fate)
        report = await compaction_lives.compacted(world, 1000, Steps(fault), patient)
        assert not report.failures, f"{fate} at {name}: {report.failures}"
        ReadCheck(world).run()
        assert len(world.set_objects(1000)) == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", short_and_long(2, 10))
def test_killed_again_and_again_in_any_history(seed: int) -> None:
    for rng in draws(seed):
        asyncio.run(killed_often(rng))


async def killed_often(rng: random.Random) -> None:
    world = await random_world(rng)
    check = ReadCheck(world)
    for _ in range(12):
        node_id = rng.choice(list(world.nodes))
        config = compaction_lives.drawn(rng)
        steps = Steps(Fault(rng.randint(1, 40), rng.choice(list(Fate))))
        await compaction_lives.compact(
            world, node_id, steps, config, force_split=rng.random() < 0.3
        )
        check.run()
        if rng.random() < 0.5:
            await world.sweep()
        if steps.is_dead:
            await world.register(node_id)
        for _ in range(3):
            await act(world, rng, Shape())
        await all_compacted(world, check)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", short_and_long(3, 10))
def test_one_process_compacts_on_and_on_through_whatever_happens(seed: int) -> None:
    """What it remembers from cycle to cycle (indexes, outputs, lost commits) never misleads it."""
    for rng in draws(seed):
        asyncio.run(compacts_on(rng))


async def compacts_on(rng: random.Random) -> None:
    world = await random_world(rng)
    check = ReadCheck(world)
    steps = Steps(RandomFaults(rng, 0.06))
    with ExitStack() as stack:
        made = {
            node_id: stack.enter_context(
                compaction_lives.compactor(world, node_id, steps, compaction_lives.drawn(rng))
            )
            for node_id in world.nodes
        }
        for _ in range(12):
            node_id = rng.choice(list(world.nodes))
            whose = compaction_lives.target(world, node_id)
            with suppress(BrokerClientError):
                await made[node_id].run_once(whose, force_split=rng.random() < 0.2)
            check.run()
            if rng.random() < 0.5:
                await world.sweep()
            if rng.random() < 0.1:
                await world.expire()
            check.run()
            for _ in range(3):
                await act(world, rng, Shape())
    await all_compacted(world, check)


async def delete_all(world: World, _: list[int]) -> None:
    for stream in world.live():
        await world.delete(stream.stream_id)


MEDDLERS: dict[str, Callable[[World, list[int]], Awaitable[object]]] = {
    "trim to the middle": lambda world, ids: world.trim(ids[0], 7),
    "trim to the end": lambda world, ids: world.trim(ids[0], world.streams[ids[0]].end),
    "delete": lambda world, ids: world.delete(ids[1]),
    "upload": lambda world, ids: world.upload(1000, {ids[0]: [(2, 50)], ids[2]: [(1, 20)]}),
    "hand on": lambda world, ids: world.move(ids[1], 1001),
    "delete all": delete_all,
}
"""What may happen to the streams, of these ids, while their objects are compacted."""


@pytest.mark.parametrize("all_changes", [False, pytest.param(True, marks=SLOW)])
async def test_sources_may_change_at_any_step(all_changes: bool) -> None:
    names = await compaction_lives.steps_of(await small_world())
    for at in range(1, len(names) + 1, 1 if all_changes else 2):
        every = list(MEDDLERS)
        for what in every if all_changes else [every[at // 2 % len(every)]]:
            await one_change(what, at)


async def one_change(what: str, at: int) -> None:
    world = await small_world()
    check = ReadCheck(world)

    async def meddle(step: Step) -> None:
        if step.ordinal == at and not step.done:
            await MEDDLERS[what](world, [object_.stream_id for object_ in world.live()])
            await world.sweep()
        check.run()

    await compaction_lives.compacted(world, 1000, Steps(hook=meddle))
    await check.swept()
    await all_compacted(world, check)
