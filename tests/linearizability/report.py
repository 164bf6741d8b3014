"""Verdicts for people: the smallest history that can't be explained, as a table.

Cuts a bad history down before it is shown; decides nothing that the checker has not decided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from tests.linearizability import checker
from tests.linearizability.history import UNKNOWN, Operation, Unknown


def assert_linearizable(
    history: Iterable[Operation[Any, Any]],
    model: checker.Model,
    budget: int = checker.DEFAULT_BUDGET,
) -> checker.Report:
    """Check a history; raise AssertionError that shows why unless it is certainly linearizable."""
    report = checker.check(history, model, budget)
    if report.verdict is not checker.Verdict.LINEARIZABLE:
        raise AssertionError(explain(report, model, budget))
    return report


def explain(
    report: checker.Report, model: checker.Model, budget: int = checker.DEFAULT_BUDGET
) -> str:
    """Return the verdict in words, with the smallest key's history if it is bad."""
    if report.verdict is checker.Verdict.LINEARIZABLE:
        operations = sum(len(result.operations) for result in report.results)
        return f"OK: {operations} operations on {len(report.results)} keys are linearizable"
    result = report.smallest(report.verdict)
    if report.verdict is checker.Verdict.UNKNOWN:
        return (
            f"key {result.key}: {result.verdict.value}, {len(result.operations)} operations, "
            f"{result.steps} steps. Raise the budget, or record fewer operations on a key at once"
        )
    witness = smallest_witness(result, model, budget)
    title = (
        f"key {result.key}: not linearizable. No order explains these {len(witness)} of its "
        f"{len(result.operations)} operations; the last answer contradicts the others:"
    )
    return "\n".join([title, *table(witness)])


def smallest_witness(
    result: checker.KeyResult, model: checker.Model, budget: int = checker.DEFAULT_BUDGET
) -> tuple[Operation[Any, Any], ...]:
    """Cut a bad history to the first answer that can't be explained, and to the reads it needs.

    What remains is bad by itself, and is not without its last operation.
    """
    witness = _first_bad_prefix(result.operations, model, budget)
    for operation in witness[:-1]:
        fewer = [other for other in witness if other is not operation]
        if model.is_read(operation.request) and _is_bad(fewer, model, budget):
            witness = fewer
    return tuple(witness)


def table(operations: Sequence[Operation[Any, Any]]) -> list[str]:
    """Return one line for each operation, in columns: from when to when, who, what, answer."""
    rows = [("time", "client", "request", "answer")]
    for operation in operations:
        ambiguous = isinstance(operation.answer, Unknown)
        until = "?" if operation.returned is None else str(operation.returned)
        answer = "unknown" if ambiguous else str(operation.answer)
        span = f"{operation.invoked}..{until}"
        rows.append((span, operation.client, str(operation.request), answer))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join(["", *map(str.ljust, row[:3], widths), row[3]]) for row in rows]


def _first_bad_prefix(
    operations: Sequence[Operation[Any, Any]], model: checker.Model, budget: int
) -> list[Operation[Any, Any]]:
    """Return the history up to the first answer that makes it bad, that answer's operation last.

    A prefix of a linearizable history is linearizable, so halving finds it.
    """
    answers = sorted(op.returned for op in operations if op.returned is not None)
    low, high = 0, len(answers) - 1
    while low < high:
        middle = (low + high) // 2
        if _is_bad(_until(operations, answers[middle]), model, budget):
            high = middle
        else:
            low = middle + 1
    prefix = model.relevant(_until(operations, answers[low]))
    return sorted(prefix, key=lambda op: (op.returned == answers[low], op.invoked))


def _until(operations: Sequence[Operation[Any, Any]], end: int) -> list[Operation[Any, Any]]:
    """Return what is known at the time `end`: later answers have not come yet."""
    return [
        dataclasses.replace(op, returned=None, answer=UNKNOWN)
        if op.returned is not None and op.returned > end
        else op
        for op in operations
        if op.invoked <= end
    ]


def _is_bad(operations: Sequence[Operation[Any, Any]], model: checker.Model, budget: int) -> bool:
    verdict, _ = checker.check_key(operations, model, budget)
    return verdict is checker.Verdict.NOT_LINEARIZABLE
