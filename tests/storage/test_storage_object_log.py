"""Bytes and keys of slots of write-ahead logs in a bucket: golden, round trips, every damage."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.inspection import automq_log
from streammeta.storage.object_format.record import RecordBatch, encode_record
from streammeta.storage.object_log.slot import (
    SEAL_SIZE,
    SLOT_HEADER_SIZE,
    AsideKey,
    LogName,
    RecoveredKey,
    Sealer,
    Slot,
    SlotKey,
    SlotKind,
    SweptKey,
    aside_body,
    decode_slot,
    parse_log_key,
    sealer_body,
)

NAMESPACE = "_streammeta_demo"
LOG = LogName(NAMESPACE, 7, 1_700_000_000_000)
LOG_ID = bytes(range(16))
RECORDS = [RecordBatch(3, 5, 40, 2, b"two"), RecordBatch(4, 1, 0, 1, b"")]
BODY = b"".join(map(encode_record, RECORDS))

RECORDS_HEX = (
    "534d4f53 01 01 0000 00000007 0000018bcfe56800 0000000000000012 0000000000000003"
    " 0000000000000011 00000002 0000000000000045 000102030405060708090a0b0c0d0e0f 32185cef 00000000"
    " baf7fe7b"
    " 22 0000000000000003 0000000000000005 0000000000000028 00000002 00000003 74776f"
    " 22 0000000000000004 0000000000000001 0000000000000000 00000001 00000000"
)


def slot(kind: SlotKind = SlotKind.RECORDS, count: int = 2, body: bytes = BODY) -> Slot:
    return Slot(LOG, LOG_ID, 18, 3, 17, kind, count, body)


def test_the_bytes_of_a_slot_of_records_are_those_of_the_format() -> None:
    assert slot().encode() == bytes.fromhex(RECORDS_HEX)


def test_the_bytes_of_a_seal_are_those_of_the_format() -> None:
    data = slot(SlotKind.SEAL, 0, sealer_body(Sealer(8, 9))).encode()
    assert len(data) == SEAL_SIZE == 96
    assert data[SLOT_HEADER_SIZE:].hex() == "000000080000000000000009"
    assert decode_slot(data, "k", NAMESPACE).sealer() == Sealer(8, 9)


def test_what_is_encoded_is_read_back() -> None:
    one = slot()
    found = decode_slot(one.encode(), "k", NAMESPACE)
    assert found == one
    assert found.records("k") == RECORDS
    aside = slot(SlotKind.ASIDE, 2, aside_body("it ended", BODY))
    found = decode_slot(aside.encode(), "k", NAMESPACE)
    assert (found.reason(), found.records("k")) == ("it ended", RECORDS)
    assert slot(SlotKind.RECOVERED, 0, sealer_body(Sealer(1, 1))).records("k") == []


def test_pieces_are_joined_to_the_same_bytes() -> None:
    pieces = [BODY[:5], BODY[5:40], BODY[40:]]
    assert b"".join(slot(body=b"").encode_around(pieces)) == slot().encode()


def test_no_changed_bit_and_no_cut_passes() -> None:
    data = slot().encode()
    for at in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptObjectError, match="object k"):
            decode_slot(bytes(damaged), "k", NAMESPACE)
    for end in range(len(data)):
        with pytest.raises(CorruptObjectError):
            decode_slot(data[:end], "k", NAMESPACE)
    with pytest.raises(CorruptObjectError):
        decode_slot(data + b"\0", "k", NAMESPACE)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_records_than_the_header_says_is_refused(count: int) -> None:
    with pytest.raises(CorruptObjectError):
        decode_slot(slot(count=count).encode(), "k", NAMESPACE).records("k")


def test_a_place_that_does_not_ascend_is_refused() -> None:
    for numbers in [(5, 6, 7), (5, -1, 3), (5, 4, 3)]:
        data = Slot(LOG, LOG_ID, *numbers, SlotKind.RECORDS).encode()
        with pytest.raises(CorruptObjectError, match="place"):
            decode_slot(data, "k", NAMESPACE)


def test_keys_are_those_of_the_format() -> None:
    assert LOG.slot_key(0x2A) == (
        "_streammeta_demo/wal/0000000007/0000001700000000000/000000000000002a"
    )
    assert LOG.recovered_key == "_streammeta_demo/wal/0000000007/0000001700000000000/recovered"
    assert LOG.swept_key == "_streammeta_demo/wal/0000000007/0000001700000000000/swept"


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_keys_are_read_back_in_the_order_of_their_numbers(
    node_id: int, node_epoch: int, sequence: int
) -> None:
    log = LogName(NAMESPACE, node_id, node_epoch)
    assert parse_log_key(log.slot_key(sequence), NAMESPACE) == SlotKey(log, sequence)
    assert parse_log_key(log.recovered_key, NAMESPACE) == RecoveredKey(log)
    assert parse_log_key(log.swept_key, NAMESPACE) == SweptKey(log)
    assert parse_log_key(log.aside_key("0f" * 16), NAMESPACE) == AsideKey(node_id)
    if sequence:
        assert log.slot_key(sequence - 1) < log.slot_key(sequence)
    if node_epoch:
        assert LogName(NAMESPACE, node_id, node_epoch - 1).prefix < log.prefix


def test_keys_that_would_not_be_made_belong_to_no_log() -> None:
    good = LOG.slot_key(5)
    rng = random.Random(5)
    for _ in range(2000):
        at = rng.randrange(len(good) + 1)
        cut = rng.randrange(2)
        changed = good[:at] + rng.choice(["", "0", "f", "g", "/", "A", "é", "٣"]) + good[at + cut :]
        found = parse_log_key(changed, NAMESPACE)
        if found is not None:
            assert isinstance(found, SlotKey)
            assert found.log.slot_key(found.sequence) == changed
    for key in [
        "",
        f"{NAMESPACE}/wal/",
        good.upper(),
        f"{LOG.prefix}recovered/x",
        f"{NAMESPACE}/wal/0000000007/9999999999999999999/0000000000000000",
        f"{LOG.prefix}ffffffffffffffff",
        good.replace(NAMESPACE, "_streammeta_other"),
    ]:
        assert parse_log_key(key, NAMESPACE) is None


# ---- logs of AutoMQ ----


HEADER = bytes.fromhex(
    "edcba987 0000000004000000 000000000000005d 0000000000000000 00000007 0000000000000005"
    " ffffffffffffffff"
)


def record(offset: int, body: bytes, magic: int = 0x87654321) -> bytes:
    crc = zlib.crc32(body) & 0x7FFFFFFF
    fields = struct.pack(">IiqI", magic, len(body), offset + 24, crc)
    return fields + struct.pack(">I", zlib.crc32(fields) & 0x7FFFFFFF) + body


def whole(*records: bytes) -> bytes:
    body = b"".join(records)
    return HEADER[:12] + struct.pack(">q", len(body)) + HEADER[20:] + body


def test_a_header_of_the_real_class_is_read() -> None:
    found = automq_log.decode_header(HEADER, "k")
    assert found == automq_log.LogObject(automq_log.ALIGNMENT, 93, 7, 5, -1, 48)
    assert found.end_offset == automq_log.ALIGNMENT + 93
    assert found.next_start == 2 * automq_log.ALIGNMENT


def test_a_header_of_version_0_tells_its_length_by_the_size_of_the_object() -> None:
    old = bytes.fromhex("12345678") + HEADER[4:40]
    assert automq_log.decode_header(old, "k", size=140) == automq_log.LogObject(
        automq_log.ALIGNMENT, 100, 7, 5, -1, 40
    )


def test_a_record_header_of_the_real_class_is_the_same() -> None:
    body = encode_record(RecordBatch(3, 1, 4, 2, b"hi!"))
    made = record(automq_log.ALIGNMENT, body)
    assert made[:24].hex() == "8765432100000024000000000400001808682ae22c6a30de"
    assert list(automq_log.decode_log_records(whole(made), "k")) == [
        automq_log.LogRecord(automq_log.ALIGNMENT, body)
    ]


def test_records_are_read_with_their_offsets_and_padding_without_a_body() -> None:
    first = record(automq_log.ALIGNMENT, b"one")
    padding = record(automq_log.ALIGNMENT + 27, b"\0" * 5, 0x76543210)
    last = record(automq_log.ALIGNMENT + 56, b"two")
    assert list(automq_log.decode_log_records(whole(first, padding, last), "k")) == [
        automq_log.LogRecord(automq_log.ALIGNMENT, b"one"),
        automq_log.LogRecord(automq_log.ALIGNMENT + 27, None),
        automq_log.LogRecord(automq_log.ALIGNMENT + 56, b"two"),
    ]


def test_no_changed_byte_of_a_record_passes() -> None:
    data = whole(record(automq_log.ALIGNMENT, b"payload"))
    for at in range(len(HEADER), len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CorruptObjectError, match="object k"):
            list(automq_log.decode_log_records(bytes(damaged), "k"))
    with pytest.raises(CorruptObjectError):
        list(automq_log.decode_log_records(data[:-1], "k"))


def test_a_reservation_is_read_back_and_another_object_is_none() -> None:
    one = automq_log.Reservation(1, 2, failover=False)
    assert one.encode().hex() == "123456780000000000000001000000000000000200"
    assert automq_log.decode_reservation(one.encode(), "k") == one
    for data in (b"", one.encode()[:-1], one.encode()[:-1] + b"\2", b"?" + one.encode()[1:]):
        with pytest.raises(CorruptObjectError):
            automq_log.decode_reservation(data, "k")
