"""The audit trail of a run: chained, around each change, and by attempts with their own names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.controller.trust.audit.check import Verified, split, verify
from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.deletion.order import Judged, Outcome
from streammeta.reconcile.deletion.tasks import Deleter
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.vocabulary.attempts import ONLY_ATTEMPT, Attempt, OtherAttempts
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import DeleteResult, ObjectInfo
from tests.reconcile.fake_controller import Scene, own
from tests.reconcile.spark_when_slow import spark_when_slow
from tests.reconcile.test_reconcile_deletion import NAMESPACE, Bench, FakeLeader


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Lines of all files below a folder."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def told(lines: list[dict[str, Any]], verdict: str) -> list[str]:
    return [line["target"]["key"] for line in lines if line["verdict"] == verdict]


@pytest.mark.parametrize("mode", ["delete", "quarantine", "tag"])
@spark_when_slow
def test_each_change_is_in_a_chain_that_verifies(
    engine: EngineName, scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    scene.fill(range(60))
    orphans = {scene.bucket.put(own(i), 4) for i in range(100, 110)}
    plan(PlanConfig(store=scene.bucket.address, connect=(scene.endpoint,), folder=tmp_path / "p"))
    order = ApplyConfig(
        tmp_path / "p",
        engine=engine,
        delete=True,
        quarantine=mode == "quarantine",
        tag=mode == "tag",
    )
    assert apply(replace(order, delete=False)).outcomes
    assert list((tmp_path / "p").glob("runs/*/audit")) == [], "a dry run changes nothing"

    done = apply(order)

    files = sorted((done.run_folder / "audit").glob("*.jsonl"))
    chains = verify([split(path.name, path.read_bytes()) for path in files])
    assert [chain.breaks for chain in chains] == [[] for _ in files]
    lines = lines_of(done.run_folder / "audit")
    assert sorted(told(lines, "BEGUN")) == sorted(told(lines, "OK")) == sorted(orphans)
    assert {line["call"] for line in lines} == {f"reconcile.{mode}"}
    assert {line["target"]["run"] for line in lines} == {done.run_folder.name}
    assert run_cli(cli, ["audit", "verify", *map(str, files)]) == 0
    files[0].write_bytes(files[0].read_bytes().replace(b'"size":4', b'"size":5', 1))
    assert run_cli(cli, ["audit", "verify", *map(str, files)]) == 1
    capsys.readouterr()


def test_no_audit_line_no_deletion(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "audit").write_text("a file where the folder should be")
    assert set(bench.run().values()) == {Outcome.FAILED}
    assert bench.stored() == set(range(5))


def test_a_line_precedes_its_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    seen: list[list[str]] = []

    def die(keys: Iterable[str]) -> DeleteResult:
        seen.append(told(lines_of(tmp_path / "audit"), "BEGUN"))
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(bench.store, "delete_many", die)
    bench.run()
    keys = {key_for(i, NAMESPACE) for i in range(5)}
    assert [set(keys) for keys in seen] == [keys]
    unknown = [line for line in lines_of(tmp_path / "audit") if line["verdict"] == "UNKNOWN"]
    assert {line["target"]["key"] for line in unknown} == keys
    assert all("may have succeeded in part: no answer" in line["reason"] for line in unknown)


def test_a_key_that_a_throttled_request_had_deleted_ends_well(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.busy["delete", 2] = 1
    bench.run()
    lines = lines_of(tmp_path / "audit")
    assert {line["node"] for line in lines} == {3}
    assert sorted(told(lines, "OK")) == sorted(key_for(i, NAMESPACE) for i in range(5))
    assert told(lines, "BEGUN").count(key_for(2, NAMESPACE)) == 2


def chains_of(folder: Path) -> list[Verified]:
    return verify([split(path.name, path.read_bytes()) for path in sorted(folder.iterdir())])


@pytest.mark.parametrize("is_amid", [False, True], ids=["between batches", "amid a batch"])
def test_concurrent_attempts_have_chains_and_lines_for_all(tmp_path: Path, is_amid: bool) -> None:
    bench = Bench(tmp_path, 8)
    order = replace(bench.order, keys_per_s=2)
    leaders = [FakeLeader(bench.state), FakeLeader(bench.state)]
    works = [
        Deleter(order, Attempt(7, number), bench.store, leader)
        for number, leader in zip((3, 9), leaders, strict=True)
    ]
    for work in works:
        work._pacer.wait_for = lambda keys: None  # type: ignore[method-assign]
    first, second = (work.run(bench.candidates) for work in works)
    judged: dict[str, list[Judged]] = {"first": [], "second": []}
    if is_amid:
        leaders[1].on_announced = lambda: judged["first"].extend(next(first, []))

    for batch in second:
        judged["second"] += batch
        judged["first"] += next(first, [])
    judged["first"] += [judgement for batch in first for judgement in batch]

    keys = {candidate.key for candidate in bench.candidates}
    assert bench.stored() == set()
    for of_attempt in judged.values():
        assert {judgement.candidate.key for judgement in of_attempt} == keys
        assert {judgement.outcome for judgement in of_attempt} == {Outcome.DELETED}
    assert [(one.node, one.breaks) for one in chains_of(tmp_path / "audit")] == [(3, []), (9, [])]
    lines = lines_of(tmp_path / "audit")
    assert {*told(lines, "BEGUN")} == {*told(lines, "OK")} == keys


def test_a_repeated_attempt_counts_what_the_one_before_it_deleted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    everything = bench.candidates
    bench.candidates = everything[:3]
    bench.run()
    bench.candidates, bench.attempt = everything, Attempt(7, 9)

    assert set(bench.run().values()) == {Outcome.DELETED}

    lines = lines_of(tmp_path / "audit")
    assert sorted(told(lines, "BEGUN")) == sorted(row.key for row in everything)
    assert {*told(lines, "OK")} == {row.key for row in everything}
    repeated = [line["reason"] for line in lines if "reason" in line]
    assert repeated == ["another attempt of this task had deleted it"] * 3


def test_a_key_that_another_attempt_deletes_first_counts_as_deleted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, count=3)
    bench.order = replace(bench.order, quarantine=True)
    copy, other = bench.store.copy, Attempt(7, 9)

    def copy_late(source_key: str, target_key: str, source: ObjectInfo | None = None) -> None:
        if source_key == bench.candidates[1].key:
            record = json.dumps({"key": source_key})
            (bench.undo / f"{other.name}-000000.jsonl").write_text(record)
            bench.store.delete_many([source_key])
        copy(source_key, target_key, source)

    bench.store.copy = copy_late  # type: ignore[method-assign]
    assert set(bench.run().values()) == {Outcome.QUARANTINED}


def test_an_absent_key_that_another_attempt_was_to_tag_is_gone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, count=3)
    bench.order = replace(bench.order, tag=True)
    bench.run()
    bench.store.delete_many([bench.candidates[1].key])
    bench.attempt = Attempt(7, 9)
    gone = bench.candidates[1].object_id
    outcomes = bench.run()
    assert {id_ for id_, outcome in outcomes.items() if outcome is Outcome.GONE} == {gone}


@pytest.mark.parametrize("other", [Attempt(8, 9), Attempt(7, 3)], ids=["task", "run"])
def test_a_key_that_no_attempt_began_was_absent_before(tmp_path: Path, other: Attempt) -> None:
    bench = Bench(tmp_path)
    bench.run()
    bench.attempt = other
    if other.task == 7:
        bench.order = replace(bench.order, undo_folder=str(tmp_path / "undo-of-the-next-run"))
    assert set(bench.run().values()) == {Outcome.GONE}


def test_an_attempt_that_ends_between_its_lines_is_finished_by_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    delete = bench.store.delete_many

    def die(keys: Iterable[str]) -> DeleteResult:
        delete(keys)
        raise KeyboardInterrupt

    bench.store.delete_many = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    bench.store.delete_many = delete  # type: ignore[method-assign]
    bench.attempt = Attempt(7, 9)

    assert set(bench.run().values()) == {Outcome.DELETED}
    lines = lines_of(tmp_path / "audit")
    assert sorted(told(lines, "BEGUN")) == sorted(told(lines, "OK"))
    assert [chain.breaks for chain in chains_of(tmp_path / "audit")] == [[], []]


def test_an_attempt_is_known_by_an_id_that_never_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import TaskContext

    from streammeta.reconcile.engines.spark_engine import _this_attempt

    assert _this_attempt() == ONLY_ATTEMPT
    contexts = iter(
        SimpleNamespace(
            partitionId=lambda: 4, attemptNumber=lambda: 0, taskAttemptId=lambda at=at: at
        )
        for at in (17, 40)
    )
    monkeypatch.setattr(TaskContext, "get", lambda: next(contexts))
    assert [_this_attempt(), _this_attempt()] == [Attempt(4, 17), Attempt(4, 40)]


def test_records_of_the_same_task_alone_are_read_and_each_once(tmp_path: Path) -> None:
    def record(attempt: Attempt, number: int, key: str) -> None:
        path = tmp_path / f"{attempt.name}-{number:06d}.jsonl"
        path.write_text(f'{{"key": "{key}"}}\n')

    others = OtherAttempts(tmp_path, Attempt(1, 5))
    others.look()
    record(Attempt(1, 5), 0, "own")
    record(Attempt(11, 6), 0, "of task 11")
    record(Attempt(1, 55), 0, "first")
    others.look()
    record(Attempt(1, 55), 1, "second")
    assert not others.has_begun("second"), "as of the last look"
    (tmp_path / f"{Attempt(1, 55).name}-000000.jsonl").write_text("no record any more")
    others.look()
    found = {key for key in ("own", "of task 11", "first", "second") if others.has_begun(key)}
    assert found == {"first", "second"}
