"""Compaction of relative objects: the outputs have the offsets of the streams, or none is made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from streammeta.controller.metadata.tables.values import ObjectState
from streammeta.storage.compaction.bases import Bases, at_bases, move_blocks
from streammeta.storage.compaction.entries import EntryTable
from streammeta.storage.compaction.verification import DamagedBlockError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.record import RecordBatch
from tests.compaction.compaction_lives import (
    NODE,
    TINY,
    compacted,
    compacted_streams,
    small_parts,
)
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_world import NAMESPACE, World
from tests.compaction.test_stream_object_compaction_output import MERGE
from tests.kit.built_objects import BuiltObject, built_object, opened

SMALL, LARGE = [(1, 30), (2, 40)], [(3, 90)] * 8


async def relative_world(
    objects: int = 4, *, tells_facts: bool = True, every: int = 1, block_bytes: int = 120
) -> tuple[World, list[int]]:
    """A node whose set objects, but for the first one of each `every`, are relative."""
    world = World(block_bytes)
    world.tells_facts = tells_facts
    world.is_relative = lambda object_id: every == 1 or bool(object_id % every)
    await world.register(NODE)
    a, b, c = await world.create(NODE, 3)
    sizes = {a: LARGE, b: SMALL, c: SMALL}
    return world, [await world.upload(NODE, sizes) for _ in range(objects)]


def is_relative(world: World, object_id: int) -> bool:
    data = world.store.objects()[key_for(object_id, NAMESPACE)]
    reader = ObjectReader("x", len(data), accept_relative=True)
    while (needed := reader.needed) is not None:
        reader.receive(data[needed.start : needed.end])
    return reader.relative


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [1, 2], ids=["all relative", "some relative"])
@pytest.mark.parametrize("force_split", [False, True])
async def test_outputs_are_normal_objects_at_the_offsets_of_the_streams(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, every: int, force_split: bool
) -> None:
    small_parts(monkeypatch)
    world, ids = await relative_world(6, every=every)
    assert any(is_relative(world, object_id) for object_id in ids)
    ReadCheck(world).run()
    config = replace(TINY, memory_budget=1_500, overlap=overlap)
    report = await compacted(world, NODE, config=config, force_split=force_split)
    assert (report.left_out, report.failures) == ({}, ())
    assert report.figures.iterations > 2
    assert report.figures.sources_checked == len(ids)
    assert {world.state(object_id) for object_id in ids} == {ObjectState.MARK_DESTROYED}
    outputs = [object_.object_id for object_ in world.committed()]
    assert outputs
    assert not any(is_relative(world, object_id) for object_id in outputs)
    ReadCheck(world).run()


async def test_trimmed_and_deleted_streams_of_relative_objects_are_left_behind() -> None:
    world, ids = await relative_world()
    a, b, c = world.streams
    await world.trim(a, world.streams[a].end // 2 + 1)
    await world.trim(b, world.streams[b].end)
    await world.delete(c)
    await world.sweep()
    report = await compacted(world, NODE)
    assert report.left_out == {}
    assert not set(ids) & set(world.set_objects(NODE))
    ReadCheck(world).run()


async def test_records_that_the_commit_rejected_are_not_copied() -> None:
    world, _ = await relative_world(2)
    a, b, c = world.streams
    await world.upload_with_refused(NODE, {a: SMALL, c: SMALL}, {b: SMALL})
    await world.upload(NODE, {b: SMALL})
    report = await compacted(world, NODE)
    assert report.left_out == {}
    ReadCheck(world).run()


@pytest.mark.parametrize("tells_facts", [False, True], ids=["no checksum", "checksum"])
async def test_a_damaged_record_header_is_not_copied(*, tells_facts: bool) -> None:
    """Any byte of a header but the epoch, of a record in the middle of its block."""
    world, ids = await relative_world(tells_facts=tells_facts, block_bytes=300)
    key = key_for(ids[1], NAMESPACE)
    data = world.store.objects()[key]
    second = 10 + 33 + 90  # behind a block's header and its first record
    epoch = range(second + 9, second + 17)
    for at in set(range(second, second + 33)) - set(epoch):
        world.store.put(key, data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :])
        report = await compacted(world, NODE)
        assert ids[1] in report.left_out, f"byte {at}"
        assert ids[1] in world.set_objects(NODE)
        world.store.put(key, data)
        ReadCheck(world).run()


async def test_an_object_of_another_length_than_its_metadata_stays() -> None:
    """The start of its range would be no base."""
    world, ids = await relative_world(tells_facts=False)
    key = key_for(ids[1], NAMESPACE)
    data = world.store.objects()[key]

    a, *others = world.streams.values()
    *most, last = a.records[len(LARGE) : 2 * len(LARGE)]
    streams = [[*most, replace(last, count=last.count - 1)]]
    streams += [stream.records[len(SMALL) : 2 * len(SMALL)] for stream in others]
    other = built_object(streams, 120, relative=True).data
    assert len(other) == len(data)
    world.store.put(key, other)
    report = await compacted(world, NODE)
    assert "it has 23 offsets of stream 0, its metadata [24, 48)" in report.left_out[ids[1]]
    world.store.put(key, data)
    ReadCheck(world).run()


async def test_a_stream_object_is_never_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it begins at offset 0, where nothing but the magic tells the difference."""
    world = World(block_bytes=120)
    world.tells_facts = False
    await world.register(NODE)
    (a,) = await world.create(NODE, 1)
    put = partial(world._put, relative=True)
    with monkeypatch.context() as patch:
        patch.setattr(world, "_put", put)
        await world.upload(NODE, {a: SMALL}, apart=[a])
    for _ in range(3):
        await world.upload(NODE, {a: SMALL}, apart=[a])
    (first, *_) = [object_id for object_id, _, _ in world.stored_ranges(a)]
    (report,) = await compacted_streams(world, [MERGE])
    assert "footer magic" in report.left_out[first]
    assert report.figures.commits == 1


# Bases


OBJECT = 7


def relative_pair() -> tuple[BuiltObject, BuiltObject, EntryTable]:
    """A relative object, the same one with absolute offsets, and the relative entries."""
    streams = [
        [RecordBatch(2, 1, 50, 3, b"abc"), RecordBatch(2, 1, 53, 1, b"")],
        [RecordBatch(5, 1, 0, 2, b"x")],
        [RecordBatch(6, 1, 9, 2, b"yy"), RecordBatch(6, 1, 11, 2, b"z")],
    ]
    relative, normal = (built_object(streams, 1, relative=flag) for flag in (True, False))
    reader = ObjectReader("x", relative.size, accept_relative=True)
    while (needed := reader.needed) is not None:
        reader.receive(relative.data[needed.start : needed.end])
    return relative, normal, EntryTable.of_index(OBJECT, reader.index)


def column(*rows: tuple[int, int, int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def test_entries_move_to_the_ranges_of_the_metadata_in_any_order() -> None:
    _, normal, entries = relative_pair()
    moved = at_bases(entries, column((6, 9, 13), (2, 50, 54), (5, 0, 2)))
    wanted = EntryTable.of_index(OBJECT, opened(normal.data).index)
    assert list(moved.rows()) == list(wanted.rows())
    without = at_bases(entries, column((6, 9, 13)))
    assert list(without.rows()) == [row for row in wanted.rows() if row.stream_id == 6]
    assert len(at_bases(entries, column())) == 0


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([(2, 50, 53), (5, 0, 2)], r"4 offsets of stream 2, its metadata \[50, 53\)"),
        ([(2, 50, 55)], r"4 offsets of stream 2, its metadata \[50, 55\)"),
        ([(3, 0, 4)], r"0 offsets of stream 3, its metadata \[0, 4\)"),
        ([(6, 9, 11), (6, 11, 13)], "several ranges of stream 6"),
    ],
    ids=["shorter", "longer", "not in the object", "twice"],
)
def test_ranges_that_give_no_base_are_refused(
    ranges: list[tuple[int, int, int]], problem: str
) -> None:
    _, _, entries = relative_pair()
    with pytest.raises(ValueError, match=problem):
        at_bases(entries, column(*ranges))


def test_only_blocks_of_relative_objects_move() -> None:
    relative, normal, entries = relative_pair()
    ranges = column((2, 50, 54), (5, 0, 2), (6, 9, 13))
    moved = at_bases(entries, ranges)
    size = entries.data_size
    other = replace(moved, object_id=np.full(len(moved), OBJECT + 1))
    both = EntryTable.concatenate([moved, other])
    places = np.concatenate([moved.position, other.position + size])
    buffer = bytearray(relative.data[:size] + normal.data[:size])
    move_blocks(
        memoryview(buffer),
        places,
        both,
        {OBJECT: Bases.of_ranges(ranges), 99: Bases.of_ranges(column())},
        str,
    )
    assert buffer == 2 * normal.data[:size]


def test_blocks_of_other_records_are_named_by_their_source() -> None:
    relative, _, entries = relative_pair()
    ranges = column((2, 50, 54), (5, 0, 2), (6, 9, 13))
    moved = at_bases(entries, ranges)
    buffer = bytearray(relative.data[: entries.data_size])
    short = replace(moved, end_offset=moved.end_offset + (moved.stream_id == 6))
    with pytest.raises(DamagedBlockError, match="offset 11, expected offset 12") as caught:
        move_blocks(
            memoryview(buffer), moved.position, short, {OBJECT: Bases.of_ranges(ranges)}, str
        )
    assert (caught.value.object_id, caught.value.source) == (OBJECT, str(OBJECT))
