"""Committed entries survive lost messages, crashes, bad disks, partitions, restores and backups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.sim.sim_profiles import PROFILES
from tests.sim.sim_run import simulate
from tests.sim.sim_seeds import Summary, run_in_parallel, run_seeds

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "simulate"
_JOBS = os.cpu_count() or 1

_EXPECTED_KINDS = (
    *("answers lost", "bits turned over: .checkpoint", "bits turned over: .log"),
    *("changes followed", "clocks that drift"),
    *("commits repeated that were made", "commits that left rows out"),
    *("composites linked", "cores left alone with the broken", "deep deletes", "disks filled"),
    *("disks wiped", "entries undone", "leader crashes"),
    *("log reads for delivery", "leaders without room that hand over", "messages doubled"),
    *("messages of another cluster", "messages replayed late", "moments with two leaders probed"),
    *(
        "nodes that moved",
        "objects deleted",
        "older versions stopped by a level",
        "one-way cuts: deaf node",
        "partitions: bridge",
    ),
    *("partitions: chain of rivals", "majorities without room", "pauses", "power failures"),
    *("processes killed", "repairs completed", "requests lost", "set objects compacted"),
    *(
        "slow links",
        "snapshots installed",
        "starts cut short",
        "starts refused to an older version",
        "state hashes compared",
    ),
    *("stops inside a disk call or between effects", "stream objects compacted", "sync errors"),
    *("takeovers made hard", "transfers asked for", "views taken", "voter changes done"),
    *("watchers sent to a snapshot", "writes refused by a full disk"),
    "writes refused while disks are full",
)
"""Faults, what only faults bring about, and compactions: else the runs would prove little."""
_RARE_KINDS = ("bits turned over: quorum-state", "disks put back")
"""Faults of one seed in several hundred."""


def assert_none_failed(summary: Summary) -> None:
    assert not summary.failures, "\n\n".join(map(str, summary.failures[:3]))


def assert_clean_and_telling(
    profile: str, kinds: Sequence[str], is_long: bool, seeds: Iterable[int], at_least: int
) -> None:
    """Run `at_least` of the seeds, and more until every kind has been met, or a long run."""
    summary = run_in_parallel(range(2000), profile, _JOBS) if is_long else Summary()
    for seed in () if is_long else seeds:
        summary.add(run_seeds([seed], profile))
        if summary.seeds >= at_least and all(summary.counts[kind] for kind in kinds):
            break
    assert_none_failed(summary)
    unheard_of = [kind for kind in kinds if not summary.counts[kind]]
    assert not unheard_of, f"never happened in {summary.seeds} seeds: {unheard_of}"


short_and_long = pytest.mark.parametrize(
    "is_long", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["short", "long"]
)


@pytest.mark.timeout(1500)
@short_and_long
def test_invariants_hold_in_any_weather(is_long: bool) -> None:
    kinds = (*_EXPECTED_KINDS, *_RARE_KINDS) if is_long else _EXPECTED_KINDS
    telling = (75, 32, 72, 83, 134, 114, 53, 128, 66, 30, 131, 258)  # until the draws change
    assert_clean_and_telling("swarm", kinds, is_long, (*telling, *range(120)), 24)


@pytest.mark.parametrize("profile", PROFILES)
def test_invariants_hold_in_each_kind_of_weather(profile: str) -> None:
    assert_none_failed(run_seeds(range(5000, 5002), profile))


def test_a_calm_quorum_meets_no_fault_and_answers_everyone() -> None:
    summary = run_seeds(range(10), "calm")
    assert_none_failed(summary)
    assert summary.counts["operations answered"] > 100
    assert summary.counts["elections won"] == summary.seeds  # a leader that is well is not deposed
    assert not summary.counts["outcomes unknown"]
    assert not summary.counts["power failures"]


def test_lost_majorities_are_recovered_and_disks_of_before_stop() -> None:
    summary = run_seeds(range(12), "lost")
    assert_none_failed(summary)
    recovered = summary.counts["majorities lost and recovered"]
    assert 2 * recovered > summary.seeds, summary.counts
    assert summary.counts["disks of before refused"] > 2, summary.counts


@pytest.mark.parametrize("seed", [3, 17, 40])
def test_a_seed_replays_the_same_run(seed: int) -> None:
    first, second = simulate(seed, traced=True), simulate(seed, traced=True)
    assert first == second


def test_tracing_changes_nothing() -> None:
    traced, untraced = simulate(11, traced=True), simulate(11)
    assert (traced.events, traced.counts) == (untraced.events, untraced.counts)


def test_a_seed_replays_the_same_run_with_other_hashes_of_strings() -> None:
    code = (
        "from tests.sim.sim_run import simulate\n"
        "for profile in ('swarm', 'rotten', 'reconfig'):\n"
        "    print(simulate(23, profile, traced=True).trace_hash)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(_SCRIPT.parents[1])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1, outputs
    assert len(outputs.pop().split()) == 3


def test_the_script_says_what_happened_as_json() -> None:
    command = [sys.executable, str(_SCRIPT), "--seeds", "0:3", "--profile", "calm"]
    result = subprocess.run(
        [*command, "--jobs", "2", "--format", "json"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    fields = json.loads(result.stdout)
    assert (fields["seeds"], fields["failed"], fields["failures"]) == (3, 0, [])


@pytest.mark.parametrize("arguments", [["--seeds", "5:5"], ["--jobs", "0"], ["--profile", "rain"]])
def test_the_script_refuses_what_it_does_not_know(arguments: list[str]) -> None:
    command = [sys.executable, str(_SCRIPT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert arguments[1] in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("profile", PROFILES)
def test_invariants_hold_for_long(profile: str) -> None:
    assert_none_failed(run_in_parallel(range(10_000, 12_000), profile, _JOBS))


def test_a_rejected_download_leaves_the_flushed_log_as_it_was() -> None:
    """A node rejects a snapshot while its log differs from the committed one, then fetches."""
    assert_none_failed(run_seeds([3_001_100], "swarm"))


_FENCE_KINDS = (
    "clusters restored",
    "commits of the restored cluster",
    "looks that failed",
    "looks that found another owner",
    "objects adopted",
    "pauses",
)


@pytest.mark.timeout(1500)
@short_and_long
def test_a_cluster_out_of_reach_of_the_bucket_stops_before_the_restored_one_begins(
    is_long: bool,
) -> None:
    assert_clean_and_telling("fenced", _FENCE_KINDS, is_long, range(24), 24)


@pytest.mark.parametrize("seed", [0, 5, 56, 60, 98, 117])
def test_seeds_that_once_showed_a_fault_are_clean(seed: int) -> None:
    """A lease without an end, from the end of a look, or that is not asked before an answer."""
    failure = simulate(seed, "fenced").failure
    assert failure is None, failure


_BACKUP_KINDS = (
    "calls of the backup's bucket that failed",
    "checkpoints in the backup",
    "forged segments found",
    "logs trimmed ahead of the backup",
    "points before or between chains",
    "points restored",
    "runs with a map",
)


@pytest.mark.timeout(1500)
@short_and_long
def test_any_point_is_restored_as_it_was_committed(is_long: bool) -> None:
    assert_clean_and_telling("backup", _BACKUP_KINDS, is_long, range(12), 4)
