"""Doubles of RocketMQ's files: all in memory, and a segment whose writes fail on demand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from streammeta.brokers.rocketmq.formats.metadata import Queue
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.message_file import CommitLogFile, FileSizes, MessageFile
from streammeta.brokers.rocketmq.segments.flat_file import FlatFile, FlatFilePlace
from streammeta.brokers.rocketmq.segments.storage import SegmentWriteError, TimeBounds
from tests.kit.clock import ManualClock
from tests.kit.memory_stores import MemoryKeeper, MemorySegment, MemorySegmentStore

NOW_MS = 1_700_000_000_000
QUEUE = Queue("broker", "TopicTest", 0)


class FailingSegment(MemorySegment):
    """A segment whose writes fail on demand, after or before they have happened."""

    fails = False
    keeps_bytes = False
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
        if not self.fails or self.keeps_bytes:
            await super().write(position, data, times)
        if self.fails:
            raise SegmentWriteError("told to fail")


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
