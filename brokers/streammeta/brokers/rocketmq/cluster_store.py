"""A broker's tiered storage on a cluster: its queues, its key index, and what follows a restart.

Composes the parts and owns their order: keys are saved before it is noted how far they reach, and
a start indexes what was committed behind that. Everything a queue does is `MessageFile`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from streammeta.brokers.rocketmq.cluster_metadata import ClusterKeeper
from streammeta.brokers.rocketmq.cluster_segments import ClusterSegmentStore
from streammeta.brokers.rocketmq.dispatch import Dispatcher, GroupCommit, LocalQueue
from streammeta.brokers.rocketmq.fetch import Fetcher
from streammeta.brokers.rocketmq.flat_file import FlatFilePlace
from streammeta.brokers.rocketmq.index_shelf import ClusterShelf
from streammeta.brokers.rocketmq.key_index_service import IndexSizes, KeyIndexService
from streammeta.brokers.rocketmq.message import (
    decode_message,
    physical_offset_of,
    store_timestamp_of,
)
from streammeta.brokers.rocketmq.message_file import FileSizes, MessageFile
from streammeta.brokers.rocketmq.metadata import Queue
from streammeta.brokers.rocketmq.names import SegmentType, index_path
from streammeta.brokers.rocketmq.retention import Expiry, Retention
from streammeta.brokers.rocketmq.upload_pool import PoolConfig, UploadPool
from streammeta.brokers.stamped_time import stamped_clock
from streammeta.client import NamedObjects, StreamClient

_INDEXED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Sizes of segments and index files, bounds of uploads and groups, and the retention.

    An index file is held in memory and saved as a whole, so it is smaller than the peer's: 7 MB.
    """

    files: FileSizes = field(default_factory=FileSizes)
    index: IndexSizes = field(default_factory=lambda: IndexSizes(100_000, 200_000))
    pool: PoolConfig = field(default_factory=PoolConfig)
    groups: GroupCommit = field(default_factory=GroupCommit)
    retention: Retention = field(default_factory=Retention)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _timer_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class QueueStore:
    """The queues of one broker. Make it with `open`, and `close` it before its client.

    The client has the broker's node id. The cluster must be at feature level 3.
    """

    def __init__(
        self,
        client: StreamClient,
        keeper: ClusterKeeper,
        broker: str,
        config: StoreConfig,
        now_ms: Callable[[], int],
    ) -> None:
        self.client = client
        self.keeper = keeper
        self.broker = broker
        self.config = config
        self.pool = UploadPool(client, config.pool)
        self.segments = ClusterSegmentStore(client, keeper, self.pool)
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

    @classmethod
    async def open(
        cls,
        client: StreamClient,
        cluster: str,
        broker: str,
        config: StoreConfig | None = None,
        now_ms: Callable[[], int] = _now_ms,
    ) -> Self:
        """Take over what earlier processes of the broker committed, and index what they had not.

        Raises what bars the node or a stream, errors of the bucket, `PayloadError` for an index
        file that is damaged.
        """
        keeper = await ClusterKeeper.open(client, cluster, broker)
        store = cls(client, keeper, broker, config or StoreConfig(), now_ms)
        path = index_path(broker)
        named = NamedObjects(client.session, client.store)
        shelf = ClusterShelf(named, keeper, f"rocketmq/{cluster}/{broker}/index/", path)
        store.index = await KeyIndexService.open(
            path, store.segments, shelf, now_ms, store.config.index
        )
        store.fetcher = Fetcher(store.files, store.index, now_ms)
        for queue in _queues(keeper):
            await store._index_rest(await store.file(queue.topic, queue.queue_id))
        store.expiry = Expiry(
            store.files, store.index, keeper, store._own_time_ms, store.config.retention
        )
        store.expiry.start()
        return store

    async def close(self) -> None:
        """Stop expiry and uploads; save the key index with `checkpoint` before."""
        await self.expiry.stop()
        await self.pool.close()

    async def set_reserve_time(self, topic: str, hours: int | None) -> None:
        """Keep the messages of a topic for so many hours, None: as long as the store's others.

        The topic need not have a queue yet. Raises `ValueError` below 1 hour.
        """
        if hours is not None and hours < 1:
            raise ValueError(f"hours is {hours}, wanted at least 1, or None")
        table, now_ms = self.keeper.table, self._own_time_ms()
        table.set_reserve_time(topic, -1 if hours is None else hours, now_ms)
        await self.keeper.save()

    async def file(self, topic: str, queue_id: int) -> MessageFile:
        """Return the files of a queue; of one that is new they have no offset yet."""
        queue = Queue(self.broker, topic, queue_id)
        if queue not in self.files:
            self.keeper.table.add_topic(topic, now_ms=self._own_time_ms())
            file = MessageFile(self._place, queue, self.config.files)
            await file.open()
            self.files.setdefault(queue, file)  # another call may have opened it meanwhile
        return self.files[queue]

    async def dispatcher(self, topic: str, queue_id: int, local: LocalQueue) -> Dispatcher:
        """Return the dispatch of a queue, which must be the only one that appends to it."""
        file = await self.file(topic, queue_id)
        if file.queue not in self._dispatchers:
            topic_id = self.keeper.table.topics[topic].topic_id
            self._dispatchers[file.queue] = Dispatcher(
                local, file, self.index, topic_id, self._now_ms, self.config.groups
            )
        return self._dispatchers[file.queue]

    async def checkpoint(self) -> None:
        """Save the key index, upload what of it is full, and note how far it reaches.

        Without it a start reads all messages that were committed since the last one.
        """
        reached = {
            queue: file.commit_offset
            for queue, file in self.files.items()
            if queue not in self._dispatchers or self._dispatchers[queue].context is None
        }
        await self.index.flush()
        while await self.index.compact_oldest():
            pass
        self.keeper.indexed.update(reached)
        await self.keeper.save()

    async def expire(self, before_ms: int) -> None:
        """Delete segments of all queues whose newest message is older, whatever is reserved."""
        for file in list(self.files.values()):
            await file.expire(before_ms)

    async def destroy(self, topic: str) -> None:
        """Delete all queues of a topic, and forget it."""
        for queue in [one for one in self.files if one.topic == topic]:
            await self.files.pop(queue).destroy()
            self._dispatchers.pop(queue, None)
            self.fetcher.forget(queue)
            self.keeper.indexed.pop(queue, None)
        self.keeper.table.delete_topic(topic)
        await self.keeper.save()

    async def _index_rest(self, file: MessageFile) -> None:
        """Index what was committed behind the saved index."""
        queue = file.queue
        topic_id = self.keeper.table.topics[queue.topic].topic_id
        offset = max(self.keeper.indexed.get(queue, 0), await file.first_offset())
        while offset < file.commit_offset:
            read = await file.read(offset, _INDEXED_AT_ONCE, self.config.groups.size)
            for one in read:
                self.index.put(
                    queue.topic,
                    topic_id,
                    queue.queue_id,
                    decode_message(one.data).keys,
                    physical_offset_of(one.data),
                    len(one.data),
                    store_timestamp_of(one.data),
                )
            offset = read[-1].queue_offset + 1 if read else file.commit_offset


def _queues(keeper: ClusterKeeper) -> list[Queue]:
    """Return the queues that have segments or a noted end."""
    found = set(keeper.table.queues)
    for path, kind, _ in keeper.table.segments:
        if kind is not SegmentType.INDEX:
            broker, topic, queue_id = path.split("/")
            found.add(Queue(broker, topic, int(queue_id)))
    return sorted(found, key=lambda one: (one.topic, one.queue_id))
