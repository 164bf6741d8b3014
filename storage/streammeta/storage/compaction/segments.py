"""Neighbouring entries of one object and one stream as one row: what limits are judged by.

Objects are left out one after the other until the limits hold. What that is decided by (runs of
offsets, their bytes, which objects feed them) needs no single entry, so entries are summed up once.
A second order of the rows, by object within each stream, is kept beside the first: it makes every
question about pairs of an object and something else a comparison of neighbours, in each round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streammeta.storage.compaction.entries import Column, EntryTable, Mask


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Rows in the order of the table they were made of: by stream and offset.

    `object_number` is the place of the object in `object_ids`; `entry_count` and `size` are sums
    over the entries of the segment. `by_object` has the numbers of all rows sorted by stream, then
    object, then offset.
    """

    object_ids: Column
    object_number: Column
    stream_id: Column
    start_offset: Column
    end_offset: Column
    entry_count: Column
    size: Column
    by_object: Column

    @classmethod
    def of_table(cls, table: EntryTable) -> Segments:
        """Sum up a table that is sorted by stream and offset and has no overlap."""
        object_ids = np.unique(table.object_id)
        is_first = changes(table.stream_id)
        is_first |= changes(table.object_id)
        is_first[1:] |= table.start_offset[1:] != table.end_offset[:-1]
        firsts = np.flatnonzero(is_first)
        stops = np.append(firsts[1:], len(table))[: len(firsts)]
        object_number = object_ids.searchsorted(table.object_id[firsts])
        stream_id = table.stream_id[firsts]
        return cls(
            object_ids,
            object_number,
            stream_id,
            table.start_offset[firsts],
            table.end_offset[stops - 1],
            stops - firsts,
            sums_from(table.size, firsts),
            np.lexsort((object_number, stream_id)),
        )

    def __len__(self) -> int:
        return len(self.stream_id)

    def take(self, is_taken: Mask) -> Segments:
        """Return some rows; object numbers stay what they are."""
        by_object = self.by_object[is_taken[self.by_object]]
        return Segments(
            self.object_ids,
            self.object_number[is_taken],
            self.stream_id[is_taken],
            self.start_offset[is_taken],
            self.end_offset[is_taken],
            self.entry_count[is_taken],
            self.size[is_taken],
            (np.cumsum(is_taken) - 1)[by_object],
        )

    def sharing(self) -> Mask:
        """Tell, by object number, which objects hold a stream that another one holds too."""
        is_sharing = np.zeros(len(self.object_ids), dtype=np.bool_)
        streams, objects = self.stream_id[self.by_object], self.object_number[self.by_object]
        is_new = changes(streams) | changes(objects)
        streams, objects = streams[is_new], objects[is_new]
        same = streams[1:] == streams[:-1]
        is_sharing[objects[1:][same]] = True
        is_sharing[objects[:-1][same]] = True
        return is_sharing

    def feeders(self, run_of_segment: Column) -> tuple[Column, Column]:
        """Return each pair of a run and an object that has a segment in it once.

        A run is of one stream, and a segment's run is never before that of the segment before.
        """
        runs, objects = run_of_segment[self.by_object], self.object_number[self.by_object]
        is_new = changes(runs) | changes(objects)
        return runs[is_new], objects[is_new]


def changes(column: Column | Mask) -> Mask:
    """Mark the rows that differ from the row before, and the first."""
    is_change = np.ones(len(column), dtype=np.bool_)
    is_change[1:] = column[1:] != column[:-1]
    return is_change


def sums_from(values: Column, firsts: Column) -> Column:
    """Return the sum of the values from each of these rows up to the next."""
    return np.add.reduceat(values, firsts) if len(firsts) else values[:0]
