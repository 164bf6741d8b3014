"""Metadata of topics, queues and segments, and the peer's metadata file.

Values only: the caller stores them. The peer's file is JSON, except that numeric keys have no
quotes. Source: `DefaultMetadataStore` of RocketMQ's module tieredstore.
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
# Strings are matched first, so that digits inside of them are not taken for keys.
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|(?<=[{,])\s*(-?\d+)(?=\s*:)')


class SegmentStatus(IntEnum):
    """Stages of a segment, with the codes of the metadata."""

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
    """A topic. `reserve_time` is in hours, 0 or less means the store's default."""

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
    """End of the commit log, which the peer's file does not contain."""


@dataclass(frozen=True, slots=True)
class SegmentMetadata:
    """Segment of a flat file. `begin_ms` and `end_ms` bound the times of its messages."""

    path: str
    kind: SegmentType
    base_offset: int
    status: SegmentStatus = SegmentStatus.NEW
    size: int = 0
    create_ms: int = 0
    begin_ms: int = 2**63 - 1
    end_ms: int = 2**63 - 1
    seal_ms: int = 0

    def with_seal(self, now_ms: int) -> SegmentMetadata:
        """Return the segment sealed at this time."""
        return replace(self, status=SegmentStatus.SEALED, seal_ms=now_ms)


@dataclass(slots=True)
class MetadataTable:
    """Topics, queues and segments of a broker."""

    topics: dict[str, TopicMetadata] = field(default_factory=dict)
    queues: dict[Queue, QueueMetadata] = field(default_factory=dict)
    segments: dict[tuple[str, SegmentType, int], SegmentMetadata] = field(default_factory=dict)
    last_topic_id: int = -1
    noted_ms: int = 0
    """Newest time that the store has noted itself, in ms since 1970."""

    @property
    def stamps_ms(self) -> list[int]:
        """Times written by the store itself, in contrast to times of messages."""
        stamps = [self.noted_ms, *(queue.update_ms for queue in self.queues.values())]
        for segment in self.segments.values():
            stamps += (segment.create_ms, segment.seal_ms)
        return [stamp for stamp in stamps if stamp > 0]

    def add_topic(self, topic: str, reserve_time: int = -1, now_ms: int = 0) -> TopicMetadata:
        """Return the topic, with a new id if it is unknown. Ids are never reused."""
        # The index identifies topics by id, so an id of a deleted topic is never reused.
        if topic not in self.topics:
            self.last_topic_id += 1
            self.topics[topic] = TopicMetadata(
                self.last_topic_id, topic, reserve_time=reserve_time, update_ms=now_ms
            )
        return self.topics[topic]

    def set_reserve_time(self, topic: str, hours: int, now_ms: int = 0) -> None:
        """Set the retention of a topic in hours, 0 or less for the store's default."""
        known = self.add_topic(topic, now_ms=now_ms)
        self.topics[topic] = replace(known, reserve_time=hours, update_ms=now_ms)

    def reserve_ms(self, topic: str, default_hours: int) -> int:
        """Return the retention of a topic in ms."""
        known = self.topics.get(topic)
        hours = default_hours if known is None or known.reserve_time < 1 else known.reserve_time
        return hours * HOUR_MS

    def delete_topic(self, topic: str) -> None:
        """Forget a topic and its queues."""
        self.topics.pop(topic, None)
        # A list first: the table changes during the loop.
        for queue in [queue for queue in self.queues if queue.topic == topic]:
            del self.queues[queue]

    def put_segment(self, segment: SegmentMetadata) -> None:
        """Add a segment, or replace its metadata."""
        self.segments[segment.path, segment.kind, segment.base_offset] = segment

    def segments_of(self, path: str, kind: SegmentType) -> list[SegmentMetadata]:
        """Return the segments of a flat file by base offset."""
        found = [
            segment
            for segment in self.segments.values()
            if (segment.path, segment.kind) == (path, kind)
        ]
        return sorted(found, key=lambda segment: segment.base_offset)

    def delete_segments(self, path: str, kind: SegmentType, base_offset: int | None = None) -> None:
        """Forget one segment of a flat file, or all of them."""
        for segment in self.segments_of(path, kind):
            if base_offset in (None, segment.base_offset):
                del self.segments[path, kind, segment.base_offset]

    # ---- the peer's file ----

    def encode(self) -> str:
        """Return the text of the peer's file."""
        document: dict[str, Any] = {
            "topicSerialNumber": self.last_topic_id,
            "topicMetadataTable": {
                topic.topic: {
                    "reserveTime": topic.reserve_time,
                    "status": topic.status,
                    "topic": topic.topic,
                    "topicId": topic.topic_id,
                    "updateTimestamp": topic.update_ms,
                }
                for topic in self.topics.values()
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
        for segment in self.segments.values():
            # Numeric keys, which the encoder writes without quotes.
            table = document[_TABLES[segment.kind]].setdefault(segment.path, {})
            table[segment.base_offset] = _segment_document(segment)

        return _text(document)

    @classmethod
    def decode(cls, text: str) -> MetadataTable:
        """Return the tables of a peer's file.

        Raises:
            ValueError: the text is not such a file. The message names the field.
        """
        try:
            # Quotes around numeric keys turn the text into JSON.
            document = parse_json(_TOKENS.sub(_quote_number, text))
            return cls._of(document)
        except (DocumentError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"metadata file: {type(error).__name__} {error}") from error

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> MetadataTable:
        table = cls(last_topic_id=document.get("topicSerialNumber", -1))
        for topic in document.get("topicMetadataTable", {}).values():
            table.topics[topic["topic"]] = TopicMetadata(
                topic["topicId"],
                topic["topic"],
                topic["status"],
                topic["reserveTime"],
                topic["updateTimestamp"],
            )

        for queues in document.get("queueMetadataTable", {}).values():
            for noted in queues.values():
                named = noted["queue"]
                queue = Queue(named["brokerName"], named["topic"], named["queueId"])
                table.queues[queue] = QueueMetadata(
                    queue, noted["minOffset"], noted["maxOffset"], noted["updateTimestamp"]
                )

        for kind, name in _TABLES.items():
            for segments in document.get(name, {}).values():
                for segment in segments.values():
                    table.put_segment(_segment(kind, segment))
        return table


def _segment_document(segment: SegmentMetadata) -> dict[str, Any]:
    return {
        "baseOffset": segment.base_offset,
        "beginTimestamp": segment.begin_ms,
        "createTimestamp": segment.create_ms,
        "endTimestamp": segment.end_ms,
        "path": segment.path,
        "sealTimestamp": segment.seal_ms,
        "size": segment.size,
        "status": int(segment.status),
        "type": int(segment.kind),
    }


def _segment(kind: SegmentType, fields: Mapping[str, Any]) -> SegmentMetadata:
    return SegmentMetadata(
        fields["path"],
        kind,
        fields["baseOffset"],
        SegmentStatus(fields["status"]),
        fields["size"],
        fields["createTimestamp"],
        fields["beginTimestamp"],
        fields["endTimestamp"],
        fields["sealTimestamp"],
    )


def _quote_number(match: re.Match[str]) -> str:
    number = match.group(1)
    return match.group(0) if number is None else f'"{number}"'


def _text(value: object) -> str:
    """Return a value as JSON whose numeric keys have no quotes."""
    if not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    parts = (f"{_key(name)}:{_text(part)}" for name, part in value.items())
    return "{" + ",".join(parts) + "}"


def _key(name: object) -> str:
    return json.dumps(name) if isinstance(name, str) else str(name)
