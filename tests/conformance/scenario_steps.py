"""Runs the steps of a scenario of operations and compares every fact they state.

What a scenario says and the runner does not understand is a failure that says so: operations,
arguments, fields of the answer, facts. Derived facts count like asserted ones where the contract
has the field; others are passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from streammeta.controller.errors import ApiError, InvalidRequestError
from tests.conformance import operations_lifecycle as lifecycle
from tests.conformance import operations_nodes as nodes
from tests.conformance import operations_objects as objects
from tests.conformance import operations_state as states
from tests.conformance import operations_streams as streams
from tests.conformance.compaction_facts import Before
from tests.conformance.conformance_report import (
    ABSENT,
    Deviation,
    Mismatch,
    ScenarioResult,
    compare,
)
from tests.conformance.deviation_rules import Rule, rules_for
from tests.conformance.record_facts import Context, check_records
from tests.conformance.scenario_args import Args, ArgumentMissingError
from tests.conformance.scenario_run import Outcome, ScenarioRun
from tests.conformance.state_facts import check_state

_REQUESTS: dict[str, Callable[..., Awaitable[Outcome]]] = {
    "get_opening_streams": streams.get_opening_streams,
    "create_stream": streams.create_stream,
    "open_stream": streams.open_stream,
    "close_stream": streams.close_stream,
    "trim_stream": streams.trim_stream,
    "delete_stream": streams.delete_stream,
    "describe_streams": streams.describe_streams,
    "commit_stream_set_object": objects.commit_stream_set_object,
    "compact": objects.commit_stream_set_object,
    "commit_stream_object": objects.commit_stream_object,
    "prepare_object": objects.prepare_object,
    "commit_object": objects.commit_object,
    "mark_destroy_objects": objects.mark_destroy_objects,
    "notify_objects_deleted": objects.notify_objects_deleted,
    "register_node": nodes.register_node,
    "unregister_node": nodes.unregister_node,
    "get_next_node_id": nodes.get_next_node_id,
    "put_kv": nodes.put_kv,
    "get_kv": nodes.get_kv,
    "delete_kv": nodes.delete_kv,
}
"""Operations that are one request each, and can be judged without being carried out."""

_ACTIONS: dict[str, Callable[..., Awaitable[Outcome]]] = {
    "advance_clock": lifecycle.advance_clock,
    "expire_scan": lifecycle.expire_scan,
    "lifecycle_check": lifecycle.lifecycle_check,
    "complete_storage_delete": lifecycle.complete_storage_delete,
    "cleanup_deleted_topics": lifecycle.cleanup_deleted_topics,
    "overload": lifecycle.overload,
    "success": lifecycle.success,
    "is_overload": lifecycle.is_overload,
    "inject_records": states.inject_records,
    "set_state": states.set_state,
    "removable_ranges": states.removable_ranges,
}

_WITH_CONTEXT: dict[str, Callable[..., Awaitable[Outcome]]] = {
    "get_nodes": nodes.get_nodes,
    "cleanup_scale_in_nodes": lifecycle.cleanup_scale_in_nodes,
}
"""Operations that read what a step gives besides its arguments."""

OPERATIONS = frozenset({*_REQUESTS, *_ACTIONS, *_WITH_CONTEXT})

_REMARKS = ("source", "notes", "note", "reason")
_SCENARIO_FIELDS = frozenset(
    ("name", "version", "given_objects", "clock", "config", "steps", *_REMARKS)
)
_STEP_FIELDS = frozenset(
    ("op", "args", "dry_run", "given", "expect", "implied", "records", "state_after", *_REMARKS)
)
_CONFIG_FIELDS = frozenset(
    ("object_retention_ms", "half_open_window_ms", "namespace", "bucket_uris", "buckets")
)
_STREAM_KEY = {"streams": "stream", "nodes": "node"}


def run_scenario(file: str, scenario: Mapping[str, Any]) -> ScenarioResult:
    """Run one scenario from an empty controller."""
    result = ScenarioResult(file, str(scenario.get("name", "without a name")))
    result.fail(0, "scenario", list(_unknown_keys(scenario, _SCENARIO_FIELDS, "scenario")))
    config = scenario.get("config") or {}
    result.fail(0, "scenario", list(_unknown_keys(config, _CONFIG_FIELDS, "config")))
    given = scenario.get("given_objects") or {}
    known = frozenset(("prepared", "committed"))
    result.fail(0, "scenario", list(_unknown_keys(given, known, "given_objects")))
    asyncio.run(_run_steps(scenario, result))
    return result


def _unknown_keys(content: Mapping[str, Any], known: frozenset[str], path: str) -> Iterator[Any]:
    for key, value in content.items():
        if key not in known and not str(key).startswith("derived"):
            yield Mismatch(f"{path}.{key}", value, "unknown field")


async def _run_steps(scenario: Mapping[str, Any], result: ScenarioResult) -> None:
    run = ScenarioRun(scenario)
    try:
        await run.prepare()
        for number, step in enumerate(scenario.get("steps") or [], start=1):
            await _run_step(run, number, step, result)
        final = dict(scenario.get("derived_final_state") or {})
        if final:
            mismatches = await check_state(run, final, "derived_final_state", is_complete=True)
            result.fail(len(scenario.get("steps") or []), "end", _of_contract(mismatches))
    finally:
        await run.storage.close()


def _of_contract(mismatches: list[Mismatch]) -> list[Mismatch]:
    return [item for item in mismatches if item.actual not in (ABSENT, "unknown field")]


async def _run_step(
    run: ScenarioRun, number: int, step: Mapping[str, Any], result: ScenarioResult
) -> None:
    op = str(step.get("op", ""))
    result.fail(number, op, list(_unknown_keys(step, _STEP_FIELDS, "step")))
    if op not in OPERATIONS:
        result.fail(number, op, [Mismatch("op", op or "an operation", "unknown operation")])
        return
    if not run.is_timed:
        run.clock.now_ms += 1  # nothing that happens later bears an earlier time
    context = await _context(run, step, op) if step.get("records") else None
    run.live.take_records()
    try:
        outcome = await _operate(run, op, step, result, number)
    except ArgumentMissingError as error:
        result.fail(number, op, [Mismatch("args", str(error), "missing argument")])
        return
    except states.UnknownFieldsError as error:
        result.fail(number, op, error.mismatches)
        return
    except Exception as error:  # noqa: BLE001 - a scenario fails, the others go on
        result.fail(
            number, op, [Mismatch("step", "no failure", f"{type(error).__name__}: {error}")]
        )
        return
    rules = _rules(op, step, outcome)
    result.deviations.extend(Deviation(number, op, rule.feature, rule.reason) for rule in rules)
    result.fail(number, op, list(_check_answer(step, outcome, rules)))
    if context is not None:
        result.fail(number, op, list(_check_records(run, step, outcome, rules, context)))
    await run.remember()
    result.fail(number, op, await check_state(run, step.get("state_after") or {}))
    derived = await check_state(run, step.get("derived_state_after") or {}, "derived_state_after")
    result.fail(number, op, _of_contract(derived))


async def _context(run: ScenarioRun, step: Mapping[str, Any], op: str) -> Context:
    return Context(
        op=op,
        is_compaction=op == "commit_stream_object"
        or bool((step.get("args") or {}).get("compacted")),
        before=Before(await run.streams(), await run.objects()),
        pending=run.pending_uploads(),
        recorded_ends=dict(run.foreign.recorded_ends),
    )


async def _operate(
    run: ScenarioRun, op: str, step: Mapping[str, Any], result: ScenarioResult, number: int
) -> Outcome:
    args, given = Args(step.get("args")), Args(step.get("given"), "given")
    expected = step.get("expect") or {}
    run.expects_success = expected.get("error", "NONE") == "NONE" and "raises" not in expected
    run.is_malformed = False  # an operation says so before it sends its request
    try:
        if op in _REQUESTS:
            outcome = await _REQUESTS[op](run, args, dry_run=bool(step.get("dry_run", False)))
        else:
            outcome = await _act(run, op, args, given, dry_run=bool(step.get("dry_run", False)))
    except ApiError as error:
        outcome = _refused(run, error)
    result.fail(number, op, [*args.unknown(), *given.unknown()])
    return outcome


async def _act(run: ScenarioRun, op: str, args: Args, given: Args, *, dry_run: bool) -> Outcome:
    """Carry out what is no single request; if it is only to be judged, put the state back."""
    before = run.live.freeze().sections() if dry_run else None
    if op in _WITH_CONTEXT:
        outcome = await _WITH_CONTEXT[op](run, args, given=given)
    else:
        outcome = await _ACTIONS[op](run, args)
    if before is not None:
        outcome.records = run.live.take_records()
        run.live.load(before)
    return outcome


def _refused(run: ScenarioRun, error: ApiError) -> Outcome:
    name = "INVALID_REQUEST" if isinstance(error, InvalidRequestError) else type(error).__name__
    features = ["malformed"] if run.is_malformed else []
    return Outcome({"error": name, "raises": "IllegalArgument", "message": str(error)}, features)


def _rules(op: str, step: Mapping[str, Any], outcome: Outcome) -> list[Rule]:
    """Return the rules that replace a fact of this step, or change how it is run."""
    expect, records = step.get("expect") or {}, step.get("records") or {}

    def differs(rule: Rule) -> bool:
        if not rule.expect and not rule.records:
            return True
        changes = any(key in expect and expect[key] != value for key, value in rule.expect.items())
        count = rule.records.get("count")
        return changes or (count is not None and bool(records) and records.get("count") != count)

    return [rule for rule in rules_for(op, outcome.features) if differs(rule)]


def _check_answer(
    step: Mapping[str, Any], outcome: Outcome, rules: list[Rule]
) -> Iterator[Mismatch]:
    expected = dict(step.get("expect") or {})
    if any("error" in rule.expect for rule in rules):
        expected = {"error": expected.get("error", "NONE")}
    for rule in rules:
        expected.update(rule.expect)
    answer = outcome.answer
    if "raises" in answer and "raises" not in expected:
        wanted = expected.pop("error", "NONE")
        if wanted != answer["error"]:
            yield Mismatch("expect.error", wanted, answer.get("message", answer["error"]))
            return
    if "raises" in expected:
        expected.pop("error", None)
        if expected.pop("raises") is not None and "raises" not in answer:
            yield Mismatch("expect.raises", step["expect"]["raises"], "no exception")
    for name, value in expected.items():
        if str(name).startswith("derived"):
            continue
        yield from _check_field(name, value, answer.get(name, ABSENT))


def _check_field(name: str, value: Any, actual: Any) -> Iterator[Mismatch]:
    key = _STREAM_KEY.get(name)
    if key is not None and isinstance(value, list) and isinstance(actual, list):
        if all(key in item for item in value):
            value = sorted(value, key=lambda item: int(item[key]))
        actual = sorted(actual, key=lambda item: int(item[key]))
    if name in ("removable", "delete_stream_requests") and isinstance(actual, list):
        value, actual = sorted(value), sorted(actual)
    yield from compare(value, actual, f"expect.{name}")


def _check_records(
    run: ScenarioRun,
    step: Mapping[str, Any],
    outcome: Outcome,
    rules: list[Rule],
    context: Context,
) -> Iterator[Mismatch]:
    records = run.live.take_records() if outcome.records is None else outcome.records
    facts = dict(step["records"])
    for rule in rules:
        facts = dict(rule.records) or facts
    yield from check_records(facts, records, context)
