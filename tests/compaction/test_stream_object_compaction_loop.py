"""The broker's task: streams stay in few objects while it runs, and nothing readable changes."""

from __future__ import annotations

import asyncio
import random

import pytest

from streammeta.client.errors import ControllerUnavailableError, NodeEpochExpiredError
from streammeta.storage.compaction.stream_objects import StreamSchedule
from tests.compaction import compaction_lives as lives
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import Step, Steps
from tests.compaction.compaction_world import World

MINUTES = 100


@pytest.mark.parametrize("composites", [True, False])
async def test_streams_stay_in_few_objects_while_they_grow(composites: bool) -> None:
    rng = random.Random(5)
    world = World(block_bytes=100)
    await world.register(lives.NODE)
    streams = await world.create(lives.NODE, 5)
    check, steps = ReadCheck(world), Steps()
    made = 0
    with lives.stream_compactor(world, steps, lives.TINY) as worker:
        schedule = StreamSchedule(composites=composites)
        for minute in range(MINUTES):
            if minute % 2 == 0:
                chosen = rng.sample(streams, 2)
                sizes = {each: [(1, rng.randint(1, 99))] * 2 for each in chosen}
                await world.upload(lives.NODE, sizes, chosen)
            if minute % 30 == 29:
                stream = world.streams[rng.choice(streams)]
                await world.trim(stream.stream_id, (stream.start + stream.end) // 2)
            async for report in worker.look(minute * 60.0, schedule):
                assert report.error is None
                assert not report.left_out
                made += len(report.made)
        await world.sweep()
    check.run()
    assert not world.strays()
    assert made >= 12
    uploads = MINUTES // len(streams)
    for each in streams:
        assert len(world.stored_ranges(each)) < uploads / 2


async def small_world() -> World:
    """One stream of four small objects."""
    world = World(block_bytes=100)
    await world.register(lives.NODE)
    await world.create(lives.NODE, 1)
    for _ in range(4):
        await world.upload(lives.NODE, {0: [(1, 9)]}, [0])
    return world


async def test_a_stream_that_was_just_opened_rests() -> None:
    world = await small_world()
    steps = Steps()
    with lives.stream_compactor(world, steps) as worker:

        async def made(now_s: float) -> int:
            looked = worker.look(now_s, StreamSchedule())
            return sum([len(report.made) async for report in looked])

        assert await made(0.0) == 0
        assert await made(59.0) == 0
        await world.move(0, lives.NODE)
        assert await made(3600.0) + await made(3659.0) == 0, "it was opened again"
        assert await made(7200.0) + await made(7260.0) == 1


async def test_the_task_goes_on_after_a_failure_and_ends_when_cancelled() -> None:
    world = await small_world()
    done = asyncio.Event()
    failures = 0

    async def fail_first(step: Step) -> None:
        nonlocal failures
        if step.name == "DescribeStreams" and failures < 1:
            failures += 1
            raise ControllerUnavailableError("DescribeStreams", 1.0, {})

    steps = Steps(hook=fail_first)
    with lives.stream_compactor(world, steps) as worker:
        schedule = StreamSchedule(0.01, 0.02, 0.03, rest_s=0.0)
        task = asyncio.ensure_future(worker.run(schedule, lambda _report: done.set()))
        async with asyncio.timeout(20):
            await done.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert failures == 1
    ReadCheck(world).run()


async def test_a_process_that_was_replaced_ends_its_task() -> None:
    world = await small_world()
    steps = Steps()
    with lives.stream_compactor(world, steps) as worker:
        await world.register(lives.NODE)
        schedule = StreamSchedule(0.01, 0.02, 0.03, rest_s=0.0)
        async with asyncio.timeout(20):
            with pytest.raises(NodeEpochExpiredError):
                await worker.run(schedule)
