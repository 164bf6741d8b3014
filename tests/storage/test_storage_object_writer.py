"""Writing objects part by part: the same bytes however parts are cut, and never more than waits."""

from __future__ import annotations

import random
from dataclasses import replace

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.checksum import ObjectChecksum, crc_without_tail, join_crcs
from streammeta.storage.object_format.object_writer import ObjectWriter
from streammeta.storage.object_format.record import INT64_MAX, MAX_PAYLOAD_SIZE, RecordBatch
from tests.kit.built_objects import ObjectBuilder
from tests.kit.seeds import seeds

KIB = 1024


class HugePayload(bytes):
    """Says that it has `size` bytes, and has none."""

    def __new__(cls, size: int) -> HugePayload:
        payload = super().__new__(cls)
        payload.size = size
        return payload

    size: int

    def __len__(self) -> int:
        return self.size


def streams_of(sizes: list[int], streams: int) -> list[list[RecordBatch]]:
    return [
        [RecordBatch(stream, 7, 2 * i, 2, bytes([i % 251]) * size) for i, size in enumerate(sizes)]
        for stream in range(streams)
    ]


def write_in_parts(writer: ObjectWriter, streams: list[list[RecordBatch]]) -> list[bytes]:
    parts: list[bytes] = []
    for records in streams:
        writer.write(records)
        parts += writer.parts()
    writer.finish()
    return [*parts, *writer.parts()]


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    streams=st.integers(1, 4),
    threshold=st.integers(1, 2000),
    part_size=st.integers(1, 3000),
)
def test_parts_put_together_are_the_object_however_they_are_cut(
    sizes: list[int], streams: int, threshold: int, part_size: int
) -> None:
    written = streams_of(sizes, streams)
    builder = ObjectBuilder(threshold, checksum=True)
    for records in written:
        builder.write(records)
    whole = builder.finish()
    writer = ObjectWriter(threshold, part_size=part_size, checksum=True)
    parts = write_in_parts(writer, written)
    assert b"".join(parts) == whole.data
    assert all(len(part) >= part_size for part in parts[:-1])
    summary = writer.summary
    assert (summary.size, summary.entries) == (whole.size, whole.entries)
    assert summary.stream_ranges == whole.stream_ranges
    assert summary.crc32c == whole.crc32c == google_crc32c.value(whole.data)
    ends, end = set(), 0
    for entry in whole.entries:
        ends.add(entry.position + entry.size)
    for part in parts[:-1]:
        end += len(part)
        assert end in ends, "a part ends inside a block"


def test_no_more_waits_than_a_part_and_the_block_that_filled_it() -> None:
    block, part_size = 16 * KIB, 64 * KIB
    writer = ObjectWriter(block, part_size=part_size)
    taken = 0
    for i in range(200):
        writer.write([RecordBatch(i, 0, 0, 1, bytes(4 * KIB))])
        for part in writer.parts():
            taken += len(part)
            assert len(part) < part_size + block + KIB
        assert 0 <= writer.data_size - taken < part_size
    writer.finish()
    taken += sum(map(len, writer.parts()))
    assert taken == writer.summary.size


def test_a_part_is_given_once_and_in_order_though_many_wait() -> None:
    writer = ObjectWriter(1, part_size=1)
    records = [RecordBatch(1, 0, i, 1, bytes([i])) for i in range(5)]
    writer.write(records)
    first = next(writer.parts())
    rest = list(writer.parts())
    assert [part[-1] for part in (first, *rest)] == [0, 1, 2, 3, 4]
    assert list(writer.parts()) == []


def test_nothing_is_said_of_an_object_before_all_of_it_is_taken() -> None:
    writer = ObjectWriter()
    writer.write([RecordBatch(1, 0, 0, 1, b"a")])
    with pytest.raises(RuntimeError, match="finish"):
        _ = writer.summary
    writer.finish()
    with pytest.raises(RuntimeError, match="0 bytes"):
        _ = writer.summary
    (part,) = writer.parts()
    assert writer.summary.size == len(part)
    assert writer.summary.crc32c is None


def test_a_finished_object_takes_no_more() -> None:
    writer = ObjectWriter()
    writer.write([RecordBatch(1, 0, 0, 1, b"a")])
    writer.finish()
    for once_more in (writer.finish, lambda: writer.write([RecordBatch(1, 0, 1, 1, b"b")])):
        with pytest.raises(RuntimeError, match="finished"):
            once_more()
    assert len(list(writer.parts())) == 1


def test_an_object_without_records_and_sizes_without_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="records"):
        ObjectWriter().finish()
    with pytest.raises(ValueError, match="part_size is 0"):
        ObjectWriter(part_size=0)
    with pytest.raises(ValueError, match="block_size_threshold is 0"):
        ObjectWriter(0)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (RecordBatch(1, -1, 5, 1, b""), "record epoch is -1"),
        (RecordBatch(1, 2**63, 5, 1, b""), "record epoch is"),
        (RecordBatch(1, 0, 5, 0, b""), "record count is 0"),
        (RecordBatch(1, 0, 5, 2**31, b""), "record count is 2147483648"),
        (RecordBatch(1, 0, 2**63 - 1, 1, b""), "record base_offset is"),
        (RecordBatch(1, 0, 2**63, 1, b""), "record base_offset is"),
        (RecordBatch(1, 0, 4, 1, b""), "base offset is 4, expected at least [56]"),
        (
            RecordBatch(1, 0, 5, 1, HugePayload(2_147_483_608)),
            "record payload length is 2147483608",
        ),
        (RecordBatch(1, 0, 5, 1, HugePayload(2_147_483_603)), "expected 0..2147483602"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_record_is_named_and_changes_nothing(bad: RecordBatch, reason: str) -> None:
    good = [RecordBatch(1, 0, 0, 5, b"good")]
    writer, reference = ObjectWriter(3, part_size=1), ObjectWriter(3, part_size=1)
    for tested in (writer, reference):
        tested.write(good)
    later = RecordBatch(1, 0, 5, 1, b"x")
    behind = replace(bad, base_offset=bad.base_offset + (bad.base_offset == 5))
    for records in ([bad], [later, behind]):
        with pytest.raises(ValueError, match=reason):
            writer.write(records)
    for tested in (writer, reference):
        tested.write([later])
        tested.finish()
    assert list(writer.parts()) == list(reference.parts())


def test_a_stream_out_of_range_or_out_of_order_is_refused() -> None:
    for stream_id in (-1, 2**63):
        with pytest.raises(ValueError, match="stream_id"):
            ObjectWriter().write([RecordBatch(stream_id, 0, 0, 1, b"")])
    writer = ObjectWriter()
    writer.write([RecordBatch(2, 0, 0, 1, b"")])
    writer.write([])
    size = writer.data_size
    with pytest.raises(ValueError, match=r"stream 1 .*2"):
        writer.write([RecordBatch(1, 0, 0, 1, b"")])
    with pytest.raises(ValueError, match="expected"):
        writer.write([RecordBatch(2, 0, 1, 1, b""), RecordBatch(3, 0, 0, 1, b"")])
    assert writer.data_size == size


# Checksums


@given(st.binary(max_size=700_000), st.lists(st.integers(1, 300_000), max_size=4))
def test_a_checksum_is_that_of_all_bytes_in_whatever_pieces(data: bytes, cuts: list[int]) -> None:
    checksum, at = ObjectChecksum(), 0
    for i, cut in enumerate([*cuts, len(data)]):
        piece = data[at : at + cut]
        checksum.update((piece, memoryview(piece), bytearray(piece))[i % 3])
        at += len(piece)
    assert (checksum.value, checksum.size) == (google_crc32c.value(data), len(data))


def test_a_checksum_that_does_not_hold_is_corruption() -> None:
    checksum = ObjectChecksum.of(memoryview(b"123456789"))
    checksum.verify(0xE3069283, source="a")  # the check value that the algorithm is published with
    with pytest.raises(CorruptObjectError) as caught:
        checksum.verify(1, source="some/key")
    error = caught.value
    assert (error.source, error.position) == ("some/key", 0)
    assert (error.found, error.expected) == ("0xe3069283", "0x00000001")


def test_the_largest_payload_makes_the_largest_block() -> None:
    """2^31 - 3 bytes with both headers, the longest array of a JVM; nothing of it is allocated."""
    writer = ObjectWriter(part_size=INT64_MAX)

    writer.write([RecordBatch(1, 0, 0, 1, HugePayload(MAX_PAYLOAD_SIZE))])

    assert MAX_PAYLOAD_SIZE == 2_147_483_602
    assert writer.data_size == 2**31 - 3


@pytest.mark.parametrize("seed", seeds(10, slow=20))
def test_a_whole_follows_from_its_pieces_and_a_piece_from_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    first = rng.randbytes(rng.choice([0, 1, 7, 1000, 70_000]))
    second = rng.randbytes(rng.choice([0, 1, 3, 48, 5000]))
    whole = google_crc32c.value(first + second)
    crc = google_crc32c.value
    assert join_crcs(crc(first), crc(second), len(second)) == whole
    assert crc_without_tail(whole, crc(second), len(second)) == crc(first)


def test_sizes_beyond_32_bits_are_as_good_as_small_ones() -> None:
    """Ten GiB, in pieces of which each is added to what there is."""
    sizes = [5 * 2**30, 3 * 2**30 + 1, 2 * 2**30 - 1]
    crcs = [0x12345678, 0xDEADBEEF, 0]
    at_once = join_crcs(crcs[0], join_crcs(crcs[1], crcs[2], sizes[2]), sizes[1] + sizes[2])
    one_by_one = join_crcs(join_crcs(crcs[0], crcs[1], sizes[1]), crcs[2], sizes[2])
    assert at_once == one_by_one
    assert crc_without_tail(at_once, crcs[2], sizes[2]) == join_crcs(crcs[0], crcs[1], sizes[1])
