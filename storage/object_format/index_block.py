"""The index of an object: which blocks hold which offsets of which stream.

Owns the 36-byte entries (big-endian i64 stream id, i64 start offset, i32 end offset delta, i32
record count, i64 block position, i32 size), the rules an index must keep, and the search in it.
An object may have tens of thousands of entries, so they stay numpy columns and become values one
by one, only when a search returns them. Knows nothing of footers or of how bytes were fetched.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptObjectError
from storage.object_format.data_block import BLOCK_HEADER_SIZE
from storage.object_format.record import INT64_MAX, RECORD_HEADER_SIZE

INDEX_ENTRY_SIZE = 36
UNLIMITED = -1

_ENTRY = struct.Struct(">qqiiqi")
_ENTRY_DTYPE = np.dtype(
    [
        ("stream_id", ">i8"),
        ("start_offset", ">i8"),
        ("end_delta", ">i4"),
        ("record_count", ">i4"),
        ("position", ">i8"),
        ("size", ">i4"),
    ]
)
_Column: TypeAlias = NDArray[np.int64]
_Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Blocks of one stream that lie together: offsets `[start_offset, end_offset)`.

    `position` is the byte position of the first block, `size` the bytes of all of them.
    """

    stream_id: int
    start_offset: int
    end_offset: int
    record_count: int
    position: int
    size: int

    @property
    def payload_size(self) -> int:
        """Payload bytes, counted as if the entry were one block."""
        return self.size - BLOCK_HEADER_SIZE - self.record_count * RECORD_HEADER_SIZE


@dataclass(frozen=True, slots=True)
class StreamRange:
    """Offsets `[start_offset, end_offset)` of one stream."""

    stream_id: int
    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class FindResult:
    """The entries to read, in offset order, and how far they reach.

    `first_ordinal` is the place of the first entry in the index (0 when there is none).
    `fulfilled` tells that the end offset or the byte limit was reached; otherwise the reader goes
    on at `next_offset` in the next object.
    """

    entries: tuple[IndexEntry, ...]
    first_ordinal: int
    next_offset: int
    fulfilled: bool


def encode_index(entries: Sequence[IndexEntry]) -> bytes:
    """Encode the index block of `entries`. Raises `struct.error` on a number out of range."""
    pack = _ENTRY.pack
    return b"".join(
        pack(
            e.stream_id,
            e.start_offset,
            e.end_offset - e.start_offset,
            e.record_count,
            e.position,
            e.size,
        )
        for e in entries
    )


class IndexBlock:
    """A validated index: sorted by (stream, start offset), without overlaps."""

    __slots__ = ("_ends", "_positions", "_records", "_sizes", "_starts", "_streams")

    def __init__(self, table: NDArray[np.void]) -> None:
        self._streams: _Column = table["stream_id"].astype(np.int64)
        self._starts: _Column = table["start_offset"].astype(np.int64)
        self._ends: _Column = self._starts + table["end_delta"]
        self._records: _Column = table["record_count"].astype(np.int64)
        self._positions: _Column = table["position"].astype(np.int64)
        self._sizes: _Column = table["size"].astype(np.int64)

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[IndexEntry]:
        columns = (self._streams, self._starts, self._ends, self._records, self._positions)
        rows = zip(*(column.tolist() for column in (*columns, self._sizes)), strict=True)
        return (IndexEntry(*row) for row in rows)

    def entry(self, ordinal: int) -> IndexEntry:
        """Return the entry at `ordinal`, 0-based."""
        return IndexEntry(
            int(self._streams[ordinal]),
            int(self._starts[ordinal]),
            int(self._ends[ordinal]),
            int(self._records[ordinal]),
            int(self._positions[ordinal]),
            int(self._sizes[ordinal]),
        )

    @property
    def data_size(self) -> int:
        """Bytes of all blocks of all entries."""
        return int(self._sizes.sum())

    def stream_ranges(self) -> list[StreamRange]:
        """First start to last end of each stream, by stream id. Gaps inside do not show."""
        if not len(self):
            return []
        firsts = np.flatnonzero(np.diff(self._streams, prepend=self._streams[0] - 1))
        lasts = np.append(firsts[1:], len(self)) - 1
        rows = zip(
            self._streams[firsts].tolist(),
            self._starts[firsts].tolist(),
            self._ends[lasts].tolist(),
            strict=True,
        )
        return [StreamRange(*row) for row in rows]

    def find(self, stream_id: int, start: int, end: int, max_bytes: int) -> FindResult:
        """Find the entries that hold `[start, end)` of a stream, from the one holding `start` on.

        `end` -1 means no end. The walk stops at a gap, at `end`, or when `max_bytes` of payload
        are spent. The first entry costs nothing when `start` lies inside it, since only a part of
        it is wanted. An offset in a gap, or before the first entry, finds nothing.
        """
        ordinal, stop = self._ordinal_of(stream_id, start)
        first_ordinal = ordinal if ordinal < stop else 0
        entries: list[IndexEntry] = []
        next_offset, left, fulfilled = start, max_bytes, False
        while ordinal < stop and not fulfilled:
            entry = self.entry(ordinal)
            if entry.start_offset > next_offset:
                break
            entries.append(entry)
            if entry.start_offset == next_offset:
                left = max(0, left - entry.payload_size)
            next_offset = entry.end_offset
            fulfilled = left == 0 or (end != UNLIMITED and next_offset >= end)
            ordinal += 1
        return FindResult(tuple(entries), first_ordinal, next_offset, fulfilled)

    def _ordinal_of(self, stream_id: int, offset: int) -> tuple[int, int]:
        """Ordinal of the first entry of the stream that ends behind `offset`, and of its last + 1.

        The first may start behind `offset` too: then `offset` is in a gap.
        """
        low = int(np.searchsorted(self._streams, stream_id, side="left"))
        high = int(np.searchsorted(self._streams, stream_id, side="right"))
        return low + int(np.searchsorted(self._ends[low:high], offset, side="right")), high


def decode_index(
    data: memoryview, *, data_size: int | None, source: str = "index", origin: int = 0
) -> IndexBlock:
    """Read an index block that fills `data` exactly and starts at byte `origin` of `source`.

    `data_size` is the number of data bytes in front of it, which the entries must tile from 0; it
    is None for a composite object, whose entries point into other objects. Raises
    `CorruptObjectError` naming the first entry that breaks a rule.
    """
    if len(data) % INDEX_ENTRY_SIZE:
        raise CorruptObjectError(
            source, origin, f"index has {len(data)} bytes, wanted a multiple of {INDEX_ENTRY_SIZE}"
        )
    table = np.frombuffer(data, dtype=_ENTRY_DTYPE)
    _check(_entry_faults(table), table, "a field out of range", source, origin)
    index = IndexBlock(table)
    _check(_order_faults(index), table, "order or overlap broken", source, origin)
    if data_size is not None:
        _check(_tiling_faults(index), table, "block not behind the one before", source, origin)
        if index.data_size != data_size:
            raise CorruptObjectError(
                source, origin, f"blocks take {index.data_size} bytes, wanted {data_size}"
            )
    return index


def _entry_faults(table: NDArray[np.void]) -> _Mask:
    records = table["record_count"].astype(np.int64)
    faults: _Mask = (
        (table["stream_id"] < 0)
        | (table["start_offset"] < 0)
        | (table["start_offset"] > INT64_MAX - table["end_delta"].astype(np.int64))
        | (records < 1)
        | (table["end_delta"] < records)
        | (table["position"] < 0)
        | (table["size"] < BLOCK_HEADER_SIZE + RECORD_HEADER_SIZE * records)
    )
    return faults


def _order_faults(index: IndexBlock) -> _Mask:
    faults = np.zeros(len(index), dtype=np.bool_)
    streams, starts, ends = index._streams, index._starts, index._ends
    same = streams[1:] == streams[:-1]
    faults[1:] = (streams[1:] < streams[:-1]) | (same & (starts[1:] < ends[:-1]))
    return faults


def _tiling_faults(index: IndexBlock) -> _Mask:
    wanted = np.zeros(len(index), dtype=np.int64)
    wanted[1:] = np.cumsum(index._sizes[:-1])
    faults: _Mask = index._positions != wanted
    return faults


def _check(faults: _Mask, table: NDArray[np.void], rule: str, source: str, origin: int) -> None:
    if faults.any():
        ordinal = int(faults.argmax())
        names = ", ".join(f"{name} {table[name][ordinal]}" for name in _ENTRY_DTYPE.names or ())
        raise CorruptObjectError(
            source, origin + ordinal * INDEX_ENTRY_SIZE, f"index entry {ordinal}: {rule} ({names})"
        )
