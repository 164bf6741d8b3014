"""Encoding of record batches and data blocks.

A record batch is the unit that a broker appends and reads. Big-endian: u8 magic 0x22, i64 stream
id, i64 epoch, i64 base offset, i32 count, i32 payload length, payload. It has no checksum. A data
block is a sequence of record batches of one stream after a 10-byte header: u8 magic 0x5A, u8 flag
0x02, i32 record count, i32 data length. Compaction puts several blocks under one index entry, so a
range of bytes always decodes to one or more blocks. The flag's low bits are reserved for
compression. No writer has used another value than 0x02, so any other is an error or a `Deviation`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from streammeta.storage.errors import UNNAMED, CorruptObjectError, Source

RECORD_MAGIC = 0x22
RECORD_HEADER_SIZE = 33
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

_RECORD_HEADER = struct.Struct(">Bqqqii")
_BASE_OFFSET = struct.Struct(">q")
_BASE_POSITION, _SIZE_POSITION = 17, 29

pack_record_header = _RECORD_HEADER.pack
"""Encode magic, stream id, epoch, base offset, count and payload length. Checks only their width:
`struct.error` is raised on a number that does not fit."""


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Consecutive offsets `[base_offset, end_offset)` of a stream and their opaque payload.

    `epoch` is the stream epoch of the writer, `count` the number of offsets covered (1..2^31-1).
    """

    stream_id: int
    epoch: int
    base_offset: int
    count: int
    payload: bytes

    @property
    def end_offset(self) -> int:
        """The offset after the last one covered."""
        return self.base_offset + self.count

    @property
    def encoded_size(self) -> int:
        """Bytes of the encoded record: header and payload."""
        return RECORD_HEADER_SIZE + len(self.payload)


class _Unfrozen:
    """A `RecordBatch` under construction.

    A frozen dataclass sets its fields through `object.__setattr__`, which takes most of the
    decoding time. An instance of a class with the same slots can change its class instead.
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


def encode_record(record: RecordBatch) -> bytes:
    """Encode a record. Raises `ValueError`, naming the field out of range."""
    check_encodable(record)
    header = pack_record_header(
        RECORD_MAGIC,
        record.stream_id,
        record.epoch,
        record.base_offset,
        record.count,
        len(record.payload),
    )
    return header + record.payload


def check_encodable(record: RecordBatch) -> None:
    """Raise `ValueError`, naming the field, if a field is out of range."""
    # Ranges of AutoMQ's reader, which uses signed Java numbers.
    for field, value, low, high in (
        ("stream_id", record.stream_id, 0, INT64_MAX),
        ("epoch", record.epoch, 0, INT64_MAX),
        ("count", record.count, 1, INT32_MAX),
        ("base_offset", record.base_offset, 0, INT64_MAX - record.count),
        ("payload length", len(record.payload), 0, INT32_MAX - RECORD_HEADER_SIZE),
    ):
        if not low <= value <= high:
            raise ValueError(f"record {field} is {value}, expected {low}..{high}")


def decode_record(data: memoryview, at: int, *, source: Source = UNNAMED) -> RecordBatch:
    """Decode the record at `data[at]`.

    Raises `CorruptObjectError` if the record is cut short or breaks the format. `source` names the
    origin of `data` in the message.
    """
    records: list[RecordBatch] = []
    decode_records(data, at, 1, records, source)
    return records[0]


def decode_records(
    data: memoryview,
    at: int,
    count: int,
    records: list[RecordBatch],
    source: Source,
    shift: int = 0,
) -> int:
    """Append the `count` consecutive records from `data[at]` to `records`, and return their end.

    `shift`, 0 or more, is added to their offsets. Raises the error of `decode_record`, after
    appending the records before the faulty one.
    """
    # Local names: this loop decodes every record that a broker reads.
    unpack, add, end = _RECORD_HEADER.unpack_from, records.append, len(data)
    highest = INT64_MAX - shift
    for _ in range(count):
        start = at + RECORD_HEADER_SIZE
        if start > end:
            raise _fault(data, at, source)
        magic, stream_id, epoch, base, offsets, length = unpack(data, at)
        stop = start + length
        if (
            magic != RECORD_MAGIC
            or length < 0
            or stop > end
            # Records without offsets would make two records start at one offset.
            or offsets < 1
            or stream_id | epoch | base < 0  # negative if any of them is
            or base > highest - offsets
        ):
            raise _fault(data, at, source)
        record = _Unfrozen(stream_id, epoch, base + shift, offsets, data[start:stop].tobytes())
        # See `_Unfrozen`.
        record.__class__ = RecordBatch  # type: ignore[assignment]
        add(record)  # type: ignore[arg-type]
        at = stop

    return at


def _fault(data: memoryview, at: int, source: Source) -> CorruptObjectError:
    """Return the error for the record at `data[at]`."""
    left = len(data) - at
    if left < RECORD_HEADER_SIZE:
        return source.corrupt(
            at,
            "remaining size for a record header",
            f"{left} bytes",
            f"{RECORD_HEADER_SIZE} bytes",
        )

    magic, stream_id, epoch, base, count, length = _RECORD_HEADER.unpack_from(data, at)
    if magic != RECORD_MAGIC:
        return source.corrupt(at, "record magic", f"{magic:#04x}", f"{RECORD_MAGIC:#04x}")

    most = left - RECORD_HEADER_SIZE
    if not 0 <= length <= most:
        return source.corrupt(at + _SIZE_POSITION, "record payload length", length, f"0..{most}")
    return source.corrupt(
        at + 1,
        "record header",
        f"stream {stream_id}, epoch {epoch}, base offset {base}, count {count}",
        "a count of at least 1, the others not negative, the end below 2^63",
    )


BLOCK_MAGIC = 0x5A
BLOCK_FLAG = 0x02
BLOCK_HEADER_SIZE = 10

MAX_BLOCK_SIZE = INT32_MAX - 2
"""Largest block with its header, in bytes: a JVM reads a block into an array, whose length is
limited to this."""
MAX_BLOCK_DATA = MAX_BLOCK_SIZE - BLOCK_HEADER_SIZE
"""Largest size of a block's records, in bytes."""
MAX_PAYLOAD_SIZE = MAX_BLOCK_DATA - RECORD_HEADER_SIZE
"""Largest payload in bytes, of a single record in the largest block."""

_BLOCK_HEADER = struct.Struct(">BBii")
_FLAG_POSITION, _COUNT_POSITION, _LENGTH_POSITION = 1, 2, 6


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Number of records in a block, and their size in bytes."""

    record_count: int
    data_length: int


def encode_block_header(record_count: int, data_length: int) -> bytes:
    """Encode the header of a block of `record_count` records with `data_length` bytes."""
    return _BLOCK_HEADER.pack(BLOCK_MAGIC, BLOCK_FLAG, record_count, data_length)


def decode_block_header(
    data: memoryview,
    at: int,
    *,
    end: int | None = None,
    source: Source = UNNAMED,
) -> BlockHeader:
    """Decode the header at `data[at]` of a block that ends at or before `end`.

    `end` is by default the end of `data`, and larger if the caller does not have the whole block
    yet. Raises `CorruptObjectError` if the header is cut short or impossible for such a block.
    `source` names the origin of `data` in the message.
    """
    if len(data) - at < BLOCK_HEADER_SIZE:
        raise source.corrupt(
            at,
            "remaining size for a block header",
            f"{len(data) - at} bytes",
            f"{BLOCK_HEADER_SIZE} bytes",
        )

    # The caller may have only the first bytes of a block.
    left = (len(data) if end is None else end) - at - BLOCK_HEADER_SIZE
    magic, flag, count, length = _BLOCK_HEADER.unpack_from(data, at)
    if magic != BLOCK_MAGIC:
        raise source.corrupt(at, "block magic", f"{magic:#04x}", f"{BLOCK_MAGIC:#04x}")

    if flag != BLOCK_FLAG:
        source.deviate(at + _FLAG_POSITION, "block flag", f"{flag:#04x}", f"{BLOCK_FLAG:#04x}")

    if not 0 <= length <= left:
        raise source.corrupt(at + _LENGTH_POSITION, "block data length", length, f"0..{left}")

    if count == 0 and length == 0:
        source.deviate(at + _COUNT_POSITION, "block record count", 0, "1 or more")
    # Bounds the memory for records before any of them is decoded.
    elif not 1 <= count <= length // RECORD_HEADER_SIZE:
        raise source.corrupt(
            at + _COUNT_POSITION,
            "block record count",
            count,
            f"1..{length // RECORD_HEADER_SIZE}, the most for {length} bytes",
        )

    return BlockHeader(count, length)


def decode_blocks(
    data: memoryview, source: Source = UNNAMED, *, shift: int = 0
) -> list[RecordBatch]:
    """Decode all records of the blocks that fill `data` exactly. `shift` is added to their offsets.

    Raises `CorruptObjectError` if data is cut short, left over, or breaks the format. `source`
    names the origin of `data` in the message.
    """
    records: list[RecordBatch] = []
    at = 0
    while at < len(data):
        header = decode_block_header(data, at, source=source)
        start, stop = at + BLOCK_HEADER_SIZE, at + BLOCK_HEADER_SIZE + header.data_length
        at = decode_records(data[:stop], start, header.record_count, records, source, shift)
        _check_rest(at, stop, header.record_count, source)
    return records


def _check_rest(at: int, stop: int, record_count: int, source: Source) -> None:
    """Raise if a block has bytes after its last record.

    Such bytes belong to no offset, so a count that is too small would hide records.
    """
    if at != stop:
        raise source.corrupt(
            at,
            f"rest after the last of {record_count} records of a block",
            f"{stop - at} bytes",
            "0 bytes",
        )


def shift_blocks(
    data: memoryview, stream_id: int, start_offset: int, shift: int, source: Source = UNNAMED
) -> int:
    """Add `shift` to the offsets of all records in the blocks that fill the writable `data`.

    Before, they are consecutive records of one stream from `start_offset` on. Returns where they
    end afterwards. Nothing else changes, and no payload is copied. `shift` may be negative.
    Raises `CorruptObjectError`, with some offsets changed, if the blocks are damaged or have other
    records.
    """
    at, next_offset = 0, start_offset
    while at < len(data):
        header = decode_block_header(data, at, source=source)
        at += BLOCK_HEADER_SIZE
        stop = at + header.data_length
        block = data[:stop]
        for _ in range(header.record_count):
            if stop - at < RECORD_HEADER_SIZE:
                raise _fault(block, at, source)
            magic, stream, epoch, base, count, length = _RECORD_HEADER.unpack_from(block, at)
            after = at + RECORD_HEADER_SIZE + length
            if magic != RECORD_MAGIC or length < 0 or after > stop or count < 1 or epoch < 0:
                raise _fault(block, at, source)
            if (
                stream != stream_id
                or base != next_offset
                or not 0 <= base + shift <= INT64_MAX - count
            ):
                raise source.corrupt(
                    at + 1,
                    "record to move to other offsets",
                    f"of stream {stream} at offset {base}",
                    f"stream {stream_id} at offset {next_offset}, within 64 bits after {shift:+}",
                )
            _BASE_OFFSET.pack_into(data, at + _BASE_POSITION, base + shift)
            next_offset = base + count
            at = after
        _check_rest(at, stop, header.record_count, source)
    return next_offset + shift
