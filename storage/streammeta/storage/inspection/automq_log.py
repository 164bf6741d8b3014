"""Write-ahead logs of AutoMQ in a bucket: bytes of objects, and what a recovery takes of them.

An object is a header, of 48 bytes or, in version 0, of 40, and records; a record is a header of 24
bytes and a body, itself an encoded record batch. Offsets are logical bytes; each object begins at a
multiple of 64 MiB, so a record's offset less that of its object is its place. Checksums are CRC-32
without the highest bit. Reading only, for inspection: this product's own logs have another layout
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
    """An object of a log: where its records begin, and whose they are.

    `trim_offset` is that up to which, inclusive, the log was trimmed; `NO_TRIM` for none.
    """

    start_offset: int
    body_length: int
    node_id: int
    node_epoch: int
    trim_offset: int
    header_size: int

    @property
    def end_offset(self) -> int:
        """The logical offset behind the last record."""
        return self.start_offset + self.body_length

    @property
    def next_start(self) -> int:
        """Where the object behind this one begins."""
        return -(-self.end_offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record: its logical offset, and its body, None for padding."""

    offset: int
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Reservation:
    """The process that owns a node's log, or, with `failover`, recovers it."""

    node_id: int
    node_epoch: int
    failover: bool

    def encode(self) -> bytes:
        """Return the 21 bytes of the reservation's object."""
        return _RESERVATION.pack(_RESERVED, self.node_id, self.node_epoch, self.failover)


def decode_reservation(data: bytes, source: str) -> Reservation:
    """Read the object that says whose a log is. Raises `CorruptObjectError`."""
    if len(data) != _RESERVATION.size:
        raise CorruptObjectError(source, 0, "the length", len(data), _RESERVATION.size)
    magic, node_id, node_epoch, failover = _RESERVATION.unpack(data)
    if magic != _RESERVED or failover not in (0, 1):
        raise CorruptObjectError(source, 0, "the reservation", data.hex(), "magic 12345678")
    return Reservation(node_id, node_epoch, bool(failover))


def decode_header(data: bytes, source: str, size: int | None = None) -> LogObject:
    """Read the header; `size` is that of the whole object, if `data` is only its beginning.

    Raises `CorruptObjectError`.
    """
    magic = int.from_bytes(data[:4])
    layout = _HEADERS.get(magic)
    if layout is None or len(data) < layout.size:
        raise CorruptObjectError(source, 0, "the header", data[:4].hex(), "edcba987 or 12345678")
    _, start, length, _, node_id, node_epoch, *trim = layout.unpack_from(data)
    if not trim:  # version 0 does not say how long its body is
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
    """Return the objects `[start, end)` that a recovery reads, of all there are, in order.

    They begin with the first that ends behind the trim offset, and end before the first gap.
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
    """Return the base offsets that a recovery keeps of records (stream, offset) of one offset each.

    `records` are in the order of the log, `ends` the end offsets of the streams that the node has
    open. Records of others, those below the ends, and those behind a gap are left out.
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
