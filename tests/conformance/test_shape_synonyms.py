"""Other names, units and forms of what scenarios state, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.conformance_files import run_scenario
from tests.conformance.not_offered import feature_of
from tests.conformance.shape_facts import Data, Keyed, Number, Refused, match
from tests.conformance.shape_synonyms import (
    plain_times,
    relation_in,
    size_in,
    time_in,
    with_known_keys,
)


def fits(stated: Any, found: Any) -> bool:
    return not list(match(stated, found, ""))


def test_sizes_and_times_have_units() -> None:
    assert [size_in(text) for text in ("64KiB", "1 MB", "5 bytes", "7", "x")] == [
        65536,
        1048576,
        5,
        None,
        None,
    ]
    assert [time_in(text) for text in ("5 minutes", "1 day and 1 ms", "500ms", "5")] == [
        300_000,
        86_400_001,
        500,
        None,
    ]
    assert plain_times("wait 1 day and 1 ms") == "wait 86400001 ms"


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
    assert with_known_keys(said, known, lambda _: False) == meant


def test_a_key_of_the_shape_wins_over_its_synonym() -> None:
    known = frozenset(["lag_ms", "lag"])
    assert with_known_keys({"lag": 1, "lag_ms": 2}, known, lambda _: False) == {
        "lag": 1,
        "lag_ms": 2,
    }


@pytest.mark.parametrize(
    "said", [">= 3", "at least 3", "more than 2", "between 1 and 3", "3 or more"]
)
def test_relations_hold_of_numbers(said: str) -> None:
    relation = relation_in(said)
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
