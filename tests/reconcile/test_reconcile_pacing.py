"""Requests of a deletion: their pace in a run, and lookups by listing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.reconcile.deletion.order import Outcome
from streammeta.reconcile.deletion.run_signals import Pacer, RunSignals, relayed
from streammeta.reconcile.deletion.tasks import find_by_listing
from streammeta.reconcile.vocabulary.attempts import Attempt
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import wait_until
from tests.reconcile.test_reconcile_deletion import Bench


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


def test_a_store_that_asks_for_fewer_requests_gets_half_as_many_and_slowly_more_again() -> None:
    pacer = Pacer(800)
    for expected in (400, 200):
        pacer.slow_down()
        assert pacer.batch_size == expected
    pacer.speed_up()
    assert pacer.batch_size == 250
    for _ in range(20):
        pacer.speed_up()
    assert pacer.batch_size == 800
    for _ in range(20):
        pacer.slow_down()
    assert pacer.batch_size == 1


def test_throttled_keys_slow_the_task_down(tmp_path: Path) -> None:
    bench = Bench(tmp_path, count=40)
    bench.order = replace(bench.order, keys_per_s=16)
    bench.store.busy = {("delete", 0): 1}
    bench.run()
    assert bench.paced[:4] == [16, 1, 9, 10], "one again, then half of 16, and 1 more each time"


def test_a_store_that_is_too_busy_for_one_task_slows_every_other_down_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, count=40)
    bench.order = replace(bench.order, keys_per_s=16)
    bench.store.busy = {("delete", 0): 2}
    first, bench.candidates = bench.candidates[:20], bench.candidates[20:]
    rest, bench.candidates = bench.candidates, first
    bench.run()
    assert len(bench.pauses) == 2
    bench.attempt, bench.candidates = Attempt(8, 4), rest
    bench.paced.clear()
    bench.run()
    assert bench.paced == [8, 9, 3], "half of 16, and 1 more each time"


def test_a_run_that_is_to_end_begins_no_further_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path, count=40)
    bench.order = replace(bench.order, keys_per_s=16)
    folder = Path(bench.order.signals_folder)
    wanted = False

    def end(_keys: int) -> None:
        nonlocal wanted
        wanted = True
        wait_until(RunSignals(folder, "8-t").is_ending, "the sign")

    bench.on_paced = end
    with relayed(lambda: wanted, folder):
        judged = bench.judged()
    assert [judgement.outcome for judgement in judged] == [Outcome.DELETED] * 16
    assert len(bench.stored()) == 24


@pytest.mark.parametrize(("rate", "size"), [(0.5, 1), (1, 1), (99.9, 99), (100_000, 1000)])
def test_a_batch_is_at_most_a_second_s_worth(rate: float, size: int) -> None:
    assert Pacer(rate).batch_size == size


keys = st.text("ab/0é\U0001f600", min_size=1, max_size=4)


@given(st.sets(keys, max_size=20), st.sets(keys, max_size=20), st.integers(0, 5))
def test_settled_keys_are_as_in_the_bucket(stored: set[str], wanted: set[str], page: int) -> None:
    store = MemoryObjectStore()
    for key in stored:
        store.put(key, key.encode())
    in_order = sorted(wanted)
    found, settled = find_by_listing(store, in_order, page)
    assert set(found) == set(in_order[:settled]) & stored
    assert all(info.key == key and info.size == len(key.encode()) for key, info in found.items())


def test_all_neighbours_are_settled_in_one_pass() -> None:
    store = MemoryObjectStore()
    for number in range(3000):
        store.put(f"{number:04d}", b"")
    wanted = [f"{number:04d}" for number in range(0, 4000, 50)]
    found, settled = find_by_listing(store, wanted)
    assert (len(found), settled) == (60, 80)


def test_keys_far_apart_are_left_alone_after_a_page() -> None:
    store = MemoryObjectStore()
    for number in range(3000):
        store.put(f"{number:04d}", b"")
    found, settled = find_by_listing(store, ["0000", "0001", "2999"])
    assert (list(found), settled) == (["0000", "0001"], 2)
    assert find_by_listing(store, []) == ({}, 0)
