"""The messages of a queue: a commit log, and the consume queue that points into it.

The commit log is committed before the consume queue, so no committed item points at bytes that are
not there. Bytes of the commit log that no item points at expire with their segment.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from streammeta.brokers.rocketmq.formats.consume_queue import (
    ITEM_SIZE,
    ConsumeQueueItem,
    decode_items,
    encode_item,
    split_messages,
)
from streammeta.brokers.rocketmq.formats.message import (
    MIN_MESSAGE_SIZE,
    PHYSICAL_OFFSET_AT,
    queue_offset_of,
    store_timestamp_of,
)
from streammeta.brokers.rocketmq.formats.metadata import Queue, QueueMetadata
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.file_segment import (
    AppendResult,
    FileSegment,
    SegmentReadError,
)
from streammeta.brokers.rocketmq.segments.flat_file import FlatFile, FlatFilePlace

MISSING = -1
"""Stands for an offset that is not known."""


@dataclass(frozen=True, slots=True)
class FileSizes:
    """Maximum sizes of segments, in bytes."""

    commit_log: int = 1 << 30
    consume_queue: int = 100 << 20

    def __post_init__(self) -> None:
        """Refuse sizes that take no message or no item."""
        if self.commit_log < 1:
            raise ValueError(f"commit_log is {self.commit_log}, wanted at least 1")
        if self.consume_queue < ITEM_SIZE or self.consume_queue % ITEM_SIZE:
            raise ValueError(
                f"consume_queue is {self.consume_queue}, wanted a multiple of {ITEM_SIZE}, at least"
                f" {ITEM_SIZE}"
            )


DEFAULT_SIZES = FileSizes()


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it was read; `tags_code` is that of its item."""

    queue_offset: int
    data: bytes
    tags_code: int


class CommitLogFile(FlatFile):
    """A flat file of messages; one that is larger than a segment has a segment of its own."""

    smallest_append = MIN_MESSAGE_SIZE
    takes_larger = True
    _first_queue_offset: tuple[FileSegment, int] | None = None

    async def try_roll(self, interval_ms: int, min_size: int) -> bool:
        """Begin a segment if the last one is old and large enough; False if it is not."""
        segment = self.writable()
        is_due = segment.min_timestamp_ms + interval_ms < self._place.now_ms()
        if not is_due or segment.append_position < min_size or not await self.seal():
            return False
        await self.roll(self.append_offset)
        return True

    async def min_queue_offset(self) -> int:
        """Return the queue offset of the first stored message, -1 if none is committed.

        A segment that was rolled and is empty yet is passed over.
        """
        for segment in self.segments:
            if segment.commit_position < PHYSICAL_OFFSET_AT:
                continue
            known = self._first_queue_offset
            if known is None or known[0] is not segment:
                head = await segment.read(0, PHYSICAL_OFFSET_AT)
                known = self._first_queue_offset = (segment, queue_offset_of(head))
            return known[1]
        return MISSING


class MessageFile:
    """The two flat files of a queue."""

    def __init__(
        self, place: FlatFilePlace, queue: Queue, sizes: FileSizes = DEFAULT_SIZES
    ) -> None:
        self._place = place
        self.queue = queue
        self.commit_log = CommitLogFile(place, queue.path, SegmentType.COMMIT_LOG, sizes.commit_log)
        self.consume_queue = FlatFile(
            place, queue.path, SegmentType.CONSUME_QUEUE, sizes.consume_queue
        )
        self._deleting = asyncio.Lock()

    async def open(self) -> None:
        """Take over what the metadata has; raise `SizeUnknownError` if a backend says nothing."""
        await self.commit_log.open()
        await self.consume_queue.open()
        noted = self._place.keeper.table.queues.get(self.queue)
        if noted is not None:
            self.consume_queue.resume_at(noted.max_offset * ITEM_SIZE)
            self.commit_log.resume_at(noted.log_end or await self._end_of_items())
        if self.is_initialised and not self.commit_log.append_offset:
            await self.commit_log.init_offset(0)

    async def _end_of_items(self) -> int:
        """Return the end of the last item's message: versions before noted no end of the log."""
        queue = self.consume_queue
        if not queue.segments or queue.commit_offset - queue.segments[-1].base_offset < ITEM_SIZE:
            return 0
        (item,) = decode_items(await queue.read(queue.commit_offset - ITEM_SIZE, ITEM_SIZE))
        return item.commit_log_offset + item.message_size

    def _note_offsets(self) -> None:
        """Note where both files end: one whose last segment expires continues there."""
        self._place.keeper.table.queues[self.queue] = QueueMetadata(
            self.queue,
            self.min_offset,
            self.commit_offset,
            self._place.now_ms(),
            self.commit_log.commit_offset,
        )

    @property
    def is_initialised(self) -> bool:
        """Whether the queue has an offset that it goes on at."""
        return bool(self.consume_queue.segments) or self.consume_queue.append_offset > 0

    async def init_offset(self, queue_offset: int) -> None:
        """Begin a file without messages at this queue offset."""
        await self.commit_log.init_offset(0)
        await self.consume_queue.init_offset(queue_offset * ITEM_SIZE)

    async def skip_to(self, queue_offset: int) -> None:
        """Go on at a later queue offset; those between are a hole. What waits is committed first.

        Raises:
            ValueError: what waits can't be committed, or the offset lies behind the end.
        """
        if not await self.commit():
            raise ValueError(f"{self.queue.path} has messages that can't be committed now")
        await self.consume_queue.seal()
        await self.consume_queue.roll(queue_offset * ITEM_SIZE)

    @property
    def min_offset(self) -> int:
        """Queue offset of the first item that is kept."""
        return self.consume_queue.min_offset // ITEM_SIZE

    @property
    def commit_offset(self) -> int:
        """Queue offset behind the last committed item."""
        return self.consume_queue.commit_offset // ITEM_SIZE

    @property
    def append_offset(self) -> int:
        """Queue offset behind the last appended item."""
        return self.consume_queue.append_offset // ITEM_SIZE

    async def first_offset(self) -> int:
        """Return the smallest queue offset whose item and message are both there, or the end."""
        first = await self.commit_log.min_queue_offset()
        return self.commit_offset if first == MISSING else max(self.min_offset, first)

    async def append_commit_log(self, message: bytes) -> AppendResult:
        """Append a message; it has no item yet."""
        return await self.commit_log.append(message, store_timestamp_of(message))

    async def append_consume_queue(self, item: ConsumeQueueItem, timestamp_ms: int) -> AppendResult:
        """Append an item; its message must have been appended."""
        return await self.consume_queue.append(encode_item(item), timestamp_ms)

    async def append(self, message: bytes, tags_code: int) -> AppendResult:
        """Append a message and its item; the item is only appended if the message was.

        No message is appended while its item finds no room: it would be appended again later.
        """
        result = await self.consume_queue.make_room(ITEM_SIZE)
        if result is not AppendResult.SUCCESS:
            return result
        result = await self.append_commit_log(message)
        if result is not AppendResult.SUCCESS:
            return result
        offset = self.commit_log.append_offset - len(message)
        item = ConsumeQueueItem(offset, len(message), tags_code)
        return await self.append_consume_queue(item, store_timestamp_of(message))

    async def commit(self) -> bool:
        """Commit messages, then items; False: not all of it is committed."""
        if not await self.commit_log.commit() or self.commit_log_waits:
            return False
        return await self.consume_queue.commit()

    @property
    def has_other_writer(self) -> bool:
        """Whether another process has written to the queue, so that nothing can be committed."""
        return self.commit_log.has_other_writer or self.consume_queue.has_other_writer

    async def reload(self) -> None:
        """Take over the writes of another process, and drop bytes that are not committed.

        Messages that it wrote before it was replaced lie at their places, with or without items.
        Raises `SizeUnknownError`, and what saving the metadata raises.
        """
        await self.commit_log.reload()
        await self.consume_queue.reload()

    @property
    def commit_log_waits(self) -> bool:
        """Whether messages wait for a commit."""
        return bool(self.commit_log.segments) and self.commit_log.segments[-1].needs_commit

    async def read(
        self, offset: int, count: int, max_bytes: int | None = None
    ) -> list[StoredMessage]:
        """Return committed messages from a queue offset on, at least one if there is one.

        A hole is passed over where the read begins, and ends it elsewhere; so does `max_bytes`.
        Messages that are damaged, or that expire meanwhile, are passed over too.
        """
        while count > 0:
            offset = self.consume_queue.next_offset(offset * ITEM_SIZE) // ITEM_SIZE
            if offset >= self.commit_offset:
                break
            try:
                read, found = await self._read_run(offset, count, max_bytes)
            except SegmentReadError:
                first = await self.first_offset()
                if first <= offset:
                    raise
                offset = first
                continue
            if found:
                return found
            offset += read
        return []

    async def _read_run(
        self, offset: int, count: int, max_bytes: int | None
    ) -> tuple[int, list[StoredMessage]]:
        """Return the number of items of one read from a committed offset on, and their messages."""
        count = min(count, self.commit_offset - offset)
        data = await self.consume_queue.read(offset * ITEM_SIZE, count * ITEM_SIZE)
        items = decode_items(data)
        total, taken = 0, 0
        for item in items:
            total += item.message_size
            if taken and max_bytes is not None and total > max_bytes:
                break
            taken += 1
        items = items[:taken]

        start, last = items[0].commit_log_offset, items[-1]
        length = last.commit_log_offset + last.message_size - start
        messages = await self.commit_log.read(start, length)
        found = split_messages(data[: taken * ITEM_SIZE], messages)
        return taken, [
            StoredMessage(
                offset + place.item,
                messages[place.start : place.start + place.size],
                items[place.item].tags_code,
            )
            for place in found
        ]

    async def timestamp_of(self, offset: int) -> int:
        """Return the time at which a message was stored, -1 if there is none.

        In a hole that of the first message behind it.
        """
        if not await self.first_offset() <= offset < self.commit_offset:
            return MISSING
        found = await self.read(offset, 1)
        return store_timestamp_of(found[0].data) if found else MISSING

    async def offset_at(self, timestamp_ms: int, *, upper: bool = False) -> int:
        """Return the first queue offset stored at or after a time, or the end.

        With `upper` the last of those of exactly that time, if there are any. Exact where times
        ascend.
        """
        first, end = await self.first_offset(), self.commit_offset
        lower = await self._search(first, end, timestamp_ms)
        lower = self.consume_queue.next_offset(lower * ITEM_SIZE) // ITEM_SIZE
        if not upper or lower >= end or await self.timestamp_of(lower) != timestamp_ms:
            return lower
        return await self._search(lower, end, timestamp_ms + 1) - 1

    async def _search(self, low: int, high: int, timestamp_ms: int) -> int:
        while low < high:
            middle = (low + high) // 2
            if await self.timestamp_of(middle) < timestamp_ms:
                low = middle + 1
            else:
                high = middle
        return low

    async def expire(self, before_ms: int, created_before_ms: int | None = None) -> int:
        """Delete segments that are due, see `FlatFile.has_expired`; return the number of them.

        Items go first, so that none points at deleted messages. May be repeated after any failure.
        """
        async with self._deleting:
            deleted = await self._expire(self.consume_queue, before_ms, created_before_ms)
            return deleted + await self._expire(self.commit_log, before_ms, created_before_ms)

    async def _expire(self, file: FlatFile, before_ms: int, created_before_ms: int | None) -> int:
        deleted = await file.finish_deletions()
        while file.has_expired(before_ms, created_before_ms):
            self._note_offsets()
            deleted += await file.delete_first()
        return deleted

    async def destroy(self) -> None:
        """Delete all segments and forget the queue."""
        async with self._deleting:
            self._place.keeper.table.queues.pop(self.queue, None)
            await self.consume_queue.destroy()
            await self.commit_log.destroy()
