"""Data blocks: the header in front of a run of records of one stream, and reading runs of blocks.

Owns the 10-byte header: u8 magic 0x5A, u8 flag 0x02, i32 record count, i32 data length. Compaction
glues blocks together under one index entry, so a range of bytes is always read as one or more
blocks. The flag's low bits are reserved for compression; no other value than 0x02 was ever written,
and a block with another flag is refused rather than read as something it is not.
"""

from __future__ import annotations

import struct

from storage.errors import CorruptObjectError
from storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch, decode_record

BLOCK_MAGIC = 0x5A
BLOCK_FLAG = 0x02
BLOCK_HEADER_SIZE = 10

_HEADER = struct.Struct(">BBii")


def encode_block_header(record_count: int, data_length: int) -> bytes:
    """Encode the header of a block of `record_count` records that take `data_length` bytes."""
    return _HEADER.pack(BLOCK_MAGIC, BLOCK_FLAG, record_count, data_length)


def decode_blocks(data: memoryview, *, source: str = "block", origin: int = 0) -> list[RecordBatch]:
    """Read all records of the blocks that fill `data` exactly.

    `source` names the object, `origin` is the position of `data[0]` in it. Raises
    `CorruptObjectError` when anything is cut short, left over, or breaks the format.
    """
    records: list[RecordBatch] = []
    at = 0
    while at < len(data):
        count, length = _decode_block_header(data, at, source, origin)
        end = at + BLOCK_HEADER_SIZE + length
        at = _decode_block_records(data[:end], at, count, records, source, origin)
    return records


def _decode_block_header(data: memoryview, at: int, source: str, origin: int) -> tuple[int, int]:
    left = len(data) - at - BLOCK_HEADER_SIZE
    if left < 0:
        raise CorruptObjectError(
            source,
            origin + at,
            f"block header of {BLOCK_HEADER_SIZE} bytes is cut to {left + BLOCK_HEADER_SIZE}",
        )
    magic, flag, count, length = _HEADER.unpack_from(data, at)
    if magic != BLOCK_MAGIC or flag != BLOCK_FLAG:
        raise CorruptObjectError(
            source,
            origin + at,
            f"block magic and flag are {magic:#04x} {flag:#04x},"
            f" wanted {BLOCK_MAGIC:#04x} {BLOCK_FLAG:#04x}",
        )
    if length < 0 or length > left:
        raise CorruptObjectError(
            source, origin + at + 6, f"block data length is {length}, wanted 0..{left}"
        )
    if count < 1 or count * RECORD_HEADER_SIZE > length:
        raise CorruptObjectError(
            source,
            origin + at + 2,
            f"block record count is {count}, wanted 1..{length // RECORD_HEADER_SIZE},"
            f" what {length} bytes can hold",
        )
    return count, length


def _decode_block_records(
    data: memoryview, at: int, count: int, records: list[RecordBatch], source: str, origin: int
) -> int:
    """Append the `count` records of the block at `at`, which ends where `data` ends."""
    at += BLOCK_HEADER_SIZE
    for _ in range(count):
        record = decode_record(data, at, source=source, origin=origin)
        records.append(record)
        at += record.encoded_size
    if at != len(data):
        raise CorruptObjectError(
            source,
            origin + at,
            f"block has {len(data) - at} bytes behind its last of {count} records, wanted 0",
        )
    return at
