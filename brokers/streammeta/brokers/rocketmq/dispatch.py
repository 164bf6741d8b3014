"""Dispatch of local messages into flat files, in groups, with the index of committed ones.

A group is committed as a whole: messages, then items, then keys. The keys of an uncommitted group
wait in a table until its commit succeeds. Messages above the queue's dispatchable end are never
read. A message is stored only at its own queue offset. If the local store returns a message of
another offset, the group ends before it.
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
"""Maximum age of the first message in a new flat file, in ms."""
_READ_COUNT = 256
"""Messages read at a time. The event loop runs other work in between."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalMessage:
    """A message of a local queue."""

    data: bytes
    tags_code: int = 0
    keys: frozenset[str] | None = None
    """None for the message's own keys."""


class LocalQueue(Protocol):
    """Queue of the local store. All offsets are queue offsets."""

    @property
    def min_offset(self) -> int:
        """Offset of the first stored message."""
        ...

    @property
    def max_offset(self) -> int:
        """End of the dispatchable messages: a failover never removes messages below it."""
        ...

    def offset_at(self, timestamp_ms: int) -> int:
        """Return the first offset stored at or after a time."""
        ...

    def read(self, offset: int, count: int) -> Sequence[LocalMessage]:
        """Return messages from an offset on, in order, or none if the first one is deleted."""
        ...


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """Bounds that make a group due: age in ms, number of messages, bytes.

    A group contains at least one message.
    """

    timeout_ms: int = 30_000
    count: int = 4096
    size: int = 4 << 20
    roll_interval_ms: int = 24 * 3_600_000
    roll_min_size: int = 16 << 20

    def __post_init__(self) -> None:
        """Reject bounds that no message can meet."""
        for name in ("count", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True, slots=True)
class _KeyPut:
    keys: frozenset[str]
    offset: int
    size: int
    timestamp_ms: int


@dataclass(slots=True)
class GroupContext:
    """Keys of an uncommitted group, whose messages end at `end_offset`."""

    end_offset: int
    puts: list[_KeyPut] = field(default_factory=list)


@dataclass(slots=True)
class Dispatcher:
    """Dispatch of one queue. `is_filtered` returns True for topics that stay local."""

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
        """Move one group if it is due. Return True if it moved and the next one is due.

        The first call for a new queue only sets its first offset. Concurrent calls run one after
        the other.
        """
        async with self._turn:
            return await self._dispatch(force)

    async def _dispatch(self, force: bool) -> bool:
        file, local = self.file, self.local
        # A topic that became local keeps no tiered messages.
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

        # Finish the earlier group first: its keys are indexed when it is committed.
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
        # Without progress a caller that loops until False would never end.
        has_moved, waiting = file.append_offset > current, local.max_offset - file.append_offset
        return done and has_moved and waiting > 0 and (force or self._is_due(file.append_offset))

    async def _begin(self) -> None:
        """Set the first offset of a new file, unless the local queue is still empty."""
        local = self.local
        if local.max_offset < 0:
            return

        # A new queue does not copy old messages that will soon expire anyway.
        start = local.offset_at(self.now_ms() - START_BEFORE_MS)
        await self.file.init_offset(max(0, min(max(start, local.min_offset), local.max_offset)))

    async def _skip_lost(self, offset: int, first: int) -> None:
        """Continue at the first message that the local store still has."""
        await self.file.skip_to(first)
        # The hole stays visible to readers, who then skip it.
        self.holes.append((offset, first))
        _log.warning(
            "queue %s: the local store deleted messages %d to %d before they were"
            " dispatched. Keep local messages longer, or dispatch more often",
            self.file.queue.path,
            offset,
            first - 1,
        )

    def _is_due(self, offset: int) -> bool:
        if self.local.max_offset - offset > self.groups.count:
            return True
        # A quiet queue is also moved once its oldest message is old enough.
        oldest = self._read(offset, 1)
        if not oldest:
            return False
        return self.now_ms() - store_timestamp_of(oldest[0].data) > self.groups.timeout_ms

    def _read(self, offset: int, count: int) -> list[LocalMessage]:
        """Return local messages of exactly these offsets, up to the first missing one."""
        found: list[LocalMessage] = []
        for message in self.local.read(offset, count)[:count]:
            # The local store may delete messages between the check of its offsets and the read.
            if queue_offset_of(message.data) != offset + len(found):
                break
            found.append(message)

        if not found and offset >= self.local.min_offset:
            # Otherwise the message was deleted meanwhile, and the next call skips it.
            _log.warning(
                "queue %s: the local store contains messages %d to %d, but did not return"
                " the one at offset %d. Dispatch waits for it, check the local store",
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
                    # The first message always moves, whatever its size.
                    if context.puts and total >= self.groups.size:
                        return
                    if not await self._append(message, context):
                        return
                # Let other tasks run between two blocks of a large group.
                await asyncio.sleep(0)
        finally:
            # Also after a failure: messages appended so far are committed and indexed.
            self.context = context

    async def _append(self, message: LocalMessage, context: GroupContext) -> bool:
        keys = decode_message(message.data).keys if message.keys is None else message.keys
        result = await self.file.append(message.data, message.tags_code)
        if result is not AppendResult.SUCCESS:
            _log.warning(
                "queue %s: the message at offset %d was not appended, retrying at the next"
                " dispatch: %s",
                self.file.queue.path,
                context.end_offset,
                result,
            )
            return False

        size = len(message.data)
        # The message was just appended, so it ends at the end of the log.
        place = self.file.commit_log.append_offset - size
        context.puts.append(_KeyPut(keys, place, size, store_timestamp_of(message.data)))
        context.end_offset += 1
        return True

    async def commit(self) -> bool:
        """Commit appended messages, then index their keys. Return False on a partial commit."""
        done = await self.file.commit()
        # Keys of uncommitted messages would point at missing bytes.
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
