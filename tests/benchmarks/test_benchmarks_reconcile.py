"""The benchmark of plans: real work against a bucket that only lists."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from scripts.benchmarks import (
    map_plots,
    reconcile_deletions,
    reconcile_joining,
    reconcile_loads,
    reconciling,
)
from scripts.benchmarks.arguments import parse


@pytest.mark.process
def test_a_plan_is_measured_from_the_start_of_its_process(tmp_path: Path) -> None:
    settings = reconciling.Settings(keys=(6, 2500), engines=("local",), runs=1)
    outcome = reconciling.measure(tmp_path / "place", settings, lambda _: None)
    assert [row[:2] for row in outcome.tables[0].rows] == [(6, "local"), (2500, "local")]
    for keys in (6, 2500):
        whole_s = outcome.figures[f"local_{keys}_whole_s"]
        parts = ("start_s", "listing_s", "join_s")
        assert 0 < sum(outcome.figures[f"local_{keys}_{part}"] for part in parts) < whole_s
    assert outcome.figures["local_2500_listing_cpu_us_a_key"] > 0


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    settings = reconciling.Settings(keys=(6,), engines=("none",), runs=1)
    with pytest.raises(reconciling.ReconcilingError, match="'none'"):
        reconciling.measure(tmp_path / "place", settings, lambda _: None)


def test_engines_and_sizes_are_options() -> None:
    arguments = parse(["reconcile", "--keys", "5,70", "--engines", "spark"])
    assert (arguments.keys, arguments.engines) == ((5, 70), ("spark",))
    with pytest.raises(SystemExit):
        parse(["reconcile", "--engines", "flink"])


@pytest.mark.process
def test_the_join_is_measured_beside_a_database_on_the_same_tables(tmp_path: Path) -> None:
    settings = reconcile_joining.Settings(keys=(300,), runs=1)
    outcome = reconcile_joining.measure(tmp_path / "place", settings, lambda _: None)
    engines = ["local", "duckdb-anti-join", "duckdb-verdicts"]
    assert [row[:2] for row in outcome.tables[0].rows] == [(300, name) for name in engines]
    assert all(outcome.figures[f"{name}_300_peak_mib"] > 1 for name in engines)
    reconcile_joining.write_tables(tmp_path / "other", 300)
    (tmp_path / "other" / "map" / "objects.parquet").unlink()
    with pytest.raises(reconciling.ReconcilingError, match="300"):
        reconcile_joining._run("local", tmp_path / "other", 300)


@pytest.mark.process
def test_deletions_are_measured_against_a_server(tmp_path: Path) -> None:
    settings = reconcile_deletions.Settings(keys=1_500, runs=2)
    outcome = reconcile_deletions.measure(tmp_path / "place", settings, lambda _: None)
    assert outcome.figures["deletions_per_s"] > 0
    assert outcome.figures["deletions_cpu_us_a_key"] > 0
    requests = outcome.figures["deletions_requests_per_1000"]
    assert 2 / 1.5 <= requests - 1_000 < 20, "beside one read of each"
    assert outcome.figures["deletions_questions_per_1000"] == pytest.approx(19 / 1.5, abs=0.01)


def test_plots_that_can_not_be_drawn_are_refused_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", lacking)
    settings = reconcile_loads.Settings(
        loads=("inventory",), keys=(10,), engines=("local",), runs=1, plot=tmp_path / "plots"
    )
    with pytest.raises(map_plots.PlotError, match="matplotlib"):
        reconcile_loads.measure(tmp_path / "work", settings, lambda _: pytest.fail("a run"))
