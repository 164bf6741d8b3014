"""Scenarios about stream objects: facts that do not hold are found, and files may be cut freely."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conformance.conformance_files import run_scenario

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
