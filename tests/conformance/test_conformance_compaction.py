"""Scenarios about compaction: a changed fact is found, and listed differences are told."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conformance.compaction_scenarios import is_set_compaction
from tests.conformance.conformance_files import run_scenario
from tests.conformance.conformance_report import ScenarioResult

VECTORS = Path(__file__).parent.parent / "vectors" / "compaction.yaml"
CONTENT: dict[str, Any] = yaml.safe_load(VECTORS.read_text())
SCENARIOS: dict[str, dict[str, Any]] = {one["name"]: one for one in CONTENT["scenarios"]}
TOLD_OTHERWISE = {("block_larger_than_cache_is_an_error", "error")}
"""Facts that a listed difference replaces, so that it does not matter what they are."""


def run(scenario: dict[str, Any]) -> ScenarioResult:
    assert is_set_compaction(scenario)
    return run_scenario("made up", scenario, CONTENT)


def failures(result: ScenarioResult) -> list[str]:
    return [line for line in result.lines() if line.startswith("FAILED")]


def sections(scenario: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The maps of facts of a scenario and its requests, and how they are called."""
    requests = scenario.get("requests", [])
    places = [("", scenario), *((f"requests[{at}].", call) for at, call in enumerate(requests))]
    for title, place in places:
        for name in ("expect", "derived"):
            if name in place:
                yield title + name, place[name]


def changed(value: Any) -> Any:
    """Something of the same kind that is not equal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, dict) and value:
        first = next(iter(value))
        return value | {first: changed(value[first])}
    if isinstance(value, list) and value:
        return [*value[:-1], changed(value[-1])]
    return [0] if value == [] else "something else"


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_fact_that_is_changed_is_found(name: str) -> None:
    scenario = copy.deepcopy(SCENARIOS[name])
    places = []
    for title, section in sections(scenario):
        for fact in section:
            if (name, fact) not in TOLD_OTHERWISE:
                section[fact] = changed(section[fact])
                places.append(f"{title}.{fact}")
    said = [line.split("): ")[1].split(": expected")[0] for line in failures(run(scenario))]
    assert [place for place in places if not any(one.startswith(place) for one in said)] == []


def blocks(*rows: tuple[int, int, int]) -> list[dict[str, int]]:
    """Blocks of one object, one after the other, with 100 bytes each."""
    return [
        {"stream": stream, "start": start, "end": end}
        | {"records": 1, "position": 100 * number, "size": 100}
        for number, (stream, start, end) in enumerate(rows)
    ]


LIMITS = {"stream_split_size": 250, "max_stream_num_in_stream_set": 9, "max_stream_object_num": 9}
TWO_SHARING = {0: blocks((0, 0, 5), (1, 0, 5)), 1: blocks((0, 5, 9), (1, 5, 9))}

DIFFERENT: dict[str, dict[str, Any]] = {
    "overlap-left-out": {
        "kind": "plan",
        "config": {"cache_size": 1000, **LIMITS},
        "input_blocks": TWO_SHARING | {7: [[3, 0, 10]], 8: [[3, 9, 20]]},
        "expect": {"plan_count": 0, "plans": []},
    },
    "oversized-entry-left-out": {
        "kind": "compact",
        "config": {"cache_size": 250, **LIMITS},
        "input_blocks": TWO_SHARING
        | {7: [{"stream": 3, "start": 0, "end": 9, "records": 1, "position": 0, "size": 251}]},
        "expect": {"error": True},
    },
    "cuts-count-toward-the-limit": {
        "kind": "plan",
        "config": {"cache_size": 200, **LIMITS, "max_stream_object_num": 1},
        "input_blocks": TWO_SHARING | {2: blocks((0, 9, 10)), 3: blocks((0, 10, 11))},
        "expect": {"plan_count": 3},
    },
    "oversized-range-cut": {
        "kind": "force_split",
        "config": {"cache_size": 200},
        "input_blocks": {0: blocks((0, 0, 5), (0, 5, 6), (0, 6, 9))},
        "requests": [{"object": 0, "expect": {"request": None}}],
    },
    # More ranges than stream objects allowed.
    "limit-of-a-force-split": {
        "kind": "force_split",
        "config": {"cache_size": 1000, "max_stream_object_num": 1},
        "input_blocks": {0: blocks((0, 0, 5), (1, 5, 6), (2, 6, 9))},
        "requests": [{"object": 0, "expect": {"stream_set_object": -1, "stream_object_count": 3}}],
    },
    # Sources listed from the newest to the oldest.
    "order-of-the-oldest-source": {
        "kind": "compact",
        "config": {"cache_size": 1000, **LIMITS},
        "input_blocks": TWO_SHARING,
        "candidates": [1, 0],
        "expect": {"compacted_objects": [0, 1], "stream_range_count": 2, "order_id": 1},
    },
}
"""By the name of the difference."""


@pytest.mark.parametrize("feature", DIFFERENT)
def test_a_listed_difference_is_told_and_does_not_fail(feature: str) -> None:
    result = run({"name": feature, **DIFFERENT[feature]})
    assert failures(result) == []
    assert [deviation.rule.feature for deviation in result.deviations] == [feature]


def test_what_a_scenario_says_beyond_what_is_understood_fails() -> None:
    scenario = SCENARIOS["compact_basic"]
    (said,) = failures(run(scenario | {"moon": 1}))
    assert said.endswith("step 0 (compact): scenario.moon: expected 1, got unknown field")
    config = scenario["config"] | {"moon": 1}
    assert "config.moon" in failures(run(scenario | {"config": config}))[0]
    assert "input set 'moon' is missing" in failures(run(scenario | {"input": "moon"}))[0]
    broken = SCENARIOS["compact_read_failure_object_2"] | {"fault": {"moon": 1}}
    assert "fault moon" in failures(run(broken))[0]
    written = copy.deepcopy(SCENARIOS["compact_single_outdated_object"])
    written["objects"][3]["blocks"][0]["size"] += 1
    assert "object 3 has the blocks" in failures(run(written))[0]


def test_a_scenario_about_one_stream_is_none_of_these() -> None:
    assert not is_set_compaction({"kind": "group", "compaction_type": "MINOR"})
    assert not is_set_compaction({"kind": "moon"})
