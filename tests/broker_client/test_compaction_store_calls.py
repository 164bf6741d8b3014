"""Requests to the store: those of a compactor come last, and threads keep nothing when they end."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streammeta.client.compaction import store_calls
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.store_calls import StoreCalls, Throttle, give_way, run_all
from streammeta.client.resources import StoreThreads
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import ObjectNotFoundError, StoreUnavailableError
from tests.kit.fake_broker import until
from tests.kit.memory_store import MemoryObjectStore


@contextmanager
def calls_of(
    store: MemoryObjectStore,
    config: CompactionConfig | None = None,
    is_busy: Callable[[], bool] | None = None,
) -> Iterator[StoreCalls]:
    calls = StoreCalls(store, config or CompactionConfig(), is_busy, random.Random(1))
    try:
        yield calls
    finally:
        calls.close()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_calls, "_PAUSES", Backoff(0.001, 0.01))


def test_transfers_come_to_the_rate_and_time_is_not_saved_up() -> None:
    pace = Throttle(100.0)
    assert [pace.reserve(50, now=10.0) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert pace.reserve(10, now=11.0) == 0.5
    assert pace.reserve(10, now=100.0) == 0.0
    assert pace.reserve(10, now=100.0) == pytest.approx(0.1)
    assert Throttle(0.0).reserve(1 << 40, now=0.0) == 0.0


async def test_it_waits_while_others_are_busy_but_not_for_ever() -> None:
    asked = 0

    def busy_for(times: int) -> Callable[[], bool]:
        def is_busy() -> bool:
            nonlocal asked
            asked += 1
            return asked <= times

        return is_busy

    await give_way(busy_for(3), 1.0)
    assert asked == 4
    asked = 0
    await give_way(busy_for(10_000), 4 * store_calls._LOOK_AGAIN_S)
    assert asked == 4


async def test_calls_of_others_on_the_same_store_go_first_and_own_calls_do_not_count() -> None:
    entered, gate = threading.Event(), threading.Event()
    order: list[str] = []

    class Gated(MemoryObjectStore):
        def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            with self._call("get_range"):
                if key == "slow":
                    entered.set()
                    gate.wait(10)
                order.append(key)
            return b""

    store = Gated()
    with calls_of(store) as calls:
        await run_all(read_own(calls, store) for _ in range(9))
        other = asyncio.create_task(asyncio.to_thread(store.get_range, "slow"))
        await until(entered.is_set, "call of another")
        waiting = asyncio.create_task(read_own(calls, store))
        for _ in range(5):
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(other, waiting)
    assert order == [*["own"] * 9, "slow", "own"]


async def read_own(calls: StoreCalls, store: MemoryObjectStore) -> None:
    await calls.read(1, lambda: store.get_range("own"))


@pytest.mark.usefixtures("short_pauses")
async def test_a_store_that_turns_it_away_is_asked_again_and_other_errors_are_final() -> None:
    store = MemoryObjectStore()
    store.put("key", b"data")
    slow_down = StoreUnavailableError("slow down", throttled=True, retry_after_s=0.001)
    with calls_of(store) as calls:
        store.fail_next("get_range", slow_down, times=5)
        assert await calls.read(4, lambda: store.get_range("key")) == b"data"
        with pytest.raises(ObjectNotFoundError):
            await calls.read(4, lambda: store.get_range("none"))
    with calls_of(store, CompactionConfig(store_patience_s=0.0)) as calls:
        store.fail_next("get_range", slow_down)
        with pytest.raises(StoreUnavailableError):
            await calls.read(4, lambda: store.get_range("key"))


async def test_what_was_begun_has_ended_before_anything_is_dropped() -> None:
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(10)
        ended.set()

    with calls_of(MemoryObjectStore()) as calls:
        running = asyncio.create_task(calls.write(1, work))
        await until(lambda: bool(calls._running), "running call")
        running.cancel()
        await asyncio.wait([running])
        dropping = asyncio.create_task(calls.drop(ended.is_set))
        await asyncio.sleep(0)
        assert not dropping.done()
        gate.set()
        assert await dropping, "the write ended first"


async def test_work_side_by_side_ends_with_the_first_failure() -> None:
    cancelled = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ObjectNotFoundError("key")

    with pytest.raises(ObjectNotFoundError):
        await run_all([wait("a"), fail(), wait("b")])
    assert sorted(cancelled) == ["a", "b"]
    await run_all([])


async def test_who_is_cancelled_stays_cancelled_whatever_fails_then() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ObjectNotFoundError("key") from None

    working = asyncio.create_task(run_all([fail_when_cancelled()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_no_more_run_at_a_time_than_there_are_threads_for() -> None:
    running, most = 0, 0
    lock = threading.Lock()
    both = threading.Barrier(2, timeout=10)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait()
        with lock:
            running -= 1

    with calls_of(MemoryObjectStore(), CompactionConfig(read_threads=2)) as calls:
        await run_all([calls.read(1, work) for _ in range(8)])
    assert most == 2


class Buffer:
    """Stands for the megabytes that a call looks at, until it may end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def look_at(self) -> int:
        assert self.may_end.wait(10)
        return 1


Pools = StoreThreads | StoreCalls


@pytest.mark.parametrize(
    ("pools", "run"),
    [
        (lambda store: StoreThreads(store, 1, "test"), lambda pools, work: pools.run(work)),
        (
            lambda store: StoreCalls(store, CompactionConfig()),
            lambda pools, work: pools.write(1, work),
        ),
    ],
    ids=["brokers", "compactors"],
)
async def test_what_a_call_looked_at_is_gone_when_it_has_ended(
    pools: Callable[[MemoryObjectStore], Pools],
    run: Callable[[Pools, Callable[[], int]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, seen = asyncio.get_running_loop(), threading.Event()
    tell = loop.call_soon_threadsafe

    def tell_and_pause(*args: Any, **kwargs: Any) -> None:
        """Be a thread that gets no turn for a while, once it has told the loop of its end."""
        tell(*args, **kwargs)
        assert seen.wait(10)

    monkeypatch.setattr(loop, "call_soon_threadsafe", tell_and_pause)
    threads = pools(MemoryObjectStore())
    buffer = Buffer()
    there = weakref.ref(buffer)
    loop.call_soon(buffer.may_end.set)  # when the call is waited for
    try:
        ended = run(threads, buffer.look_at)
        del buffer

        assert await ended == 1

        del ended
        assert there() is None
    finally:
        seen.set()
        threads.close()
