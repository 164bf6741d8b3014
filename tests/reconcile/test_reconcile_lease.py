"""The lease: one run at a time has it, whatever the others do in between."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from streammeta.reconcile.cluster import lease
from streammeta.reconcile.vocabulary.errors import LeaseError
from streammeta.storage import json_files
from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_store.protocol.base import Body, DeleteResult, ObjectInfo, Tags
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import wait_until

OWN = "_streammeta_c1"
PREFIX = lease.lease_prefix(OWN)
ELSEWHERE = lease.Term(run="other", machine="elsewhere", process=1, expires_ms=lease.LEASE_MS)


class Clock:
    """Seconds since 1970, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Waits:
    """Counts the seconds waited for, and lets something happen at one of the waits."""

    def __init__(self, at: int = 0, happens: Callable[[], object] = lambda: None) -> None:
        self.seconds = 0.0
        self._left = at
        self._happens = happens

    def __call__(self, seconds: float) -> None:
        self.seconds += seconds
        self._left -= 1
        if self._left == 0:
            self._happens()


DAY_S = 86_400


def has_it(store: MemoryObjectStore, run: str) -> bool:
    """Whether a run may go on."""
    with suppress(LeaseError):
        lease.check_held(store, OWN, run)
        return True
    return False


def put_term(store: MemoryObjectStore, number: int, term: lease.Term) -> None:
    store.put(f"{PREFIX}{number:020}.json", json_files.encode(term))


def test_a_second_run_is_refused_until_the_first_has_ended() -> None:
    store = MemoryObjectStore()
    with lease.held_lease(store, OWN, "one"):
        with pytest.raises(LeaseError, match="one"):
            lease.Lease(store, OWN, "two").take()
        lease.check_held(store, OWN, "one")
    with lease.held_lease(store, OWN, "two"):
        assert not has_it(store, "one")
        lease.check_held(store, OWN, "two")
    assert len(store.objects()) == 1, "old terms are deleted"


def test_a_lease_that_is_not_renewed_can_be_taken_when_it_is_over() -> None:
    store, clock = MemoryObjectStore(), Clock()
    one, two = (lease.Lease(store, OWN, run, clock) for run in ("one", "two"))
    one.take()
    clock.now_s = lease.LEASE_MS / 1000 - 0.001
    with pytest.raises(LeaseError):
        two.take()
    one.renew()
    clock.now_s = lease.LEASE_MS / 1000 + 1
    with pytest.raises(LeaseError):
        two.take()
    clock.now_s = 2 * lease.LEASE_MS / 1000
    lease.Lease(store, OWN, "two", clock, Waits()).take()
    with pytest.raises(LeaseError, match="two"):
        one.renew()
    one.release()
    lease.check_held(store, OWN, "two")


def test_a_run_that_was_killed_on_this_machine_is_followed_at_once() -> None:
    store, clock = MemoryObjectStore(), Clock()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    lease.Lease(store, OWN, "other", clock).take()
    (killed,) = (json_files.decode(lease.Term, "", data) for data in store.objects().values())
    put_term(store, 2, replace(killed, process=child.pid))
    lease.Lease(store, OWN, "one", clock).take()
    lease.check_held(store, OWN, "one")


def test_a_process_of_another_machine_is_waited_for() -> None:
    store = MemoryObjectStore()
    put_term(store, 1, ELSEWHERE)
    with pytest.raises(LeaseError, match="61 s"):
        lease.Lease(store, OWN, "one", Clock()).take()


@pytest.mark.parametrize("ahead_s", [400 * DAY_S, -400 * DAY_S])
def test_a_lease_by_a_wrong_clock_is_taken_after_its_length(ahead_s: int) -> None:
    store, clock, waits = MemoryObjectStore(), Clock(), Waits()
    clock.now_s = 1_000 * DAY_S
    expires_ms = int(clock.now_s + ahead_s) * 1_000
    put_term(store, 1, replace(ELSEWHERE, expires_ms=expires_ms))
    lease.Lease(store, OWN, "one", clock, waits).take()
    assert has_it(store, "one")
    assert waits.seconds == pytest.approx(lease.LEASE_MS / 1_000)


@pytest.mark.parametrize("ahead_s", [400 * DAY_S, -400 * DAY_S])
@pytest.mark.parametrize("at", [1, 12])
def test_a_lease_by_a_wrong_clock_that_is_renewed_is_not_taken(ahead_s: int, at: int) -> None:
    store, clock, others = MemoryObjectStore(), Clock(), Clock()
    clock.now_s = 1_000 * DAY_S
    others.now_s = clock.now_s + ahead_s
    other = lease.Lease(store, OWN, "other", others)
    other.take()
    put_term(store, 1, replace(ELSEWHERE, run="other", expires_ms=int(others.now_s * 1_000)))
    with pytest.raises(LeaseError, match="other"):
        lease.Lease(store, OWN, "one", clock, Waits(at, other.renew)).take()
    assert has_it(store, "other")


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_watched_lease_is_taken_at_once_when_it_becomes_free(is_removed: bool) -> None:
    store = MemoryObjectStore()

    def free() -> None:
        if is_removed:
            store.delete_many(list(store.objects()))
        else:
            put_term(store, 7, replace(ELSEWHERE, expires_ms=0))

    put_term(store, 1, replace(ELSEWHERE, expires_ms=400 * DAY_S * 1_000))
    waits = Waits(2, free)
    lease.Lease(store, OWN, "one", Clock(), waits).take()
    assert has_it(store, "one")
    assert waits.seconds == pytest.approx(2 * lease.LEASE_MS / 1_000 / 12)


def test_a_term_of_another_version_is_refused_and_strange_names_are_passed_over() -> None:
    store = MemoryObjectStore()
    store.put(f"{PREFIX}latest.json", b"{}")
    lease.Lease(store, OWN, "one", Clock()).take()
    assert f"{PREFIX}latest.json" in store.objects()
    assert not lease.is_lease_key(f"{PREFIX}latest.json", OWN)
    store.put(f"{PREFIX}{9:020}.json", b'{"version": 2}')
    with pytest.raises(CorruptObjectError):
        lease.Lease(store, OWN, "two", Clock()).take()


class InterruptedStore(MemoryObjectStore):
    """Calls `interrupt` before the call of number `at`."""

    def __init__(self, at: int, interrupt: Callable[[], None]) -> None:
        super().__init__()
        self._left = at
        self._interrupt = interrupt

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        self._count()
        return super().list_objects(prefix, start_after)

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        self._count()
        super().put(key, data, if_absent=if_absent, tags=tags)

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._count()
        return super().get_range(key, start, end)

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        self._count()
        return super().delete_many(keys)

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._interrupt()


@pytest.mark.parametrize(
    ("at", "steps"), [*itertools.product(range(1, 9), [["take"] + ["renew"] * n for n in range(4)])]
)
def test_one_run_has_the_lease_whatever_comes_between_requests(at: int, steps: list[str]) -> None:
    def interrupt() -> None:
        with suppress(LeaseError):
            for step in steps:
                getattr(other, step)()

    store, clock = InterruptedStore(at, interrupt), Clock()
    other = lease.Lease(store, OWN, "other", clock)
    put_term(store, 5, replace(ELSEWHERE, expires_ms=0))
    store._left = at
    took = True
    try:
        lease.Lease(store, OWN, "one", clock).take()
    except LeaseError:
        took = False

    assert [has_it(store, "one"), has_it(store, "other")] == [took, not took]


def test_a_held_lease_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_MS", 30)
    store = MemoryObjectStore()

    def newest() -> int:
        return max(int(key[-25:-5]) for key in store.objects())

    with lease.held_lease(store, OWN, "one"):
        wait_until(lambda: newest() >= 4, "the lease is renewed")
    lease.check_held(store, OWN, "one")
