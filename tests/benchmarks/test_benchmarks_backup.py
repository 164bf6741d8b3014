"""The backup benchmark: both clusters take their turns, and restore and adoption are ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from scripts.benchmarks import backup, backup_restore


@pytest.mark.process
def test_a_small_backup_is_restored_in_full(tmp_path: Path) -> None:
    found = backup_restore.measure_restore(tmp_path, 300)
    assert (found.entities, found.commits) == (300, 300)
    assert min(value for _, value in found.figures()) > 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["from_end_offset"] > 300
    assert list((tmp_path / "data").iterdir())


@pytest.mark.process
def test_all_objects_since_the_backup_are_adopted(tmp_path: Path) -> None:
    found = backup_restore.measure_adoption(tmp_path, 120)
    assert found.objects == 120, "or it would have failed: it compares what was adopted"
    assert found.mb > 0
    assert min(value for _, value in found.figures()) > 0


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
