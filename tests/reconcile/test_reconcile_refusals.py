"""Refusals of plan and apply before Spark starts, and the exit codes of the command."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from streammeta.cli.output import run_cli
from streammeta.cli.root import cli
from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.errors import ConfigurationError, PlanError, ReconcileError
from streammeta.reconcile.identity import place_of
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plan_folder import Tally, read_plan_file, write_plan_file
from streammeta.reconcile.verdicts import Verdict
from streammeta.storage.bucket_marker import claim_key, marker_key
from streammeta.storage.errors import WrongBucketError
from tests.reconcile.fake_controller import FakeMap, serving
from tests.reconcile.local_bucket import OTHER, OWN, LocalBucket
from tests.reconcile.plans import example_plan


@pytest.mark.parametrize(
    ("counts", "unknown", "code"),
    [
        ({Verdict.LIVE: Tally(5, 5)}, (), None),
        ({Verdict.MISSING: Tally(1, 0)}, (), "MISSING_OBJECTS"),
        ({Verdict.SIZE_MISMATCH: Tally(1, 9)}, ("uploads",), "MISSING_OBJECTS"),
        ({Verdict.UNLISTED: Tally(1, 0)}, ("uploads",), "INCOMPLETE"),
    ],
)
def test_what_the_exit_code_of_plan_says(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    counts: dict[Verdict, Tally],
    unknown: tuple[str, ...],
    code: str | None,
) -> None:
    made = example_plan(classes=counts, unknown=unknown)
    monkeypatch.setattr("streammeta.reconcile.plan.plan", lambda *_: made)
    words = ["reconcile", "plan", "--store", "s3://b", "--connect", "h:1", "--plan", "p"]
    got = run_cli(cli, [*words, "--format", "json"])
    said = json.loads(capsys.readouterr().out)
    assert got == (0 if code is None else 1)
    assert said.get("error", {}).get("code") == code
    assert said["classes"] != []


@pytest.fixture
def planned(bucket: LocalBucket, endpoint: str, tmp_path: Path) -> Path:
    """The folder of a plan without a candidate that was made just now."""
    made = example_plan(
        time.time_ns() // 1_000_000,
        store=bucket.uri,
        place=place_of(bucket.uri),
        connect=(endpoint,),
        classes={},
    )
    (tmp_path / "made").mkdir()
    write_plan_file(tmp_path / "made", made)
    return tmp_path / "made"


class StartedError(Exception):
    """Apply has got as far as starting Spark."""


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plan and apply end where they would start Spark."""

    def start(_config: object) -> None:
        raise StartedError

    monkeypatch.setattr("streammeta.reconcile.apply.spark_session", start)
    monkeypatch.setattr("streammeta.reconcile.plan.spark_session", start)


def test_a_plan_is_applied_to_its_own_bucket_alone(planned: Path, tmp_path: Path) -> None:
    with pytest.raises(StartedError):
        apply(ApplyConfig(planned))
    with pytest.raises(PlanError, match="plan is of the store"):
        apply(ApplyConfig(planned, store=f"{tmp_path.as_uri()}/other"))


def test_an_old_plan_is_not_applied(planned: Path) -> None:
    made = read_plan_file(planned)
    write_plan_file(planned, replace(made, created_at_ms=3, listing_started_ms=2, young_from_ms=1))
    with pytest.raises(PlanError, match=r"h old, wanted at most 24 h; make a new plan"):
        apply(ApplyConfig(planned))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("cluster_id", "c2", "plan is of cluster 'c1'.* is cluster 'c2'"),
        ("cluster_uuid", "uuid-2", "plan is of cluster 'c1', UUID uuid-1.* UUID uuid-2"),
        ("namespace", OTHER, f"plan is of .*, namespace '{OWN}', but .* namespace '{OTHER}'"),
        ("next_object_id", 99, "plan saw 100: the map was restored"),
        ("bucket_problem", "the map is older", "does not trust its bucket: the map is older"),
    ],
)
def test_a_plan_is_not_applied_by_another_map(
    state: FakeMap, planned: Path, field: str, value: object, complaint: str
) -> None:
    setattr(state, field, value)
    with pytest.raises(ReconcileError, match=complaint):
        apply(ApplyConfig(planned, patience_s=0.1))


def test_a_plan_is_not_applied_to_what_took_the_bucket_s_place(
    bucket: LocalBucket, state: FakeMap, planned: Path
) -> None:
    bucket.store.put(claim_key(OWN, state.issued_below + 1), b"")
    with pytest.raises(ReconcileError, match=r"claims reach 2001.*restored"):
        apply(ApplyConfig(planned))
    bucket.store.delete_many([marker_key(OWN)])
    with pytest.raises(WrongBucketError, match="no marker"):
        apply(ApplyConfig(planned))
    replace(state, cluster_uuid="uuid-2").mark(bucket.store)
    with pytest.raises(WrongBucketError, match="uuid-2"):
        apply(ApplyConfig(planned))


def test_the_namespace_can_only_be_confirmed(
    bucket: LocalBucket, endpoint: str, tmp_path: Path
) -> None:
    confirming = PlanConfig(
        store=bucket.uri, connect=(endpoint,), folder=tmp_path / "p", namespace=OWN
    )
    with pytest.raises(StartedError):
        plan(confirming)
    for other in (OTHER, "", "data"):
        with pytest.raises(ConfigurationError, match=f"--namespace is '{other}', but"):
            plan(replace(confirming, namespace=other))
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("is_marked", [False, True], ids=["no marker", "another dev's marker"])
def test_the_bucket_of_another_cluster_of_the_same_name_makes_no_plan(
    state: FakeMap, endpoint: str, tmp_path: Path, is_marked: bool
) -> None:
    other = LocalBucket(tmp_path / "other")
    if is_marked:
        replace(state, cluster_uuid="uuid-2").mark(other.store)
    config = PlanConfig(store=other.uri, connect=(endpoint,), folder=tmp_path / "p")
    with pytest.raises(WrongBucketError):
        plan(config)
    assert not (tmp_path / "p").exists()


def test_unreachable_controllers_make_no_plan(bucket: LocalBucket, tmp_path: Path) -> None:
    with serving(FakeMap()) as gone:
        pass
    config = PlanConfig(store=bucket.uri, connect=(gone,), folder=tmp_path / "p", patience_s=0.3)
    with pytest.raises(ReconcileError, match="no leader answered"):
        plan(config)
    assert list(tmp_path.iterdir()) == [bucket.root]


def test_a_short_grace_period_has_to_be_called_unsafe(
    bucket: LocalBucket, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reconcile", "plan", "--store", bucket.uri, "--connect", endpoint]
    words += ["--plan", str(tmp_path / "p"), "--grace", "0s"]
    assert run_cli(cli, words) == 1
    assert "--grace is 0 s, wanted at least 15m" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"connect": ()},
        {"grace_ms": -1},
        {"grace_ms": 899_999},
        {"max_share": 1.1},
        {"max_candidates": -1},
        {"store": "b"},
    ],
)
def test_what_makes_no_sense_is_refused(
    bucket: LocalBucket, endpoint: str, tmp_path: Path, change: dict[str, object]
) -> None:
    config = PlanConfig(store=bucket.uri, connect=(endpoint,), folder=tmp_path / "p")
    with pytest.raises(ConfigurationError):
        plan(replace(config, **change))  # type: ignore[arg-type]
