"""Rules of a two-tier store: which tier answers a read, and which topics stay local.

The module only decides, and the caller reads. Source: `TieredMessageStore` and `MessageStoreConfig`
of RocketMQ's module tieredstore.
"""

from __future__ import annotations

from collections.abc import Set
from enum import IntEnum

from streammeta.brokers.rocketmq.formats.key_index import TimeRange

SYSTEM_TOPIC_PREFIX = "rmq_sys_"
RESERVED_HOURS = 72
"""Hours that segments are kept after their newest message, unless a topic says otherwise."""
DELETE_INTERVAL_MS = 3_600_000
"""Time between two checks for expired segments, in ms."""


class StorageLevel(IntEnum):
    """Cases in which reads go to tiered storage."""

    DISABLE = 0
    NOT_IN_DISK = 1
    NOT_IN_MEM = 2
    FORCE = 3


def reads_tiered(level: StorageLevel, *, on_disk: bool, in_memory: bool) -> bool:
    """Whether a read of a message goes to tiered storage."""
    if level in (StorageLevel.DISABLE, StorageLevel.FORCE):
        return level is StorageLevel.FORCE
    if not on_disk:
        return True
    return level is StorageLevel.NOT_IN_MEM and not in_memory


def min_offset(local: int, tiered: int | None) -> int:
    """Return the smallest offset of a queue in either tier, -1 if neither contains the queue.

    A negative offset or None means that a tier does not contain the queue.
    """
    return min(
        (offset for offset in (local, tiered) if offset is not None and offset >= 0), default=-1
    )


def split_query(
    times: TimeRange, local_earliest_ms: int
) -> tuple[TimeRange | None, TimeRange | None]:
    """Return the times to ask the tiered and the local store for, None for a store not to ask.

    A negative `local_earliest_ms` means that the local store contains no message.
    """
    if local_earliest_ms < 0:
        return times, None

    tiered = local = None
    if times.begin_ms < local_earliest_ms:
        tiered = TimeRange(times.begin_ms, min(times.end_ms, local_earliest_ms - 1))
    if times.end_ms >= local_earliest_ms:
        local = TimeRange(max(times.begin_ms, local_earliest_ms), times.end_ms)
    return tiered, local


def stays_local(topic: str, excluded: Set[str] = frozenset()) -> bool:
    """Whether a topic is not tiered: nameless, a system topic, or excluded."""
    return not topic or topic.startswith(SYSTEM_TOPIC_PREFIX) or topic in excluded
