"""Limits of the metadata: maximum numbers of streams, keys and so on, and of their bytes.

Checks the growth by a decision against current usage, so every leader with the same limits decides
alike, and a repeat that adds nothing is never rejected. Existing data is never touched, so limits
may be lowered at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from streammeta.controller.errors import QuotaExceededError
from streammeta.controller.metadata.tables.values import Tags
from streammeta.controller.records import record as rec


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataLimits:
    """Maximum numbers of entities. Bytes count texts and values only."""

    streams: int = 50_000_000
    prepared_objects: int = 5_000_000
    nodes: int = 10_000
    kv_keys: int = 1_000_000
    kv_bytes: int = 512 << 20
    tag_bytes: int = 2 << 30
    producers: int = 1_000_000


class Usage(Protocol):
    """The usage of the metadata that limits are checked against."""

    def used(self) -> Mapping[str, int]:
        """Return the usage of each limit by name. Must be cheap."""
        ...

    def has_node(self, node_id: int) -> bool:
        """Return whether a node is known."""
        ...

    def kv_size(self, namespace: str, key: str) -> int:
        """Return the bytes of a key and its value, or -1 if it does not exist."""
        ...

    def new_producers(self, stream_id: rec.Int64Column, producer_id: rec.Int64Column) -> int:
        """Return the number of distinct pairs of stream and producer without a state."""
        ...


_Growth = Mapping[str, int]


def require_room(usage: Usage, records: Sequence[Any], limits: MetadataLimits) -> None:
    """Raise unless the growth by these records is within the limits.

    Raises:
        QuotaExceededError: a limit would be exceeded.
    """
    for record in records:
        grows = _GROWTH.get(type(record))
        if grows is not None:
            _require(usage, grows(record, usage), limits)


def _require(usage: Usage, growth: _Growth, limits: MetadataLimits) -> None:
    if not any(added > 0 for added in growth.values()):
        return
    used = usage.used()
    for quota, added in growth.items():
        limit = getattr(limits, quota)
        if added > 0 and used[quota] + added > limit:
            raise QuotaExceededError(quota, limit, used[quota], added)


def _growth_by_streams(record: rec.StreamsCreated, _: Usage) -> _Growth:
    return {"streams": record.count, "tag_bytes": tags_bytes(record.tags)}


def _growth_by_opening(record: rec.StreamsOpened, _: Usage) -> _Growth:
    # An upper bound: streams that have tags keep them.
    return {"tag_bytes": tags_bytes(record.tags)}


def _growth_by_prepared(record: rec.ObjectsPrepared, _: Usage) -> _Growth:
    return {"prepared_objects": record.count}


def _growth_by_node(record: rec.NodeRegistered | rec.NodeEpochSet, usage: Usage) -> _Growth:
    return {"nodes": 0 if usage.has_node(record.node_id) else 1}


def _growth_by_values(record: rec.KVsPut, usage: Usage) -> _Growth:
    keys = added = 0
    for namespace, key, value in zip(record.namespaces, record.keys, record.values, strict=True):
        before = usage.kv_size(namespace, key)
        keys += before < 0
        added += kv_bytes(namespace, key, value) - max(before, 0)
    return {"kv_keys": keys, "kv_bytes": added}


def _growth_by_batches(record: rec.ProducerBatchesCommitted, usage: Usage) -> _Growth:
    return {"producers": usage.new_producers(record.stream_id, record.producer_id)}


_GROWTH: Mapping[type, Callable[[Any, Usage], _Growth]] = {
    rec.StreamsCreated: _growth_by_streams,
    rec.StreamsOpened: _growth_by_opening,
    rec.ObjectsPrepared: _growth_by_prepared,
    rec.NodeRegistered: _growth_by_node,
    rec.NodeEpochSet: _growth_by_node,
    rec.KVsPut: _growth_by_values,
    rec.ProducerBatchesCommitted: _growth_by_batches,
}
"""Records that increase a limited usage."""

QUOTAS = tuple(part.name for part in fields(MetadataLimits))
"""Names of all limits."""


def kv_bytes(namespace: str, key: str, value: bytes) -> int:
    """Return the counted bytes of a key and its value."""
    return len(namespace) + len(key) + len(value)


def tags_bytes(tags: Iterable[Tags]) -> int:
    """Return the counted bytes of several streams' tags."""
    return sum(len(key) + len(value) for stream_tags in tags for key, value in stream_tags)
