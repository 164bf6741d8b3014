"""Clusters of real controllers in a storm of faults; `tests.chaos.chaos_run` names the checks."""

import random
from pathlib import Path

import pytest

from tests.chaos.chaos_run import run_chaos
from tests.chaos.nemesis import Kind, make_schedule

SECONDS = 15.0
LONG_SECONDS = 60.0
LONG_RUNS = 4


@pytest.mark.process
@pytest.mark.timeout(240)
@pytest.mark.parametrize("controllers", [3, 5])
def test_faults_lose_nothing_and_show_nothing_stale(tmp_path: Path, controllers: int) -> None:
    report = run_chaos(tmp_path, random.randrange(1 << 31), controllers, SECONDS)

    assert report.acknowledged > 0
    # A busy machine takes most of the time to recover from each.
    assert sum(report.faults.values()) > 1


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("controllers", [3, 5])
@pytest.mark.parametrize("number", range(LONG_RUNS))
def test_faults_go_on_for_long(tmp_path: Path, controllers: int, number: int) -> None:
    report = run_chaos(tmp_path, random.randrange(1 << 31), controllers, LONG_SECONDS)

    assert report.acknowledged > 0


def test_a_schedule_is_its_seeds_alone_and_holds_every_kind_sooner_or_later() -> None:
    members = (1, 2, 3, 4, 5)
    schedules = [make_schedule(seed, members, 25.0) for seed in range(200)]

    assert schedules == [make_schedule(seed, members, 25.0) for seed in range(200)]
    assert {fault.kind for schedule in schedules for fault in schedule} == set(Kind)
    for schedule in schedules:
        times = [fault.at_s for fault in schedule]
        assert times == sorted(times)
        assert times[-1] <= 25.0
