"""Runs scenarios about which objects hold a range: an image of streams and objects, and queries.

The image becomes a map by way of a checkpoint. Ids are issued anew, because a scenario may use one
for two objects; answers are compared in the scenario's ids. Sections that test the parts of another
implementation's search (is a result sane, which range holds an offset, in which order are a node's
objects) are put as queries to the map that only have that answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.answers import ObjectList
from streammeta.controller.metadata.requests import (
    DescribeObjects,
    GetNodes,
    GetObjects,
    ObjectQuery,
)
from streammeta.controller.metadata.values import ObjectKind
from tests.conformance.conformance_report import ABSENT, Mismatch, ScenarioResult, compare
from tests.conformance.foreign_records import ForeignRecords
from tests.conformance.live_controller import LiveController
from tests.conformance.scenario_args import Args
from tests.kit.clock import ManualClock

LIMIT_MAX = 10_000
"""The most objects one query returns; scenarios ask for 2^31 - 1, meaning all."""

STREAM, STREAM_SET = "STREAM", "STREAM_SET"
SINCE_EVER_OPEN = 10**12


@dataclass(slots=True)
class Image:
    """A map made of an image, and the ids its objects got."""

    live: LiveController
    ids: dict[tuple[str, int], int] = field(default_factory=dict)
    unknown: list[Mismatch] = field(default_factory=list)

    def original(self, object_id: int) -> tuple[str, int]:
        """Return kind and id an object has in the scenario."""
        return next(key for key, value in self.ids.items() if value == object_id)

    def add(self, kind: str, object_id: int) -> int:
        """Issue an id for an object of the scenario."""
        return self.ids.setdefault((kind, object_id), len(self.ids))


def build(image: Mapping[str, Any], inline: Mapping[int, list[Any]] | None = None) -> Image:
    """Return the map of an image; `inline`: what set objects hold, in place of the image's."""
    made = Image(LiveController(ManualClock(0)))
    records: list[dict[str, Any]] = []
    content = Args(image, "image")
    for stream_id, fields in (content.take("streams", {}) or {}).items():
        records += _stream_records(made, stream_id, Args(fields, f"image.streams[{stream_id}]"))
    for node_id, held in (content.take("nodes", {}) or {}).items():
        records.append({"type": "NodeWALMetadata", "node": node_id, "node_epoch": 0})
        for item in held:
            ranges = item.get("ranges", []) if inline is None else inline.get(item["object"], [])
            object_id = made.add(STREAM_SET, item["object"])
            order = {"node": node_id, "order": item.get("order", item["object"])}
            records.append(
                {"type": "S3StreamSetObject", "object": object_id, **order, "ranges": ranges}
            )
    made.unknown += content.unknown()
    made.unknown += ForeignRecords(made.live, image=True).replay(records)
    return made


def _stream_records(made: Image, stream_id: int, fields: Args) -> Iterator[dict[str, Any]]:
    ranges, objects = fields.take("ranges", []), fields.take("stream_objects", [])
    yield {
        "type": "S3Stream",
        "stream": stream_id,
        "epoch": fields.take("epoch", 0),
        "state": fields.take("state", "CLOSED"),
        "start": fields.take("start", 0),
        "range_index": max((item["index"] for item in ranges), default=-1),
    }
    for item in ranges:
        yield {"type": "Range", "stream": stream_id, **item}
    for item in objects:
        object_id = made.add(STREAM, item["object"])
        yield {"type": "S3StreamObject", "stream": stream_id, **item, "object": object_id}
    made.unknown += fields.unknown()


async def ask(image: Image, query: Mapping[str, Any]) -> ObjectList | None:
    """Return what holds a range; None if the query is refused as malformed."""
    limit = min(query.get("limit", LIMIT_MAX), LIMIT_MAX)
    asked = ObjectQuery(query["stream"], query["start"], query.get("end", -1), limit)
    if limit <= 0:
        return None
    try:
        answer = await image.live.read(GetObjects(queries=(asked,)))
    except InvalidRequestError:
        return None
    (result,) = answer.results
    found: ObjectList = result
    return found


def told(image: Image, result: ObjectList | None) -> dict[str, Any]:
    """Return an answer in the words of the scenarios."""
    if result is None or result.error is not ErrorCode.NONE:
        return {"invalid": True, "objects": [], "start": -1, "end": -1}
    objects = result.objects
    return {
        "invalid": False,
        "objects": [image.original(item.object_id)[1] for item in objects],
        "object_types": [_type_name(item.kind) for item in objects],
        "start": objects[0].start_offset if objects else -1,
        "end": objects[-1].end_offset if objects else -1,
    }


def _type_name(kind: ObjectKind) -> str:
    return STREAM_SET if kind is ObjectKind.STREAM_SET else STREAM


# ---- images and queries ----

_QUERY_FIELDS = ("stream", "start", "end", "limit")
_SCENARIO_FIELDS = ("name", "source", "notes", "note", "image", "queries")
_VARIANT_FIELDS = ("image_same_as", "strip_inline_ranges", "object_index")


def run_queries(
    file: str, scenario: Mapping[str, Any], all_scenarios: Sequence[Mapping[str, Any]]
) -> ScenarioResult:
    """Run one scenario of an image and queries."""
    result = ScenarioResult(file, str(scenario.get("name")))
    for key, value in scenario.items():
        if key not in (*_SCENARIO_FIELDS, *_VARIANT_FIELDS) and not key.startswith("derived"):
            result.fail(0, "scenario", [Mismatch(key, value, "unknown field")])
    other = scenario.get("image_same_as")
    image = scenario.get("image")
    if other is not None:
        image = next((item.get("image") for item in all_scenarios if item["name"] == other), None)
    if image is None:
        result.fail(0, "scenario", [Mismatch("image", other or "an image", "no such image")])
        return result
    asyncio.run(_run_queries(build(image, _inline(scenario)), scenario, result))
    return result


def _inline(scenario: Mapping[str, Any]) -> dict[int, list[Any]] | None:
    """Return what set objects hold if the scenario keeps it in the objects' own index.

    The map always holds it; a search hint to go with it is not needed.
    """
    if not scenario.get("strip_inline_ranges"):
        return None
    index = scenario.get("object_index") or {}
    found: dict[int, list[Any]] = {}
    for item in index.get("object_ranges", []):
        held = {name: item[name] for name in ("stream", "start", "end")}
        found.setdefault(item["object"], []).append(held)
    return found


async def _run_queries(image: Image, scenario: Mapping[str, Any], result: ScenarioResult) -> None:
    result.fail(0, "image", image.unknown)
    for number, query in enumerate(scenario.get("queries") or [], start=1):
        args = Args(query, "query")
        asked = {name: args.take(name) for name in _QUERY_FIELDS if args.has(name)}
        expected = dict(args.take("expect", {}))
        types = args.take("object_types", None)
        if types is not None:
            expected["object_types"] = types
        for passed_over in ("note", "notes", "asserted"):
            args.take(passed_over, None)
        result.fail(number, "get_objects", list(args.unknown()))
        actual = told(image, await ask(image, asked))
        actual["pending"] = _is_pending(asked, actual)
        result.fail(number, "get_objects", list(compare(expected, actual, "expect")))


# ---- results that must not be ----


def run_sanity(file: str, entry: Mapping[str, Any]) -> ScenarioResult:
    """Give the map the objects of a bad result and see that it makes a sound one of them."""
    result = ScenarioResult(file, str(entry.get("name")))
    query = entry["query"]
    for number, case in enumerate(entry["cases"], start=1):
        args = Args(case, "case")
        objects, expected = args.take("objects"), args.take("expect")
        args.take("reason", None)
        result.fail(number, "sanity_check", list(args.unknown()))
        image = build(_case_image(query["stream"], objects))
        actual = told(image, asyncio.run(ask(image, query)))
        wanted = [item["object"] for item in objects]
        is_given = actual["objects"] == wanted
        if expected not in ("ok", "error"):
            result.fail(number, "sanity_check", [Mismatch("expect", expected, "unknown field")])
        elif is_given is not (expected == "ok"):
            got = f"objects {actual['objects']}"
            result.fail(number, "sanity_check", [Mismatch("expect", expected, got)])
    return result


def _case_image(stream_id: int, objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an image of these objects, without empty ranges, which no object can have."""
    set_objects, stream_objects = [], []
    for item in objects:
        sound = [held for held in item["ranges"] if held["start"] < held["end"]]
        if item["type"] == STREAM_SET:
            set_objects.append({"object": item["object"], "ranges": sound})
        else:
            stream_objects += [
                {"object": item["object"], "start": held["start"], "end": held["end"]}
                for held in sound
            ]
    stream = {"epoch": 0, "state": "OPENED", "start": 0, "stream_objects": stream_objects}
    only_range = {"index": 0, "epoch": 0, "start": 0, "end": 0, "node": 0}
    return {"streams": {stream_id: {**stream, "ranges": [only_range]}}, "nodes": {0: set_objects}}


# ---- whose range holds an offset ----


def run_range_lookup(file: str, entry: Mapping[str, Any]) -> ScenarioResult:
    """Let every range's node hold what was written in it, and look the offsets up."""
    result = ScenarioResult(file, str(entry.get("name")))
    ranges = entry["ranges"]
    nodes: dict[int, list[Any]] = {item["node"]: [] for item in ranges}
    for position, item in enumerate(ranges):
        is_last = position == len(ranges) - 1
        end = SINCE_EVER_OPEN if is_last else item["end"]
        if item["start"] < end:
            held = {"stream": 0, "start": item["start"], "end": end}
            nodes[item["node"]].append({"object": position, "ranges": [held]})
    stream = {"epoch": ranges[-1]["epoch"], "state": "OPENED", "ranges": ranges}
    image = build({"streams": {0: stream}, "nodes": nodes})
    result.fail(0, "image", image.unknown)
    for number, lookup in enumerate(entry["lookups"], start=1):
        args = Args(lookup, "lookup")
        query = {"stream": 0, "start": args.take("offset"), "end": -1, "limit": 1}
        expected = args.take("expect_position", None)
        result.fail(number, "lookup", list(args.unknown()))
        found = asyncio.run(ask(image, query))
        position = told(image, found)["objects"]
        actual = position[0] if position else None
        wanted = None if expected in (None, -1) else expected
        if actual is not None and _writer(image, actual) != ranges[actual]["node"]:
            actual = None
        result.fail(number, "lookup", list(compare(wanted, actual, "expect_position")))
    return result


def _writer(image: Image, object_id: int) -> int:
    request = DescribeObjects(object_ids=(image.ids[STREAM_SET, object_id],))
    answer = asyncio.run(image.live.read(request))
    return int(answer.objects[0].node_id)


# ---- reads that wait ----


def run_pending_fetch(file: str, entry: Mapping[str, Any]) -> ScenarioResult:
    """Ask again and again as a waiting reader does; what is not covered yet stays away."""
    result = ScenarioResult(file, str(entry.get("name")))
    image = build(entry["image"])
    result.fail(0, "image", image.unknown)
    fetched: dict[str, Any] = {}
    for number, step in enumerate(entry["steps"], start=1):
        op, args = step.get("op", ""), Args(step.get("args"))
        actual: dict[str, Any] = {}
        if op == "fetch":
            fetched = {name: args.take(name) for name in _QUERY_FIELDS if args.has(name)}
        elif op == "add_stream_set_object":
            record = {name: args.take(name) for name in ("node", "object", "order", "ranges")}
            record["object"] = image.add(STREAM_SET, record["object"])
            record["type"] = "S3StreamSetObject"
            ForeignRecords(image.live, image=True).replay([record])
        elif op != "await_fetch":
            result.fail(number, op, [Mismatch("op", op, "unknown operation")])
        if op in ("fetch", "await_fetch"):
            actual = told(image, asyncio.run(ask(image, fetched)))
            actual["pending"] = _is_pending(fetched, actual)
        result.fail(number, op, list(args.unknown()))
        result.fail(number, op, list(compare(step.get("expect") or {}, actual, "expect")))
    return result


def _is_pending(query: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    is_full = len(actual["objects"]) >= query.get("limit", LIMIT_MAX)
    is_covered = query.get("end", -1) != -1 and actual["end"] >= query["end"]
    return not (actual["invalid"] or is_full or is_covered)


# ---- the order of a node's set objects ----


def run_ordered_list(file: str, entry: Mapping[str, Any]) -> ScenarioResult:
    """Add and remove a node's set objects and list them."""
    result = ScenarioResult(file, str(entry.get("name")))
    live = LiveController(ManualClock(0))
    foreign = ForeignRecords(live, image=True)
    foreign.replay([{"type": "NodeWALMetadata", "node": 0}])
    for number, step in enumerate(entry["steps"], start=1):
        op, args = step.get("op", ""), Args(step.get("args"))
        before = _listed(live)
        if op == "add":
            for item in args.take("objects"):
                foreign.replay([{"type": "S3StreamSetObject", "node": 0, **item}])
        elif op == "remove":
            for object_id in args.take("objects"):
                foreign.replay([{"type": "RemoveStreamSetObject", "object": object_id}])
        elif op != "inspect":
            result.fail(number, op, [Mismatch("op", op, "unknown operation")])
        result.fail(number, op, list(args.unknown()))
        expected = step.get("expect") or {}
        result.fail(number, op, list(_check_listed(expected, before, _listed(live))))
    return result


def _listed(live: LiveController) -> list[dict[str, int]]:
    answer = asyncio.run(live.read(GetNodes(node_ids=(0,), include_stream_set_objects=True)))
    held = answer.nodes[0].stream_set_objects
    return [{"object": item.object_id, "order": item.order_id} for item in held]


def _check_listed(
    expected: Mapping[str, Any], before: list[dict[str, int]], now: list[dict[str, int]]
) -> Iterator[Mismatch]:
    for name, value in expected.items():
        path = f"expect.{name}"
        if name in ("contains", "not_contains"):
            for item in value:
                if (item in now) is not (name == "contains"):
                    yield Mismatch(path, item, now)
            continue
        actual = {
            "count": len(now),
            "empty": not now,
            "order_ids": [item["order"] for item in now],
            "objects": [item["object"] for item in now],
            "removed": len(now) < len(before),
        }.get(name, ABSENT)
        yield from compare(value, actual, path)


SECTIONS: dict[str, Callable[[str, Mapping[str, Any]], ScenarioResult]] = {
    "sanity_checks": run_sanity,
    "range_lookup": run_range_lookup,
    "pending_fetch": run_pending_fetch,
    "ordered_list": run_ordered_list,
}
