"""The benchmark of plans does real work on a bucket that can only be listed."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import pytest

from scripts.benchmarks import plots, reconcile, reconcile_deletions, reconcile_inputs
from scripts.benchmarks.figures import BenchmarkError, Outcome
from streammeta.cli.local.local_cluster import ChildFailedError


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
    outcome = reconcile_deletions.measure(tmp_path, 1_500, 1, lambda _: None)
    assert outcome.figures["deletions_per_s"] > 0
    assert outcome.figures["deletions_cpu_us_a_key"] > 0
    requests = outcome.figures["deletions_requests_per_1000"]
    assert 2 / 1.5 <= requests - 1_000 < 20, "besides one read of each"
    assert outcome.figures["deletions_questions_per_1000"] == pytest.approx(19 / 1.5, abs=0.01)


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
