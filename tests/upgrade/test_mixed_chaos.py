"""Controllers of two versions in a storm of faults: nothing is lost, nothing stale is shown."""

import random
from pathlib import Path

import pytest

from tests.chaos.chaos_run import run_chaos

SECONDS = 20.0
OLDER = "tests.upgrade.older_small_segments"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("older", [(1,), (1, 2)], ids=["a minority", "a majority"])
def test_faults_lose_nothing_between_two_versions(tmp_path: Path, older: tuple[int, ...]) -> None:
    modules = dict.fromkeys(older, OLDER)
    report = run_chaos(tmp_path, random.randrange(1 << 31), 3, SECONDS, modules)

    assert report.acknowledged > 0
    assert sum(report.faults.values()) > 3
