"""Benchmarks run as briefly as possible: what they measure and count, by names that stay."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks import (
    appending,
    authorization,
    backup,
    brokers,
    latency,
    object_format,
    overload,
    plots,
    reading,
    reconcile,
    reconcile_deletions,
    reconcile_inputs,
    s3stream,
)
from scripts.benchmarks.baseline import THIS
from scripts.benchmarks.cluster import VOTERS
from scripts.benchmarks.committer import Load, committer_of
from scripts.benchmarks.figures import BenchmarkError, Outcome
from scripts.benchmarks.floor import MESSAGE_BYTES
from streammeta.cli.local.local_cluster import ChildFailedError

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


def test_every_figure_is_there_and_the_share_is_that_of_the_figures() -> None:
    settings = object_format.Settings(
        payloads=(1000,), entries=(1, 50), volume=1_000_000, searches=200
    )
    said: list[str] = []
    outcome = object_format.measure(Path(), settings, said.append)
    coding = {f"{name}_1000_gb_per_s" for name in ("memcpy", "encode", "encode_crc", "decode")}
    searching = {f"{name}_{n}_ns" for name in ("find",) for n in (1, 50)}
    share = "encode_1000_share_of_memcpy"
    assert outcome.figures.keys() == coding | searching | {share}
    assert all(value > 0 for value in outcome.figures.values())
    encode, memcpy = (outcome.figures[f"{name}_1000_gb_per_s"] for name in ("encode", "memcpy"))
    assert outcome.figures[share] == pytest.approx(encode / memcpy, abs=0.01)
    assert [len(table.rows) for table in outcome.tables] == [1, 2]
    assert len(said) == 3


def measure(root: Path, settings: reconcile.Settings) -> list[Outcome]:
    return asyncio.run(reconcile.measure(root, settings, lambda _: None))


@pytest.mark.process
def test_a_plan_is_measured_from_the_start_of_its_process(tmp_path: Path) -> None:
    settings = reconcile.Settings(keys=(6, 2500), engines=("local",), runs=1)
    (outcome,) = measure(tmp_path, settings)
    assert [row[:2] for row in outcome.tables[0].rows] == [(6, "local"), (2500, "local")]
    for keys in (6, 2500):
        whole_s = outcome.figures[f"local_{keys}_whole_s"]
        parts = ("start_s", "listing_s", "join_s")
        assert 0 < sum(outcome.figures[f"local_{keys}_{part}"] for part in parts) < whole_s
    assert outcome.figures["local_2500_listing_cpu_us_a_key"] > 0
    assert outcome.figures["local_2500_driver_mib"] > 0


@pytest.mark.process
@pytest.mark.parametrize("load", ["join", "inventory"])
def test_loads_without_a_listing_find_the_same_verdicts(
    tmp_path: Path, load: reconcile.Load
) -> None:
    settings = reconcile.Settings(keys=(300,), engines=("local",), loads=(load,), runs=1)
    (outcome,) = measure(tmp_path, settings)
    assert outcome.figures[f"local_{load}_300_join_s"] > 0


def test_a_run_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match="'none'"):
        asyncio.run(reconcile.run_once(tmp_path, "join", "none", ("", tmp_path), 6))


@pytest.mark.process
def test_the_join_is_measured_beside_a_database_on_the_same_tables(tmp_path: Path) -> None:
    (outcome,) = measure(tmp_path, reconcile.Settings(joined=(300,), runs=1))
    assert [row[:2] for row in outcome.tables[0].rows] == [
        (300, name) for name in reconcile.JOINED_ENGINES
    ]
    assert all(outcome.figures[f"{name}_300_peak_mib"] > 1 for name in reconcile.JOINED_ENGINES)
    reconcile_inputs.write_tables(tmp_path / "other", 300)
    (tmp_path / "other" / "map" / "objects.parquet").unlink()
    with pytest.raises(BenchmarkError, match="'orphan': 300"):
        asyncio.run(reconcile.run_once(tmp_path, "join", "local", ("", tmp_path / "other"), 300))


@pytest.mark.process
def test_deletions_are_measured_against_a_server(tmp_path: Path) -> None:
    outcome = reconcile_deletions.measure(tmp_path, 300, 1, lambda _: None)
    assert outcome.figures["deletions_per_s"] > 0
    assert outcome.figures["deletions_cpu_us_a_key"] > 0
    requests = outcome.figures["deletions_requests_per_1000"]
    assert 1 / 0.3 <= requests - 1_000 < 10 / 0.3, "besides one read of each"
    assert outcome.figures["deletions_questions_per_1000"] == pytest.approx(5 / 0.3, abs=0.01)


def test_plots_without_their_library_fail_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_import(name: str) -> None:
        raise ImportError(name)

    settings = reconcile.Settings(
        loads=("inventory",), keys=(10,), engines=("local",), runs=1, plot=tmp_path / "plots"
    )
    monkeypatch.setattr(importlib, "import_module", fail_import)
    with pytest.raises(plots.PlotError, match="matplotlib"):
        asyncio.run(reconcile.measure(tmp_path, settings, lambda _: pytest.fail("a run")))


def test_the_price_of_the_controllers_compares_turns_side_by_side() -> None:
    words = ["controllers 2 1 5", "memory 1 1 3", "controllers 4 2 6", "memory 4 1 3"]
    settings = s3stream.Settings(appends=100, turns=2)
    outcome = s3stream.outcome_of([line.split() for line in words], settings)
    assert outcome.figures["controllers_appends_per_s"] == 37.5
    assert outcome.targets[0].measured == 0.25, "half of one turn, nothing of the other"
