"""Guards: what forbids to apply a plan, and the plan folder that carries their findings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.reconcile.classify import Verdict
from storage.reconcile.errors import PlanError
from storage.reconcile.guards import GuardSettings, check_guards
from storage.reconcile.plan_folder import (
    PlanResult,
    Tally,
    new_plan_folder,
    read_plan_file,
    write_plan_file,
)

STRICT = GuardSettings(max_share=0.2, allow_empty_map=False)


def failed(
    counts: dict[Verdict, int], committed: int, settings: GuardSettings = STRICT
) -> set[str]:
    """Name the guards that object."""
    return {g.name for g in check_guards(counts, committed, settings) if not g.passed}


def test_a_usual_plan_passes() -> None:
    counts = {Verdict.LIVE: 90, Verdict.ORPHAN: 10, Verdict.FOREIGN: 500, Verdict.NOT_ISSUED: 1}
    assert failed(counts, 90) == set()


def test_an_empty_bucket_of_an_empty_map_passes() -> None:
    assert failed({}, 0) == set()
    assert failed({Verdict.FOREIGN: 3, Verdict.OTHER_CLUSTER: 3}, 0) == set()


def test_the_share_counts_keys_of_this_cluster_alone() -> None:
    counts = {Verdict.LIVE: 79, Verdict.ORPHAN: 21, Verdict.FOREIGN: 900, Verdict.OTHER_CLUSTER: 9}
    assert failed(counts, 79) == {"max_share"}
    assert failed({Verdict.LIVE: 80, Verdict.ORPHAN: 20}, 80) == set()


def test_an_empty_map_makes_no_orphans_unless_told() -> None:
    counts = {Verdict.ORPHAN: 3}
    assert "empty_map" in failed(counts, 0, GuardSettings(1.0, allow_empty_map=False))
    assert failed(counts, 0, GuardSettings(1.0, allow_empty_map=True)) == set()


def test_a_bucket_without_any_object_of_the_map_is_the_wrong_bucket() -> None:
    counts = {Verdict.MISSING: 5, Verdict.ORPHAN: 1, Verdict.TOO_YOUNG: 99}
    assert failed(counts, 5) == {"right_bucket"}
    assert failed(counts | {Verdict.LIVE: 1}, 6) == set()


def example_plan() -> PlanResult:
    """Make a plan with every field set."""
    counts = {Verdict.LIVE: Tally(80, 8000), Verdict.ORPHAN: Tally(20, 2000)}
    return PlanResult(
        cluster_id="c1",
        store="s3://b",
        namespace="_streammeta_c1",
        connect=("h:1", "h:2"),
        created_at_ms=3,
        listing_started_ms=2,
        young_from_ms=1,
        map_end_offset=9,
        map_epoch=4,
        next_object_id=100,
        map_objects=80,
        classes=counts,
        unfinished_uploads=2,
        guards=check_guards({Verdict.ORPHAN: 20}, 0, STRICT),
    )


def test_a_plan_file_is_read_back_as_written(tmp_path: Path) -> None:
    write_plan_file(tmp_path, example_plan())
    assert read_plan_file(tmp_path) == example_plan()
    assert {g.name for g in read_plan_file(tmp_path).failed_guards} == {"empty_map", "max_share"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "version 2, wanted 1"),
        ({"classes": {"nonsense": {"keys": 1, "size": 1}}}, "nonsense"),
        ({"guards": 7}, "damaged"),
        ({"surprise": 7}, "surprise"),
    ],
)
def test_a_plan_file_of_another_kind_is_refused(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    write_plan_file(tmp_path, example_plan())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlanError, match=complaint):
        read_plan_file(tmp_path)


def test_no_plan_and_half_a_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="can't be read"):
        read_plan_file(tmp_path)
    (tmp_path / "plan.json").write_text('{"version": 1, ')
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
    with pytest.raises(PlanError, match="never overwritten"), new_plan_folder(tmp_path / "p"):
        pytest.fail("the draft must not be started")
    assert kept.read_text() == "mine"


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def take_the_place() -> None:
        with new_plan_folder(tmp_path / "p"):
            (tmp_path / "p").mkdir()
            (tmp_path / "p" / "mine").touch()

    with pytest.raises(PlanError, match="never overwritten"):
        take_the_place()
    assert [path.name for path in tmp_path.rglob("*")] == ["p", "mine"]
