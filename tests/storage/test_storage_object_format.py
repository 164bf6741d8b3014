"""Bytes of records, blocks, indexes and objects, held against golden vectors in both directions."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.index_block import (
    UNLIMITED,
    Footer,
    IndexBlock,
    IndexEntry,
    StreamRange,
    decode_footer,
    decode_index,
    encode_footer,
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
from tests.kit.built_objects import (
    BuiltObject,
    ObjectBuilder,
    encode_trailer,
)

VECTORS = yaml.safe_load((Path(__file__).parents[1] / "vectors/object_format.yaml").read_text())
SCENARIOS: dict[str, Any] = {scenario["name"]: scenario for scenario in VECTORS["scenarios"]}

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


def read_whole(data: bytes, size: int | None = None) -> tuple[IndexBlock, list[RecordBatch]]:
    """Read an object that is in memory the way a reader of a store does."""
    reader = ObjectReader("test", len(data) if size is None else size)
    while reader.needed is not None:
        reader.receive(data[reader.needed.start : reader.needed.end])
    records: list[RecordBatch] = []
    for entry in reader.index:
        wanted = reader.block_range(entry)
        records += reader.records(entry, data[wanted.start : wanted.end])
    return reader.index, records


def scenario_writes(scenario: dict[str, Any]) -> list[list[RecordBatch]]:
    return [
        [
            RecordBatch(write["stream"], 0, r["base"], r["count"], bytes(r["payload"]))
            for r in write["records"]
        ]
        for write in scenario["writes"]
    ]


def scenario_entries(rows: Sequence[dict[str, int]]) -> list[IndexEntry]:
    return [
        IndexEntry(
            row["stream"],
            row["start"],
            row["start"] + row["end_delta"],
            row["records"],
            row["position"],
            row["size"],
        )
        for row in rows
    ]


# Records


def test_the_golden_record_holds_in_both_directions() -> None:
    golden = bytes.fromhex(
        "22 0000000000000003 0000000000000001 0000000000000004 00000002 00000003 686921"
    )
    assert encode_record(GOLDEN_RECORDS[0]) == golden
    assert decode_record(memoryview(golden), 0) == GOLDEN_RECORDS[0]


def test_record_scenario() -> None:
    scenario = SCENARIOS["record_encode"]
    given_, derived = scenario["input"], scenario["derived"]
    record = RecordBatch(
        given_["stream"],
        given_["epoch"],
        given_["base_offset"],
        given_["count"],
        given_["payload_utf8"].encode(),
    )
    assert encode_record(record).hex() == derived["encoded_hex"]
    assert record.encoded_size == derived["encoded_size"]
    assert record.end_offset == derived["last_offset"]
    assert decode_record(memoryview(bytes.fromhex(derived["encoded_hex"])), 0) == record


def test_records_follow_each_other_without_padding() -> None:
    scenario = SCENARIOS["record_parse_sequence"]
    records = [RecordBatch(1, 2, 3 + i, 4, f"hello{i}".encode()) for i in range(10)]
    data = memoryview(b"".join(map(encode_record, records)))
    assert len(data) == scenario["derived"]["total_size"]
    at, parsed = 0, []
    while at < len(data):
        parsed.append(decode_record(data, at))
        at += parsed[-1].encoded_size
    assert [r.base_offset for r in parsed] == scenario["expect"]["parsed_base_offsets"]
    assert [r.payload.decode() for r in parsed] == scenario["expect"]["parsed_payloads"]
    assert at == len(data)


@given(
    st.builds(
        RecordBatch,
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**63 - 2**31),
        st.integers(1, 2**31 - 1),
        st.binary(max_size=50),
    )
)
def test_any_valid_record_survives(record: RecordBatch) -> None:
    assert decode_record(memoryview(encode_record(record)), 0) == record


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
    with pytest.raises(ValueError, match=f"record {field} is"):
        encode_record(record)


def test_a_link_record_is_no_record_of_an_object() -> None:
    link = struct.pack(">Bqqqii", 0x22, 1, 1, 10, -5, 0)
    with pytest.raises(CorruptObjectError, match="count -5"):
        decode_record(memoryview(link), 0)


@pytest.mark.parametrize(
    ("stream_id", "epoch", "base", "count"),
    [(-1, 0, 0, 1), (0, -1, 0, 1), (0, 0, -1, 1), (0, 0, 0, 0), (0, 0, 2**63 - 1, 1)],
)
def test_a_record_header_out_of_range_is_corrupt(
    stream_id: int, epoch: int, base: int, count: int
) -> None:
    header = struct.pack(">Bqqqii", 0x22, stream_id, epoch, base, count, 0)
    with pytest.raises(CorruptObjectError, match="record header is stream") as caught:
        decode_record(memoryview(b"xx" + header), 2, origin=100)
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


def test_a_real_object_of_seven_blocks() -> None:
    streams = [
        [RecordBatch(3, 0, 4, 1, bytes(138)), RecordBatch(3, 0, 5, 1, bytes(48))],
        [RecordBatch(4, 0, 50390 + 15 * i, 15, bytes(15556)) for i in range(336)],
        [RecordBatch(5, 0, 8376 + 12 * i, 12, bytes(12)) for i in range(84)],
    ]
    built = build(streams, 1024 * 1024)
    assert list(built.entries) == [
        IndexEntry(3, 4, 6, 2, 0, 262),
        IndexEntry(4, 50390, 51410, 68, 262, 1060062),
        IndexEntry(4, 51410, 52430, 68, 1060324, 1060062),
        IndexEntry(4, 52430, 53450, 68, 2120386, 1060062),
        IndexEntry(4, 53450, 54470, 68, 3180448, 1060062),
        IndexEntry(4, 54470, 55430, 64, 4240510, 997706),
        IndexEntry(5, 8376, 9384, 84, 5238216, 3790),
    ]
    assert built.size == 5242306
    assert built.data[-48:-36] == struct.pack(">qi", 5242006, 252)
    assert built.stream_ranges == (
        StreamRange(3, 4, 6),
        StreamRange(4, 50390, 55430),
        StreamRange(5, 8376, 9384),
    )
    reader = ObjectReader("e4000000/n/78", built.size)
    assert reader.needed == ByteRange(built.size - 8336, built.size)
    _check_finds(read_whole(built.data)[0])


def _check_finds(index: IndexBlock) -> None:
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


def test_find_stops_at_a_gap() -> None:
    built = build([[RecordBatch(1, 0, 0, 5, b"x"), RecordBatch(1, 0, 9, 5, b"x")]], 1024)
    index = read_whole(built.data)[0]
    assert index.find(1, 2, 12, 100).next_offset == 5
    assert index.find(1, 2, 12, 100).fulfilled is False
    assert index.find(1, 6, 12, 100).entries == ()
    assert index.find(1, 10, 12, 100).fulfilled is True


def test_writer_scenario_cuts_blocks_by_payload() -> None:
    scenario = SCENARIOS["writer_groups_records_into_blocks"]
    derived = scenario["derived"]
    built = build(scenario_writes(scenario), scenario["config"]["block_size_threshold"])
    assert built.size == derived["object_size"]
    assert list(built.entries) == scenario_entries(derived["index"])
    assert encode_index(built.entries).hex() == derived["index_hex"]
    assert built.data[-48:].hex() == derived["footer_hex"]
    index, _ = read_whole(built.data)
    assert [vars_of(r) for r in stream_ranges(index)] == scenario["expect"]["stream_ranges"]
    for find in scenario["expect"]["finds"]:
        found = index.find(find["stream"], find["start"], find["end"], 2**31 - 1)
        assert found.fulfilled
        assert len(found.entries) == find["block_count"]
        for entry, wanted in zip(found.entries, find["blocks_records"], strict=True):
            block = memoryview(built.data)[entry.position : entry.position + entry.size]
            got = [{"base": r.base_offset, "count": r.count} for r in decode_blocks(block)]
            assert got == wanted


def vars_of(found: StreamRange) -> dict[str, int]:
    return {"stream": found.stream_id, "start": found.start_offset, "end": found.end_offset}


def test_payload_left_by_one_stream_counts_toward_the_next_streams_block() -> None:
    first = [RecordBatch(1, 0, 0, 1, bytes(30))]
    second = [RecordBatch(2, 0, i, 1, bytes(40)) for i in range(3)]
    built = build([first, second], 64)
    assert [entry.record_count for entry in built.entries] == [1, 1, 2]


def test_out_of_order_writes_are_refused_and_change_nothing() -> None:
    scenario = SCENARIOS["writer_rejects_out_of_order_writes"]
    builder = ObjectBuilder(1024)
    accepted: list[list[RecordBatch]] = []
    for write, records in zip(scenario["writes"], scenario_writes(scenario), strict=True):
        if write["expect"] == "ok":
            builder.write(records)
            accepted.append(records)
        else:
            with pytest.raises(ValueError, match="wanted"):
                builder.write(records)
    assert builder.finish().data == build(accepted, 1024).data


def test_a_write_is_taken_whole_or_not_at_all() -> None:
    good = [RecordBatch(1, 0, 0, 1, b"a")]
    for bad in (
        [RecordBatch(1, 0, 1, 1, b"b"), RecordBatch(2, 0, 0, 1, b"c")],
        [RecordBatch(1, 0, 1, 3, b"b"), RecordBatch(1, 0, 3, 1, b"c")],
        [RecordBatch(1, 0, 1, 3, b"b"), RecordBatch(1, -1, 4, 1, b"c")],
    ):
        builder = ObjectBuilder(1)
        builder.write(good)
        with pytest.raises(ValueError, match="wanted"):
            builder.write(bad)
        assert builder.finish().data == build([good], 1).data


def test_an_empty_object_is_refused() -> None:
    builder = ObjectBuilder()
    builder.write([])
    with pytest.raises(ValueError, match="no records"):
        builder.finish()
    with pytest.raises(ValueError, match="block_size_threshold is 0"):
        ObjectBuilder(0)


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


def test_an_index_larger_than_the_first_read_takes_one_more_read() -> None:
    scenario = SCENARIOS["index_larger_than_first_tail_read"]
    derived = scenario["derived"]
    streams = scenario["writes_generated"]["streams"]
    built = build([[RecordBatch(i, 0, i, 1, b"x")] for i in range(streams)], 1024)
    assert built.size == derived["object_size"]
    reader = ObjectReader("test", built.size)
    needed = reader.needed
    assert needed is not None
    assert needed.end - needed.start == derived["first_tail_read_size"]
    reader.receive(built.data[needed.start :])
    assert reader.needed == ByteRange(derived["second_read_from"], built.size)
    with pytest.raises(RuntimeError, match="not read yet"):
        _ = reader.index
    reader.receive(built.data[derived["second_read_from"] :])
    assert reader.needed is None
    assert len(reader.index) == scenario["expect"]["index_entries"]
    assert len(stream_ranges(reader.index)) == streams
    assert reader.index.find(777, 777, 778, 1).entries == (built.entries[777],)


def test_one_index_entry_may_cover_several_blocks() -> None:
    scenario = SCENARIOS["one_index_entry_over_several_blocks"]
    blocks = b""
    for block in scenario["blocks"]:
        records = [
            RecordBatch(block["stream"], 0, r["base"], r["count"], bytes(r["payload"]))
            for r in block["records"]
        ]
        body = b"".join(map(encode_record, records))
        blocks += encode_block_header(len(records), len(body)) + body
    entries = scenario_entries(scenario["index"])
    data = blocks + encode_trailer(entries, len(blocks))
    assert len(data) == scenario["derived"]["object_size"]
    index, found = read_whole(data)
    assert [r.base_offset for r in found] == scenario["expect"]["base_offsets"]
    query = scenario["query"]
    result = index.find(query["stream"], query["start"], query["end"], query["max_bytes"])
    assert len(result.entries) == scenario["expect"]["block_count"]


def test_stream_ranges_scenario() -> None:
    scenario = SCENARIOS["stream_offset_ranges_from_index"]
    built = build(scenario_writes(scenario), scenario["config"]["block_size_threshold"])
    assert built.size == scenario["derived"]["object_size"]
    assert list(built.entries) == scenario_entries(scenario["derived"]["index"])
    index = read_whole(built.data)[0]
    ranges = [vars_of(r) for r in stream_ranges(index)]
    assert ranges == scenario["expect"]["stream_ranges"]
    assert [vars_of(r) for r in built.stream_ranges] == ranges


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


# Damage


def test_an_object_cut_at_any_byte_is_corrupt() -> None:
    data = build(by_stream(GOLDEN_RECORDS), 64).data
    for size in range(len(data)):
        with pytest.raises(CorruptObjectError, match="object test is corrupt at byte"):
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


@given(st.binary(max_size=200), st.integers(0, 400))
def test_noise_is_corrupt_and_nothing_worse(noise: bytes, size: int) -> None:
    with pytest.raises(CorruptObjectError):
        read_whole(noise, size)


def test_lengths_that_lie_are_not_believed() -> None:
    huge = struct.pack(">Bqqqii", 0x22, 1, 0, 0, 1, 2**31 - 1)
    with pytest.raises(CorruptObjectError, match=r"payload length is 2147483647, wanted 0..0"):
        decode_record(memoryview(huge), 0)
    block = struct.pack(">BBii", 0x5A, 2, 2**31 - 1, 33) + bytes(33)
    with pytest.raises(CorruptObjectError, match=r"record count is 2147483647, wanted 1..1"):
        decode_blocks(memoryview(block))
    footer = encode_footer(Footer(2**62, 36))
    with pytest.raises(CorruptObjectError, match="place of the index is 36 bytes at"):
        decode_footer(memoryview(footer), 1000, composite=False)


def test_a_block_with_an_unknown_flag_is_refused() -> None:
    body = encode_record(GOLDEN_RECORDS[0])
    block = struct.pack(">BBii", 0x5A, 0x03, 1, len(body)) + body
    with pytest.raises(CorruptObjectError, match="block flag is 0x03, wanted 0x02"):
        decode_blocks(memoryview(block))


@pytest.mark.parametrize(
    ("entries", "rule"),
    [
        ([IndexEntry(2, 0, 1, 1, 0, 50), IndexEntry(1, 0, 1, 1, 50, 50)], "a start behind the end"),
        ([IndexEntry(1, 0, 5, 1, 0, 50), IndexEntry(1, 4, 9, 1, 50, 50)], "a start behind the end"),
        (
            [IndexEntry(1, 0, 5, 1, 0, 50), IndexEntry(1, 5, 9, 1, 60, 50)],
            "a position where the entry before ends",
        ),
        ([IndexEntry(1, 0, 5, 1, 10, 50)], "a position where the entry before ends"),
        ([IndexEntry(1, 5, 5, 1, 0, 50)], "a stream, start and position of at least 0"),
        ([IndexEntry(1, 0, 5, 6, 0, 500)], "a stream, start and position of at least 0"),
        ([IndexEntry(1, 0, 5, 2, 0, 75)], "a stream, start and position of at least 0"),
        ([IndexEntry(-1, 0, 5, 1, 0, 50)], "a stream, start and position of at least 0"),
        ([IndexEntry(1, -3, 5, 1, 0, 50)], "a stream, start and position of at least 0"),
        ([IndexEntry(1, 0, 5, 1, -1, 50)], "a stream, start and position of at least 0"),
        (
            [IndexEntry(1, 2**63 - 2, 2**63 + 5, 1, 0, 50)],
            "a stream, start and position of at least 0",
        ),
    ],
)
def test_an_index_that_breaks_a_rule_is_corrupt(entries: list[IndexEntry], rule: str) -> None:
    data_size = sum(entry.size for entry in entries)
    with pytest.raises(CorruptObjectError, match=rule) as caught:
        decode_index(memoryview(encode_index(entries)), data_size=data_size, origin=1000)
    assert caught.value.position == 1000 + (len(entries) - 1) * 36
