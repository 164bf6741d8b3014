"""What is made of stream objects: the bytes, the requests they take, and what is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.listing import ListedRange, Listing
from streammeta.client.compaction.report import GroupReport, OutputObject
from streammeta.controller.metadata.tables.values import ObjectState
from streammeta.storage.compaction.stream_objects import (
    ANY_CRC,
    GIB,
    StreamCompaction,
    StreamObject,
    rules_for,
)
from streammeta.storage.errors import StoreRejectedError
from streammeta.storage.object_format.composite import decode_composite
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import Body, MultipartUpload, Tags, UploadedPart
from tests.compaction import compaction_lives as lives
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import Fate, Fault, Step, Steps
from tests.compaction.compaction_world import NAMESPACE, World
from tests.kit.memory_store import MemoryObjectStore

MIB = 1024 * 1024
MERGE = StreamCompaction.MERGE_LARGE
AS_IN_PRODUCT = CompactionConfig(store_patience_s=0.0)


class Traffic(MemoryObjectStore):
    """Writes down what moves: reads and writes in bytes, copies as (start, end)."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: list[int] = []
        self.sent: list[int] = []
        self.copied: list[tuple[int, int]] = []

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get_range(key, start, end)
        self.gets.append(len(data))
        return data

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        self.sent.append(memoryview(data).nbytes)
        super().put(key, data, if_absent=if_absent, tags=tags)

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        self.sent.append(memoryview(data).nbytes)
        return super().upload_part(upload, number, data)

    def copy_part(
        self, upload: MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> UploadedPart:
        self.copied.append((start, end))
        return super().copy_part(upload, number, source_key, start, end)


async def world_of(
    sizes: Sequence[int], store: MemoryObjectStore | None = None, block: int = 512 * 1024
) -> World:
    """One stream whose objects have about so many bytes, in records of `block` bytes at most."""
    world = World(block)
    world.store = store or world.store
    await world.register(lives.NODE)
    await world.create(lives.NODE, 1)
    for size in sizes:
        piece = min(size, block)
        await world.upload(lives.NODE, {0: [(1, piece)] * (size // piece)}, [0])
    return world


async def compacted(
    world: World, kind: StreamCompaction = MERGE, steps: Steps | None = None, **changes: Any
) -> GroupReport:
    """Compact the one stream of a world with some changes of the configuration."""
    config = replace(lives.TINY, **changes)
    (report,) = await lives.compacted_streams(world, [kind], steps, config)
    return report


async def merged(
    sizes: Sequence[int], config: CompactionConfig = AS_IN_PRODUCT, trim: int = 0
) -> tuple[World, Traffic, GroupReport]:
    """Merge a stream's objects into one; return what moved on the way."""
    traffic = Traffic()
    world = await world_of(sizes, traffic)
    if trim:
        await world.trim(0, trim)
    traffic.gets.clear()
    traffic.sent.clear()
    (report,) = await lives.compacted_streams(world, [MERGE], config=config)
    assert report.error is None
    assert not report.left_out
    ReadCheck(world).run()
    return world, traffic, report


async def test_small_objects_become_one_put() -> None:
    world, traffic, report = await merged([3 * MIB, 6 * MIB, 4 * MIB])
    assert traffic.copied == []
    assert len(traffic.sent) == 1
    assert (report.figures.puts, report.figures.parts) == (1, 0)
    assert report.figures.gets == len(traffic.gets) == 6, "an index and the blocks of each"
    (one,) = [item for item in world.committed() if item.object_id == report.made[0].object_id]
    assert one.crc32c >= 0, "what was sent has a checksum"


async def test_large_objects_are_copied_inside_the_store() -> None:
    _, traffic, report = await merged([3 * MIB, 6 * MIB, 24 * MIB, MIB])
    assert len(traffic.copied) == 1
    assert report.figures.bytes_copied == traffic.copied[0][1] - traffic.copied[0][0] > 24 * MIB
    assert report.figures.bytes_read == sum(traffic.gets), "for their checksums, those copied too"
    assert report.figures.bytes_written < 11 * MIB
    assert report.figures.bytes_written == sum(traffic.sent) < 11 * MIB
    assert [size > 5 * MIB for size in traffic.sent] == [True, False]


async def test_the_front_that_is_trimmed_is_cut_off_between_blocks() -> None:
    world, traffic, report = await merged([20 * MIB, 2 * MIB, 31 * MIB], trim=10)
    (made,) = report.made
    assert made.range == StreamRange(0, 10, 106)
    index_block = 10 * (512 * 1024 + 10 + 33)
    assert sorted(traffic.copied)[-1][0] == index_block
    assert len(traffic.copied) == 2
    assert world.stored_ranges(0) == [(made.object_id, 10, 106)]


@pytest.mark.parametrize("lacks", ["nothing", "a checksum", "its front"])
async def test_what_the_store_copied_has_a_checksum_if_every_source_has(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "a checksum":
        asked = Listing.stream_objects

        async def objects(listing: Listing, wanted: Iterable[ListedRange]) -> list[StreamObject]:
            first, *others = await asked(listing, wanted)
            return [replace(first, crc32c=ANY_CRC), *others]

        monkeypatch.setattr(Listing, "stream_objects", objects)

    world = await world_of([600] * 3, block=200)
    if lacks == "its front":
        await world.trim(0, 1)
    report = await compacted(world)
    assert report.figures.copies
    (one,) = world.committed()
    assert (one.crc32c >= 0) == (lacks == "nothing")
    ReadCheck(world).run()


async def test_copied_and_rewritten_objects_have_the_same_bytes() -> None:
    sizes = [4 * MIB, 6 * MIB, 23 * MIB, MIB, 5 * MIB + 12]
    results = []
    for may_copy in (True, False):
        config = replace(AS_IN_PRODUCT, server_side_copy=may_copy)
        world, traffic, report = await merged(sizes, config, trim=2)
        assert bool(traffic.copied) is may_copy
        assert max(traffic.gets) <= 32 * MIB
        assert max(traffic.sent) <= 32 * MIB + 4096
        key = key_for(report.made[0].object_id, NAMESPACE)
        results.append(world.store.objects()[key])
    assert results[0] == results[1]


async def test_a_store_that_refuses_to_copy_is_asked_once() -> None:
    world = await world_of([900] * 3)
    world.store.fail_next("copy_part", StoreRejectedError("no copies here"), times=99)
    report = await compacted(world)
    assert report.error is None
    assert report.figures.copies == 0
    ReadCheck(world).run()
    assert not list(world.store.list_multipart_uploads())


async def test_a_cancelled_upload_is_aborted() -> None:
    world = await world_of([900] * 3)
    begun = asyncio.Event()

    async def look(step: Step) -> None:
        if step.name == "copy_part":
            begun.set()

    with lives.stream_compactor(world, Steps(hook=look), lives.TINY) as made:
        task = asyncio.ensure_future(made.compact(0, MERGE))
        async with asyncio.timeout(60):
            await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not list(world.store.list_multipart_uploads())
    ReadCheck(world).run()


@pytest.mark.parametrize(("threshold", "entries"), [(185, 4), (186, 2)])
async def test_entries_are_joined_up_to_the_threshold(threshold: int, entries: int) -> None:
    world = await world_of([50] * 4)
    report = await compacted(world, index_merge_bytes=threshold)
    (made,) = report.made
    assert made.size == 4 * 93 + entries * 36 + 48
    ReadCheck(world).run()


# ---- sources that can't be used ----


def _damaged(data: bytes) -> bytes:
    """Flip a bit of a payload: only a checksum can tell."""
    return data[:60] + bytes([data[60] ^ 1]) + data[61:]


@pytest.mark.parametrize("size", [40, 400])
@pytest.mark.parametrize("fault", ["gone", "cut", "payload", "index"])
async def test_an_unusable_source_is_named_and_others_are_compacted(fault: str, size: int) -> None:
    world = await world_of([size] * 6)
    ids = [object_id for object_id, _, _ in world.stored_ranges(0)]
    bad = key_for(ids[2], NAMESPACE)
    data = world.store.objects()[bad]
    if fault == "gone":
        world.store.delete_many([bad])
    else:
        changed = {
            "cut": data[:-10],
            "payload": _damaged(data),
            "index": data[:-70] + bytes(20) + data[-50:],
        }
        world.store.put(bad, changed[fault])
    report = await compacted(world, server_side_copy=False)
    assert report.error is None
    assert list(report.left_out) == [ids[2]]
    assert [list(output.source_ids) for output in report.made] == [ids[:2], ids[3:]]
    world.store.put(bad, data)
    ReadCheck(world).run()


async def test_an_object_that_holds_other_offsets_than_its_metadata_is_left_out() -> None:
    world = await world_of([40] * 4)
    world.tells_facts = False
    ids = [object_id for object_id, _, _ in world.stored_ranges(0)]
    keys = [key_for(object_id, NAMESPACE) for object_id in ids]
    stored = world.store.objects()
    right = stored[keys[1]]
    world.store.put(keys[1], stored[keys[2]])
    report = await compacted(world, whole_object_bytes=0)
    assert list(report.left_out) == [ids[1]]
    assert "its metadata [1, 2)" in report.left_out[ids[1]]
    world.store.put(keys[1], right)
    ReadCheck(world).run()


async def test_a_group_with_too_many_entries_is_made_in_pieces() -> None:
    world = await world_of([20] * 6, block=5)
    report = await compacted(world, max_source_entries=9)
    assert [len(output.source_ids) for output in report.made] == [2, 2, 2]
    ReadCheck(world).run()


async def test_a_source_that_shrinks_after_it_was_looked_at_is_left_out() -> None:
    world = await world_of([400] * 3)
    last = key_for(world.stored_ranges(0)[2][0], NAMESPACE)
    data = world.store.objects()[last]

    async def shrink(step: Step) -> None:
        if step.name == "PrepareObjects":
            world.store.put(last, data[:200])

    report = await compacted(world, steps=Steps(hook=shrink), server_side_copy=False)
    assert [len(output.source_ids) for output in report.made] == [2]
    (reason,) = report.left_out.values()
    assert "were requested" in reason
    world.store.put(last, data)
    ReadCheck(world).run()


async def test_small_sources_are_fetched_once_as_far_as_there_is_room() -> None:
    blocks = 5  # four sources, of which the last goes into two parts
    for whole_bytes, kept in ((250, 1), (0, 0)):
        world = await world_of([50] * 4)
        report = await compacted(world, whole_object_bytes=whole_bytes, server_side_copy=False)
        assert report.figures.gets == 4 + blocks - kept, "300 bytes are room for one"


# ---- composites ----


async def test_a_composite_of_composites_links_their_objects() -> None:
    world = await world_of([500] * 3)
    check = ReadCheck(world)
    first = [object_id for object_id, _, _ in world.stored_ranges(0)]
    (composite,) = await _linked(world)
    assert composite.source_ids == tuple(first)
    assert {world.state(object_id) for object_id in first} == {ObjectState.LINKED}
    for _ in range(2):
        await world.upload(lives.NODE, {0: [(1, 450)]}, [0])
    second = [object_id for object_id, _, _ in world.stored_ranges(0)][1:]
    (joined,) = await _linked(world)
    assert joined.source_ids == (composite.object_id, *second)
    await check.swept()
    assert world.state(composite.object_id) is ObjectState.REMOVED, "its links alone went"
    data = world.store.objects()[key_for(joined.object_id, NAMESPACE)]
    assert [link.object_id for link in decode_composite(data).links] == [*first, *second]
    assert world.stored_ranges(0) == [(joined.object_id, 0, 5)]


async def test_what_a_composite_no_longer_needs_is_let_go_of() -> None:
    world = await world_of([500] * 4)
    check = ReadCheck(world)
    linked = [object_id for object_id, _, _ in world.stored_ranges(0)]
    await _linked(world)
    await world.trim(0, 2)
    report = await compacted(world, StreamCompaction.PRUNE_LINKS)
    (made,) = report.made
    assert (made.range, made.composite) == (StreamRange(0, 2, 4), True)
    await world.sweep()
    check.run()
    gone = [object_id for object_id in linked if world.state(object_id) is ObjectState.REMOVED]
    assert gone == linked[:2]
    assert not world.strays()
    again = await lives.compact_streams(world, [StreamCompaction.PRUNE_LINKS])
    assert again == [], "there is nothing more to let go of"


async def test_dirty_bytes_inside_an_object_that_is_needed_cost_no_new_composite() -> None:
    world = await world_of([2000] * 2, block=200)
    await _linked(world)
    await world.trim(0, 9)
    steps = Steps()
    assert await lives.compact_streams(world, [StreamCompaction.PRUNE_LINKS], steps) == []
    assert "PrepareObjects" not in steps.names


async def test_expired_objects_go_in_batches_and_a_repetition_is_no_error() -> None:
    world = await world_of([50] * 7)
    await world.trim(0, 6)
    commits: Counter[str] = Counter()

    async def count(step: Step) -> None:
        commits[f"{step.name} {step.done}"] += 1

    steps = Steps(Fault(6, Fate.LOSE_ANSWER), hook=count)
    report = await compacted(world, StreamCompaction.REMOVE_EXPIRED, steps, expired_batch=4)
    assert steps.names[5] == "CommitStreamObject"
    assert len(report.removed_ids) == 6
    assert report.error is None
    assert commits["CommitStreamObject True"] == 3, "two batches, one of them twice"
    await world.sweep()
    assert not world.strays()


async def _linked(world: World) -> list[OutputObject]:
    return (await compacted(world, StreamCompaction.LINK)).made


# ---- configuration ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fetched_bytes": MIB}, "2 \\* min_part_bytes"),
        ({"index_merge_bytes": 0}, "index_merge_bytes is 0"),
        ({"expired_batch": 20_000}, "at most 10000"),
        ({"group_rules": {}}, "group_rules has no REMOVE_EXPIRED"),
        ({"stream_object_id_ttl_s": 0.001}, "stream_object_id_ttl_s"),
    ],
)
def test_bounds_that_could_never_be_met_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompactionConfig(**fields)  # type: ignore[arg-type]


def test_the_product_copies_by_tiers_and_links_as_it_is() -> None:
    rules = CompactionConfig().group_rules
    assert {kind for kind in StreamCompaction if rules[kind].is_tiered} == {
        StreamCompaction.GATHER_SMALL,
        StreamCompaction.MERGE_SMALL,
        StreamCompaction.MERGE_LARGE,
    }
    assert rules[StreamCompaction.LINK].group_bytes == 10 * GIB
    assert rules_for(StreamCompaction.LINK, 5).group_bytes == 5
