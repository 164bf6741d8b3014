"""Fills an empty map's managers from the sections `frozen` describes."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from controller.metadata.kv import KVs, StoredValue
from controller.metadata.nodes import Node, Nodes
from controller.metadata.objects import Objects
from controller.metadata.request_log import IssuedIds, RequestKey, RequestKind, Window
from controller.metadata.streams import DELETED, Streams
from controller.metadata.values import Int64Column


def restore(
    sections: Mapping[str, Mapping[str, Any]],
    *,
    streams: Streams,
    objects: Objects,
    nodes: Nodes,
    kvs: KVs,
    rejected: Window[tuple[int, int], int],
) -> None:
    """Fill empty managers; columns may be arrays or lists."""
    counters = sections["counters"]
    next_stream_id = int(counters["next_stream_id"][0])
    streams.load(
        next_stream_id,
        _integers(sections["streams"]),
        _integers(sections["ranges"]),
        dict(_flat_tags(sections["stream_tags"], "stream_id")),
    )
    _restore_objects(sections, streams, objects, int(counters["next_object_id"][0]))
    nodes.load(_nodes(sections))
    kvs.load(_kvs(sections["kvs"]))
    _restore_windows(sections, streams, objects, rejected)


def _integers(section: Mapping[str, Any]) -> dict[str, Int64Column]:
    return {name: np.asarray(values, dtype=np.int64) for name, values in section.items()}


def _restore_objects(
    sections: Mapping[str, Mapping[str, Any]],
    streams: Streams,
    objects: Objects,
    next_object_id: int,
) -> None:
    ranges = _integers(sections["object_ranges"])
    known = ranges["stream_id"] < len(streams)
    if len(streams):
        at = np.where(known, ranges["stream_id"], 0)
        known &= streams["state"][at] != DELETED
    ranges["indexed"] = known.astype(np.int64)
    objects.load(_integers(sections["objects"]), ranges, next_object_id)


def _flat_tags(section: Mapping[str, Any], owner: str) -> list[tuple[int, tuple[str, ...]]]:
    rows = zip(
        (int(item) for item in section[owner]), section["key"], section["value"], strict=True
    )
    return [
        (owner_id, tuple(text for _, key, value in group for text in (key, value)))
        for owner_id, group in groupby(rows, key=lambda row: row[0])
    ]


def _nodes(sections: Mapping[str, Mapping[str, Any]]) -> list[Node]:
    section = sections["nodes"]
    flat = dict(_flat_tags(sections["node_tags"], "node_id"))
    result = []
    for node_id, node_epoch, failover, wal_config in zip(
        section["node_id"],
        section["node_epoch"],
        section["failover"],
        section["wal_config"],
        strict=True,
    ):
        texts = flat.get(int(node_id), ())
        tags = tuple(zip(texts[::2], texts[1::2], strict=True))
        result.append(Node(int(node_id), int(node_epoch), bool(failover), wal_config, tags))
    return result


def _kvs(section: Mapping[str, Any]) -> dict[tuple[str, str], StoredValue]:
    return {
        (namespace, key): StoredValue(value, int(version))
        for namespace, key, value, version in zip(
            section["namespace"], section["key"], section["value"], section["version"], strict=True
        )
    }


def _restore_windows(
    sections: Mapping[str, Mapping[str, Any]],
    streams: Streams,
    objects: Objects,
    rejected: Window[tuple[int, int], int],
) -> None:
    section = sections["requests"]
    entries = [
        (
            RequestKey(RequestKind(int(kind)), int(node_id), request_id),
            IssuedIds(int(first_id), int(count), int(deadline_ms)),
        )
        for kind, node_id, request_id, first_id, count, deadline_ms in zip(
            *(section[name] for name in _REQUEST_COLUMNS), strict=True
        )
    ]
    created = RequestKind.CREATE_STREAMS
    streams.requests.load(entry for entry in entries if entry[0].kind is created)
    objects.requests.load(entry for entry in entries if entry[0].kind is not created)
    rows = _integers(sections["rejected_rows"])
    rejected.load(
        ((object_id, stream_id), error)
        for object_id, stream_id, error in zip(
            rows["object_id"].tolist(),
            rows["stream_id"].tolist(),
            rows["error"].tolist(),
            strict=True,
        )
    )
    removed = _integers(sections["removed_objects"])["object_id"]
    objects.removed.load((object_id, None) for object_id in removed.tolist())


_REQUEST_COLUMNS = ("kind", "node_id", "request_id", "first_id", "count", "deadline_ms")
