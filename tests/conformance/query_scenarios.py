"""Runs scenarios about which objects hold a range: an image of streams and objects, and queries.

The image becomes a map by way of a checkpoint. Ids are issued anew, because a scenario may use one
for two objects; answers are compared in the scenario's ids. Sections that test the parts of another
implementation's search (is a result sane, which range holds an offset, in which order are a node's
objects) are put as queries to the map that only have that answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import ObjectList
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from tests.conformance.conformance_report import ABSENT, Mismatch, ScenarioResult, compare
from tests.conformance.foreign_records import ForeignRecords, node_records, stream_records
from tests.conformance.live_controller import LiveController
from tests.conformance.scenario_args import Args, Check

LIMIT_MAX = 10_000
"""The most objects one query returns; scenarios ask for 2^31 - 1, meaning all."""

STREAM, STREAM_SET = "STREAM", "STREAM_SET"
SINCE_EVER_OPEN = 10**12
_KINDS = {"S3StreamObject": STREAM, "S3StreamSetObject": STREAM_SET}
_QUERY_FIELDS = ("stream", "start", "end", "limit")


@dataclass(slots=True)
class Image:
    """A map made of an image, and the ids its objects got."""

    live: LiveController = field(default_factory=LiveController)
    ids: dict[tuple[str, int], int] = field(default_factory=dict)

    def replay(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replay records under the ids that their objects get here."""
        foreign = ForeignRecords(self.live, image=True)
        foreign.replay([self._with_own_id(dict(record)) for record in records])

    def _with_own_id(self, record: dict[str, Any]) -> dict[str, Any]:
        kind = _KINDS.get(record["type"])
        if kind is not None:
            if kind == STREAM_SET:
                record.setdefault("order", record["object"])
            record["object"] = self.ids.setdefault((kind, record["object"]), len(self.ids))
        return record

    def ask(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """Return what holds a range, in the words of the scenarios."""
        limit = min(query.get("limit", LIMIT_MAX), LIMIT_MAX)
        asked = ObjectQuery(query["stream"], query["start"], query.get("end", -1), limit)
        try:
            result = self._read(asked)
        except InvalidRequestError:
            result = None
        if result is None or result.error is not ErrorCode.NONE or limit <= 0:
            return {"invalid": True, "objects": [], "start": -1, "end": -1, "pending": False}
        found = [self._original(item.object_id) for item in result.objects]
        end = result.objects[-1].end_offset if found else -1
        is_covered = query.get("end", -1) != -1 and end >= query["end"]
        return {
            "invalid": False,
            "objects": [object_id for _, object_id in found],
            "object_types": [kind for kind, _ in found],
            "start": result.objects[0].start_offset if found else -1,
            "end": end,
            "pending": not (len(found) >= query.get("limit", LIMIT_MAX) or is_covered),
        }

    def _read(self, query: ObjectQuery) -> ObjectList:
        answer = asyncio.run(self.live.read(requests.GetObjects(queries=(query,))))
        result: ObjectList = answer.results[0]
        return result

    def _original(self, object_id: int) -> tuple[str, int]:
        return next(key for key, value in self.ids.items() if value == object_id)


def build(content: Args, inline: Mapping[int, list[Any]] | None = None) -> Image:
    """Return the map of an image; `inline`: what set objects hold, in place of the image's."""
    records: list[dict[str, Any]] = []
    for stream_id, fields in (content.take("streams", {}) or {}).items():
        records += stream_records(stream_id, content.nested(fields, f"streams[{stream_id}]"))
    for node_id, held in (content.take("nodes", {}) or {}).items():
        if inline is not None:
            held = [item | {"ranges": inline.get(item["object"], [])} for item in held]  # noqa: PLW2901
        records += node_records(node_id, 0, held)
    made = Image()
    made.replay(records)
    return made


# ---- images and queries ----


def check_queries(
    scenarios: Sequence[Mapping[str, Any]], args: Args, result: ScenarioResult
) -> Iterator[Mismatch]:
    """Check one scenario of an image and queries; it may name another one's image."""
    other, image = args.take("image_same_as", None), args.take("image", None)
    if other is not None:
        image = next((item.get("image") for item in scenarios if item["name"] == other), None)
    if image is None:
        args.names()
        yield Mismatch("image", other or "an image", "no such image")
        return
    made = build(args.nested(image, "image"), _inline(args))
    for number, query in enumerate(args.each("queries"), start=1):
        query.pass_over()
        query.take("asserted", None)
        expected = dict(query.take("expect", {}))
        if query.has("object_types"):
            expected["object_types"] = query.take("object_types")
        actual = made.ask(_asked(query))
        result.fail(number, "get_objects", compare(expected, actual, "expect"))


def _asked(args: Args) -> dict[str, Any]:
    return {name: args.take(name) for name in _QUERY_FIELDS if args.has(name)}


def _inline(args: Args) -> dict[int, list[Any]] | None:
    """Return what set objects hold if the scenario keeps it in the objects' own index.

    The map always holds it; a search hint to go with it is not needed.
    """
    index = args.take("object_index", None) or {}
    if not args.take("strip_inline_ranges", False):
        return None
    found: dict[int, list[Any]] = {}
    for item in index.get("object_ranges", []):
        held = {name: item[name] for name in ("stream", "start", "end")}
        found.setdefault(item["object"], []).append(held)
    return found


# ---- results that must not be ----


def check_sanity(args: Args, result: ScenarioResult) -> None:
    """Give the map the objects of a bad result and see that it makes a sound one of them."""
    query = args.take("query")
    for number, case in enumerate(args.each("cases"), start=1):
        case.pass_over()
        objects, expected = case.take("objects"), case.take("expect")
        found = build(Args(_case_image(query["stream"], objects))).ask(query)["objects"]
        is_given = found == [item["object"] for item in objects]
        if expected not in ("ok", "error"):
            result.fail(number, "sanity_check", [Mismatch("expect", expected, "unknown field")])
        elif is_given is not (expected == "ok"):
            mismatch = Mismatch("expect", expected, f"objects {found}")
            result.fail(number, "sanity_check", [mismatch])


def _case_image(stream_id: int, objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an image of these objects, without empty ranges, which no object can have."""
    set_objects, stream_objects = [], []
    for item in objects:
        sound = [held for held in item["ranges"] if held["start"] < held["end"]]
        if item["type"] == STREAM_SET:
            set_objects.append({"object": item["object"], "ranges": sound})
        else:
            spans = ({name: held[name] for name in ("start", "end")} for held in sound)
            stream_objects += [{"object": item["object"], **span} for span in spans]
    only_range = {"index": 0, "epoch": 0, "start": 0, "end": 0, "node": 0}
    stream = {"state": "OPENED", "stream_objects": stream_objects, "ranges": [only_range]}
    return {"streams": {stream_id: stream}, "nodes": {0: set_objects}}


# ---- whose range holds an offset ----


def check_range_lookup(args: Args, result: ScenarioResult) -> None:
    """Let every range's node hold what was written in it, and look the offsets up."""
    ranges = args.take("ranges")
    nodes: dict[int, list[Any]] = {item["node"]: [] for item in ranges}
    for position, item in enumerate(ranges):
        is_last = position == len(ranges) - 1
        end = SINCE_EVER_OPEN if is_last else item["end"]
        if item["start"] < end:
            held = {"stream": 0, "start": item["start"], "end": end}
            nodes[item["node"]].append({"object": position, "ranges": [held]})
    stream = {"epoch": ranges[-1]["epoch"], "state": "OPENED", "ranges": ranges}
    image = build(Args({"streams": {0: stream}, "nodes": nodes}))
    for number, lookup in enumerate(args.each("lookups"), start=1):
        query = {"stream": 0, "start": lookup.take("offset"), "end": -1, "limit": 1}
        found = next(iter(image.ask(query)["objects"]), None)
        if found is not None and _writer(image, found) != ranges[found]["node"]:
            found = None
        expected = lookup.take("expect_position", None)
        wanted = None if expected == -1 else expected
        result.fail(number, "lookup", compare(wanted, found, "expect_position"))


def _writer(image: Image, object_id: int) -> int:
    request = requests.DescribeObjects(object_ids=(image.ids[STREAM_SET, object_id],))
    answer = asyncio.run(image.live.read(request))
    return int(answer.objects[0].node_id)


# ---- reads that wait ----


def check_pending_fetch(args: Args, result: ScenarioResult) -> None:
    """Ask again and again as a waiting reader does; what is not covered yet stays away."""
    image = build(args.within("image"))
    fetched: dict[str, Any] = {}
    for number, step in enumerate(args.each("steps"), start=1):
        op, given = step.take("op"), step.within("args", {})
        actual: dict[str, Any] = {}
        if op == "fetch":
            fetched = _asked(given)
        elif op == "add_stream_set_object":
            added = {name: given.take(name) for name in ("node", "object", "order", "ranges")}
            image.replay([{"type": "S3StreamSetObject", **added}])
        elif op != "await_fetch":
            result.fail(number, op, [Mismatch("op", op, "unknown operation")])
        if op in ("fetch", "await_fetch"):
            actual = image.ask(fetched)
        result.fail(number, op, compare(step.take("expect", {}) or {}, actual, "expect"))


# ---- the order of a node's set objects ----


def check_ordered_list(args: Args, result: ScenarioResult) -> None:
    """Add and remove a node's set objects and list them."""
    live = LiveController()
    foreign = ForeignRecords(live, image=True)
    foreign.replay(list(node_records(0, 0, ())))
    for number, step in enumerate(args.each("steps"), start=1):
        op, given = step.take("op"), step.within("args", {})
        before = _listed(live)
        if op == "add":
            foreign.replay(list(node_records(0, 0, given.take("objects"))))
        elif op == "remove":
            ids = given.take("objects")
            foreign.replay([{"type": "RemoveStreamSetObject", "object": id_} for id_ in ids])
        elif op != "inspect":
            result.fail(number, op, [Mismatch("op", op, "unknown operation")])
        expected = step.take("expect", {}) or {}
        result.fail(number, op, _check_listed(expected, before, _listed(live)))


def _listed(live: LiveController) -> list[dict[str, int]]:
    answer = asyncio.run(
        live.read(requests.GetNodes(node_ids=(0,), include_stream_set_objects=True))
    )
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


SECTIONS: dict[str, Check] = {
    "sanity_checks": check_sanity,
    "range_lookup": check_range_lookup,
    "pending_fetch": check_pending_fetch,
    "ordered_list": check_ordered_list,
}
