"""Readers give back the offsets of the stream, whatever offsets the bytes of an object count."""

from __future__ import annotations

import random

import pytest

from streammeta.client import ReaderConfig, errors
from streammeta.client.parts import StreamReader
from streammeta.client.reading.object_source import WHOLE_OBJECT_BYTES
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1.common_pb2 import OBJECT_KIND_STREAM
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.reader_world import World, placed

STREAMS = 3
PAYLOADS = {"fetched whole": 20, "read in pieces": WHOLE_OBJECT_BYTES // 8}


def filled(world: World, payload: int) -> None:
    """Commit relative objects at many bases, and normal ones between them."""
    world.is_relative = lambda object_id: object_id % 3 != 1
    world.create(STREAMS)
    for number in range(6):
        counts = {stream: 2 + (stream + number) % 3 for stream in range(STREAMS)}
        world.commit(counts, payload=payload, span=3)


async def read_through(reader: StreamReader, stream_id: int, max_bytes: int) -> list[RecordBatch]:
    found: list[RecordBatch] = []
    while records := await reader.read(
        stream_id, found[-1].end_offset if found else 0, max_bytes=max_bytes
    ):
        found += records
    return found


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("verified", [0, 1 << 30], ids=["unverified", "verified"])
@pytest.mark.parametrize("cache", [0, 1 << 30], ids=["no cache", "cache"])
async def test_streams_come_back_at_their_offsets(payload: int, verified: int, cache: int) -> None:
    async with placed() as place:
        world = place.world
        filled(world, payload)
        config = ReaderConfig(block_cache_bytes=cache, verified_bytes=verified)
        async with place.reader(config) as reader:
            for _ in range(2):  # the second time from memory, if there is any
                for stream_id, stream in world.streams.items():
                    assert await read_through(reader, stream_id, 2 * payload) == stream.records
            bulk = {stream_id: got async for stream_id, got in reader.read_streams(range(STREAMS))}
            assert bulk == {stream_id: s.records for stream_id, s in world.streams.items()}


async def test_reads_inside_an_object_start_and_end_where_they_should() -> None:
    async with placed() as place:
        world = place.world
        filled(world, 20)
        async with place.reader() as reader:
            end = world.streams[0].end
            for start in range(end):
                for stop in range(start + 1, end + 1, 4):
                    assert await reader.read(0, start, stop) == world.streams[0].covering(
                        start, stop
                    ), f"[{start}, {stop})"


async def test_times_are_found_at_the_offsets_of_the_stream() -> None:
    async with placed() as place:
        world = place.world
        filled(world, 20)
        async with place.reader() as reader:
            for stream_id, stream in world.streams.items():
                for record in stream.records:
                    wanted = world.time_of(stream_id, record.base_offset)
                    found = await reader.offset_for_timestamp(
                        stream_id,
                        wanted,
                        timestamp_of=lambda r: world.time_of(r.stream_id, r.base_offset),
                    )
                    assert (found.offset, found.timestamp_ms) == (record.base_offset, wanted)


async def test_a_trim_inside_an_object_moves_no_offset() -> None:
    async with placed() as place:
        world = place.world
        filled(world, 20)
        world.trim(0, 7)
        async with place.reader() as reader:
            records = await reader.read(0, 7)
            assert records == world.streams[0].covering(7)[: len(records)]
            assert records[0].base_offset <= 7


@pytest.mark.parametrize("change", [-1, 1])
async def test_a_slice_of_another_length_than_the_stream_in_the_object_is_named(
    change: int,
) -> None:
    """Its start would not be the base, so every offset would be wrong."""
    async with placed() as place:
        world = place.world
        world.is_relative = lambda _: True
        world.create(1)
        world.commit({0: 4})
        world.streams[0].pieces[0].end += change
        world.streams[0].end += change
        async with place.reader() as reader:
            with pytest.raises(errors.CorruptObjectError, match=r"counts 4 offsets.*\[0, "):
                await reader.read(0, 0)


async def test_a_stream_object_is_never_relative() -> None:
    async with placed() as place:
        world = place.world
        world.is_relative = lambda _: True
        world.create(1)
        world.commit({0: 4})
        world.streams[0].pieces[0].kind = OBJECT_KIND_STREAM
        async with place.reader() as reader:
            with pytest.raises(errors.CorruptObjectError, match="footer magic"):
                await reader.read(0, 0)


async def test_no_changed_byte_of_structure_gives_wrong_records() -> None:
    """Flip each byte but those of payloads and epochs, which the format can't check."""
    async with placed() as place:
        world = place.world
        world.is_relative = lambda object_id: object_id == 1
        world.create(2)
        world.commit({0: 2, 1: 3}, payload=0)
        world.commit({0: 3, 1: 2}, payload=0)
        for stream in world.streams.values():
            stream.pieces[1].crc32c = -1
        key = key_for(1, NAMESPACE)
        data, rng = world.store.objects()[key], random.Random(1)
        wanted = [record.base_offset for record in world.streams[1].records]
        for at in range(len(data)):
            broken = bytearray(data)
            broken[at] ^= rng.randrange(1, 256)
            world.store.put(key, bytes(broken))
            async with place.reader() as reader:
                try:
                    found = await reader.read(1, 0)
                except errors.CorruptObjectError:
                    continue
                assert [record.base_offset for record in found] == wanted, f"byte {at}"
