"""The brokers benchmark: every broker beats and watches, and the delay of news is what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks import brokers


def test_news_are_as_late_as_the_first_message_that_covers_them() -> None:
    committed = np.array([3, 4, 9, 12]), np.array([1.0, 1.5, 2.0, 3.0])
    seen = np.array([2, 4, 10]), np.array([0.5, 1.25, 2.5])
    delays = brokers.delays_of_watch(committed, seen)
    assert delays.tolist() == [0.25, 0.0, 0.5, float("inf")]


@pytest.mark.process
def test_a_few_brokers_beat_and_have_all_news(tmp_path: Path) -> None:
    settings = brokers.Settings(brokers=5, commits_per_s=100, processes=2, seconds=1.0)
    outcome = asyncio.run(brokers.measure(tmp_path / "place", settings, lambda _: None))
    assert all(value > 0 for value in outcome.figures.values())
    assert outcome.details["heartbeats_missed"] == outcome.details["news_never_seen"] == 0
    assert outcome.details["heartbeats_sent"] >= settings.brokers
    assert outcome.details["news"] == round(outcome.figures["commits_per_s"]) * settings.brokers
    assert outcome.details["leader_id"] in (1, 2, 3)
