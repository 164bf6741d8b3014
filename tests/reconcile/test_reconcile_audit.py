"""The audit trail of a run: chained, before and after each change, and without it no change."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.output import run_cli
from streammeta.cli.root import cli
from streammeta.controller.trust.audit_check import split, verify
from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.deletion_order import Outcome
from streammeta.reconcile.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.base import DeleteResult
from tests.reconcile.fake_controller import COMMITTED, FakeMap, LocalBucket, MapObject, own
from tests.reconcile.test_reconcile_deletion import NAMESPACE, Bench


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
def test_each_change_is_in_a_chain_that_verifies(
    engine: EngineName,
    bucket: LocalBucket,
    state: FakeMap,
    endpoint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mode: str,
) -> None:
    state.objects = {i: MapObject(COMMITTED, size=10) for i in range(60)}
    for object_id in range(60):
        bucket.put(own(object_id))
    orphans = {bucket.put(own(i), 4) for i in range(100, 110)}
    plan(PlanConfig(store=bucket.uri, connect=(endpoint,), folder=tmp_path / "p"))
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


def test_a_line_is_there_before_the_deletion_and_tells_of_doubt_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    seen: list[list[str]] = []

    def die(keys: Iterable[str]) -> DeleteResult:
        seen.append(told(lines_of(tmp_path / "audit"), "BEGUN"))
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(bench.store, "delete_many", die)
    bench.run()
    keys = {key_for(i, NAMESPACE) for i in range(5)}
    assert [set(keys) for keys in seen] == [keys]
    unknown = [one for one in lines_of(tmp_path / "audit") if one["verdict"] == "UNKNOWN"]
    assert {one["target"]["key"] for one in unknown} == keys
    assert all("may have succeeded in part: no answer" in one["reason"] for one in unknown)


def test_a_key_that_a_throttled_request_had_deleted_ends_well(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.busy["delete", 2] = 1
    bench.run()
    lines = lines_of(tmp_path / "audit")
    assert {line["node"] for line in lines} == {7}
    assert sorted(told(lines, "OK")) == sorted(key_for(i, NAMESPACE) for i in range(5))
    assert told(lines, "BEGUN").count(key_for(2, NAMESPACE)) == 2


def test_a_task_that_is_repeated_goes_on_in_its_chain(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, rest = bench.candidates[:2], bench.candidates[2:]
    for candidates in (first, rest):
        bench.candidates = candidates
        bench.run()
    (path,) = (tmp_path / "audit").glob("*.jsonl")
    (chain,) = verify([split(path.name, path.read_bytes())])
    assert (chain.breaks, chain.lines) == ([], 10)
