"""Keys, records, blocks, indexes and objects: golden bytes in both directions, and damage.

The scenarios of `tests/vectors/object_format.yaml` and the tables of `tests/vectors/keys.yaml` are
run by the tests of conformance, golden records and known keys among them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.storage.errors import CorruptObjectError, Source
from streammeta.storage.object_format import object_key
from streammeta.storage.object_format.index_block import (
    UNLIMITED,
    IndexBlock,
    IndexEntry,
    StreamRange,
    decode_index,
    encode_index,
    stream_ranges,
)
from streammeta.storage.object_format.object_reader import ByteRange, ObjectReader
from streammeta.storage.object_format.record import (
    RecordBatch,
    decode_blocks,
    decode_record,
    encode_block_header,
    encode_record,
)
from tests.kit.built_objects import BuiltObject, ObjectBuilder, encode_trailer
from tests.storage.format_objects import published_object, read_whole

GOLDEN_SHA256 = "8ee4ca6c43edb35aab68c119e4f8bc4938be0baf7b7ad5f426386fde2e1f2a06"
GOLDEN_RECORDS = [
    RecordBatch(3, 1, 4, 2, b"hi!"),
    RecordBatch(4, 0, 10, 5, b"\xaa" * 40),
    RecordBatch(4, 0, 15, 5, b"\xbb" * 40),
    RecordBatch(4, 0, 20, 1, b"\xcc" * 8),
    RecordBatch(5, 0, 0, 12, b"\xdd" * 12),
    RecordBatch(5, 0, 12, 12, b"\xee" * 12),
]
GOLDEN_ENTRIES = [
    IndexEntry(3, 4, 6, 1, 0, 46),
    IndexEntry(4, 10, 20, 2, 46, 156),
    IndexEntry(4, 20, 21, 1, 202, 51),
    IndexEntry(5, 0, 24, 2, 253, 100),
]


def build(writes: Sequence[Sequence[RecordBatch]], threshold: int) -> BuiltObject:
    builder = ObjectBuilder(threshold)
    for records in writes:
        builder.write(records)
    return builder.finish()


def by_stream(records: Sequence[RecordBatch]) -> list[list[RecordBatch]]:
    streams = sorted({record.stream_id for record in records})
    return [[r for r in records if r.stream_id == stream] for stream in streams]


# Records


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (RecordBatch(-1, 0, 0, 1, b""), "stream_id"),
        (RecordBatch(0, -1, 0, 1, b""), "epoch"),
        (RecordBatch(0, 0, -1, 1, b""), "base_offset"),
        (RecordBatch(0, 0, 2**63 - 1, 1, b""), "base_offset"),
        (RecordBatch(0, 0, 0, 0, b""), "count"),
        (RecordBatch(0, 0, 0, -5, b""), "count"),
        (RecordBatch(0, 0, 0, 2**31, b""), "count"),
    ],
)
def test_a_record_out_of_range_is_refused_by_name(record: RecordBatch, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}"):
        encode_record(record)


@pytest.mark.parametrize(
    ("stream_id", "epoch", "base", "count"),
    [
        *((-1, 0, 0, 1), (0, -1, 0, 1), (0, 0, -1, 1), (0, 0, 0, 0), (0, 0, 2**63 - 1, 1)),
        (1, 1, 10, -5),  # as a record that links has it
    ],
)
def test_a_bad_record_header_is_corrupt(stream_id: int, epoch: int, base: int, count: int) -> None:
    header = struct.pack(">Bqqqii", 0x22, stream_id, epoch, base, count, 0)
    with pytest.raises(CorruptObjectError, match="header") as caught:
        decode_record(memoryview(b"xx" + header), 2, source=Source("test", 100))
    assert caught.value.position == 103
    assert f"base offset {base}, count {count}" in caught.value.found


# Objects


def test_the_golden_object_holds_in_both_directions() -> None:
    built = build(by_stream(GOLDEN_RECORDS), 64)
    assert built.size == 545
    assert hashlib.sha256(built.data).hexdigest() == GOLDEN_SHA256
    assert built.data[-48:].hex() == "0000000000000161" + "00000090" + "00" * 28 + (
        "88e241b785f4cff7"
    )
    assert list(built.entries) == GOLDEN_ENTRIES
    index, records = read_whole(built.data)
    assert list(index) == GOLDEN_ENTRIES
    assert records == GOLDEN_RECORDS
    again = b"".join(
        encode_block_header(entry.record_count, entry.size - 10)
        + b"".join(map(encode_record, decode_blocks(memoryview(block))))
        for entry in index
        for block in [built.data[entry.position : entry.position + entry.size]]
    )
    assert again + encode_trailer(list(index), len(again)) == built.data


def test_look_ups_in_a_real_object_of_seven_blocks() -> None:
    """Its footer and index are held against the published dump in `test_storage_inspection`."""
    built = published_object()
    assert built.size == 5242306
    assert built.stream_ranges == (
        StreamRange(3, 4, 6),
        StreamRange(4, 50390, 55430),
        StreamRange(5, 8376, 9384),
    )
    reader = ObjectReader("e4000000/n/78", built.size)
    assert reader.needed == ByteRange(built.size - 8336, built.size)
    index = read_whole(built.data)[0]
    for start, end, max_bytes, count, next_offset, fulfilled in [
        (50390, 50391, 2**31 - 1, 1, 51410, True),
        (51400, 51420, 2**31 - 1, 2, 52430, True),
        (50389, 50400, 2**31 - 1, 0, 50389, False),
        (52430, UNLIMITED, 2**31 - 1, 3, 55430, False),
        (50390, UNLIMITED, 1_000_000, 1, 51410, True),
        (50400, UNLIMITED, 1_000_000, 2, 52430, True),
        (55430, UNLIMITED, 1_000_000, 0, 55430, False),
    ]:
        found = index.find(4, start, end, max_bytes)
        case = (start, end, max_bytes)
        assert len(found.entries) == count, case
        assert (found.next_offset, found.fulfilled) == (next_offset, fulfilled), case
        assert found.entries == tuple(index)[found.first_ordinal :][:count]
    assert index.find(6, 0, 1, 1).entries == ()


def test_a_gap_and_a_span_over_32_bits_close_the_block() -> None:
    wide = 2**31 - 1
    records = [
        RecordBatch(1, 0, 0, 2, b"a"),
        RecordBatch(1, 0, 5, 2, b"b"),
        RecordBatch(1, 0, 7, wide, b"c"),
    ]
    built = build([records], 1000)
    assert [(e.start_offset, e.end_offset) for e in built.entries] == [
        (0, 2),
        (5, 7),
        (7, 7 + wide),
    ]
    assert read_whole(built.data)[1] == records


@st.composite
def sorted_streams(draw: st.DrawFn) -> list[list[RecordBatch]]:
    streams = []
    for stream_id in sorted(draw(st.sets(st.integers(0, 2**63 - 1), min_size=1, max_size=4))):
        offset = draw(st.integers(0, 10**6))
        records = []
        for _ in range(draw(st.integers(1, 6))):
            offset += draw(st.sampled_from([0, 0, 0, 7]))
            count = draw(st.integers(1, 100))
            payload = draw(st.binary(max_size=30))
            records.append(RecordBatch(stream_id, draw(st.integers(0, 9)), offset, count, payload))
            offset += count
        streams.append(records)
    return streams


@given(sorted_streams(), st.integers(1, 100))
def test_any_object_reads_back_and_every_offset_is_found(
    streams: list[list[RecordBatch]], threshold: int
) -> None:
    built = build(streams, threshold)
    index, records = read_whole(built.data)
    assert records == [record for stream in streams for record in stream]
    assert tuple(index) == built.entries
    assert stream_ranges(index) == built.stream_ranges
    for record in records:
        found = index.find(record.stream_id, record.base_offset, record.end_offset, 2**31)
        assert found.fulfilled
        assert found.entries[0].start_offset <= record.base_offset
        assert found.entries[-1].end_offset >= record.end_offset


# Look-ups


NO_ENTRY = -1


def index_of(entries: list[IndexEntry]) -> IndexBlock:
    return decode_index(
        memoryview(encode_index(entries)), data_size=sum(entry.size for entry in entries)
    )


def walk(entries: list[IndexEntry], stream_id: int, offset: int) -> int:
    for ordinal, entry in enumerate(entries):
        if entry.stream_id == stream_id and entry.start_offset <= offset < entry.end_offset:
            return ordinal
    return NO_ENTRY


@st.composite
def indexes(draw: st.DrawFn) -> list[IndexEntry]:
    entries: list[IndexEntry] = []
    position = 0
    for stream_id in sorted(draw(st.sets(st.integers(0, 6), max_size=5))):
        offset = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(1, 6))):
            offset += draw(st.sampled_from([0, 0, 1, 3]))
            span = draw(st.integers(1, 4))
            entries.append(IndexEntry(stream_id, offset, offset + span, 1, position, 50))
            offset, position = offset + span, position + 50
    return entries


@given(indexes(), st.integers(0, 7), st.integers(0, 40), st.integers(-1, 45), st.integers(0, 60))
def test_what_is_found_from_an_offset_on_is_one_run_that_ends_for_a_reason(
    entries: list[IndexEntry], stream_id: int, start: int, end: int, max_bytes: int
) -> None:
    found = index_of(entries).find(stream_id, start, end, max_bytes)
    first = walk(entries, stream_id, start)
    if first == NO_ENTRY:
        assert (found.entries, found.next_offset, found.fulfilled) == ((), start, False)
        return
    assert found.first_ordinal == first
    assert list(found.entries) == entries[first : first + len(found.entries)]
    assert found.next_offset == found.entries[-1].end_offset
    is_partial = found.entries[0].start_offset < start
    paid = sum(entry.payload_size for entry in found.entries[is_partial:])
    is_reached = end != -1 and found.next_offset >= end
    assert found.fulfilled == (is_reached or paid >= max_bytes)
    if not found.fulfilled:
        assert walk(entries, stream_id, found.next_offset) == NO_ENTRY


# Damage


def test_an_object_cut_at_any_byte_is_corrupt() -> None:
    data = build(by_stream(GOLDEN_RECORDS), 64).data
    for size in range(len(data)):
        with pytest.raises(CorruptObjectError, match="object test"):
            read_whole(data[:size])
        with pytest.raises(CorruptObjectError):
            read_whole(data[:size], len(data))


def test_every_bit_flip_is_seen_but_in_payload_and_epoch() -> None:
    """The format has no checksum. What redundancy can't show is payload, and the epoch of a record.

    The sign bit of an epoch is seen, as no epoch is negative. Nothing else goes unseen, and what
    goes unseen leaves stream, offsets, counts and lengths of every record as they were.
    """
    data = build(by_stream(GOLDEN_RECORDS), 64).data
    unprotected: set[int] = set()
    for entry in GOLDEN_ENTRIES:
        at = entry.position + 10
        for record in GOLDEN_RECORDS:
            if record.stream_id == entry.stream_id and (
                entry.start_offset <= record.base_offset < entry.end_offset
            ):
                unprotected |= set(range((at + 9) * 8, (at + 17) * 8))
                unprotected.remove((at + 9) * 8 + 7)
                payload = range((at + 33) * 8, (at + record.encoded_size) * 8)
                unprotected |= set(payload)
                at += record.encoded_size
    unseen: set[int] = set()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            index, records = read_whole(bytes(damaged))
        except CorruptObjectError:
            continue
        unseen.add(bit)
        assert list(index) == GOLDEN_ENTRIES
        assert [shape_of(r) for r in records] == [shape_of(r) for r in GOLDEN_RECORDS]
    assert unseen == unprotected


def shape_of(record: RecordBatch) -> tuple[int, int, int, int]:
    return (record.stream_id, record.base_offset, record.count, len(record.payload))


BEHIND = "a start after the end of the previous entry"
TILED = "a position where the entry before ends"
FIELDS = "a stream, start and position of at least 0"


@pytest.mark.parametrize(
    ("entries", "rule"),
    [
        ([IndexEntry(2, 0, 1, 1, 0, 50), IndexEntry(1, 0, 1, 1, 50, 50)], BEHIND),
        ([IndexEntry(1, 0, 5, 1, 0, 50), IndexEntry(1, 4, 9, 1, 50, 50)], BEHIND),
        ([IndexEntry(1, 0, 5, 1, 0, 50), IndexEntry(1, 5, 9, 1, 60, 50)], TILED),
        ([IndexEntry(1, 0, 5, 1, 10, 50)], TILED),
        ([IndexEntry(1, 5, 5, 1, 0, 50)], FIELDS),
        ([IndexEntry(1, 0, 5, 6, 0, 500)], FIELDS),
        ([IndexEntry(1, 0, 5, 2, 0, 75)], FIELDS),
        ([IndexEntry(-1, 0, 5, 1, 0, 50)], FIELDS),
        ([IndexEntry(1, -3, 5, 1, 0, 50)], FIELDS),
        ([IndexEntry(1, 0, 5, 1, -1, 50)], FIELDS),
        ([IndexEntry(1, 2**63 - 2, 2**63 + 5, 1, 0, 50)], FIELDS),
    ],
)
def test_an_index_that_breaks_a_rule_is_corrupt(entries: list[IndexEntry], rule: str) -> None:
    data_size = sum(entry.size for entry in entries)
    with pytest.raises(CorruptObjectError, match=rule) as caught:
        decode_index(
            memoryview(encode_index(entries)), data_size=data_size, source=Source("test", 1000)
        )
    assert caught.value.position == 1000 + (len(entries) - 1) * 36


@given(st.integers(0, 2**63 - 1))
def test_a_key_is_ours_in_our_namespace_only(object_id: int) -> None:
    ours = object_key.cluster_namespace("abc")
    key = object_key.key_for(object_id, ours)
    assert object_key.parse_key(key, ours) == object_key.OwnKey(object_id)
    assert object_key.parse_key(
        key, object_key.cluster_namespace("abd")
    ) == object_key.OtherClusterKey(object_id, ours)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "//",
        "readme.txt",
        "00000001/n/16",  # prefix not of this id, though a lenient parser reads 16
        "10000000/n/01",
        "10000000/n/+1",
        "10000000/n/ 1",
        "10000000/n/1 ",
        "10000000/n/1_0",
        "10000000/n/-1",
        "10000000/n/",
        "10000000//1",
        "10000000/n/1/",
        "/10000000/n/1",
        "10000000/n/1/2",
        "0000001/n/16",
        "A0000000/n/10",
        "a0000000/n/१०",
        "0000000000000008/n/9223372036854775808",
        "10000000/n/" + "1" * 5000,
        "52674dec/n/node-1",
    ],
)
def test_anything_else_is_foreign(key: str) -> None:
    assert isinstance(object_key.parse_key(key, "n"), object_key.ForeignKey)


@given(st.text(alphabet="0123456789abcdefn/_-", max_size=30))
def test_what_parses_is_exactly_what_would_be_made(key: str) -> None:
    match object_key.parse_key(key, "n"):
        case object_key.OwnKey(object_id):
            assert key == object_key.key_for(object_id, "n")
        case object_key.OtherClusterKey(object_id, namespace):
            assert key == object_key.key_for(object_id, namespace)
            assert namespace != "n"
        case object_key.ForeignKey(reason):
            assert reason


def test_ids_and_namespaces_out_of_range_are_refused() -> None:
    assert object_key.cluster_namespace("C") == "_streammeta_C"
    for object_id in (-1, 2**63):
        with pytest.raises(ValueError, match="object id"):
            object_key.key_for(object_id, "n")
    for namespace in ("", "a/b"):
        with pytest.raises(ValueError, match="namespace"):
            object_key.key_for(1, namespace)
        with pytest.raises(ValueError, match="cluster id"):
            object_key.cluster_namespace(namespace)


@given(st.sampled_from(object_key.ObjectKind), st.integers(0, 2**15 - 1), st.booleans())
def test_attributes_of_real_buckets_survive(
    kind: object_key.ObjectKind, bucket: int, deep: bool
) -> None:
    attributes = object_key.ObjectAttributes(kind, bucket, deep)
    assert object_key.decode_attributes(object_key.encode_attributes(attributes)) == attributes


@pytest.mark.parametrize("value", [-1, 2, 3, 2**31, -(2**31) - 1])
def test_attributes_without_a_known_kind_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="attributes"):
        object_key.decode_attributes(value)


@pytest.mark.parametrize("bucket", [2**15, -(2**15) - 1])
def test_a_bucket_over_16_bits_is_refused(bucket: int) -> None:
    with pytest.raises(ValueError, match="bucket_id is"):
        object_key.encode_attributes(object_key.ObjectAttributes(bucket_id=bucket))
