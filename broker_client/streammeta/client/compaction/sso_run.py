"""Execution of one planned commit of stream set objects: read, write, check, by iterations.

Owns the order of the steps and the memory: the buffer of one iteration, or of two if both fit.
After a failure unfinished uploads are dropped, and finished outputs stay in the journal. Knows
nothing of the origin of plans.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from streammeta.client.compaction.commit import (
    UNKNOWN_BOUNDS,
    CompactionOutput,
    Replacement,
    TimeBounds,
    WrittenObject,
    prepare_ids,
)
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.output_writer import OutputJournal, OutputWriter
from streammeta.client.compaction.report import Figures, SourceError
from streammeta.client.compaction.source_reading import find_damaged_source, read_gaps
from streammeta.client.compaction.store_calls import StoreCalls, run_each, run_to_end
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.model import NodeIdentity
from streammeta.client.resources.resources import give_back
from streammeta.storage.compaction import verification
from streammeta.storage.compaction.bases import Bases, move_blocks
from streammeta.storage.compaction.entries import EntryTable, stream_ranges
from streammeta.storage.compaction.layout import (
    DEAD_BYTES_MAX,
    Layout,
    PlacedOutput,
    PlacedRead,
    StreamSetObjectSoFar,
    lay_out,
)
from streammeta.storage.compaction.plan import CommitPlan, Output, OutputKind
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.checksum import ObjectChecksum

HUGE_PAGE_WORTH = 8 * 1024 * 1024
"""Smallest buffer, in bytes, for which pages of 2 MiB waste little."""


def new_buffer(size: int) -> memoryview:
    """Return `size` writable zero bytes, freed with their last view.

    They are mapped from the system, because the allocator of the C library keeps freed memory and
    cannot use it again after a small allocation in it.
    """
    if not size:
        return memoryview(b"")
    # Private and anonymous: the pages are zero until they are written, and cost nothing before.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_WORTH:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Resources of one compactor. Ids are prepared in the name of `writer`."""

    config: CompactionConfig
    calls: StoreCalls
    client: ControllerClient
    writer: NodeIdentity
    key_of: Callable[[int], str]
    journal: OutputJournal


class CommitRun:
    """One planned commit of a target: writes all outputs into the store.

    `expired_ids` are sources without a replacement. `time_bounds` and `checksums` are known values
    of sources, `bases` belong to the relative ones. `figures` are counted up while it runs.
    """

    def __init__(
        self,
        context: RunContext,
        target: CompactionTarget,
        plan: CommitPlan,
        expired_ids: Sequence[int],
        time_bounds: Mapping[int, TimeBounds],
        figures: Figures,
        checksums: Mapping[int, verification.RecordedChecksum] | None = None,
        bases: Mapping[int, Bases] | None = None,
    ) -> None:
        self._context = context
        self._target = target
        self._plan = plan
        self._expired_ids = tuple(expired_ids)
        self._time_bounds = time_bounds
        self._figures = figures
        self._checks = verification.SourceChecks(checksums or {})
        self._bases = bases or {}
        self._buffer_limit = context.config.buffer_bytes(len(plan.entries))
        # Prepared together at the beginning: a run that can't get ids must not read anything.
        self._ids: deque[int] = deque()
        self._unfinished: set[OutputWriter] = set()
        self._split: list[tuple[Output, WrittenObject]] = []
        outputs = (output for iteration in plan.iterations for output in iteration.outputs)
        self._pieces = [output for output in outputs if output.kind is OutputKind.COMPACT]
        self._so_far = StreamSetObjectSoFar()
        self._set_writer: OutputWriter | None = None
        self._set_object: WrittenObject | None = None

    async def run(self) -> Replacement:
        """Write and check all outputs. A failure leaves no unfinished upload.

        Raises `SourceError`, `storage.errors` of the store, `CoverageError`, and errors of
        preparing ids.
        """
        steps = self._steps()
        await self._prepare_ids(steps)
        try:
            await self._run_iterations(steps)
        except BaseException:
            # Also when the caller is cancelled, or the parts would stay in the store.
            await run_to_end(self._abort())
            raise
        context = self._context
        source_ids, figures = self._plan.source_ids, self._figures
        await read_gaps(self._checks, context.calls, context.key_of, source_ids, figures)
        await self._check_sources()
        return await self._context.calls.compute(self._build_replacement)

    # -- steps

    def _steps(self) -> list[list[Output]]:
        """Return the outputs to write by iteration, without outputs of an earlier attempt."""
        if self._pieces:
            self._set_object = self._context.journal.find(self._set_entries())
        every = (
            [output for output in iteration.outputs if not self._is_written(output)]
            for iteration in self._plan.iterations
        )
        steps = [outputs for outputs in every if outputs]
        self._figures.reused += len(self._split) + (self._set_object is not None)
        return steps

    def _is_written(self, output: Output) -> bool:
        if output.kind is OutputKind.COMPACT:
            return self._set_object is not None
        written = self._context.journal.find(output.entries)
        if written is not None:
            self._split.append((output, written))
        return written is not None

    def _set_entries(self) -> EntryTable:
        """Return the entries of the stream set object, with their places in the sources."""
        return EntryTable.concatenate([piece.entries for piece in self._pieces])

    async def _prepare_ids(self, steps: Iterable[Sequence[Output]]) -> None:
        kinds = [output.kind for step in steps for output in step]
        count = kinds.count(OutputKind.SPLIT) + (OutputKind.COMPACT in kinds)
        context = self._context
        self._ids.extend(
            await prepare_ids(context.client, context.writer, count, context.config.id_ttl_s)
        )

    # -- iterations

    async def _run_iterations(self, steps: Iterable[Sequence[Output]]) -> None:
        """Read an iteration while the previous one is written, if both fit in memory."""
        writing: asyncio.Task[None] | None = None
        held = 0
        try:
            for step in steps:
                layout = await self._context.calls.compute(partial(self._lay_out, step))
                if writing is not None and held + layout.size > self._buffer_limit:
                    await writing
                buffer = await self._read(layout)
                if writing is not None:
                    await writing
                writing, held = asyncio.create_task(self._write(layout, buffer)), layout.size
                # The task has the only reference, so the memory is free when the write ends.
                del buffer
                self._figures.iterations += 1

            if writing is not None:
                await writing
        finally:
            # The write uses a buffer and the upload, so it must end before the caller aborts.
            if writing is not None and not writing.done():
                writing.cancel()
                await asyncio.wait([writing])

    def _lay_out(self, step: Sequence[Output]) -> Layout:
        return lay_out(
            step,
            self._so_far,
            ends_set_object=bool(self._pieces) and self._pieces[-1] in step,
            part_size=self._context.config.part_size,
            max_read_bytes=self._context.config.read_bytes,
        )

    async def _read(self, layout: Layout) -> memoryview:
        # The previous iteration leaves many small free pieces.
        give_back()
        view, dropped = new_buffer(layout.size), memoryview(bytearray(DEAD_BYTES_MAX))
        await run_each(
            2 * self._context.config.read_threads,
            layout.reads,
            lambda read: self._read_one(read, view, dropped),
        )
        try:
            await self._context.calls.compute(partial(self._prepare_blocks, layout, view))
        except verification.DamagedBlockError as error:
            raise SourceError(error.object_id, str(error)) from error
        return view

    def _prepare_blocks(self, layout: Layout, view: memoryview) -> None:
        """Give the blocks that were read the offsets of their streams, and check them."""
        places, entries, key_of = layout.places, layout.entries, self._context.key_of
        # The bytes of the sources are in `_checks` already, so they may change here.
        move_blocks(view, places, entries, self._bases, key_of)
        verification.check_blocks(view, places, entries, key_of)

    async def _read_one(self, read: PlacedRead, view: memoryview, dropped: memoryview) -> None:
        store, key = self._context.calls.store, self._context.key_of(read.object_id)
        checked = self._checks.wants(read.object_id) and not read.drops

        def fetch() -> tuple[int, int]:
            views, checksum = read.views(view, dropped), ObjectChecksum()
            got = store.read_into(key, read.position, views)
            for piece in views if checked else ():
                checksum.update(piece)
            return got, checksum.value

        try:
            got, crc32c = await self._context.calls.read(read.size, fetch)
        except StorageError as error:
            raise SourceError(read.object_id, str(error), passing=error.may_pass) from error
        if got != read.size:
            end = read.position + got
            reason = f"{key!r} ends at byte {end}, its index says at {read.position + read.size}"
            raise SourceError(read.object_id, reason)
        if checked:
            self._checks.add(read.object_id, read.position, got, crc32c)
        self._figures.add_reads(1, got)

    async def _write(self, layout: Layout, view: memoryview) -> None:
        """Write the outputs, first the stream set object, which may have most of the bytes."""
        await self._context.calls.compute(lambda: _put_trailers(layout, view))
        await run_each(
            2 * self._context.config.write_threads,
            reversed(layout.outputs),
            lambda placed: self._write_one(placed, view[placed.start : placed.end]),
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
        # The layout reserves space for them at the start of the piece.
        data[: placed.carried] = writer.carried
        if not placed.trailer:
            await writer.write(data)
            return
        self._set_object = await writer.finish(data)
        self._unfinished.discard(writer)
        self._keep(self._set_entries(), self._set_object)

    def _begin(self) -> OutputWriter:
        object_id, context = self._ids.popleft(), self._context
        key = context.key_of(object_id)
        writer = OutputWriter(context.calls, key, object_id, context.config, self._figures)
        self._unfinished.add(writer)
        return writer

    def _keep(self, sources: EntryTable, written: WrittenObject) -> None:
        # Half of the lifetime, so that a later attempt still has time to commit.
        self._context.journal.keep(sources, written, self._context.config.id_ttl_s / 2)

    async def _abort(self) -> None:
        await self._context.calls.wait_until_idle()
        for writer in tuple(self._unfinished):
            await writer.abort()

    # -- the commit

    async def _check_sources(self) -> None:
        """Reject outputs of a damaged source, now and in later attempts."""
        context = self._context
        error = await find_damaged_source(
            self._checks, context.calls, context.key_of, self._figures
        )
        if error is not None:
            outputs = [written for _, written in self._split]
            outputs += [] if self._set_object is None else [self._set_object]
            context.journal.drop(written.object_id for written in outputs)
            raise error
        self._figures.sources_checked += self._checks.checked

    def _build_replacement(self) -> Replacement:
        finished = [(written, output.entries) for output, written in self._split]
        if self._set_object is not None:
            finished.append((self._set_object, self._set_entries()))

        # Nothing may be lost or duplicated: the outputs must contain exactly the planned offsets.
        covered = EntryTable.concatenate(
            [_as_of(entries, written) for written, entries in finished]
        )
        verification.check_coverage(self._plan.entries, covered)
        outputs = [
            CompactionOutput(written, tuple(stream_ranges(entries)), self._bounds(entries))
            for written, entries in finished
        ]
        set_object = None if self._set_object is None else outputs.pop()
        source_ids = (*self._plan.source_ids, *self._expired_ids)
        return Replacement(self._target, source_ids, set_object, tuple(outputs))

    def _bounds(self, entries: EntryTable) -> TimeBounds:
        """Return the time bounds of these entries, if all their sources have bounds."""
        bounds = [self._time_bounds.get(key, UNKNOWN_BOUNDS) for key in entries.object_ids()]
        if UNKNOWN_BOUNDS in bounds:
            return UNKNOWN_BOUNDS
        return min(low for low, _ in bounds), max(high for _, high in bounds)


def _put_trailers(layout: Layout, view: memoryview) -> None:
    for output in layout.outputs:
        view[output.trailer_start : output.end] = output.trailer


def _as_of(entries: EntryTable, written: WrittenObject) -> EntryTable:
    """Return the entries with the id of the object they were written to."""
    return replace(entries, object_id=np.full(len(entries), written.object_id, dtype=np.int64))
