"""What plans, applies and rounds tell of themselves."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.run_reporter import apply_report, plan_report, report_run, round_report
from streammeta.reconcile.watch import Round, WatchConfig, watch
from streammeta.storage.cluster_files.reconcile_runs import Run
from tests.reconcile.fake_controller import COMMITTED, FakeMap, LocalBucket, MapObject, own

RUN = Run(
    started_ms=1_000,
    ended_ms=2_000,
    kind="plan",
    engine="local",
    result="settled",
    problem="",
    succeeded=True,
    orphan_bytes=70,
    missing=2,
)


@pytest.fixture
def config(bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path) -> WatchConfig:
    """Rounds on a bucket with 30 live objects and 3 orphans of 10 bytes each."""
    state.objects = {i: MapObject(COMMITTED, size=10) for i in range(30)}
    for object_id in (*range(30), *range(100, 103)):
        bucket.put(own(object_id), 10)
    folder, engine = tmp_path / "rounds", EngineName.LOCAL
    return WatchConfig(
        PlanConfig(bucket.uri, (endpoint,), folder, patience_s=1, engine=engine),
        ApplyConfig(folder, delete=True, patience_s=1, engine=engine),
        interval_s=1,
        rounds=1,
    )


def numbers(run: Run) -> tuple[object, ...]:
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
    assert [(each.kind, each.engine, each.result) for each in (planned, dry, applied)] == [
        ("plan", "local", "settled"),
        ("apply", "local", "settled"),
        ("apply", "local", "settled"),
    ]
    assert planned.succeeded
    assert applied.succeeded


def test_a_round_tells_both_and_one_that_failed_knows_no_numbers(
    config: WatchConfig, state: FakeMap
) -> None:
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
