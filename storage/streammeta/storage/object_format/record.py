"""One record batch and its bytes: the unit that a broker appends and a reader gets back.

Owns the 33-byte header and the checks on it, for one record and for many that follow each other.
Knows nothing of blocks, objects or where bytes come from. Layout, big-endian: u8 magic 0x22, i64
stream id, i64 epoch, i64 base offset, i32 count, i32 payload length, payload. There is no checksum
in it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

from streammeta.storage.errors import CorruptObjectError

RECORD_MAGIC = 0x22
RECORD_HEADER_SIZE = 33
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

_HEADER = struct.Struct(">Bqqqii")
_SIZE_POSITION = 29

pack_record_header = _HEADER.pack
"""Encode magic, stream id, epoch, base offset, count and payload length, unchecked but for their
width: `struct.error` is raised on a number that does not fit."""


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


class _Unfrozen:
    """A `RecordBatch` in the making.

    A frozen dataclass sets its fields through `object.__setattr__`, which is most of the time that
    decoding takes. An instance of a class with the same slots may change its class instead.
    """

    __slots__ = ("base_offset", "count", "epoch", "payload", "stream_id")

    def __init__(
        self, stream_id: int, epoch: int, base_offset: int, count: int, payload: bytes
    ) -> None:
        self.stream_id = stream_id
        self.epoch = epoch
        self.base_offset = base_offset
        self.count = count
        self.payload = payload


def encode_record_header(record: RecordBatch) -> bytes:
    """Encode the 33 bytes before the payload. Raises `ValueError` naming the field out of range."""
    check_encodable(record)
    return pack_record_header(
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


def check_encodable(record: RecordBatch) -> None:
    """Raise `ValueError` naming the field that is out of range, if one is."""
    for field, value, low, high in (
        ("stream_id", record.stream_id, 0, INT64_MAX),
        ("epoch", record.epoch, 0, INT64_MAX),
        ("count", record.count, 1, INT32_MAX),
        ("base_offset", record.base_offset, 0, INT64_MAX - record.count),
        ("payload length", len(record.payload), 0, INT32_MAX - RECORD_HEADER_SIZE),
    ):
        if not low <= value <= high:
            raise ValueError(f"record {field} is {value}, wanted {low}..{high}")


def decode_record(
    data: memoryview, at: int, *, source: str = "record", origin: int = 0
) -> RecordBatch:
    """Read the record that starts at `data[at]`.

    `source` names the object and `origin` is the position of `data[0]` in it, both for the
    message of `CorruptObjectError`, raised when the record is cut short or breaks the format.
    """
    records: list[RecordBatch] = []
    decode_records(data, at, 1, records, source=source, origin=origin)
    return records[0]


def decode_records(
    data: memoryview,
    at: int,
    count: int,
    records: list[RecordBatch],
    *,
    source: str = "record",
    origin: int = 0,
) -> int:
    """Append the `count` records that follow each other from `data[at]` on; return their end.

    `source` and `origin` are those of `decode_record`, and so is the error. What precedes a record
    that raises it has been appended.
    """
    unpack, add, end = _HEADER.unpack_from, records.append, len(data)
    for _ in range(count):
        start = at + RECORD_HEADER_SIZE
        if start > end:
            _raise_fault(data, at, source, origin)
        magic, stream_id, epoch, base, offsets, length = unpack(data, at)
        stop = start + length
        if (
            magic != RECORD_MAGIC
            or length < 0
            or stop > end
            or offsets < 1
            or stream_id | epoch | base < 0  # the sign of one is the sign of all
            or base > INT64_MAX - offsets
        ):
            _raise_fault(data, at, source, origin)
        record = _Unfrozen(stream_id, epoch, base, offsets, data[start:stop].tobytes())
        record.__class__ = RecordBatch  # type: ignore[assignment]
        add(record)  # type: ignore[arg-type]
        at = stop
    return at


def _raise_fault(data: memoryview, at: int, source: str, origin: int) -> NoReturn:
    """Say what is wrong with the record at `data[at]`."""
    left = len(data) - at
    if left < RECORD_HEADER_SIZE:
        raise CorruptObjectError(
            source,
            origin + at,
            "what is left for a record header",
            found=f"{left} bytes",
            expected=f"{RECORD_HEADER_SIZE} bytes",
        )
    magic, stream_id, epoch, base, count, length = _HEADER.unpack_from(data, at)
    if magic != RECORD_MAGIC:
        raise CorruptObjectError(
            source,
            origin + at,
            "record magic",
            found=f"{magic:#04x}",
            expected=f"{RECORD_MAGIC:#04x}",
        )
    if not 0 <= length <= left - RECORD_HEADER_SIZE:
        raise CorruptObjectError(
            source,
            origin + at + _SIZE_POSITION,
            "record payload length",
            found=length,
            expected=f"0..{left - RECORD_HEADER_SIZE}",
        )
    raise CorruptObjectError(
        source,
        origin + at + 1,
        "record header",
        found=f"stream {stream_id}, epoch {epoch}, base offset {base}, count {count}",
        expected="a count of at least 1, the others not negative, the end below 2^63",
    )
