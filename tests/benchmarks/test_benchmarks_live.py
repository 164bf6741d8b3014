"""The timeline and the latencies of a real cluster, as short as they can be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.benchmarks import latency, timeline
from scripts.benchmarks.baseline import THIS
from scripts.benchmarks.timed_controller import POINTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("way", timeline.WAYS)
def test_a_commit_takes_every_step(tmp_path: Path, way: timeline.Way) -> None:
    settings = timeline.Settings(ways=(way,), seconds=1.0)
    outcome = asyncio.run(timeline.measure(tmp_path / "place", settings, lambda _: None))
    steps = [(row["where"], row["step"]) for row in outcome.details[way]["steps"]]
    roles = {"each": ("leader", "follower")}
    wanted = {(role, p.step) for p in POINTS for role in roles.get(p.role, (p.role,))}
    assert set(steps) - {timeline.ASKED, timeline.ANSWERED} == wanted
    assert (steps[0], steps[-1]) == (timeline.ASKED, timeline.ANSWERED)


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
