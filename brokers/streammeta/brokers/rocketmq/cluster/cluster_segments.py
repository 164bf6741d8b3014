"""Segments as streams of a cluster: a position in a segment is an offset of its stream.

The client reads, the upload pool commits, and the keeper knows the streams. After a failed write
the stream is opened under its next epoch, which ends every write in flight. Its end then says how
much was written.
"""

from __future__ import annotations

from streammeta.brokers.rocketmq.cluster.cluster_metadata import ClusterKeeper, SegmentPlace
from streammeta.brokers.rocketmq.cluster.upload_pool import PoolWrite, UploadPool
from streammeta.brokers.rocketmq.formats.metadata import SegmentMetadata
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.storage import SegmentWriteError, TimeBounds
from streammeta.client import StreamClient
from streammeta.client.errors import BrokerClientError, NodeFencedError
from streammeta.storage.errors import StorageError


class ClusterSegmentStore:
    """The segments of one broker."""

    def __init__(self, client: StreamClient, keeper: ClusterKeeper, pool: UploadPool) -> None:
        self.client = client
        self.keeper = keeper
        self.pool = pool

    def segment(self, path: str, kind: SegmentType, base_offset: int) -> ClusterSegment:
        """Return a segment, whether it exists or not."""
        return ClusterSegment(self, (path, kind, base_offset))


class ClusterSegment:
    """One segment, with one write at a time."""

    def __init__(self, store: ClusterSegmentStore, place: SegmentPlace) -> None:
        self._store = store
        self._place = place
        self._end: int | None = None
        self._is_unsettled = False
        """Whether the outcome of a write is unknown."""

    async def size(self) -> int | None:
        """Return the committed end, None if the cluster does not answer now.

        Raises `NodeFencedError` if the process was replaced.
        """
        keeper = self._store.keeper
        if self._is_unsettled:
            try:
                # The next epoch ends the unanswered write, so the end is final.
                opened = await keeper.reopen_stream(self._place)
                await keeper.reload(self._place)
            except NodeFencedError:
                raise
            except BrokerClientError:
                return None
            self._end, self._is_unsettled = opened.next_offset, False
        elif self._end is None:
            stream = keeper.streams.get(self._place)
            self._end = 0 if stream is None else stream.next_offset

        return self._end

    async def reload(self) -> int | None:
        """Return the committed end, because a stream has only one writer."""
        return await self.size()

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        """Commit bytes at the end together with the segment's size and times.

        Raises `SegmentWriteError`, and `NodeFencedError` if the process was replaced.
        """
        try:
            await self._write(position, data, times)
        except NodeFencedError:
            raise
        except (BrokerClientError, StorageError) as error:
            raise SegmentWriteError(str(error)) from error

    async def _write(self, position: int, data: bytes, times: TimeBounds) -> None:
        keeper = self._store.keeper
        # A segment gets its stream when the metadata is saved.
        if self._place not in keeper.streams:
            keeper.table.put_segment(SegmentMetadata(*self._place))
            await keeper.save()
        if await self.size() != position:
            raise SegmentWriteError(f"position is {position}, expected {self._end}", self._end)

        end = position + len(data)
        put = keeper.encode_growth(self._place, end, times)
        # Set before the call: it may be cancelled after the commit.
        self._is_unsettled = True
        result = await self._store.pool.write(
            PoolWrite(keeper.streams[self._place], position, data, put, times)
        )
        self._end, self._is_unsettled = end, False
        keeper.note_growth(self._place, end, times, put, result.version)

    async def read(self, position: int, length: int) -> bytes:
        """Return committed bytes, fewer at the end.

        Raises the errors of reading a stream.
        """
        stream_id = self._store.keeper.streams[self._place].stream_id
        parts: list[bytes] = []
        at, end = position, position + length
        while at < end:
            records = await self._store.client.read(stream_id, at, end, max_bytes=end - at)
            before = at
            for record in records:
                base = record.base_offset
                # The first and the last record may cross the bounds of the read.
                parts.append(record.payload[max(0, at - base) : end - base])
                at = max(at, base + record.count)
            # The stream ends before the requested range does.
            if at == before:
                break

        return b"".join(parts)

    async def seal(self) -> None:
        """Do nothing: compaction merges the objects of streams."""

    async def destroy(self) -> None:
        """Delete the stream and forget the segment. Saving the metadata deletes its key."""
        await self._store.keeper.delete_stream(self._place)
        self._end, self._is_unsettled = None, False
