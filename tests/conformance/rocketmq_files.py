"""Doubles of RocketMQ's files: all in memory, and a segment whose writes fail on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from streammeta.brokers.rocketmq.dispatch import Dispatcher, GroupCommit, LocalQueue
from streammeta.brokers.rocketmq.formats.metadata import Queue
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.key_index_service import IndexSizes, KeyIndexService
from streammeta.brokers.rocketmq.message_file import CommitLogFile, FileSizes, MessageFile
from streammeta.brokers.rocketmq.segments.flat_file import FlatFile, FlatFilePlace
from streammeta.brokers.rocketmq.segments.storage import SegmentStore, SegmentWriteError, TimeBounds
from tests.kit.memory_stores import MemoryKeeper, MemorySegment, MemorySegmentStore, MemoryShelf
from tests.kit.waiting import ManualClock

NOW_MS = 1_700_000_000_000
QUEUE = Queue("broker", "TopicTest", 0)
INDEX_PATH = "broker/rmq_sys_INDEX/0"


async def open_index(
    store: SegmentStore,
    shelf: MemoryShelf | None = None,
    sizes: IndexSizes | None = None,
    now_ms: Callable[[], int] = lambda: NOW_MS,
) -> KeyIndexService:
    """Open the key index of a broker."""
    chosen = sizes or IndexSizes(50, 50_000)
    return await KeyIndexService.open(INDEX_PATH, store, shelf or MemoryShelf(), now_ms, chosen)


class FailingSegment(MemorySegment):
    """A segment whose writes fail, or wait, on demand."""

    fails = False
    size_known = True

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(data)
        self.waits: asyncio.Event | None = None
        self.began = asyncio.Event()

    async def size(self) -> int | None:
        return await super().size() if self.size_known else None

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        self.began.set()
        if self.waits is not None:
            await self.waits.wait()
        if self.fails:
            raise SegmentWriteError("told to fail")
        await super().write(position, data, times)


@dataclass
class FileWorld:
    """Flat files in memory."""

    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW_MS))
    store: MemorySegmentStore = field(default_factory=MemorySegmentStore)
    keeper: MemoryKeeper = field(default_factory=MemoryKeeper)

    @property
    def place(self) -> FlatFilePlace:
        return FlatFilePlace(self.store, self.keeper, lambda: self.clock.now_ms)

    def flat_file(self, max_size: int | None) -> FlatFile:
        return FlatFile(self.place, QUEUE.path, SegmentType.CONSUME_QUEUE, max_size)

    def commit_log(self, max_size: int | None = 1 << 20) -> CommitLogFile:
        return CommitLogFile(self.place, QUEUE.path, SegmentType.COMMIT_LOG, max_size)

    def message_file(self, queue: Queue = QUEUE) -> MessageFile:
        return MessageFile(self.place, queue, FileSizes(1 << 20, 20 * 1000))

    async def dispatcher(
        self,
        local: LocalQueue,
        groups: GroupCommit | None = None,
        file: MessageFile | None = None,
        *,
        is_filtered: bool = False,
    ) -> Dispatcher:
        """Return a dispatcher of a local queue, with a key index of its own."""
        return Dispatcher(
            local,
            file or self.message_file(),
            await open_index(self.store),
            7,
            lambda: self.clock.now_ms,
            groups or GroupCommit(),
            lambda _: is_filtered,
        )
