"""Relative objects: offsets from 0 in the bytes, absolute ones for who knows the base."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.index_block import (
    FOOTER_SIZE,
    NORMAL_MAGIC,
    RELATIVE_MAGIC,
    Footer,
    IndexEntry,
    decode_footer,
    encode_footer,
)
from streammeta.storage.object_format.object_reader import ObjectReader, read_entry
from streammeta.storage.object_format.record import (
    INT64_MAX,
    RecordBatch,
    decode_blocks,
    shift_blocks,
)
from tests.kit.built_objects import BuiltObject, ObjectBuilder, built_object
from tests.kit.seeds import seeds

GOLDEN_SHA256 = "e495ad3a901802d478df35cb6d6d96d9e2ab2111881b4140e12ff15cc169a8dc"
GOLDEN = [
    [RecordBatch(3, 0, 700, 2, b"hi!"), RecordBatch(3, 0, 702, 1, b"")],
    [RecordBatch(9, 0, 5, 4, b"\xaa" * 70), RecordBatch(9, 0, 9, 1, b"\xbb")],
]
ENTRIES = [
    IndexEntry(3, 0, 3, 2, 0, 79),
    IndexEntry(9, 0, 4, 1, 79, 113),
    IndexEntry(9, 4, 5, 1, 192, 44),
]


def relative_object(streams: Sequence[Sequence[RecordBatch]], threshold: int) -> BuiltObject:
    return built_object(streams, threshold, relative=True)


def reader_of(data: bytes, *, accept_relative: bool = True) -> ObjectReader:
    reader = ObjectReader("test", len(data), accept_relative=accept_relative)
    while (needed := reader.needed) is not None:
        reader.receive(data[needed.start : needed.end])
    return reader


def random_streams(rng: random.Random) -> list[list[RecordBatch]]:
    streams = []
    for stream_id in sorted(rng.sample(range(100), rng.randint(1, 5))):
        at, records = rng.choice([0, 1, rng.randrange(1 << 40), INT64_MAX - 1000]), []
        for _ in range(rng.randint(1, 8)):
            count = rng.randint(1, 9)
            records.append(RecordBatch(stream_id, 0, at, count, rng.randbytes(rng.randint(0, 60))))
            at += count
        streams.append(records)
    return streams


def test_the_golden_relative_object_holds_in_both_directions() -> None:
    built = relative_object(GOLDEN, 64)
    assert hashlib.sha256(built.data).hexdigest() == GOLDEN_SHA256
    assert built.data[-FOOTER_SIZE:].hex() == (
        "00000000000000ec" + "0000006c" + "00" * 28 + "88e241b785f4cff9"
    )
    reader = reader_of(built.data)
    assert reader.relative
    assert list(reader.index) == list(built.entries) == ENTRIES


@pytest.mark.parametrize("seed", seeds(10, slow=20))
def test_records_come_back_at_their_offsets(seed: int) -> None:
    rng = random.Random(seed)
    streams = random_streams(rng)
    data = relative_object(streams, rng.choice([1, 40, 1000])).data
    bases = {records[0].stream_id: records[0].base_offset for records in streams}
    reader = reader_of(data)
    found: list[RecordBatch] = []
    for entry in reader.index:
        block = memoryview(data)[entry.position : entry.position + entry.size]
        base = bases[entry.stream_id]
        found += read_entry(entry.shifted(base), block, "test", base=base)
    assert found == [record for records in streams for record in records], f"seed {seed}"
    assert {stream: bases[stream] + reader.index.end_of(stream) for stream in bases} == {
        records[0].stream_id: records[-1].end_offset for records in streams
    }
    assert reader.index.end_of(1000) == 0


@pytest.mark.parametrize("seed", seeds(10, slow=20))
def test_shifted_blocks_are_those_of_a_normal_object(seed: int) -> None:
    """Byte for byte, and back again."""
    rng = random.Random(seed)
    streams, threshold = random_streams(rng), rng.choice([1, 40, 1000])
    normal, relative = built_object(streams, threshold), relative_object(streams, threshold)
    bases = {records[0].stream_id: records[0].base_offset for records in streams}
    buffer = bytearray(relative.data)
    for entry in relative.entries:
        base = bases[entry.stream_id]
        block = memoryview(buffer)[entry.position : entry.position + entry.size]
        end = shift_blocks(block, entry.stream_id, entry.start_offset, base)
        assert end == entry.end_offset + base, f"seed {seed}"
    size = sum(entry.size for entry in normal.entries)
    assert buffer[:size] == normal.data[:size], f"seed {seed}"
    for entry in normal.entries:
        block = memoryview(buffer)[entry.position : entry.position + entry.size]
        shift_blocks(block, entry.stream_id, entry.start_offset, -bases[entry.stream_id])
    assert buffer == relative.data, f"seed {seed}"


def test_a_reader_that_knows_no_bases_refuses_the_object() -> None:
    data = relative_object(GOLDEN, 64).data
    with pytest.raises(CorruptObjectError, match="footer magic") as caught:
        reader_of(data, accept_relative=False)
    assert f"{RELATIVE_MAGIC:#018x}" in str(caught.value)
    for composite in (False, True, None):
        with pytest.raises(CorruptObjectError, match="footer magic"):
            decode_footer(memoryview(data), len(data), composite=composite)
    with pytest.raises(CorruptObjectError, match="footer magic"):
        decode_footer(memoryview(data), len(data), composite=True, accept_relative=True)
    for kind in (False, None):
        footer = decode_footer(memoryview(data), len(data), composite=kind, accept_relative=True)
        assert footer == Footer(236, 108, relative=True)


def test_a_normal_object_is_not_relative() -> None:
    builder = ObjectBuilder(64)
    builder.write(GOLDEN[0])
    assert not reader_of(builder.finish().data).relative


def test_a_composite_is_never_relative() -> None:
    with pytest.raises(ValueError, match="composite"):
        encode_footer(Footer(0, 0, composite=True, relative=True))


@pytest.mark.parametrize(
    "writes",
    [
        [[RecordBatch(1, 0, 1, 1, b"")]],
        [[RecordBatch(1, 0, 0, 2, b""), RecordBatch(1, 0, 3, 1, b"")]],
        [[RecordBatch(1, 0, 0, 2, b"")], [RecordBatch(1, 0, 3, 1, b"")]],
        [[RecordBatch(1, 0, 0, 2, b"")], [RecordBatch(2, 0, 2, 1, b"")]],
    ],
    ids=["start", "gap", "gap between writes", "next stream"],
)
def test_a_relative_object_counts_from_zero_without_gaps(
    writes: Sequence[Sequence[RecordBatch]],
) -> None:
    builder = ObjectBuilder(64, relative=True)
    for records in writes[:-1]:
        builder.write(records)
    before = builder.data_size
    with pytest.raises(ValueError, match="relative object start at 0"):
        builder.write(writes[-1])
    assert builder.data_size == before


@pytest.mark.parametrize("offsets", [(5, 6), (0, 2)], ids=["start", "gap"])
def test_an_index_that_does_not_count_from_zero_is_corrupt(offsets: tuple[int, int]) -> None:
    builder = ObjectBuilder(1)
    builder.write([RecordBatch(1, 0, offset, 1, b"x") for offset in offsets])
    data = builder.finish().data
    assert data.endswith(struct.pack(">Q", NORMAL_MAGIC))
    forged = data[:-8] + struct.pack(">Q", RELATIVE_MAGIC)
    with pytest.raises(CorruptObjectError, match="every relative object"):
        reader_of(forged)


def test_a_base_that_passes_the_largest_offset_is_corrupt() -> None:
    data = relative_object(GOLDEN, 64).data
    base = INT64_MAX - 2
    block = memoryview(data)[:79]
    with pytest.raises(CorruptObjectError, match="below 2\\^63"):
        read_entry(ENTRIES[0].shifted(base), block, "test", base=base)
    with pytest.raises(CorruptObjectError, match="within 64 bits"):
        shift_blocks(memoryview(bytearray(block)), 3, 0, base)


def test_a_wrong_base_is_seen_when_the_index_says_otherwise() -> None:
    data = relative_object(GOLDEN, 64).data
    with pytest.raises(CorruptObjectError, match="record 0"):
        read_entry(ENTRIES[0].shifted(700), memoryview(data)[:79], "test", base=699)


@pytest.mark.parametrize(
    ("stream_id", "start"), [(4, 0), (3, 1)], ids=["another stream", "another offset"]
)
def test_blocks_of_others_are_not_shifted(stream_id: int, start: int) -> None:
    block = bytearray(relative_object(GOLDEN, 64).data[:79])
    with pytest.raises(CorruptObjectError, match="record to move"):
        shift_blocks(memoryview(block), stream_id, start, 10)


@pytest.mark.parametrize("seed", seeds(10, slow=20))
def test_damaged_blocks_are_refused_or_shifted_as_any_reader_reads_them(seed: int) -> None:
    """No damage crashes, and only what decoding accepts is shifted."""
    rng = random.Random(seed)
    block = bytearray(relative_object(GOLDEN, 1000).data[:79])
    for _ in range(100):
        damaged = bytearray(block)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            wanted = [
                replace(r, base_offset=r.base_offset + 7)
                for r in decode_blocks(memoryview(damaged))
            ]
        except CorruptObjectError:
            wanted = []
        try:
            shift_blocks(memoryview(damaged), 3, 0, 7)
        except CorruptObjectError:
            continue
        assert decode_blocks(memoryview(damaged)) == wanted, f"seed {seed}"
