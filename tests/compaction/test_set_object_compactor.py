"""Cycles of a compactor on a real map: reports, memory, and what is left to the next one.

The journal of outputs is in the memory of the process, so all attempts here are of one process.
"""

from __future__ import annotations

import asyncio
import mmap
import time
import weakref
from dataclasses import replace

import pytest

from streammeta.client.compaction import sso_planning
from streammeta.client.compaction.report import CompactionReport, Figures
from streammeta.client.compaction.sso_compactor import SetObjectCompactor
from streammeta.client.errors import NodeEpochExpiredError
from streammeta.controller.metadata.tables.values import ObjectState
from streammeta.storage.compaction import verification
from streammeta.storage.compaction.entries import EntryTable
from streammeta.storage.compaction.verification import CoverageError, check_coverage
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.calls import StoreMetrics
from tests.compaction.compaction_lives import (
    EAGER,
    NODE,
    OTHER,
    PART_BYTES,
    TINY,
    compacted,
    compactor,
    target,
)
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import Fate, Fault, Steps
from tests.compaction.compaction_world import NAMESPACE, World, time_of
from tests.kit.built_objects import ObjectBuilder
from tests.kit.waiting import until

SMALL = [(1, 30), (2, 40)]
LARGE = [(1, 90)] * 8
COMMIT = "CommitStreamSetObject"


class BadLine(Steps):
    """Calls named `name` meet `fate` as long as it is set; with `third` only the third one does."""

    def __init__(self, name: str, fate: Fate, *, third: bool = False) -> None:
        super().__init__()
        self.name = name
        self.fate: Fate | None = fate
        self.third = third

    def _enter(self, name: str) -> tuple[int, Fate | None]:
        ordinal, _ = super()._enter(name)
        is_met = name == self.name and (not self.third or self.names.count(name) == 3)
        return ordinal, self.fate if is_met else None


async def world_of(
    objects: int = 4, *, large: bool = True, tells_facts: bool = True
) -> tuple[World, list[int]]:
    """A node with some set objects of one large and two small streams."""
    world = World(block_bytes=120)
    world.tells_facts = tells_facts
    await world.register(NODE, OTHER)
    a, b, c = await world.create(NODE, 3)
    sizes = {a: LARGE if large else SMALL, b: SMALL, c: SMALL}
    return world, [await world.upload(NODE, sizes) for _ in range(objects)]


async def cycle(made: SetObjectCompactor, world: World, *, split: bool = False) -> CompactionReport:
    return await made.run_once(target(world, NODE), force_split=split)


def moved(before: StoreMetrics, after: StoreMetrics) -> dict[str, int]:
    """What was asked of the store between, by the names of a report."""

    def calls(name: str) -> int:
        return after.of(name).calls - before.of(name).calls

    def total(name: str) -> int:
        return sum(
            getattr(count, name) - getattr(before.of(operation), name)
            for operation, count in after.operations.items()
        )

    return {
        "gets": calls("get_range"),
        "puts": calls("put"),
        "parts": calls("upload_part"),
        "multiparts": calls("complete_multipart"),
        "bytes_read": total("bytes_received"),
        "bytes_written": total("bytes_sent"),
    }


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_cycle_replaces_what_it_says_and_counts_what_it_asked(overlap: bool) -> None:
    world, ids = await world_of(6)
    before = world.store.metrics()
    config = replace(TINY, memory_budget=1_500, overlap=overlap)
    with compactor(world, NODE, Steps(), config) as made:
        report = await cycle(made, world)
    (group,) = report.groups
    assert sorted(group.source_ids) == ids
    assert [world.state(object_id) for object_id in ids] == [ObjectState.MARK_DESTROYED] * len(ids)
    assert tuple(world.set_objects(NODE)) == group.set_object_ids
    outputs = {*group.set_object_ids, *group.stream_object_ids}
    assert {object_.object_id for object_ in world.committed()} == outputs
    assert len(group.stream_object_ids) > 1, "the large stream is cut by the memory"
    figures = report.figures
    told = {name: getattr(figures, name) for name in moved(before, before)}
    assert told == moved(before, world.store.metrics())
    assert (figures.commits, figures.reused) == (1, 0)
    assert figures.iterations > 2
    assert figures.parts > 0, "the set object is larger than one part"
    assert (report.left_out, report.failures) == ({}, ())
    ReadCheck(world).run()


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_set_object_goes_on_from_one_iteration_to_the_next(overlap: bool) -> None:
    world = World(block_bytes=120)
    await world.register(NODE)
    streams = await world.create(NODE, 20)
    ids = [await world.upload(NODE, dict.fromkeys(streams, SMALL)) for _ in range(4)]
    config = replace(TINY, memory_budget=1_500, overlap=overlap)
    config = replace(config, selection=replace(config.selection, split_size=1 << 20))
    with compactor(world, NODE, Steps(), config) as made:
        report = await cycle(made, world)
    (group,) = report.groups
    assert sorted(group.source_ids) == ids
    assert (len(group.set_object_ids), group.stream_object_ids) == (1, ())
    assert group.figures.iterations > 5
    assert group.figures.parts > 10
    assert group.figures.multiparts == 1
    assert group.figures.sources_checked == len(ids)
    ReadCheck(world).run()


async def test_an_output_has_the_time_bounds_of_its_own_sources() -> None:
    world = World(block_bytes=120)
    await world.register(NODE)
    a, b = await world.create(NODE, 2)
    await world.upload(NODE, {a: LARGE})
    await world.upload(NODE, {b: LARGE})
    await world.upload(NODE, {b: LARGE})
    with compactor(world, NODE, Steps()) as made:
        await cycle(made, world, split=True)
    bounds = {
        item.stream_id: (item.min_timestamp_ms, item.max_timestamp_ms) for item in world.committed()
    }
    for stream_id in (a, b):
        times = [time_of(record) for record in world.streams[stream_id].records]
        assert bounds[stream_id] == (min(times), max(times))
    world.tells_facts = False
    await world.upload(NODE, {a: SMALL})
    with compactor(world, NODE, Steps()) as made:
        await cycle(made, world, split=True)
    assert [object_.max_timestamp_ms for object_ in world.committed()].count(-1) == 1


async def test_outputs_of_a_failed_attempt_are_used_by_the_next_one() -> None:
    world, ids = await world_of(6)
    config = replace(TINY, memory_budget=1_500)
    with compactor(
        world, NODE, BadLine("complete_multipart", Fate.FAIL, third=True), config
    ) as made:
        planned = [group async for group in (await made.plan(target(world, NODE))).groups()]
        outputs = sum(len(iteration.outputs) for iteration in planned[0].plan.commits[0].iterations)
        first = await cycle(made, world)
        assert "fails as it was told to" in first.failures[0]
        assert first.figures.commits == 0
        assert not list(world.store.list_multipart_uploads()), "what was begun is dropped"
        second = await cycle(made, world)
    assert second.figures.commits == 1
    assert 0 < second.figures.reused < outputs
    assert not set(ids) & set(world.set_objects(NODE))
    ReadCheck(world).run()
    await world.expire()
    assert not world.strays(), "what was not used expires"
    ReadCheck(world).run()


async def test_nothing_made_of_a_damaged_source_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sso_planning, "SET_ASIDE_S", 0.0)  # it is tried again at once

    world, ids = await world_of(5)
    key = key_for(ids[2], NAMESPACE)
    good = world.store.objects()[key]
    world.store.put(key, good[:60] + bytes([good[60] ^ 1]) + good[61:])
    with compactor(world, NODE, Steps()) as made:
        for _ in range(3):
            report = await cycle(made, world)
            assert "was recorded" in report.failures[0]
        world.store.put(key, good)
        assert (await cycle(made, world)).figures.commits == 1
    ReadCheck(world).run()


PAIRS = replace(TINY, selection=replace(TINY.selection, max_group_objects=2))
"""Groups of two."""


async def test_a_source_that_can_not_be_read_now_lets_the_others_go_first() -> None:
    world, ids = await world_of(4)
    key, get_range = key_for(ids[0], NAMESPACE), world.store.get_range
    reads = 0

    def bad_sector(at: str, start: int = 0, end: int | None = None) -> bytes:
        nonlocal reads
        reads += at == key
        if at == key and reads > 1:
            raise StoreUnavailableError("the disk gives no answer for this file")
        return get_range(at, start, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.store, "get_range", bad_sector)
        with compactor(world, NODE, Steps(), PAIRS) as made:
            first = await cycle(made, world)
            assert "no answer for this file" in first.left_out[ids[0]]
            assert first.figures.commits == 0, "the whole store may be down"
            await cycle(made, world)
            await cycle(made, world)
    assert set(world.set_objects(NODE)) & set(ids) == {ids[0]}
    ReadCheck(world).run()


@pytest.mark.parametrize("error", [CoverageError("not held"), ValueError("a defect")], ids=str)
async def test_a_group_that_meets_what_should_not_happen_does_not_stop_the_others(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, ids = await world_of(4)

    def check_or_fail(sources: EntryTable, outputs: EntryTable) -> None:
        if ids[0] in sources.object_ids():
            raise error
        check_coverage(sources, outputs)

    monkeypatch.setattr(verification, "check_coverage", check_or_fail)
    with compactor(world, NODE, Steps(), PAIRS) as made:
        report = await cycle(made, world)
        assert str(error) in report.failures[0]
        assert set(report.left_out) == set(ids[:2])
        assert sorted(report.groups[1].source_ids) == ids[2:]
        await cycle(made, world)
    assert world.set_objects(NODE)[:2] == ids[:2]
    ReadCheck(world).run()


async def test_an_object_that_is_not_what_the_map_says_is_found_and_left_out() -> None:
    """The bytes are whole, and of other offsets: no compaction of it may ever be committed."""
    world, ids = await world_of(3, large=False, tells_facts=False)
    key = key_for(ids[1], NAMESPACE)
    good = world.store.objects()[key]
    builder = ObjectBuilder(120)
    for stream in world.streams.values():
        held = [record for record in stream.records if 3 <= record.base_offset < 6]
        builder.write([replace(batch, base_offset=batch.base_offset + 100) for batch in held])
    foreign = builder.finish().data
    assert len(foreign) == len(good)
    world.store.put(key, foreign)
    with compactor(world, NODE, Steps()) as made:
        first = await cycle(made, world)
        assert "OFFSET_NOT_MATCHED" in first.failures[0]
        assert "the first rejected row is stream" in first.failures[0]
        second = await cycle(made, world)
    assert "does not have all offsets that the metadata lists" in second.left_out[ids[1]]
    assert second.failures == ()
    world.store.put(key, good)
    ReadCheck(world).run()


async def test_indexes_are_read_once_and_planning_changes_nothing() -> None:
    world, ids = await world_of()
    with compactor(world, NODE, Steps()) as made:
        for _ in range(2):
            plan = await made.plan(target(world, NODE))
            groups = [group async for group in plan.groups()]
            assert groups[0].object_ids == tuple(ids)
            assert sorted(groups[0].plan.commits[0].source_ids) == ids
            assert plan.listing.objects.object_id.tolist() == ids
            assert plan.selection.waiting == ()
            assert world.store.metrics().of("get_range").calls == len(ids)
    assert world.set_objects(NODE) == ids
    assert world.store.metrics().of("put").calls == len(ids)


async def test_the_loop_goes_on_until_its_own_node_is_taken_over() -> None:
    world, ids = await world_of()
    reports: list[CompactionReport] = []
    stale = target(world, OTHER, gone=True)
    with compactor(world, NODE, Steps()) as made:
        own = target(world, NODE)
        loop = asyncio.create_task(
            made.run(lambda: [replace(stale, node_epoch=0), own], 0.0, reports.append)
        )
        await until(lambda: any(report.node_id == NODE for report in reports), "report")
        assert not set(ids) & set(world.set_objects(NODE))
        for _ in range(4):
            await world.upload(NODE, dict.fromkeys(world.streams, SMALL))
        await world.register(NODE)
        with pytest.raises(NodeEpochExpiredError):
            await loop
    ReadCheck(world).run()


async def test_objects_without_anything_live_go_without_a_trace() -> None:
    world, ids = await world_of(4, large=False)
    for stream_id, stream in world.streams.items():
        await world.trim(stream_id, stream.end)
    before = world.store.metrics()
    with compactor(world, NODE, Steps()) as made:
        report = await cycle(made, world)
    assert sorted(report.groups[0].source_ids) == ids
    assert moved(before, world.store.metrics())["puts"] == 0
    assert not world.committed()
    ReadCheck(world).run()


BUDGET = 12_000
BLOCK = 1_000


class Buffers:
    """Stands in for the memory that blocks are read into, and adds up what is in use.

    A thread lets go of what it has sent a moment after the loop hears of it, so there is a short
    wait for that.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0
        self.most = 0
        self.made = 0

    def new(self, size: int) -> memoryview:
        if not size:
            return memoryview(b"")
        patience = time.monotonic() + 1.0
        while self.held + size > self._limit and time.monotonic() < patience:
            time.sleep(0.001)
        pages = mmap.mmap(-1, size)
        weakref.finalize(pages, self._freed, size)
        self.made += 1
        self.held += size
        self.most = max(self.most, self.held)
        return memoryview(pages)

    def _freed(self, size: int) -> None:
        self.held -= size


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("force_split", [False, True])
async def test_blocks_in_memory_are_within_the_budget(
    overlap: bool, force_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trailers = 36 * 15 + 48 * 5  # entries and outputs that one iteration can end with
    buffers = Buffers(BUDGET + PART_BYTES + trailers)
    monkeypatch.setattr("streammeta.client.compaction.sso_run.new_buffer", buffers.new)

    world = World(BLOCK)
    await world.register(1000)
    streams = await world.create(1000, 5)
    for _ in range(8):
        sizes = {stream: [(1, BLOCK)] * (1 + stream) for stream in streams}
        await world.upload(1000, sizes)
    check = ReadCheck(world)
    selection = replace(EAGER, split_size=20 * BLOCK)
    config = replace(TINY, memory_budget=BUDGET, overlap=overlap, selection=selection)
    report = await compacted(world, 1000, config=config, force_split=force_split)
    assert not report.failures
    await check.swept()
    assert buffers.made >= 10, "there is far more to read than the budget holds"
    assert BUDGET / 2 < buffers.most <= BUDGET + PART_BYTES + trailers
    assert buffers.held == 0, "nothing is kept"


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


@pytest.mark.parametrize("fate", [Fate.LOSE_ANSWER, Fate.FAIL])
async def test_a_commit_without_an_answer_is_made_once_whatever_became_of_it(fate: Fate) -> None:
    world = await alike_world()
    ids = world.set_objects(NODE)
    line = BadLine(COMMIT, fate)
    with compactor(world, NODE, line, replace(IN_ONE_REQUEST, commit_deadline_s=0.1)) as made:
        first = await cycle(made, world)
        assert first.figures.commits == 0
        assert "next cycle checks the outcome" in first.failures[0]
        written = world.store.metrics().of("put").calls
        line.fate = None
        second = await cycle(made, world)
        assert second.figures.commits == (fate is Fate.FAIL)
        assert second.figures.bytes_written == 0, "nothing is written twice"
        assert not second.failures
        assert not set(ids) & set(world.set_objects(NODE))
        assert len(world.set_objects(NODE)) == 1
        assert world.store.metrics().of("put").calls == written
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
