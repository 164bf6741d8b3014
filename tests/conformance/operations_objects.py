"""Operations on objects: prepare, commit, compact, and the registry's own steps beneath them.

Where a scenario leaves out what the contract asks for it is filled in: the stream's present epoch
and owner for a commit that is not to check them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.tables.values import (
    NodeIdentity,
    ObjectState,
    RangeColumns,
    SourceOperation,
    StreamObjectColumns,
    column,
)
from streammeta.controller.records.record import ObjectsDestroyed, ObjectsRemoved
from tests.conformance.compaction_facts import (
    Before,
    Spans,
    malformed_rows,
    put_merge,
    put_set_compaction,
    set_object_features,
    stream_object_features,
)
from tests.conformance.scenario_args import Args
from tests.conformance.scenario_run import SERVICE, Outcome, ScenarioRun, error_name

TTL_MS_MIN = 1_000
TTL_MS_MAX = 7 * 24 * 3_600_000
COUNT_MAX = 10_000
NO_OBJECT = -1
KIND_BITS, COMPOSITE_KIND = 0b11, 1
BY_HAND = frozenset(("outputs-do-not-cover", "foreign-source"))
"""Conditions under which a compaction is refused here and made in the scenarios."""


async def commit_stream_set_object(run: ScenarioRun, args: Args) -> Outcome:
    """Commit an upload, or with `compacted` a compaction."""
    node = run.node(args.take("node"), args.take("node_epoch", 0))
    object_id, sources = args.take("object", 0), list(args.take("compacted", []) or [])
    ranges = _rows(args, "ranges", {"epoch": -1})
    objects = _rows(args, "stream_objects", {"object": None, "size": 0, "attributes": 0})
    before = Before(await run.streams(), await run.objects())
    replaces = sources == [object_id]
    is_hollow = object_id != NO_OBJECT and not ranges and not replaces
    if is_hollow:
        # A set object holds something here: part of a stream that is not there.
        beyond = max([row["stream"] for row in objects], default=-1) + 1
        nothing = max(run.next_stream_id(), beyond)
        ranges = [{"stream": nothing, "start": 0, "end": 1}]
    request = requests.CommitStreamSetObject(
        node=node,
        object_id=object_id,
        order_id=args.take("order", 0),
        object_size=args.take("size", 0),
        attributes=args.take("attributes", 0),
        ranges=RangeColumns(**_columns([] if replaces else ranges, _SPAN)),
        stream_objects=StreamObjectColumns(
            **_columns([] if replaces else objects, _SPAN | _OBJECT)
        ),
        compacted_object_ids=column(sources),
        failover=bool(args.take("failover", False)),
    )
    is_bare = object_id == NO_OBJECT and not (objects or sources)
    is_homeless = object_id == NO_OBJECT and bool(ranges)
    malformed = malformed_rows([*ranges, *objects]) or is_bare or is_homeless
    run.is_malformed = not replaces and malformed
    made = [object_id] if object_id != NO_OBJECT else [row["object"] for row in objects[:1]]
    content = repr((request.order_id, request.object_size, request.attributes, ranges, objects))
    features: list[str] = []
    if await _passes_node_check(run, node, failover=request.failover):
        features = await _repeats(run, before, made, sources, content)
        others = [row["object"] for row in objects]
        if replaces:
            features = _replaces_nothing(before, object_id, request.attributes)
        elif not features and _are_prepared(before, made):
            if any(before.is_committed(other) for other in others):
                features = ["stream-object-committed-already"]
            elif sources and _are_prepared(before, others):
                outputs = _outputs([*ranges, *objects])
                features = set_object_features(before, node.node_id, object_id, sources, outputs)
    streams = [row["stream"] for row in (*ranges, *objects)]
    answer, records, is_beyond = await run.send_about(streams, request)
    if BY_HAND.intersection(features) and run.expects_success and not run.dry_run:
        records = run.live.take_records()
        put_set_compaction(run, request, before)
    elif answer.error is ErrorCode.NONE and not replaces and not run.dry_run:
        for result in made:
            run.contents.setdefault(result, content)
    if is_hollow:
        features.append("set-object-without-ranges")
    elif is_beyond:
        features.append("stream-never-created")
    return Outcome({"error": error_name(answer.error)}, features, records)


async def commit_stream_object(run: ScenarioRun, args: Args) -> Outcome:
    node = run.node(args.take("node", 0), args.take("node_epoch", 0))
    stream_id, epoch = args.take("stream"), args.take("stream_epoch", -1)
    before = Before(await run.streams(), await run.objects())
    passes = await _passes_node_check(run, node, failover=False)
    if epoch == -1:
        epoch, node = await _as_owner(run, node, stream_id)
    request = requests.CommitStreamObject(
        node=node,
        object_id=args.take("object", NO_OBJECT),
        object_size=args.take("size", 0),
        stream_id=stream_id,
        stream_epoch=epoch,
        start_offset=args.take("start", -1),
        end_offset=args.take("end", -1),
        attributes=args.take("attributes", 0),
        source_object_ids=column(args.take("sources", []) or []),
        operations=_operations(args.take("operations", [])),
    )
    run.is_malformed = _is_malformed_merge(request)
    features = await _merge_features(run, before, request) if passes else []
    if not passes and request.source_object_ids.tolist() == [request.object_id]:
        features = ["node-epoch-of-replacement"]
    answer, records = await run.send(request)
    if BY_HAND.intersection(features) and run.expects_success and not run.dry_run:
        records = run.live.take_records()
        put_merge(run, request, before)
    elif answer.error is ErrorCode.NONE and request.object_id >= 0 and not run.dry_run:
        run.contents.setdefault(request.object_id, _merge_content(request))
    return Outcome({"error": error_name(answer.error)}, features, records)


async def _merge_features(
    run: ScenarioRun, before: Before, request: requests.CommitStreamObject
) -> list[str]:
    """Return the conditions of a compaction of stream objects by a node that may act."""
    stream = before.streams.get(request.stream_id)
    sources, object_id = request.source_object_ids.tolist(), request.object_id
    if stream is None:
        return ["stream-of-compaction-missing"]
    if (stream.epoch, stream.node_id) != (request.stream_epoch, request.node.node_id):
        return []
    if sources == [object_id]:
        return _replaces_nothing(before, object_id, request.attributes)
    made = [] if object_id == NO_OBJECT else [object_id]
    features = await _repeats(run, before, made, sources, _merge_content(request))
    if features or not _are_prepared(before, made):
        return features
    span = (request.start_offset, request.end_offset)
    outputs: Spans = {request.stream_id: [span]} if made else {}
    operations = request.operations or (SourceOperation.DELETE,) * len(sources)
    chosen = dict(zip(sources, operations, strict=True))
    if any(
        _are_prepared(before, [source]) and operation is not SourceOperation.DELETE
        for source, operation in chosen.items()
    ):
        return ["foreign-source"]
    return stream_object_features(before, request.stream_id, sources, outputs)


def _merge_content(request: requests.CommitStreamObject) -> str:
    span = (request.stream_id, request.start_offset, request.end_offset)
    sources = (request.source_object_ids.tolist(), request.operations)
    return repr((span, request.object_size, request.attributes, sources))


def _replaces_nothing(before: Before, object_id: int, attributes: int) -> list[str]:
    item = before.objects.get(object_id)
    is_same = before.is_committed(object_id) and item is not None and item.attributes == attributes
    return ["attributes-replaced-again"] if is_same else []


def _are_prepared(before: Before, object_ids: Sequence[int]) -> bool:
    items = (before.objects.get(object_id) for object_id in object_ids)
    return all(item is not None and item.state is ObjectState.PREPARED for item in items)


def _outputs(rows: Sequence[dict[str, Any]]) -> Spans:
    found: Spans = {}
    for row in rows:
        found.setdefault(row["stream"], []).append((row["start"], row["end"]))
    return found


async def prepare_object(run: ScenarioRun, args: Args) -> Outcome:
    """Issue ids in the runner's name: those calls are not fenced in the scenarios."""
    args.take("node", 0), args.take("node_epoch", 0)
    count, ttl_ms = args.take("count"), args.take("ttl_ms")
    is_short = 0 < ttl_ms < TTL_MS_MIN
    request = requests.PrepareObjects(
        request_id=run.request_id(),
        node=SERVICE,
        count=count,
        ttl_ms=TTL_MS_MIN if is_short else ttl_ms,
    )
    run.is_malformed = not 1 <= count <= COUNT_MAX or not 0 < ttl_ms <= TTL_MS_MAX
    features = ["ttl-below-minimum"] if is_short else []
    answer, records = await run.send(request)
    first = answer.first_object_id
    if is_short and not run.dry_run:
        records = run.live.take_records()
        with run.live.edited() as rows:
            for object_id in range(first, first + count):
                key = {"object_id": object_id}
                rows.put("objects", key, timestamp_ms=run.clock.now_ms + ttl_ms)
    return Outcome({"error": error_name(answer.error), "first_object_id": first}, features, records)


async def commit_object(run: ScenarioRun, args: Args) -> Outcome:
    """Commit an object that holds nothing of any stream there is."""
    object_id, size = args.take("object"), args.take("size", 0)
    now_ms = run.clock.now_ms
    row = {"stream": run.next_stream_id(), "start": 0, "end": 1}
    before = Before({}, await run.objects())
    request = requests.CommitStreamSetObject(
        node=SERVICE,
        object_id=object_id,
        order_id=object_id,
        object_size=size,
        attributes=args.take("attributes", 0),
        ranges=RangeColumns(**_columns([row], _SPAN)),
    )
    run.clock.now_ms = args.take("committed_ts_ms", now_ms)
    try:
        answer, records, _ = await run.send_about([row["stream"]], request)
    finally:
        run.clock.now_ms = now_ms
    features = ["commit-repeated"] if before.is_committed(object_id) else []
    return Outcome({"error": error_name(answer.error)}, features, records)


async def mark_destroy_objects(run: ScenarioRun, args: Args) -> Outcome:
    """Destroy objects as the registry does: all of them, or none if one can't be."""
    object_ids = _ids(args)
    operation = args.take("operation", None)
    operations = _operations(args.take("operations", [operation] * len(object_ids)))
    answer = await run.live.read(requests.CheckObjects(object_ids=tuple(object_ids)))
    there = (ObjectState.PREPARED, ObjectState.COMMITTED)
    can = all(state in there for state in answer.states) and len(operations) == len(object_ids)
    if can and not run.dry_run:
        for object_id, how in zip(object_ids, operations, strict=True):
            ids = column([object_id])
            if how is SourceOperation.KEEP_DATA:
                run.live.replay([ObjectsRemoved(object_id=ids)])
                continue
            deep = how is SourceOperation.DEEP_DELETE
            record = ObjectsDestroyed(object_id=ids, marked_at_ms=run.clock.now_ms, deep=deep)
            run.live.replay([record])
    error = "NONE" if can else "COMPACTED_OBJECTS_NOT_FOUND"
    return Outcome({"error": error, "success": can, "value": can, "result": can})


async def notify_objects_deleted(run: ScenarioRun, args: Args) -> Outcome:
    request = requests.RemoveObjects(object_ids=tuple(_ids(args)))
    answer, records = await run.send(request)
    return Outcome({"error": "NONE", "removed": answer.removed}, records=records)


def _ids(args: Args) -> list[int]:
    single = args.take("object", None)
    several = args.take("objects", args.take("object_ids", None))
    return [int(item) for item in (several if several is not None else [single])]


def _rows(args: Args, name: str, defaults: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for row in args.each(name, []):
        required = {key: row.take(key) for key in ("stream", "start", "end")}
        rows.append(required | {key: row.take(key, value) for key, value in defaults.items()})
    return sorted(rows, key=lambda row: int(row["stream"]))


_SPAN = {"stream_id": "stream", "start_offset": "start", "end_offset": "end"}
_OBJECT = {"object_id": "object", "object_size": "size", "attributes": "attributes"}


def _columns(rows: Sequence[dict[str, Any]], fields: Mapping[str, str]) -> dict[str, Any]:
    return {name: column([row[key] for row in rows]) for name, key in fields.items()}


def _operations(values: Sequence[Any] | None) -> tuple[SourceOperation, ...]:
    return tuple(
        SourceOperation.DELETE
        if value is None
        else SourceOperation[value]
        if isinstance(value, str)
        else list(SourceOperation)[value]
        for value in values or ()
    )


def _is_malformed_merge(request: requests.CommitStreamObject) -> bool:
    has_result = request.object_id != NO_OBJECT
    sources, operations = request.source_object_ids.tolist(), request.operations
    is_empty = has_result and not 0 <= request.start_offset < request.end_offset
    is_short = bool(operations) and len(operations) != len(sources)
    keeps = SourceOperation.KEEP_DATA in operations
    is_composite = has_result and request.attributes & KIND_BITS == COMPOSITE_KIND
    return is_empty or is_short or not sources or (keeps and not is_composite)


def _done(before: Before, made: Sequence[int]) -> bool:
    return bool(made) and before.is_committed(made[0])


async def _repeats(
    run: ScenarioRun, before: Before, results: Sequence[int], sources: Sequence[int], content: str
) -> list[str]:
    """Return the condition of a commit that was made already, if it is one."""
    asked = tuple(dict.fromkeys([*results[:1], *sources]))
    if not asked:
        return []
    answer = await run.live.read(
        requests.CheckObjects(object_ids=tuple(i for i in asked if i >= 0))
    )
    states = dict(zip((i for i in asked if i >= 0), answer.states, strict=True))
    gone = (ObjectState.MARK_DESTROYED, ObjectState.REMOVED)
    replaces_attributes = bool(sources) and list(sources) == list(results)
    made_with = run.contents.get(results[0], content) if results else content
    if made_with != content and not replaces_attributes:
        return ["commit-repeated-with-other-content"]
    if results and states[results[0]] in gone and results[0] in run.committed_once:
        return ["commit-repeated-after-removal"]
    if replaces_attributes:
        return []
    if sources and _done(before, results) and any(states[source] in gone for source in sources):
        return ["compaction-repeated"]
    if (
        sources
        and not results
        and all(states[source] in gone and source in run.committed_once for source in sources)
    ):
        return ["compaction-repeated"]
    return []


async def _as_owner(
    run: ScenarioRun, node: NodeIdentity, stream_id: int
) -> tuple[int, NodeIdentity]:
    """Return the stream's epoch, and its owner in the place of a node that may act."""
    stream = (await run.streams()).get(stream_id)
    if stream is None:
        return 0, node
    owner = (await run.nodes()).get(stream.node_id)
    if owner is None or not await _passes_node_check(run, node, failover=False):
        return stream.epoch, node
    return stream.epoch, NodeIdentity(owner.node_id, owner.node_epoch)


async def _passes_node_check(run: ScenarioRun, node: NodeIdentity, *, failover: bool) -> bool:
    known = (await run.nodes()).get(node.node_id)
    if known is None or known.node_epoch > node.node_epoch:
        return False
    return failover or not known.failover
