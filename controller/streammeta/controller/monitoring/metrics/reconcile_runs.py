"""Reconciliation runs as reported by their jobs, read from the key that stores them.

Every caller with write access to the product's key namespace can write the value. An unreadable
value is therefore shown as such and is not an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streammeta.storage.cluster_files.reconcile_runs import Runs, RunsError, decode


@dataclass(frozen=True, slots=True)
class ReportedRuns:
    """Reported runs. `problem` says why they can't be read, empty if they can."""

    runs: Runs = field(default_factory=Runs)
    problem: str = ""


def read_told(value: bytes | None) -> ReportedRuns:
    """Parse the stored value. None means that there is no value."""
    if value is None:
        return ReportedRuns()
    try:
        return ReportedRuns(decode(value))
    # A scrape must not fail because of a value that another program wrote.
    except RunsError as error:
        return ReportedRuns(problem=str(error))
