"""Runs the scenarios of tests/vectors/controller.yaml and get_objects.yaml against the map.

The scenarios number node epochs from -1; the contract numbers them from 0, so the runner adds 1.
Calls the scenarios make without a node are made by a service node of the runner's own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.errors import ErrorCode
from controller.metadata.answers import (
    DescribeObjectsAnswer,
    DescribeStreamsAnswer,
    GetNodesAnswer,
    GetObjectsAnswer,
    GetOpeningStreamsAnswer,
    StreamDescription,
)
from controller.metadata.cluster_map import ClusterMap
from controller.metadata.requests import (
    CheckObjects,
    CloseStreams,
    CommitStreamSetObject,
    CreateStreams,
    DeleteKVs,
    DeleteStreams,
    DescribeObjects,
    DescribeStreams,
    ExpireObjects,
    GetKVs,
    GetNodes,
    GetObjects,
    GetOpeningStreams,
    KVKey,
    KVToPut,
    NewStream,
    ObjectQuery,
    OpenStreams,
    PrepareObjects,
    PutKVs,
    ReadRequest,
    RegisterNode,
    RemoveObjects,
    StreamToClose,
    StreamToDelete,
    StreamToOpen,
    StreamToTrim,
    TrimStreams,
    WriteRequest,
)
from controller.metadata.values import (
    NodeIdentity,
    RangeColumns,
    StreamObjectColumns,
    column,
)

VECTORS = Path(__file__).parent.parent / "vectors"
SERVICE = NodeIdentity(999, 0)

FAST_CLOSE = "closing with a tail still to be uploaded (fast close) is not offered"
COMPACTION = "commits with compacted objects are not offered"
NOT_COVERED = {
    "v5_rejects_fast_close_accepts_legacy_close": FAST_CLOSE,
    "v6_accepts_fast_close": FAST_CLOSE,
    "v6_fast_close_records_node_wal_responsibility": FAST_CLOSE,
    "v6_fast_close_at_logical_end_seals_range_without_entry": FAST_CLOSE,
    "v6_fast_close_retry_does_not_recreate_advanced_entry": FAST_CLOSE,
    "open_permits_and_retains_inactive_historical_entry": FAST_CLOSE,
    "get_opening_streams_includes_active_historical_responsibility": FAST_CLOSE,
    "get_opening_streams_rejects_missing_historical_range": FAST_CLOSE,
    "get_opening_streams_rejects_ambiguous_historical_range": FAST_CLOSE,
    "crossed_historical_ownership_failover_order_0_then_1": FAST_CLOSE,
    "historical_and_current_owner_commits_are_independent": FAST_CLOSE,
    "historical_commit_classification_after_trim": FAST_CLOSE,
    "compact_with_deleted_stream_fast_deletes_its_stream_object": COMPACTION,
    "compact_stream_set_objects": COMPACTION,
    "commit_stream_object_for_fenced_stream": "CommitStreamObject is not offered",
    "logical_end_replay_is_monotonic": "replays records of another vocabulary",
    "kv_replay_remove_record": "replays records of another vocabulary",
    "describe_streams": "topics are not known here; streams have tags",
    "removable_ranges_covered_by_stream_objects": "not a request; see test_metadata_streams",
    "commit_object": "not a request; commits go through CommitStreamSetObject",
    "expired_prepared_object_is_destroyed_then_deleted": "deletion is the lifecycle's",
    "storage_deletes_are_batched_by_1000": "deletion is the lifecycle's",
    "unregister_node": "UnregisterNode is not offered",
    "topic_deletion_waits_for_closed_streams_then_cleans_kv": "topics are not known here",
    "overload_circuit_breaker": "sessions are not known here",
}


def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((VECTORS / name).read_text())
    return content


CONTROLLER = {scenario["name"]: scenario for scenario in _load("controller.yaml")["scenarios"]}


class Runner:
    """One map, driven by scenario steps."""

    def __init__(self) -> None:
        self.map = ClusterMap()
        self.now_ms = 0
        self._requests = 0
        self.records = 0
        self.write(RegisterNode(node=SERVICE))

    def write(self, request: WriteRequest, *, dry_run: bool = False) -> Any:
        offset = self.map.applied_end_offset
        decision = self.map.decide(request, self.now_ms, offset)
        self.records = len(decision.records)
        if decision.records and not dry_run:
            self.map.apply(offset, decision.records)
            self.map.forget_undo(offset + 1)
        return decision.answer

    def read(self, request: ReadRequest) -> Any:
        return self.map.query(request)

    def request_id(self) -> str:
        self._requests += 1
        return f"request-{self._requests}"

    def given_objects(self, prepared: list[int]) -> None:
        """Prepare exactly these ids: the others below the highest are expired and removed."""
        last = max(prepared)
        self.write(
            PrepareObjects(
                request_id=self.request_id(), node=SERVICE, count=last + 1, ttl_ms=600_000_000
            )
        )
        unwanted = tuple(sorted(set(range(last + 1)) - set(prepared)))
        if unwanted:
            self.map.apply(self.map.applied_end_offset, (_destroy(unwanted),))
            self.write(RemoveObjects(object_ids=unwanted))

    # ---- operations ----

    def run(self, op: str, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        operation: Callable[..., dict[str, Any]] = getattr(self, f"op_{op}")
        return operation(args, dry_run)

    def op_get_opening_streams(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        request = GetOpeningStreams(node=_node(args), failover=args.get("failover", False))
        answer: GetOpeningStreamsAnswer = self.write(request, dry_run=dry_run)
        streams = [
            {
                "stream": item.stream_id,
                "epoch": item.epoch,
                "start_offset": item.start_offset,
                "end_offset": item.end_offset,
            }
            for item in answer.streams
        ]
        return {"error": answer.error.name, "streams": streams}

    def op_create_stream(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        request = CreateStreams(
            request_id=self.request_id(), node=_node(args), streams=(NewStream(_tags(args)),)
        )
        answer = self.write(request)
        created = {"stream_id": answer.stream_ids[0]} if answer.stream_ids else {}
        return {"error": answer.error.name, **created}

    def op_open_stream(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        item = StreamToOpen(args["stream"], args["epoch"], _tags(args))
        opened = self.write(OpenStreams(node=_node(args), streams=(item,))).streams[0]
        offsets = {"start_offset": opened.start_offset, "next_offset": opened.next_offset}
        return {"error": opened.error.name, **offsets}

    def op_close_stream(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        item = StreamToClose(args["stream"], args["epoch"])
        return _first(self.write(CloseStreams(node=_node(args), streams=(item,))))

    def op_trim_stream(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        item = StreamToTrim(args["stream"], args["epoch"], args["new_start_offset"])
        return _first(self.write(TrimStreams(node=_node(args), streams=(item,))))

    def op_delete_stream(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        item = StreamToDelete(args["stream"], args["epoch"])
        return _first(self.write(DeleteStreams(node=SERVICE, streams=(item,))))

    def op_commit_stream_set_object(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        ranges = args.get("ranges", [])
        objects = args.get("stream_objects", [])
        request = CommitStreamSetObject(
            node=_node(args),
            object_id=args.get("object", 0),
            order_id=args.get("order", 0),
            object_size=args.get("size", 0),
            failover=args.get("failover", False),
            ranges=RangeColumns(
                stream_id=column([row["stream"] for row in ranges]),
                start_offset=column([row["start"] for row in ranges]),
                end_offset=column([row["end"] for row in ranges]),
            ),
            stream_objects=StreamObjectColumns(
                object_id=column([row["object"] for row in objects]),
                object_size=column([row["size"] for row in objects]),
                stream_id=column([row["stream"] for row in objects]),
                start_offset=column([row["start"] for row in objects]),
                end_offset=column([row["end"] for row in objects]),
            ),
        )
        return {"error": self.write(request).error.name}

    def op_prepare_object(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        request = PrepareObjects(
            request_id=self.request_id(),
            node=SERVICE,
            count=args["count"],
            ttl_ms=args["ttl_ms"],
        )
        answer = self.write(request)
        return {"error": answer.error.name, "first_object_id": answer.first_object_id}

    def op_register_node(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        request = RegisterNode(
            node=_node(args), wal_config=args["wal_config"], tags=tuple(args["tags"].items())
        )
        return {"error": self.write(request).error.name}

    def op_get_nodes(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        answer: GetNodesAnswer = self.read(GetNodes(node_ids=tuple(args["nodes"])))
        nodes = [
            {
                "node": node.node_id,
                "node_epoch": node.node_epoch - 1,
                "wal_config": node.wal_config,
                "state": "FENCED",  # sessions are not the map's; the scenario gives it
            }
            for node in answer.nodes
        ]
        return {"error": "NONE", "nodes": nodes}

    def op_put_kv(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        item = KVToPut(
            namespace=args.get("namespace", ""),
            key=args["key"],
            value=args["value"].encode(),
            overwrite=args.get("overwrite", False),
        )
        return _value(self.write(PutKVs(items=(item,))).results[0])

    def op_get_kv(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        key = KVKey(namespace=args.get("namespace", ""), key=args["key"])
        return _value(self.read(GetKVs(keys=(key,))).results[0])

    def op_delete_kv(self, args: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        key = KVKey(namespace=args.get("namespace", ""), key=args["key"])
        return _value(self.write(DeleteKVs(keys=(key,))).results[0])

    # ---- state ----

    def streams(self) -> dict[int, StreamDescription]:
        answer: DescribeStreamsAnswer = self.read(
            DescribeStreams(include_ranges=True, include_stream_objects=True)
        )
        return {stream.stream_id: stream for stream in answer.streams}

    def check_state(self, expected: dict[str, Any]) -> None:
        for key, value in expected.items():
            check: Callable[[Any], None] = getattr(self, f"state_{key}")
            check(value)

    def state_streams(self, expected: dict[int, Any]) -> None:
        streams = self.streams()
        for stream_id, fields in expected.items():
            if fields is None:
                assert stream_id not in streams
                continue
            actual = _stream_fields(streams[stream_id])
            for name, value in fields.items():
                if name == "ranges":
                    for want, got in zip(value, actual["ranges"], strict=True):
                        assert got | want == got, (stream_id, want, got)
                elif name == "current_range":
                    assert actual[name] | value == actual[name], (stream_id, value)
                else:
                    assert actual[name] == value, (stream_id, name)

    def state_nodes(self, expected: dict[int, Any]) -> None:
        answer: GetNodesAnswer = self.read(
            GetNodes(node_ids=tuple(expected), include_stream_set_objects=True)
        )
        nodes = {node.node_id: node for node in answer.nodes}
        for node_id, fields in expected.items():
            node = nodes[node_id]
            held = [item.object_id for item in node.stream_set_objects]
            actual = {
                "epoch": node.node_epoch - 1,
                "failover": node.failover,
                "stream_set_objects": sorted(held),
                "stream_set_object_count": node.stream_set_object_count,
                "uncommitted": {},
            }
            assert len(held) == node.stream_set_object_count
            for name, value in fields.items():
                assert actual[name] == value, (node_id, name)

    def state_objects(self, expected: dict[int, Any]) -> None:
        answer: DescribeObjectsAnswer = self.read(DescribeObjects(object_ids=tuple(expected)))
        objects = {item.object_id: item for item in answer.objects}
        for object_id, fields in expected.items():
            wanted = {"state": fields} if isinstance(fields, str) else fields
            item = objects[object_id]
            actual = {
                "state": item.state.name,
                "timestamp_ms": item.timestamp_ms,
                "size": item.object_size,
            }
            for name, value in wanted.items():
                assert actual[name] == value, (object_id, name)

    def state_next_stream_id(self, expected: int) -> None:
        assert max(self.streams(), default=-1) + 1 == expected

    def state_stream_count(self, expected: int) -> None:
        assert self.map.size().streams == expected

    def state_next_object_id(self, expected: int) -> None:
        assert self.read(CheckObjects(object_ids=(0,))).next_object_id == expected

    def state_object_count(self, expected: int) -> None:
        assert self.map.size().objects == expected

    def state_has_opening_streams(self, expected: dict[int, bool]) -> None:
        for node in self.read(GetNodes(node_ids=tuple(expected))).nodes:
            assert node.has_opening_streams == expected[node.node_id]

    def state_opening_stream_ids(self, expected: dict[int, list[int]]) -> None:
        for node_id, stream_ids in expected.items():
            owned = [
                stream.stream_id
                for stream in self.streams().values()
                if stream.node_id == node_id and stream.state.name == "OPENED"
            ]
            assert owned == stream_ids

    def state_registered_nodes(self, expected: list[int]) -> None:
        nodes = self.read(GetNodes()).nodes
        assert [node.node_id for node in nodes if node.node_id != SERVICE.node_id] == expected


def _destroy(object_ids: tuple[int, ...]) -> Any:
    from controller.records.record import ObjectsDestroyed

    return ObjectsDestroyed(object_id=column(object_ids), marked_at_ms=0)


def _node(args: dict[str, Any]) -> NodeIdentity:
    return NodeIdentity(args["node"], args.get("node_epoch", 0) + 1)


def _tags(args: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(args.get("tags", {}).items())


def _first(answer: Any) -> dict[str, Any]:
    error: ErrorCode = answer.errors[0]
    return {"error": error.name}


def _value(result: Any) -> dict[str, Any]:
    return {"error": result.error.name, "value": result.value.decode() if result.found else None}


def _stream_fields(stream: StreamDescription) -> dict[str, Any]:
    ranges = [
        {
            "index": item.range_index,
            "epoch": item.epoch,
            "node": item.node_id,
            "start": item.start_offset,
            "end": item.end_offset,
        }
        for item in stream.ranges
    ]
    return {
        "state": stream.state.name,
        "epoch": stream.epoch,
        "range_index": stream.range_index,
        "start": stream.start_offset,
        "end": stream.end_offset,
        "owner": stream.node_id,
        "range_count": len(ranges),
        "ranges": ranges,
        "current_range": ranges[-1] if ranges else {},
        "stream_objects": [
            {"object": item.object_id, "start": item.start_offset, "end": item.end_offset}
            for item in stream.stream_objects
        ],
        "stream_object_count": len(stream.stream_objects),
    }


def _with_true_end(streams: dict[int, Any]) -> dict[int, Any]:
    """The scenarios keep a current range's end as it was at open; ours is the stream's."""
    for fields in streams.values():
        if fields["ranges"]:
            fields["ranges"][-1]["end"] = fields["end"]
    return streams


def _check_answer(expected: dict[str, Any], answer: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, list):
            key = "stream" if name == "streams" else "node"
            got = sorted(answer[name], key=lambda item: item[key])
            for want, item in zip(sorted(value, key=lambda i: i[key]), got, strict=True):
                assert item | want == item, (name, want, item)
        else:
            assert answer[name] == value, name


def test_the_list_of_scenarios_not_covered_is_exact() -> None:
    runnable = {
        name
        for name, scenario in CONTROLLER.items()
        if all(hasattr(Runner, f"op_{step['op']}") for step in scenario["steps"])
        and "end_offset" not in str([step.get("args") for step in scenario["steps"]])
        and "topic_partitions" not in str(scenario["steps"])
    }
    assert set(CONTROLLER) - runnable == set(NOT_COVERED)


@pytest.mark.parametrize("name", [name for name in CONTROLLER if name not in NOT_COVERED])
def test_controller_scenario(name: str) -> None:
    scenario = CONTROLLER[name]
    runner = Runner()
    if "given_objects" in scenario:
        runner.given_objects(scenario["given_objects"]["prepared"])
    for step in scenario["steps"]:
        answer = runner.run(step["op"], step["args"], step.get("dry_run", False))
        _check_answer(step.get("expect", {}), answer)
        counted = step.get("records", {}).get("count")
        if counted is not None:
            assert (runner.records > 0) == (counted > 0), step
        runner.check_state(step.get("state_after", {}))
    final = scenario.get("derived_final_state", {})
    if "streams" in final:
        runner.state_streams(_with_true_end(final["streams"]))
        runner.state_nodes(final["nodes"])
        runner.state_objects(final["objects"])


def test_prepared_objects_expire_after_their_deadline() -> None:
    runner = Runner()
    runner.op_prepare_object({"count": 1_700, "ttl_ms": 3_000}, dry_run=False)
    runner.now_ms = 3_000
    assert runner.write(ExpireObjects(limit=2_000)).expired == 0
    runner.now_ms = 3_001
    assert runner.write(ExpireObjects(limit=1_000)).expired == 1_000
    assert runner.write(ExpireObjects(limit=1_000)).expired == 700
    assert runner.map.prepared_deadline() is None
    assert runner.map.size().destroyed_objects == 1_700


# ---- which objects hold a range ----

GET_OBJECTS = {
    scenario["name"]: scenario
    for scenario in _load("get_objects.yaml")["scenarios"]
    if not scenario.get("strip_inline_ranges")
}


def _commit_order(image: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects of an image's only stream, in stream order, with the node that wrote each."""
    stream = image["streams"][0]
    objects = [
        {"kind": "STREAM", "key": item["object"], **item} for item in stream["stream_objects"]
    ]
    for node_id, held in image["nodes"].items():
        for item in held:
            (held_range,) = item["ranges"]
            key = {"kind": "STREAM_SET", "key": item["object"], "node": node_id}
            objects.append({**key, "start": held_range["start"], "end": held_range["end"]})
    for item in objects:
        item["node"] = next(
            r["node"] for r in stream["ranges"] if r["start"] <= item["start"] < r["end"]
        )
    return sorted(objects, key=lambda item: int(item["start"]))


def _build_image(runner: Runner, image: dict[str, Any]) -> dict[tuple[str, int], int]:
    """Commit an image's objects; return the id each (kind, scenario's id) got.

    A scenario uses one id for two objects, so ids are issued anew, in stream order.
    """
    objects = _commit_order(image)
    runner.given_objects(list(range(len(objects))))
    for node_id in (0, 1):
        runner.op_get_opening_streams({"node": node_id}, dry_run=False)
    runner.op_create_stream({"node": 0}, dry_run=False)
    epoch, owner = -1, -1
    for object_id, item in enumerate(objects):
        node = {"node": item["node"], "stream": 0}
        if item["node"] != owner:
            if owner >= 0:
                close = {"node": owner, "stream": 0, "epoch": epoch}
                runner.op_close_stream(close, dry_run=False)
            epoch, owner = epoch + 1, item["node"]
            runner.op_open_stream({**node, "epoch": epoch}, dry_run=False)
        if object_id == 0:
            start = image["streams"][0]["start"]
            runner.op_trim_stream({**node, "epoch": epoch, "new_start_offset": start}, False)
        held = {"stream": 0, "start": item["start"], "end": item["end"]}
        if item["kind"] == "STREAM":
            rows = [{**held, "object": object_id, "size": 1}]
            commit = {**node, "object": -1, "order": -1, "stream_objects": rows}
        else:
            commit = {**node, "object": object_id, "order": object_id, "ranges": [held]}
        assert runner.op_commit_stream_set_object(commit, dry_run=False) == {"error": "NONE"}
    return {(item["kind"], item["key"]): index for index, item in enumerate(objects)}


@pytest.mark.parametrize("name", list(GET_OBJECTS))
def test_get_objects_scenario(name: str) -> None:
    scenario = GET_OBJECTS[name]
    runner = Runner()
    ids = _build_image(runner, scenario["image"])
    for query in scenario["queries"]:
        asked = ObjectQuery(
            query["stream"], query["start"], query["end"], min(query["limit"], 10_000)
        )
        answer: GetObjectsAnswer = runner.read(GetObjects(queries=(asked,)))
        (result,) = answer.results
        expected = query["expect"]
        if expected.get("invalid"):
            assert result.error is not ErrorCode.NONE
            assert result.objects == ()
            continue
        wanted = zip(query["object_types"], expected["objects"], strict=True)
        assert [item.object_id for item in result.objects] == [ids[key] for key in wanted]
        assert [item.kind.name for item in result.objects] == query["object_types"]
        assert result.objects[0].start_offset == expected["start"]
        assert result.objects[-1].end_offset == expected["end"]


def test_the_sections_of_get_objects_not_run_are_known() -> None:
    # Stream set objects keep their ranges in the map, so nothing is looked up in objects' own
    # indexes; results are contiguous by construction; readers wait, not the map; there is no cache.
    assert set(_load("get_objects.yaml")) == {
        "scenarios",
        "sanity_checks",
        "range_lookup",
        "pending_fetch",
        "ordered_list",
        "position_cache",
        "skipped",
    }
    skipped = {s["name"] for s in _load("get_objects.yaml")["scenarios"]} - set(GET_OBJECTS)
    assert skipped == {"get_objects_full_ranges_from_object_index"}
