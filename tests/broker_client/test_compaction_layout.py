"""Blocks lie in memory as they are written, and outputs are the same in one request or in parts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import google_crc32c
import numpy as np
import pytest

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.output_writer import OutputWriter
from streammeta.client.compaction.report import Figures
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.storage.compaction import layout as compaction_layout
from streammeta.storage.compaction.entries import EntryTable, live_entries
from streammeta.storage.compaction.plan import CommitPlan, CompactionLimits, OutputKind
from streammeta.storage.compaction.planner import plan_compaction
from streammeta.storage.compaction.verification import DamagedBlockError, check_blocks
from streammeta.storage.errors import AccessDeniedError, StoreUnavailableError
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import MIN_PART_SIZE, MultipartUpload, Tags
from tests.kit.built_objects import ObjectBuilder
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.seeds import seeds

PART = 700
Bucket = Mapping[int, bytes]


def entries_of(bucket: Bucket) -> EntryTable:
    tables = []
    for object_id, data in bucket.items():
        reader = ObjectReader(str(object_id), len(data))
        while (needed := reader.needed) is not None:
            reader.receive(data[needed.start : needed.end])
        tables.append(EntryTable.of_index(object_id, reader.index))
    return EntryTable.concatenate(tables)


def fill(layout: compaction_layout.Layout, bucket: Bucket) -> bytearray:
    """Do what the reads say, in any order, as a store would."""
    buffer, dropped = bytearray(layout.size), bytearray(compaction_layout.DEAD_BYTES_MAX)
    for read in layout.reads:
        data = bucket[read.object_id][read.position : read.position + read.size]
        at = 0
        for view in read.views(memoryview(buffer), memoryview(dropped)):
            view[:] = data[at : at + len(view)]
            at += len(view)
        assert at == read.size == len(data)
    return buffer


def write_out(commit: CommitPlan, bucket: Bucket, max_read_bytes: int) -> list[bytes]:
    """Carry a commit out in memory; return the bytes of its outputs."""
    pieces = [o for it in commit.iterations for o in it.outputs if o.kind is OutputKind.COMPACT]
    so_far, whole, objects, carried = compaction_layout.StreamSetObjectSoFar(), bytearray(), [], b""
    for iteration in commit.iterations:
        layout = compaction_layout.lay_out(
            iteration.outputs,
            so_far,
            ends_set_object=bool(pieces) and pieces[-1] in iteration.outputs,
            part_size=PART,
            max_read_bytes=max_read_bytes,
        )
        assert all(read.size <= max_read_bytes for read in layout.reads)
        buffer = fill(layout, bucket)
        check_blocks(memoryview(buffer), layout.places, layout.entries, str)
        for output in layout.outputs:
            buffer[output.trailer_start : output.end] = output.trailer
            if output.output.kind is OutputKind.SPLIT:
                objects.append(bytes(buffer[output.start : output.end]))
                continue
            assert output.carried == len(carried)
            buffer[output.start : output.start + output.carried] = carried
            piece = bytes(buffer[output.start : output.end])
            cut = len(piece) if output.trailer else len(piece) - len(piece) % PART
            whole += piece[:cut]
            carried = piece[cut:]
    return [*objects, *([bytes(whole)] if pieces else [])]


def records_in(data: bytes) -> list[RecordBatch]:
    reader = ObjectReader("output", len(data))
    while (needed := reader.needed) is not None:
        reader.receive(data[needed.start : needed.end])
    found: list[RecordBatch] = []
    for entry in reader.index:
        found += reader.records(entry, data[entry.position : entry.position + entry.size])
    return found


def two_streams(dead: int) -> tuple[dict[int, bytes], EntryTable]:
    """One object whose streams 0 and 2 are live, with about `dead` bytes of stream 1 between."""
    builder = ObjectBuilder(50)
    for stream, size in ((0, 40_000), (1, dead), (2, 50_000)):
        builder.write([RecordBatch(stream, 0, 0, 1, bytes(size))])
    bucket = {7: builder.finish().data}
    return bucket, live_entries(entries_of(bucket), {0: 0, 2: 0})


@pytest.mark.parametrize(("dead", "reads"), [(1_000, 1), (39_000, 1), (45_000, 2), (70_000, 2)])
def test_few_dead_bytes_are_read_along_but_never_more_than_wanted(dead: int, reads: int) -> None:
    bucket, live = two_streams(dead)
    plan = plan_compaction(live, CompactionLimits(split_size=1), sharing_only=False)
    (iteration,) = plan.commits[0].iterations
    layout = compaction_layout.lay_out(
        iteration.outputs,
        compaction_layout.StreamSetObjectSoFar(),
        ends_set_object=False,
        part_size=PART,
        max_read_bytes=1 << 20,
    )
    assert len(layout.reads) == reads
    assert [len(records_in(data)) for data in write_out(plan.commits[0], bucket, 1 << 20)] == [1, 1]


def test_a_block_that_is_not_what_the_index_says_is_found() -> None:
    bucket, live = two_streams(100)
    buffer = bytearray(bucket[7])
    check_blocks(memoryview(buffer), live.position, live, str)
    for position, what in ((0, "magic"), (10, "record"), (18, "stream"), (34, "offset")):
        damaged = bytearray(buffer)
        damaged[int(live.position[1]) + position] ^= 1
        with pytest.raises(DamagedBlockError, match="object 7") as raised:
            check_blocks(memoryview(damaged), live.position, live, str)
        assert raised.value.object_id == 7, what
        assert raised.value.position == int(live.position[1]), what


def test_a_read_has_as_many_bytes_as_its_places() -> None:
    read = compaction_layout.PlacedRead(1, 0, 30, np.array([5, -1, 50]), np.array([10, 15, 5]))
    views = read.views(
        memoryview(bytearray(60)), memoryview(bytearray(compaction_layout.DEAD_BYTES_MAX))
    )
    assert [len(view) for view in views] == [10, 15, 5]


CONFIG = CompactionConfig(store_patience_s=0.0, part_bytes=MIN_PART_SIZE, put_bytes=MIN_PART_SIZE)
KEY = "key"


@asynccontextmanager
async def writing(store: MemoryObjectStore, figures: Figures) -> AsyncIterator[OutputWriter]:
    calls = StoreCalls(store, CONFIG)
    try:
        yield OutputWriter(calls, KEY, 7, CONFIG, figures)
    finally:
        calls.close()


@pytest.mark.parametrize("seed", seeds(2, slow=4))
async def test_pieces_of_any_size_make_one_object_of_equal_parts(seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(rng.choice([0, 1, 3 * MIN_PART_SIZE, 3 * MIN_PART_SIZE + 77]) + 1)
    cuts = sorted(rng.randrange(len(data)) for _ in range(rng.randint(0, 5)))
    store, figures = MemoryObjectStore(), Figures()
    async with writing(store, figures) as writer:
        for start, end in zip([0, *cuts], cuts, strict=False):
            await writer.write(memoryview(writer.carried + data[start:end]))
            assert len(writer.carried) < MIN_PART_SIZE
        last = data[cuts[-1] :] if cuts else data
        written = await writer.finish(memoryview(writer.carried + last))
    assert store.objects() == {KEY: data}, f"seed {seed}"
    assert (written.object_id, written.size) == (7, len(data))
    assert written.crc32c == google_crc32c.value(data)
    assert figures.bytes_written == len(data)
    parts = -(-len(data) // MIN_PART_SIZE)
    assert (figures.puts, figures.multiparts, figures.parts) in [(1, 0, 0), (0, 1, parts)]


@pytest.mark.parametrize("size", [MIN_PART_SIZE, MIN_PART_SIZE + 1])
async def test_only_what_is_larger_than_one_request_goes_in_parts(size: int) -> None:
    store, figures = MemoryObjectStore(), Figures()
    async with writing(store, figures) as writer:
        await writer.finish(memoryview(bytes(size)))
    assert figures.multiparts == (size > MIN_PART_SIZE)
    assert not list(store.list_multipart_uploads())


@pytest.mark.parametrize("fails", ["upload_part", "complete_multipart"])
async def test_what_is_not_finished_is_dropped(fails: str) -> None:
    store, figures = MemoryObjectStore(), Figures()
    store.fail_next(fails, AccessDeniedError("no"))
    async with writing(store, figures) as writer:
        with pytest.raises(AccessDeniedError):
            await writer.finish(memoryview(bytes(3 * MIN_PART_SIZE)))
        assert len(list(store.list_multipart_uploads())) == 1
        await writer.abort()
        await writer.abort()
    assert not list(store.list_multipart_uploads())
    assert not store.objects()


async def test_an_upload_whose_start_was_not_answered_is_dropped_too() -> None:
    class Forgetful(MemoryObjectStore):
        def start_multipart(self, key: str, *, tags: Tags | None = None) -> MultipartUpload:
            super().start_multipart(key, tags=tags)
            raise StoreUnavailableError("the answer is lost")

    store = Forgetful()
    other = MemoryObjectStore.start_multipart(store, KEY + "/longer")
    async with writing(store, Figures()) as writer:
        with pytest.raises(StoreUnavailableError):
            await writer.finish(memoryview(bytes(3 * MIN_PART_SIZE)))
        await writer.abort()
    assert list(store.list_multipart_uploads()) == [other], "only its own"


async def test_an_upload_that_can_not_be_dropped_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store, figures = MemoryObjectStore(), Figures()
    store.fail_next("abort_multipart", AccessDeniedError("not that either"))
    async with writing(store, figures) as writer:
        await writer.write(memoryview(bytes(MIN_PART_SIZE)))
        await writer.abort()
    assert "could not be dropped (not that either)" in caplog.text
