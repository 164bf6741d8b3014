"""Scenarios about shapes of brokers and stream objects: how they are chosen, and every fact."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conformance import shape_synonyms
from tests.conformance.conformance_files import run_file, run_scenario
from tests.conformance.conformance_report import ScenarioResult
from tests.conformance.not_offered import feature_of
from tests.conformance.shape_facts import Data, Keyed, Number, Refused, match
from tests.conformance.shape_scenarios import SHAPES
from tests.conformance.shape_vocabulary import choose, input_of

HERE = Path(__file__).parent
VECTORS = HERE.parent / "vectors"
FILES = ("rocketmq.yaml", "pulsar.yaml", "kafka.yaml")
UNSEEN = tuple(HERE / f"unseen_{name}" for name in FILES)
CONTENTS: dict[str, Any] = {
    path.name: yaml.safe_load(path.read_text())
    for path in (*(VECTORS / name for name in FILES), *UNSEEN)
}
SCENARIOS = {
    scenario["name"]: (content, scenario)
    for content in CONTENTS.values()
    for scenario in content["scenarios"]
}
SAMPLED = [
    pytest.param(name, marks=() if number % 3 == 0 else pytest.mark.slow)
    for number, name in enumerate(SCENARIOS)
]
"""All scenarios, of which one in three is changed in each run: changing them takes minutes."""

REMARKS = {"checked", "notes"}
EXAMPLES = re.findall(r"```yaml\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)


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
    at[path[-1]] = value
    return tree


def other(value: Any) -> Any:
    return (not value) if isinstance(value, bool) else f"not {value}"


def facts_of(scenario: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for section in ("expect", "derived"):
        if section in scenario:
            yield from places(scenario[section], (section,))


def run(scenario: Mapping[str, Any], content: Mapping[str, Any]) -> ScenarioResult:
    return run_scenario("made up", scenario, content)


def said(result: ScenarioResult) -> str:
    return "\n".join(line for line in result.lines() if not line.startswith("deviation"))


# ---- facts ----


@pytest.mark.parametrize("name", SAMPLED)
def test_every_fact_is_looked_at(name: str) -> None:
    content, scenario = SCENARIOS[name]
    result = run(scenario, content)
    assert not said(result)
    if not result.is_counted:
        return
    stated = list(facts_of(scenario))
    assert stated
    for path, value in stated:
        wrong = changed(scenario, path, other(value))
        assert not run(wrong, content).is_passed, path


@pytest.mark.parametrize("file", FILES)
def test_every_number_of_the_tables_is_looked_at(file: str, tmp_path: Path) -> None:
    layout = CONTENTS[file]["layout"]
    path = tmp_path / file
    for table, at in ((name, at) for name in ("defaults",) for at in layout.get(name, ())):
        if isinstance(layout[table][at], int):
            wrong = changed(layout, (table, at), other(layout[table][at]))
            path.write_text(yaml.safe_dump({"layout": wrong}))
            assert not all(result.is_passed for result in run_file(path)), at


def test_positions_and_sizes_of_a_batch_are_looked_at() -> None:
    layout = CONTENTS["kafka.yaml"]["layout"]
    assert _layout_passes(layout)
    for at, field in enumerate(layout["record_batch_v2"]["fields"][:-1]):
        wrong = changed(layout, ("record_batch_v2", "fields", at, 2), field[2] + 1)
        assert not _layout_passes(wrong), field
    for place in (("record_batch_v2", "header_size"), ("producer_snapshot", "entry_size")):
        assert not _layout_passes(changed(layout, place, 7)), place


def _layout_passes(layout: Mapping[str, Any]) -> bool:
    from tests.conformance.shape_layouts import SHAPE_LAYOUTS, check_shape_layout

    tables = [name for name in layout if name in SHAPE_LAYOUTS]
    return not [problem for name in tables for problem in check_shape_layout(name, layout[name])]


# ---- dispatch ----


@pytest.mark.parametrize("file", CONTENTS)
def test_neither_name_nor_order_nor_source_counts(file: str, tmp_path: Path) -> None:
    """Scenarios that refer to another one name it by its new name."""
    chance = random.Random(3)
    scenarios = copy.deepcopy(CONTENTS[file]["scenarios"])
    names = {scenario["name"]: f"s{chance.randrange(1 << 40)}" for scenario in scenarios}
    text = yaml.safe_dump(scenarios, sort_keys=False)
    for old, new in names.items():
        text = re.sub(rf"(?<![\w.]){old}(?!\w)", new, text)
    renamed = yaml.safe_load(text)
    for clause in renamed:
        clause.pop("source"), clause.pop("notes", None)
    chance.shuffle(renamed)
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump({"scenarios": renamed}, sort_keys=False))

    results = list(run_file(path))
    assert [said(result) for result in results if said(result)] == []
    before = [run(*reversed(SCENARIOS[one["name"]])) for one in CONTENTS[file]["scenarios"]]
    assert sum(result.is_counted for result in results) == sum(fact.is_counted for fact in before)


def test_a_scenario_of_another_file_may_be_referred_to() -> None:
    derived = SCENARIOS["index_compacted_bytes"][1]["derived"]
    alone = {"name": "x", "input": {"file": "index_local_bytes"}, "derived": derived}
    assert not said(run(alone, {"scenarios": [alone]}))


@pytest.mark.parametrize("name", SAMPLED)
def test_a_number_of_the_input_changes_the_facts(name: str) -> None:
    """At least one number of an input counts, in words as well; those of limits need not."""
    content, scenario = SCENARIOS[name]
    if not run(scenario, content).is_counted or name in INDEPENDENT:
        return
    sections = [part for part in ("input", "given", "steps") if part in scenario]
    values = [(path, value) for part in sections for path, value in places(scenario[part], (part,))]
    numbers = [
        (path, value)
        for path, value in values
        if not isinstance(value, bool) and re.search(r"\d", str(value))
    ]
    assert not numbers or any(
        not run(changed(scenario, path, with_numbers(value, change)), content).is_passed
        for path, value in numbers
        for change in (lambda number: number + 1, lambda number: number * 7 + 1, lambda _: 0)
    )


def with_numbers(value: Any, change: Callable[[int], int]) -> Any:
    """The value with other numbers in it."""
    if isinstance(value, int):
        return change(value)
    return re.sub(r"\d+", lambda found: str(change(int(found[0]))), str(value))


INDEPENDENT = {
    "split_buffer_rejects_bad_arguments",  # every number of bytes is refused
    "metadata_topics",  # reserve times are read back by nothing that it states
    "metadata_topic_again",
    "metadata_reload",  # whatever is there is found again
    "offload_empty_ledger",  # a ledger without an entry has no other numbers
    "offload_unknown_data_version",  # every other version is unknown too
    "offload_unknown_index_version",
    "segment_nothing_to_commit",  # every commit succeeds
    "segment_closed_between",  # nothing is committed at any offset
    "segment_append_closed",
    "offload_open_ledger",
    "producer_expires",  # a producer that is not known may begin anywhere
}
"""Scenarios whose facts hold whatever their numbers are."""


# ---- what is not understood ----

SEGMENT = {
    "name": "segment",
    "source": "none",
    "input": {"base_offset": 1000, "max_size": 2000, "steps": ["append MSG", "commit"]},
    "expect": {"commit_offset": 1123},
}


def test_a_key_that_is_not_known_is_named_with_those_that_are() -> None:
    wrong = changed(SEGMENT, ("input", "colour"), "red")
    text = said(run(wrong, {}))
    assert "not understood: input.colour (known: " in text
    assert "base_offset" in text
    assert text.count("FAILED") == 1


def test_a_step_that_is_not_known_is_named_and_the_others_are_done() -> None:
    steps = ["append MSG", "paint it red", "commit"]
    text = said(run(changed(SEGMENT, ("input", "steps"), steps), {}))
    assert "not understood: step 'paint it red' (known: " in text
    assert text.count("FAILED") == 1


def test_words_of_a_step_that_are_not_known_are_named() -> None:
    steps = ["append MSG", "commit backwards"]
    text = said(run(changed(SEGMENT, ("input", "steps"), steps), {}))
    assert "not understood: 'backwards' in 'commit backwards'" in text


def test_a_fact_that_is_not_known_is_named_and_the_others_are_checked() -> None:
    wrong = {**SEGMENT, "expect": {"colour": "red", "commit_offset": 7}}
    text = said(run(wrong, {}))
    assert "not understood: expect.colour (known: " in text
    assert "expect.commit_offset: expected 7, got 1123" in text


def test_an_input_of_no_shape_fails_only_its_scenario(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    none = {"name": "none", "input": {"colour": "red"}, "expect": {"x": 1}}
    path.write_text(yaml.safe_dump({"scenarios": [none, SEGMENT]}))
    first, second = run_file(path)
    assert "not understood: input colour (known: " in said(first)
    assert not said(second)


def test_a_scenario_that_breaks_the_runner_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    broken = {"name": "broken", "input": {"stored": "many", "requests": 3}, "expect": [1]}
    path.write_text(yaml.safe_dump({"scenarios": [broken, SEGMENT]}))
    first, second = run_file(path)
    assert said(first)
    assert not said(second)


def test_what_is_not_offered_is_a_deviation_and_counts_neither_way() -> None:
    late = {"name": "late", "input": ["transaction of 39 at 100"], "expect": {"late": [False]}}
    result = run(late, {})
    assert not result.is_counted
    assert next(result.lines()).startswith("deviation: ")


# ---- the vocabulary ----


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_example_of_the_readme_runs(text: str) -> None:
    for number, example in enumerate(yaml.safe_load(text)):
        result = run({"name": f"example {number}", **example}, {})
        assert result.is_counted
        assert not said(result)


def test_the_readme_has_every_shape_key_and_step() -> None:
    text = (HERE / "README.md").read_text()
    for shape in SHAPES:
        if shape.run is None:
            assert shape.name.removeprefix("not offered: ") in text
            continue
        (section,) = re.findall(rf"### {shape.name}\n(.*?)(?=\n### |\n## )", text, re.DOTALL)
        listed = set(re.findall(r"`([^`]+)`", section))
        assert shape.all_keys <= listed, shape.name
        assert "```yaml" in section
        if shape.world is not None:
            assert {verb.example for verb in shape.world.verbs} <= listed, shape.name


def test_every_example_of_a_shape_has_that_shape() -> None:
    text = (HERE / "README.md").read_text()
    names = "|".join(shape.name for shape in SHAPES)
    pattern = rf"### ({names})\n(.*?)(?=\n### |\n## )"
    for name, section in re.findall(pattern, text, re.DOTALL):
        (example,) = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[0])
        stated = {**_map(example.get("derived")), **_map(example.get("expect"))}
        value = input_of(example, {key: example_ for key, (_, example_) in SCENARIOS.items()})
        chosen = choose(SHAPES, value, stated or example.get("expect", example.get("derived")), "")
        assert chosen is not None
        assert chosen[0].name == name


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# ---- other names, units and forms ----


def fits(stated: Any, found: Any) -> bool:
    return not list(match(stated, found, ""))


def test_sizes_and_times_have_units() -> None:
    assert [shape_synonyms.size_in(text) for text in ("64KiB", "1 MB", "5 bytes", "7", "x")] == [
        65536,
        1048576,
        5,
        None,
        None,
    ]
    assert [
        shape_synonyms.time_in(text) for text in ("5 minutes", "1 day and 1 ms", "500ms", "5")
    ] == [
        300_000,
        86_400_001,
        500,
        None,
    ]
    assert shape_synonyms.plain_times("wait 1 day and 1 ms") == "wait 86400001 ms"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"lag_seconds": 2}, {"lag_ms": 2000}),
        ({"lag": "2 s"}, {"lag_ms": 2000}),
        ({"maxSize": "2KiB"}, {"max_size": 2048}),
        ({"query": [1]}, {"queries": [1]}),
        ({"source_deleted": True}, {"bookkeeper_deleted": True}),
        ({"config": {"max_size": 5}}, {"max_size": 5}),
        ({"colour": 1}, {"colour": 1}),
    ],
)
def test_keys_have_other_forms(said: Any, meant: Any) -> None:
    known = frozenset(["lag_ms", "max_size", "queries", "bookkeeper_deleted"])
    assert shape_synonyms.with_known_keys(said, known, lambda _: False) == meant


def test_a_key_of_the_shape_wins_over_its_synonym() -> None:
    known = frozenset(["lag_ms", "lag"])
    assert shape_synonyms.with_known_keys({"lag": 1, "lag_ms": 2}, known, lambda _: False) == {
        "lag": 1,
        "lag_ms": 2,
    }


@pytest.mark.parametrize(
    "said", [">= 3", "at least 3", "more than 2", "between 1 and 3", "3 or more"]
)
def test_relations_hold_of_numbers(said: str) -> None:
    relation = shape_synonyms.relation_in(said)
    assert relation is not None
    assert relation(3)
    assert not relation(0)
    assert fits(said, Number(3))
    assert fits(said, [1, 2, 3])
    assert not fits(said, Number(0))


def test_facts_are_found_one_level_deeper() -> None:
    facts = Keyed({"consume_queue": [0, 3, 5], "context": {"end_offset": 7}, "segments": 2})
    assert fits({"consume_queue": {"min": 0, "committed": 3, "end": 5}}, facts)
    assert fits({"consume_queue_end": 5, "context_end_offset": 7, "segment_count": 2}, facts)
    assert not fits({"consume_queue_end": 3}, facts)
    assert not fits({"consume_queue": {"min": 1}}, facts)
    assert not fits({"colour": {"min": 1}}, facts)


def test_bytes_and_errors_have_other_forms() -> None:
    data = Data(b"\x01\xff")
    assert all(fits(said, data) for said in ("01ff", "0x01FF", "01 ff", "Af8="))
    assert not fits("01fe", data)
    refused = Refused(None, "OffsetOutOfRange")
    assert fits("org.apache.kafka.common.errors.OffsetOutOfRangeException", refused)
    assert fits("OFFSET_OUT_OF_RANGE", refused)
    assert not fits("CorruptRecordException", refused)


def test_cases_are_inputs_with_common_keys() -> None:
    cases = [{"lag_ms": 500}, {"lag_ms": 2000}]
    common = {"age_ms": 1000, "complete": True, "bookkeeper_deleted": False}
    scenario = {"name": "x", "input": {**common, "cases": cases}, "expect": [True, False]}
    assert not list(run_scenario("made up", scenario, {}).lines())


def test_only_words_of_a_scenario_itself_name_a_feature() -> None:
    assert feature_of({"input": ["truncate to 5"]}) == "truncation"
    assert feature_of({"name": "truncate", "source": "TruncateTest", "input": ["append 5"]}) is None
    wrong = {"name": "x", "input": {"max_size": 9, "steps": ["roll at 0"]}, "expect": {"colour": 1}}
    assert run_scenario("made up", wrong, {}).is_counted


# ---- stream objects ----

OBJECT_CONTENT: dict[str, Any] = yaml.safe_load((VECTORS / "so_compaction.yaml").read_text())
OBJECT_SCENARIOS: dict[str, Any] = {one["name"]: one for one in OBJECT_CONTENT["scenarios"]}


def failures(scenario: dict[str, Any]) -> list[str]:
    return [line.partition(", step ")[2] for line in run(scenario, OBJECT_CONTENT).lines()]


@pytest.mark.parametrize("name", OBJECT_SCENARIOS)
def test_every_fact_of_the_vectors_is_looked_at(name: str) -> None:
    scenario = OBJECT_SCENARIOS[name]
    assert failures(scenario) == []
    stated = [
        (path, value)
        for path, value in places(scenario)
        if "expect" in path or ("derived" in path and not isinstance(value, str))
    ]
    assert stated
    for path, value in stated:
        assert failures(changed(scenario, path, other(value))), path


def test_a_field_that_nobody_knows_fails() -> None:
    scenario = OBJECT_SCENARIOS["group_by_size_and_continuity"] | {"moons": 1}
    assert failures(scenario) == ["0 (group): scenario.moons: expected 1, got unknown field"]
    scenario = OBJECT_SCENARIOS["major_compaction"] | {"config": {"moons": 1}}
    assert "0 (compact): config.moons: expected 1, got unknown field" in failures(scenario)


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
    here = changed(scenario, ("expect", "groups"), [[0], [1], [2, 3]])
    assert failures(here) == []
    neither = changed(scenario, ("expect", "groups"), [[0, 1, 2], [3]])
    assert not any("huge" in line for line in failures(neither))
