"""Bulk reader: many whole streams, read object by object.

Blocks of many streams lie together in a stream set object, so streams are read in groups of
neighbouring ids, each object once for a group. Nothing is cached: a full scan must
not evict what other readers use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from streammeta.client.object_source import Block, ObjectSource, merge_blocks
from streammeta.client.reading.lookups import (
    QUERIES_PER_CALL,
    Lookups,
    Slice,
    StreamQuery,
    check_located,
    slice_of,
)
from streammeta.client.reading.range_reader import NO_BOUND, BlockPlanner, pause_or_raise, trimmed
from streammeta.client.resources import all_of
from streammeta.storage.errors import ObjectNotFoundError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class _StreamPlan:
    """All blocks of one stream, in offset order, covering `[start, end)`."""

    stream_id: int
    start: int
    end: int
    blocks: tuple[Block, ...]

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
        """Give each stream with all its records, in ascending order of id."""
        wanted = sorted(set(stream_ids))
        for at in range(0, len(wanted), QUERIES_PER_CALL):
            pending = wanted[at : at + QUERIES_PER_CALL]
            attempt = 0
            while pending:
                try:
                    for group in self._groups(await self._plan(pending)):
                        for stream_id, records in await self._read_group(group):
                            yield stream_id, records
                        pending = pending[len(group) :]
                        attempt = 0
                except ObjectNotFoundError as error:
                    await pause_or_raise(error, pending[0], attempt, self._namespace)
                    attempt += 1

    async def _plan(self, stream_ids: Sequence[int]) -> list[_StreamPlan]:
        """Find all blocks of each stream."""
        located = await self._locate_whole(stream_ids)
        await self._warm_indexes(located)
        plans: list[_StreamPlan] = []
        for query, slices in located:
            blocks = await self._planner.find(query, slices)
            plans.append(_StreamPlan(query.stream_id, query.start, query.end, tuple(blocks)))
            await asyncio.sleep(0)  # cached indexes never wait: let other work of the loop run
        return plans

    async def _locate_whole(
        self, stream_ids: Sequence[int]
    ) -> list[tuple[StreamQuery, list[Slice]]]:
        """List the objects of whole streams, from their first visible offset to their end."""
        found: dict[int, tuple[StreamQuery, list[Slice]]] = {}
        queries = [StreamQuery(stream_id, 0) for stream_id in stream_ids]
        while queries:
            further: list[StreamQuery] = []
            for query, answer in zip(queries, await self._lookups.ask_many(queries), strict=True):
                trimmed_away = answer.error == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED
                if trimmed_away and answer.stream_start_offset > query.start:
                    further.append(StreamQuery(query.stream_id, answer.stream_start_offset))
                    continue
                check_located(query, answer)
                whole = StreamQuery(query.stream_id, query.start, answer.stream_end_offset)
                known, slices = found.setdefault(query.stream_id, (whole, []))
                slices.extend(slice_of(piece) for piece in answer.objects)
                if answer.objects and answer.objects[-1].end_offset < known.end:
                    further.append(StreamQuery(query.stream_id, answer.objects[-1].end_offset))
            queries = further
        return [found[stream_id] for stream_id in stream_ids]

    async def _warm_indexes(self, located: Iterable[tuple[StreamQuery, list[Slice]]]) -> None:
        """Fetch the index of each object once, side by side."""
        first_use = {
            piece.object_id: (piece, query.stream_id)
            for query, slices in located
            for piece in reversed(slices)
        }
        await all_of(self._source.index(*use) for use in first_use.values())

    def _groups(self, plans: Sequence[_StreamPlan]) -> Iterable[Sequence[_StreamPlan]]:
        """Cut `plans` into groups of at most `bulk_bytes`, or of one stream."""
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
        decoded = await all_of(self._source.records(one) for one in ranges)
        by_key = {
            block.key: records
            for one, lists in zip(ranges, decoded, strict=True)
            for block, records in zip(one.blocks, lists, strict=True)
        }
        return [
            (
                plan.stream_id,
                trimmed(
                    [by_key[block.key] for block in plan.blocks], plan.start, plan.end, NO_BOUND
                ),
            )
            for plan in group
        ]
