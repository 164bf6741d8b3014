"""Reads of a queue by offset, with read-ahead and filters, and look-ups by time and key.

What was read ahead is kept until nobody has asked for it for a while, within a bound of bytes.
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
    """Outcomes of a read; the names are those of the source."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Messages of a read; `next_offset` is where the next one goes on, dropped ones counted."""

    status: FetchStatus
    min_offset: int
    max_offset: int
    next_offset: int
    messages: Sequence[StoredMessage] = ()

    def filtered(
        self, codes: Collection[int] | None, accepts: Callable[[StoredMessage], bool] | None
    ) -> list[StoredMessage]:
        """Return the messages that both steps of a filter let pass: tags code, then content.

        A step that is missing lets nothing pass: a subscription always has both.
        """
        if codes is None or accepts is None:
            return []
        return [one for one in self.messages if one.tags_code in codes and accepts(one)]


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Bounds of one read from the files and of what is kept; `expire_ms` is since the last use."""

    count: int = 4096
    size: int = 16 << 20
    expire_ms: int = 15_000
    cache_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        """Refuse bounds that let no message pass."""
        for name in ("count", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least 1")


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
        """Keep a message; the longest unused ones make room."""
        self._forget((queue, offset))
        self._kept[queue, offset] = _Cached(message, self.now_ms())
        self.bytes_held += len(message.data)
        while self.bytes_held > self.limits.cache_bytes and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))

    def forget_queue(self, queue: Queue) -> None:
        """Drop all that is kept of a queue."""
        for place in [one for one in self._kept if one[0] == queue]:
            self._forget(place)

    def _drop_expired(self) -> None:
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
        """Bytes of messages that are kept."""
        return self._cache.bytes_held

    def file(self, queue: Queue) -> MessageFile:
        """Return the files of a queue; raise `KeyError` if there are none."""
        return self._files[queue]

    def forget(self, queue: Queue) -> None:
        """Drop the cached messages of a queue that is destroyed."""
        self._cache.forget_queue(queue)

    async def fetch(
        self, queue: Queue, offset: int, max_count: int, codes: Collection[int] | None = None
    ) -> FetchResult:
        """Return messages of a queue from an offset on; with `codes` only those of these tags."""
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
        """Read on until enough messages match or the end is met, within the bounds of one read."""
        first, end, found, size = await file.first_offset(), file.commit_offset, 0, 0
        messages: list[StoredMessage] = []
        while offset < end and len(messages) < max_count and found < self.limits.count:
            kept = self._cache.get(file.queue, offset)
            if kept is None:
                kept = await self._read_ahead(file, offset, max_count)
            if kept is None or kept.queue_offset >= end:
                offset = end
                break
            size += len(kept.data)
            if size > self.limits.size and found:
                break
            found += 1
            if codes is None or kept.tags_code in codes:
                messages.append(kept)
            offset = kept.queue_offset + 1
        status = FetchStatus.FOUND if messages else FetchStatus.NO_MATCHED_MESSAGE
        return FetchResult(status, first, end, offset, tuple(messages))

    async def _read_ahead(
        self, file: MessageFile, offset: int, max_count: int
    ) -> StoredMessage | None:
        """Fill the cache from an offset on; return the first message found, None: there is none."""
        count = 32 if max_count == 1 else self.limits.count
        read = await file.read(offset, count, self.limits.size)
        for one in reversed(read):  # the one that is wanted next is the last to make room
            self._cache.put(file.queue, one.queue_offset, one)
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
        """Return the offset of a time, -1 of an unknown queue; see `MessageFile.offset_at`."""
        file = self._files.get(queue)
        return MISSING if file is None else await file.offset_at(timestamp_ms, upper=upper)

    async def query(
        self,
        topic: str,
        key: str,
        max_count: int,
        times: TimeRange = ALL_TIMES,
    ) -> list[bytes]:
        """Return messages of a topic with a key; others whose hash is the same are left out."""
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
                if file.commit_log.min_offset <= item.offset:
                    raise
                continue  # the message has expired
            message = decode_message(data)
            if key in message.keys and times.begin_ms <= message.store_timestamp_ms <= times.end_ms:
                found.append(data)
        return found
