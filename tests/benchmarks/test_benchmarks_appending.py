"""The benchmark of appending measures both calls, and times every acknowledgement."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.benchmarks import appending


@pytest.mark.process
def test_both_calls_are_measured(tmp_path: Path) -> None:
    settings = appending.Settings(stores=("directory",), streams=3, seconds=0.5)
    outcome = asyncio.run(appending.measure(tmp_path / "place", settings, lambda _: None))
    rows = outcome.tables[0].rows
    assert [row[:2] for row in rows] == [("directory", "append"), ("directory", "append_many")]
    for name, detail in outcome.details.items():
        assert detail["acknowledgements"] > 0, name
        assert detail["paced_per_s"] == pytest.approx(detail["flooded_per_s"] / 10)
    assert all(value > 0 for value in outcome.figures.values())
