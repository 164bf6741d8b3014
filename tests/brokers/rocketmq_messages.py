"""Messages, local queues and durable metadata for the tests of RocketMQ's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Self

from streammeta.brokers.rocketmq.dispatch import LocalMessage
from streammeta.brokers.rocketmq.formats.message import Message, encode_message, java_hash
from streammeta.brokers.rocketmq.formats.metadata import MetadataTable
from tests.conformance.rocketmq_files import NOW_MS, QUEUE
from tests.kit.memory_stores import MemoryKeeper

STORED_MS = 1_700_000_000_000
HOST = bytes((127, 0, 0, 1)) + (10911).to_bytes(4, "big")


def message(topic: str, queue_id: int, offset: int) -> bytes:
    """Return the message that a local queue has at an offset; stored one ms after the other."""
    return encode_message(
        Message(
            topic=topic,
            body=f"{topic}-{queue_id}-{offset}-".encode() * (1 + offset % 7),
            queue_id=queue_id,
            queue_offset=offset,
            born_timestamp_ms=STORED_MS,
            born_host=HOST,
            store_timestamp_ms=STORED_MS + offset,
            store_host=HOST,
            properties={"KEYS": key(offset), "TAGS": tags(offset), "UNIQ_KEY": f"u{offset}"},
        )
    )


def key(offset: int) -> str:
    """Return the key of a message; ten messages share one."""
    return f"k{offset // 10}"


def tags(offset: int) -> str:
    """Return the tags of a message."""
    return f"Tag{offset % 3}"


@dataclass
class LocalMessages:
    """A local queue that has messages up to `max_offset`."""

    topic: str
    queue_id: int
    max_offset: int
    min_offset: int = 0

    def offset_at(self, timestamp_ms: int) -> int:
        """Return the first offset stored at or after a time."""
        return min(max(timestamp_ms - STORED_MS, self.min_offset), self.max_offset)

    def read(self, offset: int, count: int) -> list[LocalMessage]:
        """Return messages from an offset on."""
        return [
            LocalMessage(message(self.topic, self.queue_id, at), java_hash(tags(at)))
            for at in range(offset, min(offset + count, self.max_offset))
        ]


def stored(offset: int, body: bytes = b"", stored_ms: int = NOW_MS, key: str = "") -> bytes:
    """Return a message of `QUEUE`; without another body all are of the same size."""
    return encode_message(
        Message(
            topic=QUEUE.topic,
            body=body or b"%05d" % offset,
            queue_offset=offset,
            store_timestamp_ms=stored_ms,
            properties={"KEYS": key} if key else {},
        )
    )


MOST_READS = 5_000
"""Reads after which a local queue fails: whoever reads it does not end."""

Answer = Callable[["Local", int, list[int]], list[int]]


def up_to(end: int) -> Answer:
    """Return the answer of a queue that has more messages than may be dispatched."""
    return lambda _local, offset, _found: list(range(offset, end))


@dataclass
class Local:
    """Local messages of `QUEUE`; `answer` may replace the offsets that are returned for a read."""

    max_offset: int
    min_offset: int = 0
    bodies: Mapping[int, bytes] = field(default_factory=dict)
    has_keys: bool = False
    answer: Answer = lambda local, offset, found: found
    reads: int = 0

    def offset_at(self, timestamp_ms: int) -> int:
        """Return the first offset: all messages are stored at the same time."""
        return self.min_offset

    def read(self, offset: int, count: int) -> list[LocalMessage]:
        """Return messages from an offset on."""
        self.reads += 1
        assert self.reads < MOST_READS, "the queue is read without end"
        offsets = self.answer(self, offset, [*range(offset, min(offset + count, self.max_offset))])
        keys = {at: f"k{at}" for at in offsets if self.has_keys}
        return [
            LocalMessage(stored(at, self.bodies.get(at, b""), key=keys.get(at, "")))
            for at in offsets
        ]


@dataclass
class DurableKeeper(MemoryKeeper):
    """Metadata of which the last save is durable."""

    durable: MetadataTable = field(default_factory=MetadataTable)

    async def save(self) -> None:
        """Make the table durable."""
        self.durable = deepcopy(self.table)

    def after_restart(self) -> Self:
        """Return the keeper of the next process."""
        return replace(self, table=deepcopy(self.durable))
