"""Record batches of format 2 for tests, written by an encoder of their own."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c

_HEAD = struct.Struct(">qiibI")
_BODY = struct.Struct(">hiqqqhii")


@dataclass(frozen=True)
class Rec:
    """A record: time in ms, key, value and headers."""

    timestamp: int
    key: bytes | None = None
    value: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()


def varint(value: int) -> bytes:
    """Encode a zigzag number."""
    rest = (value << 1) ^ (value >> 63)
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def sized(data: bytes | None) -> bytes:
    """Encode bytes behind their length, which is -1 without any."""
    return varint(-1) if data is None else varint(len(data)) + data


def encode_record(rec: Rec, base_time: int, delta: int) -> bytes:
    """Encode a record whose offset is `delta` behind its batch's."""
    headers = b"".join(sized(name.encode()) + sized(value) for name, value in rec.headers)
    body = b"\x00" + varint(rec.timestamp - base_time) + varint(delta)
    body += sized(rec.key) + sized(rec.value) + varint(len(rec.headers)) + headers
    return varint(len(body)) + body


def make_batch(
    records: Sequence[Rec],
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    attributes: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    record_count: int | None = None,
) -> bytes:
    """Return the bytes of a batch of `records`, which follow each other without a gap.

    Its header says `record_count` records, by default as many as there are.
    """
    base_time = records[0].timestamp
    data = b"".join(encode_record(rec, base_time, delta) for delta, rec in enumerate(records))
    if attributes & 7 == 1:
        data = gzip.compress(data)
    body = _BODY.pack(
        attributes,
        len(records) - 1,
        base_time,
        max(rec.timestamp for rec in records),
        producer_id,
        producer_epoch,
        base_sequence,
        len(records) if record_count is None else record_count,
    )
    crc = google_crc32c.value(body + data)
    return _HEAD.pack(base_offset, 9 + len(body + data), leader_epoch, 2, crc) + body + data


def plain(*values: str, timestamp: int = 1_700_000_000_000) -> bytes:
    """Return a batch with a record for each value, all at one time."""
    return make_batch([Rec(timestamp, None, value.encode()) for value in values])


def sequenced(producer_id: int, epoch: int, first: int, count: int = 1, time: int = 1) -> bytes:
    """Return a batch of an idempotent producer."""
    records = [Rec(time, None, b"%d" % index) for index in range(count)]
    return make_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=first)
