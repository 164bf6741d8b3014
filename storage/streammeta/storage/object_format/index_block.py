"""The index of an object: which blocks hold which offsets of which stream.

Owns the 36-byte entries (big-endian i64 stream id, i64 start offset, i32 end offset delta, i32
record count, i64 block position, i32 size), the rules an index must keep, and the search in it.
An object may have tens of thousands of entries, so they stay columns and become values one by one,
only when a search returns them. Knows nothing of footers or of how bytes were fetched.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.data_block import BLOCK_HEADER_SIZE
from streammeta.storage.object_format.record import INT64_MAX, RECORD_HEADER_SIZE

INDEX_ENTRY_SIZE = 36
UNLIMITED = -1
NO_ENTRY = -1

_ENTRY = struct.Struct(">qqiiqi")
INDEX_ENTRY_DTYPE = np.dtype(
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
    """Encode the index block of `entries`.

    Raises `ValueError` naming the first entry with a number that does not fit its field.
    """
    packed = []
    for ordinal, e in enumerate(entries):
        delta = e.end_offset - e.start_offset
        try:
            packed.append(
                _ENTRY.pack(e.stream_id, e.start_offset, delta, e.record_count, e.position, e.size)
            )
        except struct.error as error:
            raise ValueError(
                f"index entry {ordinal} is {e}; wanted 64-bit stream, offset and position, and a"
                " 32-bit span, record count and size"
            ) from error
    return b"".join(packed)


class IndexBlock:
    """A validated index: sorted by (stream, start offset), without overlaps.

    The columns are arrays of Python's, which a search for one offset is fastest in, and the same
    memory as numpy's, which a search for many is.
    """

    __slots__ = ("_columns", "_ends", "_positions", "_records", "_sizes", "_starts", "_streams")

    def __init__(self, table: NDArray[np.void]) -> None:
        starts = table["start_offset"].astype(np.int64)
        self._streams = _as_array(table["stream_id"])
        self._starts = _as_array(starts)
        self._ends = _as_array(starts + table["end_delta"])
        self._records = _as_array(table["record_count"])
        self._positions = _as_array(table["position"])
        self._sizes = _as_array(table["size"])
        self._columns = (
            *(self._streams, self._starts, self._ends),
            *(self._records, self._positions, self._sizes),
        )

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[IndexEntry]:
        return (IndexEntry(*row) for row in zip(*self._columns, strict=True))

    def entry(self, ordinal: int) -> IndexEntry:
        """Return the entry at `ordinal`, 0-based."""
        return IndexEntry(*[column[ordinal] for column in self._columns])

    @property
    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """Views of the columns, in the order of the fields of `IndexEntry`, one row an entry."""
        return tuple(map(_view, self._columns))

    @property
    def data_size(self) -> int:
        """Bytes of all blocks of all entries."""
        return sum(self._sizes)

    def stream_ranges(self) -> list[StreamRange]:
        """First start to last end of each stream, by stream id. Gaps inside do not show."""
        if not len(self):
            return []
        streams = _view(self._streams)
        firsts = np.flatnonzero(np.diff(streams, prepend=streams[0] - 1))
        lasts = np.append(firsts[1:], len(self)) - 1
        rows = zip(
            streams[firsts].tolist(),
            _view(self._starts)[firsts].tolist(),
            _view(self._ends)[lasts].tolist(),
            strict=True,
        )
        return [StreamRange(*row) for row in rows]

    def locate(self, stream_id: int, offset: int) -> int:
        """Return the ordinal of the entry that holds `offset` of a stream, `NO_ENTRY` if none."""
        ordinal, stop = self._ordinal_of(stream_id, offset)
        return ordinal if ordinal < stop and self._starts[ordinal] <= offset else NO_ENTRY

    def locate_many(self, stream_ids: ArrayLike, offsets: ArrayLike) -> _Column:
        """Do `locate` for each pair of the two columns, which are equally long, at once."""
        streams = np.asarray(stream_ids, dtype=np.int64)
        wanted = np.asarray(offsets, dtype=np.int64)
        if streams.shape != wanted.shape or streams.ndim != 1:
            raise ValueError(
                f"stream_ids has the shape {streams.shape} and offsets {wanted.shape}, wanted two"
                " columns of one length"
            )
        if not len(self):
            return np.full(len(streams), NO_ENTRY, dtype=np.int64)
        starts, ends, last = _view(self._starts), _view(self._ends), len(self) - 1
        low = _view(self._streams).searchsorted(streams, side="left")
        stop = _view(self._streams).searchsorted(streams, side="right")
        high = stop.copy()
        # One binary search per pair, all of them in step: each round halves every [low, high).
        while (open_ := low < high).any():
            middle = (low + high) >> 1
            is_before = open_ & (ends[np.minimum(middle, last)] <= wanted)
            high = np.where(open_ & ~is_before, middle, high)
            low = np.where(is_before, middle + 1, low)
        is_held = (low < stop) & (starts[np.minimum(low, last)] <= wanted)
        return np.where(is_held, low, NO_ENTRY).astype(np.int64)

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
            if self._starts[ordinal] > next_offset:
                break
            entry = self.entry(ordinal)
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
        low = bisect_left(self._streams, stream_id)
        high = bisect_right(self._streams, stream_id, low)
        return bisect_right(self._ends, offset, low, high), high


def _as_array(column: NDArray[np.signedinteger]) -> array[int]:
    return array("q", column.astype(np.int64).tobytes())


def _view(column: array[int]) -> _Column:
    return np.frombuffer(column, dtype=np.int64)


def decode_index(
    data: memoryview, *, data_size: int | None, source: str = "index", origin: int = 0
) -> IndexBlock:
    """Read an index block that fills `data` exactly and starts at byte `origin` of `source`.

    `data_size` is the number of data bytes in front of it, which the entries must tile from 0; it
    is None for a composite object, whose entries point into other objects. Raises
    `CorruptObjectError` naming the first entry that breaks a rule.
    """
    table = _read_table(data, source, origin)
    rules = [
        (_entry_faults(table), _FIELD_RULE),
        (_order_faults(table), "a start behind the end of the entry before, by stream and offset"),
    ]
    if data_size is not None:
        rules.append((_tiling_faults(table), "a position where the entry before ends"))
    for faults, rule in rules:
        _check(faults, table, rule, source, origin)
    index = IndexBlock(table)
    if data_size is not None and index.data_size != data_size:
        raise CorruptObjectError(
            source,
            origin,
            "sum of the sizes in the index",
            found=f"{index.data_size} bytes",
            expected=f"{data_size} bytes, all that is in front of the index",
        )
    return index


def salvage_entries(data: memoryview) -> list[IndexEntry]:
    """Read whatever entries `data` has, whether they keep the rules or not; what is left is cut."""
    return [
        IndexEntry(stream, start, start + delta, records, position, size)
        for stream, start, delta, records, position, size in _ENTRY.iter_unpack(
            data[: len(data) // INDEX_ENTRY_SIZE * INDEX_ENTRY_SIZE]
        )
    ]


_FIELD_RULE = (
    "a stream, start and position of at least 0, an end below 2^63, 1 record or more, at least one"
    " offset for each record, and a size that can hold them"
)


def _read_table(data: memoryview, source: str, origin: int) -> NDArray[np.void]:
    if len(data) % INDEX_ENTRY_SIZE:
        raise CorruptObjectError(
            source,
            origin,
            "size of the index",
            found=f"{len(data)} bytes",
            expected=f"a multiple of {INDEX_ENTRY_SIZE}",
        )
    return np.frombuffer(data, dtype=INDEX_ENTRY_DTYPE)


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


def _order_faults(table: NDArray[np.void]) -> _Mask:
    faults = np.zeros(len(table), dtype=np.bool_)
    streams, starts = table["stream_id"], table["start_offset"].astype(np.int64)
    ends = starts + table["end_delta"]
    same = streams[1:] == streams[:-1]
    faults[1:] = (streams[1:] < streams[:-1]) | (same & (starts[1:] < ends[:-1]))
    return faults


def _tiling_faults(table: NDArray[np.void]) -> _Mask:
    wanted = np.zeros(len(table), dtype=np.int64)
    wanted[1:] = np.cumsum(table["size"][:-1], dtype=np.int64)
    faults: _Mask = table["position"] != wanted
    return faults


def _check(faults: _Mask, table: NDArray[np.void], rule: str, source: str, origin: int) -> None:
    if faults.any():
        ordinal = int(faults.argmax())
        names = ", ".join(
            f"{name} {table[name][ordinal]}" for name in INDEX_ENTRY_DTYPE.names or ()
        )
        raise CorruptObjectError(
            source,
            origin + ordinal * INDEX_ENTRY_SIZE,
            f"index entry {ordinal}",
            found=f"({names})",
            expected=rule,
        )
