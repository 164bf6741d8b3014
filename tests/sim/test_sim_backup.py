"""Backups through leader changes, a bucket that comes and goes, and logs that are trimmed."""

from __future__ import annotations

import os

import pytest

from tests.sim.sim_seeds import run_in_parallel
from tests.sim.test_sim_seeds import assert_none_failed

_EXPECTED_KINDS = (
    "calls of the backup's bucket that failed",
    "checkpoints in the backup",
    "forged segments found",
    "logs trimmed ahead of the backup",
    "points before or between chains",
    "points restored",
    "runs with a map",
)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_point_is_restored_as_it_was_committed(count: int) -> None:
    summary = run_in_parallel(range(count), "backup", os.cpu_count() or 1)
    assert_none_failed(summary)
    unheard_of = [kind for kind in _EXPECTED_KINDS if not summary.counts[kind]]
    assert not unheard_of, f"never happened in {count} seeds: {unheard_of}"
