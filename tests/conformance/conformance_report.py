"""Results of scenarios: facts that do not hold, deviations met, answers about compaction.

Knows nothing of the product. A deviation is a fact that holds here in another, listed way, and does
not make a scenario fail. Its rule is met by an operation that finds the rule's condition, a
feature, in the request and the state, not by what the controller answered. A rule replaces facts of
the step; what it does not replace must hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from streammeta.storage.compaction.entries import Entry, EntryTable
from streammeta.storage.compaction.plan import (
    CompactionLimits,
    CompactionPlan,
    Exclusion,
    ExclusionReason,
)
from streammeta.storage.compaction.planner import plan_compaction
from streammeta.storage.object_format.index_block import IndexEntry

_RULES_FILE = Path(__file__).parent / "deviations.yaml"


class _Absent:
    """Stands for a fact there is no such field for; equal to nothing else."""

    def __repr__(self) -> str:
        return "no such field"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One fact that does not hold; `field` is its path within the step."""

    field: str
    expected: object
    actual: object


@dataclass(frozen=True, slots=True)
class Failure:
    """A mismatch and where it was met; step 0 is the scenario as a whole."""

    step: int
    op: str
    mismatch: Mismatch


@dataclass(frozen=True, slots=True)
class Rule:
    """One difference: `expect` and `records` replace the scenario's facts, `reason` says why."""

    feature: str
    ops: tuple[str, ...]
    reason: str
    expect: Mapping[str, Any] = field(default_factory=dict)
    records: Mapping[str, Any] = field(default_factory=dict)


@cache
def rules() -> Mapping[str, Rule]:
    listed = yaml.safe_load(_RULES_FILE.read_text())["rules"]
    return {item["feature"]: Rule(**{**item, "ops": tuple(item["ops"])}) for item in listed}


def rules_for(op: str, features: Iterable[str]) -> list[Rule]:
    """Return the rules that the features of a step call for.

    Raises:
        KeyError: a feature is not listed, or not for this operation.
    """
    found = [rules()[feature] for feature in features]
    for rule in found:
        if op not in rule.ops:
            raise KeyError(f"{rule.feature} is not listed for {op}")
    return found


@dataclass(frozen=True, slots=True)
class Deviation:
    step: int
    op: str
    rule: Rule


@dataclass(slots=True)
class ScenarioResult:
    """What one scenario, or one entry of a table, came to.

    `is_counted` False: there was nothing to run, which is neither passed nor failed.
    """

    file: str
    name: str
    is_counted: bool = True
    failures: list[Failure] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        return not self.failures

    def fail(self, step: int, op: str, mismatches: Iterable[Mismatch]) -> None:
        self.failures.extend(Failure(step, op, mismatch) for mismatch in mismatches)

    def deviate(self, step: int, op: str, feature: str) -> None:
        """Note that a step met the condition of a rule."""
        self.deviations.append(Deviation(step, op, rules()[feature]))

    def lines(self) -> Iterator[str]:
        """Yield what is to be said: deviations, then failures."""
        for item in self.deviations:
            where = f"{self.file} {self.name}, step {item.step} ({item.op})"
            yield f"deviation: {where}: {item.rule.feature}: {item.rule.reason}"
        for failure in self.failures:
            where = f"{self.file} {self.name}, step {failure.step} ({failure.op})"
            found = failure.mismatch
            wanted, got = _said(found.expected), _said(found.actual)
            yield f"FAILED {where}: {found.field}: expected {wanted}, got {got}"

    def document(self) -> dict[str, Any]:
        failures = [
            {"step": one.step, "op": one.op, "field": one.mismatch.field}
            | {"expected": _said(one.mismatch.expected), "actual": _said(one.mismatch.actual)}
            for one in self.failures
        ]
        deviations = [
            {"step": one.step, "op": one.op, "rule": one.rule.feature, "reason": one.rule.reason}
            for one in self.deviations
        ]
        return {
            "file": self.file,
            "scenario": self.name,
            "passed": self.is_passed if self.is_counted else None,
            "failures": failures,
            "deviations": deviations,
        }


def _said(value: object) -> str:
    text = value if isinstance(value, str) and value else repr(value)
    return " ".join(text.split())


def compare(expected: object, actual: object, path: str) -> Iterator[Mismatch]:
    """Yield what of `expected` does not hold.

    Of a map only the expected keys are looked at, recursively; lists are equal element by element.
    """
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key, value in expected.items():
            yield from compare(value, actual.get(key, ABSENT), f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(actual, list | tuple):
        if len(expected) != len(actual):
            yield Mismatch(path, expected, list(actual))
            return
        for index, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            yield from compare(wanted, got, f"{path}[{index}]")
    elif expected != actual or isinstance(expected, bool) is not isinstance(actual, bool):
        yield Mismatch(path, expected, actual)


CHECKED_OTHERWISE = "checked otherwise"
"""Stands in a rule for a fact without a fixed value here: the runner checks what holds instead."""


_LIMITS = (
    ExclusionReason.TOO_MANY_STREAM_OBJECTS,
    ExclusionReason.TOO_MANY_STREAMS,
    ExclusionReason.TOO_MANY_ROWS,
)


@dataclass(slots=True)
class Answer:
    """Facts in the words of the scenarios, met deviations, and what must hold but does not.

    `parts` are answers of their own, each with what is expected of it, section by section.
    """

    facts: dict[str, Any]
    features: Sequence[str] = ()
    mismatches: list[Mismatch] = field(default_factory=list)
    parts: list[tuple[Mapping[str, Mapping[str, Any]], Answer]] = field(default_factory=list)


def entry_facts(entry: Entry | IndexEntry) -> dict[str, int]:
    return {
        "stream": entry.stream_id,
        "start": entry.start_offset,
        "end_delta": entry.end_offset - entry.start_offset,
        "records": entry.record_count,
        "position": entry.position,
        "size": entry.size,
    }


def features_of(excluded: Iterable[Exclusion]) -> list[str]:
    """Return the deviations that objects meet which are left out for a fault of their own."""
    names = {
        ExclusionReason.OVERSIZED_ENTRY: "oversized-entry-left-out",
        ExclusionReason.OVERLAP: "overlap-left-out",
    }
    return sorted({names[exclusion.reason] for exclusion in excluded if exclusion.reason in names})


def features_of_plan(plan: CompactionPlan, live: EntryTable, limits: CompactionLimits) -> list[str]:
    uncut = plan_compaction(live, replace(limits, memory_budget=int(live.size.sum()) + 1))
    found = [
        {cut.object_id for cut in variant.excluded if cut.reason in _LIMITS}
        for variant in (plan, uncut)
    ]
    is_cut_out = not features_of(plan.excluded) and found[0] != found[1]
    return [*features_of(plan.excluded), *(["cuts-count-toward-the-limit"] if is_cut_out else [])]


def differences(
    kind: str, expected: Mapping[str, Mapping[str, Any]], answer: Answer, result: ScenarioResult
) -> Iterator[Mismatch]:
    """Yield what does not hold of sections of expected facts.

    Facts that a met deviation replaces are not looked at; the deviation is noted when the scenario
    states one of them otherwise, or when it replaces none.
    """
    for sections, part in answer.parts:
        yield from differences(kind, sections, part, result)
    yield from answer.mismatches
    replaced: dict[str, Any] = {}
    for rule in rules_for(kind, answer.features):
        if not rule.expect or any(
            name in section and section[name] != value
            for section in expected.values()
            for name, value in rule.expect.items()
        ):
            result.deviate(0, kind, rule.feature)
            replaced |= rule.expect
    for title, section in expected.items():
        for name, value in section.items():
            wanted = replaced.get(name, value)
            if wanted != CHECKED_OTHERWISE:
                yield from compare({name: wanted}, {**answer.facts}, title)
