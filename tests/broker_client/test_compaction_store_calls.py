"""A compactor and its store: its requests come last, its sources are known and checked."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import pytest

from streammeta.client.compaction import sso_sources, store_calls
from streammeta.client.compaction.commit import WrittenObject
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.output_writer import OutputJournal
from streammeta.client.compaction.report import SourceError
from streammeta.client.compaction.runner import repeat
from streammeta.client.compaction.store_calls import StoreCalls, Throttle, give_way, run_all
from streammeta.client.resources.resources import StoreThreads
from streammeta.storage.backoff import Backoff
from streammeta.storage.compaction.entries import Column, Entry, EntryTable
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.compaction.verification import RecordedChecksum, SourceChecks
from streammeta.storage.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    StorageError,
    StoreUnavailableError,
    WrongBucketError,
)
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.patience import Patience
from tests.kit.built_objects import ObjectBuilder
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.seeds import seeds
from tests.kit.waiting import until


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
    monkeypatch.setattr(store_calls, "_REJECTED", Patience(Backoff(0.001, 0.01)))


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
                    gate.wait(60)
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
        store.fail_next("get_range", AccessDeniedError("the clock is wrong"), times=5)
        assert await calls.read(4, lambda: store.get_range("key")) == b"data"
        with pytest.raises(ObjectNotFoundError):
            await calls.read(4, lambda: store.get_range("none"))
    with calls_of(store, CompactionConfig(store_patience_s=0.0)) as calls:
        store.fail_next("get_range", slow_down)
        with pytest.raises(StoreUnavailableError):
            await calls.read(4, lambda: store.get_range("key"))


async def test_cycles_of_compaction_outlast_failures_of_controllers_and_store() -> None:
    failures: list[StorageError] = [AccessDeniedError("skewed"), StoreUnavailableError("down")]
    ended = WrongBucketError("namespace", "another cluster's", "cluster c")

    async def cycle(_now_s: float) -> None:
        raise failures.pop() if failures else ended

    with pytest.raises(WrongBucketError):
        await repeat(0.001, cycle)
    assert not failures


async def test_what_was_begun_has_ended_before_anything_is_dropped() -> None:
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(60)
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
    both = threading.Barrier(2, timeout=60)

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
        assert self.may_end.wait(60)
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
        assert seen.wait(60)

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


class FakeMap:
    """Knows ranges of objects, and counts questions."""

    def __init__(self, known: dict[int, list[tuple[int, int, int]]] | None = None) -> None:
        self.known = known or {}
        self.asked: list[list[int]] = []

    async def ranges(self, object_ids: list[int]) -> dict[int, Column]:
        self.asked.append(object_ids)
        return {id_: np.array(self.known[id_]) for id_ in object_ids if id_ in self.known}


@dataclass
class Bench:
    store: MemoryObjectStore
    map: FakeMap
    cache_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        self.calls = StoreCalls(self.store, CompactionConfig(store_patience_s=0.0))
        self.indexes = sso_sources.SourceIndexes(
            self.calls,
            self.map,  # type: ignore[arg-type]
            lambda object_id: f"key-{object_id}",
            self.cache_bytes,
        )

    def put(self, object_id: int, streams: int, blocks: int = 1) -> sso_sources.Source:
        """Store an object of streams with some blocks each, of one record of offset span 1."""
        builder = ObjectBuilder(1)
        for stream_id in range(streams):
            records = [RecordBatch(stream_id, 0, at, 1, b"x") for at in range(blocks)]
            builder.write(records)
        data = builder.finish().data
        self.store.put(f"key-{object_id}", data)
        return sso_sources.Source(object_id, len(data), streams)

    @property
    def gets(self) -> int:
        return self.store.metrics().of("get_range").calls


def index_of(loaded: sso_sources.SourceIndex | SourceError) -> sso_sources.SourceIndex:
    assert isinstance(loaded, sso_sources.SourceIndex), loaded
    return loaded


@pytest.mark.parametrize(("streams", "blocks", "gets"), [(2, 3, 1), (900, 2, 1), (3, 900, 2)])
async def test_an_index_of_few_blocks_takes_one_get(streams: int, blocks: int, gets: int) -> None:
    bench = Bench(MemoryObjectStore(), FakeMap())
    source = bench.put(7, streams, blocks)
    for _ in range(2):
        index = index_of((await bench.indexes.load([source]))[7])
        assert len(index.entries) == streams * blocks
        assert bench.gets == bench.indexes.reads == gets, "the second time it is cached"
    data = bench.store.objects()["key-7"]
    assert index.tail_crc32c == google_crc32c.value(data[index.data_size :])
    assert index.data_size + index.tail_size == len(data)
    assert bench.map.asked == [], "as many ranges as the map says"
    bench.indexes.cache.forget(7)
    await bench.indexes.load([source])
    assert bench.gets == 2 * gets


async def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    bench = Bench(MemoryObjectStore(), FakeMap(), cache_bytes=5_000)
    sources = [bench.put(number, 20) for number in range(3)]
    for source in sources:
        await bench.indexes.load([source])
    await bench.indexes.load(sources[1:])
    assert bench.gets == 3
    await bench.indexes.load(sources[:1])
    assert bench.gets == 4


async def test_each_fault_is_that_of_one_object() -> None:
    bench = Bench(MemoryObjectStore(), FakeMap())
    good, corrupt = bench.put(1, 2), bench.put(2, 2)
    bench.store.put("key-2", bytes(corrupt.size))
    small = sso_sources.Source(4, 20, 1)
    loaded = await bench.indexes.load([good, corrupt, sso_sources.Source(3, 500, 1), small])
    assert isinstance(loaded[1], sso_sources.SourceIndex)
    reasons = [loaded[object_id] for object_id in (2, 3, 4)]
    assert all(isinstance(one, SourceError) and not one.passing for one in reasons), reasons
    bench.store.fail_next("get_range", StoreUnavailableError("down"))
    other = bench.put(5, 2)
    loaded = await bench.indexes.load([other])
    failed = loaded[5]
    assert isinstance(failed, SourceError)
    assert (failed.reason, failed.passing) == ("its index could not be read: down", True)
    assert isinstance((await bench.indexes.load([other]))[5], sso_sources.SourceIndex)


async def test_entries_that_the_map_does_not_know_are_not_the_objects() -> None:
    bench = Bench(MemoryObjectStore(), FakeMap({7: [(2, 0, 3), (0, 1, 2)]}))
    source = bench.put(7, 3, blocks=3)
    listed = sso_sources.Source(7, source.size, range_count=2)
    index = index_of((await bench.indexes.load([listed]))[7])
    rows = [(row.stream_id, row.start_offset) for row in index.entries.rows()]
    assert rows == [(0, 1), (2, 0), (2, 1), (2, 2)]
    assert bench.map.asked == [[7]]
    assert sso_sources.is_whole(index, {0: 0, 1: 0, 2: 0})
    bench.map.known[7].append((0, 3, 9))
    bench.indexes.cache.forget(7)
    index = index_of((await bench.indexes.load([listed]))[7])
    assert not sso_sources.is_whole(index, {0: 0, 2: 0}), "offsets 3 to 9 are not in the index"
    assert sso_sources.is_whole(index, {0: 9, 2: 0}), "unless no reader can reach them"
    assert sso_sources.is_whole(index, {2: 0})
    bench.map.known.clear()
    bench.indexes.cache.forget(7)
    assert isinstance((await bench.indexes.load([listed]))[7], SourceError)


async def test_a_suspect_is_held_against_the_map_whatever_it_looks_like() -> None:
    bench = Bench(MemoryObjectStore(), FakeMap({7: [(0, 0, 1), (1, 5, 6)]}))
    source = bench.put(7, 2)
    await bench.indexes.load([source])
    assert bench.indexes.suspect([7])
    assert not bench.indexes.suspect([7]), "once is enough"
    index = index_of((await bench.indexes.load([source]))[7])
    assert bench.map.asked == [[7]]
    assert not sso_sources.is_whole(index, {0: 0, 1: 0})


@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_pieces_in_any_order_tell_whether_a_source_is_what_was_uploaded(seed: int) -> None:
    rng = random.Random(seed)
    data, tail = rng.randbytes(rng.randint(1, 5_000)), rng.randbytes(rng.randint(84, 500))
    cuts = sorted({0, *(rng.randrange(len(data)) for _ in range(rng.randint(0, 5)))})
    pieces = list(zip(cuts, [*cuts[1:], len(data)], strict=True))
    rng.shuffle(pieces)

    def checks_of(seen: bytes, given: list[tuple[int, int]]) -> SourceChecks:
        crc32c = google_crc32c.value(data + tail)
        recorded = RecordedChecksum(crc32c, len(data), len(tail), google_crc32c.value(tail))
        checks = SourceChecks({3: recorded})
        for start, end in given:
            checks.add(3, start, end - start, google_crc32c.value(seen[start:end]))
        return checks

    whole = checks_of(data, pieces)
    assert (whole.damaged(), whole.checked) == ({}, 1), f"seed {seed}"
    at = rng.randrange(len(data))
    damaged = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
    assert set(checks_of(damaged, pieces).damaged()) == {3}, f"seed {seed}"
    partly = checks_of(damaged, pieces[1:])
    assert (partly.damaged(), partly.checked) == ({}, 0), f"seed {seed}"


def test_an_output_is_used_again_for_the_same_blocks_while_its_id_is_valid() -> None:
    now = [0.0]
    journal = OutputJournal(lambda: now[0])
    blocks = EntryTable.of_rows([Entry(1, 5, 0, 10, 1, 0, 60), Entry(2, 5, 10, 20, 1, 40, 60)])
    written = WrittenObject(9, 200, 1)
    journal.keep(blocks, written, 100.0)
    assert journal.find(blocks) == written
    assert journal.find(blocks.span(0, 1)) is None
    assert journal.find(blocks.take(np.array([1, 0]))) is None, "another order"
    now[0] = 100.0
    assert journal.find(blocks) is None
    now[0] = 0.0
    journal.drop([8])
    assert journal.find(blocks) == written
    journal.drop([9])
    assert not len(journal)


def test_budgets_are_kept() -> None:
    for budget in (16 << 20, 64 << 20, 200 << 20):
        config = CompactionConfig(memory_budget=budget)
        taken = config.block_bytes(0) + config.part_size + config.index_cache_bytes
        # The allocator keeps a tenth: with less left, 10 GiB outgrew the bound on a process.
        assert taken < budget * 0.9
        assert config.block_bytes(config.max_entries) >= budget // 4
        both = CompactionConfig(memory_budget=budget, overlap=True)
        assert both.block_bytes(0) == config.block_bytes(0) // 2
    slow = CompactionConfig(write_rate=1_000_000.0, id_ttl_s=400.0)
    assert slow.group_limits.max_group_bytes == 100_000_000, "done long before ids expire"
    few = CompactionConfig(selection=SelectionConfig(max_group_ranges=7))
    assert few.group_limits.max_group_ranges == 7
