"""Stream objects compacted, once or by the broker's task: every live offset reads the same."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from streammeta.client import errors
from streammeta.storage.compaction.stream_objects import StreamCompaction, StreamSchedule
from tests.compaction import compaction_lives as lives
from tests.compaction.compaction_random import Shape, act, random_world
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import Fate, Fault, Step, Steps, may_clean_up
from tests.compaction.compaction_world import World
from tests.kit.seeds import seeds

SLOW = pytest.mark.slow
KINDS = list(StreamCompaction)
SHAPE = Shape(streams=4, actions=40, apart=0.9)


@pytest.mark.parametrize("seed", seeds(6, slow=294))
async def test_reads_stay_at_every_step_of_any_history(seed: int) -> None:
    rng = random.Random(seed)
    world = await random_world(rng, SHAPE)
    check = ReadCheck(world)
    check.run()

    for _round in range(3):
        config = replace(
            lives.TINY,
            server_side_copy=rng.random() < 0.7,
            whole_object_bytes=rng.choice([0, 250]),
            max_source_entries=rng.choice([10, 200_000]),
            expired_batch=rng.choice([1, 1000]),
        )
        kinds = [rng.choice(KINDS) for _ in range(3)]
        for node_id in (lives.NODE, lives.OTHER):
            reports = await lives.compacted_streams(
                world, kinds, Steps(hook=check.look), config, node_id
            )
            for report in reports:
                assert report.error is None
                assert not report.left_out
        await world.sweep()
        check.run()
        assert not list(world.store.list_multipart_uploads())
        for _ in range(10):
            await act(world, rng, SHAPE)
    await check.all_gone()


async def grown_world() -> World:
    """One stream of which a part is linked already, a part trimmed, and a part small."""
    world = World(block_bytes=100)
    await world.register(lives.NODE)
    (a,) = await world.create(lives.NODE, 1)
    for sizes in ([(1, 80)] * 6, [(1, 80)] * 5, [(2, 90)] * 4):
        await world.upload(lives.NODE, {a: sizes}, [a])
    await lives.compact_streams(world, [StreamCompaction.LINK])
    for _ in range(3):
        await world.upload(lives.NODE, {a: [(1, 50)] * 2}, [a])
    for _ in range(2):
        await world.upload(lives.NODE, {a: [(1, 95)] * 4}, [a])
    await world.trim(a, 7)
    return world


EVERYTHING = (
    StreamCompaction.PRUNE_LINKS,
    StreamCompaction.GATHER_SMALL,
    StreamCompaction.MERGE_SMALL,
    StreamCompaction.LINK,
)


async def all_steps() -> list[str]:
    world, steps = await grown_world(), Steps()
    reports = await lives.compacted_streams(world, EVERYTHING, steps)
    assert sum(len(report.made) for report in reports) >= 4
    return steps.names


@pytest.mark.parametrize("share", [0, *(pytest.param(i, marks=SLOW) for i in (1, 2, 3))])
async def test_a_life_may_end_at_any_step(share: int) -> None:
    """Every step meets one of the fates; in the long runs the others too."""
    count = len(await all_steps())
    assert count > 20
    fates = list(Fate)
    for at in range(1, count + 1):
        await ends_at(Fault(at, fates[(at + share) % len(fates)]))


async def ends_at(fault: Fault) -> None:
    world = await grown_world()
    check = ReadCheck(world)
    steps = Steps(fault)
    reports = await lives.compact_streams(world, EVERYTHING, steps)
    assert (reports is None) == fault.fate.kills, fault
    check.run()
    if may_clean_up(fault, steps.names):
        assert not list(world.store.list_multipart_uploads()), fault
    await world.sweep()
    check.run()
    again = await lives.compacted_streams(world, EVERYTHING)
    assert all(report.error is None and not report.left_out for report in again), fault
    assert len(world.stored_ranges(0)) <= 2
    await check.all_gone()


async def test_a_commit_whose_answer_is_lost_is_found_done() -> None:
    names = await all_steps()
    commits = [at for at, name in enumerate(names, start=1) if name == "CommitStreamObject"]
    assert len(commits) >= 4, names
    for at in commits:
        world = await grown_world()
        steps = Steps(Fault(at, Fate.LOSE_ANSWER, times=2))
        reports = await lives.compacted_streams(world, EVERYTHING, steps)
        assert all(report.error is None for report in reports), at
        made = [output.object_id for report in reports for output in report.made]
        assert len(made) == len(set(made)) >= 4
        ReadCheck(world).run()


async def test_two_compactors_of_one_node_do_no_harm() -> None:
    world = await grown_world()
    check = ReadCheck(world)
    both = await asyncio.gather(
        lives.compact_streams(world, EVERYTHING), lives.compact_streams(world, EVERYTHING)
    )
    failed = [one.error for reports in both for one in reports or () if one.error is not None]
    assert {type(error) for error in failed} <= {errors.CompactedObjectsNotFoundError}
    await check.all_gone()


async def test_ids_that_expired_are_not_used_again() -> None:
    world = await grown_world()
    is_slow = True

    async def let_days_pass(step: Step) -> None:
        if is_slow and step.name == "CommitStreamObject" and not step.done:
            await world.expire()

    with lives.stream_compactor(world, Steps(hook=let_days_pass), lives.TINY) as made:
        late = await made.compact(0, StreamCompaction.GATHER_SMALL)
        assert isinstance(late.error, errors.ObjectExpiredError)
        is_slow = False
        again = await made.compact(0, StreamCompaction.GATHER_SMALL)
    assert again.error is None
    assert again.made
    await ReadCheck(world).all_gone()


async def test_another_owner_ends_it_and_nothing_is_changed() -> None:
    world = await grown_world()
    before = world.stored_ranges(0)

    async def take_over(step: Step) -> None:
        if step.name == "PrepareObjects" and step.done:
            await world.register(lives.OTHER)
            await world.move(0, lives.OTHER)

    reports = await lives.compacted_streams(
        world, [StreamCompaction.GATHER_SMALL], Steps(hook=take_over)
    )
    assert isinstance(reports[0].error, errors.StreamFencedError | errors.StreamEpochMismatchError)
    assert world.stored_ranges(0) == before
    ReadCheck(world).run()


async def test_a_fenced_process_stops() -> None:
    world = await grown_world()
    old = world.nodes[lives.NODE]
    await world.register(lives.NODE)
    world.nodes[lives.NODE] = old
    with pytest.raises(errors.NodeEpochExpiredError):
        await lives.compact_streams(world, [StreamCompaction.GATHER_SMALL])


async def test_planning_changes_nothing() -> None:
    world = await grown_world()
    steps = Steps()
    with lives.stream_compactor(world, steps, lives.TINY) as made:
        plan = await made.plan(0, StreamCompaction.GATHER_SMALL)
    assert plan.groups
    assert set(steps.names) <= {"DescribeCluster", "DescribeStreams", "DescribeObjects"}


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
                sizes = {stream_id: [(1, rng.randint(1, 99))] * 2 for stream_id in chosen}
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
    for chosen_stream in streams:
        assert len(world.stored_ranges(chosen_stream)) < uploads / 2


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
            raise errors.ControllerUnavailableError("DescribeStreams", 1.0, {})

    steps = Steps(hook=fail_first)
    with lives.stream_compactor(world, steps) as worker:
        schedule = StreamSchedule(0.01, 0.02, 0.03, rest_s=0.0)
        task = asyncio.ensure_future(worker.run(schedule, lambda _report: done.set()))
        async with asyncio.timeout(60):
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
        async with asyncio.timeout(60):
            with pytest.raises(errors.NodeEpochExpiredError):
                await worker.run(schedule)
