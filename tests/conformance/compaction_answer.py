"""What a scenario about compaction came to, and how it is held against what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streammeta.storage.compaction.entries import Entry, EntryTable
from streammeta.storage.compaction.plan import (
    CompactionLimits,
    CompactionPlan,
    Exclusion,
    ExclusionReason,
)
from streammeta.storage.compaction.planner import plan_compaction
from streammeta.storage.object_format.index_block import IndexEntry
from tests.conformance.conformance_report import Mismatch, ScenarioResult, compare, rules_for

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
    """Return an index entry in the words of the scenarios."""
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
    return sorted({names[one.reason] for one in excluded if one.reason in names})


def features_of_plan(plan: CompactionPlan, live: EntryTable, limits: CompactionLimits) -> list[str]:
    """Return the deviations that a plan of live entries meets."""
    uncut = plan_compaction(live, replace(limits, memory_budget=int(live.size.sum()) + 1))
    found = [
        {one.object_id for one in each.excluded if one.reason in _LIMITS} for each in (plan, uncut)
    ]
    is_cut_out = not features_of(plan.excluded) and found[0] != found[1]
    return [*features_of(plan.excluded), *(["cuts-count-toward-the-limit"] if is_cut_out else [])]


def differences(
    kind: str,
    expected: Mapping[str, Mapping[str, Any]],
    answer: Answer,
    result: ScenarioResult,
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
