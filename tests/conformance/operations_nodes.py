"""Operations on nodes and keys, and on the sessions that say which nodes are there."""

from __future__ import annotations

from typing import Any

from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import KVResult
from streammeta.controller.metadata.api.requests import OpenStreams, StreamToOpen
from streammeta.controller.metadata.tables.values import NodeIdentity, StreamState
from streammeta.controller.records.codec import RecordCodecError
from streammeta.controller.records.record import RangesRemoved
from tests.conformance.foreign_records import EPOCH_SHIFT, ForeignRecords, node_records
from tests.conformance.live_controller import LiveController
from tests.conformance.map_rows import MetadataRows
from tests.conformance.scenario_args import Args
from tests.conformance.scenario_run import SERVICE, Outcome, ScenarioRun, error_name

NAMESPACES_LEVEL = 5
LOCK_TAG = "CIRCUIT_BREAKER"
UNLOCKED = "CLOSED"


async def register_node(run: ScenarioRun, args: Args) -> Outcome:
    """Register a node; a tag that locks it in the scenarios locks it by the operator's call."""
    node = run.node(args.take("node"), args.take("node_epoch", 0))
    wal_config, tags = args.take("wal_config", ""), dict(args.take("tags", {}) or {})
    known = (await run.nodes()).get(node.node_id)
    pairs = tuple((str(key), str(value)) for key, value in sorted(tags.items()))
    same = known is not None and (known.node_epoch, known.wal_config, known.tags) == (
        node.node_epoch,
        wal_config,
        pairs,
    )
    stored = known.node_epoch if known is not None else -1
    features = ["node-registered-already"] if same else []
    if run.is_behind_other_registry("nodes", node, stored):
        features.append("registries-are-one")
    request = requests.RegisterNode(node=node, wal_config=wal_config, tags=pairs)
    answer, records = await run.send(request)
    error = error_name(answer.error)
    locked = str(tags.get(LOCK_TAG, UNLOCKED)) != UNLOCKED
    was_locked = known is not None and known.locked
    if error == "NONE" and not run.dry_run and locked is not was_locked:
        features.append("node-locked-by-operator")
        await run.live.write(requests.SetNodeLock(node_id=node.node_id, locked=locked))
    return Outcome({"error": error}, features, records)


async def unregister_node(run: ScenarioRun, args: Args) -> Outcome:
    """Unregister a node under its present epoch unless one is given."""
    node_id, epoch = args.take("node"), args.take("node_epoch", None)
    known = (await run.nodes()).get(node_id)
    present = known.node_epoch if known is not None else 0
    node = NodeIdentity(node_id, present if epoch is None else epoch + EPOCH_SHIFT)
    answer, records = await run.send(requests.UnregisterNode(node=node))
    features = [] if known is not None else ["node-forgotten-already"]
    error = error_name(answer.error)
    refused = {} if error == "NONE" else {"raises": error}
    return Outcome({"error": error, **refused}, features, records)


async def get_nodes(run: ScenarioRun, args: Args) -> Outcome:
    """Describe nodes; what the scenario gives besides is not the map's: states and ownership."""
    node_ids = tuple(args.take("nodes", []) or [])
    states, owning = run.given.take("node_state", {}), run.given.take("has_opening_streams", {})
    answer = await run.live.read(requests.GetNodes(node_ids=node_ids))
    nodes = [
        {
            "node": node.node_id,
            "node_epoch": node.node_epoch - EPOCH_SHIFT,
            "wal_config": node.wal_config,
            "tags": dict(node.tags),
            "state": states.get(node.node_id, "UNKNOWN"),
            "has_opening_streams": owning.get(node.node_id, node.has_opening_streams),
        }
        for node in answer.nodes
        if node.node_id != SERVICE.node_id
    ]
    return Outcome({"error": "NONE", "nodes": nodes})


async def get_next_node_id(run: ScenarioRun, _: Args) -> Outcome:
    answer, records = await run.send(requests.GetNextNodeId(request_id=run.request_id()))
    return Outcome({"error": "NONE", "node_id": answer.node_id}, records=records)


async def put_kv(run: ScenarioRun, args: Args) -> Outcome:
    namespace, key = _namespace(run, args), args.take("key")
    item = requests.KVToPut(
        namespace=namespace,
        key=key,
        value=str(args.take("value")).encode(),
        overwrite=bool(args.take("overwrite", False)),
    )
    run.is_malformed = not key
    answer, records = await run.send(requests.PutKVs(items=(item,)))
    return Outcome(_value(answer.results[0]), records=records)


async def get_kv(run: ScenarioRun, args: Args) -> Outcome:
    key = requests.KVKey(namespace=_namespace(run, args), key=args.take("key"))
    run.is_malformed = not key.key
    answer = await run.live.read(requests.GetKVs(keys=(key,)))
    return Outcome(_value(answer.results[0]))


async def delete_kv(run: ScenarioRun, args: Args) -> Outcome:
    key = requests.KVKey(namespace=_namespace(run, args), key=args.take("key"))
    run.is_malformed = not key.key
    answer, records = await run.send(requests.DeleteKVs(keys=(key,)))
    return Outcome(_value(answer.results[0]), records=records)


def _namespace(run: ScenarioRun, args: Args) -> str:
    namespace = args.take("namespace", None)
    return "" if namespace is None or run.level < NAMESPACES_LEVEL else str(namespace)


def _value(result: KVResult) -> dict[str, Any]:
    value = result.value.decode() if result.found else None
    return {"error": error_name(result.error), "value": value}


# ---- state ----


async def inject_records(run: ScenarioRun, args: Args) -> Outcome:
    """Replay records; one that the log refuses raises as a malformed argument would."""
    try:
        run.foreign.replay(args.take("records"))
    except RecordCodecError as error:
        return Outcome({"raises": "IllegalArgument", "error": str(error)})
    return Outcome({"error": "NONE"})


async def set_state(run: ScenarioRun, args: Args) -> Outcome:
    with run.live.edited() as rows:
        for item in args.each("streams", []):
            _set_stream(rows, item)
        for stream_id in args.take("removed_streams", []) or []:
            for section in ("streams", "stream_tags", "ranges"):
                rows.drop(section, stream_id=stream_id)
        for item in args.take("kv_keys", []) or []:
            named = item if isinstance(item, dict) else {"key": item}
            key = {"namespace": named.get("namespace") or "", "key": named["key"]}
            rows.put("kvs", key, value=str(named.get("value", "")).encode(), version=1)
        for key in args.take("removed_kv_keys", []) or []:
            rows.drop("kvs", namespace="", key=key)
    return Outcome({"error": "NONE"})


def _set_stream(rows: MetadataRows, item: Args) -> None:
    stream_id, start = item.take("stream"), item.take("start", 0)
    rows.put(
        "streams",
        {"stream_id": stream_id},
        epoch=item.take("epoch", 0),
        range_index=-1,
        start_offset=start,
        end_offset=item.take("end", start),
        state=int(StreamState[item.take("state", "CLOSED")]),
    )
    rows.drop("stream_tags", stream_id=stream_id)
    for key, value in sorted((item.take("tags", {}) or {}).items()):
        rows.put("stream_tags", {"stream_id": stream_id, "key": str(key)}, value=str(value))
    counters = rows.counters
    counters["next_stream_id"] = max(counters["next_stream_id"], stream_id + 1)


async def removable_ranges(run: ScenarioRun, args: Args) -> Outcome:
    """Ask which ranges opening a stream would drop, of a stream made up on the side."""
    ranges, current = list(args.take("ranges")), args.take("current_range_index", None)
    objects = list(args.take("stream_objects", []) or [])
    generated = args.take("stream_objects_generated", None)
    if generated:
        step = generated["step"]
        objects += [
            {"object": i, "start": step * i, "end": step * (i + 1)}
            for i in range(generated["count"])
        ]
    last = max(item["index"] for item in ranges)
    epoch = max(item["epoch"] for item in ranges)
    live = LiveController(run.clock)
    start = min((item["start"] for item in [*ranges, *objects]), default=0)
    records: list[dict[str, Any]] = [
        *node_records(SERVICE.node_id, -1, ()),
        {
            "type": "S3Stream",
            "stream": 0,
            "epoch": epoch,
            "range_index": last if current is None else current,
            "start": start,
        },
        *({"type": "Range", "stream": 0, **item} for item in ranges),
        *({"type": "S3StreamObject", "stream": 0, **item} for item in objects),
    ]
    ForeignRecords(live).replay(records)
    item = StreamToOpen(0, epoch + 1)
    _, decided = live.judge(OpenStreams(node=SERVICE, streams=(item,)))
    removed = [
        index
        for record in decided
        if isinstance(record, RangesRemoved)
        for index in record.range_index.tolist()
    ]
    return Outcome({"removable": removed})
