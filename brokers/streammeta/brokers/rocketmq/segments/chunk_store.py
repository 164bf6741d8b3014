"""Segments of a broker as chunks in a bucket, and the merges of sealed ones.

Owns the place of each segment in the bucket and the merge task. A failed merge is retried. Opening
the store lists the bucket once and finds merges that a crash interrupted. The metadata says which
segments are sealed, so chunks are merged only after their last write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import replace

from streammeta.brokers.rocketmq.formats.metadata import SegmentMetadata, SegmentStatus
from streammeta.brokers.rocketmq.formats.names import SegmentType, broker_prefix, chunk_prefix
from streammeta.brokers.rocketmq.segments.chunked_segment import ChunkedSegment
from streammeta.brokers.rocketmq.segments.flat_file import MetadataKeeper
from streammeta.brokers.rocketmq.segments.storage import SegmentWriteError, TimeBounds
from streammeta.client.parts import run_blocking
from streammeta.storage.errors import ObjectNotFoundError, StorageError
from streammeta.storage.object_store.protocol.base import ObjectStore

_RETRY_S = (1.0, 60.0)
"""First and longest pause after a failed merge, in seconds."""

_log = logging.getLogger(__name__)

_Place = tuple[str, SegmentType, int]


class ChunkStore:
    """The segments of one broker in a bucket. `start` its merges, and `close` it.

    Without `merges`, sealed segments stay in chunks until a store that merges is opened.
    """

    def __init__(
        self,
        store: ObjectStore,
        keeper: MetadataKeeper,
        cluster: str,
        broker: str,
        *,
        merges: bool = True,
        retry_s: tuple[float, float] = _RETRY_S,
    ) -> None:
        self.store = store
        self.keeper = keeper
        self._cluster = cluster
        self._broker = broker
        self._merges = merges
        self._retry_s = retry_s
        self._segments: dict[_Place, BucketSegment] = {}
        self._waiting: deque[BucketSegment] = deque()
        self._sealed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def segment(self, path: str, kind: SegmentType, base_offset: int) -> BucketSegment:
        """Return a segment, whether it exists or not."""
        # One object per segment: it serialises its writes, merges and deletion.
        place = (path, kind, base_offset)
        if place not in self._segments:
            prefix = chunk_prefix(self._cluster, path, kind, base_offset)
            self._segments[place] = BucketSegment(self, place, prefix)
        return self._segments[place]

    def forget(self, place: _Place) -> None:
        """Forget a deleted segment."""
        self._segments.pop(place, None)

    # -- merges

    def start(self) -> None:
        """Merge in the background until `close`, beginning with segments of earlier processes."""
        if self._merges:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop merging. The next process finishes it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def merge_later(self, segment: BucketSegment) -> None:
        """Schedule the merge of a sealed segment."""
        if self._merges:
            self._waiting.append(segment)
            self._sealed.set()

    async def _run(self) -> None:
        # Exponential backoff, reset by each successful merge.
        pause_s, most_s = self._retry_s
        is_recovered = False
        while True:
            try:
                if not is_recovered:
                    await self._recover()
                    is_recovered = True
                await self._merge_next()
                pause_s = self._retry_s[0]
            except Exception as error:  # noqa: BLE001 - the other segments must be merged
                _log.warning(
                    "merging chunks of broker %s failed, retrying in %g s: %s",
                    self._broker,
                    pause_s,
                    error,
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, most_s)

    async def _merge_next(self) -> None:
        """Merge the longest waiting segment. After a failure it waits last."""
        # Clear before waiting, so that a segment sealed meanwhile wakes the loop.
        while not self._waiting:
            self._sealed.clear()
            await self._sealed.wait()

        # The segment stays in the queue until it is merged: a cancelled merge must not lose it.
        segment = self._waiting[0]
        try:
            await segment.merge()
        except BaseException:
            self._waiting.rotate(-1)
            raise
        self._waiting.remove(segment)

    async def _recover(self) -> None:
        """Find sealed segments that still have chunks, and abort abandoned uploads."""
        prefix = f"{broker_prefix(self._cluster, self._broker)}/"

        left = await run_blocking(self._list_unmerged, prefix)
        for place, noted in self.keeper.table.segments.items():
            is_sealed = noted.status is SegmentStatus.SEALED and noted.kind is not SegmentType.INDEX
            if is_sealed and chunk_prefix(self._cluster, *place) in left:
                self.merge_later(self.segment(*place))

    def _list_unmerged(self, prefix: str) -> set[str]:
        """Return the prefixes of segments that have chunks."""
        # An abandoned upload only costs space, so a failed abort is not an error.
        with contextlib.suppress(StorageError):
            for upload in self.store.list_multipart_uploads(prefix):
                self.store.abort_multipart(upload)
        keys = (found.key.partition("/chunk/chunk-") for found in self.store.list_objects(prefix))
        return {segment for segment, is_chunk, _ in keys if is_chunk}


class BucketSegment:
    """One segment in the bucket. Its objects are listed at the first use."""

    def __init__(self, owner: ChunkStore, place: _Place, prefix: str) -> None:
        self._owner = owner
        self._place = place
        self._prefix = prefix
        self._chunks: ChunkedSegment | None = None
        self._changing = asyncio.Lock()

    async def _open_chunks(self) -> ChunkedSegment:
        if self._chunks is None:
            # A concurrent call may open it first. Its instance knows about writes, so it wins.
            opened = await ChunkedSegment.open(self._owner.store, self._prefix)
            self._chunks = self._chunks or opened
        return self._chunks

    async def size(self) -> int | None:
        """Return the number of stored bytes, None if the bucket does not answer."""
        try:
            return await (await self._open_chunks()).size()
        except StorageError:
            return None

    async def reload(self) -> int | None:
        """Return the number of stored bytes, whoever wrote them."""
        try:
            return await (await self._open_chunks()).reload()
        except StorageError:
            return None

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        """Store a chunk, and note the segment's size and times in the metadata table.

        The caller saves the table. Raises `SegmentWriteError`, and errors of saving the metadata.
        """
        keeper = self._owner.keeper
        # A replaced process must not add chunks: the merge of its successor would miss them.
        keeper.require_owner()
        # The metadata names a segment before its first byte, so that expiry always finds it.
        if self._place not in keeper.table.segments:
            keeper.table.put_segment(SegmentMetadata(*self._place))
            await keeper.save()
        async with self._changing:
            try:
                chunks = await self._open_chunks()
            except StorageError as error:
                raise SegmentWriteError(str(error)) from error
            await chunks.write(position, data, times)

        # Times and size are noted only after the chunk is stored.
        noted = keeper.table.segments[self._place]
        begin_ms, end_ms = times
        keeper.table.put_segment(replace(noted, size=chunks.end, begin_ms=begin_ms, end_ms=end_ms))

    async def read(self, position: int, length: int) -> bytes:
        """Return stored bytes, fewer at the end of the segment. Raise `StorageError`."""
        return await (await self._open_chunks()).read(position, length)

    async def seal(self) -> None:
        """Schedule the merge of the chunks."""
        self._owner.merge_later(self)

    async def merge(self) -> None:
        """Merge the chunks into one object. Raise `StorageError` if that must be repeated."""
        async with self._changing:
            try:
                await (await self._open_chunks()).seal()
            except ObjectNotFoundError:
                # Another process of the broker has merged them. The next call lists them again.
                self._chunks = None
                raise

    async def destroy(self) -> None:
        """Delete all objects and forget the segment. Raise `StorageError` if one is left."""
        # A merge in progress would write an object again after its deletion.
        async with self._changing:
            await ChunkedSegment(self._owner.store, self._prefix).destroy()
            self._chunks = None
        self._owner.keeper.table.delete_segments(*self._place)
        self._owner.forget(self._place)
