"""Plans the reads of one iteration: few large GETs into one buffer, and where things lie in it.

Owns which bytes are fetched together. Exactly the bytes of the iteration's entries are read, so the
buffer is as large as the iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streammeta.storage.compaction.cut_runs import Measure, cut_runs
from streammeta.storage.compaction.entries import Column, EntryTable
from streammeta.storage.compaction.plan import Iteration


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """The GETs of an iteration, by object and position, and what they fill.

    Row i reads the bytes `[position[i], position[i] + size[i])` of an object to the place
    `buffer_start[i]` of a buffer of the iteration's `data_size`; the reads fill it without a gap.
    `entry_buffer_start` has, for each row of the iteration's entries, where its bytes come to lie.
    """

    object_id: Column
    position: Column
    size: Column
    buffer_start: Column
    entry_buffer_start: Column

    def __len__(self) -> int:
        return len(self.object_id)


def plan_reads(iteration: Iteration, max_read_bytes: int) -> ReadPlan:
    """Plan the reads of an iteration.

    Adjacent bytes of an object are read together while they are fewer than `max_read_bytes`. An
    entry of that size or more is read alone, in pieces of `max_read_bytes`.

    Raises:
        ValueError: `max_read_bytes` is below 1.
    """
    if max_read_bytes < 1:
        raise ValueError(f"max_read_bytes is {max_read_bytes}, wanted at least 1")
    entries = iteration.entries
    order = np.lexsort((entries.position, entries.object_id))
    by_place = entries.take(order)
    sizes = by_place.size
    places = np.cumsum(sizes, dtype=np.int64) - sizes
    firsts = cut_runs(_adjacent_runs(by_place), [Measure(sizes, max_read_bytes - 1)])
    totals = np.add.reduceat(sizes, firsts) if len(firsts) else sizes
    counts = -(-totals // max_read_bytes)
    read_of = np.repeat(np.arange(len(firsts)), counts)
    number = np.arange(len(read_of)) - (np.cumsum(counts) - counts)[read_of]
    skipped = number * max_read_bytes
    entry_buffer_start = np.empty(len(entries), dtype=np.int64)
    entry_buffer_start[order] = places
    return ReadPlan(
        by_place.object_id[firsts][read_of],
        by_place.position[firsts][read_of] + skipped,
        np.minimum(totals[read_of] - skipped, max_read_bytes),
        places[firsts][read_of] + skipped,
        entry_buffer_start,
    )


def _adjacent_runs(by_place: EntryTable) -> Column:
    """Return the first row of each stretch of bytes without a gap in one object."""
    is_first = np.ones(len(by_place), dtype=np.bool_)
    is_first[1:] = (by_place.object_id[1:] != by_place.object_id[:-1]) | (
        by_place.position[1:] != by_place.position[:-1] + by_place.size[:-1]
    )
    return np.flatnonzero(is_first)
