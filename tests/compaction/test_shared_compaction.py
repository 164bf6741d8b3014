"""Stream objects of shared streams, which have no owner: some node compacts each, in any race."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from streammeta.client.compaction import shared_streams
from streammeta.client.compaction.report import GroupReport
from streammeta.client.compaction.shared_streams import TERM_MS, chosen_node
from streammeta.controller.features import SUPPORTED
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.tables import values
from streammeta.storage.compaction.stream_objects import StreamCompaction, StreamSchedule
from tests.compaction import compaction_lives as lives
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import Step, Steps
from tests.compaction.compaction_world import TrueStream, World
from tests.kit.seeds import seeds

GATHER = [StreamCompaction.GATHER_SMALL]
NODES = (lives.NODE, lives.OTHER)
UPLOADS, FEW = 8, 3
"""Objects of a stream before its compaction, and at most after it."""


async def create_shared(world: World, count: int) -> list[int]:
    await world.map.write(requests.SetFeatureLevel(level=SUPPORTED.highest))
    answer = await world.map.write(
        requests.CreateStreams(
            request_id=world.map.request_id(),
            node=world.nodes[lives.NODE],
            streams=(requests.NewStream(shared=True),) * count,
        )
    )
    ids: list[int] = list(answer.stream_ids)
    # No node owns them: -1.
    world.streams |= {id_: TrueStream(id_, -1, epoch=0, is_open=False) for id_ in ids}
    return ids


async def append(world: World, node_id: int, stream_ids: list[int]) -> None:
    """Commit a relative object of a node with a few records of each stream."""
    written = {
        stream_id: world.streams[stream_id].next_records([(1, 30), (2, 40)])
        for stream_id in stream_ids
    }
    (object_id,) = await world.prepare(node_id, 1)
    built = world._put(object_id, list(written.values()), relative=True)
    answer = await world.map.write(
        requests.CommitStreamSetObject(
            node=world.nodes[node_id],
            object_id=object_id,
            order_id=object_id,
            object_size=built.size,
            shared_rows=values.SharedRowColumns(
                stream_id=values.column(stream_ids),
                record_count=values.column([3] * len(stream_ids)),
            ),
        )
    )
    for stream_id, start in zip(stream_ids, answer.shared.start_offset.tolist(), strict=True):
        stream = world.streams[stream_id]
        assert start == stream.end
        stream.records.extend(written[stream_id])
        stream.end = written[stream_id][-1].end_offset


async def shared_world(streams: int = 1, appends: int = UPLOADS) -> World:
    """Two nodes that wrote shared streams in turn, and have split their set objects."""
    world = World()
    await world.register(*NODES)
    ids = await create_shared(world, streams)
    for number in range(appends):
        await append(world, NODES[number % 2], ids)
        # Every object is split alone, so that each becomes a stream object of each stream.
        report = await lives.compacted(world, NODES[number % 2], force_split=True)
        assert not report.failures
    assert all(len(world.stored_ranges(stream_id)) == appends for stream_id in ids)
    return world


async def compacted_by(world: World, node_id: int, steps: Steps | None = None) -> list[GroupReport]:
    return await lives.compacted_streams(world, GATHER, steps, node_id=node_id)


async def test_the_nodes_together_leave_few_objects_and_each_record_at_its_offset() -> None:
    world = await shared_world(streams=6)
    check = ReadCheck(world)
    check.run()
    reports = {node_id: await compacted_by(world, node_id) for node_id in NODES}
    for stream_id in world.streams:
        assert len(world.stored_ranges(stream_id)) <= FEW
    done = [report.stream_id for by_node in reports.values() for report in by_node]
    assert sorted(done, key=str) == sorted(world.streams), "each stream by one node"
    assert all(reports.values()), "both nodes took a part"
    await check.all_gone()


async def test_trimmed_objects_of_idle_streams_are_removed() -> None:
    world = await shared_world(streams=2)
    for stream in world.streams.values():
        item = requests.StreamToTrim(stream.stream_id, 0, stream.end)
        await world.map.write(requests.TrimStreams(node=world.nodes[lives.NODE], streams=(item,)))
        stream.start = stream.end
    for node_id in NODES:
        await compacted_by(world, node_id)
    assert not world.committed()
    await ReadCheck(world).all_gone()


async def test_a_lost_race_is_no_failure() -> None:
    world = await shared_world()
    check = ReadCheck(world)
    raced = False

    async def let_the_other_win(step: Step) -> None:
        nonlocal raced
        if step.name == "CommitStreamObject" and not step.done and not raced:
            raced = True
            with lives.stream_compactor(world, Steps(), node_id=lives.OTHER) as other:
                assert (await other.compact(0, StreamCompaction.GATHER_SMALL)).made

    steps = Steps(hook=let_the_other_win)
    with lives.stream_compactor(world, steps) as made:
        report = await made.compact(0, StreamCompaction.GATHER_SMALL)
        assert raced
        assert report.was_overtaken
        assert not report.says_anything
        assert report.error is None
        # The next cycle starts from what the other one left.
        assert not (await made.compact(0, StreamCompaction.GATHER_SMALL)).was_overtaken
    await check.all_gone()


async def test_all_shared_streams_are_compacted_for_a_cluster() -> None:
    world = await shared_world(streams=5)

    async def work() -> list[GroupReport]:
        with lives.stream_compactor(world, Steps()) as made:
            return [report async for report in made.compact_shared(GATHER)]

    racing = await asyncio.gather(work(), work())
    reports = [*racing[0], *racing[1], *await work()]
    assert all(report.error is None for report in reports)
    assert all(len(world.stored_ranges(stream_id)) <= FEW for stream_id in world.streams)
    await ReadCheck(world).all_gone()


async def test_a_scheduled_compactor_takes_its_turns_of_shared_streams() -> None:
    world = await shared_world()
    with (
        lives.stream_compactor(world, Steps()) as first,
        lives.stream_compactor(world, Steps(), node_id=lives.OTHER) as second,
    ):
        for minute in range(180):
            for worker in (first, second):
                async for report in worker.look(minute * 60.0, StreamSchedule()):
                    assert report.error is None
    assert len(world.stored_ranges(0)) <= FEW
    await ReadCheck(world).all_gone()


async def test_fenced_and_departed_nodes_get_no_streams() -> None:
    world = await shared_world(streams=8)
    await world.unregister(lives.OTHER)
    shared = shared_streams.SharedStreams(world.map.client(Steps()), lambda: 0)
    assert await shared.of_node(lives.NODE) == sorted(world.streams)


@pytest.mark.parametrize("seed", seeds(3))
def test_the_choice_is_even_and_moves_from_term_to_term(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.sample(range(10_000), 5)
    terms = [[chosen_node(stream, nodes, term) for stream in range(500)] for term in range(3)]
    for chosen in terms:
        counts = [chosen.count(node_id) for node_id in nodes]
        assert min(counts) > 50, f"seed {seed}: {counts}"
    assert terms[0] != terms[1] != terms[2], f"seed {seed}"
    # The order of the nodes says nothing, and without one node only its streams move.
    assert [chosen_node(stream, nodes[::-1], 0) for stream in range(500)] == terms[0]
    fewer = [chosen_node(stream, nodes[1:], 0) for stream in range(500)]
    moved = {before for before, after in zip(terms[0], fewer, strict=True) if before != after}
    assert moved == {nodes[0]}, f"seed {seed}"


async def test_another_term_gives_streams_to_other_nodes() -> None:
    world = await shared_world(streams=8, appends=1)
    held: set[tuple[int, ...]] = set()
    for term in range(4):
        now_ms = partial(int, term * TERM_MS)
        shared = shared_streams.SharedStreams(world.map.client(Steps()), now_ms)
        parts = [await shared.of_node(node_id) for node_id in NODES]
        assert sorted(parts[0] + parts[1]) == sorted(world.streams)
        held.add(tuple(parts[0]))
    assert len(held) > 1
