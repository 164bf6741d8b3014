"""Index entries of many objects as numpy columns, and the index of an output.

Owns the table for planning compaction: live entries, contiguous runs, merged entries. A node may
have millions of entries, so they stay columns (56 bytes per entry) from the index of a source to
the index of an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammeta.storage.object_format import index_block
from streammeta.storage.object_format.record import INT32_MAX, MAX_BLOCK_SIZE

Column: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]


class Entry(NamedTuple):
    """Row of a table: adjacent blocks of one stream in an object.

    The offsets are `[start_offset, end_offset)`. The blocks have `size` bytes, from byte `position`
    of the object on.
    """

    object_id: int
    stream_id: int
    start_offset: int
    end_offset: int
    record_count: int
    position: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class EntryTable:
    """Index entries of any number of objects. The columns are the fields of `Entry`.

    A table is immutable. Views share the memory of their table.
    """

    object_id: Column
    stream_id: Column
    start_offset: Column
    end_offset: Column
    record_count: Column
    position: Column
    size: Column

    @classmethod
    def of_index(cls, object_id: int, index: index_block.IndexBlock) -> EntryTable:
        """Return the entries of an object, sharing the memory of its index."""
        # The views keep the index's memory alive as long as the table.
        return cls(np.full(len(index), object_id, dtype=np.int64), *index.columns)

    @classmethod
    def of_rows(cls, rows: Iterable[Entry]) -> EntryTable:
        """Return a table of rows, in their order."""
        return cls(*np.array([*rows], dtype=np.int64).reshape(-1, 7).T)

    @classmethod
    def concatenate(cls, tables: Sequence[EntryTable]) -> EntryTable:
        """Return a table with the rows of all tables, in their order."""
        if not tables:
            return cls.of_rows(())
        columns = zip(*(table._columns for table in tables), strict=True)
        return cls(*(np.concatenate(pieces) for pieces in columns))

    def __len__(self) -> int:
        return len(self.object_id)

    @property
    def _columns(self) -> tuple[Column, ...]:
        return tuple(getattr(self, name) for name in Entry._fields)

    @property
    def data_size(self) -> int:
        """Bytes of all entries."""
        return int(self.size.sum())

    def object_ids(self) -> tuple[int, ...]:
        """Return the ids of all objects with a row, ascending."""
        return tuple(np.unique(self.object_id).tolist())

    def take(self, rows: Column | Mask) -> EntryTable:
        """Return a copy of the rows with these numbers, or of those set in a mask."""
        return EntryTable(*(column[rows] for column in self._columns))

    def span(self, start: int, stop: int) -> EntryTable:
        """Return a view of the rows `[start, stop)`."""
        return EntryTable(*(column[start:stop] for column in self._columns))

    def row(self, number: int) -> Entry:
        """Return a row as a value."""
        return Entry(*(int(column[number]) for column in self._columns))

    def rows(self) -> Iterator[Entry]:
        """Yield every row as a value, for messages and tests."""
        return map(Entry, *(column.tolist() for column in self._columns))

    def place(self, first_position: int = 0) -> EntryTable:
        """Return the entries with the positions that they get when written from a byte on."""
        ends = np.cumsum(self.size, dtype=np.int64) + first_position
        return replace(self, position=ends - self.size)


def encode_entries(table: EntryTable) -> bytes:
    """Encode an index block with the rows of `table`, in their order.

    Raises:
        ValueError: a number does not fit its 32 bits. Names the first such row.
    """
    spans = table.end_offset - table.start_offset
    narrow = (spans, table.record_count, table.size)
    # numpy casts silently, so a number over 32 bits would be stored truncated.
    faults = np.logical_or.reduce([(c < 0) | (c > INT32_MAX) for c in narrow])
    if faults.any():
        row = table.row(int(faults.argmax()))
        raise ValueError(
            f"entry is {row}, expected a span, record count and size of 0..{INT32_MAX}"
        )
    encoded = np.empty(len(table), dtype=index_block.INDEX_ENTRY_DTYPE)
    encoded["stream_id"] = table.stream_id
    encoded["start_offset"] = table.start_offset
    encoded["end_delta"] = spans
    encoded["record_count"] = table.record_count
    encoded["position"] = table.position
    encoded["size"] = table.size
    return encoded.tobytes()


def live_entries(table: EntryTable, streams: Mapping[int, int]) -> EntryTable:
    """Return the rows that contain a readable record.

    `streams` has the start offset of every existing stream. A row of another stream is dead, and so
    is a row that ends at or below the start offset. A partly expired row stays whole, because
    blocks are copied unchanged.
    """
    if not len(streams):
        return table.span(0, 0)
    ids = np.fromiter(streams.keys(), dtype=np.int64, count=len(streams))
    starts = np.fromiter(streams.values(), dtype=np.int64, count=len(streams))
    order = np.argsort(ids)
    ids, starts = ids[order], starts[order]
    # An id after the last stream would index past the end. The comparison below rejects it.
    at = np.minimum(ids.searchsorted(table.stream_id), len(ids) - 1)
    is_live = (ids[at] == table.stream_id) & (table.end_offset > starts[at])
    # Usually all rows are live, and a copy of a large table is expensive.
    return table if is_live.all() else table.take(is_live)


def sort_by_stream(table: EntryTable) -> EntryTable:
    """Return the rows ordered by stream, start offset and object."""
    # The last key is the primary one.
    order = np.lexsort((table.object_id, table.start_offset, table.stream_id))
    return table.take(order)


def contiguous_runs(table: EntryTable) -> Column:
    """Return the first row of each run: rows of one stream with touching offsets."""
    if not len(table):
        return np.empty(0, dtype=np.int64)
    is_first = np.ones(len(table), dtype=np.bool_)
    is_first[1:] = (table.stream_id[1:] != table.stream_id[:-1]) | (
        table.start_offset[1:] != table.end_offset[:-1]
    )
    return np.flatnonzero(is_first)


def stream_ranges(table: EntryTable) -> list[index_block.StreamRange]:
    """Return the range of each run of `contiguous_runs`, in order."""
    firsts = contiguous_runs(table)
    lasts = np.append(firsts[1:], len(table)) - 1
    rows = zip(
        table.stream_id[firsts].tolist(),
        table.start_offset[firsts].tolist(),
        table.end_offset[lasts[: len(firsts)]].tolist(),
        strict=True,
    )
    return [index_block.StreamRange(*row) for row in rows]


def objects_without_entries(object_ids: Iterable[int], live: EntryTable) -> tuple[int, ...]:
    """Return the objects without a live row, which need not be kept."""
    live_ids = set(live.object_ids())
    return tuple(object_id for object_id in object_ids if object_id not in live_ids)


def cut_runs(run_firsts: Column, *limited: tuple[Column, int]) -> Column:
    """Cut runs of rows into pieces within limits, and return the first row of each, ascending.

    `run_firsts` has the first row of each run, starting with 0. No piece spans two runs. Each item
    of `limited` is a number per row and the limit of its sum over a piece. A piece has as many rows
    as the limits allow. A row over a limit is a separate piece. Most runs are one piece, so only
    the others are walked row by row.
    """
    if not len(run_firsts):
        return run_firsts

    sums = [
        (np.concatenate(([0], np.cumsum(values, dtype=np.int64))), limit)
        for values, limit in limited
    ]
    run_stops = np.append(run_firsts[1:], len(sums[0][0]) - 1)
    is_over = [total[run_stops] - total[run_firsts] > limit for total, limit in sums]
    cuts: list[int] = []

    # Python loops only over runs that exceed a limit.
    for run in np.flatnonzero(np.logical_or.reduce(is_over)).tolist():
        binding = [pair for pair, over in zip(sums, is_over, strict=True) if over[run]]
        row, stop = int(run_firsts[run]), int(run_stops[run])
        while row < stop:
            fits = min(
                int(total.searchsorted(total[row] + limit, side="right")) - 1
                for total, limit in binding
            )
            # At least one row, so an oversized row can't stop the walk.
            row = max(row + 1, fits)
            if row < stop:
                cuts.append(row)

    return np.sort(np.concatenate((run_firsts, np.array(cuts, dtype=np.int64))))


OUTPUT_INDEX_THRESHOLD = 1024 * 1024
"""Bytes up to which an output's entries are merged, the smallest read of a reader."""


class MergeRule(StrEnum):
    """Comparison of a merged entry's size with the threshold, the same as in other writers."""

    BELOW = "below"
    """The size stays below the threshold, in outputs of stream set object compaction."""
    UP_TO = "up_to"
    """The size may reach the threshold, in outputs of stream object compaction."""


def merge_entries(placed: EntryTable, threshold: int, rule: MergeRule) -> EntryTable:
    """Merge neighbours of one stream with touching offsets, as many as the threshold allows.

    `placed` are the entries at their positions in the output, without gaps. The span of offsets and
    the record count of a merged entry fit 32 bits. An entry over the threshold stays unchanged. A
    merged entry has the object id of its first entry.

    Raises:
        ValueError: the threshold is below 1.
    """
    if threshold < 1:
        raise ValueError(f"threshold is {threshold}, expected at least 1 byte")

    size_limit = min(threshold - 1 if rule is MergeRule.BELOW else threshold, MAX_BLOCK_SIZE)
    firsts = cut_runs(
        contiguous_runs(placed),
        (placed.size, size_limit),
        (placed.end_offset - placed.start_offset, INT32_MAX),
        (placed.record_count, INT32_MAX),
    )
    if not len(firsts):
        return placed

    lasts = np.append(firsts[1:], len(placed)) - 1
    return replace(
        placed.take(firsts),
        end_offset=placed.end_offset[lasts],
        record_count=np.add.reduceat(placed.record_count, firsts),
        size=np.add.reduceat(placed.size, firsts),
    )


def encode_trailer(placed: EntryTable, threshold: int, rule: MergeRule) -> bytes:
    """Encode index and footer of an object with these blocks, merged by `merge_entries`."""
    index = encode_entries(merge_entries(placed, threshold, rule))
    return index + index_block.encode_footer(index_block.Footer(placed.data_size, len(index)))
