"""Selection of a log entry's records by kind, stream, node and key.

A row is left out only if the record proves that it is irrelevant: its kind, stream or node is
different, or it has none. Rows that name an object but not its owner, such as `ObjectsDestroyed`,
may concern any stream and node, so they are always kept. So are rows that name a stream but not its
owner when nodes are selected.

Every record type has one rule here. The module is pure and knows neither metadata nor callers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import Any, Final, TypeVar

import numpy as np

from streammeta.controller.records import record as rec
from streammeta.controller.records.record import Int64Column, Mask, Record

RecordT = TypeVar("RecordT", bound=Record)


class Kind(Enum):
    """Subjects of a change. One change may have several."""

    STREAM = auto()  # streams, their ranges and ends, pending uploads and lost offsets
    OBJECT = auto()
    NODE = auto()
    KV = auto()


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of changes by kind, stream and node. An empty set selects all.

    `kv_prefixes`, pairs of (namespace, prefix), restricts changes of keys only.
    """

    kinds: frozenset[Kind] = frozenset()
    stream_ids: frozenset[int] = frozenset()
    node_ids: frozenset[int] = frozenset()
    kv_prefixes: frozenset[tuple[str, str]] = frozenset()

    @property
    def is_everything(self) -> bool:
        """Whether every change is selected."""
        return not (self.kinds or self.stream_ids or self.node_ids or self.kv_prefixes)

    def streams(self, stream_id: Int64Column) -> Mask:
        """Return which of these streams are selected."""
        if not self.stream_ids:
            return np.ones(len(stream_id), dtype=np.bool_)
        if len(self.stream_ids) * len(stream_id) <= _FEW:
            wanted = [stream in self.stream_ids for stream in stream_id.tolist()]
            return np.array(wanted, dtype=np.bool_)
        return np.isin(stream_id, np.fromiter(self.stream_ids, np.int64, len(self.stream_ids)))

    def has_node(self, *node_ids: int) -> bool:
        """Return whether changes of these nodes are selected."""
        return not self.node_ids or not self.node_ids.isdisjoint(node_ids)

    def has_keys(self, namespaces: Sequence[str], keys: Sequence[str]) -> list[bool]:
        """Return which of these keys, each in its namespace, are selected."""
        prefixes: dict[str, tuple[str, ...]] = {}
        for namespace, prefix in self.kv_prefixes:
            prefixes[namespace] = (*prefixes.get(namespace, ()), prefix)

        return [
            key.startswith(prefixes.get(namespace, ()))
            for namespace, key in zip(namespaces, keys, strict=True)
        ]


_FEW = 4096
"""Up to this number of comparisons a set is faster than sorting."""


def select(records: Sequence[Record], selection: Selection) -> tuple[Record, ...] | None:
    """Return the selected records of one log entry, in order, or None without any."""
    if selection.is_everything:
        return tuple(records)
    chosen: list[Record] = []
    for record in records:
        rule = _RULES[type(record)]
        if not selection.kinds or not selection.kinds.isdisjoint(rule.kinds):
            chosen.extend(rule.cut(record, selection))
    return tuple(chosen) or None


@dataclass(frozen=True, slots=True)
class _Rule:
    """Kinds of a record, and the function that reduces it to a selection."""

    kinds: frozenset[Kind]
    cut: Callable[[Any, Selection], Sequence[Record]]


def _cut_created(record: rec.StreamsCreated, selection: Selection) -> Sequence[Record]:
    """Keep one record for each run of consecutive streams, as `first_stream_id` and `count`."""
    if not selection.has_node(record.node_id):
        return ()

    ids = np.arange(record.first_stream_id, record.first_stream_id + record.count)
    rows = np.flatnonzero(selection.streams(ids))
    if len(rows) == record.count:
        return (record,)
    # A record can express consecutive ids only.
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []

    return [
        replace(
            record,
            first_stream_id=record.first_stream_id + int(run[0]),
            count=len(run),
            tags=record.tags[int(run[0]) : int(run[-1]) + 1],
            shared=record.shared[int(run[0]) : int(run[-1]) + 1],
        )
        for run in runs
    ]


def _cut_set_objects(
    record: rec.StreamSetObjectsCommitted, selection: Selection
) -> Sequence[Record]:
    """Drop objects without a selected row. The others keep their selected rows."""
    if not selection.has_node(record.node_id):
        return ()

    wanted = selection.streams(record.ranges.stream_id)
    if wanted.all():
        return (record,)

    # Each row of ranges belongs to the object at this index.
    owner = np.repeat(np.arange(len(record.object_id)), record.range_count)
    range_count = np.bincount(owner[wanted], minlength=len(record.object_id)).astype(np.int64)
    objects = range_count > 0
    if not objects.any():
        return ()

    ranges = replace(record.ranges, **_cut_columns(record.ranges, wanted))
    record = replace(record, range_count=range_count, ranges=ranges)
    return (replace(record, **_cut_columns(record, objects)),)


def _cut_rows(record: Any, selection: Selection) -> Sequence[Record]:
    """Cut a record whose columns are parallel to `stream_id`. `node_id` is optional.

    Columns that may be empty stay empty.
    """
    if hasattr(record, "node_id") and not selection.has_node(record.node_id):
        return ()
    wanted = selection.streams(record.stream_id)
    if wanted.all():
        return (record,)
    if not wanted.any():
        return ()
    return (replace(record, **_cut_columns(record, wanted)),)


def _cut_columns(record: Any, wanted: Mask) -> dict[str, Any]:
    cut: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray) and len(value):
            cut[field.name] = value[wanted]
        elif isinstance(value, tuple) and value:
            cut[field.name] = tuple(value[row] for row in np.flatnonzero(wanted))
    return cut


def _keep(record: RecordT, _selection: Selection) -> Sequence[RecordT]:
    """Keep a record of objects by id, which may concern any stream and node."""
    return (record,)


def _select_by_node(record: Any, selection: Selection) -> Sequence[Record]:
    """Select a record by node. It concerns no stream."""
    wanted = not selection.stream_ids and selection.has_node(record.node_id)
    return (record,) if wanted else ()


def _select_by_two_nodes(record: rec.RecoveryAssigned, selection: Selection) -> Sequence[Record]:
    # An assignment concerns the recovered and the recovering node.
    wanted = not selection.stream_ids and selection.has_node(record.node_id, record.target_id)
    return (record,) if wanted else ()


def _keep_unless_bound(record: RecordT, selection: Selection) -> Sequence[RecordT]:
    """Keep a record that concerns neither a stream nor a node unless these are selected."""
    return () if selection.stream_ids or selection.node_ids else (record,)


def _cut_keys(record: rec.KVsPut | rec.KVsDeleted, selection: Selection) -> Sequence[Record]:
    """Drop rows whose keys are not selected. Keys concern neither a stream nor a node."""
    if selection.stream_ids or selection.node_ids:
        return ()
    if not selection.kv_prefixes:
        return (record,)
    wanted = np.array(selection.has_keys(record.namespaces, record.keys), dtype=np.bool_)
    return (replace(record, **_cut_columns(record, wanted)),) if wanted.any() else ()


ANY: Final = None
"""Instead of a set of ids: any id may be concerned."""


@dataclass(frozen=True, slots=True)
class _Mention:
    """Streams, nodes and keys that one record may concern."""

    kinds: frozenset[Kind]
    stream_ids: frozenset[int] | None
    node_ids: frozenset[int] | None
    keys: rec.KVsPut | rec.KVsDeleted | None = None
    """The record itself, if it contains only a few keys."""


class EntryIndex:
    """Index of one log entry's records, for many selections.

    `may_concern` costs one look-up regardless of the number of rows, and may return True wrongly.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._mentions = tuple(map(_mention, records))

    def may_concern(self, selection: Selection) -> bool:
        """Return False only if `select` would return None."""
        return any(
            (not selection.kinds or not selection.kinds.isdisjoint(mention.kinds))
            and _may_hold(mention.stream_ids, selection.stream_ids)
            and _may_hold(mention.node_ids, selection.node_ids)
            and _may_hold_keys(mention.keys, selection)
            for mention in self._mentions
        )


def _may_hold(mentioned: frozenset[int] | None, wanted: frozenset[int]) -> bool:
    return not wanted or mentioned is ANY or not wanted.isdisjoint(mentioned)


def _may_hold_keys(record: rec.KVsPut | rec.KVsDeleted | None, selection: Selection) -> bool:
    if record is None or not selection.kv_prefixes:
        return True
    return any(selection.has_keys(record.namespaces, record.keys))


def _mention(record: Record) -> _Mention:
    rule = _RULES[type(record)]
    keys = record if isinstance(record, rec.KVsPut | rec.KVsDeleted) else None
    if keys is not None and len(keys.keys) > _FEW_KEYS:
        keys = None
    return _Mention(rule.kinds, _streams_of(record, rule), _nodes_of(record, rule), keys)


_FEW_KEYS = 16
"""Maximum number of keys of a record that are compared before it is cut."""


def _streams_of(record: Any, rule: _Rule) -> frozenset[int] | None:
    if rule.cut is _keep:
        return ANY
    if rule.cut is _cut_created:
        return frozenset(range(record.first_stream_id, record.first_stream_id + record.count))
    if rule.cut is _cut_set_objects:
        return frozenset(record.ranges.stream_id.tolist())
    return frozenset(record.stream_id.tolist()) if rule.cut is _cut_rows else frozenset()


def _nodes_of(record: Any, rule: _Rule) -> frozenset[int] | None:
    if rule.cut in (_keep_unless_bound, _cut_keys):
        return frozenset()
    if rule.cut is _select_by_two_nodes:
        return frozenset({record.node_id, record.target_id})
    if rule.cut is not _keep and hasattr(record, "node_id"):
        return frozenset({record.node_id})
    return ANY


_RULES: dict[type, _Rule] = {
    rec.StreamsCreated: _Rule(frozenset({Kind.STREAM}), _cut_created),
    rec.StreamsOpened: _Rule(frozenset({Kind.STREAM}), _cut_rows),
    rec.StreamsReopened: _Rule(frozenset({Kind.STREAM}), _cut_rows),
    rec.StreamsClosed: _Rule(frozenset({Kind.STREAM}), _cut_rows),
    rec.StreamsTrimmed: _Rule(frozenset({Kind.STREAM}), _cut_rows),
    rec.RangesRemoved: _Rule(frozenset({Kind.STREAM}), _cut_rows),
    rec.StreamsDeleted: _Rule(frozenset({Kind.STREAM}), _cut_rows),
    # Commits move the ends of streams.
    rec.StreamSetObjectsCommitted: _Rule(frozenset({Kind.STREAM, Kind.OBJECT}), _cut_set_objects),
    rec.StreamObjectsCommitted: _Rule(frozenset({Kind.STREAM, Kind.OBJECT}), _cut_rows),
    rec.NamedObjectsCommitted: _Rule(frozenset({Kind.OBJECT}), _keep),
    rec.CommitRowsRejected: _Rule(frozenset({Kind.OBJECT}), _cut_rows),
    rec.ObjectsPrepared: _Rule(frozenset({Kind.OBJECT}), _select_by_node),
    rec.ObjectsReclaimed: _Rule(frozenset({Kind.OBJECT}), _keep),
    rec.RestoreFinished: _Rule(frozenset(Kind), _keep_unless_bound),
    rec.ObjectsDestroyed: _Rule(frozenset({Kind.OBJECT}), _keep),
    rec.ObjectsRemoved: _Rule(frozenset({Kind.OBJECT}), _keep),
    rec.ObjectsLinked: _Rule(frozenset({Kind.OBJECT}), _keep),
    rec.ObjectAttributesSet: _Rule(frozenset({Kind.OBJECT}), _keep),
    rec.DeletionsHeld: _Rule(frozenset({Kind.OBJECT}), _keep_unless_bound),
    rec.BucketClaimed: _Rule(frozenset({Kind.OBJECT}), _keep_unless_bound),
    rec.FeatureLevelSet: _Rule(frozenset(Kind), _keep_unless_bound),
    rec.PendingUploadsSet: _Rule(frozenset({Kind.STREAM, Kind.NODE}), _cut_rows),
    rec.UploadsAbandoned: _Rule(frozenset({Kind.STREAM, Kind.NODE}), _cut_rows),
    rec.NodeRegistered: _Rule(frozenset({Kind.NODE}), _select_by_node),
    rec.NodeEpochSet: _Rule(frozenset({Kind.NODE}), _select_by_node),
    rec.NodeLocked: _Rule(frozenset({Kind.NODE}), _select_by_node),
    rec.NodeSupervised: _Rule(frozenset({Kind.NODE}), _select_by_node),
    rec.NodeUnregistered: _Rule(frozenset({Kind.NODE}), _select_by_node),
    rec.NodeIdIssued: _Rule(frozenset({Kind.NODE}), _select_by_node),
    rec.RecoveryAssigned: _Rule(frozenset({Kind.NODE}), _select_by_two_nodes),
    rec.KVsPut: _Rule(frozenset({Kind.KV}), _cut_keys),
    rec.KVsDeleted: _Rule(frozenset({Kind.KV}), _cut_keys),
    rec.ProducerBatchesCommitted: _Rule(frozenset({Kind.STREAM}), _cut_rows),
    rec.ProducerIdsIssued: _Rule(frozenset({Kind.STREAM}), _keep_unless_bound),
    rec.ProducersExpired: _Rule(frozenset({Kind.STREAM}), _cut_rows),
}
