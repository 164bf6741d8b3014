"""An old and a restored cluster side by side: nothing is acknowledged by both, nothing is lost."""

from __future__ import annotations

import os

import pytest

from tests.sim.sim_run import simulate
from tests.sim.sim_seeds import run_in_parallel
from tests.sim.test_sim_seeds import assert_none_failed

_EXPECTED_KINDS = (
    "clusters restored",
    "commits of the restored cluster",
    "looks that failed",
    "looks that found another owner",
    "objects adopted",
    "pauses",
)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", [24, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_cluster_out_of_reach_of_the_bucket_stops_before_the_restored_one_begins(
    count: int,
) -> None:
    summary = run_in_parallel(range(count), "fenced", os.cpu_count() or 1)
    assert_none_failed(summary)
    unheard_of = [kind for kind in _EXPECTED_KINDS if not summary.counts[kind]]
    assert not unheard_of, f"never happened in {count} seeds: {unheard_of}"


@pytest.mark.parametrize("seed", [0, 5, 56, 60, 98, 117])
def test_seeds_that_once_showed_a_fault_are_clean(seed: int) -> None:
    """A lease without an end, from the end of a look, or that is not asked before an answer."""
    failure = simulate(seed, "fenced").failure
    assert failure is None, failure
