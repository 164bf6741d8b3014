"""Moves messages of local queues into flat files, in groups, and indexes what is committed.

A group is committed as a whole: messages, then items, then keys. What could not be committed keeps
its keys in a table until it is. Messages above the queue's dispatchable end are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streammeta.brokers.rocketmq.file_segment import AppendResult
from streammeta.brokers.rocketmq.key_index_service import KeyIndexService
from streammeta.brokers.rocketmq.message import decode_message, store_timestamp_of
from streammeta.brokers.rocketmq.message_file import MessageFile

START_BEFORE_MS = 2 * 60_000
"""Age of the first message that a new flat file takes, in ms."""


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
        """Return messages from an offset on, at least one if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """What makes a group due: age in ms, number of messages, bytes. One message always goes."""

    timeout_ms: int = 30_000
    count: int = 4096
    size: int = 4 << 20
    roll_interval_ms: int = 24 * 3_600_000
    roll_min_size: int = 16 << 20


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

    async def dispatch(self, *, force: bool = False) -> bool:
        """Move one group if it is due; True: there is more to move now.

        The first call of a new queue only sets where it begins.
        """
        file, local = self.file, self.local
        if self.is_filtered(file.queue.topic):
            await file.destroy()
            return False
        if not file.is_initialised:
            start = local.offset_at(self.now_ms() - START_BEFORE_MS)
            await file.init_offset(min(max(start, local.min_offset), local.max_offset))
            return False
        if file.commit_offset < file.append_offset or file.commit_log_waits:
            await self.commit()
            return False
        current = file.append_offset
        if current < local.min_offset:
            self.holes.append((current, local.min_offset))
            await file.skip_to(local.min_offset)
            current = local.min_offset
        if current >= local.max_offset:
            return False
        if file.commit_log.segments:
            await file.commit_log.try_roll(self.groups.roll_interval_ms, self.groups.roll_min_size)
        if not force and not self._is_due(current):
            return False
        await self._append_group(current)
        done = await self.commit()
        waiting = local.max_offset - file.append_offset
        return done and waiting > 0 and (force or self._is_due(file.append_offset))

    def _is_due(self, offset: int) -> bool:
        if self.local.max_offset - offset > self.groups.count:
            return True
        (oldest,) = self.local.read(offset, 1)[:1]
        return self.now_ms() - store_timestamp_of(oldest.data) > self.groups.timeout_ms

    async def _append_group(self, offset: int) -> None:
        end = min(self.local.max_offset, offset + self.groups.count)
        total, context = 0, GroupContext(offset)
        while offset < end:
            for one in self.local.read(offset, end - offset)[: end - offset]:
                total += len(one.data)
                if context.puts and total >= self.groups.size:
                    end = offset
                    break
                if not await self._append(one, context):
                    end = offset
                    break
                offset += 1
        context.end_offset = offset
        self.context = context

    async def _append(self, one: LocalMessage, context: GroupContext) -> bool:
        if await self.file.append(one.data, one.tags_code) is not AppendResult.SUCCESS:
            return False
        size = len(one.data)
        keys = decode_message(one.data).keys if one.keys is None else one.keys
        place = self.file.commit_log.append_offset - size
        context.puts.append(_KeyPut(keys, place, size, store_timestamp_of(one.data)))
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
