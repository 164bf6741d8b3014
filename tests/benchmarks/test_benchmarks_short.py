"""Benchmarks of one module each, run as briefly as possible: what they measure and count."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks import authorization, backup, brokers, latency, overload
from scripts.benchmarks.baseline import THIS
from scripts.benchmarks.cluster import VOTERS
from scripts.benchmarks.committer import Load, committer_of
from scripts.benchmarks.floor import MESSAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = 5


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


def test_each_kind_of_caller_is_admitted(tmp_path: Path) -> None:
    settings = authorization.Settings(calls=200, turns=1)
    outcome = asyncio.run(authorization.measure(tmp_path, settings, lambda _: None))
    (table,) = outcome.tables
    assert [row[0] for row in table.rows] == [
        "plain text",
        "certificate of a broker",
        "certificate of a user with a grant",
        "token",
    ]
    # Smaller costs are lost in the noise of a busy machine.
    recorded = [cost for name, cost in outcome.figures.items() if "recorded" in name]
    assert len(recorded) == len(table.rows)
    assert min(recorded) > 0


@pytest.mark.process
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


def sizes_of_logs(place: Path) -> list[int]:
    sizes = [path.stat().st_size for path in place.glob("floor-*.data")]
    assert len(sizes) == VOTERS
    return sizes


@pytest.mark.parametrize("way", ["floor-pipelined", "floor-unary"])
async def test_each_message_is_on_two_disks_when_it_is_answered(tmp_path: Path, way: str) -> None:
    with contextlib.ExitStack() as stack:
        member = await latency.serve_floor(stack, tmp_path / "floor")
        client = committer_of(way, Load(endpoint=member.endpoint, ranges=1, in_flight=1))
        await client.open()
        for number in range(1, MESSAGES + 1):
            await client.commit(0)
            sizes = sizes_of_logs(tmp_path)
            assert sorted(sizes)[1] == number * MESSAGE_BYTES
        await client.close()


def test_the_floor_accepts_one_message_at_a_time() -> None:
    with pytest.raises(ValueError, match="in_flight"):
        committer_of("floor-unary", Load(endpoint="", ranges=1, in_flight=2))
