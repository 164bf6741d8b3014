"""What a planned compaction costs and saves, in figures.

Owns the arithmetic over a commit's plan: objects, bytes of metadata, requests of readers, bytes
moved. Pure: no bucket and no controller is asked. All figures are of the sources named in the
plan and of what becomes of them, not of the rest of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.set_object_sources import likely_index_start
from streammeta.storage.compaction.entries import (
    OUTPUT_INDEX_THRESHOLD,
    EntryTable,
    MergeRule,
    contiguous_runs,
    merged_index,
)
from streammeta.storage.compaction.layout import SetObjectSoFar, lay_out
from streammeta.storage.compaction.plan import CommitPlan, OutputKind
from streammeta.storage.compaction.selection import GroupKind, SetObjects
from streammeta.storage.object_format.index_block import FOOTER_SIZE, INDEX_ENTRY_SIZE
from streammeta.storage.object_format.object_reader import tail_guess
from streammeta.storage.object_store.reads import MAX_SPAN

OBJECT_METADATA_BYTES = 54 + 32
"""A row each in the sections `objects` and `object_facts` of a checkpoint (docs/format.md)."""

RANGE_METADATA_BYTES = 32
"""A row in the section `object_ranges`."""

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ListedObject:
    """What the map lists of a set object; `order_id` is its own id unless compaction made it."""

    object_id: int
    order_id: int
    object_size: int
    range_count: int


def listed_objects(objects: SetObjects) -> dict[int, ListedObject]:
    """Return the objects of a listing by id."""
    columns = (objects.object_id, objects.order_id, objects.object_size, objects.range_count)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {row[0]: ListedObject(*row) for row in rows}


@dataclass(frozen=True, slots=True)
class Change:
    """A figure as it is and as it would be."""

    before: int
    after: int

    def __add__(self, other: Change) -> Change:
        return Change(self.before + other.before, self.after + other.after)


NO_CHANGE = Change(0, 0)


@dataclass(frozen=True, slots=True)
class OutputFigures:
    """An object that a commit would make.

    `stream_id` and the offsets are those of a stream object; -1 in a set object.
    """

    kind: OutputKind
    stream_id: int
    start_offset: int
    end_offset: int
    ranges: int
    index_entries: int
    data_size: int

    @property
    def object_size(self) -> int:
        """Bytes of the object."""
        return self.data_size + self.index_entries * INDEX_ENTRY_SIZE + FOOTER_SIZE


@dataclass(frozen=True, slots=True)
class CommitFigures:
    """One commit: what it replaces, what it makes, what that takes.

    `cold_gets` are the requests of a reader with empty caches that reads one stream after the
    other, `streams` of them. `gets` and `bytes_read` are those of the compaction, its indexes
    included. `fresh_bytes` are those of sources that no compaction has written.
    """

    source_ids: tuple[int, ...]
    kind: GroupKind
    iterations: int
    outputs: tuple[OutputFigures, ...]
    objects: Change
    metadata_bytes: Change
    streams: int
    cold_gets: Change
    gets: int
    bytes_read: int
    bytes_written: int
    fresh_bytes: int


def commit_figures(
    commit: CommitPlan,
    sources: Sequence[ListedObject],
    config: CompactionConfig,
    kind: GroupKind,
) -> CommitFigures:
    """Work out the figures of `commit`, which replaces all of `sources` within the bounds given.

    Sources of which nothing lives are in no plan and only go.
    """
    set_entries = _set_object_entries(commit)
    outputs = tuple(_outputs(commit, set_entries))
    ids = np.array([one.object_id for one in sources], dtype=np.int64)
    order = np.argsort(ids)
    holder = order[np.searchsorted(ids, commit.entries.object_id, sorter=order)]
    counts = np.bincount(holder, minlength=len(ids)).tolist()
    index_gets = [
        _index_gets(one.object_size, count) for one, count in zip(sources, counts, strict=True)
    ]
    index_bytes = sum(
        one.object_size - likely_index_start(one.object_size, one.range_count, "")
        for one in sources
    )
    block_gets, block_bytes = _block_reads(commit, config)
    return CommitFigures(
        source_ids=tuple(one.object_id for one in sources),
        kind=kind,
        iterations=len(commit.iterations),
        outputs=outputs,
        objects=Change(len(sources), len(outputs)),
        metadata_bytes=Change(
            _metadata_bytes(len(sources), sum(one.range_count for one in sources)),
            _metadata_bytes(len(outputs), sum(one.ranges for one in outputs)),
        ),
        streams=len(np.unique(commit.entries.stream_id)),
        cold_gets=Change(
            _cold_gets(commit.entries, holder, index_gets), _cold_gets_after(outputs, set_entries)
        ),
        gets=len(sources) + block_gets,
        bytes_read=index_bytes + block_bytes,
        bytes_written=sum(one.object_size for one in outputs),
        fresh_bytes=sum(one.object_size for one in sources if one.order_id == one.object_id),
    )


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """The sums over the commits of a plan."""

    commits: int
    iterations: int
    objects: Change
    metadata_bytes: Change
    streams: int
    cold_gets: Change
    gets: int
    bytes_read: int
    bytes_written: int
    fresh_bytes: int

    @property
    def gets_per_cold_read(self) -> tuple[float, float] | None:
        """Requests, before and after, to read all that the sources hold of one stream; the mean.

        None without streams.
        """
        if not self.streams:
            return None
        return self.cold_gets.before / self.streams, self.cold_gets.after / self.streams

    @property
    def write_amplification(self) -> float | None:
        """Bytes written for each byte that was not written by a compaction before.

        None if all of them were.
        """
        return self.bytes_written / self.fresh_bytes if self.fresh_bytes else None


def plan_figures(commits: Sequence[CommitFigures]) -> PlanFigures:
    """Add the commits of a plan up. A stream counts once for each commit that moves it."""
    return PlanFigures(
        commits=len(commits),
        iterations=sum(one.iterations for one in commits),
        objects=sum((one.objects for one in commits), NO_CHANGE),
        metadata_bytes=sum((one.metadata_bytes for one in commits), NO_CHANGE),
        streams=sum(one.streams for one in commits),
        cold_gets=sum((one.cold_gets for one in commits), NO_CHANGE),
        gets=sum(one.gets for one in commits),
        bytes_read=sum(one.bytes_read for one in commits),
        bytes_written=sum(one.bytes_written for one in commits),
        fresh_bytes=sum(one.fresh_bytes for one in commits),
    )


def _set_object_entries(commit: CommitPlan) -> EntryTable:
    """All that becomes one set object, in its order."""
    return EntryTable.concatenate(
        [
            output.entries
            for iteration in commit.iterations
            for output in iteration.outputs
            if output.kind is OutputKind.COMPACT
        ]
    )


def _outputs(commit: CommitPlan, set_entries: EntryTable) -> Iterator[OutputFigures]:
    """Yield the set object, if there is one, then the stream objects in the order they are made."""
    if len(set_entries):
        ranges = len(contiguous_runs(set_entries))
        yield _output(OutputKind.COMPACT, set_entries, (-1, -1, -1), ranges)
    for iteration in commit.iterations:
        for output in iteration.outputs:
            if output.kind is OutputKind.SPLIT:
                entries = output.entries
                stream_id, start = int(entries.stream_id[0]), int(entries.start_offset[0])
                held = (stream_id, start, int(entries.end_offset[-1]))
                yield _output(OutputKind.SPLIT, entries, held, 1)


def _output(
    kind: OutputKind, entries: EntryTable, held: tuple[int, int, int], ranges: int
) -> OutputFigures:
    index = merged_index(entries.placed(), OUTPUT_INDEX_THRESHOLD, MergeRule.BELOW)
    return OutputFigures(kind, *held, ranges, len(index), entries.data_size)


def _metadata_bytes(objects: int, ranges: int) -> int:
    return objects * OBJECT_METADATA_BYTES + ranges * RANGE_METADATA_BYTES


def _block_reads(commit: CommitPlan, config: CompactionConfig) -> tuple[int, int]:
    """Count the requests with which the compaction fetches blocks, and their bytes."""
    so_far, gets, size = SetObjectSoFar(), 0, 0
    for iteration in commit.iterations:
        layout = lay_out(
            iteration.outputs,
            so_far,
            ends_set_object=False,
            part_size=config.part_size,
            max_read_bytes=config.read_bytes,
        )
        gets += len(layout.reads)
        size += sum(read.size for read in layout.reads)
    return gets, size


def _cold_gets_after(outputs: Sequence[OutputFigures], set_entries: EntryTable) -> int:
    """Requests to read each stream of the outputs, one stream after the other."""
    gets = 0
    for one in outputs:
        index_gets = _index_gets(one.object_size, one.index_entries)
        if one.kind is OutputKind.COMPACT:
            gets += _cold_gets(set_entries, np.zeros(len(set_entries), np.int64), [index_gets])
        else:
            gets += index_gets + -(-one.data_size // MAX_SPAN)
    return gets


def _cold_gets(entries: EntryTable, holder: Column, index_gets: Sequence[int]) -> int:
    """Sum, over each stream in each object, the requests for the index and for the stream's bytes.

    `holder` has the place of each entry's object in `index_gets`.
    """
    _, stream = np.unique(entries.stream_id, return_inverse=True)
    pairs, place = np.unique(stream * len(index_gets) + holder, return_inverse=True)
    held = np.bincount(place, weights=entries.size).astype(np.int64)
    of_indexes = np.array(index_gets, dtype=np.int64)[pairs % len(index_gets)]
    return int(of_indexes.sum() + (-(-held // MAX_SPAN)).sum())


def _index_gets(object_size: int, entries: int) -> int:
    """Requests for an index: a second one if it begins before what is guessed to hold it."""
    guess = tail_guess(object_size, "")
    begins = object_size - FOOTER_SIZE - entries * INDEX_ENTRY_SIZE
    return 1 if begins >= guess.start else 2
