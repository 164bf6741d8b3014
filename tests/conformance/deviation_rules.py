"""The listed differences between the scenarios and the contract, and what holds instead.

A rule is met by an operation that finds its condition (a feature) in the request and the state, not
by what the controller answered. It replaces facts of the step; what it does not replace must hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

RULES_FILE = Path(__file__).parent / "deviations.yaml"


@dataclass(frozen=True, slots=True)
class Rule:
    """One difference: `expect` and `records` replace the scenario's facts, `reason` says why."""

    feature: str
    ops: tuple[str, ...]
    reason: str
    expect: Mapping[str, Any]
    records: Mapping[str, Any]


@cache
def rules() -> Mapping[str, Rule]:
    """Return all rules by feature."""
    content = yaml.safe_load(RULES_FILE.read_text())
    listed = [
        Rule(
            feature=item["feature"],
            ops=tuple(item["ops"]),
            reason=item["reason"],
            expect=item.get("expect", {}),
            records=item.get("records", {}),
        )
        for item in content["rules"]
    ]
    return {rule.feature: rule for rule in listed}


def rules_for(op: str, features: Iterable[str]) -> list[Rule]:
    """Return the rules that the features of a step call for.

    Raises:
        KeyError: a feature is not listed, or not for this operation.
    """
    found = []
    for feature in features:
        rule = rules()[feature]
        if op not in rule.ops:
            raise KeyError(f"{feature} is not listed for {op}")
        found.append(rule)
    return found
