"""Messages of a queue: a commit log, and the consume queue that points into it.

The commit log is committed before the consume queue, so a committed item never points at missing
bytes. Bytes of the commit log without an item expire with their segment.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from streammeta.brokers.rocketmq.formats import message as message_format
from streammeta.brokers.rocketmq.formats.consume_queue import (
    ITEM_SIZE,
    ConsumeQueueItem,
    decode_items,
    encode_item,
    split_messages,
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
"""Stands for an unknown offset."""


@dataclass(frozen=True, slots=True)
class FileSizes:
    """Maximum sizes of segments, in bytes."""

    commit_log: int = 1 << 30
    consume_queue: int = 100 << 20

    def __post_init__(self) -> None:
        """Reject sizes without room for one message or one item."""
        if self.commit_log < 1:
            raise ValueError(f"commit_log is {self.commit_log}, expected at least 1")
        if self.consume_queue < ITEM_SIZE or self.consume_queue % ITEM_SIZE:
            raise ValueError(
                f"consume_queue is {self.consume_queue}, expected a multiple of {ITEM_SIZE}, at"
                f" least {ITEM_SIZE}"
            )


DEFAULT_SIZES = FileSizes()


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """Message as it was read. `tags_code` comes from its item."""

    queue_offset: int
    data: bytes
    tags_code: int


class CommitLogFile(FlatFile):
    """Flat file of messages. A message larger than a segment gets a separate segment."""

    smallest_append = message_format.MIN_MESSAGE_SIZE
    takes_larger = True
    _first_queue_offset: tuple[FileSegment, int] | None = None

    async def try_roll(self, interval_ms: int, min_size: int) -> bool:
        """Begin a segment if the last one is old and large enough. Return False otherwise."""
        segment = self.writable()
        is_due = segment.min_timestamp_ms + interval_ms < self._place.now_ms()
        if not is_due or segment.append_position < min_size or not await self.seal():
            return False
        await self.roll(self.append_offset)
        return True

    async def min_queue_offset(self) -> int:
        """Return the queue offset of the first stored message, -1 if none is committed.

        Segments that were rolled and are still empty are skipped.
        """
        for segment in self.segments:
            # An empty segment has no message whose offset can be read.
            if segment.commit_position < message_format.PHYSICAL_OFFSET_AT:
                continue
            known = self._first_queue_offset
            # Cached by segment: every read of a queue needs this offset.
            if known is None or known[0] is not segment:
                head = await segment.read(0, message_format.PHYSICAL_OFFSET_AT)
                known = self._first_queue_offset = (segment, message_format.queue_offset_of(head))
            return known[1]

        return MISSING


class MessageFile:
    """Commit log and consume queue of one queue."""

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
        """Load the segments of the metadata. Raise `SizeUnknownError` if one has no known size."""
        await self.commit_log.open()
        await self.consume_queue.open()

        # Segments may have expired, so the noted ends say where an empty file continues.
        noted = self._place.keeper.table.queues.get(self.queue)
        if noted is not None:
            self.consume_queue.resume_at(noted.max_offset * ITEM_SIZE)
            self.commit_log.resume_at(noted.log_end or await self._end_of_items())
        # An earlier process ended between the first segments of both files.
        if self.is_initialised and not self.commit_log.append_offset:
            await self.commit_log.init_offset(0)

    async def _end_of_items(self) -> int:
        """Return the end of the last item's message, for queues whose log end is not noted."""
        queue = self.consume_queue

        if not queue.segments or queue.commit_offset - queue.segments[-1].base_offset < ITEM_SIZE:
            return 0

        (item,) = decode_items(await queue.read(queue.commit_offset - ITEM_SIZE, ITEM_SIZE))
        return item.commit_log_offset + item.message_size

    def _note_offsets(self) -> None:
        """Note where both files end, so that a file without segments continues there."""
        self._place.keeper.table.queues[self.queue] = QueueMetadata(
            self.queue,
            self.min_offset,
            self.commit_offset,
            self._place.now_ms(),
            self.commit_log.commit_offset,
        )

    @property
    def is_initialised(self) -> bool:
        """Whether the first offset of the queue is known."""
        return bool(self.consume_queue.segments) or self.consume_queue.append_offset > 0

    async def init_offset(self, queue_offset: int) -> None:
        """Begin a file without messages at this queue offset."""
        await self.commit_log.init_offset(0)
        await self.consume_queue.init_offset(queue_offset * ITEM_SIZE)

    async def skip_to(self, queue_offset: int) -> None:
        """Commit pending messages, then continue at a later queue offset, which leaves a hole.

        Raises:
            ValueError: pending messages can't be committed, or the offset lies before the end.
        """
        if not await self.commit():
            raise ValueError(
                f"{self.queue.path} contains messages that can't be committed now. Skip again later"
            )
        # A new segment begins at the later offset, so the hole needs no items.
        await self.consume_queue.seal()
        await self.consume_queue.roll(queue_offset * ITEM_SIZE)

    @property
    def min_offset(self) -> int:
        """Queue offset of the first stored item."""
        return self.consume_queue.min_offset // ITEM_SIZE

    @property
    def commit_offset(self) -> int:
        """Queue offset after the last committed item."""
        return self.consume_queue.commit_offset // ITEM_SIZE

    @property
    def append_offset(self) -> int:
        """Queue offset after the last appended item."""
        return self.consume_queue.append_offset // ITEM_SIZE

    async def first_offset(self) -> int:
        """Return the first queue offset with both an item and a message, or the end."""
        first = await self.commit_log.min_queue_offset()
        return self.commit_offset if first == MISSING else max(self.min_offset, first)

    async def append_commit_log(self, message: bytes) -> AppendResult:
        """Append a message without an item."""
        return await self.commit_log.append(message, message_format.store_timestamp_of(message))

    async def append_consume_queue(self, item: ConsumeQueueItem, timestamp_ms: int) -> AppendResult:
        """Append an item. Its message must have been appended."""
        return await self.consume_queue.append(encode_item(item), timestamp_ms)

    async def append(self, message: bytes, tags_code: int) -> AppendResult:
        """Append a message and then its item.

        Without room for the item nothing is appended: a retry would append the message a second
        time.
        """
        result = await self.consume_queue.make_room(ITEM_SIZE)
        if result is not AppendResult.SUCCESS:
            return result

        result = await self.append_commit_log(message)
        if result is not AppendResult.SUCCESS:
            return result

        # The item points at the message, which ends at the end of the log.
        offset = self.commit_log.append_offset - len(message)
        item = ConsumeQueueItem(offset, len(message), tags_code)
        return await self.append_consume_queue(item, message_format.store_timestamp_of(message))

    async def commit(self) -> bool:
        """Commit messages, then items. Return False if some are not committed."""
        # A committed item must never point at an uncommitted message.
        if not await self.commit_log.commit() or self.commit_log_waits:
            return False
        return await self.consume_queue.commit()

    @property
    def has_other_writer(self) -> bool:
        """Whether another process has written to the queue, so that no commit can succeed."""
        return self.commit_log.has_other_writer or self.consume_queue.has_other_writer

    async def reload(self) -> None:
        """Load the writes of another process, and drop uncommitted bytes.

        Messages that it wrote before it was replaced lie at their places, with or without items.
        Raises `SizeUnknownError`, and errors of saving the metadata.
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
        """Return committed messages from a queue offset on, at least one if one exists.

        A read that begins in a hole skips it. A later hole ends the read, and so does `max_bytes`.
        Damaged messages, and messages that expire meanwhile, are skipped too.
        """
        while count > 0:
            offset = self.consume_queue.next_offset(offset * ITEM_SIZE) // ITEM_SIZE
            if offset >= self.commit_offset:
                break
            try:
                read, found = await self._read_run(offset, count, max_bytes)
            except SegmentReadError:
                # The messages may have expired between the check and the read.
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
        """Return the number of items in one read of committed offsets, and their messages."""
        count = min(count, self.commit_offset - offset)
        data = await self.consume_queue.read(offset * ITEM_SIZE, count * ITEM_SIZE)
        items = decode_items(data)

        total, taken = 0, 0
        for item in items:
            total += item.message_size
            # The first message is read whatever its size.
            if taken and max_bytes is not None and total > max_bytes:
                break
            taken += 1
        items = items[:taken]

        # Messages of consecutive items lie together, so one read fetches them all.
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
        """Return the store time of the message at an offset, -1 if none exists.

        In a hole, return the time of the first message after it.
        """
        if not await self.first_offset() <= offset < self.commit_offset:
            return MISSING
        found = await self.read(offset, 1)
        return message_format.store_timestamp_of(found[0].data) if found else MISSING

    async def offset_at(self, timestamp_ms: int, *, upper: bool = False) -> int:
        """Return the first queue offset stored at or after a time, or the end.

        With `upper`, return the last offset of exactly that time, if any. The result is exact where
        times ascend.
        """
        first, end = await self.first_offset(), self.commit_offset
        lower = await self._search(first, end, timestamp_ms)
        # The search may end in a hole, where no message has this offset.
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
        """Delete due segments (see `FlatFile.has_expired`) and return their number.

        Items are deleted first, so that none points at deleted messages. May be repeated after any
        failure.
        """
        async with self._deleting:
            deleted = await self._expire(self.consume_queue, before_ms, created_before_ms)
            return deleted + await self._expire(self.commit_log, before_ms, created_before_ms)

    async def _expire(self, file: FlatFile, before_ms: int, created_before_ms: int | None) -> int:
        deleted = await file.finish_deletions()
        while file.has_expired(before_ms, created_before_ms):
            # Noted first: after the last segment is gone, nothing else says where the file ends.
            self._note_offsets()
            deleted += await file.delete_first()
        return deleted

    async def destroy(self) -> None:
        """Delete all segments and forget the queue."""
        async with self._deleting:
            # A topic that is created again must not continue at the old end.
            self._place.keeper.table.queues.pop(self.queue, None)
            await self.consume_queue.destroy()
            await self.commit_log.destroy()
