"""Names and paths of queues and of their segment files.

Source: `MessageStoreUtil`, `PosixFileSegment` and the S3 backend of RocketMQ's module tieredstore.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

from streammeta.brokers.rocketmq.formats.message import java_hash

INDEX_TOPIC = "rmq_sys_INDEX"
"""Topic of a broker's key index, which is its queue 0."""
_HASH_DIGITS = 8
_OFFSET_DIGITS = 20


class SegmentType(IntEnum):
    """Contents of a flat file, with the codes of the metadata."""

    COMMIT_LOG = 0
    CONSUME_QUEUE = 1
    INDEX = 2


def short_hash(text: str) -> str:
    """Return 8 hexadecimal digits of a text's MD5, which spread keys over prefixes."""
    # Not for security: the peer spreads its keys by the same digits.
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:_HASH_DIGITS]


def segment_file_name(base_offset: int) -> str:
    """Return the name of a segment's file. Raise `ValueError` for a negative offset."""
    if base_offset < 0:
        raise ValueError(f"base_offset is {base_offset}, expected 0 or more")
    return f"{short_hash(str(base_offset))}{base_offset:0{_OFFSET_DIGITS}d}"


def base_offset_of(name: str) -> int:
    """Return the base offset in a segment's file name. Raise `ValueError` for other names."""
    digits = name[_HASH_DIGITS:]
    if not (digits.isascii() and digits.isdigit()) or segment_file_name(int(digits)) != name:
        raise ValueError(f"file name is {name!r}, expected 8 digits of a hash and 20 of an offset")
    return int(digits)


def queue_path(broker: str, topic: str, queue_id: int) -> str:
    """Return the path of a queue below the cluster."""
    return f"{broker}/{topic}/{queue_id}"


def index_path(broker: str) -> str:
    """Return the path of the key index of a broker."""
    return queue_path(broker, INDEX_TOPIC, 0)


def broker_prefix(cluster: str, broker: str) -> str:
    """Return the prefix of a broker's chunks in a bucket, as in the peer's S3 backend."""
    return f"{java_hash(cluster)}/{cluster}/{broker}"


def chunk_prefix(cluster: str, path: str, kind: SegmentType, base_offset: int) -> str:
    """Return the prefix of a segment's chunks in a bucket."""
    return f"{broker_prefix(cluster, path)}/{kind.name}/seg-{base_offset}"


def segment_path(cluster: str, path: str, kind: SegmentType, base_offset: int) -> str:
    """Return the path of a segment's file below the directory of a store."""
    return f"{short_hash(cluster)}_{cluster}/{path}/{kind.name}/{segment_file_name(base_offset)}"
