"""The facts a scenario asserts about the state after a step, read back from the controller.

Every field is read through the same calls a client has, save a few that the contract keeps to
itself (the next stream id, what is owed of streams that no longer need it): those come from the
sections of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from streammeta.controller.metadata.api.answers import (
    NodeDescription,
    ObjectDescription,
    StreamDescription,
)
from streammeta.controller.metadata.api.requests import CheckObjects, GetKVs, KVKey
from streammeta.controller.metadata.tables.values import ObjectState, StreamState
from tests.conformance.conformance_report import ABSENT, Mismatch, compare
from tests.conformance.foreign_records import EPOCH_SHIFT
from tests.conformance.scenario_run import ScenarioRun

Facts = Mapping[Any, Any]


async def check_state(
    run: ScenarioRun, facts: Facts, path: str = "state_after", *, is_complete: bool = False
) -> list[Mismatch]:
    """Return the facts that don't hold; `is_complete`: what is owed is all that is owed."""
    found: list[Mismatch] = []
    for name, expected in facts.items():
        where = f"{path}.{name}"
        if name == "nodes":
            found += await _check_nodes(run, expected, where, is_complete)
        elif name in _CHECKED:
            found += await _CHECKED[name](run, expected, where)
        elif (value := await _value(run, name)) is ABSENT:
            found.append(Mismatch(where, expected, "unknown field"))
        elif isinstance(expected, list):
            found += compare(sorted(expected), sorted(value), where)
        else:
            found += compare(expected, value, where)
    return found


def _keyed(
    expected: Facts, items: Facts, path: str, check: Callable[[Any, Any, str], Iterable[Mismatch]]
) -> Iterator[Mismatch]:
    """Yield what does not hold of items by key; of one that must not be there None is expected."""
    for key, fields in expected.items():
        where, item = f"{path}[{key}]", items.get(key)
        if fields is not None and item is not None:
            yield from check(fields, item, where)
        elif item is not None:
            yield Mismatch(where, "does not exist", "exists")
        elif fields is not None:
            yield Mismatch(where, fields, "does not exist")


# ---- streams ----


async def _check_streams(run: ScenarioRun, expected: Facts, path: str) -> Iterator[Mismatch]:
    def check(fields: Facts, stream: StreamDescription, where: str) -> Iterator[Mismatch]:
        actual = stream_fields(stream)
        recorded = run.foreign.recorded_ends.get(stream.stream_id)
        yield from compare(_with_true_end(dict(fields), actual, recorded), actual, where)

    return _keyed(expected, await run.streams(), path, check)


def stream_fields(stream: StreamDescription) -> dict[str, Any]:
    ranges = [
        {
            "index": item.range_index,
            "epoch": item.epoch,
            "node": item.node_id,
            "start": item.start_offset,
            "end": item.end_offset,
        }
        for item in sorted(stream.ranges, key=lambda item: item.range_index)
    ]
    current = next((item for item in ranges if item["index"] == stream.range_index), None)
    return {
        "state": StreamState(stream.state).name,
        "epoch": stream.epoch,
        "range_index": stream.range_index,
        "start": stream.start_offset,
        "end": stream.end_offset,
        "owner": stream.node_id,
        "range_count": len(ranges),
        "ranges": ranges,
        "current_range": current,
        "stream_objects": [
            {"object": item.object_id, "start": item.start_offset, "end": item.end_offset}
            for item in stream.stream_objects
        ],
        "stream_object_count": len(stream.stream_objects),
        "tags": dict(stream.tags),
    }


def _with_true_end(
    wanted: dict[str, Any], actual: Mapping[str, Any], recorded: int | None
) -> dict[str, Any]:
    """Replace the recorded end of the current range by the stream's, which ours is.

    The scenarios' current range keeps the end it had when it was written; only that end is
    replaced, any other stays and fails.
    """
    current = actual["current_range"]
    if current is None or recorded is None:
        return wanted
    true_end = current["end"]

    def corrected(item: Mapping[str, Any]) -> dict[str, Any]:
        is_recorded = item.get("end") == recorded
        return {**item, "end": true_end} if is_recorded else dict(item)

    if isinstance(wanted.get("current_range"), dict):
        wanted["current_range"] = corrected(wanted["current_range"])
    if isinstance(wanted.get("ranges"), list):
        index, last = current["index"], len(wanted["ranges"]) - 1
        wanted["ranges"] = [
            corrected(item) if item.get("index", index if at == last else -1) == index else item
            for at, item in enumerate(wanted["ranges"])
        ]
    held = wanted.get("stream_objects")
    if held and all(isinstance(item, int) for item in held):
        wanted["stream_objects"] = [{"object": item} for item in held]
    return wanted


async def _check_opening(run: ScenarioRun, expected: Facts, path: str) -> Iterator[Mismatch]:
    opening: dict[int, list[int]] = {node_id: [] for node_id in expected}
    for stream in (await run.streams()).values():
        if stream.state is StreamState.OPENED:
            opening.setdefault(stream.node_id, []).append(stream.stream_id)
    return _keyed(expected, opening, path, compare)


# ---- nodes ----


async def _check_nodes(
    run: ScenarioRun, expected: Facts, path: str, is_complete: bool
) -> Iterator[Mismatch]:
    pending = run.pending_uploads()

    def check(fields: Facts, node: NodeDescription, where: str) -> Iterator[Mismatch]:
        owed = {key: list(span) for key, span in pending.get(node.node_id, {}).items()}
        actual = _node_fields(node, owed)
        for name, value in fields.items():
            yield from _check_node_field(run, actual, name, value, f"{where}.{name}", is_complete)

    return _keyed(expected, await run.nodes(), path, check)


def _node_fields(node: NodeDescription, owed: Mapping[int, list[int]]) -> dict[str, Any]:
    held = node.stream_set_objects
    return {
        "epoch": node.node_epoch - EPOCH_SHIFT,
        "failover": node.failover,
        "stream_set_objects": sorted(item.object_id for item in held),
        "stream_set_object_count": node.stream_set_object_count,
        "order_ids": {item.object_id: item.order_id for item in held},
        "data_times": {item.object_id: item.data_time_ms for item in held},
        "uncommitted": owed,
        "uncommitted_empty": not owed,
        "wal_config": node.wal_config,
        "tags": dict(node.tags),
        "locked": node.locked,
    }


def _check_node_field(
    run: ScenarioRun, actual: Mapping[str, Any], name: str, value: Any, path: str, is_complete: bool
) -> Iterator[Mismatch]:
    if name == "stream_set_objects":
        yield from compare(sorted(value), actual[name], path)
    elif name == "contains_stream_set_objects":
        for object_id in value if isinstance(value, list) else [value]:
            if object_id not in actual["stream_set_objects"]:
                yield Mismatch(path, object_id, actual["stream_set_objects"])
    elif name == "data_time_same_as_was":
        for object_id, earlier in value.items():
            wanted = run.data_times.get(earlier, ABSENT)
            yield from compare(wanted, actual["data_times"].get(object_id, ABSENT), path)
    elif name == "uncommitted":
        owed = actual[name]
        for stream_id, span in value.items():
            left = ABSENT if span is None else list(span)
            yield from compare(left, owed.get(stream_id, ABSENT), f"{path}[{stream_id}]")
        if is_complete and set(owed) - set(value):
            yield Mismatch(path, value, owed)
    else:
        yield from compare(value, actual.get(name, ABSENT), path)


async def _check_has_opening(run: ScenarioRun, expected: Facts, path: str) -> Iterator[Mismatch]:
    # There an upload that is still owed counts as an open stream; here it has its own count.
    busy = {
        node.node_id: node.has_opening_streams or node.pending_upload_count > 0
        for node in (await run.nodes()).values()
    }
    return _keyed(expected, dict.fromkeys(expected, False) | busy, path, compare)


# ---- objects ----


def _object_fields(item: ObjectDescription) -> dict[str, Any]:
    return {
        "state": item.state.name,
        "timestamp_ms": item.timestamp_ms,
        "timestamp": item.timestamp_ms,
        "size": item.object_size,
        "attributes": item.attributes,
    }


async def _present_objects(run: ScenarioRun) -> dict[int, ObjectDescription]:
    # A linked object is kept for its composite alone: in the scenarios it is forgotten.
    return {
        object_id: item
        for object_id, item in (await run.objects()).items()
        if item.state is not ObjectState.LINKED
    }


def _check_object(fields: Facts | str, item: ObjectDescription, where: str) -> Iterator[Mismatch]:
    wanted = {"state": fields} if isinstance(fields, str) else fields
    yield from compare(wanted, _object_fields(item), where)


async def _check_objects(run: ScenarioRun, expected: Facts, path: str) -> Iterator[Mismatch]:
    return _keyed(expected, await _present_objects(run), path, _check_object)


async def _check_all_objects(run: ScenarioRun, expected: Any, path: str) -> Iterator[Mismatch]:
    present = await _present_objects(run)
    return _keyed(dict.fromkeys(present, expected), present, path, _check_object)


# ---- keys ----


async def _check_kv_present(
    run: ScenarioRun, expected: list[Facts], path: str, *, wanted: bool = True
) -> list[Mismatch]:
    found = []
    for item in expected:
        key = KVKey(namespace=item.get("namespace") or "", key=item["key"])
        answer = await run.live.read(GetKVs(keys=(key,)))
        if answer.results[0].found is not wanted:
            found.append(Mismatch(path, item, "no such key" if wanted else "key exists"))
    return found


_CHECKED: dict[str, Callable[[ScenarioRun, Any, str], Awaitable[Iterable[Mismatch]]]] = {
    "streams": _check_streams,
    "objects": _check_objects,
    "all_objects": _check_all_objects,
    "has_opening_streams": _check_has_opening,
    "opening_stream_ids": _check_opening,
    "kv_present": _check_kv_present,
    "kv_absent": partial(_check_kv_present, wanted=False),
}


# ---- single values ----


async def _value(run: ScenarioRun, name: str) -> Any:
    """Return a fact that is one value, ABSENT if there is no such fact."""
    match name:
        case "next_stream_id":
            return run.next_stream_id()
        case "next_object_id":
            return (await run.live.read(CheckObjects(object_ids=(0,)))).next_object_id
        case "stream_count":
            return len(await run.streams())
        case "object_count":
            return len(await _present_objects(run))
        case "storage_delete_calls":
            return len(run.storage.store.requests)
        case "last_storage_delete_keys":
            return next(reversed(run.storage.store.requests), ())
        case "expiry_pending":
            objects = (await run.objects()).values()
            return [item.object_id for item in objects if item.state is ObjectState.PREPARED]
        case "registered_nodes":
            return [node.node_id for node in (await run.nodes()).values() if not node.departed]
        case "pending_topic_deletions":
            return await run.pending_topic_deletions()
    return ABSENT
