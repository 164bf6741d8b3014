"""Data blocks: the header in front of a run of records of one stream, and reading runs of blocks.

Owns the 10-byte header: u8 magic 0x5A, u8 flag 0x02, i32 record count, i32 data length. Compaction
glues blocks together under one index entry, so a range of bytes is always read as one or more
blocks. The flag's low bits are reserved for compression; no other value than 0x02 was ever written,
and a block with another flag is refused, or noted (see `deviation`), rather than passed in silence.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.deviation import Deviation, deviate
from streammeta.storage.object_format.record import (
    INT32_MAX,
    RECORD_HEADER_SIZE,
    RecordBatch,
    decode_records,
)

BLOCK_MAGIC = 0x5A
BLOCK_FLAG = 0x02
BLOCK_HEADER_SIZE = 10

MAX_BLOCK_SIZE = INT32_MAX - 2
"""Largest block with its header, in bytes: a JVM has no array that is longer, and reads a block
into one."""
MAX_BLOCK_DATA = MAX_BLOCK_SIZE - BLOCK_HEADER_SIZE
"""Bytes of the records of the largest block."""
MAX_PAYLOAD_SIZE = MAX_BLOCK_DATA - RECORD_HEADER_SIZE
"""Bytes of the largest payload: that of the one record of the largest block."""

_HEADER = struct.Struct(">BBii")
_FLAG_POSITION, _COUNT_POSITION, _LENGTH_POSITION = 1, 2, 6


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Number of records in a block, and the bytes they take."""

    record_count: int
    data_length: int


def encode_block_header(record_count: int, data_length: int) -> bytes:
    """Encode the header of a block of `record_count` records that take `data_length` bytes."""
    return _HEADER.pack(BLOCK_MAGIC, BLOCK_FLAG, record_count, data_length)


def decode_block_header(
    data: memoryview,
    at: int,
    *,
    end: int | None = None,
    source: str = "block",
    origin: int = 0,
    noted: list[Deviation] | None = None,
) -> BlockHeader:
    """Read the header at `data[at]` of a block that ends at or before `end`, the end of `data`.

    A larger `end` is for a caller that has not all of the block yet. `source` names the object,
    `origin` is the position of `data[0]` in it. Raises `CorruptObjectError` when the header is cut
    short, or can't be that of such a block; deviations are passed over if they are to be `noted`.
    """
    if len(data) - at < BLOCK_HEADER_SIZE:
        raise CorruptObjectError(
            source,
            origin + at,
            "what is left for a block header",
            found=f"{len(data) - at} bytes",
            expected=f"{BLOCK_HEADER_SIZE} bytes",
        )
    left = (len(data) if end is None else end) - at - BLOCK_HEADER_SIZE
    magic, flag, count, length = _HEADER.unpack_from(data, at)
    if magic != BLOCK_MAGIC:
        raise CorruptObjectError(
            source,
            origin + at,
            "block magic",
            found=f"{magic:#04x}",
            expected=f"{BLOCK_MAGIC:#04x}",
        )
    if flag != BLOCK_FLAG:
        deviate(
            noted,
            source,
            origin + at + _FLAG_POSITION,
            "block flag",
            found=f"{flag:#04x}",
            expected=f"{BLOCK_FLAG:#04x}",
        )
    if not 0 <= length <= left:
        raise CorruptObjectError(
            source,
            origin + at + _LENGTH_POSITION,
            "block data length",
            found=length,
            expected=f"0..{left}",
        )
    if count == 0 and length == 0:
        deviate(
            noted,
            source,
            origin + at + _COUNT_POSITION,
            "block record count",
            found=0,
            expected="1 or more",
        )
    elif not 1 <= count <= length // RECORD_HEADER_SIZE:
        raise CorruptObjectError(
            source,
            origin + at + _COUNT_POSITION,
            "block record count",
            found=count,
            expected=f"1..{length // RECORD_HEADER_SIZE}, what {length} bytes can hold",
        )
    return BlockHeader(count, length)


def decode_blocks(
    data: memoryview,
    *,
    source: str = "block",
    origin: int = 0,
    noted: list[Deviation] | None = None,
) -> list[RecordBatch]:
    """Read all records of the blocks that fill `data` exactly.

    `source` names the object, `origin` is the position of `data[0]` in it. Raises
    `CorruptObjectError` when anything is cut short, left over, or breaks the format; deviations are
    passed over if they are to be `noted`.
    """
    records: list[RecordBatch] = []
    at = 0
    while at < len(data):
        header = decode_block_header(data, at, source=source, origin=origin, noted=noted)
        stop = at + BLOCK_HEADER_SIZE + header.data_length
        at = decode_records(
            data[:stop],
            at + BLOCK_HEADER_SIZE,
            header.record_count,
            records,
            source=source,
            origin=origin,
        )
        if at != stop:
            raise CorruptObjectError(
                source,
                origin + at,
                f"what is behind the last of {header.record_count} records of a block",
                found=f"{stop - at} bytes",
                expected="0 bytes",
            )
    return records
