"""Local queues of messages that follow from their offsets, for the tests of RocketMQ's shape."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.brokers.rocketmq.dispatch import LocalMessage
from streammeta.brokers.rocketmq.formats.message import Message, encode_message, java_hash

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
