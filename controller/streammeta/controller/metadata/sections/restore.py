"""Fills empty registries from the sections that `frozen` describes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from streammeta.controller.errors import DamagedMetadataError
from streammeta.controller.metadata.api.request_identity import IssuedIds, RequestKey, RequestKind
from streammeta.controller.metadata.decisions import maintenance
from streammeta.controller.metadata.decisions.commit_rules import Repeats
from streammeta.controller.metadata.decisions.left_out_rows import RowKey
from streammeta.controller.metadata.registries.cluster_modes import FeatureLevel, Recovery
from streammeta.controller.metadata.registries.kv import KVs, StoredValue
from streammeta.controller.metadata.registries.nodes import Node, Nodes
from streammeta.controller.metadata.registries.objects import Objects
from streammeta.controller.metadata.registries.producers import Producers
from streammeta.controller.metadata.registries.stream_ranges import StreamSpans
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.sections.rules import COLUMNS, FLAGS, TEXTS, SectionChecker
from streammeta.controller.metadata.tables.object_facts import Facts
from streammeta.controller.metadata.tables.section_checks import check_ends, windows
from streammeta.controller.metadata.tables.tables import roomy_zeros
from streammeta.controller.metadata.tables.values import Int64Column
from streammeta.controller.records.record import FACT_COLUMNS


def restore(
    sections: Mapping[str, Mapping[str, Any]],
    *,
    streams: Streams,
    objects: Objects,
    nodes: Nodes,
    kvs: KVs,
    upkeep: maintenance.ObjectUpkeep,
    bucket_claim: maintenance.BucketClaim,
    feature_level: FeatureLevel,
    recovery: Recovery,
    repeats: Repeats,
    producers: Producers,
) -> None:
    """Fill empty registries. Columns may be arrays or lists.

    Raises:
        DamagedMetadataError: a section breaks a rule of `section_rules`. Discard the registries.
    """
    checked = _Checked(sections)
    # Sections are loaded in the order of the rules, which refer to sections loaded before.
    counters = checked["counters"]
    node_rows = _nodes(checked["nodes"], checked["node_tags"])
    if "node_processes" in sections:
        node_rows = _add_processes(node_rows, checked["node_processes"])
    free_ids = checked["free_node_ids"]["node_id"].tolist()

    stream_rows = dict(checked["streams"])
    tags = dict(_flat_tags(checked["stream_tags"], "stream_id"))
    streams.load(int(counters["next_stream_id"][0]), stream_rows, dict(checked["ranges"]), tags)
    _restore_objects(checked, streams, objects, int(counters["next_object_id"][0]))

    hold = (int(counters[f"deletions_held_{name}"][0]) for name in ("since_ms", "until_ms"))
    upkeep.load(maintenance.DeletionHold(*hold))
    if "bucket_claim" in sections:  # older versions had no claims
        claim = checked["bucket_claim"]
        bucket_claim.load(
            maintenance.Claim(str(claim["cluster_uuid"][0]), int(claim["issued_below"][0]))
        )
    if "feature_level" in sections:  # older versions had no levels
        feature_level.load(int(checked["feature_level"]["level"][0]))
    if "recovery" in sections:
        window = checked["recovery"]
        recovery.load(int(window["undecided_from"][0]), int(window["undecided_below"][0]))

    pending, lost = _pending(checked["pending_uploads"]), _spans(checked["lost_ranges"])
    kvs.load(_kvs(checked["kvs"]))
    requests = _requests(checked["requests"])
    streams.load_other(pending, lost, requests[RequestKind.CREATE_STREAMS])
    node_requests = requests[RequestKind.NEXT_NODE_ID]
    nodes.load(node_rows, int(counters["last_node_id"][0]), free_ids, node_requests)

    repeats.left_out.load(_left_out(checked["rejected_rows"]))
    if "left_out_rows" in sections:
        repeats.left_out.load(_left_out(checked["left_out_rows"]))
    objects.load_windows(
        requests[RequestKind.PREPARE_OBJECTS], _removed(checked["removed_objects"])
    )
    if "producer_ids" in sections:
        next_producer_id = int(checked["producer_ids"]["next_producer_id"][0])
        producers.load(next_producer_id, checked["producers"], checked["producer_batches"])


class _Checked:
    """Sections with numbers as arrays of int64 or `_NARROW`, each checked on access."""

    def __init__(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self._sections = sections
        self._checker = SectionChecker()

    def __contains__(self, name: str) -> bool:
        return name in self._sections

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        if name not in self._sections:
            raise DamagedMetadataError(name, -1, "its columns", "no such section", "present")
        columns: dict[str, Any] = {
            field: values if field in TEXTS else _integers(field, values)
            for field, values in self._sections[name].items()
        }
        self._checker.check(name, columns)
        return columns


_NARROW = {
    "state": np.int8,
    "kind": np.int8,
    "attributes": np.int32,
    "node_id": np.int32,
    "range_index": np.int32,
    "range_count": np.int32,
    "stream_id": np.int32,
}
"""Column types of tables and files that are loaded without widening."""


def _integers(field: str, values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.dtype == _NARROW.get(field):
        return values
    return np.asarray(values, dtype=np.int64)


def _restore_objects(
    sections: _Checked, streams: Streams, objects: Objects, next_object_id: int
) -> None:
    columns = dict(sections["objects"])
    ranges = dict(sections["object_ranges"])
    if "content_digest" not in columns:  # written by a version without digests
        columns["content_digest"] = roomy_zeros(len(columns["object_id"]), np.int64)
    # In windows, because the temporary columns would double the memory.
    for rows in windows(len(ranges["stream_id"])):
        ids, ends = ranges["stream_id"][rows], ranges["end_offset"][rows]
        check_ends(ends, streams.exist(ids), streams.end_offsets(ids), rows.start)
    objects.load(columns, ranges, streams.exist, streams.visible_from, next_object_id)
    if "object_facts" in sections:  # written by a version with facts
        known = sections["object_facts"]
        facts = Facts(**{name: known[name] for name in FACT_COLUMNS})
        objects.load_facts(known["object_id"], facts)


def _flat_tags(section: Mapping[str, Any], owner: str) -> list[tuple[int, tuple[str, ...]]]:
    rows = zip(
        (int(item) for item in section[owner]), section["key"], section["value"], strict=True
    )
    return [
        (owner_id, tuple(text for _, key, value in group for text in (key, value)))
        for owner_id, group in groupby(rows, key=lambda row: row[0])
    ]


def _nodes(section: Mapping[str, Any], tags: Mapping[str, Any]) -> list[Node]:
    flat = dict(_flat_tags(tags, "node_id"))
    nodes = []
    for cells in zip(*(section[name] for name in COLUMNS["nodes"]), strict=True):
        fields = dict(zip(COLUMNS["nodes"], map(_plain, COLUMNS["nodes"], cells), strict=True))
        texts = flat.get(fields["node_id"], ())
        nodes.append(Node(**fields, tags=tuple(zip(texts[::2], texts[1::2], strict=True))))
    return nodes


def _add_processes(nodes: Iterable[Node], section: Mapping[str, Any]) -> list[Node]:
    known = dict(zip(section["node_id"].tolist(), map(str, section["process_id"]), strict=True))
    return [replace(node, process_id=known.get(node.node_id, "")) for node in nodes]


def _plain(name: str, cell: Any) -> Any:
    if name in TEXTS:
        return cell
    return bool(cell) if name in FLAGS else int(cell)


def _spans(section: Mapping[str, Int64Column]) -> StreamSpans:
    return StreamSpans(section["stream_id"], section["start_offset"], section["end_offset"])


def _pending(section: Mapping[str, Int64Column]) -> Iterator[tuple[int, StreamSpans]]:
    owners = section["node_id"]
    for node_id in np.unique(owners).tolist():
        yield node_id, _spans(section).take(owners == node_id)


def _kvs(section: Mapping[str, Any]) -> dict[tuple[str, str], StoredValue]:
    return {
        (namespace, key): StoredValue(value, int(version))
        for namespace, key, value, version in zip(
            section["namespace"], section["key"], section["value"], section["version"], strict=True
        )
    }


def _requests(section: Mapping[str, Any]) -> dict[RequestKind, list[tuple[RequestKey, IssuedIds]]]:
    # Older versions stored no digests.
    digests = section.get("content_digest", [0] * len(section["kind"]))
    entries = [
        (
            RequestKey(RequestKind(int(kind)), int(node_id), request_id),
            IssuedIds(int(first_id), int(count), int(deadline_ms), int(digest)),
        )
        for kind, node_id, request_id, first_id, count, deadline_ms, digest in zip(
            *(section[name] for name in COLUMNS["requests"]), digests, strict=True
        )
    ]
    return {kind: [entry for entry in entries if entry[0].kind is kind] for kind in RequestKind}


def _left_out(section: Mapping[str, Any]) -> Iterator[tuple[RowKey, int]]:
    columns = (section[name].tolist() for name in ("object_id", "stream_id", "error"))
    rows = list(zip(*columns, strict=True))
    digests = section["content_digest"].tolist() if "content_digest" in section else [0] * len(rows)
    for digest, (object_id, stream_id, error) in zip(digests, rows, strict=True):
        yield RowKey(digest, object_id, stream_id), error


def _removed(section: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    ids = section["object_id"].tolist()
    # Older versions stored no digests.
    digests = section["content_digest"].tolist() if "content_digest" in section else [0] * len(ids)
    return zip(ids, digests, strict=True)
