"""Objects that can't be compacted whatever the others are: entries over the budget, overlaps.

Such an object stays as it is, with every entry it has; the rest is compacted without it.
"""

from __future__ import annotations

import numpy as np

from streammeta.storage.compaction.entries import Entry, EntryTable, Mask
from streammeta.storage.compaction.plan import Exclusion, ExclusionReason


def without_faults(
    table: EntryTable, memory_budget: int
) -> tuple[EntryTable, tuple[Exclusion, ...]]:
    """Return the entries of the objects that have no fault, and what is wrong with the others.

    `table` is sorted by stream and offset; an object is kept or left out with all its entries.
    """
    oversized = table.size > memory_budget
    overlapping = _overlapping_rows(table)
    found = {
        entry.object_id: Exclusion(
            entry.object_id,
            ExclusionReason.OVERLAP,
            f"stream {entry.stream_id} [{entry.start_offset}, {entry.end_offset}) of object"
            f" {entry.object_id} overlaps another entry of the stream; compare the objects that"
            " hold it before one of them is removed",
        )
        for entry in _first_of_each_object(table, overlapping)
    }
    found |= {
        entry.object_id: Exclusion(
            entry.object_id,
            ExclusionReason.OVERSIZED_ENTRY,
            f"stream {entry.stream_id} [{entry.start_offset}, {entry.end_offset}) of object"
            f" {entry.object_id} is {entry.size} bytes, which is over the memory budget of"
            f" {memory_budget}; raise the budget",
        )
        for entry in _first_of_each_object(table, oversized)
    }
    if not found:
        return table, ()
    kept = table.take(~np.isin(table.object_id, list(found)))
    return kept, tuple(found[object_id] for object_id in sorted(found))


def _first_of_each_object(table: EntryTable, mask: Mask) -> list[Entry]:
    marked = table.take(mask)
    _, firsts = np.unique(marked.object_id, return_index=True)
    return list(marked.take(firsts).rows())


def _overlapping_rows(table: EntryTable) -> Mask:
    """Mark the rows that share an offset with another row.

    Neighbours tell whether a stream has an overlap at all; which rows take part in it is then found
    stream by stream, as a long entry may overlap many that follow.
    """
    marked = np.zeros(len(table), dtype=np.bool_)
    streams, starts, ends = table.stream_id, table.start_offset, table.end_offset
    is_over = (streams[1:] == streams[:-1]) & (starts[1:] < ends[:-1])
    for stream_id in np.unique(streams[1:][is_over]).tolist():
        first = int(streams.searchsorted(stream_id, side="left"))
        stop = int(streams.searchsorted(stream_id, side="right"))
        reached = np.maximum.accumulate(ends[first:stop])
        marked[first + 1 : stop] |= starts[first + 1 : stop] < reached[:-1]
        marked[first : stop - 1] |= starts[first + 1 : stop] < ends[first : stop - 1]
    return marked
