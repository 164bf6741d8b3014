"""Making one object of a group of sources: by copying their blocks, or by linking them.

Owns the bytes: which of them the store copies, which are fetched and sent, and that no upload stays
half done. Blocks are copied as they are. What passes through here is held against the checksum of
its source; that of the new object is computed as its bytes pass by, or from those of its sources.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.client.compaction.stream_object_config import StreamObjectConfig
from streammeta.client.compaction.stream_object_report import Transfers
from streammeta.client.compaction.stream_object_sources import (
    CompositeSource,
    NormalSource,
    Source,
    UnusableSourceError,
)
from streammeta.storage.compaction.copy_plan import (
    CopiedPart,
    CopyPlan,
    SourceRange,
    WrittenPart,
    plan_copy,
)
from streammeta.storage.compaction.entries import (
    EntryTable,
    MergeRule,
    encode_entries,
    merged_index,
)
from streammeta.storage.compaction.stream_objects import ANY_CRC
from streammeta.storage.errors import (
    CorruptObjectError,
    ObjectNotFoundError,
    RangeNotSatisfiableError,
    StorageError,
    StoreRejectedError,
)
from streammeta.storage.object_format.checksum import ObjectChecksum, crc_without_tail, joined_crc
from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.index_block import Footer, encode_footer
from streammeta.storage.object_store.base import MultipartUpload, UploadedPart

_log = logging.getLogger(__name__)


class _CopyRefusedError(StoreRejectedError):
    """The store will never copy a part by itself."""


@dataclass(frozen=True, slots=True)
class NewObject:
    """An object in the store that no commit names yet; `size` as the map is to record it.

    `crc32c` is that of all its bytes; -1: not known, as the store copied a part of a source, or a
    source without a checksum.
    """

    start_offset: int
    end_offset: int
    size: int
    crc32c: int


class StreamObjectOutput:
    """Makes objects of one cluster; `key_of` gives the key of an object id."""

    def __init__(
        self, calls: StoreCalls, key_of: Callable[[int], str], config: StreamObjectConfig
    ) -> None:
        self._calls = calls
        self._key_of = key_of
        self._config = config
        self._may_copy = config.server_side_copy

    async def link(
        self, object_id: int, links: Sequence[LinkedObject], moved: Transfers
    ) -> NewObject:
        """Store a composite of `links`, which are in offset order and without a gap."""
        data = await self._calls.compute(lambda: encode_composite(links))
        await self._put(object_id, data, moved)
        first, last = links[0].entries[0], links[-1].entries[-1]
        size = sum(entry.size for link in links for entry in link.entries)
        return NewObject(first.start_offset, last.end_offset, size, _crc_of(data))

    async def merge(
        self,
        object_id: int,
        sources: Sequence[NormalSource],
        stream_start: int,
        moved: Transfers,
    ) -> NewObject:
        """Store one object of the blocks of `sources`, but for those below `stream_start`.

        A store that refuses to copy by itself is not asked again. Raises `UnusableSourceError` for
        a source whose bytes are not what was written; the object is then not stored.
        """
        if self._may_copy:
            try:
                return await self._merge(object_id, sources, stream_start, moved)
            except _CopyRefusedError as error:
                _log.warning("the store copies no parts, they are fetched and sent: %s", error)
                self._may_copy = False
        return await self._merge(object_id, sources, stream_start, moved)

    async def _merge(
        self,
        object_id: int,
        sources: Sequence[NormalSource],
        stream_start: int,
        moved: Transfers,
    ) -> NewObject:
        live = [_live_entries(source, stream_start) for source in sources]
        ranges = [
            SourceRange(
                source.listed.object_id, int(table.position[0]), source.data_size, self._may_copy
            )
            for source, table in zip(sources, live, strict=True)
        ]
        trailer = await self._calls.compute(lambda: self._trailer(live))
        plan = plan_copy(ranges, len(trailer), self._config.copy_rules)
        job = _MergeJob(self._calls, self._key_of, plan, sources, trailer, moved)
        crc32c = await (job.put(object_id) if plan.is_single else job.upload(object_id))
        start, end = int(live[0].start_offset[0]), int(live[-1].end_offset[-1])
        return NewObject(start, end, plan.size, crc32c)

    def _trailer(self, live: Sequence[EntryTable]) -> bytes:
        placed = EntryTable.concatenate(live).placed()
        index = encode_entries(
            merged_index(placed, self._config.index_merge_bytes, MergeRule.UP_TO)
        )
        return index + encode_footer(Footer(placed.data_size, len(index)))

    async def _put(self, object_id: int, data: bytes, moved: Transfers) -> None:
        key, store = self._key_of(object_id), self._calls.store
        await self._calls.write(len(data), lambda: store.put(key, data))
        moved.add_put(len(data))


def live_links(sources: Sequence[Source], stream_start: int) -> list[LinkedObject]:
    """Return what a composite of `sources` links: of a composite what can still be read."""
    links: list[LinkedObject] = []
    for source in sources:
        if isinstance(source, CompositeSource):
            links += [one for one in source.links if one.entries[-1].end_offset > stream_start]
        else:
            links.append(source.link())
    return links


def _live_entries(source: NormalSource, stream_start: int) -> EntryTable:
    """Cut the entries off the front that end at or below `stream_start`."""
    first = int(np.searchsorted(source.entries.end_offset, stream_start, side="right"))
    return source.entries.span(first, len(source.entries))


class _MergeJob:
    """One new object on its way into the store."""

    def __init__(
        self,
        calls: StoreCalls,
        key_of: Callable[[int], str],
        plan: CopyPlan,
        sources: Sequence[NormalSource],
        trailer: bytes,
        moved: Transfers,
    ) -> None:
        self._calls = calls
        self._key_of = key_of
        self._plan = plan
        self._sources = {source.listed.object_id: source for source in sources}
        self._trailer = trailer
        self._moved = moved
        self._checks = _SourceChecks(self._sources, key_of)
        self._checksum = ObjectChecksum()
        written = (part.size for part in plan.parts if isinstance(part, WrittenPart))
        self._buffer = bytearray(max(written))

    async def put(self, object_id: int) -> int:
        """Fetch everything and put it in one request; return the checksum."""
        (part,) = self._plan.parts
        assert isinstance(part, WrittenPart)  # what a single request consists of
        data = await self._assembled(part)
        store, key = self._calls.store, self._key_of(object_id)
        await self._calls.write(len(data), lambda: store.put(key, data))
        self._moved.add_put(len(data))
        return self._checksum.value

    async def upload(self, object_id: int) -> int:
        """Copy and send parts; return the checksum, as `NewObject` has it."""
        store, key = self._calls.store, self._key_of(object_id)
        upload = await self._calls.write(0, lambda: store.start_multipart(key))
        try:
            parts = await self._all_parts(upload)
            await self._calls.write(0, lambda: store.complete_multipart(upload, parts))
        except BaseException as error:
            await self._abort(upload, error)
            raise
        if not self._plan.copies:
            return self._checksum.value
        return await self._calls.compute(self._crc_from_sources)

    def _crc_from_sources(self) -> int:
        """Work out the checksum from those of the sources, if all have one and are used whole."""
        data_size = sum(source.data_size for source in self._sources.values())
        known = all(source.listed.crc32c != ANY_CRC for source in self._sources.values())
        if not known or data_size + len(self._trailer) != self._plan.size:
            return ANY_CRC
        crc = 0
        for source in self._sources.values():
            blocks = crc_without_tail(source.listed.crc32c, _crc_of(source.tail), len(source.tail))
            crc = joined_crc(crc, blocks, source.data_size)
        return joined_crc(crc, _crc_of(self._trailer), len(self._trailer))

    async def _all_parts(self, upload: MultipartUpload) -> list[UploadedPart]:
        """Make all parts: copies beside each other, written ones one by one, to bound memory."""
        numbered = list(enumerate(self._plan.parts, start=1))
        written = [(n, part) for n, part in numbered if isinstance(part, WrittenPart)]
        jobs: list[Coroutine[Any, Any, list[UploadedPart]]] = [
            self._copied(upload, n, part) for n, part in numbered if isinstance(part, CopiedPart)
        ]
        jobs.append(self._all_written(upload, written))
        done = await _together(jobs)
        return sorted((part for some in done for part in some), key=lambda part: part.number)

    async def _copied(
        self, upload: MultipartUpload, number: int, part: CopiedPart
    ) -> list[UploadedPart]:
        store, source = self._calls.store, part.source
        key = self._key_of(source.object_id)
        with _naming(source):
            try:
                copied = await self._calls.write(
                    0, lambda: store.copy_part(upload, number, key, source.start, source.end)
                )
            except StoreRejectedError as error:
                raise _CopyRefusedError(str(error)) from error
        self._moved.add_copy(part.size)
        return [copied]

    async def _all_written(
        self, upload: MultipartUpload, parts: Sequence[tuple[int, WrittenPart]]
    ) -> list[UploadedPart]:
        done: list[UploadedPart] = []
        for number, part in parts:
            done.append(await self._written(upload, number, part))
        return done

    async def _written(
        self, upload: MultipartUpload, number: int, part: WrittenPart
    ) -> UploadedPart:
        store, data = self._calls.store, await self._assembled(part)
        sent = await self._calls.write(len(data), lambda: store.upload_part(upload, number, data))
        self._moved.add_part(len(data))
        return sent

    async def _assembled(self, part: WrittenPart) -> memoryview:
        """Fetch the ranges of a part into the buffer; the trailer is behind those of the last.

        There is one buffer for all parts, which are written one after the other.
        """
        view, at = memoryview(self._buffer)[: part.size], 0
        jobs: list[Coroutine[Any, Any, None]] = []
        for source in part.sources:
            jobs.append(self._fetch(source, view[at : at + source.size]))
            at += source.size
        await _together(jobs)
        if part.trailer_size:
            view[at:] = self._trailer
        await self._calls.compute(lambda: self._check(part, view))
        return view.toreadonly()

    async def _fetch(self, source: SourceRange, into: memoryview) -> None:
        held = self._sources[source.object_id].whole
        if held is not None:
            into[:] = memoryview(held)[source.start : source.end]
            return
        store, key = self._calls.store, self._key_of(source.object_id)
        with _naming(source):
            got = await self._calls.read(
                source.size, lambda: store.read_into(key, source.start, [into])
            )
        self._moved.add_reads(1, got)
        if got != source.size:
            raise UnusableSourceError(
                source.object_id,
                f"bytes [{source.start}, {source.end}) of it were asked for, {got} are there",
            )

    def _check(self, part: WrittenPart, view: memoryview) -> None:
        at = 0
        for source in part.sources:
            self._checks.take(source, view[at : at + source.size])
            at += source.size
        self._checksum.update(view)

    async def _abort(self, upload: MultipartUpload, error: BaseException) -> None:
        store = self._calls.store
        try:
            await self._calls.drop(lambda: store.abort_multipart(upload))
        except StorageError as second:
            error.add_note(
                f"upload {upload.upload_id!r} of {upload.key!r} could not be aborted ({second});"
                " its parts stay in the store until a rule of the bucket drops them"
            )


class _SourceChecks:
    """Holds sources of which every byte passes by against their recorded checksums."""

    def __init__(self, sources: dict[int, NormalSource], key_of: Callable[[int], str]) -> None:
        self._sources = sources
        self._key_of = key_of
        self._running: dict[int, ObjectChecksum] = {}

    def take(self, fetched: SourceRange, data: memoryview) -> None:
        """Take the next bytes of a source. Raises `UnusableSourceError` if it is damaged."""
        source = self._sources[fetched.object_id]
        if source.listed.crc32c == ANY_CRC or source.whole is not None:
            return
        running = self._running.setdefault(fetched.object_id, ObjectChecksum())
        if running.size != fetched.start:
            return  # its front was trimmed, or copied by the store
        running.update(data)
        if fetched.end != source.data_size:
            return
        running.update(source.tail)
        try:
            running.verify(source.listed.crc32c, source=self._key_of(fetched.object_id))
        except CorruptObjectError as error:
            raise UnusableSourceError(fetched.object_id, str(error)) from error


def _crc_of(data: bytes) -> int:
    checksum = ObjectChecksum()
    checksum.update(data)
    return checksum.value


@contextmanager
def _naming(source: SourceRange) -> Iterator[None]:
    """Say of which source it was that it is gone, or smaller than its index says."""
    try:
        yield
    except (ObjectNotFoundError, RangeNotSatisfiableError) as error:
        raise UnusableSourceError(source.object_id, str(error)) from error


async def _together(jobs: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run jobs beside each other and return what they return; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
