"""Kafka record batches, format version 2, and their compression: payloads of data streams.

Owns the 61 bytes of the header, their checksum and the records after it (Kafka documentation,
"Record Batch" and "Record", KIP-98), the codecs by number, and the framing of Kafka's clients
(xerial's for snappy). Older message sets are rejected by their magic. Every count or length is
checked against the available bytes, and decompression stops at a limit.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal

import google_crc32c

from streammeta.storage.errors import PayloadError
from streammeta.storage.installation import optional_packages

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_SIZE = 16
_LENGTH = struct.Struct(">i")
# 16 selects the gzip format in zlib.
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


class Compression(IntEnum):
    """Compression of a batch's records: bits 0-2 of its attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def decompress(codec: Compression, data: memoryview, limit: int, *, origin: int = 0) -> bytes:
    """Return the decompressed `data`.

    Raises `PayloadError` if it is malformed or has more than `limit` bytes. `origin` is the
    position of `data[0]` in the payload, for the message.
    """
    match codec:
        case Compression.NONE:
            return bytes(data)
        case Compression.GZIP:
            return _gunzip(data, limit, origin)
        case Compression.SNAPPY:
            return _unsnap(data, limit, origin)
        case Compression.LZ4:
            return _from_frames("lz4", data, limit, origin)
        case Compression.ZSTD:
            return _from_frames("zstd", data, limit, origin)


def _gunzip(data: memoryview, limit: int, origin: int) -> bytes:
    inflating = zlib.decompressobj(_GZIP_WINDOW)
    try:
        # One byte more than allowed shows the excess without decompressing the rest.
        out = inflating.decompress(data, limit + 1)
    except zlib.error as error:
        raise _malformed(Compression.GZIP, origin, error) from error
    if len(out) <= limit and not inflating.eof:
        raise _malformed(Compression.GZIP, origin, "it is cut short")
    if len(out) > limit:
        raise _too_large(limit, origin)
    return out


def _from_frames(codec: Literal["lz4", "zstd"], data: memoryview, limit: int, origin: int) -> bytes:
    """Decompress LZ4 or Zstandard frames as a stream, without trusting their stated size."""
    with optional_packages(f"{codec} data"):
        import pyarrow as pa  # slow to import, and most payloads are not compressed

    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), codec) as stream:
            out: bytes = stream.read(limit + 1)
    except OSError as error:  # what Arrow raises on malformed frames
        raise _malformed(Compression[codec.upper()], origin, error) from error
    if len(out) > limit:
        raise _too_large(limit, origin)
    return out


def _unsnap(data: memoryview, limit: int, origin: int) -> bytes:
    """Decompress a snappy block, or blocks in the framing of Kafka's Java clients."""
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _unsnap_block(data, limit, origin)

    parts: list[bytes] = []
    at, left = _XERIAL_HEADER_SIZE, limit
    while at < len(data):
        if len(data) - at < _LENGTH.size:
            raise _malformed(Compression.SNAPPY, origin + at, "the length of a block is cut short")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        # The framing comes from a client and may name any length.
        if not 0 <= length <= len(data) - at:
            raise _malformed(
                Compression.SNAPPY, origin + at, f"a block has {length} of {len(data) - at} bytes"
            )
        parts.append(_unsnap_block(data[at : at + length], left, origin + at))
        left -= len(parts[-1])
        at += length

    return b"".join(parts)


def _unsnap_block(data: memoryview, limit: int, origin: int) -> bytes:
    with optional_packages("snappy data"):
        import pyarrow as pa

    size = _snappy_size(data, origin)
    # The block states its size, so it is rejected before memory is allocated.
    if size > limit:
        raise _too_large(limit, origin)
    try:
        out: bytes = pa.Codec("snappy").decompress(
            pa.py_buffer(data), decompressed_size=size, asbytes=True
        )
    except OSError as error:
        raise _malformed(Compression.SNAPPY, origin, error) from error
    return out


def _snappy_size(data: memoryview, origin: int) -> int:
    """Decode the varint before a snappy block: its decompressed size, at most 32 bits."""
    size = 0
    for index, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return size
    raise _malformed(Compression.SNAPPY, origin, "its size is cut short or too long")


def _too_large(limit: int, origin: int) -> PayloadError:
    most = f"{limit} bytes"
    what = "decompressed size of the records"
    return PayloadError(origin, what, f"more than {most}", f"at most {most}")


def _malformed(codec: Compression, position: int, why: object) -> PayloadError:
    reason = " ".join(str(why).split())
    return PayloadError(position, f"{codec.name} data", f"malformed ({reason})", "well-formed data")


KAFKA_MAGIC = 2
MAX_DECOMPRESSED_BYTES = 64 * 1024 * 1024
"""Limit of decompression in bytes, above what brokers accept by default."""

_HEADER = struct.Struct(">qiibIhiqqqhii")
_LOG_OVERHEAD = 12
_LENGTH_POSITION, _MAGIC_POSITION, _CRC_POSITION, _CRC_START, _COUNT_POSITION = 8, 16, 17, 21, 57
_NO_SEQUENCE = -1
_INT32_MAX = 2**31 - 1
_SMALLEST_RECORD = 7
_CODEC_MASK, _LOG_APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20


@dataclass(frozen=True)
class KafkaBatch:
    """Header of a batch, and its encoded records.

    `position` is the start of the batch in its payload, `size` its bytes including the header.
    Timestamps are in ms since 1970. The fields have the order of the header.
    """

    position: int
    size: int
    data: memoryview
    base_offset: int
    partition_leader_epoch: int
    checksum: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.base_offset + self.last_offset_delta

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last record, wrapping to 0 after 2^31-1, or -1 without one."""
        if self.base_sequence == _NO_SEQUENCE:
            return _NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) % (_INT32_MAX + 1)

    @property
    def compression_name(self) -> str:
        """Name of the codec, `UNKNOWN_n` for an undefined one."""
        number = self.attributes & _CODEC_MASK
        return Compression(number).name if number in tuple(Compression) else f"UNKNOWN_{number}"

    @property
    def timestamp_type(self) -> str:
        """Origin of the timestamps: `CREATE_TIME` or `LOG_APPEND_TIME`."""
        return "LOG_APPEND_TIME" if self.attributes & _LOG_APPEND_TIME else "CREATE_TIME"

    @property
    def is_transactional(self) -> bool:
        """Whether the batch is part of a transaction."""
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        """Whether its records are transaction markers, not data."""
        return bool(self.attributes & _CONTROL)

    @cached_property
    def computed_checksum(self) -> int:
        """CRC-32C of the bytes that `checksum` covers, from the attributes on."""
        return int(google_crc32c.value(bytes(self.data[_CRC_START:])))

    @property
    def is_intact(self) -> bool:
        """Whether the bytes match the checksum."""
        return self.checksum == self.computed_checksum


@dataclass(frozen=True, slots=True)
class KafkaRecord:
    """A record of a batch. `timestamp` is in ms since 1970, `headers` are in order."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def decode_kafka_batches(payload: bytes | memoryview) -> list[KafkaBatch]:
    """Decode the headers of the batches that fill `payload` exactly.

    Raises `PayloadError` for another format or a truncated batch. Does not compare checksums, see
    `KafkaBatch.is_intact`.
    """
    view = memoryview(payload)
    batches: list[KafkaBatch] = []
    at = 0
    while at < len(view) or not batches:
        batches.append(_decode_batch(view, at))
        at += batches[-1].size
    return batches


def _decode_batch(view: memoryview, at: int) -> KafkaBatch:
    left = len(view) - at
    if left > _MAGIC_POSITION and view[at + _MAGIC_POSITION] != KAFKA_MAGIC:
        raise PayloadError(
            at + _MAGIC_POSITION,
            "magic of a Kafka record batch",
            view[at + _MAGIC_POSITION],
            KAFKA_MAGIC,
        )
    if left < _HEADER.size:
        raise PayloadError(at, "remaining length for a batch header", f"{left} bytes", _HEADER.size)

    base_offset, length, leader_epoch, _, *fields = _HEADER.unpack_from(view, at)
    if not _HEADER.size - _LOG_OVERHEAD <= length <= left - _LOG_OVERHEAD:
        raise PayloadError(
            at + _LENGTH_POSITION,
            "batch length",
            length,
            f"{_HEADER.size - _LOG_OVERHEAD}..{left - _LOG_OVERHEAD}",
        )

    size = _LOG_OVERHEAD + length
    return KafkaBatch(at, size, view[at : at + size], base_offset, leader_epoch, *fields)


def decode_kafka_records(
    batch: KafkaBatch, limit: int = MAX_DECOMPRESSED_BYTES
) -> list[KafkaRecord]:
    """Decompress and read the records of `batch`.

    Raises `PayloadError` when the checksum does not hold, the codec is unknown, the records take
    more than `limit` bytes decompressed, or break the format.
    """
    if not batch.is_intact:
        raise PayloadError(
            batch.position + _CRC_POSITION,
            "CRC-32C of a Kafka record batch",
            f"{batch.computed_checksum:#010x}",
            f"{batch.checksum:#010x}",
        )
    if batch.attributes & _CODEC_MASK not in tuple(Compression):
        raise PayloadError(
            batch.position + _CRC_START,
            "codec in the attributes of a batch",
            batch.attributes & _CODEC_MASK,
            f"0..{max(Compression)}",
        )

    codec = Compression(batch.attributes & _CODEC_MASK)
    origin = batch.position + _HEADER.size
    data = decompress(codec, batch.data[_HEADER.size :], limit, origin=origin)
    if not 0 <= batch.record_count <= len(data) // _SMALLEST_RECORD:
        raise PayloadError(
            batch.position + _COUNT_POSITION,
            "record count of a batch",
            batch.record_count,
            f"0..{len(data) // _SMALLEST_RECORD}, what {len(data)} bytes can hold",
        )

    cursor = _Cursor(data, 0, len(data), origin)
    records = [_decode_record(cursor, batch) for _ in range(batch.record_count)]
    cursor.expect_end("the last record of a batch")

    return records


class _Cursor:
    """Reads consecutive variable-length numbers and byte strings, up to `end`."""

    __slots__ = ("_at", "_data", "_end", "_origin")

    def __init__(self, data: bytes, at: int, end: int, origin: int) -> None:
        self._data = data
        self._at = at
        self._end = end
        self._origin = origin

    def varint(self, bits: int = 32) -> int:
        """Read a zigzag number of `bits` bits, in groups of 7 from the lowest on."""
        value = 0
        for shift in range(0, bits, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
        raise self.wrong("a variable-length number", "longer", f"at most {bits} bits")

    def cut(self, length: int) -> bytes:
        """Read `length` bytes."""
        if not 0 <= length <= self.left:
            raise self.wrong("a length in a record", length, f"0..{self.left}")
        start, self._at = self._at, self._at + length
        return self._data[start : self._at]

    def optional(self) -> bytes | None:
        """Read a length and as many bytes. The length -1 means None."""
        length = self.varint()
        return None if length == -1 else self.cut(length)

    def within(self, length: int) -> _Cursor:
        """Return a cursor over the next `length` bytes, and skip them."""
        start = self._at
        self.cut(length)
        return _Cursor(self._data, start, self._at, self._origin)

    @property
    def position(self) -> int:
        """Position of the next byte in the payload, after decompression if compressed."""
        return self._origin + self._at

    @property
    def left(self) -> int:
        """Bytes up to the end."""
        return self._end - self._at

    def expect_end(self, what: str) -> None:
        """Raise `PayloadError` if bytes remain after `what`."""
        if self.left:
            raise self.wrong(f"rest after {what}", f"{self.left} bytes", "0 bytes")

    def wrong(self, what: str, found: object, expected: object) -> PayloadError:
        """Return the error for the content at the position."""
        return PayloadError(self.position, what, found, expected)

    def _byte(self) -> int:
        if self._at >= self._end:
            raise self.wrong("a number in a record", "cut", "whole")
        self._at += 1
        return self._data[self._at - 1]


def _decode_record(cursor: _Cursor, batch: KafkaBatch) -> KafkaRecord:
    record = cursor.within(cursor.varint())
    record.cut(1)  # attributes: none are defined
    timestamp = batch.base_timestamp + record.varint(64)
    if batch.attributes & _LOG_APPEND_TIME:
        timestamp = batch.max_timestamp
    offset = batch.base_offset + record.varint()
    key, value = record.optional(), record.optional()
    headers = tuple(_headers(record))
    record.expect_end("the headers of a record")
    return KafkaRecord(offset, timestamp, key, value, headers)


def _headers(record: _Cursor) -> Iterator[tuple[str, bytes | None]]:
    count = record.varint()
    if not 0 <= count <= record.left // 2:
        raise record.wrong("header count of a record", count, f"0..{record.left // 2}")
    for _ in range(count):
        name = record.cut(record.varint()).decode(errors="backslashreplace")
        yield name, record.optional()
