"""The benchmark of reading measures every way, and counts what was really read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.benchmarks import reading


@pytest.mark.process
def test_every_way_of_reading_is_measured(tmp_path: Path) -> None:
    settings = reading.Settings(
        streams=2, total_mib=1, random_reads=5, tail_commits=2, tail_records=3
    )
    said: list[str] = []
    outcome = asyncio.run(reading.measure(tmp_path / "place", settings, said.append))
    assert [row[0] for row in outcome.tables[0].rows] == ["sequential", "random", "tailing"]
    assert all(value > 0 for value in outcome.figures.values())
    assert outcome.figures["sequential_fetched_mib_per_mib"] >= 1
    assert outcome.tables[0].rows[0][1] == 1.0
    assert len(said) == 4
