"""Liveness and readiness of a controller, as named checks.

A live controller answers, whatever the others do: a probe that asked the quorum would end one
controller after the other while there is no leader. A ready one serves clients. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from streammeta.controller.runtime.replication.operations import QuorumDescription

BEHIND_MAX = 10_000
"""Committed entries that a ready controller may still have to apply."""


class Phase(StrEnum):
    """Part of a controller's life."""

    STARTING = "it starts"
    SERVING = ""
    STOPPING = "it stops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """State of a controller, as far as readiness depends on it."""

    phase: Phase
    quorum: QuorumDescription
    applied: int
    """End of the log that is applied to the map."""


def unready(condition: Condition) -> Mapping[str, str]:
    """Return each check of readiness with its failure; empty if it passes."""
    quorum = condition.quorum
    behind = quorum.high_watermark - condition.applied
    return {
        "serving": condition.phase.value,
        "leader": "" if quorum.has_leader else "no leader answers",
        "repair": (
            "its log lost entries, which are copied from the others" if quorum.is_repairing else ""
        ),
        "caught_up": (
            f"{behind} committed entries are not applied, must be {BEHIND_MAX} or fewer"
            if behind > BEHIND_MAX
            else ""
        ),
    }


def report(checks: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether all checks pass, and a line for each."""
    lines = [f"[-] {name}: {why}" if why else f"[+] {name}" for name, why in checks.items()]
    return not any(checks.values()), "\n".join(lines) + "\n"
