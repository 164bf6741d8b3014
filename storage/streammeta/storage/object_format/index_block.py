"""Index block and footer of an object: which blocks hold which offsets of which stream.

Index entries have 36 bytes: big-endian i64 stream id, i64 start offset, i32 end offset delta, i32
record count, i64 block position, i32 size. An object may have tens of thousands, so they stay
columns, and only search results become values. The footer is the last 48 bytes: i64 index position,
i32 index size, 28 zero bytes, u64 magic that distinguishes normal, composite and relative objects.
The offsets of a relative object count from 0 in each stream, without gaps. The metadata has the
base to add: the start of the stream's range in the object. Does no I/O.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammeta.storage.errors import UNNAMED, Source
from streammeta.storage.object_format.record import BLOCK_HEADER_SIZE, INT64_MAX, RECORD_HEADER_SIZE

FOOTER_SIZE = 48
NORMAL_MAGIC = 0x88E241B785F4CFF7
COMPOSITE_MAGIC = 0x88E241B785F4CFF8
RELATIVE_MAGIC = 0x88E241B785F4CFF9
"""A magic of its own, so that a reader that knows no bases refuses the object."""

_FOOTER = struct.Struct(">qi28sQ")
_RESERVED = bytes(28)
_RESERVED_POSITION, _MAGIC_POSITION = 12, 40


@dataclass(frozen=True, slots=True)
class Footer:
    """Byte position and size of the index block, and the kind of the object."""

    index_position: int
    index_size: int
    composite: bool = False
    relative: bool = False


def encode_footer(footer: Footer) -> bytes:
    """Encode `footer` in 48 bytes.

    Raises `ValueError` if a number does not fit its field, or for a relative composite.
    """
    if footer.composite and footer.relative:
        raise ValueError("a composite object links absolute offsets, it can't be relative")
    magic = NORMAL_MAGIC
    if footer.composite or footer.relative:
        magic = COMPOSITE_MAGIC if footer.composite else RELATIVE_MAGIC
    try:
        return _FOOTER.pack(footer.index_position, footer.index_size, _RESERVED, magic)
    except struct.error as error:
        raise ValueError(
            f"{footer} is too large, expected a 64-bit position and 32-bit size"
        ) from error


def decode_footer(
    data: memoryview,
    object_size: int,
    *,
    composite: bool | None,
    accept_relative: bool = False,
    source: Source = UNNAMED,
) -> Footer:
    """Decode the footer, the last 48 bytes of `data`, of an object of `object_size` bytes.

    `composite` is the required kind of the object, or None for either. `accept_relative` is for
    callers that add the bases: others must not take the offsets of a relative object for absolute
    ones. `source` has the origin 0. Raises `CorruptObjectError` if the footer is cut short, has
    another magic, uses the reserved bytes (a deviation), or names an index that does not end at the
    footer.
    """
    position = object_size - FOOTER_SIZE
    if position < 0 or len(data) < FOOTER_SIZE:
        raise source.corrupt(
            0,
            "size of the footer",
            f"{max(0, min(object_size, len(data)))} bytes",
            f"at least {FOOTER_SIZE} bytes",
        )

    index_position, index_size, reserved, magic = _FOOTER.unpack_from(data, len(data) - FOOTER_SIZE)
    kinds = (False, True) if composite is None else (composite,)
    magics = [COMPOSITE_MAGIC if kind else NORMAL_MAGIC for kind in kinds]
    if accept_relative and False in kinds:
        magics.append(RELATIVE_MAGIC)
    if magic not in magics:
        raise source.corrupt(
            position + _MAGIC_POSITION,
            "footer magic",
            f"{magic:#018x}",
            " or ".join(f"{wanted:#018x}" for wanted in magics),
        )

    if reserved != _RESERVED:
        where = position + _RESERVED_POSITION
        source.deviate(where, "reserved bytes of the footer", reserved.hex(), "28 zeros")

    if index_position < 0 or index_size < 0 or index_position + index_size != position:
        raise source.corrupt(
            position,
            "place of the index",
            f"{index_size} bytes at {index_position}",
            f"one that ends at {position}, where the footer starts",
        )

    return Footer(
        index_position, index_size, magic == COMPOSITE_MAGIC, relative=magic == RELATIVE_MAGIC
    )


INDEX_ENTRY_SIZE = 36
UNLIMITED = -1

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
    """Adjacent blocks of one stream: offsets `[start_offset, end_offset)`.

    `position` is the byte position of the first block, `size` the bytes of all blocks.
    """

    stream_id: int
    start_offset: int
    end_offset: int
    record_count: int
    position: int
    size: int

    @property
    def payload_size(self) -> int:
        """Payload bytes, as if the entry were one block."""
        return self.size - BLOCK_HEADER_SIZE - self.record_count * RECORD_HEADER_SIZE

    def shifted(self, base: int) -> IndexEntry:
        """Return the entry with `base` added to its offsets."""
        if not base:
            return self
        return replace(
            self, start_offset=self.start_offset + base, end_offset=self.end_offset + base
        )


@dataclass(frozen=True, slots=True)
class StreamRange:
    """Offsets `[start_offset, end_offset)` of one stream."""

    stream_id: int
    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class FindResult:
    """The entries to read, in offset order, and the offset that they reach.

    `first_ordinal` is the position of the first entry in the index (0 without entries). `fulfilled`
    is set if the end offset or the byte limit was reached. Otherwise the reader continues at
    `next_offset` in the next object.
    """

    entries: tuple[IndexEntry, ...]
    first_ordinal: int
    next_offset: int
    fulfilled: bool


def stream_ranges(entries: Iterable[IndexEntry]) -> tuple[StreamRange, ...]:
    """Return first start to last end of each stream, in the order of `entries`, ignoring gaps."""
    ranges: list[StreamRange] = []
    for entry in entries:
        start = entry.start_offset
        if ranges and ranges[-1].stream_id == entry.stream_id:
            start = ranges.pop().start_offset
        ranges.append(StreamRange(entry.stream_id, start, entry.end_offset))
    return tuple(ranges)


def encode_index(entries: Sequence[IndexEntry]) -> bytes:
    """Encode the index block of `entries`.

    Raises `ValueError`, naming the first entry with a number that does not fit its field.
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
                f"index entry {ordinal} is {e}, expected 64-bit stream, offset and position, and a"
                " 32-bit span, record count and size"
            ) from error
    return b"".join(packed)


class IndexBlock:
    """A validated index: sorted by (stream, start offset), without overlaps.

    The columns are Python arrays, the fastest for a search of one offset. Numpy views share their
    memory for searches of many offsets.
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

    @property
    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """Views of the columns, in the order of the fields of `IndexEntry`."""
        return tuple(map(_view, self._columns))

    @property
    def data_size(self) -> int:
        """Bytes of all blocks of all entries."""
        return sum(self._sizes)

    def end_of(self, stream_id: int) -> int:
        """Return the end of a stream's last entry, 0 without one."""
        stop = bisect_right(self._streams, stream_id)
        return self._ends[stop - 1] if stop and self._streams[stop - 1] == stream_id else 0

    def find(self, stream_id: int, start: int, end: int, max_bytes: int) -> FindResult:
        """Find the entries that contain `[start, end)` of a stream, from the one with `start` on.

        `end` -1 means no end. The search stops at a gap, at `end`, or after `max_bytes` of payload.
        The first entry counts as 0 bytes if `start` lies inside it, because only a part of it is
        needed. An offset in a gap or before the first entry finds nothing.
        """
        ordinal, stop = self._ordinal_of(stream_id, start)
        first_ordinal = ordinal if ordinal < stop else 0
        entries: list[IndexEntry] = []
        next_offset, left, fulfilled = start, max_bytes, False

        while ordinal < stop and not fulfilled:
            # A gap. The next object may continue the stream.
            if self._starts[ordinal] > next_offset:
                break
            entry = IndexEntry(*[column[ordinal] for column in self._columns])
            entries.append(entry)
            if entry.start_offset == next_offset:
                left = max(0, left - entry.payload_size)
            next_offset = entry.end_offset
            fulfilled = left == 0 or (end != UNLIMITED and next_offset >= end)
            ordinal += 1

        return FindResult(tuple(entries), first_ordinal, next_offset, fulfilled)

    def _ordinal_of(self, stream_id: int, offset: int) -> tuple[int, int]:
        """Return the ordinals of the stream's first entry that ends after `offset`, and its end.

        If that entry also starts after `offset`, the offset lies in a gap.
        """
        low = bisect_left(self._streams, stream_id)
        # From `low` on, which halves the search.
        high = bisect_right(self._streams, stream_id, low)
        return bisect_right(self._ends, offset, low, high), high


def _as_array(column: NDArray[np.signedinteger]) -> array[int]:
    return array("q", column.astype(np.int64).tobytes())


def _view(column: array[int]) -> _Column:
    return np.frombuffer(column, dtype=np.int64)


def decode_index(
    data: memoryview, *, data_size: int | None, relative: bool = False, source: Source = UNNAMED
) -> IndexBlock:
    """Decode an index block that fills `data` exactly. `source` is the origin of `data`.

    `data_size` is the number of data bytes before it, which the entries must cover from 0 without
    gaps. It is None for a composite object, whose entries point into other objects. In a `relative`
    object each stream starts at 0 and has no gaps. Raises `CorruptObjectError`, naming the first
    entry that breaks a rule.
    """
    if len(data) % INDEX_ENTRY_SIZE:
        raise source.corrupt(
            0, "size of the index", f"{len(data)} bytes", f"a multiple of {INDEX_ENTRY_SIZE}"
        )

    # Rules are checked on columns: a loop over tens of thousands of entries takes milliseconds of a
    # broker's loop.
    table = np.frombuffer(data, dtype=INDEX_ENTRY_DTYPE)
    rules = [
        (_entry_faults(table), _FIELD_RULE),
        (_order_faults(table), "a start after the end of the previous entry, by stream and offset"),
    ]
    if data_size is not None:
        rules.append((_tiling_faults(table), "a position where the entry before ends"))
    if relative:
        rules.append((_relative_faults(table), _RELATIVE_RULE))

    for faults, rule in rules:
        _check(faults, table, rule, source)

    index = IndexBlock(table)
    if data_size is not None and index.data_size != data_size:
        raise source.corrupt(
            0,
            "sum of the sizes in the index",
            f"{index.data_size} bytes",
            f"{data_size} bytes, the size of all blocks",
        )

    return index


def salvage_entries(data: memoryview) -> list[IndexEntry]:
    """Decode entries without validation. An incomplete last entry is ignored."""
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


def _entry_faults(table: NDArray[np.void]) -> _Mask:
    records = table["record_count"].astype(np.int64)
    faults: _Mask = (
        (table["stream_id"] < 0)
        | (table["start_offset"] < 0)
        # Rearranged, because the sum could overflow.
        | (table["start_offset"] > INT64_MAX - table["end_delta"].astype(np.int64))
        | (records < 1)
        # A record covers at least one offset.
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


_RELATIVE_RULE = (
    "a start at 0 or where the stream's previous entry ends, as in every relative object"
)


def _relative_faults(table: NDArray[np.void]) -> _Mask:
    streams, starts = table["stream_id"], table["start_offset"].astype(np.int64)
    wanted = np.zeros(len(table), dtype=np.int64)
    ends = starts + table["end_delta"]
    wanted[1:] = np.where(streams[1:] == streams[:-1], ends[:-1], 0)
    faults: _Mask = starts != wanted
    return faults


def _tiling_faults(table: NDArray[np.void]) -> _Mask:
    wanted = np.zeros(len(table), dtype=np.int64)
    wanted[1:] = np.cumsum(table["size"][:-1], dtype=np.int64)
    faults: _Mask = table["position"] != wanted
    return faults


def _check(faults: _Mask, table: NDArray[np.void], rule: str, source: Source) -> None:
    if faults.any():
        ordinal = int(faults.argmax())
        names = ", ".join(
            f"{name} {table[name][ordinal]}" for name in INDEX_ENTRY_DTYPE.names or ()
        )
        where = ordinal * INDEX_ENTRY_SIZE
        raise source.corrupt(where, f"index entry {ordinal}", f"({names})", rule)
