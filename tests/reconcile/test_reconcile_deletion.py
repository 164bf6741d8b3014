"""Deletion: only what the leader gives free and the bucket still holds, recorded before it goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.cluster.lease import Lease, is_lease_key
from streammeta.reconcile.deletion import tasks
from streammeta.reconcile.deletion.audit_trail import AuditTrail
from streammeta.reconcile.deletion.order import Candidate, DeletionOrder, Judged, Outcome
from streammeta.reconcile.deletion.tasks import Deleter
from streammeta.reconcile.vocabulary.attempts import Attempt
from streammeta.reconcile.vocabulary.errors import ControllerError
from streammeta.storage import errors
from streammeta.storage.cluster_files.bucket_marker import marker_key
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.storage.object_store.protocol.base import DeleteResult, ObjectInfo
from tests.kit.memory_store import MemoryObjectStore
from tests.reconcile.fake_controller import COMMITTED, FakeMap, MapObject

NAMESPACE = "_streammeta_c1"


class FakeLeader(LeaderClient):
    """Answers from a `FakeMap`; fails from the `fail_at`-th question on."""

    def __init__(self, state: FakeMap, fail_at: int | None = None) -> None:
        super().__init__(["unused:1"], 1)
        self.state = state
        self.asked = 0
        self.announced: list[list[int]] = []
        self.asked_streams: list[list[int]] = []
        self.on_announced: Callable[[], None] = lambda: None
        self._fail_at = fail_at

    def check_objects(self, object_ids, *, deleting=False):  # type: ignore[no-untyped-def]
        """Answer, or fail."""
        self.asked += 1
        if deleting:
            self.announced.append(list(object_ids))
            self.on_announced()
        if self._fail_at is not None and self.asked >= self._fail_at:
            raise ControllerError("told to fail")
        return self.state.answer(object_ids)

    def stream_ends(self, stream_ids):  # type: ignore[no-untyped-def]
        """Answer, or fail."""
        self.asked += 1
        self.asked_streams.append(list(stream_ids))
        if self._fail_at is not None and self.asked >= self._fail_at:
            raise ControllerError("told to fail")
        return self.state.ends_of(stream_ids)


class BusyStore(MemoryObjectStore):
    """Answers SlowDown to HEAD or deletion of objects: so many times each at `busy`."""

    def __init__(self) -> None:
        super().__init__(now_ms=lambda: 5000)
        self.busy: dict[tuple[str, int], int] = {}
        self.refuse_lookups: errors.StorageError | None = None
        self.lookups = 0

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        if start_after is not None:  # not the listing of the marker's claims
            self.lookups += 1
            if self.refuse_lookups is not None:
                raise self.refuse_lookups
        return super().list_objects(prefix, start_after)

    def head(self, key: str) -> ObjectInfo:
        if self._is_busy("head", key):
            raise errors.StoreUnavailableError("SlowDown", throttled=True)
        return super().head(key)

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        wanted = list(keys)
        slow = {key: "SlowDown: " for key in wanted if self._is_busy("delete", key)}
        done = super().delete_many(key for key in wanted if key not in slow)
        return DeleteResult(done.deleted, slow, frozenset(slow))

    def _is_busy(self, call: str, key: str) -> bool:
        found = [at for at in self.busy if at[0] == call and key == key_for(at[1], NAMESPACE)]
        for at in found:
            self.busy[at] -= 1
        return any(self.busy[at] >= 0 for at in found)


class Bench:
    """A store with objects 0..count-1, all of them candidates, and a map that knows none."""

    def __init__(self, tmp_path: Path, count: int = 5) -> None:
        self.store = BusyStore()
        self.state = FakeMap()
        self.undo = tmp_path / "undo"
        self.attempt = Attempt(7, 3)
        self.paced: list[int] = []
        self.pauses: list[float] = []
        self.on_pause: Callable[[float], None] = self.pauses.append
        self.on_announced: Callable[[], None] = lambda: None
        self.on_paced: Callable[[int], None] = self.paced.append
        self.leader = FakeLeader(self.state)
        for object_id in range(count):
            self.store.put(key_for(object_id, NAMESPACE), b"x" * object_id)
        self.candidates = [
            Candidate(info.key, int(info.key.split("/")[2]), info.size, 5000, info.etag)
            for info in self.store.list_objects()
        ]
        self.state.mark(self.store)
        self.order = DeletionOrder(
            store=StoreAddress.parse("file:///unused"),
            connect=("unused:1",),
            patience_s=1,
            identity=self.state.identity,
            next_object_id=1000,
            next_stream_id=100,
            undo_folder=str(self.undo),
            audit_folder=str(tmp_path / "audit"),
            signals_folder=str(tmp_path / "signals"),
            keys_per_s=1_000_000,
            delete=True,
            run="r1",
        )
        self.lease = Lease(self.store, NAMESPACE, "r1")
        self.lease.take()

    def run(self, fail_at: int | None = None) -> dict[int, Outcome]:
        """Work through all candidates; outcomes by object id."""
        judged = self.judged(fail_at)
        assert len(judged) == len(self.candidates)
        return {judgement.candidate.object_id: judgement.outcome for judgement in judged}

    def judged(self, fail_at: int | None = None) -> list[Judged]:
        """Work through all candidates."""
        self.leader = FakeLeader(self.state, fail_at)
        self.leader.on_announced = self.on_announced
        work = Deleter(self.order, self.attempt, self.store, self.leader, sleep=self.on_pause)
        work._pacer.wait_for = self.on_paced  # type: ignore[assignment, method-assign]
        return [judgement for batch in work.run(self.candidates) for judgement in batch]

    def stored(self) -> set[int]:
        """The ids of the objects still in the store."""
        keys = self.store.objects().keys() - {marker_key(NAMESPACE)}
        return {int(key.split("/")[2]) for key in keys if not is_lease_key(key, NAMESPACE)}

    def undo_records(self) -> list[dict[str, object]]:
        """All undo records, in file order."""
        files = sorted(self.undo.glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let candidates lie so far apart that each is looked up by a HEAD request."""
    monkeypatch.setattr(tasks, "find_by_listing", lambda *_: ({}, 0))


@pytest.fixture(params=["listing", "heads"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    """Both ways to look candidates up; what uses it holds for each."""
    if request.param == "heads":
        request.getfixturevalue("heads")
    return Bench(tmp_path)


@pytest.fixture
def bench_of_heads(heads: None, tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_all_that_the_map_forgot_is_deleted_and_gone_in_a_second_run(bench: Bench) -> None:
    bench.order = replace(bench.order, keys_per_s=2)
    assert bench.run() == dict.fromkeys(range(5), Outcome.DELETED)
    assert bench.stored() == set()
    assert bench.paced == [2, 2, 1]
    records = bench.undo_records()
    assert bench.run() == dict.fromkeys(range(5), Outcome.GONE)
    assert bench.undo_records() == records


@pytest.mark.parametrize("state", [0, 1, 2, 3, 5, 77])
def test_an_id_in_any_other_state_is_kept(bench: Bench, state: int) -> None:
    bench.state.objects[3] = MapObject(state)
    assert bench.run()[3] is Outcome.KEPT
    assert bench.stored() == {3}


def test_an_object_replaced_since_the_plan_is_kept(bench: Bench) -> None:
    bench.store.put(key_for(2, NAMESPACE), b"yy")
    bench.candidates[-1] = replace(bench.candidates[-1], modified_ms=6000)
    changed = bench.candidates[-1].object_id
    assert bench.run() == dict.fromkeys(range(5), Outcome.DELETED) | {
        2: Outcome.CHANGED,
        changed: Outcome.CHANGED,
    }
    assert bench.stored() == {2, changed}


def test_a_key_that_is_not_the_id_s_own_is_refused(bench: Bench) -> None:
    live = key_for(900, NAMESPACE)
    bench.store.put(live, b"")
    bench.state.objects[900] = MapObject(COMMITTED)
    bench.candidates[0] = replace(bench.candidates[0], key=live)
    assert Outcome.REFUSED in bench.run().values()
    assert live in bench.store.objects()


def test_a_dry_run_asks_the_same_and_deletes_nothing(bench: Bench) -> None:
    bench.order = replace(bench.order, delete=False)
    bench.state.objects[3] = MapObject(COMMITTED)
    expected = dict.fromkeys(range(5), Outcome.WOULD_DELETE) | {3: Outcome.KEPT}
    assert bench.run() == expected
    assert bench.stored() == set(range(5))
    assert not bench.undo.exists()


def test_without_a_leader_nothing_is_deleted(bench: Bench) -> None:
    assert bench.run(fail_at=1) == dict.fromkeys(range(5), Outcome.FAILED)
    assert bench.stored() == set(range(5))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cluster_id": "c2"}, "controllers belong to cluster 'c2'"),
        ({"cluster_uuid": "uuid-2"}, "UUID uuid-2"),
        ({"next_object_id": 999}, "restored to an earlier state"),
    ],
)
def test_another_map_frees_no_key(bench: Bench, change: dict[str, Any], complaint: str) -> None:
    bench.state = replace(bench.state, **change)
    judged = bench.judged()
    assert {judgement.outcome for judgement in judged} == {Outcome.FAILED}
    assert complaint in judged[0].detail
    assert bench.stored() == set(range(5))


def test_a_bucket_without_the_marker_of_the_cluster_keeps_everything(bench: Bench) -> None:
    bench.order = replace(bench.order, keys_per_s=2)
    bench.store.delete_many([marker_key(NAMESPACE)])
    assert "no marker" in bench.judged()[0].detail
    replace(bench.state, cluster_uuid="uuid-2").mark(bench.store)
    outcomes = list(bench.run().values())
    assert outcomes == [Outcome.FAILED] * 2 + [Outcome.SKIPPED] * 3
    assert bench.stored() == set(range(5))


def test_losing_the_lease_stops_the_task(bench: Bench) -> None:
    bench.order = replace(bench.order, keys_per_s=2)

    def lose(_keys: int) -> None:
        if len(bench.stored()) == 3:
            bench.lease.release()
            Lease(bench.store, NAMESPACE, "r2").take()

    bench.on_paced = lose
    outcomes = [judgement.outcome for judgement in bench.judged()]

    assert outcomes == [Outcome.DELETED] * 2 + [Outcome.FAILED] * 2 + [Outcome.SKIPPED]
    assert bench.stored() == {2, 3, 4}
    assert len(bench.undo_records()) == 2


def test_losing_the_leader_stops_the_task(bench: Bench) -> None:
    bench.order = replace(bench.order, keys_per_s=2.5, delete=False)
    outcomes = list(bench.run(fail_at=2).values())
    assert outcomes == [Outcome.WOULD_DELETE] * 2 + [Outcome.FAILED] * 2 + [Outcome.SKIPPED]


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("delete_many", errors.AccessDeniedError("told to refuse")),
        ("delete_many", errors.StoreUnavailableError("told to fail")),
        ("get_range", errors.StoreUnavailableError("no marker to be had")),
        ("list_objects", errors.AccessDeniedError("no claims to be had")),
    ],
)
def test_an_unusable_store_ends_task(
    bench: Bench, operation: str, error: errors.StorageError
) -> None:
    bench.store.fail_next(operation, error)
    check_that_the_task_stops(bench)


def test_a_head_that_is_refused_stops_the_task(bench_of_heads: Bench) -> None:
    bench_of_heads.store.fail_next("head", errors.AccessDeniedError("told to refuse"))
    check_that_the_task_stops(bench_of_heads)


def test_a_lookup_that_is_refused_stops_the_task(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.refuse_lookups = errors.AccessDeniedError("told to refuse")
    check_that_the_task_stops(bench)


def check_that_the_task_stops(bench: Bench) -> None:
    bench.order = replace(bench.order, keys_per_s=2)
    assert list(bench.run().values()) == [Outcome.FAILED] * 2 + [Outcome.SKIPPED] * 3
    assert bench.stored() == set(range(5))
    assert bench.pauses == []


@pytest.mark.parametrize("call", ["head", "delete"])
def test_a_key_that_the_store_is_too_busy_for_comes_again(bench_of_heads: Bench, call: str) -> None:
    bench = bench_of_heads
    bench.store.busy = {(call, 1): 1, (call, 3): 3}
    bench.order = replace(bench.order, keys_per_s=2)
    assert bench.run() == dict.fromkeys(range(5), Outcome.DELETED)
    assert bench.stored() == set()
    assert sorted(bench.pauses) == sorted([0.5] * 2 + [1.0, 2.0])


@pytest.mark.parametrize("call", ["head", "delete"])
def test_a_key_that_stays_throttled_fails_alone(bench_of_heads: Bench, call: str) -> None:
    bench = bench_of_heads
    bench.store.busy = {(call, 3): 1000}
    bench.order = replace(bench.order, keys_per_s=1)
    expected = dict.fromkeys(range(5), Outcome.DELETED) | {3: Outcome.FAILED}
    judged = bench.judged()
    assert {judgement.candidate.object_id: judgement.outcome for judgement in judged} == expected
    assert [judgement.detail for judgement in judged if "SlowDown" in judgement.detail] != []
    assert bench.stored() == {3}
    assert bench.pauses == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_a_listing_that_the_store_is_too_busy_for_comes_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.refuse_lookups = errors.StoreUnavailableError("SlowDown", throttled=True)

    def relent(pause_s: float) -> None:
        bench.pauses.append(pause_s)
        if pause_s == 2.0:
            bench.store.refuse_lookups = None

    bench.on_pause = relent
    assert bench.run() == dict.fromkeys(range(5), Outcome.DELETED)
    assert bench.pauses == [0.5, 1.0, 2.0]
    assert bench.store.lookups == 4
    assert len(bench.leader.announced) == 1, "nothing is announced before it was looked up"


def test_a_repeated_key_is_checked_anew(bench: Bench) -> None:
    bench.store.busy = {("delete", 3): 1}

    def commit(_pause: float) -> None:
        bench.state.objects[3] = MapObject(COMMITTED)

    bench.on_pause = commit
    assert bench.run() == dict.fromkeys(range(5), Outcome.DELETED) | {3: Outcome.KEPT}
    assert bench.stored() == {3}


def test_a_throttled_deletion_may_have_worked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.store.delete_many

    def delete_but_complain(keys: Iterable[str]) -> DeleteResult:
        real(keys)
        raise errors.StoreUnavailableError("SlowDown", throttled=True)

    monkeypatch.setattr(bench.store, "delete_many", delete_but_complain)
    assert bench.run() == dict.fromkeys(range(5), Outcome.DELETED)
    assert bench.stored() == set()


@pytest.mark.parametrize("way", ["listing", "heads"])
def test_a_busy_store_ends_a_task(request: pytest.FixtureRequest, tmp_path: Path, way: str) -> None:
    bench = Bench(tmp_path, count=60)
    bench.order = replace(bench.order, keys_per_s=10)
    slow_down = errors.StoreUnavailableError("SlowDown", throttled=True)
    if way == "heads":
        request.getfixturevalue("heads")
        bench.store.fail_next("head", slow_down, times=10_000)
    else:
        bench.store.refuse_lookups = slow_down
    outcomes = list(bench.run().values())
    assert outcomes == [Outcome.FAILED] * 20 + [Outcome.SKIPPED] * 40
    assert len(bench.stored()) == 60


def test_the_leader_has_on_record_what_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path, count=250)
    bench.state.objects[3] = MapObject(COMMITTED)
    bench.run()
    announced = bench.leader.announced
    assert [len(ids) for ids in announced] == [100, 100, 49]
    assert {object_id for ids in announced for object_id in ids} == set(range(250)) - {3}
    bench.order = replace(bench.order, delete=False)
    bench.run()
    assert bench.leader.announced == [], "a dry run"


def test_what_the_leader_can_not_put_on_record_is_not_deleted(bench: Bench) -> None:
    assert set(bench.run(fail_at=2).values()) == {Outcome.FAILED}
    assert bench.stored() == set(range(5))


def test_an_object_that_the_map_has_again_at_the_last_moment_is_kept(bench: Bench) -> None:
    bench.on_announced = lambda: bench.state.objects.update({3: MapObject(COMMITTED)})
    assert bench.run() == dict.fromkeys(range(5), Outcome.DELETED) | {3: Outcome.KEPT}
    assert bench.stored() == {3}


def test_no_undo_record_no_deletion(bench: Bench) -> None:
    bench.undo.write_text("a file where the folder should be")
    assert set(bench.run().values()) == {Outcome.FAILED}
    assert bench.stored() == set(range(5))


def test_undo_records_precede_all_deletions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[dict[str, object]]] = []
    real = bench.store.delete_many

    def spy(keys: list[str]) -> DeleteResult:
        seen.append(bench.undo_records())
        return real(keys)

    monkeypatch.setattr(bench.store, "delete_many", spy)
    bench.run()
    (records,) = seen
    assert {record["key"] for record in records} == {key_for(i, NAMESPACE) for i in range(5)}
    one = next(record for record in records if record["object_id"] == 3)
    assert (one["size"], one["modified_ms"]) == (3, 5000)
    assert isinstance(one["checked_ms"], int)


def test_an_undeletable_key_fails_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, real = key_for(1, NAMESPACE), bench.store.delete_many

    def all_but_one(keys: Iterable[str]) -> DeleteResult:
        wanted = set(keys)
        refused = dict.fromkeys(wanted & {kept}, "locked")
        return DeleteResult(real(wanted - {kept}).deleted, refused)

    monkeypatch.setattr(bench.store, "delete_many", all_but_one)
    bench.order = replace(bench.order, keys_per_s=1)
    judged = {judgement.candidate.object_id: judgement for judgement in bench.judged()}
    assert judged.pop(1).detail == "the store kept it: locked"
    assert {judgement.outcome for judgement in judged.values()} == {Outcome.DELETED}
    assert bench.stored() == {1}
    assert bench.pauses == []


def test_an_unrecorded_outcome_ends_a_task(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    bench.order = replace(bench.order, keys_per_s=2)
    monkeypatch.setattr(AuditTrail, "end", fail)
    outcomes = list(bench.run().values())
    assert outcomes == [Outcome.DELETED] * 2 + [Outcome.SKIPPED] * 3
    assert len(bench.stored()) == 3


def keeping(
    bench: Bench, kept: set[int], monkeypatch: pytest.MonkeyPatch, *, denied: bool = False
) -> None:
    """Let the store refuse to delete some objects, for a right if `denied`."""
    refused, real = {key_for(at, NAMESPACE) for at in kept}, bench.store.delete_many

    def delete_others(keys: Iterable[str]) -> DeleteResult:
        wanted = set(keys)
        done = real(wanted - refused).deleted
        kept = dict.fromkeys(wanted & refused, "locked")
        return DeleteResult(done, kept, denied=frozenset(kept if denied else ()))

    monkeypatch.setattr(bench.store, "delete_many", delete_others)


def test_many_kept_keys_hold_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, count=75)
    bench.candidates.sort(key=lambda candidate: candidate.object_id)
    bench.order = replace(bench.order, keys_per_s=3)
    kept = set(range(0, 75, 3))  # one of each batch
    keeping(bench, kept, monkeypatch, denied=True)
    outcomes = bench.run()
    assert {at for at, outcome in outcomes.items() if outcome is Outcome.FAILED} == kept
    assert Outcome.SKIPPED not in outcomes.values()
    assert bench.stored() == kept


@pytest.mark.parametrize(("in_a_row", "skipped"), [(19, 0), (20, 10)])
def test_a_task_ends_when_nothing_can_be_deleted_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_row: int, skipped: int
) -> None:
    bench = Bench(tmp_path, count=in_a_row + 10)
    bench.candidates.sort(key=lambda candidate: candidate.object_id)
    bench.order = replace(bench.order, keys_per_s=1)
    keeping(bench, set(range(in_a_row)), monkeypatch, denied=True)
    outcomes = list(bench.run().values())
    assert outcomes.count(Outcome.SKIPPED) == skipped
    assert outcomes.count(Outcome.FAILED) == in_a_row


@pytest.mark.parametrize("way", ["delete", "copy", "tag"])
def test_a_failure_ends_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Each is counted and named, however many follow each other."""
    bench = Bench(tmp_path, count=50)
    bench.candidates.sort(key=lambda candidate: candidate.object_id)
    bench.order = replace(bench.order, keys_per_s=2, quarantine=way == "copy", tag=way == "tag")
    if way == "delete":
        keeping(bench, set(range(40)), monkeypatch)
    else:
        method = "copy" if way == "copy" else "add_tags"
        refusal = errors.StoreRejectedError("this object can't be copied")
        bench.store.fail_next(method, refusal, times=40)
    outcomes = bench.run()
    assert list(outcomes.values()).count(Outcome.FAILED) == 40
    assert list(outcomes.values()).count(bench.order.done) == 10
    failed = {key_for(at, NAMESPACE) for at, found in outcomes.items() if found is Outcome.FAILED}
    assert failed <= bench.store.objects().keys()


def test_an_object_replaced_early_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, count=3)
    bench.order = replace(bench.order, quarantine=True)
    key, copy = bench.candidates[1].key, bench.store.copy

    def replace_first(source_key: str, target_key: str, source: ObjectInfo | None = None) -> None:
        if source_key == key:
            bench.store.put(key, b"of somebody else")
        copy(source_key, target_key, source)

    monkeypatch.setattr(bench.store, "copy", replace_first)
    outcomes = bench.run()
    assert sorted(outcomes.values()) == [Outcome.CHANGED, *[Outcome.QUARANTINED] * 2]
    assert bench.store.get_range(key) == b"of somebody else"
