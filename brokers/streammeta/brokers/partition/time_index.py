"""Sparse index from time to offset of one segment: rows of i64 timestamp, i32 offset - base.

Times ascend strictly: a row means that no earlier record of the segment has a later time.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence

ROW_SIZE = 12
INTERVAL_BYTES = 4096
"""Bytes of batches between two rows (Kafka's `index.interval.bytes`)."""

_ROW = struct.Struct(">qi")

Entry = tuple[int, int]
"""A timestamp in ms, and an offset."""


def encode_entries(entries: Iterable[Entry], base_offset: int) -> bytes:
    """Return the rows of entries of the segment that begins at `base_offset`."""
    return b"".join(_ROW.pack(time, offset - base_offset) for time, offset in entries)


def decode_entries(rows: bytes, base_offset: int) -> list[Entry]:
    """Return the entries of whole rows. An incomplete row at the end is ignored."""
    whole = rows[: len(rows) // ROW_SIZE * ROW_SIZE]
    return [(time, base_offset + delta) for time, delta in _ROW.iter_unpack(whole)]


def lookup(entries: Sequence[Entry], timestamp: int, base_offset: int) -> Entry:
    """Return the last entry not newer than `timestamp`, (-1, `base_offset`) for none."""
    found = bisect_right(entries, timestamp, key=lambda entry: entry[0])
    return entries[found - 1] if found else (-1, base_offset)
