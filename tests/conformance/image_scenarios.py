"""Runs scenarios that replay records of another vocabulary into an image, and its codecs.

Every step ends in a real map; where a round trip is asked for it is written to a checkpoint, loaded
from there, and compared by its digest. Facts are read from the map; what belongs to no single
stream or node in a fact belongs to the one the scenario speaks of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from streammeta.controller.metadata.frozen import FrozenMap
from streammeta.controller.metadata.values import ObjectKind, ObjectState, StreamState, column
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import StreamsClosed
from tests.conformance.conformance_report import (
    ABSENT,
    Deviation,
    Mismatch,
    ScenarioResult,
    compare,
)
from tests.conformance.deviation_rules import rules
from tests.conformance.foreign_records import EPOCH_SHIFT, ForeignRecords
from tests.conformance.live_controller import LiveController
from tests.conformance.map_rows import MapRows, Row
from tests.conformance.operations_streams import PARTITION_TAG, TOPIC_TAG
from tests.conformance.scenario_args import Args
from tests.kit.clock import ManualClock

Facts = Mapping[Any, Any]

_STEP_FIELDS = frozenset(
    ("replay", "finish_snapshot", "snapshot_round_trip", "expect", "notes", "note")
)
_SCENARIO_FIELDS = frozenset(
    ("name", "source", "start", "start_round_trip", "steps", "notes", "note")
)


class _Image:
    """The map, as rows, before and after a step, and what the scenario speaks of."""

    def __init__(self) -> None:
        self.live = LiveController(ManualClock(0))
        self.foreign = ForeignRecords(self.live, image=True)
        self.stream_id = 0
        self.node_id = 0
        self.previous = self.live.freeze()

    def rows(self) -> MapRows:
        return MapRows(self.live.freeze().sections())

    def replay(self, records: Sequence[Mapping[str, Any]], *, is_snapshot: bool) -> list[Mismatch]:
        """Apply records; of a complete snapshot what is not mentioned is gone."""
        self.previous = self.live.freeze()
        if is_snapshot:
            self.live = LiveController(ManualClock(0))
            self.foreign = ForeignRecords(self.live, image=True)
        for record in records:
            if record.get("type") in ("S3Stream", "S3StreamObject"):
                self.stream_id = record.get("stream", 0)
            if record.get("type") in ("NodeWALMetadata", "S3StreamSetObject"):
                self.node_id = record.get("node", 0)
        return self.foreign.replay([self._with_parents(record) for record in records])

    def _with_parents(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        # A part of an image is replayed without the stream it belongs to.
        stream_id = record.get("stream", 0)
        if record.get("type") == "S3StreamObject" and not self.rows().one(
            "streams", stream_id=stream_id
        ):
            self.foreign.replay([{"type": "S3Stream", "stream": stream_id, "range_index": -1}])
        return record


def run_image(file: str, scenario: Mapping[str, Any]) -> ScenarioResult:
    """Run one scenario."""
    result = ScenarioResult(file, str(scenario.get("name")))
    for key, value in scenario.items():
        if key not in _SCENARIO_FIELDS and not str(key).startswith("derived"):
            result.fail(0, "scenario", [Mismatch(key, value, "unknown field")])
    asyncio.run(_run(scenario, result))
    return result


async def _run(scenario: Mapping[str, Any], result: ScenarioResult) -> None:
    image = _Image()
    result.fail(0, "start", _start(image, scenario.get("start")))
    if scenario.get("start_round_trip"):
        result.fail(0, "start", list(_round_trip(image)))
    for number, step in enumerate(scenario.get("steps") or [], start=1):
        op = "replay" if "replay" in step else "snapshot_round_trip"
        for key, value in step.items():
            if key not in _STEP_FIELDS:
                result.fail(number, op, [Mismatch(f"step.{key}", value, "unknown field")])
        try:
            if "replay" in step:
                is_snapshot = bool(step.get("finish_snapshot", False))
                unknown = image.replay(step["replay"], is_snapshot=is_snapshot)
                result.fail(number, op, unknown)
            if step.get("snapshot_round_trip"):
                result.fail(number, op, list(_round_trip(image)))
            mismatches = list(_check(image, step.get("expect") or {}))
        except Exception as error:  # noqa: BLE001 - a scenario fails, the others go on
            mismatches = [Mismatch("step", "no failure", f"{type(error).__name__}: {error}")]
        result.fail(number, op, mismatches)


def _round_trip(image: _Image) -> Iterator[Mismatch]:
    before, after = image.live.reload()
    yield from compare(before.hex(), after.hex(), "snapshot_round_trip")


def _start(image: _Image, start: object) -> list[Mismatch]:
    if not isinstance(start, Mapping):
        known = (None, "empty", "empty stream", "empty node", "empty image")
        return [] if start in known else [Mismatch("start", start, "unknown start")]
    args = Args(start, "start")
    records: list[Mapping[str, Any]] = []
    if args.has("next_stream_id"):
        records.append({"type": "AssignedStreamId", "assigned": args.take("next_stream_id") - 1})
    records += [
        {"type": "S3Object", "object": object_id, **fields}
        for object_id, fields in (args.take("objects", {}) or {}).items()
    ]
    if args.has("next_object_id"):
        records.append({"type": "AssignedS3ObjectId", "assigned": args.take("next_object_id") - 1})
    for key, value in (args.take("kv", {}) or {}).items():
        records.append({"type": "KV", "entries": [{"key": key, "value": value}]})
    records += _start_of_node(args)
    records += _start_of_stream(args)
    return [*image.replay(records, is_snapshot=False), *args.unknown()]


def _start_of_node(args: Args) -> Iterator[Mapping[str, Any]]:
    if args.has("node"):
        node_id = args.take("node")
        epoch = args.take("node_epoch", -1)
        yield {"type": "NodeWALMetadata", "node": node_id, "node_epoch": epoch}
        for item in args.take("stream_set_objects", []):
            yield {"type": "S3StreamSetObject", "node": node_id, **item}


def _start_of_stream(args: Args) -> Iterator[Mapping[str, Any]]:
    if args.has("stream"):
        fields = {name: args.take(name) for name in ("epoch", "state", "start") if args.has(name)}
        stream_id, ranges = args.take("stream"), args.take("ranges", [])
        yield {"type": "S3Stream", "stream": stream_id, "range_index": -1, **fields}
        for item in ranges:
            yield {"type": "Range", "stream": stream_id, **item}
        for item in args.take("stream_objects", []):
            yield {"type": "S3StreamObject", "stream": stream_id, **item}


# ---- facts ----


def _check(image: _Image, facts: Facts) -> Iterator[Mismatch]:
    is_exact = bool(facts.get("exact", False))
    for name, expected in facts.items():
        path = f"expect.{name}"
        if name == "exact":
            continue
        if name == "previous_image":
            yield from _check_previous(image.previous, expected)
        elif name in _CHECKED:
            yield from _CHECKED[name](image, expected, path, is_exact)
        elif name in _READ:
            yield from compare(expected, _READ[name](image), path)
        else:
            yield Mismatch(path, expected, "unknown field")


def _check_previous(previous: FrozenMap, facts: Facts) -> Iterator[Mismatch]:
    for name, expected in facts.items():
        path = f"expect.previous_image.{name}"
        if name == "uncommitted":
            yield from _compare_owed(_owed(MapRows(previous.sections())), expected, path, False)
        else:
            yield Mismatch(path, expected, "unknown field")


def _owed(rows: MapRows) -> dict[int, dict[int, list[int]]]:
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


def _check_uncommitted(
    image: _Image, expected: Facts, path: str, is_exact: bool
) -> Iterator[Mismatch]:
    yield from _compare_owed(_owed(image.rows()), expected, path, is_exact)


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


def _check_objects(image: _Image, expected: Facts, path: str, is_exact: bool) -> Iterator[Mismatch]:
    actual = {
        row["object_id"]: {
            "state": ObjectState(row["state"]).name,
            "size": row["object_size"],
            "timestamp": row["timestamp_ms"],
            "attributes": row["attributes"],
        }
        for row in image.rows().rows("objects")
    }
    yield from _check_keyed(actual, expected, path, is_exact)


def _check_kv(image: _Image, expected: Facts, path: str, is_exact: bool) -> Iterator[Mismatch]:
    yield from _check_keyed(_kvs(image.rows()), expected, path, is_exact)


def _check_streams(image: _Image, expected: Facts, path: str, is_exact: bool) -> Iterator[Mismatch]:
    rows = image.rows()
    actual = {row["stream_id"]: _stream(rows, row) for row in rows.rows("streams")}
    yield from _check_keyed(actual, expected, path, is_exact)


def _check_nodes(image: _Image, expected: Facts, path: str, is_exact: bool) -> Iterator[Mismatch]:
    actual = {
        row["node_id"]: {
            "node_epoch": row["node_epoch"] - EPOCH_SHIFT,
            "epoch": row["node_epoch"] - EPOCH_SHIFT,
        }
        for row in image.rows().rows("nodes")
    }
    yield from _check_keyed(actual, expected, path, is_exact)


def _check_ends(image: _Image, expected: Facts, path: str, is_exact: bool) -> Iterator[Mismatch]:
    actual = {row["stream_id"]: row["end_offset"] for row in image.rows().rows("streams")}
    yield from _check_keyed(actual, expected, path, is_exact)


def _check_partitions(
    image: _Image, expected: list[Facts], path: str, _: bool
) -> Iterator[Mismatch]:
    partitions = _partitions(image.rows())
    for item in expected:
        key = (item["topic"], item["partition"])
        held = sorted(stream_id for stream_id, found in partitions.items() if found == key)
        yield from compare(sorted(item["streams"]), held, f"{path}{list(key)}")


def _check_stream_partition(
    image: _Image, expected: Facts, path: str, _: bool
) -> Iterator[Mismatch]:
    partitions = _partitions(image.rows())
    for stream_id, value in expected.items():
        found = partitions.get(stream_id)
        yield from compare(value, list(found) if found else None, f"{path}[{stream_id}]")


def _partitions(rows: MapRows) -> dict[int, tuple[str, int]]:
    tags: dict[int, dict[str, str]] = {}
    for row in rows.rows("stream_tags"):
        tags.setdefault(row["stream_id"], {})[row["key"]] = row["value"]
    return {
        stream_id: (held[TOPIC_TAG], int(held[PARTITION_TAG], 16))
        for stream_id, held in tags.items()
        if TOPIC_TAG in held and PARTITION_TAG in held
    }


_CHECKED: dict[str, Callable[[_Image, Any, str, bool], Iterator[Mismatch]]] = {
    "uncommitted": _check_uncommitted,
    "objects": _check_objects,
    "kv": _check_kv,
    "streams": _check_streams,
    "nodes": _check_nodes,
    "stream_end_offsets": _check_ends,
    "partition_streams": _check_partitions,
    "stream_partition": _check_stream_partition,
}


# ---- reading ----


def _kvs(rows: MapRows) -> dict[str, str]:
    return {row["key"]: row["value"].decode() for row in rows.rows("kvs")}


def _stream(rows: MapRows, stream: Row) -> dict[str, Any]:
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
        "state": StreamState(stream["state"]).name,
        "start": stream["start_offset"],
        "end": stream["end_offset"],
        "ranges": ranges,
    }


def _of_stream(name: str) -> Callable[[_Image], Any]:
    def read(image: _Image) -> Any:
        rows = image.rows()
        stream = rows.one("streams", stream_id=image.stream_id)
        return ABSENT if stream is None else _stream(rows, stream)[name]

    return read


def _counter(name: str) -> Callable[[_Image], Any]:
    return lambda image: image.rows().rows("counters")[0][name]


def _node_epoch(image: _Image) -> Any:
    node = image.rows().one("nodes", node_id=image.node_id)
    return ABSENT if node is None else node["node_epoch"] - EPOCH_SHIFT


def _set_object_ids(image: _Image) -> list[int]:
    held = image.rows().rows("objects", kind=int(ObjectKind.STREAM_SET), node_id=image.node_id)
    return [row["object_id"] for row in sorted(held, key=lambda row: row["order_id"])]


def _stream_object_ids(image: _Image) -> list[int]:
    rows = image.rows()
    held = rows.rows("object_ranges", stream_id=image.stream_id)
    kinds = {row["object_id"]: row["kind"] for row in rows.rows("objects")}
    return sorted(
        row["object_id"] for row in held if kinds[row["object_id"]] != ObjectKind.STREAM_SET
    )


def _object_ids(rows: MapRows) -> dict[int, Row]:
    return {row["object_id"]: row for row in rows.rows("objects")}


def _changed_objects(image: _Image) -> list[int]:
    before = _object_ids(MapRows(image.previous.sections()))
    return sorted(key for key, row in _object_ids(image.rows()).items() if before.get(key) != row)


def _removed_objects(image: _Image) -> list[int]:
    before = _object_ids(MapRows(image.previous.sections()))
    return sorted(set(before) - set(_object_ids(image.rows())))


def _changed_keys(image: _Image) -> list[str]:
    # A key that is written again counts, whatever the value: a snapshot names what there is.
    return sorted(_kvs(image.rows()))


def _removed_keys(image: _Image) -> list[str]:
    return sorted(set(_kvs(MapRows(image.previous.sections()))) - set(_kvs(image.rows())))


_READ: dict[str, Callable[[_Image], Any]] = {
    "next_stream_id": _counter("next_stream_id"),
    "next_object_id": _counter("next_object_id"),
    "node_epoch": _node_epoch,
    "stream_set_object_ids": _set_object_ids,
    "stream_object_ids": _stream_object_ids,
    "stream_object_count": lambda image: len(_stream_object_ids(image)),
    "object_ids": lambda image: sorted(_object_ids(image.rows())),
    "changed_objects": _changed_objects,
    "removed_objects": _removed_objects,
    "changed_keys": _changed_keys,
    "removed_keys": _removed_keys,
    **{name: _of_stream(name) for name in ("stream", "epoch", "state", "start", "end", "ranges")},
}


# ---- codecs ----


def run_codec(file: str, entry: Mapping[str, Any]) -> ScenarioResult:
    """See that our records carry the same facts there and back."""
    result = ScenarioResult(file, str(entry.get("name")))
    rule = rules()["own-record-encoding"]
    rows = entry.get("input") or []
    if not rows or any(set(row) != {"stream", "end"} for row in rows):
        result.fail(1, "codec", [Mismatch("input", rows, "unknown codec")])
        return result
    result.deviations.append(Deviation(1, "codec", rule.feature, rule.reason))
    record = StreamsClosed(
        stream_id=column([row["stream"] for row in rows]),
        end_offset=column([row["end"] for row in rows]),
    )
    (decoded,) = decode_records(encode_records([record]))
    assert isinstance(decoded, StreamsClosed)
    pairs = zip(decoded.stream_id.tolist(), decoded.end_offset.tolist(), strict=True)
    actual = {"decode_equals_input": [{"stream": s, "end": e} for s, e in pairs] == rows}
    result.fail(1, "codec", list(compare(entry.get("expect") or {}, actual, "expect")))
    return result
