"""One record batch and its bytes: the unit that a broker appends and a reader gets back.

Owns the 33-byte header and the checks on it. Knows nothing of blocks, objects or where bytes come
from. Layout, big-endian: u8 magic 0x22, i64 stream id, i64 epoch, i64 base offset, i32 count,
i32 payload length, payload. There is no checksum in it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from storage.errors import CorruptObjectError

RECORD_MAGIC = 0x22
RECORD_HEADER_SIZE = 33
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

_HEADER = struct.Struct(">Bqqqii")


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Consecutive offsets `[base_offset, end_offset)` of one stream and their opaque payload.

    `epoch` is the stream epoch of the writer, `count` the number of offsets covered (1..2^31-1).
    """

    stream_id: int
    epoch: int
    base_offset: int
    count: int
    payload: bytes

    @property
    def end_offset(self) -> int:
        """The offset behind the last one covered."""
        return self.base_offset + self.count

    @property
    def encoded_size(self) -> int:
        """Bytes of the encoded record: header and payload."""
        return RECORD_HEADER_SIZE + len(self.payload)


def encode_record_header(record: RecordBatch) -> bytes:
    """Encode the 33 bytes before the payload. Raises `ValueError` naming the field out of range."""
    _check_encodable(record)
    return _HEADER.pack(
        RECORD_MAGIC,
        record.stream_id,
        record.epoch,
        record.base_offset,
        record.count,
        len(record.payload),
    )


def encode_record(record: RecordBatch) -> bytes:
    """Encode the whole record. Raises `ValueError` naming the field out of range."""
    return encode_record_header(record) + record.payload


def decode_record(
    data: memoryview, at: int, *, source: str = "record", origin: int = 0
) -> RecordBatch:
    """Read the record that starts at `data[at]`.

    `source` names the object and `origin` is the position of `data[0]` in it, both for the
    message of `CorruptObjectError`, raised when the record is cut short or breaks the format.
    """
    left = len(data) - at
    if left < RECORD_HEADER_SIZE:
        raise CorruptObjectError(
            source, origin + at, f"record header of {RECORD_HEADER_SIZE} bytes is cut to {left}"
        )
    magic, stream_id, epoch, base, count, length = _HEADER.unpack_from(data, at)
    if magic != RECORD_MAGIC:
        raise CorruptObjectError(
            source, origin + at, f"record magic is {magic:#04x}, wanted {RECORD_MAGIC:#04x}"
        )
    if length < 0 or length > left - RECORD_HEADER_SIZE:
        raise CorruptObjectError(
            source,
            origin + at + 29,
            f"record payload length is {length}, wanted 0..{left - RECORD_HEADER_SIZE}",
        )
    if count < 1 or stream_id < 0 or epoch < 0 or base < 0 or base > INT64_MAX - count:
        raise CorruptObjectError(
            source,
            origin + at + 1,
            f"record of stream {stream_id}, epoch {epoch}, base offset {base}, count {count};"
            " wanted a count of at least 1, the others not negative, the end below 2^63",
        )
    start = at + RECORD_HEADER_SIZE
    return RecordBatch(stream_id, epoch, base, count, bytes(data[start : start + length]))


def _check_encodable(record: RecordBatch) -> None:
    for field, value, low, high in (
        ("stream_id", record.stream_id, 0, INT64_MAX),
        ("epoch", record.epoch, 0, INT64_MAX),
        ("count", record.count, 1, INT32_MAX),
        ("base_offset", record.base_offset, 0, INT64_MAX - record.count),
        ("payload length", len(record.payload), 0, INT32_MAX - RECORD_HEADER_SIZE),
    ):
        if not low <= value <= high:
            raise ValueError(f"record {field} is {value}, wanted {low}..{high}")
