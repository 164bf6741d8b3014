"""Bytes of one batch in a segment.

Big-endian. Header: magic `SMB1` · header checksum u32 · body checksum u32 · body length u32 · base
offset u64 · epoch u64 · flushed end u64 · kind u8 · payload count u32. Body: one u32 length for
each payload, then the payloads. Both checksums are CRC-32C; the header's begins with the log id, so
a batch of another log, or one at another offset, never passes for this one. `flushed end` is how
far the log was known to be flushed when the batch was written.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import google_crc32c

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.messages import Batch, BatchKind

MAGIC = b"SMB1"
_PREFIX = struct.Struct(">4sI")
_FIELDS = struct.Struct(">IIQQQBI")
HEADER_SIZE = _PREFIX.size + _FIELDS.size


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """What precedes a batch's payloads."""

    body_checksum: int
    body_length: int
    base_offset: EndOffset
    epoch: Epoch
    flushed_end: EndOffset
    kind: int
    count: int

    @property
    def end_offset(self) -> EndOffset:
        """The offset after the last payload."""
        return EndOffset(self.base_offset + self.count)


class BadBatchError(Exception):
    """These bytes are not a whole batch of this log; the message says why."""


def encode_body(payloads: tuple[bytes, ...]) -> bytes:
    """Return the lengths and the payloads."""
    lengths = struct.pack(f">{len(payloads)}I", *map(len, payloads))
    return b"".join((lengths, *payloads))


def encode_batch(batch: Batch, log_id: bytes, flushed_end: EndOffset) -> bytes:
    """Return the bytes of a batch."""
    body = encode_body(batch.payloads)
    fields = _FIELDS.pack(
        google_crc32c.value(body),
        len(body),
        batch.base_offset,
        batch.epoch,
        flushed_end,
        batch.kind,
        len(batch.payloads),
    )
    checksum = google_crc32c.value(log_id + fields)
    return b"".join((_PREFIX.pack(MAGIC, checksum), fields, body))


def decode_header(data: bytes | memoryview, log_id: bytes) -> BatchHeader:
    """Check and split a header; raises BadBatchError."""
    if len(data) < HEADER_SIZE:
        raise BadBatchError(f"{len(data)} bytes left, a header has {HEADER_SIZE}")
    magic, checksum = _PREFIX.unpack(data[: _PREFIX.size])
    if magic != MAGIC:
        raise BadBatchError(f"starts with {bytes(magic)!r}, wanted {MAGIC!r}")
    fields = bytes(data[_PREFIX.size : HEADER_SIZE])
    if checksum != google_crc32c.value(log_id + fields):
        raise BadBatchError("its header's checksum does not match")
    body_checksum, length, base, epoch, flushed, kind, count = _FIELDS.unpack(fields)
    return BatchHeader(
        body_checksum, length, EndOffset(base), Epoch(epoch), EndOffset(flushed), kind, count
    )


def decode_body(header: BatchHeader, body: bytes) -> Batch:
    """Check a body against its header and return the batch; raises BadBatchError."""
    if len(body) < header.body_length:
        raise BadBatchError(f"{len(body)} bytes of body, its header says {header.body_length}")
    if google_crc32c.value(body) != header.body_checksum:
        raise BadBatchError("its body's checksum does not match")
    position = 4 * header.count
    payloads: list[bytes] = []
    for length in struct.unpack_from(f">{header.count}I", body):
        payloads.append(body[position : position + length])
        position += length
    return Batch(header.base_offset, header.epoch, BatchKind(header.kind), tuple(payloads))
