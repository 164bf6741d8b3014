"""Scenarios about shapes of brokers: every fact is looked at, and no scenario is passed over."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conformance.conformance_files import run_file, run_scenario
from tests.conformance.shape_scenarios import SHAPE_RUNNERS

VECTORS = Path(__file__).parent.parent / "vectors"
FILES = ("rocketmq.yaml", "pulsar.yaml")
CONTENTS: dict[str, Any] = {name: yaml.safe_load((VECTORS / name).read_text()) for name in FILES}
SCENARIOS = {
    scenario["name"]: (content, scenario)
    for content in CONTENTS.values()
    for scenario in content["scenarios"]
}
REMARKS = {"checked", "notes"}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every number, word and truth value in a tree, with the way to it."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key not in REMARKS:
                yield from places(part, (*path, key))
    elif isinstance(value, list) and value:
        for at, part in enumerate(value):
            yield from places(part, (*path, at))
    else:
        yield path, value


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    at = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = (not value) if isinstance(value, bool) else f"not {value}"
    return tree


def facts_of(scenario: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for section in ("expect", "derived"):
        if section in scenario:
            yield from places(scenario[section], (section,))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_fact_is_looked_at(name: str) -> None:
    content, scenario = SCENARIOS[name]
    assert not list(run_scenario("made up", scenario, content).lines())
    stated = list(facts_of(scenario))
    assert stated
    for path, value in stated:
        wrong = changed(scenario, path, value)
        assert not run_scenario("made up", wrong, content).is_passed, path


def test_every_runner_has_a_scenario() -> None:
    assert SCENARIOS.keys() == SHAPE_RUNNERS.keys()


@pytest.mark.parametrize("file", FILES)
def test_every_number_of_the_tables_is_looked_at(file: str, tmp_path: Path) -> None:
    layout = CONTENTS[file]["layout"]
    path = tmp_path / file
    for table, at in ((name, at) for name in ("defaults",) for at in layout[name]):
        if isinstance(layout[table][at], int):
            wrong = changed(layout, (table, at), layout[table][at])
            path.write_text(yaml.safe_dump({"layout": wrong}))
            assert not all(result.is_passed for result in run_file(path)), at
