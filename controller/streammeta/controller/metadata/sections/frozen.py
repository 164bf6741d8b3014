"""Immutable view of the metadata, as sections of columns.

The columns of a view are shared with the live metadata, which copies a page when it first writes to
it (see `tables`). The same holds for dictionaries and windows (see `shared_views`). Only the nodes
are copied when the view is made. Tables are unordered, but sections have a fixed order and their
rows are sorted by key, so equal metadata has equal sections regardless of its history. A view may
be read in another thread.

| section | rows | columns |
|---|---|---|
| counters | 1 | next_stream_id, next_object_id, last_node_id, deletions_held_since_ms, deletions_held_until_ms |
| streams | one per stream | stream_id, epoch, range_index, start_offset, end_offset, state, node_id |
| stream_tags | one per tag | stream_id, key, value |
| ranges | one per range, including current ones | stream_id, range_index, epoch, start_offset, end_offset, node_id |
| objects | one per object (order_id of a linked one: its composite) | object_id, state, kind, attributes, node_id, object_size, timestamp_ms, order_id, data_time_ms, range_count, content_digest |
| object_ranges | one per range, in object order | object_id, stream_id, start_offset, end_offset |
| object_facts | one per object with known facts, see `object_facts` | object_id, min_timestamp_ms, max_timestamp_ms, crc32c |
| pending_uploads | one per node and stream with a pending upload | node_id, stream_id, start_offset, end_offset |
| lost_ranges | abandoned offsets | stream_id, start_offset, end_offset |
| nodes | one per node | node_id, node_epoch, failover, wal_config, locked, departed, recovered_by, supervised |
| node_processes | one per node with a known process, absent below feature level 4 | node_id, process_id |
| node_tags | one per tag | node_id, key, value |
| free_node_ids | ids that can be issued again | node_id |
| kvs | one per key | namespace, key, value, version |
| requests | remembered requests, oldest first | kind, node_id, request_id, first_id, count, deadline_ms, content_digest |
| rejected_rows | remembered verdicts of unknown commits, oldest first | object_id, stream_id, error |
| left_out_rows | remembered verdicts of known commits, oldest first, absent below feature level 4 | content_digest, object_id, stream_id, error |
| removed_objects | remembered removals, oldest first | object_id, content_digest |
| bucket_claim | 1 | cluster_uuid, issued_below |
| feature_level | 1 | level |
| producer_ids | 1, absent below feature level 5 like the next two | next_producer_id |
| producers | one per stream and producer | stream_id, producer_id, producer_epoch, last_used_ms |
| producer_batches | 1 to 5 per row of producers, in their order, oldest first | stream_id, producer_id, first_sequence, record_count, start_offset |
| recovery | 1, only in recovery mode | undecided_from, undecided_below |
"""  # noqa: E501 - a table's row is one line

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.controller.features import SECTIONS as ADDED_SECTIONS
from streammeta.controller.metadata.decisions.left_out_rows import RowKey
from streammeta.controller.metadata.decisions.maintenance import Claim, DeletionHold
from streammeta.controller.metadata.registries.kv import StoredValue
from streammeta.controller.metadata.registries.nodes import Node, NodesView
from streammeta.controller.metadata.registries.object_queries import UNUSED, ObjectsView
from streammeta.controller.metadata.registries.producers import ProducersView
from streammeta.controller.metadata.registries.stream_heads import DELETED
from streammeta.controller.metadata.registries.stream_ranges import RANGE_COLUMNS
from streammeta.controller.metadata.registries.streams import StreamsView
from streammeta.controller.metadata.sections.rules import COLUMNS, FLAGS, TEXTS
from streammeta.controller.metadata.tables.object_facts import facts_in_view
from streammeta.controller.metadata.tables.shared_views import SharedDictView, WindowView
from streammeta.controller.metadata.tables.stream_index import range_rows
from streammeta.controller.metadata.tables.values import Int64Column, ObjectState, column

SectionColumn: TypeAlias = npt.NDArray[Any] | Sequence[Any]
Section: TypeAlias = dict[str, SectionColumn]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenParts:
    """Views that make up frozen metadata."""

    streams: StreamsView
    objects: ObjectsView
    nodes: NodesView
    kvs: SharedDictView[tuple[str, str], StoredValue]
    deletion_hold: DeletionHold
    bucket_claim: Claim
    feature_level: int
    undecided: tuple[int, int] | None
    left_out: WindowView[RowKey, int]
    producers: ProducersView


class FrozenMetadata:
    """The metadata below `end_offset` of the log."""

    def __init__(self, end_offset: int, parts: FrozenParts) -> None:
        self.end_offset = end_offset
        self._parts = parts

    def sections(self) -> Mapping[str, Section]:
        """Return the sections by name. Each is computed on access."""
        return _Sections(self._parts)

    def digest(self) -> bytes:
        """Return 32 bytes, equal for equal metadata. Takes time proportional to its size."""
        return sections_digest(self.sections().items())


def sections_digest(sections: Iterable[tuple[str, Section]]) -> bytes:
    """Return the digest of metadata with these sections, in the order of `FrozenMetadata`."""
    state = hashlib.sha256()
    for name, section in sections:
        state.update(f"{name}\n".encode())
        for column_name, values in section.items():
            # Names and lengths keep adjacent columns apart.
            state.update(f"{column_name} {len(values)}\n".encode())
            _hash_column(state.update, values)
    return state.digest()


class _Sections(Mapping[str, Section]):
    """Sections computed on demand, so that only one at a time uses memory."""

    def __init__(self, parts: FrozenParts) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Section:
        return _SECTIONS[name](self._parts)

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        parts = self._parts
        # An older controller would stop at a section that it does not know.
        absent = {name for name, level in ADDED_SECTIONS.items() if level > parts.feature_level}
        if parts.undecided is None:
            absent.add("recovery")
        return (name for name in _SECTIONS if name not in absent)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _counters(parts: FrozenParts) -> Section:
    return {
        "next_stream_id": column([len(parts.streams.rows)]),
        "next_object_id": column([parts.objects.next_object_id]),
        "last_node_id": column([parts.nodes.last_issued_id]),
        "deletions_held_since_ms": column([parts.deletion_hold.since_ms]),
        "deletions_held_until_ms": column([parts.deletion_hold.until_ms]),
    }


def _streams(parts: FrozenParts) -> Section:
    # Ids of deleted streams are never issued again, so their rows stay empty.
    live = parts.streams.rows.column("state") != DELETED
    _, *names = COLUMNS["streams"]
    columns = {name: parts.streams.rows.column(name)[live] for name in names}
    # The row number is the stream id.
    return {"stream_id": np.flatnonzero(live), **columns}


def _stream_tags(parts: FrozenParts) -> Section:
    return _tag_section("stream_id", sorted(parts.streams.tags.items()))


def _ranges(parts: FrozenParts) -> Section:
    current = _current_ranges(parts)
    # Freed rows have no stream.
    used = parts.streams.past_ranges.column("stream_id") >= 0
    section: Section = {}
    for name in RANGE_COLUMNS:
        past = parts.streams.past_ranges.column(name)[used]
        section[name] = np.concatenate((past, current[name].astype(past.dtype)))
    # The order of rows in the tables depends on history, the sections must not.
    order = np.lexsort((np.asarray(section["range_index"]), np.asarray(section["stream_id"])))
    return {name: np.asarray(values)[order] for name, values in section.items()}


def _current_ranges(parts: FrozenParts) -> dict[str, Int64Column]:
    index = parts.streams.rows.column("range_index")
    owned = (parts.streams.rows.column("state") != DELETED) & (index >= 0)
    # A stream's row contains its current range, whose start has another name there.
    names = {"start_offset": "range_start"}
    columns = {
        name: parts.streams.rows.column(names.get(name, name))[owned]
        for name in RANGE_COLUMNS
        if name != "stream_id"
    }
    return {"stream_id": np.flatnonzero(owned), **columns}


_SPAN_COLUMNS = ("stream_id", "start_offset", "end_offset")


def _objects(parts: FrozenParts) -> Section:
    rows = _object_rows(parts)
    names = (*COLUMNS["objects"], "content_digest")
    return {name: parts.objects.rows.column(name)[rows] for name in names}


def _object_ranges(parts: FrozenParts) -> Section:
    held_by = _object_rows(parts)
    first, count = (
        parts.objects.rows.column(name)[held_by] for name in ("first_range", "range_count")
    )
    rows = range_rows(first, count)
    columns = parts.objects.ranges
    return {
        name: columns.column(name)[rows].astype(np.int64, copy=False)
        for name in COLUMNS["object_ranges"]
    }


def _object_facts(parts: FrozenParts) -> Section:
    rows = _object_rows(parts)
    found, facts = facts_in_view(parts.objects.facts, rows)
    return {
        "object_id": parts.objects.rows.column("object_id")[rows[found]],
        **facts.columns(),
    }


def _object_rows(parts: FrozenParts) -> Int64Column:
    """Return the rows of existing objects, in id order."""
    state = parts.objects.rows.column("state")
    rows = np.flatnonzero((state != UNUSED) & (state != ObjectState.REMOVED))
    ordered: Int64Column = rows[np.argsort(parts.objects.rows.column("object_id")[rows])]
    return ordered


def _pending_uploads(parts: FrozenParts) -> Section:
    pending = parts.streams.pending
    owners = [np.full(len(spans), node_id) for node_id, spans in pending]
    columns = {
        name: np.concatenate([column(), *(getattr(spans, name) for _, spans in pending)])
        for name in _SPAN_COLUMNS
    }
    return {"node_id": np.concatenate([column(), *owners]), **columns}


def _lost_ranges(parts: FrozenParts) -> Section:
    return {name: getattr(parts.streams.lost, name) for name in _SPAN_COLUMNS}


def _nodes(parts: FrozenParts) -> Section:
    return {name: _node_column(name, parts.nodes.in_order) for name in COLUMNS["nodes"]}


def _node_processes(parts: FrozenParts) -> Section:
    known = [node for node in parts.nodes.in_order if node.process_id]
    return {name: _node_column(name, known) for name in COLUMNS["node_processes"]}


def _node_column(name: str, nodes: Sequence[Node]) -> SectionColumn:
    values = [getattr(node, name) for node in nodes]
    if name in TEXTS:
        return values
    return np.array(values, dtype=np.bool_ if name in FLAGS else np.int64)


def _free_node_ids(parts: FrozenParts) -> Section:
    # Sets have no order, and equal metadata must give equal bytes.
    return {"node_id": column(sorted(parts.nodes.free_ids))}


def _node_tags(parts: FrozenParts) -> Section:
    flat = [
        (node.node_id, tuple(text for tag in node.tags for text in tag))
        for node in parts.nodes.in_order
    ]
    return _tag_section("node_id", flat)


def _kvs(parts: FrozenParts) -> Section:
    # Dictionaries keep the order of insertion, which depends on history.
    items = sorted(parts.kvs.items())
    return {
        "namespace": [namespace for (namespace, _), _ in items],
        "key": [key for (_, key), _ in items],
        "value": [stored.value for _, stored in items],
        "version": column([stored.version for _, stored in items]),
    }


def _requests(parts: FrozenParts) -> Section:
    windows = (parts.streams.requests, parts.objects.requests, parts.nodes.requests)
    keys = [key for window in windows for key, _ in window]
    issued = [ids for window in windows for _, ids in window]
    return {
        "kind": column([int(key.kind) for key in keys]),
        "node_id": column([key.node_id for key in keys]),
        "request_id": [key.request_id for key in keys],
        "first_id": column([ids.first_id for ids in issued]),
        "count": column([ids.count for ids in issued]),
        "deadline_ms": column([ids.deadline_ms for ids in issued]),
        "content_digest": column([ids.content_digest for ids in issued]),
    }


def _rejected_rows(parts: FrozenParts) -> Section:
    return _row_section([entry for entry in parts.left_out if not entry[0].content_digest])


def _left_out_rows(parts: FrozenParts) -> Section:
    entries = [entry for entry in parts.left_out if entry[0].content_digest]
    digests = column([key.content_digest for key, _ in entries])
    return {"content_digest": digests, **_row_section(entries)}


def _row_section(entries: Sequence[tuple[RowKey, int]]) -> Section:
    return {
        "object_id": column([key.object_id for key, _ in entries]),
        "stream_id": column([key.stream_id for key, _ in entries]),
        "error": column([error for _, error in entries]),
    }


def _removed_objects(parts: FrozenParts) -> Section:
    return {
        "object_id": column([object_id for object_id, _ in parts.objects.removed]),
        "content_digest": column([digest for _, digest in parts.objects.removed]),
    }


def _bucket_claim(parts: FrozenParts) -> Section:
    return {
        "cluster_uuid": [parts.bucket_claim.cluster_uuid],
        "issued_below": column([parts.bucket_claim.issued_below]),
    }


def _feature_level(parts: FrozenParts) -> Section:
    return {"level": column([parts.feature_level])}


def _producer_ids(parts: FrozenParts) -> Section:
    return {"next_producer_id": column([parts.producers.next_producer_id])}


def _producers(parts: FrozenParts) -> Section:
    return {**parts.producers.producer_columns()}


def _producer_batches(parts: FrozenParts) -> Section:
    return {**parts.producers.batch_columns()}


def _recovery(parts: FrozenParts) -> Section:
    if parts.undecided is None:
        raise KeyError("recovery")
    return recovery_section(*parts.undecided)


def recovery_section(undecided_from: int, undecided_below: int) -> Section:
    """Return the section of metadata in recovery mode."""
    return {
        "undecided_from": column([undecided_from]),
        "undecided_below": column([undecided_below]),
    }


_SECTIONS: dict[str, Callable[[FrozenParts], Section]] = {
    "counters": _counters,
    "streams": _streams,
    "stream_tags": _stream_tags,
    "ranges": _ranges,
    "objects": _objects,
    "object_ranges": _object_ranges,
    "object_facts": _object_facts,
    "pending_uploads": _pending_uploads,
    "lost_ranges": _lost_ranges,
    "nodes": _nodes,
    "node_tags": _node_tags,
    "node_processes": _node_processes,
    "free_node_ids": _free_node_ids,
    "kvs": _kvs,
    "requests": _requests,
    "rejected_rows": _rejected_rows,
    "left_out_rows": _left_out_rows,
    "removed_objects": _removed_objects,
    "bucket_claim": _bucket_claim,
    "feature_level": _feature_level,
    "producer_ids": _producer_ids,
    "producers": _producers,
    "producer_batches": _producer_batches,
    "recovery": _recovery,
}


def _tag_section(owner: str, flat: Iterable[tuple[int, tuple[str, ...]]]) -> Section:
    rows = [
        (owner_id, key, value)
        for owner_id, texts in flat
        for key, value in zip(texts[::2], texts[1::2], strict=True)
    ]
    return {
        owner: column([row[0] for row in rows]),
        "key": [row[1] for row in rows],
        "value": [row[2] for row in rows],
    }


def _hash_column(update: Callable[[bytes], None], values: SectionColumn) -> None:
    if isinstance(values, np.ndarray):
        # Widened to int64: the width of a column in memory must not change the digest.
        update(np.ascontiguousarray(values, dtype="<i8").tobytes())
        return
    for value in values:
        # Length prefixes keep adjacent texts apart.
        encoded = value if isinstance(value, bytes) else value.encode()
        update(len(encoded).to_bytes(8, "little"))
        update(encoded)
