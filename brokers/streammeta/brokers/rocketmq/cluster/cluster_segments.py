"""Segments as streams of a cluster: a position in a segment is an offset of its stream.

Reads and writes by the client; the pool commits, the keeper knows which stream is whose. After a
write that failed the stream is opened under its next epoch, which ends whatever was under way, and
its end then says what of the write has happened.
"""

from __future__ import annotations

from streammeta.brokers.rocketmq.cluster.cluster_metadata import ClusterKeeper, SegmentPlace
from streammeta.brokers.rocketmq.cluster.upload_pool import PoolWrite, UploadPool
from streammeta.brokers.rocketmq.formats.metadata import SegmentMetadata
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.storage import SegmentWriteError, TimeBounds
from streammeta.client import BrokerClientError, NodeFencedError, StreamClient
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
    """One segment; one write at a time."""

    def __init__(self, store: ClusterSegmentStore, place: SegmentPlace) -> None:
        self._store = store
        self._place = place
        self._end: int | None = None
        self._is_unsettled = False
        """Whether a write has no known outcome."""

    async def size(self) -> int | None:
        """Return the committed end; None if the cluster does not tell it now.

        Raises `NodeFencedError` if the process was replaced.
        """
        keeper = self._store.keeper
        if self._is_unsettled:
            try:
                opened = await keeper.reopened(self._place)
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
        """Return the committed end; a stream has one writer at a time."""
        return await self.size()

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        """Commit bytes at the end, and with them the segment's size and times.

        Raises `SegmentWriteError`, `NodeFencedError` if the process was replaced.
        """
        try:
            await self._write(position, data, times)
        except NodeFencedError:
            raise
        except (BrokerClientError, StorageError) as error:
            raise SegmentWriteError(str(error)) from error

    async def _write(self, position: int, data: bytes, times: TimeBounds) -> None:
        keeper = self._store.keeper
        if self._place not in keeper.streams:
            keeper.table.put_segment(SegmentMetadata(*self._place))
            await keeper.save()
        if await self.size() != position:
            raise SegmentWriteError(f"position is {position}, wanted {self._end}", self._end)
        end = position + len(data)
        put = keeper.grown(self._place, end, times)
        self._is_unsettled = True
        result = await self._store.pool.write(
            PoolWrite(keeper.streams[self._place], position, data, put, times)
        )
        self._end, self._is_unsettled = end, False
        keeper.note_grown(self._place, end, times, put, result.version)

    async def read(self, position: int, length: int) -> bytes:
        """Return committed bytes, fewer at the end.

        Raises what reading a stream raises.
        """
        stream_id = self._store.keeper.streams[self._place].stream_id
        parts: list[bytes] = []
        at, end = position, position + length
        while at < end:
            records = await self._store.client.read(stream_id, at, end, max_bytes=end - at)
            before = at
            for record in records:
                base = record.base_offset
                parts.append(record.payload[max(0, at - base) : end - base])
                at = max(at, base + record.count)
            if at == before:
                break
        return b"".join(parts)

    async def seal(self) -> None:
        """Do nothing: compaction merges the objects of streams."""

    async def destroy(self) -> None:
        """Delete the stream and forget the segment; its key goes when the metadata is saved."""
        await self._store.keeper.delete_stream(self._place)
        self._end, self._is_unsettled = None, False
