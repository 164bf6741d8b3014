"""Deletion: only what the leader gives free and the bucket still holds, recorded before it goes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from storage.errors import StoreUnavailableError
from storage.object_format.object_key import key_for
from storage.object_store.base import DeleteResult
from storage.object_store.memory import MemoryObjectStore
from storage.reconcile.deletion import Candidate, Deleter, DeletionOrder, Judged, Outcome, Pacer
from storage.reconcile.errors import ControllerError
from storage.reconcile.leader import LeaderClient, Standing
from tests.reconcile.fake_controller import COMMITTED, FakeMap, MapObject

NAMESPACE = "_streammeta_c1"


class FakeLeader(LeaderClient):
    """Answers from a `FakeMap`; fails from the `fail_at`-th question on."""

    def __init__(self, state: FakeMap, fail_at: int | None = None) -> None:
        super().__init__(["unused:1"], 1)
        self.state = state
        self.asked = 0
        self._fail_at = fail_at

    def check_objects(self, object_ids):  # type: ignore[no-untyped-def]
        """Answer, or fail."""
        self.asked += 1
        if self._fail_at is not None and self.asked >= self._fail_at:
            raise ControllerError("told to fail")
        states = tuple(self.state.state_of(i) for i in object_ids)
        return Standing(states, self.state.next_object_id, self.state.cluster_id)


class Bench:
    """A store with objects 0..count-1, all of them candidates, and a map that knows none."""

    def __init__(self, tmp_path: Path, count: int = 5) -> None:
        self.store = MemoryObjectStore(now_ms=lambda: 5000)
        self.state = FakeMap()
        self.undo = tmp_path / "undo"
        for object_id in range(count):
            self.store.put(key_for(object_id, NAMESPACE), b"x" * object_id)
        self.candidates = [
            Candidate(info.key, int(info.key.split("/")[2]), info.size, 5000, info.etag)
            for info in self.store.list_objects()
        ]
        self.order = DeletionOrder(
            store="unused",
            connect=("unused:1",),
            patience_s=1,
            cluster_id="c1",
            namespace=NAMESPACE,
            undo_folder=str(self.undo),
            keys_per_s=1_000_000,
            delete=True,
        )

    def run(self, fail_at: int | None = None) -> dict[int, Outcome]:
        """Work through all candidates; outcomes by object id."""
        judged = self.judged(fail_at)
        assert len(judged) == len(self.candidates)
        return {one.candidate.object_id: one.outcome for one in judged}

    def judged(self, fail_at: int | None = None) -> list[Judged]:
        """Work through all candidates."""
        work = Deleter(self.order, "t", self.store, FakeLeader(self.state, fail_at))
        return [one for batch in work.run(self.candidates) for one in batch]

    def stored(self) -> set[int]:
        """The ids of the objects still in the store."""
        return {int(key.split("/")[2]) for key in self.store.objects()}

    def undo_records(self) -> list[dict[str, object]]:
        """All undo records, in file order."""
        files = sorted(self.undo.glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_all_that_the_map_forgot_is_deleted(bench: Bench) -> None:
    assert bench.run() == dict.fromkeys(range(5), Outcome.DELETED)
    assert bench.stored() == set()


def test_a_second_run_finds_everything_gone(bench: Bench) -> None:
    bench.run()
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


def test_the_leader_of_another_cluster_frees_nothing(bench: Bench) -> None:
    bench.state.cluster_id = "c2"
    judged = bench.judged()
    assert {one.outcome for one in judged} == {Outcome.FAILED}
    assert "the controllers are cluster 'c2'" in judged[0].detail
    assert bench.stored() == set(range(5))


def test_losing_the_leader_stops_the_task(bench: Bench) -> None:
    bench.order = replace(bench.order, keys_per_s=2.5, delete=False)
    outcomes = list(bench.run(fail_at=2).values())
    assert outcomes == [Outcome.WOULD_DELETE] * 2 + [Outcome.FAILED] * 2 + [Outcome.SKIPPED]


@pytest.mark.parametrize("operation", ["head", "delete_many"])
def test_an_unreachable_store_stops_the_task(bench: Bench, operation: str) -> None:
    bench.store.fail_next(operation, StoreUnavailableError("told to fail"))
    assert set(bench.run().values()) == {Outcome.FAILED}
    assert bench.stored() == set(range(5))


def test_no_undo_record_no_deletion(bench: Bench) -> None:
    bench.undo.write_text("a file where the folder should be")
    assert set(bench.run().values()) == {Outcome.FAILED}
    assert bench.stored() == set(range(5))


def test_the_undo_records_are_there_before_the_first_deletion(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_key_that_the_store_keeps_is_a_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = key_for(1, NAMESPACE)
    monkeypatch.setattr(
        bench.store, "delete_many", lambda keys: DeleteResult(tuple(keys), {kept: "locked"})
    )
    failed = [one for one in bench.judged() if one.outcome is Outcome.FAILED]
    assert [(one.candidate.key, one.detail) for one in failed] == [
        (kept, "the store kept it: locked")
    ]


def test_the_pacer_keeps_the_budget() -> None:
    now = [100.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pacer = Pacer(50, clock=lambda: now[0], sleep=sleep)
    assert pacer.batch_size == 50
    for _ in range(4):
        pacer.wait_for(50)
    assert slept == [1.0, 1.0, 1.0]
    now[0] += 10  # a pause saves up nothing
    pacer.wait_for(50)
    pacer.wait_for(50)
    assert slept == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("rate", "size"), [(0.5, 1), (1, 1), (99.9, 99), (100_000, 1000)])
def test_a_batch_is_at_most_a_second_s_worth(rate: float, size: int) -> None:
    assert Pacer(rate).batch_size == size
