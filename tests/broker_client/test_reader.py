"""A reader gives back what was committed, without gaps, or says exactly what is broken."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.client import ReaderConfig, WriterConfig, errors
from streammeta.client.parts import StreamQuery, StreamReader, StreamWriter
from streammeta.client.reading.object_source import Block, merge_blocks
from streammeta.storage.errors import WrongBucketError
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.reads import MAX_SPAN, MAX_UNUSED
from streammeta.v1.common_pb2 import OBJECT_KIND_STREAM
from tests.kit.built_objects import ObjectBuilder
from tests.kit.fake_broker import Broker, broker
from tests.kit.fake_cluster import NAMESPACE, FakeStream, Piece
from tests.kit.memory_store import MemoryObjectStore


@asynccontextmanager
async def written(
    streams: int, rounds: int, payload_bytes: int = 20
) -> AsyncIterator[tuple[Broker, StreamReader]]:
    """Yield a broker whose streams have `rounds` objects of 5 records, 2 offsets each."""
    settings = WriterConfig(linger_s=3600.0, block_bytes=3 * payload_bytes + 1)
    async with broker() as b:
        opened = await b.opened(streams)
        async with StreamWriter(b.session, b.store, settings) as writer:
            writer.attach(opened)
            for _ in range(rounds):
                for stream in opened:
                    for _ in range(5):
                        offset = writer.next_offset(stream.stream_id)
                        payload = payload_of(stream.stream_id, offset, payload_bytes)
                        await writer.append(stream.stream_id, payload, 2)
                await writer.flush()
        async with b.reader() as reader:
            yield b, reader


def payload_of(stream_id: int, offset: int, size: int) -> bytes:
    return random.Random(stream_id << 32 | offset).randbytes(size)


def bases(records: list[RecordBatch]) -> list[int]:
    return [record.base_offset for record in records]


async def read_all(reader: StreamReader, stream_id: int, *, bulk: bool) -> list[RecordBatch]:
    if not bulk:
        return await reader.read(stream_id, 0)
    ((_, records),) = [stream async for stream in reader.read_streams([stream_id])]
    return records


def replace_object(store: MemoryObjectStore, object_id: int, data: bytes) -> bytes:
    """Put other bytes in the place of an object; return what was there."""
    key = key_for(object_id, NAMESPACE)
    before = store.objects()[key]
    store.put(key, data)
    return before


async def test_a_read_covers_what_is_asked_and_no_further_batch() -> None:
    async with written(2, 3) as (_, reader):
        assert bases(await reader.read(1, 0)) == list(range(0, 30, 2))
        assert bases(await reader.read(1, 3, 9)) == [2, 4, 6, 8]
        assert bases(await reader.read(1, 9, 12)) == [8, 10], "across the join of two objects"
        assert bases(await reader.read(1, 29, 1000)) == [28]
        assert await reader.read(1, 30) == []
        for record in await reader.read(1, 0):
            assert record.payload == payload_of(1, record.base_offset, 20)


async def test_max_bytes_bounds_a_read_to_at_least_one_batch() -> None:
    async with written(2, 3) as (_, reader):
        assert bases(await reader.read(0, 0, max_bytes=1)) == [0]
        assert bases(await reader.read(0, 5, max_bytes=41)) == [4, 6, 8]
        assert [r.base_offset async for r in reader.iterate(0, 4, 8)] == [4, 6]


async def test_reads_that_make_no_sense_are_refused() -> None:
    async with written(1, 1) as (_, reader):
        for start, end, max_bytes in ((-1, None, 1), (5, 5, 1), (0, None, 0)):
            with pytest.raises(ValueError, match="expected"):
                await reader.read(0, start, end, max_bytes)


async def test_many_ranges_are_located_in_one_call() -> None:
    async with written(3, 2) as (b, reader):
        answers = await reader.locate([StreamQuery(i, 0) for i in (2, 9, 0)])
        assert [answer.error is None for answer in answers] == [True, False, True]
        assert isinstance(answers[1].error, errors.StreamNotFoundError)
        assert b.cluster.calls["GetObjects"] == 1


async def test_unknown_and_trimmed_offsets_are_named() -> None:
    async with written(1, 2) as (b, reader):
        with pytest.raises(errors.StreamNotFoundError, match="stream 77"):
            await reader.read(77, 0)
        with pytest.raises(errors.StreamNotFoundError, match="stream 77"):
            _ = [stream async for stream in reader.read_streams([0, 77])]
        b.cluster.map.streams[0].start = 4
        with pytest.raises(errors.OffsetTrimmedError, match=r"0.*4"):
            await reader.read(0, 0)
        assert [r.base_offset async for r in reader.iterate(0)] == list(range(4, 20, 2))
        ((_, records),) = [stream async for stream in reader.read_streams([0])]
        assert bases(records) == list(range(4, 20, 2))


@pytest.mark.parametrize("bulk_bytes", [1, 20_000, 64 << 20])
async def test_bulk_reads_give_every_stream_with_few_requests(bulk_bytes: int) -> None:
    async with written(300, 4) as (b, _):
        empty = (await b.opened(1))[0].stream_id
        reader = StreamReader(b.client, b.store, NAMESPACE, ReaderConfig(bulk_bytes=bulk_bytes))
        seen = []
        async for stream_id, records in reader.read_streams([*range(300), empty]):
            seen.append(stream_id)
            wanted = [] if stream_id == empty else list(range(0, 40, 2))
            assert bases(records) == wanted
            for record in records:
                assert record.payload == payload_of(stream_id, record.base_offset, 20)
        await reader.close()
        assert seen == sorted([*range(300), empty])
        assert b.cluster.calls["GetObjects"] == 1
        stored = sum(len(data) for data in b.store.objects().values())
        assert reader.stats.indexes_fetched == 4
        if bulk_bytes > stored:
            assert reader.stats.requests <= 12, "4 objects need an index and a range or two each"
        if bulk_bytes > 1:
            assert reader.stats.bytes_fetched < 2 * stored


async def test_bulk_reads_go_on_after_the_limit_of_one_answer() -> None:
    async with broker() as b:
        built = b.cluster.map.streams
        built[0] = FakeStream(0, opened=True, end=1100)
        for i in range(1100):
            builder = ObjectBuilder()
            builder.write([RecordBatch(0, 0, i, 1, b"x")])
            data = builder.finish().data
            b.store.put(key_for(i, NAMESPACE), data)
            built[0].pieces.append(Piece(i, OBJECT_KIND_STREAM, i, i + 1, len(data)))
        async with b.reader() as reader:
            ((_, records),) = [stream async for stream in reader.read_streams([0])]
        assert bases(records) == list(range(1100))


@pytest.mark.parametrize("bulk", [False, True])
async def test_an_object_compacted_away_under_the_reader_is_looked_up_again(bulk: bool) -> None:
    async with written(1, 1) as (b, reader):
        moved = key_for(500, NAMESPACE)
        old = key_for(0, NAMESPACE)
        stream = b.cluster.map.streams[0]

        async def compact(_: Any) -> None:
            """Let the first lookup answer with the old object, and take that away."""
            if b.cluster.calls["GetObjects"] == 1:
                b.store.put(moved, b.store.objects()[old])
                b.store.delete_many([old])
            else:
                stream.pieces[0].object_id = 500

        b.cluster.hooks["GetObjects"] = compact
        assert bases(await read_all(reader, 0, bulk=bulk)) == [0, 2, 4, 6, 8]
        assert b.cluster.calls["GetObjects"] == 2


@pytest.mark.parametrize("bulk", [False, True])
async def test_an_object_that_stays_missing_is_named(bulk: bool) -> None:
    async with written(2, 1) as (b, reader):
        key = key_for(0, NAMESPACE)
        b.store.delete_many([key])
        with pytest.raises(errors.MissingObjectError, match="stream 1") as caught:
            await read_all(reader, 1, bulk=bulk)
        assert (caught.value.key, caught.value.object_id) == (key, 0)


async def test_an_object_of_another_cluster_is_never_read() -> None:
    async with (
        written(1, 1) as (b, _),
        StreamReader(b.client, b.store, "_streammeta_other") as reader,
    ):
        with pytest.raises(WrongBucketError, match="_streammeta_other"):
            await reader.read(0, 0)


@pytest.mark.parametrize("kept", [0, 1, 100, -1], ids=["empty", "one byte", "head", "all but one"])
async def test_a_truncated_object_is_named(kept: int) -> None:
    async with written(2, 1) as (b, reader):
        replace_object(b.store, 0, b.store.objects()[key_for(0, NAMESPACE)][:kept])
        with pytest.raises(errors.CorruptObjectError, match=r"object 0 .*stream 1") as caught:
            await reader.read(1, 0)
        assert (caught.value.key, caught.value.stream_id) == (key_for(0, NAMESPACE), 1)


async def test_no_changed_byte_of_structure_gives_wrong_records() -> None:
    """Flip each byte but payload and epoch bytes, which the format can't check."""
    async with written(1, 1, payload_bytes=0) as (b, reader):
        data = b.store.objects()[key_for(0, NAMESPACE)]
        wanted = bases(await reader.read(0, 0))
        for at in range(len(data)):
            broken = bytearray(data)
            broken[at] ^= 0xFF
            replace_object(b.store, 0, bytes(broken))
            async with b.reader() as doubtful:
                with contextlib.suppress(errors.CorruptObjectError):
                    assert bases(await doubtful.read(0, 0)) == wanted, f"byte {at}"


@pytest.mark.parametrize(
    ("last", "held", "problem"),
    [
        (0, RecordBatch(8, 0, 0, 10, b"x"), r"no block at offset 0, but .* lists \[0, 10"),
        (1, RecordBatch(0, 0, 8, 12, b"x"), r"object 1 .* starts below offset 10"),
    ],
    ids=["lacks the listed range", "overlaps the object before"],
)
async def test_an_index_unlike_the_map_is_named(last: int, held: RecordBatch, problem: str) -> None:
    async with written(1, last + 1) as (b, reader):
        builder = ObjectBuilder()
        builder.write([held])
        other = builder.finish().data
        replace_object(b.store, last, other)
        b.cluster.map.streams[0].pieces[last].size = len(other)
        with pytest.raises(errors.CorruptObjectError, match=problem):
            await reader.read(0, 0)


async def test_an_answer_with_a_hole_is_refused() -> None:
    async with written(1, 3) as (b, reader):
        del b.cluster.map.streams[0].pieces[1]
        with pytest.raises(errors.ProtocolViolationError, match="10"):
            await reader.read(0, 0)


async def test_the_index_cache_serves_again_and_keeps_its_bound() -> None:
    async with written(1, 3) as (b, reader):
        await asyncio.gather(*(reader.read(0, at) for at in (0, 10, 20)))
        fetched = reader.stats.indexes_fetched
        await reader.read(0, 0)
        assert reader.stats.indexes_fetched == fetched
        small = StreamReader(b.client, b.store, NAMESPACE, ReaderConfig(index_cache_bytes=1))
        for _ in range(2):
            assert len(await small.read(0, 0)) == 15
        await small.close()
        assert small.stats.indexes_fetched == 6


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 12 << 20), st.integers(43, 5 << 20)),
        max_size=40,
    )
)
def test_merged_ranges_cover_each_block_once_within_bounds(raw: list[tuple[int, int, int]]) -> None:
    blocks = []
    ends = {0: 0, 1: 0, 2: 0}
    for object_id, gap, size in raw:
        position = ends[object_id] + gap
        ends[object_id] = position + size
        blocks.append(Block(object_id, IndexEntry(0, position, position + 1, 1, position, size)))
    ranges = merge_blocks(random.Random(1).sample(blocks, len(blocks)))
    covered = [block for range_ in ranges for block in range_.blocks]
    assert sorted(map(repr, covered)) == sorted(map(repr, blocks))
    for range_ in ranges:
        assert {block.object_id for block in range_.blocks} == {range_.object_id}
        assert range_.start == range_.blocks[0].entry.position
        used = sum(block.entry.size for block in range_.blocks)
        assert range_.end == range_.blocks[-1].range[1]
        assert len(range_.blocks) == 1 or range_.end - range_.start <= MAX_SPAN
        assert used >= (range_.end - range_.start) * (1 - MAX_UNUSED)
