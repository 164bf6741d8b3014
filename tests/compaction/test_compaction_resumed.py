"""A compaction that failed half-way is gone on with: outputs are used again, the right ones only.

The journal of outputs is in the memory of the process, so all attempts here are of one process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streammeta.client.compaction.report import CompactionReport
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


@dataclass(frozen=True)
class Attempts:
    """Two runs of one process, of which the first met a fault."""

    world: World
    first: CompactionReport
    second: CompactionReport


async def attempts(fault: Fault) -> Attempts:
    world = await alike_world()
    with compactor(world, 1000, Steps(fault), IN_ONE_REQUEST) as made:
        first = await made.run_once(target(world, 1000))
        ReadCheck(world).run()
        second = await made.run_once(target(world, 1000))
    return Attempts(world, first, second)


async def test_what_was_written_before_a_failure_is_not_written_again() -> None:
    names = Steps()
    world = await alike_world()
    with compactor(world, 1000, names, IN_ONE_REQUEST) as made:
        whole = (await made.run_once(target(world, 1000))).figures
    reused = 0
    for at in [i for i, name in enumerate(names.names, start=1) if name == "put"]:
        both = await attempts(Fault(at, Fate.FAIL))
        assert both.first.failures
        assert not both.second.failures
        written = both.first.figures.puts + both.second.figures.puts
        assert written == whole.puts, "each output is put once"
        assert both.second.figures.reused == both.first.figures.puts
        reused += both.second.figures.reused
        check = ReadCheck(both.world)
        check.run()
        await both.world.sweep()
        check.run()
        await both.world.expire()
        check.run()
        assert not both.world.strays()
    assert reused


async def test_a_commit_that_got_no_answer_is_repeated_with_the_same_objects() -> None:
    for fate in (Fate.FAIL, Fate.LOSE_ANSWER):
        names = Steps()
        world = await alike_world()
        with compactor(world, 1000, names, IN_ONE_REQUEST) as made:
            whole = (await made.run_once(target(world, 1000))).figures
        at = names.names.index("CommitStreamSetObject") + 1
        world = await alike_world()
        steps = Steps(Fault(at, fate, times=1_000))
        with compactor(world, 1000, steps, IN_ONE_REQUEST) as made:
            first = await made.run_once(target(world, 1000))
            assert first.failures
            assert first.figures.puts == whole.puts
            steps.heal()
            second = await made.run_once(target(world, 1000))
        assert not second.failures
        assert second.figures.puts == 0, "nothing has to be written a second time"
        assert len(world.set_objects(1000)) == 1
        check = ReadCheck(world)
        await check.all_gone()


async def test_outputs_are_not_used_for_sources_that_have_changed_what_is_live() -> None:
    """Between both attempts a stream is trimmed: what was made of all its blocks is not wanted."""
    names = Steps()
    world = await alike_world()
    with compactor(world, 1000, names, IN_ONE_REQUEST) as made:
        await made.run_once(target(world, 1000))
    last_put = len(names.names) - names.names[::-1].index("put")
    world = await alike_world()
    steps = Steps(Fault(last_put, Fate.FAIL))
    with compactor(world, 1000, steps, IN_ONE_REQUEST) as made:
        await made.run_once(target(world, 1000))
        for stream in world.live():
            await world.trim(stream.stream_id, stream.end - 2)
        check = ReadCheck(world)
        check.run()
        report = await made.run_once(target(world, 1000))
        assert not report.failures
    await check.all_gone()
