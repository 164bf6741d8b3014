"""Damage of an object with a recorded checksum is never handed out, whatever the damage."""

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from streammeta.client.config import ReaderConfig, ReaderStats
from streammeta.client.errors import CorruptObjectError
from streammeta.client.reading.lookups import UNKNOWN_CRC, Slice
from streammeta.client.reading.object_source import ObjectSource, learn_checksums, merge_blocks
from streammeta.client.resources.resources import StoreThreads
from streammeta.reconcile.findings.deep_read import reading_of
from streammeta.reconcile.vocabulary.verdicts import Reading
from streammeta.storage.errors import CorruptObjectError as BrokenFormatError
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import common_pb2
from tests.kit.built_objects import ObjectBuilder, damage
from tests.kit.memory_store import MemoryObjectStore

NAMESPACE = "n"
STREAMS, BLOCKS = 3, 4
SIZES = {"fetched whole": 600, "read in pieces": 20_000}


def records(size: int, salt: int) -> list[RecordBatch]:
    rng = random.Random(salt)
    return [
        RecordBatch(stream, 0, 10 * number, 10, rng.randbytes(size))
        for stream in range(STREAMS)
        for number in range(BLOCKS)
    ]


def encoded(size: int, salt: int = 1) -> bytes:
    builder = ObjectBuilder(size)
    for stream in range(STREAMS):
        builder.write([record for record in records(size, salt) if record.stream_id == stream])
    return builder.finish().data


def blocks_of(data: bytes) -> list[tuple[int, int]]:
    reader = ObjectReader("x", len(data))
    while (needed := reader.needed) is not None:
        reader.receive(data[needed.start : needed.end])
    return [(entry.position, entry.position + entry.size) for entry in reader.index]


def piece_of(data: bytes, *, has_checksum: bool = True) -> Slice:
    crc32c = ObjectChecksum.of(data).value if has_checksum else UNKNOWN_CRC
    kind = common_pb2.OBJECT_KIND_STREAM_SET
    return Slice(1, kind, 0, 10 * BLOCKS, len(data), crc32c=crc32c)


@asynccontextmanager
async def reading(
    store: MemoryObjectStore, verified_bytes: int = 1 << 20
) -> AsyncIterator[ObjectSource]:
    threads = StoreThreads(store, 1, "test")
    source = ObjectSource(threads, NAMESPACE, 1 << 20, 5.0, ReaderStats(), verified_bytes)
    try:
        yield source
    finally:
        source.close()
        threads.close()


async def read_all(source: ObjectSource, piece: Slice) -> list[RecordBatch]:
    """Read every stream of an object by blocks."""
    found: list[RecordBatch] = []
    for stream in range(STREAMS):
        index = await source.index(piece, stream)
        for wanted in merge_blocks(index.find(stream, 0, -1, 1 << 30, slice_start=0)):
            for decoded in await source.records(wanted):
                found += decoded
    return found


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("is_index_known", [False, True])
async def test_damage_of_checksummed_objects_is_seen(size: int, *, is_index_known: bool) -> None:
    """Before the first read, and after the blocks' checksums were learned."""
    rng, data, other = random.Random(size), encoded(size), encoded(size, salt=2)
    piece, key, right = piece_of(data), key_for(1, NAMESPACE), records(size, 1)
    unseen = harmless = 0
    for _ in range(150):
        store = MemoryObjectStore()
        store.put(key, data)
        async with reading(store) as source:
            if is_index_known:
                assert await read_all(source, piece) == right
            store.put(key, damage(data, other, blocks_of(data), rng))
            with suppress(CorruptObjectError):
                found = await read_all(source, piece)
                harmless += found == right
                unseen += found != right
    assert unseen == 0
    assert harmless == 0 or is_index_known, "what lies behind the blocks is not read again"


async def test_without_a_checksum_damage_of_payloads_is_what_nobody_can_see() -> None:
    """The share that makes checksums worth their read; objects of others are read all the same."""
    rng, data, other = random.Random(5), encoded(2000), encoded(2000, salt=2)
    key, piece = key_for(1, NAMESPACE), piece_of(data, has_checksum=False)
    unseen = 0
    for _ in range(100):
        store = MemoryObjectStore()
        store.put(key, damage(data, other, blocks_of(data), rng))
        async with reading(store) as source:
            with suppress(CorruptObjectError):
                unseen += await read_all(source, piece) != records(2000, 1)
    assert 20 < unseen < 80


class TornTransfer(MemoryObjectStore):
    """Sends other bytes than it has, once: at the read of this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = itertools.count(number - 1, -1)

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get_range(key, start, end)
        return data if next(self.left) else data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_a_torn_transfer_is_no_damage(size: int) -> None:
    data = encoded(size)
    for number in range(1, 6):
        store = TornTransfer(number)
        store.put(key_for(1, NAMESPACE), data)
        async with reading(store) as source:
            assert await read_all(source, piece_of(data)) == records(size, 1)


async def test_damage_is_named_by_object_block_and_position() -> None:
    store, data = MemoryObjectStore(), encoded(20_000)
    key = key_for(1, NAMESPACE)
    store.put(key, data)
    async with reading(store) as source:
        await read_all(source, piece_of(data))
        start, end = blocks_of(data)[5]
        store.put(key, data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:])
        with pytest.raises(CorruptObjectError, match=f"{start}.*10.*20") as caught:
            await read_all(source, piece_of(data))
        assert (caught.value.object_id, caught.value.stream_id) == (1, 1)


async def test_larger_objects_are_read_by_blocks_alone() -> None:
    data = encoded(20_000)
    store = MemoryObjectStore()
    store.put(key_for(1, NAMESPACE), data)
    async with reading(store, verified_bytes=len(data) - 1) as source:
        await source.index(piece_of(data), 0)
        assert source.stats.bytes_fetched < len(data) // 2
    assert ReaderConfig().verified_bytes == 128 * 1024, "what is one request anyway"


def test_pieces_of_any_size_teach_the_same_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(600)
    reader = ObjectReader("x", len(data))
    while (needed := reader.needed) is not None:
        reader.receive(data[needed.start : needed.end])
    crc32c = ObjectChecksum.of(data).value
    right = [ObjectChecksum.of(data[start:end]).value for start, end in blocks_of(data)]
    for size in (1, 7, 633, 634, 5000, 1 << 20):
        monkeypatch.setattr("streammeta.client.reading.object_source.PIECE_BYTES", size)
        learned = learn_checksums(
            lambda start, end: data[start:end], len(data), reader.index, crc32c, "x"
        )
        assert list(learned.blocks) == right
        assert data.endswith(learned.tail)
        assert len(learned.tail) == len(data) - reader.index.data_size
    with pytest.raises(BrokenFormatError, match="CRC-32C"):
        learn_checksums(lambda s, e: data[s:e], len(data), reader.index, crc32c ^ 1, "x")


def test_a_deep_run_sees_every_damage_of_an_object_with_a_checksum() -> None:
    rng, data, other = random.Random(3), encoded(600), encoded(600, salt=2)
    crc32c, kind = ObjectChecksum.of(data).value, common_pb2.OBJECT_KIND_STREAM_SET
    for _ in range(200):
        store = MemoryObjectStore()
        store.put("k", damage(data, other, blocks_of(data), rng))
        assert reading_of(store, "k", kind, crc32c) is Reading.CHECKSUM_DIFFERS
