"""Runs of reconciliation as their jobs told them, read from the key where they are kept.

Anybody who may write keys of the product's namespace can have written the value, so that one that
can't be read is shown as such, and is no failure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streammeta.storage.cluster_files.reconcile_runs import Runs, RunsError, decode


@dataclass(frozen=True, slots=True)
class ReportedRuns:
    """The runs; `problem` says why they can't be read, and is empty otherwise."""

    runs: Runs = field(default_factory=Runs)
    problem: str = ""


def read_told(value: bytes | None) -> ReportedRuns:
    """Return what a value tells; None: there is none."""
    if value is None:
        return ReportedRuns()
    try:
        return ReportedRuns(decode(value))
    except RunsError as error:
        return ReportedRuns(problem=str(error))
