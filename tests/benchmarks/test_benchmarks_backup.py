"""The backup benchmark: both clusters take their turns, and restore and adoption are ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.benchmarks import backup


@pytest.mark.process
def test_both_clusters_take_their_turns(tmp_path: Path) -> None:
    settings = backup.Settings(
        commits_per_s=100, seconds=1.0, rounds=1, interval_ms=100, sizes=(100,), adoptions=(20,)
    )
    outcome = asyncio.run(backup.measure(tmp_path, settings, lambda _: None))
    assert outcome.figures["with_commits_per_s"] > 0
    assert outcome.figures["without_commits_per_s"] > 0
    assert outcome.details["lags_s"]
    assert outcome.figures["restore_100_plan_s"] > 0
    assert outcome.figures["adoption_20_adopt_s"] > 0
