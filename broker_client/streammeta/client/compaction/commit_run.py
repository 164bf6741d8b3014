"""Carrying out one planned commit: read, write, check, commit; iteration after iteration.

Owns the order of things and what is in memory: the buffer of one iteration, or of two if both fit.
Everything that was begun in the store and not finished is dropped when something fails; outputs
that were finished are left to the journal. Knows nothing of where plans come from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from streammeta.client.compaction.buffers import new_buffer
from streammeta.client.compaction.commit import (
    UNKNOWN_BOUNDS,
    Replacement,
    SetObjectWritten,
    StreamObjectWritten,
    TimeBounds,
)
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.node_map import NodeMap
from streammeta.client.compaction.output_writer import OutputWriter, PartRules, WrittenObject
from streammeta.client.compaction.report import Figures
from streammeta.client.compaction.resume import OutputJournal
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.client.compaction.target import CompactionTarget
from streammeta.client.compaction.together import some_at_a_time, to_its_end
from streammeta.client.resources import give_back
from streammeta.storage.compaction.entries import EntryTable, stream_ranges
from streammeta.storage.compaction.layout import (
    DEAD_BYTES_MAX,
    Layout,
    PlacedOutput,
    PlacedRead,
    SetObjectSoFar,
    lay_out,
)
from streammeta.storage.compaction.plan import CommitPlan, Output, OutputKind
from streammeta.storage.compaction.verification import (
    DamagedBlockError,
    RecordedChecksum,
    SourceChecks,
    check_blocks,
    check_coverage,
)
from streammeta.storage.errors import StorageError, StoreUnavailableError
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.v1.common_pb2 import NodeIdentity


class SourceFailedError(Exception):
    """A source could not be read; `reason` is for people. `passing`: it may be, another time."""

    def __init__(self, object_id: int, reason: str, *, passing: bool = False) -> None:
        self.object_id = object_id
        self.reason = reason
        self.passing = passing
        super().__init__(f"object {object_id}: {reason}")


@dataclass(frozen=True, slots=True)
class Workshop:
    """What commits of one compactor are carried out with; ids are prepared in `writer`'s name."""

    config: CompactionConfig
    calls: StoreCalls
    node_map: NodeMap
    writer: NodeIdentity
    key_of: Callable[[int], str]
    journal: OutputJournal


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What one iteration has to write; the set object may end with it."""

    outputs: tuple[Output, ...]
    ends_set_object: bool


class CommitRun:
    """One planned commit of a target, up to the point where it only has to be committed.

    `expired_ids` are sources that go without being replaced; `time_bounds` and `checksums` are
    those of sources that have some. `figures` are kept up while it runs.
    """

    def __init__(
        self,
        workshop: Workshop,
        target: CompactionTarget,
        plan: CommitPlan,
        expired_ids: Sequence[int],
        time_bounds: Mapping[int, TimeBounds],
        figures: Figures,
        checksums: Mapping[int, RecordedChecksum] | None = None,
    ) -> None:
        self._shop = workshop
        self._target = target
        self._plan = plan
        self._expired_ids = tuple(expired_ids)
        self._time_bounds = time_bounds
        self._figures = figures
        self._checks = SourceChecks(checksums or {})
        self._rules = PartRules(workshop.config.part_size, workshop.config.put_bytes)
        self._room = workshop.config.buffer_bytes(len(plan.entries))
        self._ids: deque[int] = deque()
        self._unfinished: set[OutputWriter] = set()
        self._split: list[tuple[Output, WrittenObject]] = []
        self._pieces = [one for one in _outputs(plan) if one.kind is OutputKind.COMPACT]
        self._so_far = SetObjectSoFar()
        self._set_writer: OutputWriter | None = None
        self._set_object: WrittenObject | None = None

    async def run(self) -> Replacement:
        """Bring all outputs into the store and check them; what fails leaves nothing unfinished.

        Raises `SourceFailedError`, `storage.errors` of the store, `CoverageError`, and what bars
        the writer from preparing ids.
        """
        steps = self._steps()
        await self._take_ids(steps)
        try:
            await self._work_off(steps)
        except BaseException:
            await to_its_end(self._abort())
            raise
        await self._shop.calls.compute(self._check_sources)
        return await self._shop.calls.compute(self._replacement)

    # -- what is to be done

    def _steps(self) -> list[_Step]:
        """Return what is left to write: outputs of an earlier attempt are used again."""
        if self._pieces:
            self._set_object = self._shop.journal.find(self._set_entries())
        last_piece = self._pieces[-1] if self._pieces else None
        steps: list[_Step] = []
        for iteration in self._plan.iterations:
            outputs = tuple(one for one in iteration.outputs if not self._is_written(one))
            if outputs:
                steps.append(_Step(outputs, last_piece in outputs))
        self._figures.reused += len(self._split) + (self._set_object is not None)
        return steps

    def _is_written(self, output: Output) -> bool:
        if output.kind is OutputKind.COMPACT:
            return self._set_object is not None
        written = self._shop.journal.find(output.entries)
        if written is not None:
            self._split.append((output, written))
        return written is not None

    def _set_entries(self) -> EntryTable:
        """Return the entries of the set object, with their places in the sources."""
        return EntryTable.concatenate([piece.entries for piece in self._pieces])

    async def _take_ids(self, steps: Sequence[_Step]) -> None:
        splits = [one for step in steps for one in step.outputs if one.kind is OutputKind.SPLIT]
        count = len(splits) + any(step.ends_set_object for step in steps)
        config = self._shop.config
        self._ids.extend(await self._shop.node_map.prepare(self._shop.writer, count, config.ttl_ms))

    # -- iteration after iteration

    async def _work_off(self, steps: Iterable[_Step]) -> None:
        """Read an iteration while the one before is written, if there is room for both."""
        writing: asyncio.Task[None] | None = None
        held = 0
        try:
            for step in steps:
                layout = await self._shop.calls.compute(partial(self._lay_out, step))
                if writing is not None and held + layout.size > self._room:
                    await writing
                buffer = await self._read(layout)
                if writing is not None:
                    await writing
                writing, held = asyncio.create_task(self._write(layout, buffer)), layout.size
                del buffer
                self._figures.iterations += 1
            if writing is not None:
                await writing
        finally:
            if writing is not None and not writing.done():
                writing.cancel()
                await asyncio.wait([writing])

    def _lay_out(self, step: _Step) -> Layout:
        return lay_out(
            step.outputs,
            self._so_far,
            ends_set_object=step.ends_set_object,
            part_size=self._rules.part_size,
            max_read_bytes=self._shop.config.read_bytes,
        )

    async def _read(self, layout: Layout) -> memoryview:
        give_back()  # what the requests of the iteration before took, in many small pieces
        view, dropped = new_buffer(layout.size), memoryview(bytearray(DEAD_BYTES_MAX))
        await some_at_a_time(
            2 * self._shop.config.read_threads,
            layout.reads,
            lambda one: self._read_one(one, view, dropped),
        )
        try:
            await self._shop.calls.compute(
                lambda: check_blocks(view, layout.places, layout.entries, self._shop.key_of)
            )
        except DamagedBlockError as error:
            raise SourceFailedError(error.object_id, str(error)) from error
        return view

    async def _read_one(self, read: PlacedRead, view: memoryview, dropped: memoryview) -> None:
        store, key = self._shop.calls.store, self._shop.key_of(read.object_id)
        checked = self._checks.wants(read.object_id) and not read.drops

        def fetch() -> tuple[int, int]:
            views, checksum = read.views(view, dropped), ObjectChecksum()
            got = store.read_into(key, read.position, views)
            for one in views if checked else ():
                checksum.update(one)
            return got, checksum.value

        try:
            got, crc32c = await self._shop.calls.read(read.size, fetch)
        except StorageError as error:
            passing = isinstance(error, StoreUnavailableError)
            raise SourceFailedError(read.object_id, str(error), passing=passing) from error
        if got != read.size:
            end = read.position + got
            reason = f"{key!r} ends at byte {end}, its index says at {read.position + read.size}"
            raise SourceFailedError(read.object_id, reason)
        if checked:
            self._checks.add(read.object_id, read.position, got, crc32c)
        self._figures.gets += 1
        self._figures.bytes_read += got

    async def _write(self, layout: Layout, view: memoryview) -> None:
        """Write the outputs, the set object, which may have most of the bytes, first."""
        await self._shop.calls.compute(lambda: _put_trailers(layout, view))
        await some_at_a_time(
            2 * self._shop.config.write_threads,
            reversed(layout.outputs),
            lambda one: self._write_one(one, view[one.start : one.end]),
        )

    async def _write_one(self, placed: PlacedOutput, data: memoryview) -> None:
        if placed.output.kind is OutputKind.COMPACT:
            await self._write_piece(placed, data)
            return
        writer = self._begin()
        written = await writer.finish(data)
        self._unfinished.discard(writer)
        self._split.append((placed.output, written))
        self._keep(placed.output.entries, written)

    async def _write_piece(self, placed: PlacedOutput, data: memoryview) -> None:
        if self._set_writer is None:
            self._set_writer = self._begin()
        writer = self._set_writer
        data[: placed.carried] = writer.carried
        if not placed.trailer:
            await writer.write(data)
            return
        self._set_object = await writer.finish(data)
        self._unfinished.discard(writer)
        self._keep(self._set_entries(), self._set_object)

    def _begin(self) -> OutputWriter:
        object_id = self._ids.popleft()
        key = self._shop.key_of(object_id)
        writer = OutputWriter(self._shop.calls, key, object_id, self._rules, self._figures)
        self._unfinished.add(writer)
        return writer

    def _keep(self, sources: EntryTable, written: WrittenObject) -> None:
        self._shop.journal.keep(sources, written, self._shop.config.ttl_ms / 2000)

    async def _abort(self) -> None:
        await self._shop.calls.settled()
        for writer in tuple(self._unfinished):
            await writer.abort()

    # -- what is committed

    def _check_sources(self) -> None:
        """Refuse to commit, and to use again, what was made of a source that is damaged."""
        for object_id, reason in self._checks.damaged().items():
            made = [written for _, written in self._split]
            made += [] if self._set_object is None else [self._set_object]
            self._shop.journal.drop(one.object_id for one in made)
            raise SourceFailedError(object_id, reason)
        self._figures.sources_checked += self._checks.checked

    def _replacement(self) -> Replacement:
        stream_objects = [
            StreamObjectWritten(written, *self._facts(output.entries))
            for output, written in self._split
        ]
        set_object = None
        outputs = [_as_of(one.entries, written) for one, written in self._split]
        if self._set_object is not None:
            entries = self._set_entries()
            set_object = SetObjectWritten(self._set_object, entries, self._bounds(entries))
            outputs.append(_as_of(entries, self._set_object))
        check_coverage(self._plan.entries, EntryTable.concatenate(outputs))
        source_ids = (*self._plan.source_ids, *self._expired_ids)
        return Replacement(self._target, source_ids, set_object, tuple(stream_objects))

    def _facts(self, entries: EntryTable) -> tuple[StreamRange, TimeBounds]:
        (held,) = stream_ranges(entries)
        return held, self._bounds(entries)

    def _bounds(self, entries: EntryTable) -> TimeBounds:
        """Return the time bounds of what was made of these entries, if all sources have some."""
        bounds = [self._time_bounds.get(one, UNKNOWN_BOUNDS) for one in entries.object_ids()]
        if UNKNOWN_BOUNDS in bounds:
            return UNKNOWN_BOUNDS
        return min(low for low, _ in bounds), max(high for _, high in bounds)


def _put_trailers(layout: Layout, view: memoryview) -> None:
    for one in layout.outputs:
        view[one.trailer_start : one.end] = one.trailer


def _outputs(plan: CommitPlan) -> Iterator[Output]:
    return (output for iteration in plan.iterations for output in iteration.outputs)


def _as_of(entries: EntryTable, written: WrittenObject) -> EntryTable:
    """Return entries as those of the object they were written to."""
    return replace(entries, object_id=np.full(len(entries), written.object_id, dtype=np.int64))
