"""Bases of relative objects: their entries and blocks at the offsets of the streams.

The metadata has one range of each stream in such an object, as long as the stream in the object.
Its start is the base. Blocks are changed in the buffer that they were read into. Their size stays,
so plans and layouts know nothing of bases. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from streammeta.storage.compaction.entries import Column, EntryTable
from streammeta.storage.compaction.verification import DamagedBlockError
from streammeta.storage.errors import CorruptObjectError, Source
from streammeta.storage.object_format.record import shift_blocks


@dataclass(frozen=True, slots=True, eq=False)
class Bases:
    """Streams of a relative object, ascending, each with its base and end in the metadata."""

    stream_id: Column
    start_offset: Column
    end_offset: Column

    @classmethod
    def of_ranges(cls, ranges: Column) -> Bases:
        """Return the bases from the metadata's rows of stream, start and end, in any order."""
        return cls(*ranges[np.argsort(ranges[:, 0], kind="stable")].T)

    def rows_of(self, stream_ids: Column) -> Column:
        """Return the row of each stream, -1 without one."""
        if not len(self.stream_id):
            return np.full(len(stream_ids), -1, dtype=np.int64)
        rows = np.minimum(self.stream_id.searchsorted(stream_ids), len(self.stream_id) - 1)
        return np.where(self.stream_id[rows] == stream_ids, rows, -1)


def at_bases(entries: EntryTable, ranges: Column) -> EntryTable:
    """Return the entries of a relative object's index at the offsets of the metadata's `ranges`.

    Entries of streams without a range are left out: the commit rejected them, or they are trimmed.

    Raises:
        ValueError: a range is not the only one of its stream, or not as long as the stream in the
            object. Its start would be no base.
    """
    bases = Bases.of_ranges(ranges)
    several = bases.stream_id[1:] == bases.stream_id[:-1]
    if several.any():
        stream_id = int(bases.stream_id[1:][several][0])
        raise ValueError(f"the metadata has several ranges of stream {stream_id} in it")

    rows = bases.rows_of(entries.stream_id)
    entries, rows = entries.take(rows >= 0), rows[rows >= 0]
    lengths = np.zeros(len(bases.stream_id), dtype=np.int64)
    np.maximum.at(lengths, rows, entries.end_offset)
    differs = lengths != bases.end_offset - bases.start_offset
    if differs.any():
        at = int(differs.argmax())
        raise ValueError(
            f"it has {lengths[at]} offsets of stream {bases.stream_id[at]}, its metadata"
            f" [{bases.start_offset[at]}, {bases.end_offset[at]})"
        )
    starts = bases.start_offset[rows]
    return replace(
        entries,
        start_offset=entries.start_offset + starts,
        end_offset=entries.end_offset + starts,
    )


def move_blocks(
    buffer: memoryview,
    places: Column,
    entries: EntryTable,
    bases: Mapping[int, Bases],
    key_of: Callable[[int], str],
) -> None:
    """Move the records of relative objects, at `places` of the buffer, to their `entries`' offsets.

    `bases` has the relative ones of the objects of `entries`. Call it once for each buffer.

    Raises:
        DamagedBlockError: the blocks of an entry contain other records. Names the source (`key_of`
            its id) and the position.
    """
    for object_id, held in bases.items():
        chosen = np.flatnonzero(entries.object_id == object_id)
        starts = held.start_offset[held.rows_of(entries.stream_id[chosen])]
        at = places[chosen].tolist()
        for start, base, entry in zip(
            at, starts.tolist(), entries.take(chosen).rows(), strict=True
        ):
            source = Source(key_of(object_id), entry.position)
            block = buffer[start : start + entry.size]
            try:
                end = shift_blocks(block, entry.stream_id, entry.start_offset - base, base, source)
                if end != entry.end_offset:
                    what = "end of the last record of an index entry"
                    raise source.corrupt(0, what, f"offset {end}", f"offset {entry.end_offset}")
            except CorruptObjectError as error:
                raise DamagedBlockError(
                    object_id,
                    source.name,
                    error.position,
                    error.what,
                    found=error.found,
                    expected=error.expected,
                ) from error
