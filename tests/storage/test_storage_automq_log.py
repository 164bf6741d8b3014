"""AutoMQ's write-ahead log in a bucket, read for inspection: bytes of the real classes."""

from __future__ import annotations

import struct
import zlib

import pytest

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.inspection.automq_log import (
    ALIGNMENT,
    LogObject,
    LogRecord,
    Reservation,
    decode_header,
    decode_log_records,
    decode_reservation,
)
from streammeta.storage.object_format.record import RecordBatch, encode_record

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
    found = decode_header(HEADER, "k")
    assert found == LogObject(ALIGNMENT, 93, 7, 5, -1, 48)
    assert found.end_offset == ALIGNMENT + 93
    assert found.next_start == 2 * ALIGNMENT


def test_a_header_of_version_0_tells_its_length_by_the_size_of_the_object() -> None:
    old = bytes.fromhex("12345678") + HEADER[4:40]
    assert decode_header(old, "k", size=140) == LogObject(ALIGNMENT, 100, 7, 5, -1, 40)


def test_a_record_header_of_the_real_class_is_the_same() -> None:
    body = encode_record(RecordBatch(3, 1, 4, 2, b"hi!"))
    made = record(ALIGNMENT, body)
    assert made[:24].hex() == "8765432100000024000000000400001808682ae22c6a30de"
    assert list(decode_log_records(whole(made), "k")) == [LogRecord(ALIGNMENT, body)]


def test_records_are_read_with_their_offsets_and_padding_without_a_body() -> None:
    first = record(ALIGNMENT, b"one")
    padding = record(ALIGNMENT + 27, b"\0" * 5, 0x76543210)
    last = record(ALIGNMENT + 56, b"two")
    assert list(decode_log_records(whole(first, padding, last), "k")) == [
        LogRecord(ALIGNMENT, b"one"),
        LogRecord(ALIGNMENT + 27, None),
        LogRecord(ALIGNMENT + 56, b"two"),
    ]


def test_no_changed_byte_of_a_record_passes() -> None:
    data = whole(record(ALIGNMENT, b"payload"))
    for at in range(len(HEADER), len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CorruptObjectError, match="object k"):
            list(decode_log_records(bytes(damaged), "k"))
    with pytest.raises(CorruptObjectError):
        list(decode_log_records(data[:-1], "k"))


def test_a_reservation_is_read_back_and_another_object_is_none() -> None:
    one = Reservation(1, 2, failover=False)
    assert one.encode().hex() == "123456780000000000000001000000000000000200"
    assert decode_reservation(one.encode(), "k") == one
    for data in (b"", one.encode()[:-1], one.encode()[:-1] + b"\2", b"?" + one.encode()[1:]):
        with pytest.raises(CorruptObjectError):
            decode_reservation(data, "k")
