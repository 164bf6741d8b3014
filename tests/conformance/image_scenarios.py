"""Runs scenarios that replay records of another vocabulary into an image, and its codecs.

Every step ends in a real map; where a round trip is asked for it is written to a checkpoint, loaded
from there, and compared by its digest. Facts are read from the map; what belongs to no single
stream or node in a fact belongs to the one the scenario speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from streammeta.controller.metadata.tables import values
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import StreamsClosed
from tests.conformance.conformance_report import ABSENT, Mismatch, ScenarioResult, compare
from tests.conformance.foreign_records import (
    EPOCH_SHIFT,
    ForeignRecords,
    node_records,
    stream_records,
)
from tests.conformance.live_controller import LiveController
from tests.conformance.map_rows import MetadataRows, Row
from tests.conformance.operations_streams import PARTITION_TAG, TOPIC_TAG
from tests.conformance.scenario_args import Args, UnknownFieldsError

Facts = Mapping[Any, Any]


class _Image:
    """The map, as rows, before and after a step, and what the scenario speaks of."""

    def __init__(self) -> None:
        self.live = LiveController()
        self.foreign = ForeignRecords(self.live, image=True)
        self.stream_id = 0
        self.node_id = 0
        self.previous = self.rows()

    def rows(self) -> MetadataRows:
        return self.live.rows()

    def replay(self, records: Sequence[Mapping[str, Any]], *, is_snapshot: bool = False) -> None:
        """Apply records; of a complete snapshot what is not mentioned is gone."""
        self.previous = self.rows()
        if is_snapshot:
            self.live = LiveController()
            self.foreign = ForeignRecords(self.live, image=True)
        for record in records:
            if record.get("type") in ("S3Stream", "S3StreamObject"):
                self.stream_id = record.get("stream", 0)
            if record.get("type") in ("NodeWALMetadata", "S3StreamSetObject"):
                self.node_id = record.get("node", 0)
            # A part of an image is replayed without the stream it belongs to.
            parent = {"type": "S3Stream", "stream": record.get("stream", 0)}
            if record.get("type") == "S3StreamObject" and not self.rows().one(
                "streams", stream_id=parent["stream"]
            ):
                self.foreign.replay([parent])
        self.foreign.replay(records)

    def round_trip(self) -> Iterator[Mismatch]:
        before, after = self.live.reload()
        yield from compare(before.hex(), after.hex(), "snapshot_round_trip")


def check_image(args: Args, result: ScenarioResult) -> None:
    image = _Image()
    result.fail(0, "start", _start(image, args))
    if args.take("start_round_trip", False):
        result.fail(0, "start", image.round_trip())
    for number, step in enumerate(args.each("steps", None), start=1):
        step.pass_over()
        op = "replay" if step.has("replay") else "snapshot_round_trip"
        is_snapshot = bool(step.take("finish_snapshot", False))
        try:
            if step.has("replay"):
                image.replay(step.take("replay"), is_snapshot=is_snapshot)
            if step.take("snapshot_round_trip", False):
                result.fail(number, op, image.round_trip())
            result.fail(number, op, _check(image, step.take("expect", {}) or {}))
        except UnknownFieldsError as error:
            result.fail(number, op, error.mismatches)


def _start(image: _Image, args: Args) -> Iterator[Mismatch]:
    start = args.take("start", None)
    if not isinstance(start, Mapping):
        if start not in (None, "empty", "empty stream", "empty node", "empty image"):
            yield Mismatch("start", start, "unknown start")
        return
    given = args.nested(start, "start")
    records: list[Mapping[str, Any]] = []
    for name, kind in (("stream", "AssignedStreamId"), ("object", "AssignedS3ObjectId")):
        if given.has(f"next_{name}_id"):
            records.append({"type": kind, "assigned": given.take(f"next_{name}_id") - 1})
    for object_id, fields in (given.take("objects", {}) or {}).items():
        records.append({"type": "S3Object", "object": object_id, **fields})
    for key, value in (given.take("kv", {}) or {}).items():
        records.append({"type": "KV", "entries": [{"key": key, "value": value}]})
    if given.has("node"):
        epoch, held = given.take("node_epoch", -1), given.take("stream_set_objects", [])
        records += node_records(given.take("node"), epoch, held)
    if given.has("stream"):
        records += stream_records(given.take("stream"), given)
    image.replay(records)


# ---- facts ----


def _check(image: _Image, facts: Facts) -> Iterator[Mismatch]:
    is_exact = bool(facts.get("exact", False))
    for name, expected in facts.items():
        path = f"expect.{name}"
        if name == "exact":
            continue
        if name == "previous_image":
            yield from _check_previous(image.previous, expected)
        elif name == "uncommitted":
            yield from _compare_owed(_owed(image.rows()), expected, path, is_exact)
        elif name in _KEYED:
            yield from _check_keyed(_KEYED[name](image.rows()), expected, path, is_exact)
        elif name == "partition_streams":
            yield from _check_partitions(_partitions(image.rows()), expected, path)
        elif name in _READ:
            yield from compare(expected, _READ[name](image), path)
        else:
            yield Mismatch(path, expected, "unknown field")


def _check_previous(previous: MetadataRows, facts: Facts) -> Iterator[Mismatch]:
    for name, expected in facts.items():
        path = f"expect.previous_image.{name}"
        if name == "uncommitted":
            yield from _compare_owed(_owed(previous), expected, path, False)
        else:
            yield Mismatch(path, expected, "unknown field")


def _owed(rows: MetadataRows) -> dict[int, dict[int, list[int]]]:
    found: dict[int, dict[int, list[int]]] = {row["node_id"]: {} for row in rows.rows("nodes")}
    for row in rows.rows("pending_uploads"):
        owed = found.setdefault(row["node_id"], {})
        owed[row["stream_id"]] = [row["start_offset"], row["end_offset"]]
    return found


def _compare_owed(
    owed: Mapping[int, Mapping[int, list[int]]], expected: Facts, path: str, is_exact: bool
) -> Iterator[Mismatch]:
    for node_id, spans in expected.items():
        have = owed.get(node_id, {})
        yield from compare(spans, have, f"{path}[{node_id}]")
        if (is_exact or not spans) and set(have) != set(spans):
            yield Mismatch(f"{path}[{node_id}]", spans, dict(have))


def _check_keyed(
    actual: Mapping[Any, Any], expected: Facts, path: str, is_exact: bool
) -> Iterator[Mismatch]:
    for key, value in expected.items():
        if value is None:
            if key in actual:
                yield Mismatch(f"{path}[{key}]", "does not exist", actual[key])
        else:
            yield from compare(value, actual.get(key, ABSENT), f"{path}[{key}]")
    if (is_exact or not expected) and set(actual) != set(expected):
        yield Mismatch(path, sorted(expected), sorted(actual))


def _check_partitions(
    partitions: Mapping[int, list[Any]], expected: list[Facts], path: str
) -> Iterator[Mismatch]:
    for item in expected:
        key = [item["topic"], item["partition"]]
        held = sorted(stream_id for stream_id, found in partitions.items() if found == key)
        yield from compare(sorted(item["streams"]), held, f"{path}{key}")


# ---- reading ----


def _kvs(rows: MetadataRows) -> dict[str, str]:
    return {row["key"]: row["value"].decode() for row in rows.rows("kvs")}


def _objects(rows: MetadataRows) -> dict[int, Any]:
    return {
        row["object_id"]: {
            "state": values.ObjectState(row["state"]).name,
            "size": row["object_size"],
            "timestamp": row["timestamp_ms"],
            "attributes": row["attributes"],
        }
        for row in rows.rows("objects")
    }


def _nodes(rows: MetadataRows) -> dict[int, Any]:
    epochs = {row["node_id"]: row["node_epoch"] - EPOCH_SHIFT for row in rows.rows("nodes")}
    return {node_id: {"node_epoch": epoch, "epoch": epoch} for node_id, epoch in epochs.items()}


def _streams(rows: MetadataRows) -> dict[int, Any]:
    return {row["stream_id"]: _stream(rows, row) for row in rows.rows("streams")}


def _partitions(rows: MetadataRows) -> dict[int, list[Any]]:
    tags: dict[int, dict[str, str]] = {}
    for row in rows.rows("stream_tags"):
        tags.setdefault(row["stream_id"], {})[row["key"]] = row["value"]
    return {
        stream_id: [held[TOPIC_TAG], int(held[PARTITION_TAG], 16)]
        for stream_id, held in tags.items()
        if TOPIC_TAG in held and PARTITION_TAG in held
    }


_KEYED: dict[str, Callable[[MetadataRows], Mapping[Any, Any]]] = {
    "objects": _objects,
    "kv": _kvs,
    "streams": _streams,
    "nodes": _nodes,
    "stream_end_offsets": lambda rows: {
        row["stream_id"]: row["end_offset"] for row in rows.rows("streams")
    },
    "stream_partition": _partitions,
}


def _stream(rows: MetadataRows, stream: Row) -> dict[str, Any]:
    ranges = [
        {
            "index": row["range_index"],
            "epoch": row["epoch"],
            "start": row["start_offset"],
            "end": row["end_offset"],
            "node": row["node_id"],
        }
        for row in rows.rows("ranges", stream_id=stream["stream_id"])
    ]
    return {
        "stream": stream["stream_id"],
        "epoch": stream["epoch"],
        "state": values.StreamState(stream["state"]).name,
        "start": stream["start_offset"],
        "end": stream["end_offset"],
        "ranges": ranges,
    }


def _of_stream(name: str) -> Callable[[_Image], Any]:
    def read(image: _Image) -> Any:
        stream = _streams(image.rows()).get(image.stream_id)
        return ABSENT if stream is None else stream[name]

    return read


def _counter(name: str) -> Callable[[_Image], Any]:
    return lambda image: image.rows().counters[name]


def _node_epoch(image: _Image) -> Any:
    node = image.rows().one("nodes", node_id=image.node_id)
    return ABSENT if node is None else node["node_epoch"] - EPOCH_SHIFT


def _set_object_ids(image: _Image) -> list[int]:
    held = image.rows().rows(
        "objects", kind=int(values.ObjectKind.STREAM_SET), node_id=image.node_id
    )
    return [row["object_id"] for row in sorted(held, key=lambda row: row["order_id"])]


def _stream_object_ids(image: _Image) -> list[int]:
    rows = image.rows()
    held = rows.rows("object_ranges", stream_id=image.stream_id)
    kinds = {row["object_id"]: row["kind"] for row in rows.rows("objects")}
    return sorted(
        row["object_id"] for row in held if kinds[row["object_id"]] != values.ObjectKind.STREAM_SET
    )


def _object_rows(rows: MetadataRows) -> dict[int, Row]:
    return {row["object_id"]: row for row in rows.rows("objects")}


def _changed_objects(image: _Image) -> list[int]:
    before, now = _object_rows(image.previous), _object_rows(image.rows())
    return sorted(key for key, row in now.items() if before.get(key) != row)


def _removed(keys: Callable[[MetadataRows], Mapping[Any, Any]]) -> Callable[[_Image], list[Any]]:
    return lambda image: sorted(keys(image.previous).keys() - keys(image.rows()).keys())


_READ: dict[str, Callable[[_Image], Any]] = {
    "next_stream_id": _counter("next_stream_id"),
    "next_object_id": _counter("next_object_id"),
    "node_epoch": _node_epoch,
    "stream_set_object_ids": _set_object_ids,
    "stream_object_ids": _stream_object_ids,
    "stream_object_count": lambda image: len(_stream_object_ids(image)),
    "object_ids": lambda image: sorted(_object_rows(image.rows())),
    "changed_objects": _changed_objects,
    "removed_objects": _removed(_object_rows),
    # A key that is written again counts, whatever the value: a snapshot names what there is.
    "changed_keys": lambda image: sorted(_kvs(image.rows())),
    "removed_keys": _removed(_kvs),
    **{name: _of_stream(name) for name in ("stream", "epoch", "state", "start", "end", "ranges")},
}


# ---- codecs ----


def check_codec(args: Args, result: ScenarioResult) -> Iterator[Mismatch]:
    """See that our records carry the same facts there and back."""
    rows = args.take("input", None) or []
    if not rows or any(set(row) != {"stream", "end"} for row in rows):
        args.names()
        yield Mismatch("input", rows, "unknown codec")
        return
    result.deviate(1, "codec", "own-record-encoding")
    record = StreamsClosed(
        stream_id=values.column([row["stream"] for row in rows]),
        end_offset=values.column([row["end"] for row in rows]),
    )
    (decoded,) = decode_records(encode_records([record]))
    assert isinstance(decoded, StreamsClosed)
    pairs = zip(decoded.stream_id.tolist(), decoded.end_offset.tolist(), strict=True)
    actual = {"decode_equals_input": [{"stream": s, "end": e} for s, e in pairs] == rows}
    yield from compare(args.take("expect", {}), actual, "expect")
