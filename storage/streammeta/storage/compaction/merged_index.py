"""The index of an object that is made of copied blocks: neighbours become one entry.

Owns which entries are joined. An entry may cover several blocks that lie together, so joining them
costs nothing but the ability to read less than the joined bytes at once.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from streammeta.storage.compaction.cut_runs import Measure, cut_runs
from streammeta.storage.compaction.entries import EntryTable, contiguous_runs
from streammeta.storage.object_format.data_block import MAX_BLOCK_SIZE
from streammeta.storage.object_format.record import INT32_MAX

OUTPUT_INDEX_THRESHOLD = 1024 * 1024
"""Bytes up to which entries of an output are joined: what a reader fetches at least at once."""


class MergeRule(StrEnum):
    """How entries are held against the threshold; other writers of this format do the same."""

    BELOW = "below"
    """The sum stays below the threshold: outputs of the compaction of stream set objects."""
    UP_TO = "up_to"
    """The sum may reach the threshold: outputs of the compaction of stream objects."""


def merged_index(placed: EntryTable, threshold: int, rule: MergeRule) -> EntryTable:
    """Join neighbours of one stream with touching offsets, as many as the threshold allows.

    `placed` are the entries as they lie in the output, without a gap between neighbours. The span
    of offsets and the record count of a joined entry fit 32 bits. An entry that is over the
    threshold alone stays as it is. The object ids are those of the first entries joined.

    Raises:
        ValueError: the threshold is below 1.
    """
    if threshold < 1:
        raise ValueError(f"threshold is {threshold}, wanted at least 1 byte")
    size_limit = min(threshold - 1 if rule is MergeRule.BELOW else threshold, MAX_BLOCK_SIZE)
    firsts = cut_runs(
        contiguous_runs(placed),
        [
            Measure(placed.size, size_limit),
            Measure(placed.end_offset - placed.start_offset, INT32_MAX),
            Measure(placed.record_count, INT32_MAX),
        ],
    )
    if not len(firsts):
        return placed
    lasts = np.append(firsts[1:], len(placed)) - 1
    return EntryTable(
        placed.object_id[firsts],
        placed.stream_id[firsts],
        placed.start_offset[firsts],
        placed.end_offset[lasts],
        np.add.reduceat(placed.record_count, firsts),
        placed.position[firsts],
        np.add.reduceat(placed.size, firsts),
    )
