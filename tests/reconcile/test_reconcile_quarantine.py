"""Quarantine: what was taken away comes back as it was, wherever a run was cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.reconcile import undo as undo_module
from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.cluster.lease import held_lease
from streammeta.reconcile.deletion.order import Outcome
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.undo import Restored, undo
from streammeta.reconcile.vocabulary.errors import LeaseError, PlanError
from streammeta.reconcile.vocabulary.quarantine import quarantined_key
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import Verdict
from streammeta.storage.errors import AccessDeniedError, StorageError
from streammeta.storage.object_store.local_files import read_tags
from tests.kit.waiting import wait_until
from tests.reconcile.fake_controller import COMMITTED, OWN, LocalBucket, MapObject, Scene, own
from tests.reconcile.spark_when_slow import spark_when_slow
from tests.reconcile.test_reconcile_deletion import Bench

ORPHANS = range(100, 108)


@pytest.fixture
def folder(scene: Scene) -> Path:
    """A plan with candidates of 0 and more bytes; one of them has a tag."""
    scene.fill(range(40))
    scene.bucket.store.put(own(ORPHANS[0]), b"", tags={"topic": "a b"})
    for number, object_id in enumerate(ORPHANS):
        if number:
            scene.bucket.put(own(object_id), size=number)
    made = scene.config(
        "p",
        grace_ms=0,
        unsafe_grace=True,
    )
    plan(made)
    return scene.root / "p"


def content(bucket: LocalBucket) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Bytes and tags of every object outside of quarantine."""
    return {
        key: (bucket.store.get_range(key), read_tags(bucket.root / "objects" / key))
        for key in sorted(bucket.keys())
        if not key.startswith(f"{OWN}/quarantine/")
    }


def in_quarantine(bucket: LocalBucket) -> set[str]:
    prefix = f"{OWN}/quarantine/"
    return {key.removeprefix(prefix) for key in sorted(bucket.keys()) if key.startswith(prefix)}


def test_what_was_quarantined_comes_back_as_it_was(
    engine: EngineName, bucket: LocalBucket, folder: Path, endpoint: str, tmp_path: Path
) -> None:
    before = content(bucket)
    orphans = {own(i) for i in ORPHANS}

    done = apply(ApplyConfig(folder, delete=True, quarantine=True, engine=engine))
    assert done.outcomes == {Outcome.QUARANTINED: Tally(8, 28)}
    assert set(done.examples) == orphans
    assert content(bucket) == {key: value for key, value in before.items() if key not in orphans}
    assert in_quarantine(bucket) == orphans
    again = PlanConfig(store=bucket.address, connect=(endpoint,), folder=tmp_path / "again")
    assert plan(replace(again, engine=engine)).classes[Verdict.QUARANTINED] == Tally(8, 28)

    assert undo(folder).outcomes == {Restored.RESTORED: Tally(8, 28)}
    assert content(bucket) == before
    assert in_quarantine(bucket) == set()
    assert undo(folder).outcomes == {}


def test_an_undo_that_was_cut_off_is_finished_and_nothing_is_replaced(
    bucket: LocalBucket, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(bucket)
    apply(ApplyConfig(folder, delete=True, quarantine=True))
    bucket.store.copy(quarantined_key(own(103), OWN), own(103))  # and then it was killed
    bucket.store.put(own(104), b"none")  # as long as the one in quarantine
    bucket.store.put(own(105), b"shorter?")

    assert run_cli(cli, ["reconcile", "undo", "--plan", str(folder), "--format", "json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert {row["outcome"]: row["keys"] for row in said["outcomes"]} == {
        "restored": 6,
        "occupied": 2,
    }
    assert said["error"]["code"] == "INCOMPLETE"
    assert bucket.store.get_range(own(104)) == b"none"
    assert bucket.store.get_range(own(105)) == b"shorter?"
    assert in_quarantine(bucket) == {own(104), own(105)}
    bucket.store.delete_many([own(104), own(105)])
    assert undo(folder).complete
    assert content(bucket) == before


def test_only_the_plan_s_own_candidates_come_back(bucket: LocalBucket, folder: Path) -> None:
    stranger = bucket.put(quarantined_key(own(900), OWN))
    apply(ApplyConfig(folder, delete=True, quarantine=True))
    assert undo(folder).outcomes == {Restored.RESTORED: Tally(8, 28)}
    assert bucket.store.head(stranger).size == 10


def test_undo_needs_its_bucket_and_lease(bucket: LocalBucket, folder: Path, tmp_path: Path) -> None:
    apply(ApplyConfig(folder, delete=True, quarantine=True))
    before = bucket.keys()
    other = LocalBucket(tmp_path / "other")
    with pytest.raises(PlanError, match="store"):
        undo(folder, other.address)
    with held_lease(bucket.store, OWN, "another"), pytest.raises(LeaseError, match="another"):
        undo(folder)
    assert bucket.keys() == before


def test_a_copy_that_fails_stays_in_quarantine(
    bucket: LocalBucket, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(ApplyConfig(folder, delete=True, quarantine=True))
    settled = undo_module._restore_object

    def fail(store, key, copy):  # type: ignore[no-untyped-def]
        if key == own(102):
            raise AccessDeniedError("told to fail")
        return settled(store, key, copy)

    monkeypatch.setattr(undo_module, "_restore_object", fail)
    done = undo(folder)
    assert done.outcomes == {Restored.RESTORED: Tally(7, 26), Restored.FAILED: Tally(1, 2)}
    assert "told to fail" in done.problems[0]
    assert in_quarantine(bucket) == {own(102)}


@pytest.mark.parametrize("error", [StorageError("no"), AccessDeniedError("no")])
def test_what_can_t_be_copied_is_not_deleted(tmp_path: Path, error: StorageError) -> None:
    bench = Bench(tmp_path)
    bench.order = replace(bench.order, quarantine=True)
    bench.store.fail_next("copy", error, times=2)

    outcomes = list(bench.run().values())

    assert sorted(outcomes) == [Outcome.FAILED] * 2 + [Outcome.QUARANTINED] * 3
    kept = {candidate.key for candidate in bench.candidates} & bench.store.objects().keys()
    assert len(kept) == 2
    assert all(
        outcomes[one.object_id] is Outcome.FAILED for one in bench.candidates if one.key in kept
    )


@pytest.mark.process
@pytest.mark.parametrize("is_finished", [True, False])
def test_killed_quarantines_resume(is_finished: bool, bucket: LocalBucket, folder: Path) -> None:
    before = content(bucket)
    words = ["reconcile", "apply", "--plan", str(folder), "--yes", "--quarantine", "--rate", "1"]
    child = subprocess.Popen([sys.executable, "-m", "streammeta.cli.main", *words])
    try:
        wait_until(lambda: len(in_quarantine(bucket)) >= 3, "some objects are in quarantine")
    finally:
        child.kill()
        child.wait()

    if is_finished:
        done = apply(ApplyConfig(folder, delete=True, quarantine=True))
        assert set(done.outcomes) == {Outcome.QUARANTINED, Outcome.GONE}
        assert in_quarantine(bucket) == {own(i) for i in ORPHANS}
    assert undo(folder).complete
    assert content(bucket) == before


@spark_when_slow
def test_what_is_tagged_stays_with_its_tags_and_a_tag_for_the_rule_of_the_bucket(
    engine: EngineName, bucket: LocalBucket, folder: Path, endpoint: str, tmp_path: Path
) -> None:
    before = content(bucket)
    done = apply(ApplyConfig(folder, delete=True, tag=True, engine=engine))
    assert done.outcomes == {Outcome.TAGGED: Tally(8, 28)}
    assert set(done.examples) == {own(i) for i in ORPHANS}
    tagged = {own(i): {"streammeta-reconcile": "orphan"} for i in ORPHANS}
    tagged[own(ORPHANS[0])]["topic"] = "a b"
    assert content(bucket) == {
        key: (data, tagged.get(key, tags)) for key, (data, tags) in before.items()
    }
    assert list(done.run_folder.glob("undo/*.jsonl")), "on record like what is deleted"

    again = apply(ApplyConfig(folder, delete=True, tag=True, engine=engine))
    assert again.outcomes == done.outcomes
    assert apply(ApplyConfig(folder, delete=True, engine=engine)).outcomes == {
        Outcome.DELETED: Tally(8, 28)
    }


def test_a_tag_that_is_not_taken_fails_one_object_and_deletes_none(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 4)
    bench.order = replace(bench.order, tag=True)
    bench.store.put(bench.candidates[1].key, b"x", tags={f"tag{i}": "" for i in range(10)})
    bench.store.fail_next("add_tags", AccessDeniedError("no right to tag"))
    before = bench.store.objects().keys()
    found = bench.run()
    assert sorted(found.values()) == [
        Outcome.FAILED,
        Outcome.FAILED,
        Outcome.TAGGED,
        Outcome.TAGGED,
    ]
    assert bench.store.objects().keys() >= before
    bench.state.objects[2] = MapObject(COMMITTED)
    assert bench.run()[2] is Outcome.KEPT


def test_quarantine_excludes_tags(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reconcile", "apply", "--plan", str(folder), "--yes", "--tag", "--quarantine"]
    assert run_cli(cli, words) == 1
    assert "--quarantine and --tag exclude each other" in capsys.readouterr().err
