"""A compaction that failed half-way is gone on with: outputs are used again, the right ones only.

The journal of outputs is in the memory of the process, so all attempts here are of one process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from streammeta.client.compaction.report import Figures
from tests.compaction.compaction_lives import TINY, compactor, target
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import Fate, Fault, Steps
from tests.compaction.compaction_world import World

SAME = [(2, 30), (1, 40), (1, 10)]
STREAMS = 6
IN_ONE_REQUEST = replace(TINY, put_bytes=100_000)


async def alike_world() -> World:
    """Streams that are as large as each other to the byte, and two tiny ones that stay together."""
    world = World(block_bytes=120)
    await world.register(1000)
    large = await world.create(1000, STREAMS)
    tiny = await world.create(1000, 2)
    for _ in range(4):
        await world.upload(1000, dict.fromkeys(large, SAME) | {key: [(1, 5)] for key in tiny})
    return world


async def undisturbed() -> tuple[list[str], Figures]:
    """The steps of a compaction that nothing disturbs, and its figures."""
    world, steps = await alike_world(), Steps()
    with compactor(world, 1000, steps, IN_ONE_REQUEST) as made:
        report = await made.run_once(target(world, 1000))
    return steps.names, report.figures


async def test_what_was_written_before_a_failure_is_not_written_again() -> None:
    names, whole = await undisturbed()
    puts = [at for at, name in enumerate(names, start=1) if name == "put"]
    assert len(puts) > 1
    for at in puts:
        world = await alike_world()
        with compactor(world, 1000, Steps(Fault(at, Fate.FAIL)), IN_ONE_REQUEST) as made:
            first = await made.run_once(target(world, 1000))
            ReadCheck(world).run()
            second = await made.run_once(target(world, 1000))
        assert first.failures
        assert not second.failures
        assert first.figures.puts + second.figures.puts == whole.puts, "each output is put once"
        assert second.figures.reused == first.figures.puts
        await ReadCheck(world).all_gone()


@pytest.mark.parametrize("fate", [Fate.FAIL, Fate.LOSE_ANSWER])
async def test_a_commit_that_got_no_answer_is_repeated_with_the_same_objects(fate: Fate) -> None:
    names, whole = await undisturbed()
    world = await alike_world()
    steps = Steps(Fault(names.index("CommitStreamSetObject") + 1, fate, times=1_000))
    with compactor(world, 1000, steps, IN_ONE_REQUEST) as made:
        first = await made.run_once(target(world, 1000))
        assert first.failures
        assert first.figures.puts == whole.puts
        steps.heal()
        second = await made.run_once(target(world, 1000))
    assert not second.failures
    assert second.figures.puts == 0, "nothing has to be written a second time"
    assert len(world.set_objects(1000)) == 1
    await ReadCheck(world).all_gone()


async def test_outputs_are_not_used_for_sources_that_have_changed_what_is_live() -> None:
    """Between both attempts a stream is trimmed: what was made of all its blocks is not wanted."""
    names, _ = await undisturbed()
    last_put = len(names) - names[::-1].index("put")
    world = await alike_world()
    with compactor(world, 1000, Steps(Fault(last_put, Fate.FAIL)), IN_ONE_REQUEST) as made:
        await made.run_once(target(world, 1000))
        for stream in world.live():
            await world.trim(stream.stream_id, stream.end - 2)
        check = ReadCheck(world)
        check.run()
        report = await made.run_once(target(world, 1000))
        assert not report.failures
    await check.all_gone()
