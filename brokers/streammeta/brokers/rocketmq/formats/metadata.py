"""Metadata of topics, queues and segments, and the file that the peer keeps them in.

Values only; where they are kept is the caller's. The peer's file is JSON but for the keys that are
numbers, which have no quotes. Source: `DefaultMetadataStore` of RocketMQ's module tieredstore.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.storage.parsing import DocumentError, parse_json

HOUR_MS = 3_600_000
METADATA_FILE = "config/tieredStoreMetadata.json"
_TABLES = {
    SegmentType.COMMIT_LOG: "commitLogFileSegmentTable",
    SegmentType.CONSUME_QUEUE: "consumeQueueFileSegmentTable",
    SegmentType.INDEX: "indexFileSegmentTable",
}
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|(?<=[{,])\s*(-?\d+)(?=\s*:)')


class SegmentStatus(IntEnum):
    """Stages of a segment, by the codes of the metadata."""

    NEW = 0
    SEALED = 1
    DELETED = 2


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue of a topic on a broker."""

    broker: str
    topic: str
    queue_id: int

    @property
    def path(self) -> str:
        """Path of the queue below the cluster."""
        return f"{self.broker}/{self.topic}/{self.queue_id}"


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """A topic; `reserve_time` is in hours, 0 or less for the store's own."""

    topic_id: int
    topic: str
    status: int = 0
    reserve_time: int = -1
    update_ms: int = 0


@dataclass(frozen=True, slots=True)
class QueueMetadata:
    """A queue and its smallest and end offsets."""

    queue: Queue
    min_offset: int
    max_offset: int
    update_ms: int = 0
    log_end: int = 0
    """End of its commit log, which the peer's file does not have."""


@dataclass(frozen=True, slots=True)
class SegmentMetadata:
    """A segment of a flat file; `begin_ms` and `end_ms` bound the times of its messages."""

    path: str
    kind: SegmentType
    base_offset: int
    status: SegmentStatus = SegmentStatus.NEW
    size: int = 0
    create_ms: int = 0
    begin_ms: int = 2**63 - 1
    end_ms: int = 2**63 - 1
    seal_ms: int = 0

    def sealed(self, now_ms: int) -> SegmentMetadata:
        """Return the segment as sealed at this time."""
        return replace(self, status=SegmentStatus.SEALED, seal_ms=now_ms)


@dataclass(slots=True)
class MetadataTable:
    """Topics, queues and segments of a broker."""

    topics: dict[str, TopicMetadata] = field(default_factory=dict)
    queues: dict[Queue, QueueMetadata] = field(default_factory=dict)
    segments: dict[tuple[str, SegmentType, int], SegmentMetadata] = field(default_factory=dict)
    last_topic_id: int = -1
    noted_ms: int = 0
    """Newest time that the store has noted as its own, in ms since 1970."""

    @property
    def stamps_ms(self) -> list[int]:
        """Times at which the store itself has written; times of messages are the producers'."""
        stamps = [self.noted_ms, *(queue.update_ms for queue in self.queues.values())]
        for segment in self.segments.values():
            stamps += (segment.create_ms, segment.seal_ms)
        return [stamp for stamp in stamps if stamp > 0]

    def add_topic(self, topic: str, reserve_time: int = -1, now_ms: int = 0) -> TopicMetadata:
        """Return the topic, with a new id if there is none yet; ids are never used again."""
        if topic not in self.topics:
            self.last_topic_id += 1
            self.topics[topic] = TopicMetadata(
                self.last_topic_id, topic, reserve_time=reserve_time, update_ms=now_ms
            )
        return self.topics[topic]

    def set_reserve_time(self, topic: str, hours: int, now_ms: int = 0) -> None:
        """Set how long the messages of a topic are kept, 0 or less: as the store says."""
        known = self.add_topic(topic, now_ms=now_ms)
        self.topics[topic] = replace(known, reserve_time=hours, update_ms=now_ms)

    def reserve_ms(self, topic: str, default_hours: int) -> int:
        """Return how long the messages of a topic are kept, in ms."""
        known = self.topics.get(topic)
        hours = default_hours if known is None or known.reserve_time < 1 else known.reserve_time
        return hours * HOUR_MS

    def delete_topic(self, topic: str) -> None:
        """Forget a topic and its queues."""
        self.topics.pop(topic, None)
        for queue in [one for one in self.queues if one.topic == topic]:
            del self.queues[queue]

    def put_segment(self, segment: SegmentMetadata) -> None:
        """Add a segment, or replace what is known of it."""
        self.segments[segment.path, segment.kind, segment.base_offset] = segment

    def segments_of(self, path: str, kind: SegmentType) -> list[SegmentMetadata]:
        """Return the segments of a flat file by base offset."""
        found = [one for one in self.segments.values() if (one.path, one.kind) == (path, kind)]
        return sorted(found, key=lambda one: one.base_offset)

    def delete_segments(self, path: str, kind: SegmentType, base_offset: int | None = None) -> None:
        """Forget one segment of a flat file, or all of them."""
        for one in self.segments_of(path, kind):
            if base_offset in (None, one.base_offset):
                del self.segments[path, kind, one.base_offset]

    # ---- the peer's file ----

    def encode(self) -> str:
        """Return the text of the peer's file."""
        document: dict[str, Any] = {
            "topicSerialNumber": self.last_topic_id,
            "topicMetadataTable": {
                one.topic: {
                    "reserveTime": one.reserve_time,
                    "status": one.status,
                    "topic": one.topic,
                    "topicId": one.topic_id,
                    "updateTimestamp": one.update_ms,
                }
                for one in self.topics.values()
            },
            "queueMetadataTable": {},
            **{table: {} for table in _TABLES.values()},
        }
        for queue, kept in self.queues.items():
            document["queueMetadataTable"].setdefault(queue.topic, {})[queue.queue_id] = {
                "maxOffset": kept.max_offset,
                "minOffset": kept.min_offset,
                "queue": {
                    "brokerName": queue.broker,
                    "queueId": queue.queue_id,
                    "topic": queue.topic,
                },
                "updateTimestamp": kept.update_ms,
            }
        for one in self.segments.values():
            table = document[_TABLES[one.kind]].setdefault(one.path, {})
            table[one.base_offset] = _segment_document(one)
        return _text(document)

    @classmethod
    def decode(cls, text: str) -> MetadataTable:
        """Return the tables of a peer's file.

        Raises:
            ValueError: it is no such file; the message names the field.
        """
        try:
            document = parse_json(_TOKENS.sub(_quoted, text))
            return cls._of(document)
        except (DocumentError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"metadata file: {type(error).__name__} {error}") from error

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> MetadataTable:
        table = cls(last_topic_id=document.get("topicSerialNumber", -1))
        for one in document.get("topicMetadataTable", {}).values():
            table.topics[one["topic"]] = TopicMetadata(
                one["topicId"],
                one["topic"],
                one["status"],
                one["reserveTime"],
                one["updateTimestamp"],
            )
        for queues in document.get("queueMetadataTable", {}).values():
            for one in queues.values():
                named = one["queue"]
                queue = Queue(named["brokerName"], named["topic"], named["queueId"])
                table.queues[queue] = QueueMetadata(
                    queue, one["minOffset"], one["maxOffset"], one["updateTimestamp"]
                )
        for kind, name in _TABLES.items():
            for segments in document.get(name, {}).values():
                for one in segments.values():
                    table.put_segment(_segment(kind, one))
        return table


def _segment_document(one: SegmentMetadata) -> dict[str, Any]:
    return {
        "baseOffset": one.base_offset,
        "beginTimestamp": one.begin_ms,
        "createTimestamp": one.create_ms,
        "endTimestamp": one.end_ms,
        "path": one.path,
        "sealTimestamp": one.seal_ms,
        "size": one.size,
        "status": int(one.status),
        "type": int(one.kind),
    }


def _segment(kind: SegmentType, one: Mapping[str, Any]) -> SegmentMetadata:
    return SegmentMetadata(
        one["path"],
        kind,
        one["baseOffset"],
        SegmentStatus(one["status"]),
        one["size"],
        one["createTimestamp"],
        one["beginTimestamp"],
        one["endTimestamp"],
        one["sealTimestamp"],
    )


def _quoted(match: re.Match[str]) -> str:
    number = match.group(1)
    return match.group(0) if number is None else f'"{number}"'


def _text(value: object) -> str:
    """Return a value as JSON whose number keys have no quotes."""
    if not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    parts = (f"{_key(name)}:{_text(part)}" for name, part in value.items())
    return "{" + ",".join(parts) + "}"


def _key(name: object) -> str:
    return json.dumps(name) if isinstance(name, str) else str(name)
