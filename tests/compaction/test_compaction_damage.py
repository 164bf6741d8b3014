"""Damage of a source never enters a new object, also where some of the source is not moved."""

import random

import pytest

from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.object_reader import ObjectReader
from tests.compaction.compaction_lives import compacted, compacted_streams
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_world import NAMESPACE
from tests.compaction.test_compaction_hostile import plain_world
from tests.compaction.test_stream_object_compaction_output import (
    AS_IN_PRODUCT,
    MERGE,
    MIB,
    Traffic,
    world_of,
)
from tests.compaction.test_stream_object_compaction_output import compacted as compacted_stream
from tests.kit.built_objects import damage


def blocks_of(data: bytes) -> list[tuple[int, int]]:
    reader = ObjectReader("x", len(data))
    while (needed := reader.needed) is not None:
        reader.receive(data[needed.start : needed.end])
    return [(entry.position, entry.position + entry.size) for entry in reader.index]


@pytest.mark.parametrize("is_partly_expired", [False, True])
async def test_no_random_damage_of_a_set_object_is_copied(*, is_partly_expired: bool) -> None:
    rng = random.Random(7)
    for _ in range(25):
        world, ids = await plain_world()
        if is_partly_expired:
            stream = world.live()[0]
            await world.trim(stream.stream_id, stream.end)
        bad, other = (key_for(ids[place], NAMESPACE) for place in (3, 4))
        held = world.store.objects()
        world.store.put(bad, damage(held[bad], held[other], blocks_of(held[bad]), rng))
        report = await compacted(world, 1000)
        assert ids[3] in report.left_out
        assert ids[3] in world.set_objects(1000)
        world.store.put(bad, held[bad])
        ReadCheck(world).run()


async def test_damage_is_not_copied_by_the_store_either() -> None:
    traffic = Traffic()
    world = await world_of([3 * MIB, 6 * MIB, 24 * MIB, MIB], traffic)
    ids = [object_id for object_id, _, _ in world.stored_ranges(0)]
    bad = key_for(ids[2], NAMESPACE)
    data = world.store.objects()[bad]
    at = len(data) // 2
    world.store.put(bad, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (report,) = await compacted_streams(world, [MERGE], config=AS_IN_PRODUCT)
    assert traffic.copied, "it was to be copied"
    assert list(report.left_out) == [ids[2]]
    assert all(ids[2] not in made.source_ids for made in report.made)


async def test_damage_is_found_where_the_front_of_a_source_was_trimmed() -> None:
    world = await world_of([400] * 6, block=100)
    await world.trim(0, 2)
    ids = [object_id for object_id, _, _ in world.stored_ranges(0)]
    bad = key_for(ids[0], NAMESPACE)
    data = world.store.objects()[bad]
    start, end = blocks_of(data)[-1]
    world.store.put(bad, data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:])
    assert start > 0
    report = await compacted_stream(world, whole_object_bytes=0, server_side_copy=False)
    assert list(report.left_out) == [ids[0]]
    assert "was recorded" in report.left_out[ids[0]]
