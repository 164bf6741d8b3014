"""Outputs of stream object compaction: blocks of a group copied into one object, or linked.

Owns which bytes are copied inside the store and which are fetched and sent. Blocks are copied
unchanged. Fetched bytes are compared with the checksum of their source. The checksum of the new
object is computed from the transferred bytes, or from the checksums of its sources.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from streammeta.client.compaction.commit import CompactionOutput, WrittenObject
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.output_writer import ObjectUpload
from streammeta.client.compaction.report import Figures, SourceError
from streammeta.client.compaction.source_reading import find_damaged_source, read_gaps
from streammeta.client.compaction.store_calls import StoreCalls, run_all, run_to_end
from streammeta.client.compaction.stream_object_sources import Source
from streammeta.storage import errors as storage_errors
from streammeta.storage.compaction import copy_plan
from streammeta.storage.compaction.entries import EntryTable, MergeRule, encode_trailer
from streammeta.storage.compaction.stream_objects import ANY_CRC
from streammeta.storage.compaction.verification import RecordedChecksum, SourceChecks
from streammeta.storage.object_format.checksum import ObjectChecksum, crc_without_tail, join_crcs
from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.index_block import StreamRange

_log = logging.getLogger(__name__)


class _CopyRefusedError(storage_errors.StoreRejectedError):
    """The store does not support copying parts."""


class StreamObjectOutput:
    """Writes objects of one cluster. `key_of` returns the key of an object id."""

    def __init__(
        self, calls: StoreCalls, key_of: Callable[[int], str], config: CompactionConfig
    ) -> None:
        self._calls = calls
        self._key_of = key_of
        self._config = config
        self._may_copy = config.server_side_copy

    async def link(
        self, object_id: int, links: Sequence[LinkedObject], moved: Figures
    ) -> CompactionOutput:
        """Store a composite of `links`, which are consecutive and in offset order."""
        data = await self._calls.compute(lambda: encode_composite(links))
        await ObjectUpload(self._calls, self._key_of(object_id), moved).put(data)
        first, last = links[0].entries[0], links[-1].entries[-1]
        range_ = StreamRange(first.stream_id, first.start_offset, last.end_offset)
        size = sum(entry.size for link in links for entry in link.entries)
        return CompactionOutput(WrittenObject(object_id, size, _crc_of(data)), (range_,))

    async def merge(
        self,
        object_id: int,
        sources: Sequence[Source],
        stream_start: int,
        moved: Figures,
    ) -> CompactionOutput:
        """Store one object with the blocks of `sources`, without those below `stream_start`.

        After a store rejects a copy, no other is attempted. Raises `SourceError` for a source with
        damaged bytes. The object is then not stored.
        """
        if self._may_copy:
            try:
                return await self._merge(object_id, sources, stream_start, moved)
            except _CopyRefusedError as error:
                _log.warning("the store does not copy parts, fetching and sending them: %s", error)
                # For the lifetime of the compactor: the store will not learn to copy.
                self._may_copy = False
        return await self._merge(object_id, sources, stream_start, moved)

    async def _merge(
        self,
        object_id: int,
        sources: Sequence[Source],
        stream_start: int,
        moved: Figures,
    ) -> CompactionOutput:
        live = [_live_entries(source, stream_start) for source in sources]
        ranges = [
            copy_plan.SourceRange(
                source.listed.object_id, int(table.position[0]), source.data_size, self._may_copy
            )
            for source, table in zip(sources, live, strict=True)
        ]
        # Its size decides the layout of the parts, so it comes first.
        trailer = await self._calls.compute(lambda: self._trailer(live))
        plan = copy_plan.plan_copy(ranges, len(trailer), self._config.copy_rules)
        job = _MergeJob(self._calls, self._key_of, plan, sources, trailer, moved)
        crc32c = await job.run(ObjectUpload(self._calls, self._key_of(object_id), moved))
        first, end = live[0].row(0), int(live[-1].end_offset[-1])
        range_ = StreamRange(first.stream_id, first.start_offset, end)
        return CompactionOutput(WrittenObject(object_id, plan.size, crc32c), (range_,))

    def _trailer(self, live: Sequence[EntryTable]) -> bytes:
        placed = EntryTable.concatenate(live).place()
        return encode_trailer(placed, self._config.index_merge_bytes, MergeRule.UP_TO)


def _live_entries(source: Source, stream_start: int) -> EntryTable:
    """Drop the leading entries that end at or below `stream_start`."""
    first = int(np.searchsorted(source.entries.end_offset, stream_start, side="right"))
    return source.entries.span(first, len(source.entries))


class _MergeJob:
    """One new object and its upload."""

    def __init__(
        self,
        calls: StoreCalls,
        key_of: Callable[[int], str],
        plan: copy_plan.CopyPlan,
        sources: Sequence[Source],
        trailer: bytes,
        moved: Figures,
    ) -> None:
        self._calls = calls
        self._key_of = key_of
        self._plan = plan
        self._sources = {source.listed.object_id: source for source in sources}
        self._trailer = trailer
        self._moved = moved
        self._checks = SourceChecks(
            {
                object_id: RecordedChecksum(
                    source.listed.crc32c, source.data_size, len(source.tail), _crc_of(source.tail)
                )
                for object_id, source in self._sources.items()
                if source.listed.crc32c != ANY_CRC and source.whole is None
            }
        )
        self._checksum = ObjectChecksum()
        written = (part.size for part in plan.parts if isinstance(part, copy_plan.WrittenPart))
        # Written parts are sent one by one, so the largest one decides.
        self._buffer = bytearray(max(written))

    async def run(self, upload: ObjectUpload) -> int:
        """Copy, or fetch and send, everything. Return the checksum, `ANY_CRC` if unknown."""
        try:
            if self._plan.is_single:
                (part,) = self._plan.parts
                assert isinstance(part, copy_plan.WrittenPart)  # a single request is never a copy
                data = await self._assemble(part)
                await self._reject_damaged()
                await upload.put(data)
            else:
                await upload.begin()
                await self._send_parts(upload)
                await self._reject_damaged()
                await upload.complete()
        except BaseException:
            await run_to_end(upload.abort())
            raise

        if not self._plan.copies:
            return self._checksum.value

        return await self._calls.compute(self._crc_from_sources)

    async def _reject_damaged(self) -> None:
        """Compare the sources with their recorded checksums, after reading their other bytes."""
        checks, calls, key_of = self._checks, self._calls, self._key_of
        await read_gaps(checks, calls, key_of, self._sources, self._moved)
        if (error := await find_damaged_source(checks, calls, key_of, self._moved)) is not None:
            raise error

    def _crc_from_sources(self) -> int:
        """Compute the checksum from the sources' checksums, if all have one and are used whole."""
        data_size = sum(source.data_size for source in self._sources.values())
        known = all(source.listed.crc32c != ANY_CRC for source in self._sources.values())
        # Copied bytes were never seen here, so only whole sources have a known checksum.
        if not known or data_size + len(self._trailer) != self._plan.size:
            return ANY_CRC
        crc = 0
        for source in self._sources.values():
            blocks = crc_without_tail(source.listed.crc32c, _crc_of(source.tail), len(source.tail))
            crc = join_crcs(crc, blocks, source.data_size)
        return join_crcs(crc, _crc_of(self._trailer), len(self._trailer))

    async def _send_parts(self, upload: ObjectUpload) -> None:
        """Send all parts: copies concurrently, written parts one by one to limit memory."""
        numbered = list(enumerate(self._plan.parts, start=1))

        async def write_all() -> None:
            for number, part in numbered:
                if isinstance(part, copy_plan.WrittenPart):
                    await upload.send(number, await self._assemble(part))

        # Copies need no memory here, so all of them may run at once.
        copies = [
            self._copy(upload, number, part.source)
            for number, part in numbered
            if isinstance(part, copy_plan.CopiedPart)
        ]
        await run_all([*copies, write_all()])

    async def _copy(self, upload: ObjectUpload, number: int, source: copy_plan.SourceRange) -> None:
        with _name_source(source):
            try:
                key = self._key_of(source.object_id)
                await upload.copy(number, key, source.start, source.end)
            # Only a permanent rejection: a temporary one was retried.
            except storage_errors.StoreRejectedError as error:
                raise _CopyRefusedError(str(error)) from error

    async def _assemble(self, part: copy_plan.WrittenPart) -> memoryview:
        """Fetch the ranges of a part into the buffer. The last part ends with the trailer.

        All parts share the buffer, because they are written one after the other.
        """
        view, at = memoryview(self._buffer)[: part.size], 0
        jobs: list[Coroutine[Any, Any, None]] = []
        for source in part.sources:
            jobs.append(self._fetch(source, view[at : at + source.size]))
            at += source.size
        await run_all(jobs)
        if part.trailer_size:
            view[at:] = self._trailer
        await self._calls.compute(lambda: self._check(part, view))
        return view.toreadonly()

    async def _fetch(self, source: copy_plan.SourceRange, into: memoryview) -> None:
        whole = self._sources[source.object_id].whole
        if whole is not None:
            into[:] = memoryview(whole)[source.start : source.end]
            return

        store, key = self._calls.store, self._key_of(source.object_id)
        with _name_source(source):
            got = await self._calls.read(
                source.size, lambda: store.read_into(key, source.start, [into])
            )

        self._moved.add_reads(1, got)
        if got != source.size:
            raise SourceError(
                source.object_id,
                f"bytes [{source.start}, {source.end}) were requested, {got} exist",
            )

    def _check(self, part: copy_plan.WrittenPart, view: memoryview) -> None:
        at = 0
        for source in part.sources:
            if self._checks.wants(source.object_id):
                crc32c = _crc_of(view[at : at + source.size])
                self._checks.add(source.object_id, source.start, source.size, crc32c)
            at += source.size
        # In the order of the parts, as they are written one by one.
        self._checksum.update(view)


def _crc_of(data: bytes | memoryview) -> int:
    return ObjectChecksum.of(data).value


@contextmanager
def _name_source(source: copy_plan.SourceRange) -> Iterator[None]:
    """Name the source in errors of a missing or too small object."""
    try:
        yield
    except (storage_errors.ObjectNotFoundError, storage_errors.RangeNotSatisfiableError) as error:
        raise SourceError(source.object_id, str(error)) from error
