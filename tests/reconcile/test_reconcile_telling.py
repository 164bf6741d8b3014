"""Reports of plans, applies and rounds, and the bounded value that stores the last runs."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from typing import Any

import grpc
import pytest

from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.run_reporter import apply_report, plan_report, report_run, round_report
from streammeta.reconcile.watch import Round, WatchConfig, watch
from streammeta.storage.cluster_files import reconcile_runs
from tests.reconcile.fake_controller import FakeMap, LocalBucket, Scene, own


@pytest.fixture
def config(scene: Scene) -> WatchConfig:
    """Rounds on a bucket with 30 live objects and 3 orphans of 10 bytes each."""
    scene.fill(range(30), range(100, 103))
    folder, engine = scene.root / "rounds", EngineName.LOCAL
    return WatchConfig(
        PlanConfig(scene.bucket.address, (scene.endpoint,), folder, patience_s=1, engine=engine),
        ApplyConfig(folder, delete=True, patience_s=1, engine=engine),
        interval_s=1,
        rounds=1,
    )


def numbers(run: reconcile_runs.Run) -> tuple[object, ...]:
    return (run.keys, run.orphans, run.orphan_bytes, run.deleted, run.missing)


def one_round(config: WatchConfig) -> Round:
    return watch(config, threading.Event(), lambda _: None)


def test_a_plan_and_its_apply_tell_what_they_found_and_did(config: WatchConfig) -> None:
    folder = config.plan.folder
    planned = plan_report(plan(config.plan), 1, 2)
    dry = apply_report(apply(replace(config.apply, folder=folder, delete=False)), 3, 4)
    applied = apply_report(apply(config.apply), 5, 6)
    # The bucket's marker is a key as well.
    assert numbers(planned) == (34, 3, 30, None, 0)
    assert numbers(dry) == (3, None, None, 0, None)
    assert numbers(applied) == (3, None, None, 3, None)
    assert [(run.kind, run.engine, run.result) for run in (planned, dry, applied)] == [
        ("plan", "local", "settled"),
        ("apply", "local", "settled"),
        ("apply", "local", "settled"),
    ]
    assert planned.succeeded
    assert applied.succeeded


def test_a_round_reports_both_and_a_failed_one_none(config: WatchConfig, state: FakeMap) -> None:
    done = round_report(one_round(config))
    assert numbers(done) == (34, 3, 30, 3, 0)
    assert (done.kind, done.engine, done.result, done.succeeded) == (
        *("round", "local", "settled"),
        True,
    )
    state.refuse = grpc.StatusCode.PERMISSION_DENIED
    failed = round_report(one_round(config))
    assert numbers(failed) == (None, None, None, 0, None)
    assert (failed.result, failed.succeeded) == ("failed", False)
    assert failed.problem


def test_an_apply_that_a_signal_ended_is_no_success(config: WatchConfig) -> None:
    plan(config.plan)
    told = apply_report(apply(replace(config.apply, is_ending=lambda: True)), 1, 2)
    assert numbers(told) == (3, None, None, 0, None)
    assert (told.result, told.succeeded, told.problem) == ("ended", False, "ended by a signal")


def test_missing_objects_are_told(config: WatchConfig, bucket: LocalBucket) -> None:
    bucket.store.delete_many([own(0)])
    lost = round_report(one_round(config))
    assert (lost.missing, lost.result, lost.succeeded) == (1, "guard", False)


def test_controllers_that_know_no_keys_are_a_sentence(endpoint: str) -> None:
    assert "status pages do not show this run: controller rejected GetKVs" in report_run(
        RUN, (endpoint,), None
    )


RUN = reconcile_runs.Run(
    started_ms=1_000,
    ended_ms=2_000,
    kind="plan",
    engine="local",
    result="settled",
    problem="",
    succeeded=True,
    keys=9,
    orphans=2,
    orphan_bytes=70,
    missing=2,
)
FAILED = replace(RUN, result="failed", succeeded=False, orphan_bytes=None, missing=None)


def test_runs_are_read_as_written() -> None:
    runs = reconcile_runs.Runs().followed_by(RUN).followed_by(FAILED)
    assert reconcile_runs.decode(reconcile_runs.encode(runs)) == runs
    assert (
        reconcile_runs.decode(reconcile_runs.encode(reconcile_runs.Runs())) == reconcile_runs.Runs()
    )


def test_the_newest_runs_are_kept_and_what_was_known_before_is_remembered() -> None:
    runs = reconcile_runs.Runs().followed_by(RUN)
    for number in range(reconcile_runs.RUNS_MAX + 3):
        runs = runs.followed_by(replace(FAILED, ended_ms=3_000 + number))
    assert [run.ended_ms for run in runs.runs] == [
        3_022 - at for at in range(reconcile_runs.RUNS_MAX)
    ]
    assert (runs.last_success_ms, runs.orphan_bytes, runs.missing) == (2_000, 70, 2)


@pytest.mark.parametrize("letter", ["\0", "\U0001f600"])
def test_the_largest_value_is_read(letter: str) -> None:
    text = letter * reconcile_runs.TEXT_MAX
    large = replace(RUN, kind=text, engine=text, result=text, problem=text)
    runs = reconcile_runs.Runs(runs=(large,) * reconcile_runs.RUNS_MAX)
    assert reconcile_runs.decode(reconcile_runs.encode(runs)) == runs
    assert len(reconcile_runs.encode(runs)) <= reconcile_runs.VALUE_MAX


@pytest.mark.parametrize(
    ("text", "kept"),
    [("a" * 200, "a" * 200), ("a" * 201, "a" * 197 + "..."), ("\ud800", "?"), ("", "")],
)
def test_texts_are_shortened_to_what_can_be_shown(text: str, kept: str) -> None:
    assert reconcile_runs.shorten_text(text) == kept


def value(**changes: Any) -> bytes:
    return json.dumps(
        {"version": 1, **asdict(reconcile_runs.Runs(runs=(RUN,))), **changes}
    ).encode()


def with_run(**changes: Any) -> bytes:
    return value(runs=[{**asdict(RUN), **changes}])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b"9" * 6_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"version": 2}', "version of the value is not 1"),
        (b" " * (reconcile_runs.VALUE_MAX + 1), "131073 bytes"),
        (value(runs={}), "runs: must be a list"),
        (value(runs=[asdict(RUN)] * (reconcile_runs.RUNS_MAX + 1)), "at most 20"),
        (value(runs=[7]), "runs: must be JSON objects"),
        (value(last_success_ms=None), "last_success_ms"),
        (value(missing=-1), "missing"),
        (value(orphan_bytes=1 << 63), "orphan_bytes"),
        (with_run(started_ms=reconcile_runs.TIME_MS_MAX + 1), "started_ms"),
        (with_run(ended_ms=True), "ended_ms"),
        (with_run(ended_ms=1.5), "ended_ms"),
        (with_run(keys=float("nan")), "keys"),
        (with_run(succeeded=1), "succeeded"),
        (with_run(kind=None), "kind"),
        (with_run(problem="x" * (reconcile_runs.TEXT_MAX + 1)), "problem"),
        (with_run(result="\ud800"), "result"),
    ],
)
def test_anything_else_is_refused(given: bytes, told: str) -> None:
    assert reconcile_runs.decode(value()).runs == (RUN,)
    with pytest.raises(reconcile_runs.RunsError, match=told):
        reconcile_runs.decode(given)
