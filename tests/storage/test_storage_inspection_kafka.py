"""Payloads: fields and codecs of Kafka record batches, key-values of MetaStreams, and damage."""

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
from streammeta.storage.inspection.meta_stream import LeaderEpochs, decode_meta_entry
from streammeta.storage.inspection.rendering import meta_document, meta_lines
from tests.storage.kafka_batches import (
    EPOCHS,
    GZIP,
    LZ4,
    NONE,
    PARTITION,
    PRODUCERS,
    SNAPPY,
    TIME_MS,
    ZSTD,
    compressed,
    epochs_value,
    kafka_batch,
    kafka_record,
    meta_payload,
    snapshots_value,
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
    with pytest.raises(PayloadError, match="CRC-32C"):
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
    with pytest.raises(PayloadError, match="byte 16"):
        read_all(bytes(old))
    (batch,) = decode_kafka_batches(kafka_batch(0, THREE, attributes=7))
    assert batch.compression_name == "UNKNOWN_7"
    with pytest.raises(PayloadError, match=r"0\.\.4"):
        decode_kafka_records(batch)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_nothing_is_decompressed_beyond_the_limit(codec: int) -> None:
    large = [kafka_record(0, None, bytes(8_000_000))]
    (batch,) = decode_kafka_batches(kafka_batch(0, large, codec=codec))
    assert len(decode_kafka_records(batch)) == 1
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match="10000"):
            decode_kafka_records(batch, limit=10_000)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_counts_that_lie_cost_nothing() -> None:
    for count in (2**31 - 1, -1):
        lying = kafka_batch(0, THREE, record_count=count)
        with pytest.raises(PayloadError, match=f"{count}"):
            read_all(lying)
    too_many_headers = kafka_record(0, None, b"")[:-1] + b"\xfe\xff\xff\xff\x0f"
    framed = bytes([too_many_headers[0] + 8]) + too_many_headers[1:]
    with pytest.raises(PayloadError, match="header count"):
        read_all(kafka_batch(0, [framed]))
    huge = b"\xff\xff\xff\xff\x0f" + compressed(SNAPPY, b"x")[1:]
    base = kafka_batch(0, [b""], codec=NONE, attributes=SNAPPY)
    with pytest.raises(PayloadError, match="67108864"):
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
        with pytest.raises(PayloadError, match="GZIP"):
            decompress(Compression.GZIP, memoryview(data)[:-cut], 10_000)


NO_EPOCHS_LINE = (
    "key=LEADER_EPOCH_CHECKPOINT, value=ElasticLeaderEpochCheckpointMeta{version=0, entries=[]}"
)
EPOCHS_LINE = (
    "key=LEADER_EPOCH_CHECKPOINT, value=ElasticLeaderEpochCheckpointMeta{version=0,"
    " entries=[EpochEntry(epoch=0, startOffset=0)]}"
)
PRODUCERS_LINE = (
    "offset=50555, content=[ProducerStateEntry(producerId=7001, producerEpoch=0,"
    " currentTxnFirstOffset=OptionalLong.empty, coordinatorEpoch=-1,"
    " lastTimestamp=1712451139190, batchMetadata=[BatchMetadata(firstSeq=49935,"
    " lastSeq=49999, firstOffset=49935, lastOffset=49999, timestamp=1712451139190)]),"
    " ProducerStateEntry(producerId=7002, producerEpoch=0,"
    " currentTxnFirstOffset=OptionalLong.empty, coordinatorEpoch=-1,"
    " lastTimestamp=1712451146293, batchMetadata=[BatchMetadata(firstSeq=480, lastSeq=554,"
    " firstOffset=50480, lastOffset=50554, timestamp=1712451146293)])]"
)
NO_EPOCHS = meta_payload("LEADER_EPOCH_CHECKPOINT", epochs_value([]))
PUBLISHED = {
    "PARTITION": (PARTITION, 48, ['key=PARTITION, value={"s":0,"c":0,"r":50540,"cs":false}']),
    "no epochs": (NO_EPOCHS, 36, [NO_EPOCHS_LINE]),
    "epochs": (EPOCHS, 48, [EPOCHS_LINE]),
    "producers": (PRODUCERS, 138, ["key=PRODUCER_SNAPSHOTS", PRODUCERS_LINE]),
}
"""Payloads, their sizes and their lines as they were published of a real object."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_key_values_read_and_show_as_published(name: str) -> None:
    payload, size, lines = PUBLISHED[name]
    assert len(payload) == size
    assert list(meta_lines(decode_meta_entry(payload))) == lines


def test_values_are_there_for_programs_too() -> None:
    assert meta_document(decode_meta_entry(PARTITION))["value"] == {
        "s": 0,
        "c": 0,
        "r": 50540,
        "cs": False,
    }
    assert decode_meta_entry(EPOCHS).value == LeaderEpochs(0, ((0, 0),))
    (snapshot,) = meta_document(decode_meta_entry(PRODUCERS))["value"]
    assert snapshot["offset"] == 50555
    assert [producer["producer_id"] for producer in snapshot["producers"]] == [7001, 7002]


def test_a_transaction_and_a_producer_without_batches_show() -> None:
    value = snapshots_value({9: [(1, 2, -1, -1, 0, -1, 4, 77)]})
    (_, line) = meta_lines(decode_meta_entry(meta_payload("PRODUCER_SNAPSHOTS", value)))
    assert "currentTxnFirstOffset=OptionalLong[77], coordinatorEpoch=4" in line
    assert "batchMetadata=[]" in line


def test_an_unknown_key_keeps_its_bytes_and_shows_nothing_unprintable() -> None:
    entry = decode_meta_entry(meta_payload("K\x1b[2J", b"\x00\xffvalue"))
    assert (entry.value, entry.raw) == (None, b"\x00\xffvalue")
    (line,) = meta_lines(entry)
    assert line.isprintable()
    assert meta_document(entry)["value_base64"] == "AP92YWx1ZQ=="


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x00\x00", "remaining size for a key-value at byte 0 is 2 bytes, expected 5"),
        (b"\x01" + PARTITION[1:], "magic of a MetaStream key-value at byte 0 is 1, expected 0"),
        (b"\x00" + struct.pack(">i", 2**31 - 1), "key length at byte 1 is 2147483647"),
        (meta_payload("PARTITION", b"{"), "value at byte 14 is no JSON"),
        (meta_payload("LOG", b"7"), "value at byte 8 is int, expected a JSON object"),
        (
            meta_payload("LEADER_EPOCH_CHECKPOINT", struct.pack(">ii", 0, 2**31 - 1)),
            "number of leader epochs in 8 bytes at byte 32 is 2147483647, expected 0",
        ),
        (meta_payload("PRODUCER_SNAPSHOTS", b"\x19"), "magic of producer snapshots"),
        (PRODUCERS[:-1] + b"\x00", "CRC-32C of a producer snapshot"),
        (PRODUCERS[:-1], "snapshot length"),
        (b"\x00\x00\x00\x00\x01\xff", "key at byte 5 is"),
    ],
)
def test_what_is_malformed_is_named(payload: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        decode_meta_entry(payload)


@given(
    st.sampled_from([PARTITION, EPOCHS, PRODUCERS]),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
    st.integers(0, 200),
)
def test_damage_is_refused_or_reads(
    payload: bytes, changes: list[tuple[int, int]], size: int
) -> None:
    damaged = bytearray(payload)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    with contextlib.suppress(PayloadError):
        list(meta_lines(decode_meta_entry(bytes(damaged[:size]))))
