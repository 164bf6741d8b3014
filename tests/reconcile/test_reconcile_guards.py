"""Plans that must not be made or applied: refusals before an engine starts, and guards."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.cluster.identity import place_of
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans.plan_folder import (
    CLOCK_SKEW_MS,
    GRACE_FLOOR_MS,
    LossCounts,
    LostRange,
    check_plan,
    check_store,
    new_plan_folder,
    read_plan_file,
    write_plan_file,
)
from streammeta.reconcile.vocabulary.errors import ConfigurationError, PlanError, ReconcileError
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import (
    Evidence,
    GuardResult,
    Verdict,
    check_guards,
    fail_without_metadata,
)
from streammeta.storage.cluster_files.bucket_marker import claim_key, marker_key
from streammeta.storage.errors import WrongBucketError
from streammeta.storage.object_store.protocol.address import StoreAddress
from tests.kit.real_cluster import streammeta
from tests.reconcile.fake_controller import (
    HOUR_MS,
    OTHER,
    OWN,
    FakeMap,
    LocalBucket,
    Scene,
    example_plan,
)

LIMITS: dict[str, Any] = {"max_share": 0.2, "max_candidates": 1000, "allow_empty_map": False}


def many(**keys: int) -> dict[Verdict, int]:
    """Numbers of keys by the name of their verdict."""
    return {Verdict[name.upper()]: count for name, count in keys.items()}


@pytest.mark.parametrize(
    ("counts", "committed", "settings", "refused"),
    [
        pytest.param(many(live=90, orphan=10, foreign=500, marker=4), 90, {}, set(), id="usual"),
        pytest.param({}, 0, {}, set(), id="empty bucket and map"),
        pytest.param(
            many(foreign=3, other_cluster=3, marker=1), 0, {}, set(), id="empty map, no own key"
        ),
        pytest.param(
            many(live=79, orphan=21, foreign=900, other_cluster=9, marker=9),
            *(79, {}, {"max_share"}),
            id="share of own keys alone",
        ),
        pytest.param(many(live=80, orphan=20), 80, {}, set(), id="share at its limit"),
        pytest.param(many(orphan=3), 0, {"max_share": 1.0}, {"empty_map"}, id="empty map"),
        pytest.param(
            *(many(orphan=3), 0, {"max_share": 1.0, "allow_empty_map": True}, set()),
            id="empty map allowed",
        ),
        pytest.param(
            many(live=100_000, orphan=1001), 100_000, {}, {"max_candidates"}, id="candidates"
        ),
        pytest.param(
            *(many(live=100_000, orphan=1001), 100_000, {"max_candidates": 1001}, set()),
            id="candidates at their limit",
        ),
        pytest.param(many(missing=1, live=99), 100, {}, set(), id="1 % missing"),
        pytest.param(many(missing=1, linked=99), 100, {}, set(), id="1 % beside linked ones"),
        pytest.param(many(linked=1), 0, {"max_share": 1.0}, {"empty_map"}, id="linked by no map"),
        pytest.param(many(size_mismatch=1, live=99), 100, {}, set(), id="1 % of another size"),
        pytest.param(
            many(missing=1, size_mismatch=1, live=98), 100, {}, {"missing_objects"}, id="2 %"
        ),
        pytest.param(many(missing=50, live=50), 100, {}, {"missing_objects"}, id="half missing"),
        pytest.param(
            many(size_mismatch=99, live=1), 100, {}, {"missing_objects"}, id="other objects"
        ),
        pytest.param(many(missing=1), 1, {}, {"missing_objects"}, id="the only one missing"),
        pytest.param(
            *(many(missing=5, unlisted=1000, too_young=99), 1005, {}, {"missing_objects"}),
            id="late commits hide no missing object",
        ),
        pytest.param(
            many(live=10_000, not_issued=1), 10_000, {}, {"not_issued"}, id="never issued"
        ),
        pytest.param(many(live=90), 90, {"issued_below": 999}, {"map_age"}, id="older map"),
        pytest.param(many(live=90), 90, {"issued_below": 1001}, set(), id="newer map"),
    ],
)
def test_guards_refuse_what_may_be_the_wrong_map(
    counts: dict[Verdict, int], committed: int, settings: dict[str, Any], refused: set[str]
) -> None:
    limits = LIMITS | settings
    evidence = Evidence(counts, committed, limits.pop("issued_below", 1000), claimed_below=1000)
    assert {one.name for one in check_guards(evidence, **limits) if not one.passed} == refused


def test_a_listing_without_a_map_can_t_be_applied() -> None:
    (finding,) = fail_without_metadata("the leader is away")
    assert (finding.name, finding.passed) == ("map_copied", False)
    assert finding.detail.startswith("the leader is away; make a new plan")


def test_a_plan_file_is_read_back_as_written(tmp_path: Path) -> None:
    guards = check_guards(Evidence({Verdict.ORPHAN: 20}, 0, 5, 5), **LIMITS)
    made = example_plan(guards=guards, unknown=("the uploads",), unfinished_uploads=None)
    write_plan_file(tmp_path, made)
    assert read_plan_file(tmp_path) == made
    assert {g.name for g in read_plan_file(tmp_path).failed_guards} == {"empty_map", "max_share"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 1}, "version 1, expected 2"),
        ({"created_at_ms": "1970"}, "created_at_ms.*expected Unix milliseconds"),
        ({"listing_started_ms": True}, "listing_started_ms"),
        ({"young_from_ms": None}, "young_from_ms"),
        ({"classes": {"nonsense": {"keys": 1, "size": 1}}}, "nonsense"),
        ({"guards": 7}, "damaged"),
        ({"surprise": 7}, "surprise"),
    ],
)
def test_foreign_plans_are_refused(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    write_plan_file(tmp_path, example_plan())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlanError, match=complaint):
        read_plan_file(tmp_path)


def test_no_plan_and_half_a_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="be read"):
        read_plan_file(tmp_path)
    (tmp_path / "plan.json").write_text('{"version": 2, ')
    with pytest.raises(PlanError, match="damaged"):
        read_plan_file(tmp_path)


def test_a_plan_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail_half_way() -> None:
        with new_plan_folder(tmp_path / "p") as draft:
            (draft / "verdicts").mkdir()
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []
    with new_plan_folder(tmp_path / "p") as draft:
        (draft / "plan.json").touch()
        assert not (tmp_path / "p").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["p", "plan.json"]


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    kept = tmp_path / "p" / "plan.json"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(PlanError, match="overwritten"), new_plan_folder(tmp_path / "p"):
        pytest.fail("the draft must not be started")
    assert kept.read_text() == "mine"


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def take_the_place() -> None:
        with new_plan_folder(tmp_path / "p"):
            (tmp_path / "p").mkdir()
            (tmp_path / "p" / "mine").touch()

    with pytest.raises(PlanError, match="overwritten"):
        take_the_place()
    assert [path.name for path in tmp_path.rglob("*")] == ["p", "mine"]


# Admission

FOLDER = Path("p")
NOW = 1_000 * HOUR_MS
AT_THE_FLOOR = NOW - 60_000 - GRACE_FLOOR_MS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"listing_started_ms": NOW - 24 * HOUR_MS, "young_from_ms": NOW - 25 * HOUR_MS},
        {"created_at_ms": NOW + CLOCK_SKEW_MS},
        {"young_from_ms": AT_THE_FLOOR},
        {"young_from_ms": NOW - 60_000, "unsafe_grace": True},
    ],
)
def test_what_may_be_applied(changes: dict[str, Any]) -> None:
    check_plan(FOLDER, example_plan(NOW, **changes), NOW)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"created_at_ms": 0}, "1000 h old"),
        ({"listing_started_ms": 0, "young_from_ms": -HOUR_MS}, "1000 h old"),
        (
            {"listing_started_ms": NOW - 24 * HOUR_MS - 1, "young_from_ms": 0},
            "24 h old, expected at most 24 h",
        ),
        ({"created_at_ms": NOW + CLOCK_SKEW_MS + 1}, "600 s in the future"),
        (
            {"listing_started_ms": NOW + HOUR_MS, "young_from_ms": NOW - HOUR_MS},
            "3600 s in the future",
        ),
        ({"young_from_ms": AT_THE_FLOOR + 1}, "--grace is 899 s, expected at least 15m"),
        ({"young_from_ms": NOW, "unsafe_grace": True}, "expected 0 or more"),
        ({"next_object_id": None}, "without the metadata"),
        (
            {"guards": (GuardResult("not_issued", False, "7 keys"),)},
            "only a report, its guards failed: not_issued: 7 keys",
        ),
    ],
)
def test_what_may_not_be_applied(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        check_plan(FOLDER, example_plan(NOW, **changes), NOW)


def test_the_same_bucket_at_another_endpoint_is_another_store() -> None:
    there = "s3://b?endpoint=http://127.0.0.1"
    plan = example_plan(place="s3://b at http://127.0.0.1:9000")
    check_store(StoreAddress.parse(f"{there}:9000/&accessKey=a&secretKey=SK"), plan)
    with pytest.raises(PlanError, match=r"s3://b.*http://127.0.0.1:9000"):
        check_store(StoreAddress.parse(f"{there}:9001&accessKey=a&secretKey=SK"), plan)
    with pytest.raises(PlanError, match="Amazon S3"):
        check_store(StoreAddress.parse("s3://b"), plan)


RANGE = LostRange("missing", "k", 1, 0, 9, 5, None, None)
LOST = LossCounts(objects=1, size=9, streams=1, ranges=1, refuted=0, first=(RANGE,))
REFUTED = LossCounts(objects=0, size=0, streams=0, ranges=0, refuted=1)


@pytest.mark.parametrize(
    ("changes", "code", "exit_code"),
    [
        ({"classes": {Verdict.LIVE: Tally(5, 5)}}, None, 0),
        ({"losses": LOST}, "MISSING_OBJECTS", 3),
        ({"losses": LOST, "unknown": ("uploads",)}, "MISSING_OBJECTS", 3),
        ({"losses": LOST, "guards": (GuardResult("share", False, "too many"),)}, "GUARD", 3),
        ({"guards": (GuardResult("share", False, "too many"),)}, "GUARD", 1),
        ({"losses": REFUTED}, None, 0),
        ({"losses": REFUTED, "unknown": ("uploads",)}, "INCOMPLETE", 1),
        ({"unknown": ("losses could not be confirmed",)}, "INCOMPLETE", 1),
    ],
)
def test_what_the_exit_code_of_plan_says(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    code: str | None,
    exit_code: int,
    endpoint: str,
) -> None:
    made = example_plan(**{"classes": {Verdict.MISSING: Tally(1, 0)}} | changes)
    monkeypatch.setattr(sys.modules["streammeta.reconcile.plan"], "plan", lambda *_: made)
    told = ("--connect", endpoint)  # which answers at once that it takes no such thing
    said = streammeta("reconcile", "plan", "--store", "s3://b", *told, "--plan", "p")
    assert said["exit_code"] == exit_code
    assert said.get("error", {}).get("code") == code
    assert said["classes"] != []


@pytest.fixture
def config(bucket: LocalBucket, endpoint: str, tmp_path: Path) -> PlanConfig:
    return PlanConfig(store=bucket.address, connect=(endpoint,), folder=tmp_path / "p")


@pytest.fixture
def planned(bucket: LocalBucket, endpoint: str, tmp_path: Path) -> Path:
    """The folder of a plan without a candidate that was made just now."""
    made = example_plan(
        time.time_ns() // 1_000_000,
        store=bucket.uri,
        place=place_of(bucket.address),
        connect=(endpoint,),
        classes={},
    )
    (tmp_path / "made" / "candidates").mkdir(parents=True)
    write_plan_file(tmp_path / "made", made)
    return tmp_path / "made"


class StartedError(Exception):
    """Plan or apply has got as far as starting an engine."""


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plan and apply end where they would start an engine."""

    def start(*_choice: object) -> None:
        raise StartedError

    monkeypatch.setattr(sys.modules["streammeta.reconcile.apply"], "open_engine", start)
    monkeypatch.setattr(sys.modules["streammeta.reconcile.plan"], "open_engine", start)


def test_a_plan_is_applied_to_its_own_bucket_alone(planned: Path, tmp_path: Path) -> None:
    with pytest.raises(StartedError):
        apply(ApplyConfig(planned))
    with pytest.raises(PlanError, match="store"):
        apply(ApplyConfig(planned, StoreAddress.parse(f"{tmp_path.as_uri()}/other")))


def test_an_old_plan_is_not_applied(planned: Path) -> None:
    made = read_plan_file(planned)
    write_plan_file(planned, replace(made, created_at_ms=3, listing_started_ms=2, young_from_ms=1))
    with pytest.raises(PlanError, match="24 h"):
        apply(ApplyConfig(planned))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("cluster_id", "c2", "plan is for cluster 'c1'.* is cluster 'c2'"),
        ("cluster_uuid", "uuid-2", "plan is for cluster 'c1', UUID uuid-1.* UUID uuid-2"),
        ("namespace", OTHER, f"plan is for .*, namespace '{OWN}', but .* namespace '{OTHER}'"),
        ("next_object_id", 99, "plan saw 100"),
        ("bucket_problem", "the map is older", "does not trust its bucket: the map is older"),
    ],
)
def test_a_plan_is_not_applied_by_another_map(
    state: FakeMap, planned: Path, field: str, value: object, complaint: str
) -> None:
    setattr(state, field, value)
    with pytest.raises(ReconcileError, match=complaint):
        apply(ApplyConfig(planned, patience_s=0.1))


def test_a_plan_is_not_applied_to_what_took_the_bucket_s_place(scene: Scene, planned: Path) -> None:
    scene.bucket.store.put(claim_key(OWN, scene.state.issued_below + 1), b"")
    with pytest.raises(ReconcileError, match="2001"):
        apply(ApplyConfig(planned))
    scene.bucket.store.delete_many([marker_key(OWN)])
    with pytest.raises(WrongBucketError, match="marker"):
        apply(ApplyConfig(planned))
    replace(scene.state, cluster_uuid="uuid-2").mark(scene.bucket.store)
    with pytest.raises(WrongBucketError, match="uuid-2"):
        apply(ApplyConfig(planned))


def test_the_namespace_can_only_be_confirmed(config: PlanConfig) -> None:
    with pytest.raises(StartedError):
        plan(replace(config, namespace=OWN))
    for other in (OTHER, "", "data"):
        with pytest.raises(ConfigurationError, match=f"--namespace.*'{other}'"):
            plan(replace(config, namespace=other))
    assert not config.folder.exists()


@pytest.mark.parametrize("is_marked", [False, True], ids=["no marker", "another dev's marker"])
def test_the_bucket_of_another_cluster_of_the_same_name_makes_no_plan(
    state: FakeMap, config: PlanConfig, tmp_path: Path, is_marked: bool
) -> None:
    other = LocalBucket(tmp_path / "other")
    if is_marked:
        replace(state, cluster_uuid="uuid-2").mark(other.store)
    with pytest.raises(WrongBucketError):
        plan(replace(config, store=other.address))
    assert not config.folder.exists()


def test_a_short_grace_period_has_to_be_called_unsafe(scene: Scene, tmp_path: Path) -> None:
    words = ["reconcile", "plan", "--store", scene.bucket.uri, "--connect", scene.endpoint]
    said = streammeta(*words, "--plan", str(tmp_path / "p"), "--grace", "0s")
    assert said["exit_code"] == 1
    assert "--grace is 0 s, expected at least 15m" in said["error"]["message"]
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"connect": ()},
        {"grace_ms": -1},
        {"grace_ms": 899_999},
        {"max_share": 1.1},
        {"max_candidates": -1},
    ],
)
def test_what_makes_no_sense_is_refused(config: PlanConfig, change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        plan(replace(config, **change))  # type: ignore[arg-type]
