"""The latencies of a real cluster, as short as they can be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.benchmarks import latency
from scripts.benchmarks.baseline import THIS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.process
def test_every_load_has_its_turn(tmp_path: Path) -> None:
    settings = latency.Settings(
        systems=(latency.OURS,), rounds=1, seconds=0.3, tls=True, audit=True
    )
    trees = {THIS: ROOT}
    outcome = asyncio.run(latency.measure_trees(tmp_path, trees, settings, lambda _: None))
    assert len(outcome.tables[0].rows) == len(latency.FIGURES)
    assert all(value > 0 for value in outcome.figures.values())
    assert len(outcome.targets) == 3, "the costs of TLS"
