"""The overload benchmark: it finds a capacity, exceeds it, and counts each call once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.benchmarks import overload

pytestmark = pytest.mark.process


def test_calls_at_and_beyond_the_capacity_are_served_or_refused(tmp_path: Path) -> None:
    settings = overload.Settings(turns=1, seconds=1.0)
    outcome = asyncio.run(overload.measure(tmp_path / "place", settings, lambda _: None))
    at, beyond = outcome.details["turns"]
    assert (at["load"], beyond["load"]) == ("as answered", "beyond")
    assert at["refused_per_s"] == 0
    for turn in (at, beyond):
        assert turn["served_per_s"] + turn["refused_per_s"] <= turn["offered_per_s"] + 64
    share = beyond["served_per_s"] / at["served_per_s"]
    assert outcome.figures["goodput_share"] == pytest.approx(share, abs=0.001)
    assert outcome.figures["elections"] == 0
