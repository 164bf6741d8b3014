"""Sources, neighbours and compactors as bad as they come: none blocks or spoils the others.

Each lie is told of a compaction that is sound otherwise, by one change of its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from streammeta.client.compaction.commit import Replacement
from streammeta.client.errors import NodeEpochExpiredError, NodeNotRegisteredError
from streammeta.controller.metadata.api.requests import DestroyDeadStreamSetObjects
from streammeta.storage.object_format.object_key import key_for
from streammeta.v1.objects_pb2 import CommitStreamSetObjectRequest
from tests.compaction.compaction_lives import TINY, compact, compacted, compactor, steps_of, target
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import Step, Steps
from tests.compaction.compaction_world import NAMESPACE, World
from tests.kit.seeds import seeds

THREE = [(2, 30), (1, 40), (1, 10)]
SEVERAL_ITERATIONS = replace(TINY, memory_budget=1_500)

Spoiler = Callable[[bytes], bytes]


async def plain_world(objects: int = 6, *, checksums: bool = True) -> tuple[World, list[int]]:
    """One node with three streams, one of them tiny, in each of its set objects."""
    world = World(block_bytes=120)
    world.tells_facts = checksums
    await world.register(1000, 1001)
    a, b, tiny = await world.create(1000, 3)
    sizes = {a: THREE, b: THREE, tiny: [(1, 3)]}
    return world, [await world.upload(1000, sizes) for _ in range(objects)]


SPOILERS: dict[str, Spoiler | None] = {
    "footer": lambda data: data[:-8] + bytes(8),
    "index": lambda data: data[: -48 - 36] + b"\xff" * 36 + data[-48:],
    "cut off": lambda data: data[: len(data) // 2],
    "missing": None,
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
async def test_an_unreadable_source_is_left_out_and_reported(spoil: Spoiler | None) -> None:
    world, ids = await plain_world()
    key = key_for(ids[2], NAMESPACE)
    good = world.store.objects()[key]
    if spoil is None:
        world.store.delete_many([key])
    else:
        world.store.put(key, spoil(good))
    for _ in range(3):
        report = await compacted(world, 1000)
        assert set(report.left_out) <= {ids[2]}
    assert ids[2] in world.set_objects(1000), "it stays as it is"
    assert len(world.set_objects(1000)) <= 3, "its neighbours are compacted on either side"
    world.store.put(key, good)
    await ReadCheck(world).all_gone()


async def test_a_block_larger_than_the_budget_is_left_out_and_reported() -> None:
    world, ids = await plain_world(3)
    stream = world.live()[0].stream_id
    large = await world.upload(1000, {stream: [(1, 9_000)]})
    ids += [await world.upload(1000, {stream: THREE}) for _ in range(3)]
    check = ReadCheck(world)
    report = await compacted(world, 1000, config=replace(TINY, memory_budget=2_000))
    assert set(report.left_out) == {large}
    assert not set(ids) & set(world.set_objects(1000)), "the others are compacted"
    await check.all_gone()


async def test_one_stream_far_over_the_budget_goes_out_in_pieces() -> None:
    world = World(block_bytes=120)
    await world.register(1000)
    (stream,) = await world.create(1000, 1)
    for _ in range(5):
        await world.upload(1000, {stream: [(1, 200)] * 20})
    check = ReadCheck(world)
    report = await compacted(world, 1000, config=replace(TINY, memory_budget=1_500))
    assert not report.left_out
    assert not world.set_objects(1000)
    pieces = world.committed()
    assert len(pieces) > 10
    assert all(piece.object_size < 1_500 + 2_000 for piece in pieces)
    await check.all_gone()


async def test_what_an_object_holds_and_the_map_does_not_know_never_comes_back() -> None:
    """A refused range of an upload is in the object, with bytes that may never be read."""
    world, _ = await plain_world(2)
    a, b, c = (object_.stream_id for object_ in world.live())
    await world.upload_with_refused(1000, {a: THREE}, refused={b: THREE})
    await world.upload(1000, {b: THREE, c: THREE})
    check = ReadCheck(world)
    check.run()
    for force_split in (False, True):
        report = await compacted(world, 1000, force_split=force_split)
        assert not report.left_out
        await check.swept()
    assert not world.set_objects(1000)


def before_commit(act: Callable[[], Awaitable[object]], check: ReadCheck) -> Steps:
    """Return steps of which the first commit comes right after `act`; each of them is checked."""
    pending = [act]

    async def hook(step: Step) -> None:
        if step.name == "CommitStreamSetObject" and not step.done and pending:
            await pending.pop()()
        check.run()

    return Steps(hook=hook)


@pytest.mark.parametrize("by", [None, 1001], ids=["the node itself", "another"])
async def test_a_commit_after_the_node_registered_anew_changes_nothing(by: int | None) -> None:
    world, ids = await plain_world()
    if by is not None:
        for stream in world.live():
            await world.move(stream.stream_id, by)
    check = ReadCheck(world)
    with pytest.raises(NodeEpochExpiredError):
        await compact(world, 1000, before_commit(lambda: world.register(1000), check), by=by)
    assert world.set_objects(1000) == ids
    check.run()
    await compact(world, 1000)
    assert not set(ids) & set(world.set_objects(1000))
    await check.all_gone()


@pytest.mark.parametrize("seed", seeds(2, slow=2))
async def test_two_compactors_of_one_node_do_each_others_work_once(seed: int) -> None:
    """Both plan the same sources; one commit wins, the other compactor's outputs expire."""
    world, _ = await plain_world()
    check = ReadCheck(world)

    async def dawdle(step: Step) -> None:
        check.run()
        for _ in range((step.ordinal * 7 + seed * 3) % 5):
            await asyncio.sleep(0)

    reports = await asyncio.gather(*(compact(world, 1000, Steps(hook=dawdle)) for _ in range(2)))
    assert None not in reports
    await check.all_gone()
    assert len(world.set_objects(1000)) == 1


async def test_a_rival_that_wins_just_before_the_commit_costs_the_work_alone() -> None:
    world, _ = await plain_world()
    check = ReadCheck(world)

    async def rival() -> None:
        await compact(world, 1000)
        await world.sweep()

    report = await compacted(world, 1000, before_commit(rival, check))
    assert "COMPACTED_OBJECTS_NOT_FOUND" in report.failures[0]
    await check.all_gone()
    assert len(world.set_objects(1000)) == 1


@pytest.mark.parametrize("ending", ["unregistered", "fenced"])
async def test_set_objects_of_a_gone_node_are_compacted_by_another(ending: str) -> None:
    world, _ = await plain_world()
    for stream in world.live():
        await world.move(stream.stream_id, 1001)
    if ending == "unregistered":
        await world.unregister(1000)
    check = ReadCheck(world)
    check.run()

    report = await compacted(world, 1000, Steps(hook=check.look), by=1001)
    assert not report.left_out
    assert len(world.set_objects(1000)) <= 1
    await check.swept()
    assert not world.strays()


def spoil_first_record(data: bytes) -> bytes:
    """Another stream id in the first record of the first block."""
    at = 9 + 1
    return data[:at] + b"\x7f" * 8 + data[at + 8 :]


def spoil_payload(data: bytes) -> bytes:
    """One bit of the first record's payload: only the checksum of all bytes shows it."""
    at = 9 + 33
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("where", "checksums", "reason"),
    [
        (spoil_first_record, True, "is corrupt at byte 0"),
        (spoil_first_record, False, "is corrupt at byte 0"),
        (spoil_payload, True, "was recorded"),
    ],
)
async def test_a_damaged_block_is_found_before_it_is_copied(
    where: Spoiler, checksums: bool, reason: str
) -> None:
    """Its object is left out when the damage shows; the next cycle compacts the others."""
    world, ids = await plain_world(checksums=checksums)
    key = key_for(ids[3], NAMESPACE)
    good = world.store.objects()[key]
    world.store.put(key, where(good))
    with compactor(world, 1000, Steps()) as made:
        first = await made.run_once(target(world, 1000))
        assert set(first.left_out) == {ids[3]}
        assert reason in first.left_out[ids[3]]
        assert (first.figures.commits, first.figures.sources_checked) == (0, 0)
        second = await made.run_once(target(world, 1000))
        assert not second.failures
        assert set(second.left_out) == {ids[3]}, "it is reported as long as it is there"
        assert (second.figures.commits, second.figures.reused) == (2, 0)
        assert second.figures.sources_checked == (5 if checksums else 0)
    assert ids[3] in world.set_objects(1000)
    assert len(world.set_objects(1000)) <= 3
    assert not list(world.store.list_multipart_uploads())
    world.store.put(key, good)
    await ReadCheck(world).all_gone()


async def test_an_object_under_anothers_key_is_not_believed() -> None:
    """Two objects of one size were swapped: their indexes are sound, and of other offsets."""
    world, ids = await plain_world()
    keys = [key_for(object_id, NAMESPACE) for object_id in ids]
    held = world.store.objects()
    assert len(held[keys[2]]) == len(held[keys[4]])
    world.store.put(keys[2], held[keys[4]])
    with compactor(world, 1000, Steps()) as made:
        for _ in range(4):
            await made.run_once(target(world, 1000))
    assert ids[2] in world.set_objects(1000)
    world.store.put(keys[2], held[keys[2]])
    await ReadCheck(world).all_gone()


async def test_outputs_whose_time_is_over_are_not_committed() -> None:
    """The process was asleep for days before its commit: ids have expired, their bytes are gone."""
    world, ids = await plain_world()
    check = ReadCheck(world)
    with compactor(world, 1000, before_commit(world.expire, check)) as made:
        report = await made.run_once(target(world, 1000))
        assert report.failures
        assert world.set_objects(1000) == ids
        check.run()
        await made.run_once(target(world, 1000))
        check.run()
    assert not set(ids) & set(world.set_objects(1000)), "the next cycle does it"
    await check.all_gone()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_cancelled_compaction_leaves_no_upload_and_can_be_repeated(every: int) -> None:
    names = await steps_of((await plain_world())[0], config=SEVERAL_ITERATIONS)
    for at in range(1, len(names) + 1, every):
        await cancelled_at(at)


async def cancelled_at(at: int) -> None:
    world, ids = await plain_world()
    check = ReadCheck(world)
    reached = asyncio.Event()

    async def cancel(step: Step) -> None:
        check.run()
        if step.ordinal == at:
            reached.set()
            await asyncio.sleep(0)

    with compactor(world, 1000, Steps(hook=cancel), SEVERAL_ITERATIONS) as made:
        running = asyncio.create_task(made.run_once(target(world, 1000)))
        await asyncio.wait_for(reached.wait(), 60)
        running.cancel()
        await asyncio.wait([running])
        check.run()
        assert not list(world.store.list_multipart_uploads()), f"at step {at}"
        await made.run_once(target(world, 1000))
    check.run()
    assert not set(ids) & set(world.set_objects(1000))
    await check.all_gone()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
async def test_the_controllers_may_clear_up_what_a_gone_node_left_meanwhile(every: int) -> None:
    """All of it is trimmed and destroyed while it is compacted: there is nothing left to do."""
    world, _ = await plain_world()
    names = await steps_of(world)
    for at in range(1, len(names) + 1, every):
        await cleared_at(at)


async def cleared_at(at: int) -> None:
    world, ids = await plain_world()
    for stream in world.live():
        await world.move(stream.stream_id, 1001)
    await world.unregister(1000)
    check = ReadCheck(world)

    async def clear(step: Step) -> None:
        if step.ordinal == at and not step.done:
            for stream in world.live():
                await world.trim(stream.stream_id, stream.end)
            await world.map.write(
                DestroyDeadStreamSetObjects(node_id=1000, after_object_id=-1, limit=100)
            )
            await world.sweep()
        check.run()

    with suppress(NodeNotRegisteredError):
        await compact(world, 1000, Steps(hook=clear), by=1001)
    check.run()
    assert not set(ids) & set(world.set_objects(1000))
    await check.all_gone()


Lie = Callable[[CommitStreamSetObjectRequest], object]
SOME = [(2, 30), (1, 40), (1, 10)]
STREAMS = 3


async def lively_world() -> World:
    """Streams 0 to 2 are split off, 3 to 5 stay together; one of each is trimmed."""
    world = World(block_bytes=120)
    await world.register(1000)
    large = await world.create(1000, STREAMS)
    tiny = await world.create(1000, STREAMS)
    for _ in range(4):
        await world.upload(1000, dict.fromkeys(large, SOME) | {key: [(2, 5)] for key in tiny})
    await world.trim(large[0], 3)
    await world.trim(tiny[0], 3)
    return world


def shift(path: str, row: int, by: int) -> Lie:
    """Return a lie that adds to one number of a column."""

    def lie(request: CommitStreamSetObjectRequest) -> None:
        columns, name = path.split(".")
        getattr(getattr(request, columns), name)[row] += by

    return lie


def drop_last_row(columns: str) -> Lie:
    """Return a lie that leaves out the last row of all columns."""

    def lie(request: CommitStreamSetObjectRequest) -> None:
        for _, column in getattr(request, columns).ListFields():
            column.pop()

    return lie


def begin_untrimmed_late(request: CommitStreamSetObjectRequest) -> None:
    rows = request.stream_objects  # in the order in which they were written
    untrimmed = list(rows.stream_id).index(max(rows.stream_id))
    rows.start_offset[untrimmed] += 1


def swap_streams(request: CommitStreamSetObjectRequest) -> None:
    ends = request.stream_objects.end_offset
    ends[0], ends[1] = ends[1] + 1, ends[0] - 1


def double_stream_object(request: CommitStreamSetObjectRequest) -> None:
    request.stream_objects.stream_id[0] = request.stream_objects.stream_id[1]


def name_a_newer_source(request: CommitStreamSetObjectRequest) -> None:
    request.compacted_object_ids.append(max(request.compacted_object_ids) + 1)


def name_no_result(request: CommitStreamSetObjectRequest) -> None:
    request.object_id = -1
    request.object_size = 0
    for field in ("ranges", "stream_objects", "crc32c", "min_timestamp_ms", "max_timestamp_ms"):
        request.ClearField(field)


LIES: dict[str, Lie] = {
    "drop a range": drop_last_row("ranges"),
    "end a range early": shift("ranges.end_offset", 1, -1),
    "end a range late": shift("ranges.end_offset", 2, 1),
    "begin a range late": shift("ranges.start_offset", 1, 1),
    "take another stream": shift("ranges.stream_id", 2, 100),
    "drop a stream object": drop_last_row("stream_objects"),
    "end a stream object early": shift("stream_objects.end_offset", 0, -1),
    "begin an untrimmed stream object late": begin_untrimmed_late,
    "swap streams": swap_streams,
    "double a stream object": double_stream_object,
    "name one source less": lambda request: bool(request.compacted_object_ids.pop()),
    "name a newer source": name_a_newer_source,
    "name no result": name_no_result,
    "name a result that was never prepared": lambda request: setattr(request, "object_id", 10**9),
    "speak for another node": lambda request: setattr(request.node, "node_id", 1001),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_commit_that_does_not_hold_what_its_sources_hold_is_refused(
    lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await lively_world()
    await world.register(1001)
    ids = world.set_objects(1000)
    check = ReadCheck(world)
    newer = iter([0])

    async def upload(step: Step) -> None:
        if step.name == "PrepareObjects" and not step.done and next(newer, None) == 0:
            await world.upload(1000, dict.fromkeys(world.streams, SOME))
        check.run()

    truth = Replacement.request

    def told(replacement: Replacement) -> CommitStreamSetObjectRequest:
        request = truth(replacement)
        assert len(request.ranges.stream_id) == len(request.stream_objects.object_id) == STREAMS
        lie(request)
        return request

    monkeypatch.setattr(Replacement, "request", told)
    report = await compacted(world, 1000, Steps(hook=upload))
    assert report.failures
    assert world.set_objects(1000)[: len(ids)] == ids, "no source has gone"
    check.run()
    monkeypatch.undo()
    await compact(world, 1000)
    assert not set(ids) & set(world.set_objects(1000)), "the truth is believed"
    await check.all_gone()
