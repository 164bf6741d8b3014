"""Whatever is lost, doubled, late, torn or cut off: nothing committed is lost, nothing is lied."""

from __future__ import annotations

import pytest

from tests.sim.sim_world import simulate

CHUNK = 50


def run_seeds(seeds: range, profile: str) -> None:
    for seed in seeds:
        failure = simulate(seed, profile).failure
        assert failure is None, str(failure)


@pytest.mark.parametrize("start", range(0, 500, CHUNK))
def test_invariants_hold_in_any_weather(start: int) -> None:
    run_seeds(range(start, start + CHUNK), "swarm")


def test_a_calm_quorum_of_any_size_makes_progress() -> None:
    run_seeds(range(10), "calm")


def test_a_seed_replays_the_same_run() -> None:
    first, second = simulate(7), simulate(7)
    assert (first.events, first.counts) == (second.events, second.counts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("profile", ["mixed", "crashy", "split", "noisy", "restless"])
def test_invariants_hold_for_long(profile: str) -> None:
    run_seeds(range(10_000, 12_000), profile)
