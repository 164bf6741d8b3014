"""Scenarios about the compaction of stream objects: what is grouped, what is made and committed.

Kinds that only group ask the plan; kinds that make objects run the compactor against a bucket in
memory. A scenario may have several cases, which share all that they do not say themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streammeta.client.compaction.config import CompactionConfig
from streammeta.storage.compaction.stream_objects import (
    Group,
    GroupRules,
    StreamCompaction,
    StreamObject,
    cut_groups,
    is_eligible,
    is_worth_compacting,
    plan_stream,
    sort_by_offset,
)
from streammeta.storage.compaction.stream_objects import rules_for as group_rules_for
from streammeta.storage.object_format.composite import (
    LinkedObject,
    decode_composite,
    encode_composite,
)
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_key import key_for
from tests.conformance.conformance_report import Mismatch, ScenarioResult, compare, rules_for
from tests.conformance.scenario_args import Args
from tests.conformance.stream_object_world import (
    StreamObjectWorld,
    described_objects,
    listed_objects,
    prepared_objects,
)

_KINDS_BY_NAME = {
    "CLEANUP": StreamCompaction.REMOVE_EXPIRED,
    "MINOR": StreamCompaction.MERGE_SMALL,
    "MAJOR": StreamCompaction.MERGE_LARGE,
    "CLEANUP_V1": StreamCompaction.PRUNE_LINKS,
    "MINOR_V1": StreamCompaction.GATHER_SMALL,
    "MAJOR_V1": StreamCompaction.LINK,
}
_UNLIMITED = 2**63 - 1
_SMALL = 4 * 1024 * 1024
_REMARKS = ("name", "source", "notes", "note", "kind", "cases")
_SHARED_NAMES = ("group", "filter", "compact")
"""Kinds that scenarios about stream set objects have too: there without a compaction type."""


def is_stream_compaction(scenario: Mapping[str, Any]) -> bool:
    kind = scenario.get("kind")
    if kind not in _SHARED_NAMES:
        return kind in _RUNNERS
    return any("compaction_type" in clause for clause in (scenario, *scenario.get("cases", ())))


def check_stream_compaction(
    scenario: Mapping[str, Any], content: Mapping[str, Any], whole: Args, result: ScenarioResult
) -> None:
    """Check one scenario about stream objects; `content` is the file that it is in."""
    kind = scenario["kind"]
    shared = {name: scenario[name] for name in whole.names() if name not in _REMARKS}
    cases = scenario.get("cases", [{}])
    for number, case in enumerate(cases, start=1):
        args = Args({**shared, **case}, "scenario")
        facts = _RUNNERS[kind](args, scenario, content)
        mismatches = list(_differences(args, facts))
        if mismatches and not list(_differences(args, facts.get("otherwise", facts))):
            (rule,) = rules_for(kind, ["huge-object-left-alone"])
            result.deviate(number, kind, rule.feature)
            mismatches = []
        result.fail(number if len(cases) > 1 else 0, kind, [*mismatches, *args.unknown()])


def _differences(args: Args, facts: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Yield what does not hold of expected facts; an expectation that is no map is of the answer.

    What is derived may say the same in other words; a sentence of it is no fact.
    """
    for title in ("expect", "derived"):
        expected = args.take(title, {})
        if not isinstance(expected, Mapping):
            expected = {"answer": expected}
        for name, value in expected.items():
            if title == "derived" and isinstance(value, str):
                value = facts.get("said", {}).get(value, value)  # noqa: PLW2901
            yield from compare({name: value}, facts, title)


# ---- groups ----


def _rules(args: Args, kind: StreamCompaction) -> GroupRules:
    rules = group_rules_for(kind, args.take("group_size_threshold", None))
    return replace(
        rules,
        linked_bytes=args.take("major_v1_min_normal_object_size", rules.linked_bytes),
        dirty_bytes=args.take("max_dirty_bytes", rules.dirty_bytes),
    )


def _kind(args: Args, default: str | None = None) -> StreamCompaction:
    return _KINDS_BY_NAME[args.take("compaction_type", *([default] if default else []))]


def _objects(args: Args, scenario: Mapping[str, Any]) -> tuple[list[StreamObject], list[Any]]:
    if args.has("objects"):
        return listed_objects(args.take("objects"))
    return described_objects(str(scenario.get("notes", ""))), []


def _group_check(args: Args, scenario: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    objects, _tags = _objects(args, scenario)
    kind, start = _kind(args), args.take("stream_start", 0)
    return {"answer": is_worth_compacting(objects, kind, start, _rules(args, kind))}


def _filter(args: Args, scenario: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    objects, _tags = _objects(args, scenario)
    kind = _kind(args)
    return {"answer": is_eligible(objects, args.take("position"), kind, _rules(args, kind))}


def _group(args: Args, scenario: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    objects, tags = _objects(args, scenario)
    kind, chosen = _kind(args), args.take("filter", "type")
    rules = _rules(args, kind)
    ordered = sort_by_offset(objects)
    if chosen == "type":
        ordered = [one for at, one in enumerate(ordered) if is_eligible(ordered, at, kind, rules)]
    elif chosen != "none":
        raise ValueError(f"filter is {chosen!r}, expected type or none")
    facts = _group_facts(cut_groups(ordered, rules), tags)
    facts["otherwise"] = _group_facts(
        cut_groups(ordered, replace(rules, absorbed_bytes=None)), tags
    )
    return facts


def _group_cases(args: Args, scenario: Mapping[str, Any], c: Mapping[str, Any]) -> dict[str, Any]:
    """Group as above; the notes say whether groups are told by their first and last ids."""
    facts = _group(args, scenario, c)
    if "[first id, last id]" in str(scenario.get("notes", "")):
        for clause in (facts, facts["otherwise"]):
            clause["groups"] = [[group[0], group[-1]] for group in clause["groups"]]
    return facts


def _cleanup_groups(
    args: Args, scenario: Mapping[str, Any], _: Mapping[str, Any]
) -> dict[str, Any]:
    """Ask what a clean-up rewrites; without a stream start, what it would if enough were dirty."""
    objects, tags = _objects(args, scenario)
    kind = _kind(args, "CLEANUP_V1")
    rules = _rules(args, kind)
    if not args.has("stream_start"):
        ordered = sort_by_offset(objects)
        first = [shape for at, shape in enumerate(ordered) if is_eligible(ordered, at, kind, rules)]
        return _group_facts(cut_groups(first, rules), tags)
    plan = plan_stream(objects, args.take("stream_start"), kind, rules)
    return _group_facts(plan.groups, tags)


def _group_facts(groups: Sequence[Group], tags: Sequence[Any]) -> dict[str, Any]:
    members = [member for group in groups for member in group]
    ids = [[member.object_id for member in group] for group in groups]
    return {
        "answer": ids,
        "groups": ids,
        "group_count": len(groups),
        "objects": [member.object_id for member in members],
        "total_objects": len(members),
        "no_empty_group": all(groups),
        "has_composite": any(member.composite for member in members),
        "has_small_normal": any(not one.composite and one.size < _SMALL for one in members),
        "tags": [tags[member.crc32c] for member in members] if tags else [],
        "group_tags": [[tags[one.crc32c] for one in group] for group in groups] if tags else [],
    }


# ---- objects that are made ----


def _compact(args: Args, _: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    stream_id, objects = prepared_objects(content[args.take("input")])
    kind, stream, config = _kind(args), args.within("stream"), args.within("config", {})
    confirm = stream.take("confirm", _UNLIMITED)
    listed = [object_id for object_id, item in objects.items() if item.facts.start_offset < confirm]
    world = StreamObjectWorld(
        stream.take("stream", stream_id),
        stream.take("start"),
        objects,
        listed,
        args.take("next_object_id", max(objects) + 1),
    )
    world.compact(kind, _config(config, kind))
    requests = [world.facts(request) for request in world.commits]
    made = [request for request in requests if request["object"] >= 0]
    sources = [operation for request in requests for operation in request["operations"]]
    return {
        "requests": requests,
        "request_count": len(requests),
        "object_sizes": [object_["object_size"] for object_ in made],
        "index": [object_["index"] for object_ in made],
        "operations": sources,
        "said": {f"{name} for every source": [name] * len(sources) for name in set(sources)},
    }


def _config(config: Args, kind: StreamCompaction, **defaults: int) -> CompactionConfig:
    """Return a configuration by the rules that the scenarios know: nothing is left for later."""
    rules = _rules(Args({**defaults, **_taken(config)}), kind)
    return CompactionConfig(
        index_merge_bytes=config.take("block_group_size_threshold", 1024 * 1024),
        group_rules={
            kind_: rules if kind_ is kind else group_rules_for(kind_) for kind_ in StreamCompaction
        },
    )


def _taken(config: Args) -> dict[str, Any]:
    names = ("group_size_threshold", "major_v1_min_normal_object_size", "max_dirty_bytes")
    return {name: config.take(name) for name in names if config.has(name)}


def _made_of(kind: StreamCompaction) -> Callable[..., dict[str, Any]]:
    """Return a runner that makes one object of sources that are named."""

    def run(args: Args, _: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
        stream_id, objects = prepared_objects(content[args.take("input")])
        config = args.within("config", {})
        bucket = args.take("bucket", None)
        if bucket is not None and {item.facts.bucket_id for item in objects.values()} != {bucket}:
            raise ValueError(f"bucket is {bucket}, but the sources are not in it")
        world = StreamObjectWorld(
            stream_id,
            args.take("stream_start", 0),
            objects,
            args.take("sources"),
            args.take("result_object"),
        )
        unlimited = {
            "group_size_threshold": _UNLIMITED,
            "major_v1_min_normal_object_size": 0,
            "max_dirty_bytes": 0,
        }
        world.compact(kind, _config(config, kind, **unlimited))
        if len(world.commits) != 1:
            raise ValueError(f"there were {len(world.commits)} commits, expected one")
        return world.facts(world.commits[0])

    return run


_RUNNERS: Mapping[str, Callable[[Args, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    "group_check": _group_check,
    "group": _group,
    "filter": _filter,
    "group_cases": _group_cases,
    "cleanup_v1_groups": _cleanup_groups,
    "compact": _compact,
    "physical_merge": _made_of(StreamCompaction.MERGE_LARGE),
    "composite_compact": _made_of(StreamCompaction.LINK),
}

STREAM_KINDS = frozenset(_RUNNERS)
"""What a scenario about stream objects may be of."""


NAMESPACE = "scenario"
BLOCK_SIZE = 53


def delete_composites(given: Args, result: ScenarioResult) -> dict[str, Any]:
    """Build the composites, delete them and their links; return what was deleted."""
    composites, linked = given.take("composites"), given.take("linked_per_composite")
    bucket = given.take("bucket", 0)
    stored: dict[str, bytes] = {}
    for number in range(composites):
        first = number * (linked + 1)
        ids = range(first, first + linked)
        stored |= {key_for(object_id, NAMESPACE): b"" for object_id in ids}
        links = [
            LinkedObject(object_id, bucket, (IndexEntry(1, at, at + 1, 1, 0, BLOCK_SIZE),))
            for at, object_id in enumerate(ids)
        ]
        stored[key_for(first + linked, NAMESPACE)] = encode_composite(links)
    deleted: list[int] = []
    for number in range(composites):
        composite_id = number * (linked + 1) + linked
        key = key_for(composite_id, NAMESPACE)
        composite = decode_composite(stored[key], source=key)
        for object_id in (*(link.object_id for link in composite.links), composite_id):
            del stored[key_for(object_id, NAMESPACE)]
            deleted.append(object_id)
    result.deviate(0, "composites", "links-in-the-map")
    return {
        "all_object_keys_deleted": not stored,
        "deleted_object_ids": [min(deleted), max(deleted)],
        "deleted_object_count": len(deleted),
    }
