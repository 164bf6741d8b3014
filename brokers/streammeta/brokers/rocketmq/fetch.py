"""Reads of a queue by offset, with read-ahead and filters, and look-ups by time and key.

Messages read ahead stay cached, within a bound of bytes, until they are unused for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from streammeta.brokers.rocketmq.formats.key_index import ALL_TIMES, TimeRange
from streammeta.brokers.rocketmq.formats.message import decode_message
from streammeta.brokers.rocketmq.formats.metadata import Queue
from streammeta.brokers.rocketmq.key_index_service import KeyIndexService
from streammeta.brokers.rocketmq.message_file import MISSING, MessageFile, StoredMessage
from streammeta.brokers.rocketmq.segments.file_segment import SegmentReadError


class FetchStatus(StrEnum):
    """Outcomes of a read. The names are the source's."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Messages of a read.

    The next read continues at `next_offset`, which also counts filtered messages.
    """

    status: FetchStatus
    min_offset: int
    max_offset: int
    next_offset: int
    messages: Sequence[StoredMessage] = ()

    def filter(
        self, codes: Collection[int] | None, accepts: Callable[[StoredMessage], bool] | None
    ) -> list[StoredMessage]:
        """Return the messages that pass both steps of a filter: tags code, then content.

        Without one of the steps no message passes, because a subscription always has both.
        """
        if codes is None or accepts is None:
            return []
        return [
            message for message in self.messages if message.tags_code in codes and accepts(message)
        ]


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Bounds of one read and of the cache. `expire_ms` counts from the last use."""

    count: int = 4096
    size: int = 16 << 20
    expire_ms: int = 15_000
    cache_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        """Reject bounds that no message can meet."""
        for name in ("count", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")


@dataclass(slots=True)
class _Cached:
    message: StoredMessage
    used_ms: int


@dataclass(slots=True)
class MessageCache:
    """Messages by queue and offset."""

    limits: ReadAhead
    now_ms: Callable[[], int]
    bytes_held: int = 0
    _kept: OrderedDict[tuple[Queue, int], _Cached] = field(default_factory=OrderedDict)

    def get(self, queue: Queue, offset: int) -> StoredMessage | None:
        """Return the message at an offset, None if it has to be read."""
        self._drop_expired()
        kept = self._kept.get((queue, offset))
        if kept is None:
            return None
        kept.used_ms = self.now_ms()
        self._kept.move_to_end((queue, offset))
        return kept.message

    def put(self, queue: Queue, offset: int, message: StoredMessage) -> None:
        """Cache a message, evicting the least recently used ones."""
        # An earlier copy would be counted twice.
        self._forget((queue, offset))
        self._kept[queue, offset] = _Cached(message, self.now_ms())
        self.bytes_held += len(message.data)
        # The newest message stays even if it exceeds the bound alone.
        while self.bytes_held > self.limits.cache_bytes and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))

    def forget_queue(self, queue: Queue) -> None:
        """Drop all cached messages of a queue."""
        for place in [cached for cached in self._kept if cached[0] == queue]:
            self._forget(place)

    def _drop_expired(self) -> None:
        # Messages are sorted by their last use, so the first unexpired one ends the search.
        limit = self.now_ms() - self.limits.expire_ms
        while self._kept and next(iter(self._kept.values())).used_ms < limit:
            self._forget(next(iter(self._kept)))

    def _forget(self, place: tuple[Queue, int]) -> None:
        kept = self._kept.pop(place, None)
        if kept is not None:
            self.bytes_held -= len(kept.message.data)


class Fetcher:
    """Reads of the queues of a broker."""

    def __init__(
        self,
        files: Mapping[Queue, MessageFile],
        index: KeyIndexService,
        now_ms: Callable[[], int],
        limits: ReadAhead | None = None,
    ) -> None:
        self._files = files
        self._index = index
        self.limits = limits or ReadAhead()
        self._cache = MessageCache(self.limits, now_ms)

    @property
    def cached_bytes(self) -> int:
        """Bytes of cached messages."""
        return self._cache.bytes_held

    def file(self, queue: Queue) -> MessageFile:
        """Return the files of a queue. Raise `KeyError` for an unknown queue."""
        return self._files[queue]

    def forget(self, queue: Queue) -> None:
        """Drop the cached messages of a destroyed queue."""
        self._cache.forget_queue(queue)

    async def fetch(
        self, queue: Queue, offset: int, max_count: int, codes: Collection[int] | None = None
    ) -> FetchResult:
        """Return messages of a queue from an offset on.

        With `codes`, return only messages with these tags.
        """
        file = self._files.get(queue)
        if file is None:
            return FetchResult(FetchStatus.NO_MATCHED_LOGIC_QUEUE, MISSING, MISSING, offset)

        first, end = await file.first_offset(), file.commit_offset
        if end == 0 or max_count <= 0:
            return FetchResult(FetchStatus.NO_MESSAGE_IN_QUEUE, first, end, offset)
        if offset < first:
            return FetchResult(FetchStatus.OFFSET_TOO_SMALL, first, end, first)
        if offset == end:
            return FetchResult(FetchStatus.OFFSET_OVERFLOW_ONE, first, end, end)
        if offset > end:
            return FetchResult(FetchStatus.OFFSET_OVERFLOW_BADLY, first, end, end)
        return await self.read_matching(file, offset, max_count, codes)

    async def read_matching(
        self, file: MessageFile, offset: int, max_count: int, codes: Collection[int] | None
    ) -> FetchResult:
        """Read until enough messages match or the queue ends, within the bounds of one read."""
        first, end, found, size = await file.first_offset(), file.commit_offset, 0, 0
        messages: list[StoredMessage] = []
        while offset < end and len(messages) < max_count and found < self.limits.count:
            kept = self._cache.get(file.queue, offset)
            if kept is None:
                kept = await self._read_ahead(file, offset, max_count)
            # Messages committed after this call began belong to the next read.
            if kept is None or kept.queue_offset >= end:
                offset = end
                break
            size += len(kept.data)
            # At least one message is returned, whatever its size.
            if size > self.limits.size and found:
                break

            found += 1
            if codes is None or kept.tags_code in codes:
                messages.append(kept)
            # A message's own offset counts: a hole may lie before it.
            offset = kept.queue_offset + 1
        status = FetchStatus.FOUND if messages else FetchStatus.NO_MATCHED_MESSAGE
        return FetchResult(status, first, end, offset, tuple(messages))

    async def _read_ahead(
        self, file: MessageFile, offset: int, max_count: int
    ) -> StoredMessage | None:
        """Fill the cache from an offset on. Return the first message found, if any."""
        # A single read is often a look-up, which needs little read-ahead.
        count = 32 if max_count == 1 else self.limits.count
        read = await file.read(offset, count, self.limits.size)
        # The next message to be read is put last, so that it is evicted last.
        for message in reversed(read):
            self._cache.put(file.queue, message.queue_offset, message)
        return read[0] if read else None

    async def timestamp_of(self, queue: Queue, offset: int) -> int:
        """Return the store time of a message in ms, -1 if there is none."""
        file = self._files.get(queue)
        return MISSING if file is None else await file.timestamp_of(offset)

    async def earliest_timestamp(self, queue: Queue) -> int:
        """Return the store time of the first message in ms, -1 if there is none."""
        file = self._files.get(queue)
        return MISSING if file is None else await file.timestamp_of(await file.first_offset())

    async def offset_at(self, queue: Queue, timestamp_ms: int, *, upper: bool = False) -> int:
        """Return the offset of a time, -1 for an unknown queue (see `MessageFile.offset_at`)."""
        file = self._files.get(queue)
        return MISSING if file is None else await file.offset_at(timestamp_ms, upper=upper)

    async def query(
        self,
        topic: str,
        key: str,
        max_count: int,
        times: TimeRange = ALL_TIMES,
    ) -> list[bytes]:
        """Return messages of a topic with a key. Messages that only share its hash are left out."""
        by_place = {
            queue.queue_id: file for queue, file in self._files.items() if queue.topic == topic
        }
        found = []
        for item in await self._index.query(topic, key, max_count, times):
            file = by_place.get(item.queue_id)
            if file is None:
                continue
            try:
                data = await file.commit_log.read(item.offset, item.size)
            except SegmentReadError:
                # The index may still contain messages whose segment has expired.
                if file.commit_log.min_offset <= item.offset:
                    raise
                continue  # the message has expired
            # Items contain only a hash of the key, which other keys may share.
            message = decode_message(data)
            if key in message.keys and times.begin_ms <= message.store_timestamp_ms <= times.end_ms:
                found.append(data)

        return found
