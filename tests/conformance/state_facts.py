"""The facts a scenario asserts about the state after a step, read back from the controller.

Every field is read through the same calls a client has, save a few that the contract keeps to
itself (the next stream id, what is owed of streams that no longer need it): those come from the
sections of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from streammeta.controller.metadata.answers import (
    NodeDescription,
    ObjectDescription,
    StreamDescription,
)
from streammeta.controller.metadata.requests import CheckObjects, GetKVs, KVKey
from streammeta.controller.metadata.values import ObjectState, StreamState
from tests.conformance.conformance_report import ABSENT, Mismatch, compare
from tests.conformance.foreign_records import EPOCH_SHIFT
from tests.conformance.map_rows import MapRows
from tests.conformance.operations_lifecycle import pending_topic_deletions
from tests.conformance.scenario_run import ScenarioRun

Facts = Mapping[Any, Any]


async def check_state(
    run: ScenarioRun, facts: Facts, path: str = "state_after", *, is_complete: bool = False
) -> list[Mismatch]:
    """Return the facts that don't hold; `is_complete`: what is owed is all that is owed."""
    found: list[Mismatch] = []
    for name, expected in facts.items():
        check = _FACTS.get(name)
        if check is None:
            found.append(Mismatch(f"{path}.{name}", expected, "unknown field"))
        elif name == "nodes" and is_complete:
            found.extend(await _check_nodes(run, expected, f"{path}.{name}", is_complete=True))
        else:
            found.extend(await check(run, expected, f"{path}.{name}"))
    return found


# ---- streams ----


async def _check_streams(run: ScenarioRun, expected: Facts, path: str) -> list[Mismatch]:
    streams = await run.streams()
    found: list[Mismatch] = []
    for stream_id, fields in expected.items():
        where = f"{path}[{stream_id}]"
        stream = streams.get(stream_id)
        if fields is None or stream is None:
            found += _check_presence(fields, stream, where)
            continue
        actual = stream_fields(stream)
        recorded = run.foreign.recorded_ends.get(stream_id)
        wanted = _with_true_end(dict(fields), actual, recorded)
        found += compare(wanted, actual, where)
    return found


def stream_fields(stream: StreamDescription) -> dict[str, Any]:
    """Return a stream in the words of the facts."""
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


def _check_presence(fields: object, item: object, path: str) -> Iterator[Mismatch]:
    if fields is None and item is not None:
        yield Mismatch(path, "does not exist", "exists")
    if fields is not None and item is None:
        yield Mismatch(path, fields, "does not exist")


async def _check_next_stream_id(run: ScenarioRun, expected: int, path: str) -> list[Mismatch]:
    counters = MapRows(run.live.freeze().sections()).rows("counters")[0]
    return list(compare(expected, counters["next_stream_id"], path))


async def _check_stream_count(run: ScenarioRun, expected: int, path: str) -> list[Mismatch]:
    return list(compare(expected, len(await run.streams()), path))


async def _check_opening(run: ScenarioRun, expected: Facts, path: str) -> list[Mismatch]:
    streams = (await run.streams()).values()
    return [
        mismatch
        for node_id, stream_ids in expected.items()
        for mismatch in compare(
            stream_ids,
            [
                stream.stream_id
                for stream in streams
                if stream.node_id == node_id and stream.state is StreamState.OPENED
            ],
            f"{path}[{node_id}]",
        )
    ]


# ---- nodes ----


async def _check_nodes(
    run: ScenarioRun, expected: Facts, path: str, *, is_complete: bool = False
) -> list[Mismatch]:
    nodes, pending = await run.nodes(), run.pending_uploads()
    found: list[Mismatch] = []
    for node_id, fields in expected.items():
        where = f"{path}[{node_id}]"
        node = nodes.get(node_id)
        if fields is None or node is None:
            found += _check_presence(fields, node, where)
            continue
        owed = {key: list(span) for key, span in pending.get(node_id, {}).items()}
        actual = _node_fields(node, owed)
        for name, value in fields.items():
            found += _check_node_field(run, actual, name, value, f"{where}.{name}", is_complete)
    return found


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
    run: ScenarioRun,
    actual: Mapping[str, Any],
    name: str,
    value: Any,
    path: str,
    is_complete: bool,
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


async def _check_has_opening(run: ScenarioRun, expected: Facts, path: str) -> list[Mismatch]:
    nodes = await run.nodes()
    found: list[Mismatch] = []
    for node_id, value in expected.items():
        node = nodes.get(node_id)
        # There an upload that is still owed counts as an open stream; here it has its own count.
        actual = node is not None and (node.has_opening_streams or node.pending_upload_count > 0)
        found += compare(value, actual, f"{path}[{node_id}]")
    return found


async def _check_registered(run: ScenarioRun, expected: list[int], path: str) -> list[Mismatch]:
    present = sorted(node.node_id for node in (await run.nodes()).values() if not node.departed)
    return list(compare(sorted(expected), present, path))


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


async def _check_objects(run: ScenarioRun, expected: Facts, path: str) -> list[Mismatch]:
    objects = await _present_objects(run)
    found: list[Mismatch] = []
    for object_id, fields in expected.items():
        where, item = f"{path}[{object_id}]", objects.get(object_id)
        if fields is None or item is None:
            found += _check_presence(fields, item, where)
            continue
        wanted = {"state": fields} if isinstance(fields, str) else fields
        found += compare(wanted, _object_fields(item), where)
    return found


async def _check_all_objects(run: ScenarioRun, expected: Any, path: str) -> list[Mismatch]:
    wanted = {"state": expected} if isinstance(expected, str) else expected
    return [
        mismatch
        for object_id, item in (await _present_objects(run)).items()
        for mismatch in compare(wanted, _object_fields(item), f"{path}[{object_id}]")
    ]


async def _check_object_count(run: ScenarioRun, expected: int, path: str) -> list[Mismatch]:
    return list(compare(expected, len(await _present_objects(run)), path))


async def _check_next_object_id(run: ScenarioRun, expected: int, path: str) -> list[Mismatch]:
    answer = await run.live.read(CheckObjects(object_ids=(0,)))
    return list(compare(expected, answer.next_object_id, path))


async def _check_expiry_pending(run: ScenarioRun, expected: list[int], path: str) -> list[Mismatch]:
    waiting = [
        item.object_id
        for item in (await run.objects()).values()
        if item.state is ObjectState.PREPARED
    ]
    return list(compare(sorted(expected), sorted(waiting), path))


async def _check_delete_calls(run: ScenarioRun, expected: int, path: str) -> list[Mismatch]:
    return list(compare(expected, len(run.storage.store.calls), path))


async def _check_delete_keys(run: ScenarioRun, expected: list[str], path: str) -> list[Mismatch]:
    calls = run.storage.store.calls
    return list(compare(sorted(expected), sorted(calls[-1]) if calls else ABSENT, path))


# ---- keys ----


async def _is_there(run: ScenarioRun, item: Facts) -> bool:
    key = KVKey(namespace=item.get("namespace") or "", key=item["key"])
    answer = await run.live.read(GetKVs(keys=(key,)))
    return bool(answer.results[0].found)


async def _check_kv_present(run: ScenarioRun, expected: list[Facts], path: str) -> list[Mismatch]:
    return [
        Mismatch(path, item, "no such key") for item in expected if not await _is_there(run, item)
    ]


async def _check_kv_absent(run: ScenarioRun, expected: list[Facts], path: str) -> list[Mismatch]:
    return [Mismatch(path, item, "key exists") for item in expected if await _is_there(run, item)]


async def _check_topics(run: ScenarioRun, expected: list[str], path: str) -> list[Mismatch]:
    return list(compare(sorted(expected), sorted(await pending_topic_deletions(run)), path))


_FACTS: dict[str, Callable[[ScenarioRun, Any, str], Awaitable[list[Mismatch]]]] = {
    "streams": _check_streams,
    "nodes": _check_nodes,
    "objects": _check_objects,
    "next_stream_id": _check_next_stream_id,
    "next_object_id": _check_next_object_id,
    "stream_count": _check_stream_count,
    "object_count": _check_object_count,
    "all_objects": _check_all_objects,
    "has_opening_streams": _check_has_opening,
    "opening_stream_ids": _check_opening,
    "expiry_pending": _check_expiry_pending,
    "storage_delete_calls": _check_delete_calls,
    "last_storage_delete_keys": _check_delete_keys,
    "registered_nodes": _check_registered,
    "kv_present": _check_kv_present,
    "kv_absent": _check_kv_absent,
    "pending_topic_deletions": _check_topics,
}
