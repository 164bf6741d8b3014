"""Moves messages of local queues into flat files, in groups, and indexes what is committed.

A group is committed as a whole: messages, then items, then keys. What could not be committed keeps
its keys in a table until it is. Messages above the queue's dispatchable end are never read. A
message is stored at its own queue offset alone: one that the local store returns for another offset
ends the group before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streammeta.brokers.rocketmq.formats.message import (
    decode_message,
    queue_offset_of,
    store_timestamp_of,
)
from streammeta.brokers.rocketmq.key_index_service import KeyIndexService
from streammeta.brokers.rocketmq.message_file import MessageFile
from streammeta.brokers.rocketmq.segments.file_segment import AppendResult

START_BEFORE_MS = 2 * 60_000
"""Age of the first message that a new flat file takes, in ms."""
_READ_COUNT = 256
"""Messages read at a time; other work of the event loop runs in between."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalMessage:
    """A message of a local queue."""

    data: bytes
    tags_code: int = 0
    keys: frozenset[str] | None = None
    """None: the message's own."""


class LocalQueue(Protocol):
    """A queue of the local store; all offsets are queue offsets."""

    @property
    def min_offset(self) -> int:
        """Offset of the first message that is there."""
        ...

    @property
    def max_offset(self) -> int:
        """End of what may be dispatched: no failover takes back what lies below."""
        ...

    def offset_at(self, timestamp_ms: int) -> int:
        """Return the first offset stored at or after a time."""
        ...

    def read(self, offset: int, count: int) -> Sequence[LocalMessage]:
        """Return messages from an offset on, in order; none if the first one is deleted."""
        ...


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """What makes a group due: age in ms, number of messages, bytes. One message always goes."""

    timeout_ms: int = 30_000
    count: int = 4096
    size: int = 4 << 20
    roll_interval_ms: int = 24 * 3_600_000
    roll_min_size: int = 16 << 20

    def __post_init__(self) -> None:
        """Refuse bounds that let no message pass."""
        for name in ("count", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least 1")


@dataclass(frozen=True, slots=True)
class _KeyPut:
    keys: frozenset[str]
    offset: int
    size: int
    timestamp_ms: int


@dataclass(slots=True)
class GroupContext:
    """Keys of a group that is not committed yet; its messages end at `end_offset`."""

    end_offset: int
    puts: list[_KeyPut] = field(default_factory=list)


@dataclass(slots=True)
class Dispatcher:
    """Dispatch of one queue; `is_filtered` tells topics that stay local."""

    local: LocalQueue
    file: MessageFile
    index: KeyIndexService
    topic_id: int
    now_ms: Callable[[], int]
    groups: GroupCommit = field(default_factory=GroupCommit)
    is_filtered: Callable[[str], bool] = lambda topic: False
    context: GroupContext | None = None
    holes: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of offsets that the local store lost before they were dispatched."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def dispatch(self, *, force: bool = False) -> bool:
        """Move one group if it is due; True: messages were moved, and there is more to move now.

        The first call of a new queue only sets where it begins. Calls at the same time follow each
        other.
        """
        async with self._turn:
            return await self._dispatch(force)

    async def _dispatch(self, force: bool) -> bool:
        file, local = self.file, self.local
        if self.is_filtered(file.queue.topic):
            await file.destroy()
            return False

        if not file.is_initialised:
            await self._begin()
            return False

        if file.has_other_writer:
            # Messages that are not committed are still in the local store.
            await file.reload()
            self.context = None
            return False

        if file.commit_offset < file.append_offset or file.commit_log_waits:
            await self.commit()
            return False

        if file.append_offset < local.min_offset:
            await self._skip_lost(file.append_offset, local.min_offset)
        current = file.append_offset
        if current >= local.max_offset:
            return False

        if file.commit_log.segments:
            await file.commit_log.try_roll(self.groups.roll_interval_ms, self.groups.roll_min_size)
        if not force and not self._is_due(current):
            return False

        await self._append_group(current)
        done = await self.commit()
        has_moved, waiting = file.append_offset > current, local.max_offset - file.append_offset
        return done and has_moved and waiting > 0 and (force or self._is_due(file.append_offset))

    async def _begin(self) -> None:
        """Set the offset that a new file begins at, unless the local queue has none yet."""
        local = self.local
        if local.max_offset < 0:
            return
        start = local.offset_at(self.now_ms() - START_BEFORE_MS)
        await self.file.init_offset(max(0, min(max(start, local.min_offset), local.max_offset)))

    async def _skip_lost(self, offset: int, first: int) -> None:
        """Continue at the first message that the local store still has."""
        await self.file.skip_to(first)
        self.holes.append((offset, first))
        _log.warning(
            "queue %s: the local store deleted the messages %d to %d before they were dispatched;"
            " keep local messages longer, or dispatch more often",
            self.file.queue.path,
            offset,
            first - 1,
        )

    def _is_due(self, offset: int) -> bool:
        if self.local.max_offset - offset > self.groups.count:
            return True
        oldest = self._read(offset, 1)
        if not oldest:
            return False
        return self.now_ms() - store_timestamp_of(oldest[0].data) > self.groups.timeout_ms

    def _read(self, offset: int, count: int) -> list[LocalMessage]:
        """Return local messages of exactly these offsets, up to the first that is missing."""
        found: list[LocalMessage] = []
        for message in self.local.read(offset, count)[:count]:
            if queue_offset_of(message.data) != offset + len(found):
                break
            found.append(message)
        if not found and offset >= self.local.min_offset:
            # Otherwise the message was deleted meanwhile, and the next call skips it.
            _log.warning(
                "queue %s: the local store has the messages %d to %d, but did not return the one of"
                " offset %d; dispatch waits for it, check the local store",
                self.file.queue.path,
                self.local.min_offset,
                self.local.max_offset - 1,
                offset,
            )
        return found

    async def _append_group(self, offset: int) -> None:
        end = min(self.local.max_offset, offset + self.groups.count)
        total, context = 0, GroupContext(offset)
        try:
            while context.end_offset < end:
                count = min(end - context.end_offset, _READ_COUNT)
                messages = self._read(context.end_offset, count)
                if not messages:
                    return
                for message in messages:
                    total += len(message.data)
                    if context.puts and total >= self.groups.size:
                        return
                    if not await self._append(message, context):
                        return
                await asyncio.sleep(0)
        finally:
            self.context = context

    async def _append(self, message: LocalMessage, context: GroupContext) -> bool:
        keys = decode_message(message.data).keys if message.keys is None else message.keys
        result = await self.file.append(message.data, message.tags_code)
        if result is not AppendResult.SUCCESS:
            _log.warning(
                "queue %s: the message at offset %d was not appended: %s; dispatch tries it again",
                self.file.queue.path,
                context.end_offset,
                result,
            )
            return False
        size = len(message.data)
        place = self.file.commit_log.append_offset - size
        context.puts.append(_KeyPut(keys, place, size, store_timestamp_of(message.data)))
        context.end_offset += 1
        return True

    async def commit(self) -> bool:
        """Commit what was appended, then index its keys; False: it waits for the next call."""
        done = await self.file.commit()
        context = self.context
        if context is not None and self.file.commit_offset >= context.end_offset:
            queue = self.file.queue
            for put in context.puts:
                self.index.put(
                    queue.topic,
                    self.topic_id,
                    queue.queue_id,
                    put.keys,
                    put.offset,
                    put.size,
                    put.timestamp_ms,
                )
            self.context = None
        return done
