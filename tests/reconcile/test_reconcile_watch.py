"""Continuous rounds: plan and apply under all guards, told, bounded, and ended by a signal."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streammeta.reconcile.apply import ApplyConfig
from streammeta.reconcile.cluster.lease import held_lease
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.plans.plan_folder import read_plan_file
from streammeta.reconcile.vocabulary.errors import ConfigurationError
from streammeta.reconcile.watch import (
    LOCK_FILE,
    METRICS,
    STATUS_FILE,
    Round,
    RoundOutcome,
    WatchConfig,
    watch,
)
from streammeta.storage.object_store.opening import open_object_store
from tests.kit.hung_process import output_of
from tests.kit.waiting import wait_until
from tests.reconcile.fake_controller import (
    COMMITTED,
    OWN,
    FakeMap,
    LocalBucket,
    MapObject,
    Scene,
    own,
)
from tests.reconcile.inventories import Listed, write_inventory

PAGE = Path(__file__).parents[2] / "docs" / "reconciliation.md"
ORPHANS = range(100, 105)
LIVE = range(200, 230)


@pytest.fixture
def config(scene: Scene) -> WatchConfig:
    """Rounds on a bucket with orphans and live objects."""
    scene.fill(LIVE, ORPHANS)
    folder = scene.root / "rounds"
    engine = EngineName.LOCAL
    return WatchConfig(
        PlanConfig(scene.bucket.address, (scene.endpoint,), folder, patience_s=1, engine=engine),
        ApplyConfig(folder, delete=True, keys_per_s=100_000, patience_s=1, engine=engine),
        interval_s=1,
        rounds=1,
    )


def run(config: WatchConfig, tell: Callable[[Round], None] = lambda _: None) -> list[Round]:
    """Make the rounds; returns them all."""
    rounds: list[Round] = []

    def note(one: Round) -> None:
        rounds.append(one)
        tell(one)

    assert watch(config, threading.Event(), note) == rounds[-1]
    return rounds


def keys_of(bucket: LocalBucket) -> set[str]:
    """Object keys in the bucket."""
    return {info.key for info in bucket.store.list_objects() if not info.key.startswith(f"{OWN}/")}


LEFT = {own(object_id) for object_id in LIVE}


def test_a_round_leaves_no_orphan_to_the_next(config: WatchConfig, bucket: LocalBucket) -> None:
    first, second = run(replace(config, rounds=2))
    assert (first.outcome, second.outcome) == (RoundOutcome.SETTLED,) * 2
    assert {name: tally.keys for name, tally in first.outcomes.items()} == {"deleted": len(ORPHANS)}
    assert (first.verdicts["live"].keys, second.outcomes) == (len(LIVE), {})
    assert keys_of(bucket) == LEFT
    folder = config.plan.folder
    assert (folder / first.plan / plan_folder.REPORT_FILE).exists()
    status = json.loads((folder / STATUS_FILE).read_text())
    assert (status["plan"], status["last_success_ms"]) == (second.plan, second.ended_ms)


def test_without_yes_nothing_is_deleted(config: WatchConfig, bucket: LocalBucket) -> None:
    before = keys_of(bucket)
    (only,) = run(replace(config, apply=replace(config.apply, delete=False)))
    assert (only.outcome, set(only.outcomes)) == (RoundOutcome.SETTLED, {"would_delete"})
    assert keys_of(bucket) == before


def test_a_guard_keeps_a_round_from_deleting_and_the_next_goes_on(
    config: WatchConfig, bucket: LocalBucket, state: FakeMap
) -> None:
    before = keys_of(bucket)
    objects, state.objects = state.objects, {}

    def mend(_one: Round) -> None:
        if not state.objects:
            assert keys_of(bucket) == before
            state.objects = objects

    rounds = run(replace(config, rounds=2), mend)
    assert [round_.outcome for round_ in rounds] == [RoundOutcome.GUARD, RoundOutcome.SETTLED]
    assert "empty_map" in rounds[0].problem
    assert rounds[0].last_success_ms == 0 < rounds[1].last_success_ms
    assert keys_of(bucket) == LEFT


def test_a_failed_round_is_told_and_the_next_is_tried(config: WatchConfig, scene: Scene) -> None:
    scene.state.refuse = grpc.StatusCode.UNAVAILABLE

    def mend(_one: Round) -> None:
        scene.state.refuse = None

    rounds = run(replace(config, rounds=2), mend)
    assert [round_.outcome for round_ in rounds] == [RoundOutcome.FAILED, RoundOutcome.SETTLED]
    assert (rounds[0].plan, "no leader answered" in rounds[0].problem) == ("", True)
    assert keys_of(scene.bucket) == LEFT


def test_a_loss_is_told_and_orphans_are_deleted_all_the_same(
    config: WatchConfig, bucket: LocalBucket, state: FakeMap
) -> None:
    state.objects |= {i: MapObject(COMMITTED, size=10) for i in range(300, 500)}
    for object_id in range(301, 500):
        bucket.put(own(object_id), 10)
    (only,) = run(config)
    assert (only.outcome, only.lost) == (RoundOutcome.LOST, 1)
    assert only.last_success_ms == only.ended_ms
    assert not keys_of(bucket) & {own(object_id) for object_id in ORPHANS}


def test_a_round_beside_another_run_deletes_nothing(
    config: WatchConfig, bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = keys_of(bucket)
    with held_lease(bucket.store, OWN, "another"):
        (only,) = run(config)
    assert (only.outcome, "another" in only.problem) == (RoundOutcome.FAILED, True)
    assert keys_of(bucket) == before


def test_what_makes_no_sense_is_refused_at_once(config: WatchConfig) -> None:
    wrong = (
        replace(config, interval_s=0.5),
        replace(config, kept=0),
        replace(config, rounds=0),
        replace(config, plan=replace(config.plan, grace_ms=1)),
    )
    for words in wrong:
        with pytest.raises(ConfigurationError, match=r"--every|--keep|--rounds|--grace"):
            run(words)


def test_one_process_at_a_time_works_in_a_folder(config: WatchConfig) -> None:
    def try_another(_one: Round) -> None:
        with pytest.raises(ConfigurationError, match="another process"):
            run(config)

    assert len(run(config, try_another)) == 1


def test_history_is_bounded_and_other_files_stay(config: WatchConfig, bucket: LocalBucket) -> None:
    folder = config.plan.folder
    strangers = [
        "notes.txt",
        "20200101T000000Z-round-000g/plan.json",
        "20200101T000000Z-round-0000/x",
    ]
    for name in strangers:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not ours")
    draft = folder / ".20200101T000000Z-round-0000.draft-01234567"
    draft.mkdir()
    rounds = run(replace(config, rounds=4, kept=2))
    first, second, *last = [folder / round_.plan for round_ in rounds]
    assert not second.exists()
    assert not draft.exists()
    kept = {path.name for path in first.iterdir()}
    assert {"plan.json", "report.html", "candidates", "runs"} <= kept
    assert not kept & {"verdicts", "map", "uploads"}
    assert all((folder / "verdicts").is_dir() for folder in last)
    assert all((folder / name).read_text() == "not ours" for name in strangers)
    assert len([*(first / "runs").glob("*/undo/*.jsonl")]) == 1


def test_a_signal_ends_the_round(config: WatchConfig, bucket: LocalBucket, state: FakeMap) -> None:
    more = range(5000, 7500)
    state.next_object_id, state.issued_below = 10_000, 20_000
    for object_id in more:
        bucket.put(own(object_id), 1)
    ending = threading.Event()
    told: list[Round] = []
    real = state.checks

    class Noticing(list[list[int]]):
        def append(self, ids: list[int]) -> None:
            if len(ids) > 1:  # the first batch is being checked
                ending.set()
            real.append(ids)

    state.checks = Noticing()
    plan = replace(config.plan, max_share=1)
    last = watch(replace(config, plan=plan, rounds=None), ending, told.append)
    assert told == [last]
    assert last.outcome is RoundOutcome.ENDED
    deleted = last.outcomes["deleted"].keys
    assert 0 < deleted < len(more) + len(ORPHANS)
    assert len(keys_of(bucket)) == len(LIVE) + len(more) + len(ORPHANS) - deleted
    (again,) = run(replace(config, plan=plan))
    assert again.outcome is RoundOutcome.SETTLED
    assert keys_of(bucket) == LEFT


@pytest.mark.process
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_ends_by_sigterm_and_goes_on_after_a_kill(
    bucket: LocalBucket, state: FakeMap, config: WatchConfig, tmp_path: Path, ended_by: int
) -> None:
    metrics = tmp_path / "reconcile.prom"
    words = [
        *(sys.executable, "-m", "streammeta.cli.main", "reconcile", "watch", "--yes"),
        *("--store", bucket.uri, "--connect", config.plan.connect[0]),
        *("--folder", str(config.plan.folder), "--every", "1h", "--engine", "local"),
        *("--metrics-file", str(metrics), "--format", "json"),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        wait_until(metrics.exists, "the first round")
        process.send_signal(ended_by)
        said, _ = output_of(process)
    assert keys_of(bucket) == LEFT
    families = {kind.name: kind for kind in text_string_to_metric_families(metrics.read_text())}
    assert set(families) == set(METRICS)
    now_s = time.time()
    for name in ("last_round", "last_success"):
        (sample,) = families[f"streammeta_reconcile_{name}_timestamp_seconds"].samples
        assert now_s - 120 < sample.value <= now_s
        assert sample.labels == {"store": bucket.uri}
    deleted = [
        sample.value
        for sample in families["streammeta_reconcile_candidates"].samples
        if sample.labels["outcome"] == "deleted"
    ]
    assert deleted == [len(ORPHANS)]
    if ended_by == signal.SIGTERM:
        assert process.returncode == 0
        assert json.loads(said)["outcome"] == "settled"
    assert (config.plan.folder / LOCK_FILE).exists()
    (again,) = run(config)
    assert again.outcome is RoundOutcome.SETTLED


def test_each_round_reads_the_newest_inventory(scene: Scene, config: WatchConfig) -> None:
    def listed() -> list[Listed]:
        return [Listed(object_.key, object_.size) for object_ in scene.bucket.store.list_objects()]

    first = write_inventory(scene.root / "lists", listed()).parent
    with_inventory = replace(config.plan, inventory=f"{first.parent}/")
    told: list[str] = []

    def tell(one: Round) -> None:
        told.append(read_plan_file(config.plan.folder / one.plan).inventory)
        shutil.copytree(first, first.with_name("2026-05-02T01-00Z"), dirs_exist_ok=True)

    rounds = replace(config, plan=with_inventory, rounds=2, interval_s=1)
    watch(rounds, threading.Event(), tell)
    assert [Path(path).parent.name for path in told] == [first.name, "2026-05-02T01-00Z"]


def test_one_inventory_for_all_rounds_is_refused(config: WatchConfig) -> None:
    with_inventory = replace(config.plan, inventory="s3://lists/2026-05-01T01-00Z/manifest.json?a")
    with pytest.raises(ConfigurationError, match="prefix"):
        watch(replace(config, plan=with_inventory), threading.Event(), lambda _: None)


def test_the_page_names_every_metric_and_every_outcome() -> None:
    page = PAGE.read_text()
    for name, meaning in METRICS.items():
        assert re.search(rf"^\| `{name}` \| store[a-z, ]* \| {re.escape(meaning)} \|$", page, re.M)
    rounds = page.partition("\n## Continuous rounds\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z]+)` \|", rounds, re.M) == [
        str(outcome)
        for outcome in (
            RoundOutcome.SETTLED,
            RoundOutcome.LOST,
            RoundOutcome.GUARD,
            RoundOutcome.INCOMPLETE,
            RoundOutcome.FAILED,
            RoundOutcome.ENDED,
        )
    ]


def test_the_exit_code_tells_of_the_last_round(scene: Scene, config: WatchConfig) -> None:
    def command() -> tuple[int, str]:
        words = [
            *(sys.executable, "-m", "streammeta.cli.main", "reconcile", "watch"),
            *("--store", scene.bucket.uri, "--connect", config.plan.connect[0], "--rounds", "1"),
            *("--folder", str(config.plan.folder), "--engine", "local", "--format", "json"),
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
        return done.returncode, json.loads(done.stdout)["outcome"]

    assert command() == (0, "settled")
    open_object_store(scene.bucket.uri).delete_many([own(LIVE[0])])
    code, outcome = command()
    assert (code, outcome) == (3, "guard"), "1 of 30 is more than 1 %"
    scene.state.objects = {}
    assert command() == (1, "guard")
