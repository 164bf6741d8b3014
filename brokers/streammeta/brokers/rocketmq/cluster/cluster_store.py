"""A broker's tiered storage on a cluster: its queues, its key index, and the work of a restart.

Composes the parts and owns their order. Keys are saved before the store notes how far they reach,
and a start indexes the messages committed after that point. `MessageFile` does all work of a queue.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from streammeta.brokers.rocketmq.cluster.cluster_metadata import ClusterKeeper
from streammeta.brokers.rocketmq.cluster.cluster_segments import ClusterSegmentStore
from streammeta.brokers.rocketmq.cluster.retention import Expiry, Retention
from streammeta.brokers.rocketmq.cluster.upload_pool import PoolConfig, UploadPool
from streammeta.brokers.rocketmq.dispatch import Dispatcher, GroupCommit, LocalQueue
from streammeta.brokers.rocketmq.fetch import Fetcher
from streammeta.brokers.rocketmq.formats import message as message_format
from streammeta.brokers.rocketmq.formats.metadata import Queue, SegmentStatus
from streammeta.brokers.rocketmq.formats.names import SegmentType, index_path
from streammeta.brokers.rocketmq.key_index_service import IndexSizes, KeyIndexService
from streammeta.brokers.rocketmq.message_file import FileSizes, MessageFile
from streammeta.brokers.rocketmq.segments.chunk_store import ChunkStore
from streammeta.brokers.rocketmq.segments.flat_file import FlatFilePlace
from streammeta.brokers.rocketmq.segments.storage import SegmentStorage
from streammeta.brokers.stamped_time import stamped_clock
from streammeta.client import NamedObjects, StreamClient
from streammeta.client.parts import run_blocking
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectStore

# Store of a broker's key index on a cluster: local files are named objects of a key.
#
# A named object never changes, so each save of a file creates an object of a new generation. The
# newest one counts, and older ones are deleted after the save. Uploaded files are in the broker's
# metadata.


class ClusterShelf:
    """Local index files below `prefix` of names. Uploaded ones are segments of `path`."""

    def __init__(self, named: NamedObjects, keeper: ClusterKeeper, prefix: str, path: str) -> None:
        self._named = named
        self._keeper = keeper
        self._prefix = prefix
        self._path = path

    async def save(self, begin_ms: int, data: bytes) -> None:
        """Store a local file, replacing its earlier form."""
        before = await self._generations(begin_ms)
        # The new generation is stored before older ones are deleted, so a crash loses nothing.
        generation = max(before, default=0) + 1
        await self._named.put(self._name(begin_ms, generation), data, owner=self._keeper.owner)
        await self._delete(begin_ms, before)

    async def load(self) -> dict[int, bytes]:
        """Return all local files."""
        newest: dict[int, int] = {}
        async for object_ in self._named.describe(prefix=self._prefix):
            begin, generation = self._place(object_.name)
            # A crash during a save may leave two generations.
            newest[begin] = max(generation, newest.get(begin, 0))
        return {
            begin: await self._named.get(self._name(begin, generation))
            for begin, generation in newest.items()
        }

    async def remove(self, begin_ms: int) -> None:
        """Drop a local file. A missing file counts as dropped."""
        await self._delete(begin_ms, await self._generations(begin_ms))

    async def list_uploaded(self) -> list[int]:
        """Return the begins of uploaded files."""
        found = self._keeper.table.segments_of(self._path, SegmentType.INDEX)
        return [segment.base_offset for segment in found if segment.status is SegmentStatus.SEALED]

    async def note_uploaded(self, begin_ms: int) -> None:
        """Note that a file is uploaded. May be repeated."""
        table = self._keeper.table
        segment = table.segments[self._path, SegmentType.INDEX, begin_ms]
        # A repetition must not save the metadata a second time.
        if segment.status is not SegmentStatus.SEALED:
            table.put_segment(segment.with_seal(segment.end_ms))
            await self._keeper.save()

    async def note_deleted(self, begin_ms: int) -> None:
        """Note that an uploaded file is deleted, before its bytes are."""
        table = self._keeper.table
        segment = table.segments[self._path, SegmentType.INDEX, begin_ms]
        table.put_segment(replace(segment, status=SegmentStatus.DELETED))
        await self._keeper.save()

    async def list_deleted(self) -> list[int]:
        """Return the begins of deleted files whose bytes may still be stored."""
        found = self._keeper.table.segments_of(self._path, SegmentType.INDEX)
        return [segment.base_offset for segment in found if segment.status is SegmentStatus.DELETED]

    async def forget(self, begin_ms: int) -> None:
        """Forget a deleted file. May be repeated."""
        self._keeper.table.delete_segments(self._path, SegmentType.INDEX, begin_ms)
        await self._keeper.save()

    async def _delete(self, begin_ms: int, generations: list[int]) -> None:
        if generations:
            await self._named.delete(
                [self._name(begin_ms, generation) for generation in generations]
            )

    async def _generations(self, begin_ms: int) -> list[int]:
        prefix = f"{self._prefix}{begin_ms:020}/"
        return [
            self._place(object_.name)[1] async for object_ in self._named.describe(prefix=prefix)
        ]

    def _name(self, begin_ms: int, generation: int) -> str:
        return f"{self._prefix}{begin_ms:020}/{generation:010}"

    def _place(self, name: str) -> tuple[int, int]:
        begin, _, generation = name.removeprefix(self._prefix).partition("/")
        return int(begin), int(generation)


_INDEXED_AT_ONCE = 1024


class Backend(StrEnum):
    """Where new segments are stored."""

    STREAMS = "streams"
    """Streams of the cluster: segments of many queues share objects."""
    CHUNKS = "chunks"
    """Objects of a bucket: one for each commit, merged when the segment is sealed."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Sizes of segments and index files, bounds of uploads and groups, retention, and backend.

    `backend` selects the place of new segments, existing ones stay in theirs. Chunks need `bucket`:
    an address such as `s3://bucket?options`, or a store, which the caller closes. Without
    `merge_chunks`, sealed segments stay in chunks.

    An index file is held in memory and saved as a whole, so it is smaller than the peer's: 7 MB.
    """

    files: FileSizes = field(default_factory=FileSizes)
    index: IndexSizes = field(default_factory=lambda: IndexSizes(100_000, 200_000))
    pool: PoolConfig = field(default_factory=PoolConfig)
    groups: GroupCommit = field(default_factory=GroupCommit)
    retention: Retention = field(default_factory=Retention)
    backend: Backend = Backend.STREAMS
    bucket: str | ObjectStore | None = None
    merge_chunks: bool = True

    def __post_init__(self) -> None:
        """Reject chunks without a bucket."""
        if self.backend is Backend.CHUNKS and self.bucket is None:
            raise ValueError(
                "bucket is None, expected the bucket for the chunks, such as s3://bucket, or"
                " the backend 'streams'"
            )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _timer_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class BrokerSegments:
    """All segments of a broker, in streams and in chunks."""

    def __init__(self, streams: ClusterSegmentStore, chunks: ChunkStore | None) -> None:
        self._streams = streams
        self._chunks = chunks

    def segment(self, path: str, kind: SegmentType, base_offset: int) -> SegmentStorage:
        """Return a segment, whether it exists or not."""
        keeper, place = self._streams.keeper, (path, kind, base_offset)
        # The place of an existing segment is fixed. New segments go to the configured backend.
        is_chunked = place in keeper.chunked or (
            keeper.new_in_chunks and place not in keeper.streams
        )
        if self._chunks is None or not is_chunked:
            return self._streams.segment(*place)
        return self._chunks.segment(*place)


class QueueStore:
    """The queues of one broker. Create it with `open`, and `close` it before its client.

    The client has the broker's node id. The cluster must be at feature level 3.
    """

    def __init__(
        self,
        client: StreamClient,
        keeper: ClusterKeeper,
        broker: str,
        config: StoreConfig,
        now_ms: Callable[[], int],
        chunks: ChunkStore | None,
    ) -> None:
        self.client = client
        self.keeper = keeper
        self.broker = broker
        self.config = config
        self.pool = UploadPool(client, config.pool)
        self.chunks = chunks
        self.segments = BrokerSegments(ClusterSegmentStore(client, keeper, self.pool), chunks)
        self.files: dict[Queue, MessageFile] = {}
        self.index: KeyIndexService
        self.fetcher: Fetcher
        self.expiry: Expiry
        self._now_ms = now_ms
        self._own_time_ms = stamped_clock(
            f"the tiered storage of broker {broker}", keeper.table.stamps_ms, now_ms, _timer_ms
        )
        self._place = FlatFilePlace(self.segments, keeper, self._own_time_ms)
        self._dispatchers: dict[Queue, Dispatcher] = {}
        self._closing = contextlib.AsyncExitStack()

    @classmethod
    async def open(
        cls,
        client: StreamClient,
        cluster: str,
        broker: str,
        config: StoreConfig | None = None,
        now_ms: Callable[[], int] = _now_ms,
    ) -> Self:
        """Load the committed data of earlier processes of the broker, and index the rest of it.

        Starts expiry and merges of chunks. Raises errors of the node and of streams, errors of the
        bucket, `PayloadError` for a damaged index file, `ChunkLayoutError` and `SegmentCutError`
        for lost chunks, and `ValueError` for chunks without a configured bucket.
        """
        config = config or StoreConfig()
        # The keeper fences earlier processes before anything else is opened.
        keeper = await ClusterKeeper.open(
            client, cluster, broker, new_in_chunks=config.backend is Backend.CHUNKS
        )

        # A failure while opening closes the parts opened so far.
        async with contextlib.AsyncExitStack() as closing:
            chunks = await _open_chunks(keeper, cluster, broker, config, closing)
            store = cls(client, keeper, broker, config, now_ms, chunks)
            await store._load(cluster)
            store.expiry.start()
            if chunks is not None:
                chunks.start()
            store._closing = closing.pop_all()
        return store

    async def _load(self, cluster: str) -> None:
        """Open the key index and all queues."""
        keeper, broker, now_ms = self.keeper, self.broker, self._now_ms
        path = index_path(broker)
        named = NamedObjects(self.client.session, self.client.store)
        shelf = ClusterShelf(named, keeper, f"rocketmq/{cluster}/{broker}/index/", path)
        self.index = await KeyIndexService.open(
            path, self.segments, shelf, now_ms, self.config.index
        )
        self.fetcher = Fetcher(self.files, self.index, now_ms)

        for queue in _queues(keeper):
            await self._index_rest(await self.file(queue.topic, queue.queue_id))

        self.expiry = Expiry(
            self.files, self.index, keeper, self._own_time_ms, self.config.retention
        )

    async def close(self) -> None:
        """Stop expiry, merges and uploads. Call `checkpoint` before to save the key index."""
        # In this order: expiry and merges still use the pool.
        await self.expiry.stop()
        await self._closing.aclose()
        await self.pool.close()

    async def set_reserve_time(self, topic: str, hours: int | None) -> None:
        """Set the retention of a topic in hours, None for the store's default.

        The topic need not have a queue yet. Raises `ValueError` below 1 hour.
        """
        if hours is not None and hours < 1:
            raise ValueError(f"hours is {hours}, expected at least 1, or None")
        table, now_ms = self.keeper.table, self._own_time_ms()
        table.set_reserve_time(topic, -1 if hours is None else hours, now_ms)
        await self.keeper.save()

    async def file(self, topic: str, queue_id: int) -> MessageFile:
        """Return the files of a queue. Files of a new queue have no offset yet."""
        queue = Queue(self.broker, topic, queue_id)
        if queue not in self.files:
            self.keeper.table.add_topic(topic, now_ms=self._own_time_ms())
            # The topic is noted first: the index needs its id.
            file = MessageFile(self._place, queue, self.config.files)
            await file.open()
            # Another call may have opened it meanwhile, and all must use the same files.
            self.files.setdefault(queue, file)
        return self.files[queue]

    async def dispatcher(self, topic: str, queue_id: int, local: LocalQueue) -> Dispatcher:
        """Return the dispatcher of a queue, the only one that may append to it."""
        file = await self.file(topic, queue_id)
        if file.queue not in self._dispatchers:
            topic_id = self.keeper.table.topics[topic].topic_id
            self._dispatchers[file.queue] = Dispatcher(
                local, file, self.index, topic_id, self._now_ms, self.config.groups
            )
        return self._dispatchers[file.queue]

    async def checkpoint(self) -> None:
        """Save the key index, upload its sealed files, and note how far it reaches.

        A start reads all messages committed since the last checkpoint.
        """
        # Taken before the flush: messages committed during it are not in the saved index.
        reached = {
            queue: file.commit_offset
            for queue, file in self.files.items()
            if queue not in self._dispatchers or self._dispatchers[queue].context is None
        }

        await self.index.flush()
        while await self.index.compact_oldest():
            pass

        # Noted after the files are saved, so that a crash indexes twice rather than never.
        self.keeper.indexed.update(reached)
        await self.keeper.save()

    async def expire(self, before_ms: int) -> None:
        """Delete segments of all queues with an older newest message, whatever their retention."""
        for file in list(self.files.values()):
            await file.expire(before_ms)

    async def destroy(self, topic: str) -> None:
        """Delete all queues of a topic, and forget it."""
        # A list first: the files change during the loop.
        for queue in [queue for queue in self.files if queue.topic == topic]:
            await self.files.pop(queue).destroy()
            self._dispatchers.pop(queue, None)
            self.fetcher.forget(queue)
            self.keeper.indexed.pop(queue, None)
        self.keeper.table.delete_topic(topic)
        await self.keeper.save()

    async def _index_rest(self, file: MessageFile) -> None:
        """Index the messages committed after the saved index."""
        queue = file.queue
        topic_id = self.keeper.table.topics[queue.topic].topic_id
        # Messages before the first offset have expired.
        offset = max(self.keeper.indexed.get(queue, 0), await file.first_offset())
        while offset < file.commit_offset:
            read = await file.read(offset, _INDEXED_AT_ONCE, self.config.groups.size)
            for message in read:
                self.index.put(
                    queue.topic,
                    topic_id,
                    queue.queue_id,
                    message_format.decode_message(message.data).keys,
                    message_format.physical_offset_of(message.data),
                    len(message.data),
                    message_format.store_timestamp_of(message.data),
                )

            # An empty read means that the rest has expired.
            offset = read[-1].queue_offset + 1 if read else file.commit_offset


async def _open_chunks(
    keeper: ClusterKeeper,
    cluster: str,
    broker: str,
    config: StoreConfig,
    closing: contextlib.AsyncExitStack,
) -> ChunkStore | None:
    """Return the chunks of a broker, None without a bucket. `closing` closes them.

    Raises errors of a missing bucket, or of one that rejects access.
    """
    bucket = config.bucket
    if bucket is None:
        if keeper.chunked:
            raise ValueError(
                f"bucket is None, but {len(keeper.chunked)} segments of broker {broker} lie"
                " in chunks. Name the bucket of these chunks"
            )
        return None

    if isinstance(bucket, str):
        bucket = open_object_store(bucket)
        closing.callback(bucket.close)
    # Access is verified at the start, not at the first commit.
    await run_blocking(bucket.check)
    chunks = ChunkStore(bucket, keeper, cluster, broker, merges=config.merge_chunks)
    closing.push_async_callback(chunks.close)
    return chunks


def _queues(keeper: ClusterKeeper) -> list[Queue]:
    """Return the queues that have segments or a noted end."""
    found = set(keeper.table.queues)
    for path, kind, _ in keeper.table.segments:
        if kind is not SegmentType.INDEX:
            broker, topic, queue_id = path.split("/")
            found.add(Queue(broker, topic, int(queue_id)))
    return sorted(found, key=lambda queue: (queue.topic, queue.queue_id))
