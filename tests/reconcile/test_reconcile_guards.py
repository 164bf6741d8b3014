"""Guards: what forbids to apply a plan, and the plan folder that carries their findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streammeta.reconcile.errors import PlanError
from streammeta.reconcile.plan_folder import (
    new_plan_folder,
    read_plan_file,
    write_plan_file,
)
from streammeta.reconcile.verdicts import Evidence, Verdict, check_guards, without_map
from tests.reconcile.plans import example_plan

STRICT: dict[str, Any] = {"max_share": 0.2, "max_candidates": 1000, "allow_empty_map": False}


def failed(
    counts: dict[Verdict, int],
    committed: int,
    *,
    issued_below: int = 1000,
    **limits: Any,
) -> set[str]:
    """Name the guards that object; the bucket's claims reach 1000."""
    evidence = Evidence(counts, committed, issued_below, claimed_below=1000)
    return {g.name for g in check_guards(evidence, **STRICT | limits) if not g.passed}


def test_a_usual_plan_passes() -> None:
    counts = {Verdict.LIVE: 90, Verdict.ORPHAN: 10, Verdict.FOREIGN: 500, Verdict.MARKER: 4}
    assert failed(counts, 90) == set()


def test_an_empty_bucket_of_an_empty_map_passes() -> None:
    assert failed({}, 0) == set()
    assert failed({Verdict.FOREIGN: 3, Verdict.OTHER_CLUSTER: 3, Verdict.MARKER: 1}, 0) == set()


def test_the_share_counts_keys_of_this_cluster_alone() -> None:
    counts = {Verdict.LIVE: 79, Verdict.ORPHAN: 21, Verdict.FOREIGN: 900, Verdict.OTHER_CLUSTER: 9}
    assert failed(counts | {Verdict.MARKER: 9}, 79) == {"max_share"}
    assert failed({Verdict.LIVE: 80, Verdict.ORPHAN: 20}, 80) == set()


def test_an_empty_map_makes_no_orphans_unless_told() -> None:
    counts = {Verdict.ORPHAN: 3}
    assert failed(counts, 0, max_share=1.0) == {"empty_map"}
    assert failed(counts, 0, max_share=1.0, allow_empty_map=True) == set()


def test_candidates_have_an_absolute_limit_besides_the_share() -> None:
    counts = {Verdict.LIVE: 100_000, Verdict.ORPHAN: 1001}
    assert failed(counts, 100_000) == {"max_candidates"}
    assert failed(counts, 100_000, max_candidates=1001) == set()


@pytest.mark.parametrize(
    ("missing", "mismatched", "live", "refused"),
    [
        (0, 0, 100, False),
        (1, 0, 99, False),
        (0, 1, 99, False),
        (1, 1, 98, True),
        (50, 0, 50, True),
        (99, 0, 1, True),
        (0, 99, 1, True),  # every object is there, but of another cluster
        (1, 0, 0, True),
    ],
)
def test_more_than_one_object_in_a_hundred_missing_or_of_another_size_is_refused(
    missing: int, mismatched: int, live: int, refused: bool
) -> None:
    counts = {Verdict.MISSING: missing, Verdict.SIZE_MISMATCH: mismatched, Verdict.LIVE: live}
    assert failed(counts, 100) == ({"missing_objects"} if refused else set())


def test_objects_committed_during_the_listing_do_not_hide_missing_ones() -> None:
    counts = {Verdict.MISSING: 5, Verdict.UNLISTED: 1000, Verdict.TOO_YOUNG: 99}
    assert failed(counts, 1005) == {"missing_objects"}


def test_one_key_with_an_id_that_was_never_issued_is_enough() -> None:
    assert failed({Verdict.LIVE: 10_000, Verdict.NOT_ISSUED: 1}, 10_000) == {"not_issued"}


def test_a_map_older_than_the_bucket_is_refused() -> None:
    counts = {Verdict.LIVE: 90}
    assert failed(counts, 90, issued_below=999) == {"map_age"}
    assert failed(counts, 90, issued_below=1001) == set()


def test_a_listing_without_a_map_can_t_be_applied() -> None:
    (finding,) = without_map("the leader is away")
    assert (finding.name, finding.passed) == ("map_copied", False)
    assert finding.detail.startswith("the leader is away; make a new plan")


def test_a_plan_file_is_read_back_as_written(tmp_path: Path) -> None:
    guards = check_guards(Evidence({Verdict.ORPHAN: 20}, 0, 5, 5), **STRICT)
    made = example_plan(guards=guards, unknown=("the uploads",), unfinished_uploads=None)
    write_plan_file(tmp_path, made)
    assert read_plan_file(tmp_path) == made
    assert {g.name for g in read_plan_file(tmp_path).failed_guards} == {"empty_map", "max_share"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 1}, "version 1, wanted 2"),
        ({"created_at_ms": "1970"}, "created_at_ms.*wanted Unix milliseconds"),
        ({"listing_started_ms": True}, "listing_started_ms"),
        ({"young_from_ms": None}, "young_from_ms"),
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
