"""Stream objects merged, linked and pruned: reads stay, and no bytes that are linked ever go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from streammeta.client.errors import StreamNotFoundError
from streammeta.controller.metadata.tables.values import ObjectKind
from streammeta.storage.compaction.stream_objects import StreamCompaction
from tests.compaction.compaction_lives import compact, compact_stream
from tests.compaction.compaction_random import Shape, act, draws, random_world, short_and_long
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import Fate, Fault, Step, Steps, faults, may_clean_up
from tests.compaction.compaction_world import World

SLOW = pytest.mark.slow
THREE = [(2, 60), (1, 80), (1, 10)]


async def many_objects() -> tuple[World, int]:
    """One stream: stream objects of all sizes, a set object's range, and a trim into a block."""
    world = World(block_bytes=120)
    await world.register(1000)
    stream, other = await world.create(1000, 2)
    for sizes in ([(1, 400)], THREE, [(2, 900)], THREE, [(1, 0)]):
        await world.upload(1000, {stream: sizes, other: THREE}, apart=[stream])
    await world.upload(1000, {stream: THREE, other: THREE})
    for _ in range(3):
        await world.upload(1000, {stream: THREE}, apart=[stream])
    await world.trim(stream, 4)
    return world, stream


async def linked_objects() -> tuple[World, int]:
    """A stream that begins with a composite of which much is trimmed."""
    world, stream = await many_objects()
    await compact_stream(world, stream, StreamCompaction.GATHER_SMALL)
    report = await compact_stream(world, stream, StreamCompaction.LINK)
    assert report is not None
    assert any(output.composite for output in report.made), "there is a composite to begin with"
    ReadCheck(world).run_links()
    await world.upload(1000, {stream: [(1, 700), (3, 300)]}, apart=[stream])
    await world.trim(stream, 8)  # within its second link
    return world, stream


WORLDS = {
    StreamCompaction.REMOVE_EXPIRED: many_objects,
    StreamCompaction.GATHER_SMALL: many_objects,
    StreamCompaction.MERGE_SMALL: many_objects,
    StreamCompaction.MERGE_LARGE: many_objects,
    StreamCompaction.LINK: linked_objects,
    StreamCompaction.PRUNE_LINKS: linked_objects,
}


def cases() -> list[Any]:
    """Every kind with everything that may happen to it, and those unlike each other with some."""
    alike = (StreamCompaction.MERGE_SMALL, StreamCompaction.MERGE_LARGE)
    return [
        pytest.param(kind, is_all, id=f"{kind.value}-{is_all}", marks=SLOW if is_all else ())
        for kind in StreamCompaction
        for is_all in (False, True)
        if is_all or kind not in alike
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "all_fates"), cases())
async def test_a_step_that_fails_or_kills_loses_nothing_and_leaves_nothing(
    kind: StreamCompaction, all_fates: bool
) -> None:
    world, stream = await WORLDS[kind]()
    steps = Steps()
    report = await compact_stream(world, stream, kind, steps)
    assert report is not None
    assert report.made or kind is StreamCompaction.REMOVE_EXPIRED, "there is something to do"
    assert report.has_changed
    assert report.error is None
    assert not report.left_out
    first = list(StreamCompaction).index(kind)
    for fault in faults(len(steps.names), all_fates=all_fates, first=first):
        await one_fault(kind, fault)


async def one_fault(kind: StreamCompaction, fault: Fault) -> None:
    world, stream = await WORLDS[kind]()
    check = ReadCheck(world)

    steps = Steps(fault, check.look)
    await compact_stream(world, stream, kind, steps)
    await check.swept()
    if may_clean_up(fault, steps.names):
        assert not list(world.store.list_multipart_uploads()), f"{fault} of {steps.names}"
    report = await compact_stream(world, stream, kind)
    assert report is not None
    assert report.error is None
    check.run_links()
    await check.all_gone()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", short_and_long(6, 15))
def test_any_order_of_compactions_of_any_history(seed: int) -> None:
    for rng in draws(seed):
        asyncio.run(any_order(rng))


async def any_order(rng: random.Random) -> None:
    world = await random_world(rng, Shape(streams=3, payload=300))
    check = ReadCheck(world)
    for _ in range(14):
        steps = Steps()
        if rng.random() < 0.3:
            fault = Fault(rng.randint(1, 25), rng.choice(list(Fate)))
            steps = Steps(fault)
        if rng.random() < 0.3:
            node_id = rng.choice(list(world.nodes))
            force_split = rng.random() < 0.7
            await compact(world, node_id, steps, force_split=force_split)
            if steps.is_dead:
                await world.register(node_id)
        else:
            stream = rng.choice(world.live())
            await compact_stream(world, stream.stream_id, rng.choice(list(StreamCompaction)), steps)
        check.run()
        if rng.random() < 0.6:
            await world.sweep()
            check.run()
        for _ in range(3):
            await act(world, rng, Shape(payload=300))
    await check.all_gone()


async def test_a_deleted_stream_takes_everything_that_is_linked_along() -> None:
    world, stream = await linked_objects()
    kinds = {object_.kind for object_ in world.committed()}
    assert ObjectKind.COMPOSITE in kinds
    await world.delete(stream)
    await ReadCheck(world).all_gone()
    held = {object_.kind for object_ in world.committed()}
    assert held == {ObjectKind.STREAM_SET}


CHANGES: dict[str, Callable[[World, int], Awaitable[object]]] = {
    "trim": lambda world, stream: world.trim(stream, world.streams[stream].end - 6),
    "delete": lambda world, stream: world.delete(stream),
    "hand on": lambda world, stream: world.move(stream, 1001),
    "upload": lambda world, stream: world.upload(1000, {stream: THREE}, apart=[stream]),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "all_changes"), cases())
async def test_the_stream_may_change_at_any_step(kind: StreamCompaction, all_changes: bool) -> None:
    world, stream = await WORLDS[kind]()
    steps = Steps()
    await compact_stream(world, stream, kind, steps)
    for at in range(1, len(steps.names) + 1, 1 if all_changes else 3):
        for what in CHANGES if all_changes else [list(CHANGES)[at % len(CHANGES)]]:
            await one_change(kind, what, at)


async def one_change(kind: StreamCompaction, what: str, at: int) -> None:
    world, stream = await WORLDS[kind]()
    await world.register(1001)
    check = ReadCheck(world)

    async def change(step: Step) -> None:
        if step.ordinal == at and not step.done:
            await CHANGES[what](world, stream)
            await world.sweep()
        check.run()

    with suppress(StreamNotFoundError):
        await compact_stream(world, stream, kind, Steps(hook=change))
    check.run_links()
    await check.all_gone()
