"""AutoMQ's write-ahead logs in a bucket: decoding of objects, and the records of a recovery.

An object is a header, of 48 bytes (40 in version 0), and records. A record is a header of 24 bytes
and a body, an encoded record batch. Offsets are logical bytes. Each object begins at a multiple of
64 MiB, so a record's position is its offset minus the object's offset. Checksums are CRC-32 without
the highest bit. The module only reads, for inspection. This product's logs have another layout
(`streammeta.storage.object_log`). Pure.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from streammeta.storage.errors import CorruptObjectError

ALIGNMENT = 64 * 1024 * 1024
NO_TRIM = -1

_HEADERS = {0xEDCBA987: struct.Struct(">Iqqqiqq"), 0x12345678: struct.Struct(">Iqqqiq")}
_RECORD = struct.Struct(">IiqII")
_RESERVATION = struct.Struct(">Iqqb")
_DATA, _PADDING = 0x87654321, 0x76543210
_RESERVED = 0x12345678
_CRC_MASK = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class LogObject:
    """An object of a log: the start and the owner of its records.

    `trim_offset` is the last trimmed offset of the log, or `NO_TRIM`.
    """

    start_offset: int
    body_length: int
    node_id: int
    node_epoch: int
    trim_offset: int
    header_size: int

    @property
    def end_offset(self) -> int:
        """The logical offset after the last record."""
        return self.start_offset + self.body_length

    @property
    def next_start(self) -> int:
        """The logical offset of the next object."""
        return -(-self.end_offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record: its logical offset, and its body or None for padding."""

    offset: int
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Reservation:
    """The process that owns a node's log, or, with `failover`, recovers it."""

    node_id: int
    node_epoch: int
    failover: bool

    def encode(self) -> bytes:
        """Encode the reservation's object of 21 bytes."""
        return _RESERVATION.pack(_RESERVED, self.node_id, self.node_epoch, self.failover)


def decode_reservation(data: bytes, source: str) -> Reservation:
    """Decode the object that names the owner of a log. Raises `CorruptObjectError`."""
    if len(data) != _RESERVATION.size:
        raise CorruptObjectError(source, 0, "the length", len(data), _RESERVATION.size)
    magic, node_id, node_epoch, failover = _RESERVATION.unpack(data)
    if magic != _RESERVED or failover not in (0, 1):
        raise CorruptObjectError(source, 0, "the reservation", data.hex(), "magic 12345678")
    return Reservation(node_id, node_epoch, bool(failover))


def decode_header(data: bytes, source: str, size: int | None = None) -> LogObject:
    """Decode the header. `size` is the size of the whole object, if `data` is only its start.

    Raises `CorruptObjectError`.
    """
    magic = int.from_bytes(data[:4])
    layout = _HEADERS.get(magic)
    if layout is None or len(data) < layout.size:
        raise CorruptObjectError(source, 0, "the header", data[:4].hex(), "edcba987 or 12345678")
    _, start, length, _, node_id, node_epoch, *trim = layout.unpack_from(data)
    if not trim:  # version 0 does not contain the body's length
        length = (len(data) if size is None else size) - layout.size
    trim_offset = trim[0] if trim else NO_TRIM
    return LogObject(start, length, node_id, node_epoch, trim_offset, layout.size)


def decode_log_records(data: bytes, source: str) -> Iterator[LogRecord]:
    """Yield the records of a whole object, in its order. Raises `CorruptObjectError`."""
    header = decode_header(data, source)
    at = header.header_size
    while at < len(data):
        if len(data) - at < _RECORD.size:
            raise CorruptObjectError(source, at, "a record's header", len(data) - at, _RECORD.size)

        magic, length, body_offset, body_crc, crc = _RECORD.unpack_from(data, at)
        offset = header.start_offset + at - header.header_size
        body = data[at + _RECORD.size :][: max(0, length)]
        if magic not in (_DATA, _PADDING) or crc != _checksum(data[at : at + 20]):
            raise CorruptObjectError(source, at, "a record's header", f"{magic:x}", "a whole one")
        if body_offset != offset + _RECORD.size or len(body) != length:
            raise CorruptObjectError(source, at, "a record's place", body_offset, offset)
        if magic == _DATA and body_crc != _checksum(body):
            raise CorruptObjectError(source, at, "a record's CRC", _checksum(body), body_crc)

        yield LogRecord(offset, body if magic == _DATA else None)
        at += _RECORD.size + length


def continuous_ranges(
    ranges: Iterable[tuple[int, int]], trim_offset: int = NO_TRIM
) -> list[tuple[int, int]]:
    """Return the objects `[start, end)` that a recovery reads, in order.

    They begin with the first object that ends after the trim offset, and end before the first gap.
    """
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if end <= trim_offset:
            continue
        if found and found[-1][1] != start:
            break
        found.append((start, end))
    return found


def recoverable(
    records: Iterable[tuple[int, int]], ends: Mapping[int, int]
) -> dict[int, list[int]]:
    """Return the base offsets that a recovery keeps, by stream. Each record has one offset.

    `records` are pairs of stream and offset in log order, `ends` the end offsets of the node's open
    streams. Records of other streams, below the ends, or after a gap are dropped.
    """
    expected = dict(ends)
    kept: dict[int, list[int]] = {}
    for stream_id, offset in records:
        if offset == expected.get(stream_id):
            kept.setdefault(stream_id, []).append(offset)
            expected[stream_id] = offset + 1
    return kept


def _checksum(data: bytes) -> int:
    return zlib.crc32(data) & _CRC_MASK
