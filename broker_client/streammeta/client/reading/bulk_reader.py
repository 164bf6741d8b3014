"""Bulk reader: many whole streams, read object by object.

A stream set object contains blocks of many streams, so streams are read in groups of neighbouring
ids, each object once per group. Nothing is cached: a full scan must not evict the blocks of other
readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from streammeta.client.reading.lookups import QUERIES_PER_CALL, Located, Lookups, Slice, StreamQuery
from streammeta.client.reading.object_source import Block, ObjectSource, merge_blocks
from streammeta.client.reading.range_reader import (
    NO_BOUND,
    BlockPlanner,
    pause_or_raise,
    select_batches,
)
from streammeta.client.resources.resources import all_of
from streammeta.storage.errors import ObjectNotFoundError
from streammeta.storage.object_format.index_block import UNLIMITED
from streammeta.storage.object_format.record import RecordBatch


@dataclass(frozen=True, slots=True)
class _StreamPlan:
    """All blocks of one stream from its offset `start` on, in offset order."""

    stream_id: int
    start: int
    blocks: Sequence[Block]

    @property
    def size(self) -> int:
        return sum(block.entry.size for block in self.blocks)


class BulkReader:
    """Reads whole streams in groups of at most `bulk_bytes`, or of one stream."""

    def __init__(
        self, namespace: str, lookups: Lookups, source: ObjectSource, bulk_bytes: int
    ) -> None:
        self._namespace = namespace
        self._lookups = lookups
        self._source = source
        self._planner = BlockPlanner(source)
        self._bulk_bytes = bulk_bytes

    async def read(self, stream_ids: Iterable[int]) -> AsyncIterator[tuple[int, list[RecordBatch]]]:
        """Yield each stream with all its records, in ascending order of id."""
        # Neighbouring ids were usually written together, so their blocks share objects.
        wanted = sorted(set(stream_ids))
        for at in range(0, len(wanted), QUERIES_PER_CALL):
            pending = wanted[at : at + QUERIES_PER_CALL]
            attempt = 0
            while pending:
                try:
                    for group in self._groups(await self._plan(pending)):
                        for stream_id, records in await self._read_group(group):
                            yield stream_id, records
                        # Yielded streams are never read again, so a retry repeats none.
                        pending = pending[len(group) :]
                        attempt = 0
                except ObjectNotFoundError as error:
                    await pause_or_raise(error, pending[0], attempt, self._namespace)
                    attempt += 1

    async def _plan(self, stream_ids: Sequence[int]) -> list[_StreamPlan]:
        """Find all blocks of each stream."""
        found = await self._lookups.list_all(stream_ids)
        await self._warm_indexes(found)
        plans: list[_StreamPlan] = []
        for stream_id in stream_ids:
            start, blocks = found[stream_id].start_offset, list[Block]()
            for run in _runs(found[stream_id].slices):
                first, end = max(start, run[0].start_offset), run[-1].end_offset
                blocks += await self._planner.find(StreamQuery(stream_id, first, end), run)
            plans.append(_StreamPlan(stream_id, start, blocks))
            # Cached indexes never wait: let other tasks of the event loop run.
            await asyncio.sleep(0)
        return plans

    async def _warm_indexes(self, found: Mapping[int, Located]) -> None:
        """Fetch the index of each object once, concurrently."""
        # Streams of one upload share their objects, so most indexes are needed many times.
        first_use = {
            piece.object_id: (piece, stream_id)
            for stream_id, located in found.items()
            for piece in reversed(located.slices)
        }
        await all_of(self._source.index(*use) for use in first_use.values())

    def _groups(self, plans: Sequence[_StreamPlan]) -> Iterable[Sequence[_StreamPlan]]:
        """Split `plans` into groups of at most `bulk_bytes`, or of one stream."""
        group: list[_StreamPlan] = []
        size = 0
        for plan in plans:
            if group and size + plan.size > self._bulk_bytes:
                yield group
                group, size = [], 0
            group.append(plan)
            size += plan.size
        if group:
            yield group

    async def _read_group(
        self, group: Sequence[_StreamPlan]
    ) -> list[tuple[int, list[RecordBatch]]]:
        """Read the streams of a group together, each object once."""
        ranges = merge_blocks(block for plan in group for block in plan.blocks)
        decoded = await all_of(self._source.records(range_) for range_ in ranges)
        by_key = {
            block.key: records
            for range_, lists in zip(ranges, decoded, strict=True)
            for block, records in zip(range_.blocks, lists, strict=True)
        }

        by_plan = ([by_key[block.key] for block in plan.blocks] for plan in group)
        return [
            (plan.stream_id, select_batches(records, plan.start, UNLIMITED, NO_BOUND))
            for plan, records in zip(group, by_plan, strict=True)
        ]


def _runs(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """Split slices where the offsets between them are lost."""
    run: list[Slice] = []
    for slice_ in slices:
        if run and slice_.start_offset > run[-1].end_offset:
            yield run
            run = []
        run.append(slice_)
    if run:
        yield run
