"""All scenarios hold, and each kind of fact that does not hold is found and said."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from tests.conformance.compaction_scenarios import KINDS
from tests.conformance.conformance_files import run_file, run_scenario
from tests.conformance.conformance_main import main, quiet
from tests.conformance.conformance_report import ScenarioResult, rules, rules_for
from tests.conformance.scenario_steps import OPERATIONS
from tests.conformance.stream_object_scenarios import STREAM_KINDS

VECTORS = Path(__file__).parent.parent / "vectors"
OWN = Path(__file__).parent / "own_scenarios.yaml"
FILES = [*sorted(VECTORS.glob("*.yaml")), OWN]

REGISTER = {"op": "get_opening_streams", "args": {"node": 0, "node_epoch": -1}}
CREATE = {"op": "create_stream", "args": {"node": 0}}
OPEN = {"op": "open_stream", "args": {"node": 0, "stream": 0, "epoch": 0}}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = structlog.get_config()
    quiet()
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_scenario_holds(path: Path) -> None:
    results = list(run_file(path))
    failures = [line for result in results for line in result.lines() if line.startswith("FAILED")]
    assert not failures, "\n".join(failures)
    assert any(result.is_counted for result in results)


def _run(*steps: Mapping[str, Any], **fields: Any) -> ScenarioResult:
    return run_scenario("made up", {"name": "one", "steps": [REGISTER, *steps], **fields}, {})


def _only_failure(result: ScenarioResult) -> str:
    lines = [line for line in result.lines() if line.startswith("FAILED")]
    assert len(lines) == 1, lines
    return lines[0].removeprefix("FAILED made up one, ")


WRONG: dict[str, list[Mapping[str, Any]]] = {
    "expect.error: expected STREAM_FENCED, got NONE": [
        CREATE | {"expect": {"error": "STREAM_FENCED"}}
    ],
    "expect.stream_id: expected 1, got 0": [CREATE | {"expect": {"stream_id": 1}}],
    "expect.next_offset: expected 7, got 0": [CREATE, OPEN | {"expect": {"next_offset": 7}}],
    "expect.colour: expected 7, got no such field": [CREATE | {"expect": {"colour": 7}}],
    "state_after.streams[0].state: expected CLOSED, got OPENED": [
        CREATE,
        OPEN | {"state_after": {"streams": {0: {"state": "CLOSED"}}}},
    ],
    "state_after.streams[0].current_range.end: expected 5, got 0": [
        CREATE,
        OPEN | {"state_after": {"streams": {0: {"current_range": {"end": 5}}}}},
    ],
    "state_after.streams[0]: expected does not exist, got exists": [
        CREATE | {"state_after": {"streams": {0: None}}}
    ],
    "state_after.nodes[5]: expected {'epoch': 1}, got does not exist": [
        CREATE | {"state_after": {"nodes": {5: {"epoch": 1}}}}
    ],
    "state_after.nodes[0].epoch: expected 1, got -1": [
        CREATE | {"state_after": {"nodes": {0: {"epoch": 1}}}}
    ],
    "state_after.kv_absent: expected {'key': 'k', 'namespace': None}, got key exists": [
        {
            "op": "put_kv",
            "args": {"key": "k", "value": "v"},
            "state_after": {"kv_absent": [{"key": "k", "namespace": None}]},
        }
    ],
    "records.count: expected 0, got 1 records of ours": [CREATE | {"records": {"count": 0}}],
    "records.types: expected ['S3Stream'], got AssignedStreamId, S3Stream": [
        CREATE | {"records": {"types": ["S3Stream"]}}
    ],
    "records.excludes: expected S3Stream, got AssignedStreamId, S3Stream": [
        CREATE | {"records": {"excludes": ["S3Stream"]}}
    ],
    "expect.raises: expected IllegalArgument, got no exception": [
        CREATE | {"expect": {"raises": "IllegalArgument"}}
    ],
    "expect.streams: expected [{'stream': 0}], got []": [
        REGISTER | {"expect": {"streams": [{"stream": 0}]}}
    ],
    "op: expected shrink, got unknown operation": [{"op": "shrink"}],
    "args.size: expected 3, got unknown field": [
        {"op": "create_stream", "args": {"node": 0, "size": 3}}
    ],
    "args: expected args.node is missing, got missing argument": [
        {"op": "create_stream", "args": {}}
    ],
    "step.afterwards: expected 1, got unknown field": [CREATE | {"afterwards": 1}],
    "state_after.moons: expected 1, got unknown field": [CREATE | {"state_after": {"moons": 1}}],
    "state_after.streams[0].moons: expected 1, got no such field": [
        CREATE | {"state_after": {"streams": {0: {"moons": 1}}}}
    ],
    "records.moons: expected 1, got unknown field": [CREATE | {"records": {"moons": 1}}],
    "records[0].type: expected Moon, got unknown record type": [
        {"op": "inject_records", "args": {"records": [{"type": "Moon"}]}}
    ],
    "records[0].moons: expected 1, got unknown field": [
        {"op": "inject_records", "args": {"records": [{"type": "S3Stream", "moons": 1}]}}
    ],
    "given.moons: expected 1, got unknown field": [
        {"op": "get_nodes", "args": {}, "given": {"moons": 1}}
    ],
}
"""By what is said of the last step."""


@pytest.mark.parametrize("said", WRONG)
def test_what_does_not_hold_or_is_not_known_is_found(said: str) -> None:
    steps = WRONG[said]
    assert _only_failure(_run(*steps)) == f"step {len(steps) + 1} ({steps[-1]['op']}): {said}"


def test_fields_of_a_scenario_that_the_runner_does_not_know_fail() -> None:
    assert _only_failure(_run(moons=1)) == (
        "step 0 (scenario): scenario.moons: expected 1, got unknown field"
    )


def test_derived_facts_fail_only_where_the_contract_has_the_field() -> None:
    derived = {"streams": {0: {"epoch": 5, "moons": 1}}, "moons": 2}
    assert _only_failure(_run(CREATE, derived_final_state=derived)) == (
        "step 2 (end): derived_final_state.streams[0].epoch: expected 5, got -1"
    )


def test_a_step_judged_only_changes_nothing() -> None:
    result = _run(CREATE | {"dry_run": True, "records": {"count": 2}}, CREATE)
    assert list(result.lines()) == []
    changed = _run(CREATE | {"dry_run": True, "state_after": {"stream_count": 1}})
    assert "stream_count: expected 1, got 0" in _only_failure(changed)


def test_a_deviation_is_said_and_its_own_expectation_must_hold() -> None:
    args = {"node": 0, "stream": 0, "epoch": 0, "end_offset": 10}
    fast_close = {"op": "close_stream", "args": args}
    wanted = {"expect": {"error": "UNSUPPORTED_VERSION"}, "records": {"count": 0}}
    result = _run(CREATE, OPEN, fast_close | wanted, version="V5")
    assert [line.split(": ")[2] for line in result.lines()] == ["feature-level"]
    fenced_close = {"op": "close_stream", "args": {**args, "epoch": 1}, **wanted}
    failed = _run(CREATE, OPEN, fenced_close, version="V5")
    assert not failed.is_passed


def test_a_deviation_belongs_to_operations_that_are_named() -> None:
    with pytest.raises(KeyError, match="trim_stream"):
        rules_for("trim_stream", ["feature-level"])
    sections = {"bucket_uris", "id_uris", "position_cache", "index_keys", "wal_paths"}
    known = (
        OPERATIONS.keys()
        | sections
        | {"codecs", "parse_object_id", "composites", "kafka", *KINDS, *STREAM_KINDS}
    )
    assert {op for rule in rules().values() for op in rule.ops} <= known


def test_every_operation_of_the_vectors_is_known() -> None:
    listed = {
        step["op"]
        for path in (VECTORS / "controller.yaml", OWN)
        for scenario in yaml.safe_load(path.read_text())["scenarios"]
        for step in scenario["steps"]
    }
    assert listed <= OPERATIONS.keys()
    assert OPERATIONS.keys() - listed <= {"notify_objects_deleted", "get_next_node_id"}


WRONG_FILES = {
    "one, step 1 (get_objects): expect.objects[0]: expected 2, got 1": """
        scenarios:
        - name: one
          image: {streams: {0: {stream_objects: [{object: 1, start: 0, end: 9}]}}}
          queries: [{stream: 0, start: 0, end: 9, expect: {objects: [2]}}]
        """,
    "one, step 0 (scenario): image: expected two, got no such image": (
        "scenarios: [{name: one, image_same_as: two, queries: []}]"
    ),
    "one, step 1 (replay): expect.next_stream_id: expected 3, got 4": """
        scenarios:
        - name: one
          start: empty
          steps: [{replay: [{type: AssignedStreamId, assigned: 3}], expect: {next_stream_id: 3}}]
        """,
    "one, step 1 (replay): records[0].type: expected Moon, got unknown record type": (
        "scenarios: [{name: one, start: empty, steps: [{replay: [{type: Moon}]}]}]"
    ),
    "one, step 1 (replay): expect.moons: expected 1, got unknown field": (
        "scenarios: [{name: one, start: empty, steps: [{replay: [], expect: {moons: 1}}]}]"
    ),
    "object_keys 1, step 1 (object_keys): key: expected 00000000/N/1, got 10000000/N/1": (
        "object_keys: [{object: 1, namespace: N, key: 00000000/N/1}]"
    ),
    "one, step 0 (scenario): derived.encoded_size: expected 38, got 37": """
        scenarios:
        - name: one
          input: {stream: 1, base_offset: 2, count: 3, payload: 4, fill: 5}
          expect: {last_offset: 5, payload_hex: "05050505"}
          derived: {encoded_size: 38}
        """,
    "one, step 0 (scenario): expect.parsed_payloads[1]: expected p2, got p1": """
        scenarios:
        - name: one
          input:
            records_generated: "2 records i = 0..1 concatenated: stream 1, epoch 2,
              base_offset 3+2*i, count 2, payload 'p<i>'"
          expect: {parsed_base_offsets: [3, 5], parsed_payloads: [p0, p2]}
        """,
    "one, step 0 (scenario): writes[1].expect: expected ok, got error": """
        scenarios:
        - name: one
          writes:
          - {stream: 2, records: [{base: 0, count: 1, payload: 1}]}
          - {stream: 1, records: [{base: 0, count: 1, payload: 1}]}
        """,
    "one, step 0 (scenario): expect.finds[0].block_count: expected 1, got 2": """
        scenarios:
        - name: one
          config: {block_size_threshold: 1}
          writes:
          - stream: 2
            records: [{base: 0, count: 1, payload: 1}, {base: 1, count: 1, payload: 1}]
          expect:
            index_entries: 2
            finds: [{stream: 2, start: 0, end: 2, block_count: 1}]
        """,
    "one, step 0 (scenario): expect.moons: expected 1, got no such field": (
        "scenarios: [{name: one, writes_generated: {streams: 3}, expect: {moons: 1}}]"
    ),
    "one, step 0 (scenario): writes[0].moons: expected 1, got unknown field": """
        scenarios:
        - name: one
          writes:
          - {stream: 1, records: [], moons: 1}
          - {stream: 2, records: [{base: 0, count: 1, payload: 1}]}
        """,
    "one, step 0 (scenario): expect.deleted_object_count: expected 9, got 8": """
        scenarios:
        - name: one
          input: {composites: 2, linked_per_composite: 3}
          expect: {deleted_object_ids: [0, 7], deleted_object_count: 9}
        """,
    "layout footer, step 0 (layout): magic: expected 0x1, got 9863518390377041911": """
        layout:
          footer:
            fields: [[a, i64], [b, i32], [zero, 28 bytes], [magic, u64, "0x1"]]
            size: 48
        """,
    "layout moon, step 0 (layout): moon: expected moon, got unknown table": (
        "layout: {moon: {fields: []}}"
    ),
    "one, step 1 (add): expect.order_ids[0]: expected 1, got 2": """
        ordered_list:
        - name: one
          steps:
          - {op: add, args: {objects: [{object: 1, order: 2}]}, expect: {order_ids: [1]}}
        """,
    "moons, step 0 (section): section: expected moons, got unknown section": "moons: []",
    "one, step 0 (scenario): steps: expected steps, replays, queries or writes, got ['name']": (
        "scenarios: [{name: one}]"
    ),
}
"""By what is said of it."""


@pytest.mark.parametrize("said", WRONG_FILES)
def test_files_of_every_kind_fail_with_a_message_and_exit_code(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(textwrap.dedent(WRONG_FILES[said]))
    assert main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"FAILED wrong.yaml {said}" in lines
    assert lines[-1].endswith(" failed")
    assert not lines[-1].endswith(" 0 failed")


def test_the_last_line_and_the_document_count_scenarios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"name": "good", "steps": [REGISTER]}
    bad = {"name": "bad", "steps": [{"op": "shrink"}]}
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [good, bad], "position_cache": [{}]}))
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed"
    assert main(["--format", "json", str(path)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["passed"], document["failed"]) == (False, 1, 1)
    assert [item["passed"] for item in document["scenarios"]] == [None, True, False]


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", None], ids=["a list", "no YAML", "no file"])
def test_a_file_that_holds_no_scenarios_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.yaml"
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 2
    assert capsys.readouterr().out.startswith(f"error: {path}: ")
