"""Kafka record batches: every field and codec, damage, and claims that are not believed."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.errors import PayloadError
from streammeta.storage.inspection.kafka_batch import (
    Compression,
    KafkaRecord,
    decode_kafka_batches,
    decode_kafka_records,
    decompress,
)
from tests.storage.kafka_batches import (
    GZIP,
    LZ4,
    NONE,
    SNAPPY,
    TIME_MS,
    ZSTD,
    compressed,
    kafka_batch,
    kafka_record,
)

THREE = [
    kafka_record(0, None, b"first"),
    kafka_record(1, b"k", None, time_delta=-3),
    kafka_record(2, b"", b"v" * 200, [("a", b"1"), ("b", None)], time_delta=2**40),
]
THREE_READ = [
    KafkaRecord(100, TIME_MS, None, b"first", ()),
    KafkaRecord(101, TIME_MS - 3, b"k", None, ()),
    KafkaRecord(102, TIME_MS + 2**40, b"", b"v" * 200, (("a", b"1"), ("b", None))),
]


def test_a_header_reads_as_it_was_written() -> None:
    data = kafka_batch(55400, THREE, producer=(7002, 3, 5400), leader_epoch=9, attributes=0x30)
    (batch,) = decode_kafka_batches(data)
    assert (batch.base_offset, batch.last_offset, batch.size) == (55400, 55402, len(data))
    assert (batch.producer_id, batch.producer_epoch) == (7002, 3)
    assert (batch.base_sequence, batch.last_sequence) == (5400, 5402)
    assert (batch.partition_leader_epoch, batch.max_timestamp) == (9, TIME_MS)
    assert batch.checksum == google_crc32c.value(data[21:])
    assert batch.is_intact
    assert batch.is_control
    assert batch.is_transactional
    assert (batch.compression_name, batch.timestamp_type) == ("NONE", "CREATE_TIME")


def test_sequences_wrap_and_are_absent_without_a_producer() -> None:
    (wrapped,) = decode_kafka_batches(kafka_batch(0, THREE, producer=(1, 0, 2**31 - 2)))
    assert wrapped.last_sequence == 0
    (absent,) = decode_kafka_batches(kafka_batch(0, THREE))
    assert absent.last_sequence == -1


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
def test_records_read_as_they_were_written_in_every_codec(codec: int) -> None:
    (batch,) = decode_kafka_batches(kafka_batch(100, THREE, codec=codec))
    names = ["NONE", "GZIP", "SNAPPY", "LZ4", "ZSTD"]
    assert batch.compression_name == names[codec]
    assert decode_kafka_records(batch) == THREE_READ


def test_snappy_in_the_frames_of_java_clients_reads_too() -> None:
    (batch,) = decode_kafka_batches(kafka_batch(100, THREE, codec=SNAPPY, framed=True))
    assert decode_kafka_records(batch) == THREE_READ


def test_the_time_of_appending_holds_for_all_records() -> None:
    (batch,) = decode_kafka_batches(kafka_batch(0, THREE, attributes=0x08, max_time=5))
    assert batch.timestamp_type == "LOG_APPEND_TIME"
    assert {record.timestamp for record in decode_kafka_records(batch)} == {5}


def test_several_batches_follow_each_other() -> None:
    data = kafka_batch(0, THREE) + kafka_batch(3, THREE[:1], codec=GZIP)
    batches = decode_kafka_batches(data)
    assert [batch.base_offset for batch in batches] == [0, 3]
    assert [len(decode_kafka_records(batch)) for batch in batches] == [3, 1]
    assert batches[1].position == batches[0].size


@given(st.sampled_from([NONE, GZIP, SNAPPY, LZ4, ZSTD]), st.data())
def test_a_flipped_bit_behind_the_checksum_is_seen(codec: int, data: st.DataObject) -> None:
    payload = bytearray(kafka_batch(100, THREE, codec=codec))
    bit = data.draw(st.integers(21 * 8, len(payload) * 8 - 1))
    payload[bit // 8] ^= 1 << bit % 8
    (batch,) = decode_kafka_batches(bytes(payload))
    assert not batch.is_intact
    with pytest.raises(PayloadError, match="CRC-32C of a Kafka record batch at byte 17"):
        decode_kafka_records(batch)


def read_all(payload: bytes) -> None:
    for batch in decode_kafka_batches(payload):
        decode_kafka_records(batch)


def with_true_checksum(payload: bytes) -> bytes:
    """Make the checksum hold, so that what is behind it is all that is wrong."""
    return payload[:17] + struct.pack(">I", google_crc32c.value(payload[21:])) + payload[21:]


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_worse(noise: bytes) -> None:
    with pytest.raises(PayloadError):
        read_all(noise)


@settings(max_examples=300)
@given(st.sampled_from([NONE, GZIP, SNAPPY, LZ4, ZSTD]), st.booleans(), st.data())
def test_damage_under_a_checksum_that_holds_is_refused_or_reads(
    codec: int, framed: bool, data: st.DataObject
) -> None:
    payload = bytearray(kafka_batch(100, THREE, codec=codec, framed=framed))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(21, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PayloadError):
        read_all(with_true_checksum(bytes(payload)))


def test_a_payload_cut_at_any_byte_is_refused() -> None:
    payload = kafka_batch(100, THREE)
    for size in range(len(payload)):
        with pytest.raises(PayloadError):
            read_all(payload[:size])


def test_older_formats_and_unknown_codecs_are_named() -> None:
    old = bytearray(kafka_batch(0, THREE))
    old[16] = 1
    with pytest.raises(PayloadError, match="at byte 16 is 1, wanted 2"):
        read_all(bytes(old))
    (batch,) = decode_kafka_batches(kafka_batch(0, THREE, attributes=7))
    assert batch.compression_name == "UNKNOWN_7"
    with pytest.raises(PayloadError, match=r"codec in the attributes .* is 7, wanted 0\.\.4"):
        decode_kafka_records(batch)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_nothing_is_decompressed_beyond_the_limit(codec: int) -> None:
    large = [kafka_record(0, None, bytes(8_000_000))]
    (batch,) = decode_kafka_batches(kafka_batch(0, large, codec=codec))
    assert len(decode_kafka_records(batch)) == 1
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match="more than 10000 bytes"):
            decode_kafka_records(batch, limit=10_000)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_counts_that_lie_cost_nothing() -> None:
    for count in (2**31 - 1, -1):
        lying = kafka_batch(0, THREE, record_count=count)
        with pytest.raises(PayloadError, match=f"record count of a batch at byte 57 is {count}"):
            read_all(lying)
    too_many_headers = kafka_record(0, None, b"")[:-1] + b"\xfe\xff\xff\xff\x0f"
    framed = bytes([too_many_headers[0] + 8]) + too_many_headers[1:]
    with pytest.raises(PayloadError, match="header count of a record"):
        read_all(kafka_batch(0, [framed]))
    huge = b"\xff\xff\xff\xff\x0f" + compressed(SNAPPY, b"x")[1:]
    base = kafka_batch(0, [b""], codec=NONE, attributes=SNAPPY)
    with pytest.raises(PayloadError, match="more than 67108864 bytes"):
        read_all(
            with_true_checksum(base[:8] + struct.pack(">i", 49 + len(huge)) + base[12:] + huge)
        )


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_compressed_records_that_are_cut_short_are_refused(codec: int) -> None:
    whole = kafka_batch(100, THREE, codec=codec)
    for size in range(61, len(whole)):
        with pytest.raises(PayloadError):
            read_all(with_true_checksum(whole[:8] + struct.pack(">i", size - 12) + whole[12:size]))


def test_what_is_cut_behind_the_last_record_is_seen_where_the_codec_tells() -> None:
    """The end of a gzip stream is a checksum of its own: without it the records may be others."""
    data = compressed(GZIP, b"".join(THREE))
    for cut in range(1, 9):
        with pytest.raises(PayloadError, match=r"GZIP data .* cut short"):
            decompress(Compression.GZIP, memoryview(data)[:-cut], 10_000)
