"""Runs the steps of a scenario of operations and compares every fact they state.

What a scenario says and the runner does not understand is a failure that says so: operations,
arguments, fields of the answer, facts. Derived facts count like asserted ones where the contract
has the field; others are passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from inspect import iscoroutinefunction
from typing import Any

from streammeta.controller.errors import ApiError, InvalidRequestError
from tests.conformance import (
    operations_lifecycle,
    operations_nodes,
    operations_objects,
    operations_streams,
)
from tests.conformance.compaction_facts import Before
from tests.conformance.conformance_report import (
    ABSENT,
    Mismatch,
    Rule,
    ScenarioResult,
    compare,
    rules_for,
)
from tests.conformance.record_facts import Context, check_records
from tests.conformance.scenario_args import Args, ArgumentMissingError, UnknownFieldsError
from tests.conformance.scenario_run import Outcome, ScenarioRun
from tests.conformance.state_facts import check_state

_MODULES = (
    operations_lifecycle,
    operations_nodes,
    operations_objects,
    operations_streams,
)
OPERATIONS: Mapping[str, Callable[[ScenarioRun, Args], Awaitable[Outcome]]] = {
    "compact": operations_objects.commit_stream_set_object,
    **{
        name: operation
        for module in _MODULES
        for name, operation in vars(module).items()
        if iscoroutinefunction(operation) and not name.startswith("_")
    },
}
"""Operations by name: each public coroutine function of the modules is one."""

_CONTEXT = {
    "given_objects": ("prepared", "committed"),
    "config": (
        *("object_retention_ms", "half_open_window_ms", "namespace", "bucket_uris", "buckets"),
    ),
}
_STREAM_KEY = {"streams": "stream", "nodes": "node"}


def check_steps(scenario: Mapping[str, Any], args: Args, result: ScenarioResult) -> None:
    for name in ("version", "clock"):
        args.take(name, None)
    for name, known in _CONTEXT.items():
        context = args.within(name, None)
        for field in known:
            context.take(field, None)
    asyncio.run(_run_steps(scenario, args.take("steps", None) or [], result))


async def _run_steps(
    scenario: Mapping[str, Any], steps: list[Mapping[str, Any]], result: ScenarioResult
) -> None:
    run = ScenarioRun(scenario)
    try:
        await run.prepare()
        for number, step in enumerate(steps, start=1):
            await _run_step(run, number, Args(step, "step"), result)
        final = scenario.get("derived_final_state") or {}
        mismatches = await check_state(run, final, "derived_final_state", is_complete=True)
        result.fail(len(steps), "end", _of_contract(mismatches))
    finally:
        await run.storage.close()


def _of_contract(mismatches: list[Mismatch]) -> list[Mismatch]:
    return [item for item in mismatches if item.actual not in (ABSENT, "unknown field")]


async def _run_step(run: ScenarioRun, number: int, step: Args, result: ScenarioResult) -> None:
    op = str(step.take("op", ""))
    if op not in OPERATIONS:
        result.fail(number, op, [Mismatch("op", op or "an operation", "unknown operation")])
        return
    if not run.is_timed:
        run.clock.now_ms += 1  # nothing that happens later bears an earlier time
    args, run.given = Args(step.take("args", None)), Args(step.take("given", None), "given")
    run.dry_run = bool(step.take("dry_run", False))
    expected, facts = step.take("expect", None) or {}, step.take("records", None) or {}
    context = await _context(run, args, op) if facts else None
    run.live.take_records()
    try:
        outcome = await _operate(run, op, args, expected)
    except ArgumentMissingError as error:
        result.fail(number, op, [Mismatch("args", str(error), "missing argument")])
        return
    except UnknownFieldsError as error:
        result.fail(number, op, error.mismatches)
        return
    except Exception as error:  # noqa: BLE001 - a step fails, the others go on
        said = f"{type(error).__name__}: {error}"
        result.fail(number, op, [Mismatch("step", "no failure", said)])
        return
    met = _rules(op, expected, facts, outcome)
    for rule in met:
        result.deviate(number, op, rule.feature)
    result.fail(number, op, _check_answer(expected, outcome, met))
    if context is not None:
        records = run.live.take_records() if outcome.records is None else outcome.records
        for rule in met:
            facts = rule.records or facts
        result.fail(number, op, check_records(facts, records, context))
    await run.remember()
    result.fail(number, op, await check_state(run, step.take("state_after", None) or {}))
    derived = step.take("derived_state_after", None) or {}
    found = await check_state(run, derived, "derived_state_after")
    result.fail(number, op, _of_contract(found))
    step.take("implied", None)
    step.pass_over()
    result.fail(number, op, [*step.unknown(), *args.unknown(), *run.given.unknown()])


async def _context(run: ScenarioRun, args: Args, op: str) -> Context:
    return Context(
        op=op,
        is_compaction=op == "commit_stream_object"
        or (args.has("compacted") and bool(args.take("compacted"))),
        before=Before(await run.streams(), await run.objects()),
        pending=run.pending_uploads(),
        recorded_ends=dict(run.foreign.recorded_ends),
    )


async def _operate(run: ScenarioRun, op: str, args: Args, expected: Mapping[str, Any]) -> Outcome:
    """Carry an operation out; if it is only to be judged, put the state back."""
    run.expects_success = expected.get("error", "NONE") == "NONE" and "raises" not in expected
    run.is_malformed = False  # an operation says so before it sends its request
    before = run.live.freeze().sections()
    try:
        outcome = await OPERATIONS[op](run, args)
    except ApiError as error:
        return _refused(run, error)
    if run.dry_run and outcome.records is None:
        outcome.records = run.live.take_records()
        run.live.load(before)
    return outcome


def _refused(run: ScenarioRun, error: ApiError) -> Outcome:
    name = "INVALID_REQUEST" if isinstance(error, InvalidRequestError) else type(error).__name__
    features = ["malformed"] if run.is_malformed else []
    return Outcome({"error": name, "raises": "IllegalArgument", "message": str(error)}, features)


def _rules(
    op: str, expect: Mapping[str, Any], records: Mapping[str, Any], outcome: Outcome
) -> list[Rule]:
    """Return the rules that replace a fact of this step, or change how it is run."""

    def differs(rule: Rule) -> bool:
        if not rule.expect and not rule.records:
            return True
        changes = any(key in expect and expect[key] != value for key, value in rule.expect.items())
        count = rule.records.get("count")
        return changes or (count is not None and bool(records) and records.get("count") != count)

    return [rule for rule in rules_for(op, outcome.features) if differs(rule)]


def _check_answer(
    facts: Mapping[str, Any], outcome: Outcome, rules: list[Rule]
) -> Iterator[Mismatch]:
    expected = dict(facts)
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
        wanted = expected.pop("raises")
        if wanted is not None and "raises" not in answer:
            yield Mismatch("expect.raises", wanted, "no exception")
    for name, value in expected.items():
        if not str(name).startswith("derived"):
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
