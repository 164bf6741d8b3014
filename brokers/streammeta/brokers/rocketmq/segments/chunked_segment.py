"""A segment in an object store: a chunk for each commit, merged into one object when it is sealed.

Chunks are named by the position they begin at, so names and sizes are all that is needed to open a
segment. The merge copies inside the store what is large enough for a part, and uploads again what
is not. A crash leaves the chunks, or both; opening finds out which.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from streammeta.brokers.rocketmq.segments.storage import (
    OtherWriterError,
    SegmentWriteError,
    TimeBounds,
)
from streammeta.client.resources.daemon_threads import run_blocking
from streammeta.storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoreUnavailableError,
)
from streammeta.storage.object_store.protocol.base import (
    MAX_PARTS,
    MIN_PART_SIZE,
    MultipartUpload,
    ObjectStore,
    UploadedPart,
)


class ChunkLayoutError(Exception):
    """The objects of a segment do not make one run of bytes."""


class IllegalOffsetError(SegmentWriteError):
    """A commit does not continue the segment; `position` is where it has to."""

    code = "ILLEGAL_OFFSET"


class SegmentSealedError(SegmentWriteError):
    """A commit came after the segment was sealed."""

    code = "SEGMENT_SEALED"


@dataclass(frozen=True, slots=True)
class Chunk:
    """An object that holds the bytes of a segment from `start` on."""

    key: str
    start: int
    size: int

    @property
    def end(self) -> int:
        """Position behind the last byte."""
        return self.start + self.size


class ChunkedSegment:
    """The objects of one segment below `prefix`; make it with `open`."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix.rstrip("/")
        self._chunks: list[Chunk] = []
        self._merged: Chunk | None = None
        self._leftover: list[str] = []
        """Keys of chunks that are merged, and not deleted yet."""
        self._uncertain: tuple[str, bytes] | None = None
        """Key and bytes of a write whose outcome is not known."""
        self._has_other_writer = False

    @classmethod
    async def open(cls, store: ObjectStore, prefix: str) -> ChunkedSegment:
        """Find the objects of a segment; chunks that were merged before a crash are deleted.

        Chunks that can't be deleted now are left to `seal`.

        Raises:
            ChunkLayoutError: two merged objects, or a gap or an overlap between chunks.
            StorageError: the store can't be listed; nothing is taken for empty then.
        """
        segment = cls(store, prefix)
        await segment._load()
        with contextlib.suppress(StorageError):
            await segment._delete_leftover()
        return segment

    async def _load(self) -> None:
        """List the objects of the segment."""
        merged = await self._listed("segment/segment-")
        if len(merged) > 1:
            raise ChunkLayoutError(
                f"{self._prefix} has {len(merged)} merged objects, wanted one at most"
            )
        chunks = await self._listed("chunk/chunk-")
        if merged:
            # A chunk that reaches beyond the merged object is not in it, and stays.
            self._merged, self._chunks = merged[0], []
            self._leftover = [chunk.key for chunk in chunks if chunk.end <= merged[0].end]
            return
        end = 0
        for chunk in chunks:
            if chunk.start != end:
                raise ChunkLayoutError(f"chunk {chunk.key} begins at {chunk.start}, wanted {end}")
            end = chunk.end
        self._merged, self._chunks, self._leftover = None, chunks, []

    @property
    def is_sealed(self) -> bool:
        """Whether the segment is one object that takes nothing more."""
        return self._merged is not None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks in order of position; none once they are merged."""
        return tuple(self._chunks)

    @property
    def end(self) -> int:
        """Number of bytes of the segment."""
        if self._merged is not None:
            return self._merged.end
        return self._chunks[-1].end if self._chunks else 0

    async def size(self) -> int | None:
        """Return the number of stored bytes, None if the store does not answer.

        Raises `OtherWriterError` after another writer stored a chunk where this one writes: the
        size counts foreign bytes then.
        """
        if self._merged is None:
            try:
                await self._load()
                await self._settle()
            except StorageError:
                return None
        if self._has_other_writer:
            raise OtherWriterError(f"another writer stored a chunk of {self._prefix}")
        return self.end

    async def reload(self) -> int | None:
        """Return the number of stored bytes, whoever wrote them, None if the store does not answer.

        Later writes continue there.
        """
        self._has_other_writer, self._uncertain = False, None
        return await self.size()

    async def _settle(self) -> None:
        """Find out whose chunk lies where a write had no answer: its size alone does not say."""
        if self._uncertain is None:
            return
        key, data = self._uncertain
        if any(chunk.key == key for chunk in self._chunks):
            stored = await run_blocking(self._store.get_range, key)
            self._has_other_writer = self._has_other_writer or stored != data
            self._uncertain = None

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        """Store a chunk; `times` are the metadata's to keep.

        Raises:
            SegmentSealedError: the segment takes nothing more.
            IllegalOffsetError: the position is not the end.
            OtherWriterError: another writer has stored other bytes at the position.
            SegmentWriteError: the store failed and may have the chunk.
        """
        if self._merged is not None:
            raise SegmentSealedError("segment is sealed", self.end)
        if position != self.end:
            raise IllegalOffsetError(f"position is {position}, wanted {self.end}", self.end)
        key = f"{self._prefix}/chunk/chunk-{position}"
        self._uncertain = (key, data)
        try:
            await run_blocking(self._store.put, key, data, if_absent=True)
        except ObjectExistsError:
            await self._require_same(key, data)
        except StorageError as error:
            raise SegmentWriteError(str(error)) from error
        self._uncertain = None
        self._chunks.append(Chunk(key, position, len(data)))

    async def _require_same(self, key: str, data: bytes) -> None:
        """Accept a chunk that an attempt of this write has stored; its answer was lost."""
        try:
            stored = await run_blocking(self._store.get_range, key)
        except StorageError as error:
            raise SegmentWriteError(str(error)) from error
        if stored != data:
            raise OtherWriterError(f"another writer stored chunk {key}")

    async def read(self, position: int, length: int) -> bytes:
        """Return stored bytes, fewer at the end; chunks are read at the same time.

        Chunks that were merged and deleted meanwhile are read from the merged object.
        """
        try:
            return await self._read(position, length)
        except ObjectNotFoundError:
            merged = await self._listed("segment/segment-")
            if len(merged) != 1:
                raise
            self._merged, self._chunks = merged[0], []
            return await self._read(position, length)

    async def _read(self, position: int, length: int) -> bytes:
        sources = self._chunks if self._merged is None else [self._merged]
        end = min(position + length, self.end)
        first = max(0, bisect_right(sources, position, key=lambda chunk: chunk.start) - 1)
        last = bisect_left(sources, end, key=lambda chunk: chunk.start)
        reads = [
            run_blocking(
                self._store.get_range,
                chunk.key,
                max(position, chunk.start) - chunk.start,
                min(end, chunk.end) - chunk.start,
            )
            for chunk in sources[first:last]
            if max(position, chunk.start) < min(end, chunk.end)
        ]
        return b"".join(await asyncio.gather(*reads))

    async def seal(self) -> None:
        """Merge the chunks into one object and delete them; may be repeated after any failure."""
        if self._merged is None and self._chunks:
            merged = Chunk(f"{self._prefix}/segment/segment-0", 0, self.end)
            await run_blocking(self._merge, merged)
            self._leftover = [chunk.key for chunk in self._chunks]
            self._merged, self._chunks = merged, []
        await self._delete_leftover()

    def _merge(self, merged: Chunk) -> None:
        upload = self._store.start_multipart(merged.key)
        try:
            parts = [
                self._part(upload, number, group)
                for number, group in enumerate(part_groups(self._chunks), start=1)
            ]
            self._store.complete_multipart(upload, parts)
        except BaseException:
            self._store.abort_multipart(upload)
            raise
        size = self._store.head(merged.key).size
        if size != merged.size:
            # The next start would take it for the segment.
            self._store.delete_many([merged.key])
            raise StoreUnavailableError(
                f"merged object {merged.key} has {size} bytes, wanted {merged.size}; merge again"
            )

    def _part(self, upload: MultipartUpload, number: int, group: list[Chunk]) -> UploadedPart:
        if len(group) == 1:
            (one,) = group
            return self._store.copy_part(upload, number, one.key, 0, one.size)
        data = b"".join(self._store.get_range(one.key) for one in group)
        return self._store.upload_part(upload, number, data)

    async def destroy(self) -> None:
        """Delete all objects of the segment, and those a crash left."""
        listed = await self._listed("chunk/chunk-") + await self._listed("segment/segment-")
        await self._delete([one.key for one in listed])
        self._merged, self._chunks, self._leftover = None, [], []

    async def _listed(self, kind: str) -> list[Chunk]:
        def listed() -> list[Chunk]:
            prefix = f"{self._prefix}/{kind}"
            found = []
            for one in self._store.list_objects(prefix):
                digits = one.key[len(prefix) :]
                if digits.isascii() and digits.isdigit():
                    found.append(Chunk(one.key, int(digits), one.size))
            return sorted(found, key=lambda one: one.start)

        return await run_blocking(listed)

    async def _delete_leftover(self) -> None:
        await self._delete(self._leftover)
        self._leftover = []

    async def _delete(self, keys: list[str]) -> None:
        """Delete objects; raise `StoreUnavailableError` if one is still there."""
        if not keys:
            return
        result = await run_blocking(self._store.delete_many, keys)
        if result.failed:
            raise StoreUnavailableError(f"objects of {self._prefix} were not deleted; try again")


def part_groups(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """Yield runs of chunks, each large enough for a part; the last may be smaller.

    A chunk that is large enough by itself is a part of its own when nothing small waits before it.
    Parts grow with the segment, as an object has a limited number of them.
    """
    total = chunks[-1].end - chunks[0].start
    wanted = max(MIN_PART_SIZE, total // (MAX_PARTS - 1) + 1)
    group: list[Chunk] = []
    size = 0
    for chunk in chunks:
        group.append(chunk)
        size += chunk.size
        if size >= wanted:
            yield group
            group, size = [], 0
    if group:
        yield group
