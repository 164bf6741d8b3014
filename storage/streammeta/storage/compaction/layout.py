"""Reads of an iteration, and the layout of its blocks in memory.

Owns which bytes are fetched together and their destinations. Each output is one range of the
buffer: the bytes that a stream set object carries over from the previous iteration, the blocks in
order, and in the last iteration index and footer. A part of an upload is therefore a slice of the
buffer. Reads return blocks in the order of the sources and scatter them to their destinations.
Reading a few dead bytes between two blocks is cheaper than another request. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from streammeta.storage.compaction.entries import (
    OUTPUT_INDEX_THRESHOLD,
    Column,
    EntryTable,
    MergeRule,
    cut_runs,
    encode_trailer,
)
from streammeta.storage.compaction.plan import Iteration, Output, OutputKind


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """The GET requests of an iteration, by object and position, and their destinations.

    Row i reads the bytes `[position[i], position[i] + size[i])` of an object to `buffer_start[i]`
    of a buffer of the iteration's `data_size`. The reads fill the buffer without gaps.
    `entry_buffer_start` is the first byte in the buffer of each of the iteration's entries.
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

    Adjacent bytes of an object are read together below `max_read_bytes`. A larger entry is read
    separately, in pieces of `max_read_bytes`.

    Raises:
        ValueError: `max_read_bytes` is below 1.
    """
    if max_read_bytes < 1:
        raise ValueError(f"max_read_bytes is {max_read_bytes}, expected at least 1")

    entries = iteration.entries
    # Reads go through each object in the order of its bytes, so neighbours share a request.
    order = np.lexsort((entries.position, entries.object_id))
    by_place = entries.take(order)
    sizes = by_place.size
    places = np.cumsum(sizes, dtype=np.int64) - sizes
    # Below, not up to: a read of exactly the limit belongs to an entry that is cut.
    firsts = cut_runs(_adjacent_runs(by_place), (sizes, max_read_bytes - 1))
    totals = np.add.reduceat(sizes, firsts) if len(firsts) else sizes
    # Rounded up. Only entries over the limit need more than one read.
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
    """Return the first row of each contiguous range of bytes in an object."""
    is_first = np.ones(len(by_place), dtype=np.bool_)
    is_first[1:] = (by_place.object_id[1:] != by_place.object_id[:-1]) | (
        by_place.position[1:] != by_place.position[:-1] + by_place.size[:-1]
    )
    return np.flatnonzero(is_first)


# About as many bytes as arrive during the latency of another request.
DEAD_BYTES_MAX = 64 * 1024
"""Maximum dead bytes between two blocks of one read."""

_NOWHERE = -1


@dataclass(frozen=True, slots=True, eq=False)
class PlacedOutput:
    """Bytes `[start, end)` of the buffer that belong to one object.

    They are `carried` bytes of earlier iterations, `blocks_size` bytes of the blocks of `entries`
    (at their positions in the object), and `trailer`, empty unless the object ends here.
    """

    output: Output
    start: int
    carried: int
    entries: EntryTable
    blocks_size: int
    trailer: bytes

    @property
    def blocks_start(self) -> int:
        """Start of its first block."""
        return self.start + self.carried

    @property
    def trailer_start(self) -> int:
        """End of its blocks."""
        return self.blocks_start + self.blocks_size

    @property
    def end(self) -> int:
        """End of its bytes."""
        return self.trailer_start + len(self.trailer)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRead:
    """A read of `size` bytes of an object from `position` on.

    The bytes fill slices of the buffer in order: `lengths[i]` bytes from `starts[i]` on. A start of
    -1 marks dropped bytes.
    """

    object_id: int
    position: int
    size: int
    starts: Column
    lengths: Column

    @property
    def drops(self) -> bool:
        """Whether some of its bytes are dropped."""
        return bool((self.starts == _NOWHERE).any())

    def views(self, buffer: memoryview, dropped: memoryview) -> list[memoryview]:
        """Return the memory to read into. `dropped` has room for `DEAD_BYTES_MAX`."""
        slices = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [
            dropped[:length] if start == _NOWHERE else buffer[start : start + length]
            for start, length in slices
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A buffer of `size` bytes: the outputs written from it and the reads that fill it.

    `entries` are the entries to read, and `places` has the first byte of each in the buffer.
    """

    size: int
    outputs: tuple[PlacedOutput, ...]
    reads: tuple[PlacedRead, ...]
    entries: EntryTable
    places: Column


@dataclass(slots=True)
class StreamSetObjectSoFar:
    """The part of a stream set object that earlier iterations wrote: block bytes and entries.

    The last `carried` bytes did not fill a whole part and wait for the next iteration.
    """

    data_size: int = 0
    carried: int = 0
    tables: list[EntryTable] = field(default_factory=list)


def lay_out(
    outputs: Sequence[Output],
    so_far: StreamSetObjectSoFar,
    *,
    ends_set_object: bool,
    part_size: int,
    max_read_bytes: int,
) -> Layout:
    """Place each output of an iteration in the buffer, and plan the reads that fill it.

    Updates `so_far` to its state after the iteration is written in parts of `part_size`.
    """
    placed: list[PlacedOutput] = []
    at = 0
    for output in outputs:
        if output.kind is OutputKind.SPLIT:
            entries = output.entries.place()
            trailer = _trailer(entries)
            placed_output = PlacedOutput(output, at, 0, entries, entries.data_size, trailer)
        else:
            placed_output = _next_piece(
                output, at, so_far, ends=ends_set_object, part_size=part_size
            )
        placed.append(placed_output)
        at = placed_output.end

    entries, places = _blocks(placed)
    plan = plan_reads(Iteration(entries, ()), max_read_bytes)
    reads = tuple(_merge_reads(_scatter(plan, entries.size, places), max_read_bytes))

    return Layout(at, tuple(placed), reads, entries, places)


def _trailer(entries: EntryTable) -> bytes:
    return encode_trailer(entries, OUTPUT_INDEX_THRESHOLD, MergeRule.BELOW)


def _next_piece(
    output: Output, at: int, so_far: StreamSetObjectSoFar, *, ends: bool, part_size: int
) -> PlacedOutput:
    entries = output.entries.place(so_far.data_size)
    size = entries.data_size
    # The index of the object covers all iterations and is written with the last one.
    so_far.tables.append(entries)
    so_far.data_size += size
    trailer = _trailer(EntryTable.concatenate(so_far.tables)) if ends else b""
    piece = PlacedOutput(output, at, so_far.carried, entries, size, trailer)
    # Only whole parts are uploaded before the end of the object.
    so_far.carried = 0 if ends else (piece.end - at) % part_size
    return piece


def _blocks(placed: Iterable[PlacedOutput]) -> tuple[EntryTable, Column]:
    """Return all entries at their positions in the sources, and their first bytes in the buffer."""
    entries = EntryTable.concatenate([output.output.entries for output in placed])
    starts = [
        output.entries.position - output.entries.position[:1] + output.blocks_start
        for output in placed
        if len(output.entries)
    ]
    return entries, np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)


def _scatter(plan: ReadPlan, sizes: Column, places: Column) -> Iterator[PlacedRead]:
    """Yield the reads of a plan with the slices that each of them fills.

    The plan's reads are consecutive. Entries that are neighbours both there and in the buffer share
    a slice.
    """
    # The order of the reads, in which their bytes arrive.
    order = np.argsort(plan.entry_buffer_start)
    sources, targets, sizes = plan.entry_buffer_start[order], places[order], sizes[order]
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = targets[1:] != targets[:-1] + sizes[:-1]
    # A slice ends where the destination jumps, or where a read ends.
    cuts = np.union1d(sources[is_first], plan.buffer_start)
    rows = sources.searchsorted(cuts, side="right") - 1
    starts = targets[rows] + cuts - sources[rows]
    lengths = np.diff(cuts, append=sizes.sum())
    firsts = [*cuts.searchsorted(plan.buffer_start).tolist(), len(cuts)]

    for number, (first, stop) in enumerate(pairwise(firsts)):
        yield PlacedRead(
            int(plan.object_id[number]),
            int(plan.position[number]),
            int(plan.size[number]),
            starts[first:stop],
            lengths[first:stop],
        )


def _merge_reads(reads: Iterable[PlacedRead], max_read_bytes: int) -> Iterator[PlacedRead]:
    """Merge reads with few dead bytes between them, never more than useful bytes on either side."""
    group: list[PlacedRead] = []
    size = 0
    for read in reads:
        if group:
            dead = read.position - group[0].position - size
            joined = size + dead + read.size
            # Negative if the reads are not in ascending order.
            is_worth_it = 0 <= dead <= min(DEAD_BYTES_MAX, size, read.size)
            if is_worth_it and joined <= max_read_bytes and read.object_id == group[0].object_id:
                group.append(read)
                size = joined
                continue
            yield _join_reads(group)
        group, size = [read], read.size

    if group:
        yield _join_reads(group)


def _join_reads(group: Sequence[PlacedRead]) -> PlacedRead:
    """Join the reads of one object, ascending by position."""
    first = group[0]
    if len(group) == 1:
        return first

    starts, lengths = [first.starts], [first.lengths]
    end = first.position + first.size
    for read in group[1:]:
        if read.position > end:
            starts.append(np.array([_NOWHERE]))
            lengths.append(np.array([read.position - end]))
        starts.append(read.starts)
        lengths.append(read.lengths)
        end = read.position + read.size

    return PlacedRead(
        first.object_id,
        first.position,
        end - first.position,
        np.concatenate(starts),
        np.concatenate(lengths),
    )
