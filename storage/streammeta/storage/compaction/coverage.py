"""The last check before a commit: the outputs hold what is live in the sources, and nothing twice.

Judges the index entries that outputs were written with, whoever planned them. It can't tell whether
the bytes are the right ones, but it can tell how many they must be.
"""

from __future__ import annotations

import numpy as np

from streammeta.storage.compaction.entries import (
    Column,
    EntryTable,
    contiguous_runs,
    sorted_by_stream,
)
from streammeta.storage.errors import StorageError


class CoverageError(StorageError):
    """Outputs do not hold exactly what is live in the sources; they must not be committed."""


def check_coverage(sources: EntryTable, outputs: EntryTable) -> None:
    """Hold the entries of all outputs of a commit against all live entries of its sources.

    Offsets, records and bytes must be the same, run by run of each stream.

    Raises:
        CoverageError: they are not, or outputs overlap; names the stream and offset where it
            shows first.
    """
    read, written = sorted_by_stream(sources), sorted_by_stream(outputs)
    _check_overlap(written)
    wanted, found = _runs(read), _runs(written)
    count = min(len(wanted), len(found))
    differs = (wanted[:count] != found[:count]).any(axis=1)
    if differs.any():
        place = int(differs.argmax())
    elif len(wanted) != len(found):
        place = count
    else:
        return
    raise CoverageError(
        f"outputs hold {_said(found, place)}, wanted {_said(wanted, place)} as live in the sources;"
        " nothing was committed, plan the compaction again"
    )


def _check_overlap(written: EntryTable) -> None:
    is_over = (written.stream_id[1:] == written.stream_id[:-1]) & (
        written.start_offset[1:] < written.end_offset[:-1]
    )
    if is_over.any():
        row = int(is_over.argmax())
        first, second = written.row(row), written.row(row + 1)
        raise CoverageError(
            f"outputs overlap: stream {first.stream_id} [{first.start_offset}, {first.end_offset})"
            f" in object {first.object_id} and [{second.start_offset}, {second.end_offset}) in"
            f" object {second.object_id}; nothing was committed, plan the compaction again"
        )


def _runs(table: EntryTable) -> Column:
    """Return a row for each run: stream, start, end, records, bytes."""
    firsts = contiguous_runs(table)
    if not len(firsts):
        return np.empty((0, 5), dtype=np.int64)
    lasts = np.append(firsts[1:], len(table)) - 1
    return np.stack(
        (
            table.stream_id[firsts],
            table.start_offset[firsts],
            table.end_offset[lasts],
            np.add.reduceat(table.record_count, firsts),
            np.add.reduceat(table.size, firsts),
        ),
        axis=1,
    )


def _said(runs: Column, place: int) -> str:
    if place >= len(runs):
        return "nothing more"
    stream_id, start, end, records, size = runs[place].tolist()
    return f"stream {stream_id} [{start}, {end}) of {records} records and {size} bytes"
