"""Scenarios about stream objects: facts that do not hold are found, and files may be cut freely."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conformance.conformance_files import run_file, run_scenario

VECTORS = Path(__file__).parent.parent / "vectors" / "so_compaction.yaml"
CONTENT: dict[str, Any] = yaml.safe_load(VECTORS.read_text())
SCENARIOS: dict[str, Any] = {one["name"]: one for one in CONTENT["scenarios"]}
GIB = 2**30


def failures(scenario: dict[str, Any], content: dict[str, Any] | None = None) -> list[str]:
    result = run_scenario("made up", scenario, content or CONTENT)
    return [line.partition(", step ")[2] for line in result.lines()]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Every number, word and truth value in a tree, with the way to it."""
    if isinstance(value, dict):
        return [place for key, part in value.items() for place in _places(part, (*path, key))]
    if isinstance(value, list):
        return [place for at, part in enumerate(value) for place in _places(part, (*path, at))]
    return [(path, value)]


def _with(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(tree)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_fact_of_the_vectors_is_looked_at(name: str) -> None:
    scenario = SCENARIOS[name]
    assert failures(scenario) == []
    places = [
        (path, value)
        for path, value in _places(scenario)
        if "expect" in path or ("derived" in path and not isinstance(value, str))
    ]
    assert places
    for path, value in places:
        wrong = (not value) if isinstance(value, bool) else f"not {value}"
        assert failures(_with(scenario, path, wrong)), path


def test_a_field_that_nobody_knows_fails() -> None:
    scenario = SCENARIOS["group_by_size_and_continuity"] | {"moons": 1}
    assert failures(scenario) == ["0 (group): scenario.moons: expected 1, got unknown field"]
    scenario = SCENARIOS["major_compaction"] | {"config": {"moons": 1}}
    assert "0 (compact): config.moons: expected 1, got unknown field" in failures(scenario)


def composite(object_id: int, start: int, end: int, tag: str = "") -> dict[str, Any]:
    """A composite of one GiB for each thousand offsets."""
    size = (end - start) * GIB // 1000
    fields = {"object": object_id, "start": start, "end": end, "size": size, "type": "composite"}
    return fields | ({"tag": tag} if tag else {})


def test_what_a_clean_up_rewrites_may_be_asked_in_cases() -> None:
    objects = [composite(1, 0, 1000), composite(2, 1000, 2000)]
    scenario = {
        "name": "one",
        "kind": "cleanup_v1_groups",
        "objects": objects,
        "cases": [
            {"stream_start": 0, "expect": {"groups": []}},
            {"stream_start": 600, "expect": {"groups": [[1]], "group_count": 1}},
            {"stream_start": 1600, "expect": [[2]]},
            {"expect": {"groups": [[1]]}},
        ],
    }
    assert failures(scenario) == []
    wrong = _with(scenario, ("cases", 1, "expect", "groups"), [[1, 2]])
    assert failures(wrong) == ["2 (cleanup_v1_groups): expect.groups[0]: expected [1, 2], got [1]"]


def test_objects_that_are_listed_twice_are_told_by_their_tags() -> None:
    scenario = {
        "name": "one",
        "kind": "group",
        "compaction_type": "MAJOR_V1",
        "objects": [composite(1, 0, 10, "a"), composite(1, 0, 10, "b"), composite(2, 10, 20, "c")],
        "expect": {"groups": [[1, 2]], "tags": ["b", "c"], "group_tags": [["b", "c"]]},
    }
    assert failures(scenario) == []


def test_an_object_too_large_to_be_pulled_in_is_a_listed_deviation() -> None:
    sizes = [3, 33, 2, 2]
    scenario = {
        "name": "one",
        "kind": "group",
        "compaction_type": "MINOR_V1",
        "group_size_threshold": 4,
        "objects": [
            {"object": at, "start": at, "end": at + 1, "size": size, "type": "normal"}
            for at, size in enumerate(sizes)
        ],
        "expect": {"groups": [[0, 1], [2, 3]]},
    }
    (line,) = failures(scenario)
    assert line.startswith("1 (group): huge-object-left-alone: ")
    here = _with(scenario, ("expect", "groups"), [[0], [1], [2, 3]])
    assert failures(here) == []
    neither = _with(scenario, ("expect", "groups"), [[0, 1, 2], [3]])
    assert not any("huge" in line for line in failures(neither))


def test_other_kinds_of_compaction_run_on_other_objects() -> None:
    """A composite that is there already, a bucket of one object, nothing in words."""
    entry = {"start": 0, "end": 4, "records": 2, "position": 0, "size": 10 + 2 * 33 + 11}
    second = {"start": 4, "end": 5, "records": 1, "position": 0, "size": 10 + 33}
    content = {
        "others": {
            "stream": 7,
            "bucket": 2,
            "objects": [
                {"object": 3, "start": 0, "end": 4, "size": 87 + 84, "index": [entry]},
                {"object": 4, "start": 4, "end": 5, "size": 43 + 84, "index": [second]},
                {"object": 5, "start": 0, "end": 4, "size": 87, "type": "composite", "links": [3]},
            ],
        }
    }
    linked = {
        "name": "one",
        "kind": "composite_compact",
        "input": "others",
        "sources": [5, 4],
        "result_object": 9,
        "expect": {
            "type": "composite",
            "bucket": 2,
            "sources": [5, 4],
            "operations": ["DELETE", "KEEP_DATA"],
            "block_offsets": [[0, 2], [4]],
            "linked_objects": [
                {"object": 3, "first_index": 0, "end_index": 1},
                {"object": 4, "first_index": 1, "end_index": 2},
            ],
        },
    }
    assert failures(linked, content) == []
    gathered = {
        "name": "two",
        "kind": "compact",
        "input": "others",
        "compaction_type": "MINOR_V1",
        "stream": {"stream": 7, "start": 4},
        "next_object_id": 20,
        "expect": {
            "requests": [{"object": -1, "sources": [3, 5], "operations": ["DEEP_DELETE"] * 2}]
        },
    }
    assert failures(gathered, content) == []


def test_a_file_of_its_own_runs_with_any_name_of_its_objects(tmp_path: Path) -> None:
    scenario = SCENARIOS["major_compaction"] | {"input": "things"}
    path = tmp_path / "cut.yaml"
    path.write_text(
        yaml.safe_dump({"things": CONTENT["prepared_objects"], "scenarios": [scenario]})
    )
    results = list(run_file(path))
    assert [line for result in results for line in result.lines()] == []
    assert [result.is_counted for result in results] == [True]
