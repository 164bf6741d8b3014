"""Segment in an object store: one chunk for each commit, merged into one object when sealed.

A chunk's name contains its first position, so names and sizes suffice to open a segment. The merge
copies chunks that are large enough for a part inside the store, and uploads smaller ones again. A
crash leaves the chunks, or both forms. Opening finds out which.
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
from streammeta.client.parts import run_blocking
from streammeta.storage import errors as storage_errors
from streammeta.storage.object_store.protocol import base as protocol


class ChunkLayoutError(Exception):
    """The objects of a segment do not form one run of bytes."""


class IllegalOffsetError(SegmentWriteError):
    """A commit does not continue the segment. `position` is the expected position."""

    code = "ILLEGAL_OFFSET"


class SegmentSealedError(SegmentWriteError):
    """A commit came after the segment was sealed."""

    code = "SEGMENT_SEALED"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Object with the bytes of a segment from `start` on."""

    key: str
    start: int
    size: int

    @property
    def end(self) -> int:
        """Position after the last byte."""
        return self.start + self.size


class ChunkedSegment:
    """The objects of one segment below `prefix`. Create it with `open`."""

    def __init__(self, store: protocol.ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix.rstrip("/")
        self._chunks: list[Chunk] = []
        self._merged: Chunk | None = None
        self._leftover: list[str] = []
        """Keys of merged chunks that are not deleted yet."""
        self._uncertain: tuple[str, bytes] | None = None
        """Key and bytes of a write without a known outcome."""
        self._has_other_writer = False

    @classmethod
    async def open(cls, store: protocol.ObjectStore, prefix: str) -> ChunkedSegment:
        """Find the objects of a segment, and delete chunks that were merged before a crash.

        Chunks that can't be deleted now are left to `seal`.

        Raises:
            ChunkLayoutError: two merged objects, or a gap or an overlap between chunks.
            StorageError: the store can't be listed. The segment is not taken for empty then.
        """
        segment = cls(store, prefix)
        await segment._load()
        with contextlib.suppress(storage_errors.StorageError):
            await segment._delete_leftover()
        return segment

    async def _load(self) -> None:
        """List the objects of the segment."""
        merged = await self._list_chunks("segment/segment-")
        if len(merged) > 1:
            raise ChunkLayoutError(
                f"{self._prefix} has {len(merged)} merged objects, expected at most one"
            )

        chunks = await self._list_chunks("chunk/chunk-")
        if merged:
            # A chunk after the end of the merged object is not in it, and stays.
            self._merged, self._chunks = merged[0], []
            self._leftover = [chunk.key for chunk in chunks if chunk.end <= merged[0].end]
            return

        # Without a merged object the chunks must cover the segment without gaps.
        end = 0
        for chunk in chunks:
            if chunk.start != end:
                raise ChunkLayoutError(f"chunk {chunk.key} begins at {chunk.start}, expected {end}")
            end = chunk.end
        self._merged, self._chunks, self._leftover = None, chunks, []

    @property
    def is_sealed(self) -> bool:
        """Whether the segment is one object and closed for writes."""
        return self._merged is not None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks in order of position, empty once they are merged."""
        return tuple(self._chunks)

    @property
    def end(self) -> int:
        """Number of bytes of the segment."""
        if self._merged is not None:
            return self._merged.end
        return self._chunks[-1].end if self._chunks else 0

    async def size(self) -> int | None:
        """Return the number of stored bytes, None if the store does not answer.

        Raises `OtherWriterError` if another writer stored a chunk at the position of a write. The
        size would count foreign bytes.
        """
        # Chunks of another process are only visible in a new listing.
        if self._merged is None:
            try:
                await self._load()
                await self._settle()
            except storage_errors.StorageError:
                return None

        if self._has_other_writer:
            raise OtherWriterError(f"another writer stored a chunk of {self._prefix}")

        return self.end

    async def reload(self) -> int | None:
        """Return the number of stored bytes, whoever wrote them, None without the store's answer.

        Later writes continue there.
        """
        self._has_other_writer, self._uncertain = False, None
        return await self.size()

    async def _settle(self) -> None:
        """Compare a chunk at the place of an unanswered write, because its size proves nothing."""
        if self._uncertain is None:
            return
        key, data = self._uncertain
        if any(chunk.key == key for chunk in self._chunks):
            stored = await run_blocking(self._store.get_range, key)
            self._has_other_writer = self._has_other_writer or stored != data
            self._uncertain = None

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        """Store a chunk. `times` belong into the metadata, which the caller saves.

        Raises:
            SegmentSealedError: the segment is sealed.
            IllegalOffsetError: the position is not the end.
            OtherWriterError: another writer has stored other bytes at the position.
            SegmentWriteError: the store failed and may have the chunk.
        """
        if self._merged is not None:
            raise SegmentSealedError("segment is sealed", self.end)
        if position != self.end:
            raise IllegalOffsetError(f"position is {position}, expected {self.end}", self.end)
        key = f"{self._prefix}/chunk/chunk-{position}"

        # Set before the call: an answer may be lost although the chunk was stored.
        self._uncertain = (key, data)
        try:
            # `if_absent` decides between two processes that write at the same position.
            await run_blocking(self._store.put, key, data, if_absent=True)
        except storage_errors.ObjectExistsError:
            await self._require_same(key, data)
        except storage_errors.StorageError as error:
            raise SegmentWriteError(str(error)) from error
        self._uncertain = None
        self._chunks.append(Chunk(key, position, len(data)))

    async def _require_same(self, key: str, data: bytes) -> None:
        """Accept a chunk that an earlier attempt of this write stored without an answer."""
        try:
            stored = await run_blocking(self._store.get_range, key)
        except storage_errors.StorageError as error:
            raise SegmentWriteError(str(error)) from error
        if stored != data:
            raise OtherWriterError(f"another writer stored chunk {key}")

    async def read(self, position: int, length: int) -> bytes:
        """Return stored bytes, fewer at the end. Chunks are read concurrently.

        Chunks that were merged and deleted meanwhile are read from the merged object.
        """
        try:
            return await self._read(position, length)
        except storage_errors.ObjectNotFoundError:
            # A merge by another process deletes the chunks between the listing and the read.
            merged = await self._list_chunks("segment/segment-")
            if len(merged) != 1:
                raise
            self._merged, self._chunks = merged[0], []
            return await self._read(position, length)

    async def _read(self, position: int, length: int) -> bytes:
        # Chunks are sorted by position, so a binary search finds the chunks of the range.
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
        """Merge the chunks into one object and delete them. May be repeated after any failure."""
        if self._merged is None and self._chunks:
            # Chunks are deleted only after the merged object is complete, so a crash loses nothing.
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

        # A store may complete an upload with missing parts, so the size is compared.
        size = self._store.head(merged.key).size
        if size != merged.size:
            # The next start would read it as the whole segment.
            self._store.delete_many([merged.key])
            raise storage_errors.StoreUnavailableError(
                f"merged object {merged.key} has {size} bytes, expected {merged.size}. Merge again"
            )

    def _part(
        self, upload: protocol.MultipartUpload, number: int, group: list[Chunk]
    ) -> protocol.UploadedPart:
        # A copy inside the store avoids a download and an upload.
        if len(group) == 1:
            (chunk,) = group
            return self._store.copy_part(upload, number, chunk.key, 0, chunk.size)

        data = b"".join(self._store.get_range(chunk.key) for chunk in group)
        return self._store.upload_part(upload, number, data)

    async def destroy(self) -> None:
        """Delete all objects of the segment, including leftovers of a crash."""
        # A fresh listing also finds objects that a crash left.
        listed = await self._list_chunks("chunk/chunk-") + await self._list_chunks(
            "segment/segment-"
        )
        await self._delete([chunk.key for chunk in listed])
        self._merged, self._chunks, self._leftover = None, [], []

    async def _list_chunks(self, kind: str) -> list[Chunk]:
        def list_chunks() -> list[Chunk]:
            prefix = f"{self._prefix}/{kind}"
            found = []
            for object_ in self._store.list_objects(prefix):
                digits = object_.key[len(prefix) :]
                # Objects with other names do not belong to the segment.
                if digits.isascii() and digits.isdigit():
                    found.append(Chunk(object_.key, int(digits), object_.size))
            return sorted(found, key=lambda chunk: chunk.start)

        return await run_blocking(list_chunks)

    async def _delete_leftover(self) -> None:
        await self._delete(self._leftover)
        self._leftover = []

    async def _delete(self, keys: list[str]) -> None:
        """Delete objects. Raise `StoreUnavailableError` if one is left."""
        if not keys:
            return
        result = await run_blocking(self._store.delete_many, keys)
        if result.failed:
            raise storage_errors.StoreUnavailableError(
                f"objects of {self._prefix} were not deleted. Try again"
            )


def part_groups(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """Yield runs of chunks, each large enough for a part. The last may be smaller.

    A large enough chunk is a separate part when no small chunk waits before it. Parts grow with
    the segment, because an object has a limited number of them.
    """
    total = chunks[-1].end - chunks[0].start
    # One part less than allowed: the last group may be smaller than `wanted`.
    wanted = max(protocol.MIN_PART_SIZE, total // (protocol.MAX_PARTS - 1) + 1)

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
