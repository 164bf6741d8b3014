"""A segment in an object store: a chunk for each commit, merged into one object when it is sealed.

Chunks are named by the position they begin at, so names and sizes are all that is needed to open a
segment. The merge copies inside the store what is large enough for a part, and uploads again what
is not. A crash leaves the chunks, or both; opening finds out which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from streammeta.brokers.rocketmq.storage import SegmentWriteError, TimeBounds
from streammeta.client.daemon_threads import run_blocking
from streammeta.storage.errors import ObjectExistsError, StorageError, StoreUnavailableError
from streammeta.storage.object_store.base import (
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
        self._has_other_writer = False

    @classmethod
    async def open(cls, store: ObjectStore, prefix: str) -> ChunkedSegment:
        """Find the objects of a segment; chunks that were merged before a crash are deleted.

        Raises:
            ChunkLayoutError: two merged objects, or a gap or an overlap between chunks.
            StorageError: the store can't be listed; nothing is taken for empty then.
        """
        segment = cls(store, prefix)
        merged = await segment._listed("segment/segment-")
        if len(merged) > 1:
            raise ChunkLayoutError(f"{prefix} has {len(merged)} merged objects, wanted one at most")
        chunks = await segment._listed("chunk/chunk-")
        if merged:
            segment._merged = merged[0]
            await segment._delete([one.key for one in chunks])
            return segment
        end = 0
        for one in chunks:
            if one.start != end:
                raise ChunkLayoutError(f"chunk {one.key} begins at {one.start}, wanted {end}")
            end = one.end
        segment._chunks = chunks
        return segment

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

        Also None after a write met a chunk of another writer: the size counts foreign bytes then.
        """
        if self._has_other_writer:
            return None
        if self._merged is None:
            try:
                self._chunks = await self._listed("chunk/chunk-")
            except StorageError:
                return None
        return self.end

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        """Store a chunk; `times` are the metadata's to keep.

        Raises:
            SegmentSealedError: the segment takes nothing more.
            IllegalOffsetError: the position is not the end.
            SegmentWriteError: the store failed and may have the chunk, or another writer has stored
                other bytes at the position.
        """
        if self._merged is not None:
            raise SegmentSealedError("segment is sealed", self.end)
        if position != self.end:
            raise IllegalOffsetError(f"position is {position}, wanted {self.end}", self.end)
        key = f"{self._prefix}/chunk/chunk-{position}"
        try:
            await run_blocking(self._store.put, key, data, if_absent=True)
        except ObjectExistsError:
            await self._require_same(key, data)
        except StorageError as error:
            raise SegmentWriteError(str(error)) from error
        self._chunks.append(Chunk(key, position, len(data)))

    async def _require_same(self, key: str, data: bytes) -> None:
        """Accept a chunk that an attempt of this write has stored; its answer was lost."""
        try:
            stored = await run_blocking(self._store.get_range, key)
        except StorageError as error:
            raise SegmentWriteError(str(error)) from error
        if stored != data:
            self._has_other_writer = True
            raise SegmentWriteError(f"another writer stored chunk {key}; open the segment again")

    async def read(self, position: int, length: int) -> bytes:
        """Return stored bytes, fewer at the end; chunks are read at the same time."""
        sources = [self._merged] if self._merged is not None else self._chunks
        end = min(position + length, self.end)
        reads = [
            run_blocking(
                self._store.get_range,
                one.key,
                max(position, one.start) - one.start,
                min(end, one.end) - one.start,
            )
            for one in sources
            if max(position, one.start) < min(end, one.end)
        ]
        return b"".join(await asyncio.gather(*reads))

    async def seal(self) -> None:
        """Merge the chunks into one object and delete them; may be repeated after any failure."""
        if self._merged is not None or not self._chunks:
            return
        key = f"{self._prefix}/segment/segment-0"
        await run_blocking(self._merge, key)
        keys = [one.key for one in self._chunks]
        self._merged, self._chunks = Chunk(key, 0, self.end), []
        await self._delete(keys)

    def _merge(self, key: str) -> None:
        upload = self._store.start_multipart(key)
        try:
            parts = [
                self._part(upload, number, group)
                for number, group in enumerate(part_groups(self._chunks), start=1)
            ]
            self._store.complete_multipart(upload, parts)
        except BaseException:
            self._store.abort_multipart(upload)
            raise

    def _part(self, upload: MultipartUpload, number: int, group: list[Chunk]) -> UploadedPart:
        if len(group) == 1:
            (one,) = group
            return self._store.copy_part(upload, number, one.key, 0, one.size)
        data = b"".join(self._store.get_range(one.key) for one in group)
        return self._store.upload_part(upload, number, data)

    async def destroy(self) -> None:
        """Delete all objects of the segment, and those a crash left."""
        listed = await self._listed("segment/segment-") + await self._listed("chunk/chunk-")
        await self._delete([one.key for one in listed])
        self._merged, self._chunks = None, []

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
    """
    group: list[Chunk] = []
    for one in chunks:
        group.append(one)
        if sum(each.size for each in group) >= MIN_PART_SIZE:
            yield group
            group = []
    if group:
        yield group
