"""Liveness and readiness of a controller, as named checks.

A controller is live if it answers, whatever the state of the quorum: a liveness probe that asked
the quorum would restart all controllers while there is no leader. A controller is ready if it can
serve clients. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from streammeta.controller.runtime.replication.operations import QuorumDescription

BEHIND_MAX = 10_000
"""Maximum number of committed entries that a ready controller has not applied."""


class Phase(StrEnum):
    """Phase of a controller's life."""

    STARTING = "it starts"
    SERVING = ""
    STOPPING = "it stops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """State of a controller that readiness depends on."""

    phase: Phase
    quorum: QuorumDescription
    applied: int
    """End of the applied log."""


def unready(condition: Condition) -> Mapping[str, str]:
    """Return each readiness check with its failure, empty if it passes."""
    quorum = condition.quorum
    # A short lag is normal under load, and must not take the controller out of service.
    behind = quorum.high_watermark - condition.applied
    return {
        "serving": condition.phase.value,
        "leader": "" if quorum.has_leader else "no leader answers",
        # Its reads would be old until the lost entries are back.
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
