"""Limits of the map: how many streams, keys and so on it may hold, and how many bytes of them.

Judges what a decision would add, against what the map holds now; so every leader with the same
limits says the same, and a repeat that adds nothing is answered as ever. What is there already is
never touched: limits may be lowered at any time.
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
    """Maximum numbers of what the map holds; bytes are those of texts and values alone."""

    streams: int = 50_000_000
    prepared_objects: int = 5_000_000
    nodes: int = 10_000
    kv_keys: int = 1_000_000
    kv_bytes: int = 512 << 20
    tag_bytes: int = 2 << 30


class Usage(Protocol):
    """The part of the map that is counted."""

    def used(self) -> Mapping[str, int]:
        """Return how much there is of each limit, by its name; costs nothing."""
        ...

    def has_node(self, node_id: int) -> bool:
        """Return whether the map knows a node."""
        ...

    def kv_size(self, namespace: str, key: str) -> int:
        """Return the bytes of a key and its value, -1 if there is no such key."""
        ...


_Growth = Mapping[str, int]


def require_room(usage: Usage, records: Sequence[Any], limits: MetadataLimits) -> None:
    """Raise unless what these records add is within the limits.

    Raises:
        QuotaExceededError: one limit would be exceeded.
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


def _of_streams(record: rec.StreamsCreated, _: Usage) -> _Growth:
    return {"streams": record.count, "tag_bytes": tags_bytes(record.tags)}


def _of_opened(record: rec.StreamsOpened, _: Usage) -> _Growth:
    # Those that have tags already keep theirs; this is an upper bound.
    return {"tag_bytes": tags_bytes(record.tags)}


def _of_prepared(record: rec.ObjectsPrepared, _: Usage) -> _Growth:
    return {"prepared_objects": record.count}


def _of_node(record: rec.NodeRegistered | rec.NodeEpochSet, usage: Usage) -> _Growth:
    return {"nodes": 0 if usage.has_node(record.node_id) else 1}


def _of_values(record: rec.KVsPut, usage: Usage) -> _Growth:
    keys = added = 0
    for namespace, key, value in zip(record.namespaces, record.keys, record.values, strict=True):
        before = usage.kv_size(namespace, key)
        keys += before < 0
        added += kv_bytes(namespace, key, value) - max(before, 0)
    return {"kv_keys": keys, "kv_bytes": added}


_GROWTH: Mapping[type, Callable[[Any, Usage], _Growth]] = {
    rec.StreamsCreated: _of_streams,
    rec.StreamsOpened: _of_opened,
    rec.ObjectsPrepared: _of_prepared,
    rec.NodeRegistered: _of_node,
    rec.NodeEpochSet: _of_node,
    rec.KVsPut: _of_values,
}
"""Records that make the map grow where it is limited."""

QUOTAS = tuple(part.name for part in fields(MetadataLimits))
"""Names of all limits."""


def kv_bytes(namespace: str, key: str, value: bytes) -> int:
    """Return what a key and its value count for."""
    return len(namespace) + len(key) + len(value)


def tags_bytes(tags: Iterable[Tags]) -> int:
    """Return what the tags of several streams count for."""
    return sum(len(key) + len(value) for one in tags for key, value in one)
