"""Memory for blocks keeps its bounds, and read-ahead grows and shrinks by what it is good for."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from streammeta.client import ReaderConfig
from streammeta.client.config import ReaderStats
from streammeta.client.parts import StreamReader
from streammeta.client.reading import block_cache
from streammeta.client.reading.object_source import RECORD_BYTES
from streammeta.client.resources.resources import ByteBudget, SharedWork, all_of
from tests.kit.reader_world import World, placed
from tests.kit.seeds import seeds
from tests.kit.waiting import until


class Reader(block_cache.Cursor):
    """Records the evictions it is notified of."""

    def __init__(self) -> None:
        super().__init__(stream_id=0, next_offset=0, window=0)
        self.evicted: list[block_cache.BlockKey] = []

    def on_evicted(self, key: block_cache.BlockKey) -> None:
        self.evicted.append(key)


def key(number: int) -> block_cache.BlockKey:
    return (number // 10, number % 10)


def test_blocks_that_nobody_expects_go_first_then_the_longest_unused() -> None:
    cache, reader = block_cache.BlockCache(50), Reader()
    for number in range(3):
        cache.put(key(number), bytes(10), 10, reader)
    for number in (3, 4):
        cache.put(key(number), bytes(10), 10, None)
    assert cache.get(key(0)) is not None
    cache.put(key(5), bytes(20), 20, reader)
    assert [number for number in range(6) if key(number) in cache] == [0, 1, 2, 5]
    assert not reader.evicted
    cache.put(key(6), bytes(10), 10, reader)
    assert reader.evicted == [key(1)]


def test_what_nobody_expects_never_drives_out_what_somebody_does() -> None:
    cache, reader = block_cache.BlockCache(30), Reader()
    cache.put(key(0), bytes(25), 25, reader)
    cache.put(key(1), bytes(10), 10, None)
    assert (key(0) in cache, key(1) in cache, reader.evicted) == (True, False, [])
    assert not cache.reserve(6)
    assert cache.reserve(5)
    assert cache.size == 30


def test_a_block_larger_than_the_memory_is_not_kept_and_costs_no_other() -> None:
    cache, reader = block_cache.BlockCache(30), Reader()
    cache.put(key(0), bytes(25), 25, None)
    cache.put(key(1), bytes(31), 31, reader)
    assert (key(0) in cache, reader.evicted) == (True, [key(1)])


def test_a_block_goes_when_its_last_reader_is_done() -> None:
    cache, one, other = block_cache.BlockCache(30), Reader(), Reader()
    cache.put(key(0), bytes(5), 5, one)
    cache.expect(key(0), other)
    cache.release_block(key(0), one, keep=False)
    assert key(0) in cache
    cache.release_block(key(0), other, keep=False)
    assert (len(cache), cache.size) == (0, 0)
    cache.put(key(0), bytes(5), 5, one)
    cache.release_block(key(0), one, keep=True)
    assert key(0) in cache
    cache.release_block(key(0), other, keep=False)
    assert key(0) not in cache


def test_forgetting_an_object_drops_its_blocks_alone() -> None:
    cache, reader = block_cache.BlockCache(100), Reader()
    for number in (1, 2, 11):
        cache.put(key(number), bytes(5), 5, reader)
    cache.forget_object(0)
    assert [number for number in (1, 2, 11) if key(number) in cache] == [11]
    assert sorted(reader.evicted) == [key(1), key(2)]


@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_the_size_is_that_of_what_is_kept_and_never_too_large(seed: int) -> None:
    rng, cache, reserved = random.Random(seed), block_cache.BlockCache(100), 0
    readers = [Reader() for _ in range(3)]
    for _ in range(500):
        at, reader, size = key(rng.randrange(30)), rng.choice(readers), rng.randint(1, 60)
        match rng.randrange(6):
            case 0 | 1:
                cache.put(at, bytes(size), size, rng.choice([reader, None]))
            case 2:
                cache.release_block(at, reader, keep=rng.random() < 0.5)
            case 3:
                cache.expect(at, reader)
            case 4:
                reserved += size if cache.reserve(size) else 0
            case 5 if rng.random() < 0.5:
                cache.forget_object(at[0])
            case 5:
                cache.release(reserved)
                reserved = 0
        kept = [cache.get(key(number)) for number in range(30)]
        size = sum(len(data) for data in kept if data is not None)
        assert cache.size == size + reserved <= 100, f"seed {seed}"
        assert len(cache) == sum(data is not None for data in kept)


async def test_a_budget_serves_in_order_and_survives_who_gives_up() -> None:
    budget, order = ByteBudget(10), list[int]()

    async def want(number: int, nbytes: int) -> None:
        async with budget.hold(nbytes):
            assert budget.held <= 10
            order.append(number)
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(want(i, size)) for i, size in enumerate((6, 6, 1, 50, 3))]
    await asyncio.sleep(0)
    assert order == [0], "the third fits, but comes after the second"
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 2, 3, 4]
    assert budget.held == 0


@pytest.mark.parametrize("seed", seeds(3, slow=7))
async def test_a_budget_never_leaks_when_tasks_are_cancelled_at_any_time(seed: int) -> None:
    rng, budget = random.Random(seed), ByteBudget(100)

    async def want() -> None:
        async with budget.hold(rng.randint(1, 130)):
            assert 0 < budget.held <= 100
            await asyncio.sleep(rng.choice([0, 0.0005]))

    tasks = [asyncio.create_task(want()) for _ in range(60)]
    for task in rng.sample(tasks, 30):
        await asyncio.sleep(rng.choice([0, 0, 0.0005]))
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert budget.held == 0, f"seed {seed}"


async def test_work_is_shared_and_ends_with_the_last_who_wants_it() -> None:
    shared: SharedWork[str, int] = SharedWork()
    started, cancelled = 0, 0

    async def work() -> int:
        nonlocal started, cancelled
        started += 1
        try:
            await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return 7

    one, two = (asyncio.create_task(shared.run("a", work)) for _ in range(2))
    await asyncio.sleep(0.001)
    one.cancel()
    assert await two == 7
    assert (started, cancelled, "a" in shared) == (1, 0, False)
    alone = asyncio.create_task(shared.run("a", work))
    await asyncio.sleep(0.001)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    await asyncio.sleep(0)
    assert (started, cancelled, "a" in shared) == (2, 1, False)
    assert await shared.run("a", work) == 7


async def test_all_work_ends_before_a_failure_is_raised() -> None:
    ended = []

    async def work(number: int) -> int:
        await asyncio.sleep(0.001 * number)
        ended.append(number)
        if number == 0:
            raise ValueError("first")
        return number

    with pytest.raises(ValueError, match="first"):
        await all_of(work(i) for i in range(3))
    assert ended == [0, 1, 2]
    assert await all_of(work(i) for i in (1, 2)) == [1, 2]


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cursors(
    cache: block_cache.BlockCache | None = None, smallest: int = 100, largest: int = 800
) -> tuple[block_cache.Cursors, Time, ReaderStats]:
    time, stats = Time(), ReaderStats()
    kept = block_cache.BlockCache(10_000) if cache is None else cache
    return block_cache.Cursors(kept, stats, smallest, largest, time), time, stats


def step(
    all_readers: block_cache.Cursors, cursor: block_cache.Cursor, to: int
) -> block_cache.Cursor:
    """Let a reader read on to an offset."""
    taken = all_readers.take(cursor.stream_id, cursor.next_offset)
    assert taken is cursor
    taken.next_offset = to
    all_readers.put_back(taken)
    return taken


def test_read_ahead_begins_when_a_reader_goes_on_and_grows_while_blocks_are_missing() -> None:
    readers, _, _ = cursors()
    cursor = readers.take(1, 0)
    readers.note_missing(cursor)
    assert readers.bytes_to_prefetch(cursor) == 0, "may have come once only"
    cursor.next_offset = 10
    readers.put_back(cursor)
    windows = []
    for to in range(20, 80, 10):
        step(readers, cursor, to)
        readers.note_missing(cursor)
        windows.append(readers.bytes_to_prefetch(cursor))
    assert windows == [200, 400, 800, 800, 800, 800]
    assert readers.take(1, 11).goes_on is False


def test_read_ahead_waits_until_half_of_it_is_read() -> None:
    readers, _, _ = cursors()
    cursor = readers.take(1, 0)
    cursor.goes_on = True
    cursor.ahead = {key(i): 20 for i in range(3)}
    assert readers.bytes_to_prefetch(cursor) == 0
    del cursor.ahead[key(0)]
    assert readers.bytes_to_prefetch(cursor) == 60


def test_read_ahead_shrinks_when_it_was_in_vain_and_rests() -> None:
    readers, time, stats = cursors()
    cursor = readers.take(1, 0)
    cursor.goes_on, cursor.window = True, 800
    cursor.ahead = {key(0): 20, key(1): 20}
    cursor.on_evicted(key(0))
    cursor.on_evicted(key(9))
    assert readers.bytes_to_prefetch(cursor) == 380
    assert stats.blocks_evicted_unread == 1
    readers.note_missing(cursor)
    assert cursor.window == 400, "calm"
    time.now += block_cache.CALM_S
    readers.note_missing(cursor)
    assert cursor.window == 800
    for _ in range(9):
        cursor.ahead[key(1)] = 1
        cursor.on_evicted(key(1))
        readers.bytes_to_prefetch(cursor)
    assert cursor.window == 100


def test_readers_who_do_not_go_on_are_forgotten_and_their_blocks_may_go() -> None:
    cache = block_cache.BlockCache(100)
    readers, time, _ = cursors(cache)
    cursor = readers.take(1, 0)
    cache.put(key(0), bytes(60), 60, cursor)
    cursor.ahead[key(0)] = 60
    readers.put_back(cursor)
    assert not cache.reserve(60)
    time.now += block_cache.EXPIRY_S + 1
    readers.take(9, 9)
    assert len(readers) == 0
    assert cache.reserve(60)
    assert not cursor.lost


def test_two_readers_at_one_place_become_one() -> None:
    readers, _, _ = cursors()
    slow, fast = readers.take(1, 5), readers.take(1, 5)
    assert slow is not fast
    fast.window = 400
    readers.put_back(slow)
    readers.put_back(fast)
    assert len(readers) == 1
    assert readers.take(1, 5) is fast


def small_blocks(blocks: int) -> ReaderConfig:
    """Memory for so many blocks of ten records of 1000 bytes."""
    return ReaderConfig(
        block_cache_bytes=blocks * 11_000,
        readahead_bytes=20_000,
        max_readahead_bytes=100_000,
    )


@asynccontextmanager
async def filled(
    records: int, config: ReaderConfig | None = None
) -> AsyncIterator[tuple[World, StreamReader]]:
    """Yield a world of two streams with so many records, and a reader of them."""
    async with placed() as place:
        place.world.create(2)
        place.world.block_bytes = 10_000
        place.world.commit({0: records, 1: records}, payload=1_000)
        async with place.reader(config) as reader:
            yield place.world, reader


async def test_who_goes_on_finds_blocks_in_memory_and_each_is_fetched_once() -> None:
    async with filled(1_000, small_blocks(20)) as (world, reader):
        at = 0
        while at < 1_000:
            got = await reader.read(0, at, None, 10_000)
            assert [batch.base_offset for batch in got] == list(range(at, at + len(got)))
            at += len(got)
            await until(lambda: not reader._ranges._ahead, "end of read-ahead")
            assert reader.held_bytes <= 64 << 20
            assert reader._blocks.size <= 20 * 11_000
        stats = reader.stats
        assert stats.block_misses <= 3, "only before read-ahead began"
        assert stats.blocks_read_ahead >= 95
        assert stats.blocks_evicted_unread == 0
        assert reader._blocks.size == 0, "all was read, nothing stays"
        fetched = [request for request in world.store.gets if request[2] is not None]
        spans = sorted((start, end or 0) for _, start, end in fetched)
        assert all(span[1] <= other[0] for span, other in pairwise(spans))


@asynccontextmanager
async def side_by_side(
    streams: int, objects: int, records: int, config: ReaderConfig
) -> AsyncIterator[tuple[World, StreamReader]]:
    """Yield streams with one block of records of 1000 bytes each in every object."""
    async with placed() as place:
        place.world.create(streams)
        place.world.block_bytes = 200_000
        for _ in range(objects):
            place.world.commit(dict.fromkeys(range(streams), records), payload=1_000)
        async with place.reader(config) as reader:
            yield place.world, reader


async def test_readers_of_streams_that_lie_side_by_side_share_requests() -> None:
    """Eight readers, one after the other: the prefetch of one brings blocks for the others."""
    config = ReaderConfig(
        block_cache_bytes=8 << 20, readahead_bytes=100_000, max_readahead_bytes=200_000
    )
    async with side_by_side(8, 100, 25, config) as (world, reader):
        at = dict.fromkeys(range(8), 0)
        while min(at.values()) < 2_500:
            for stream_id in at:
                got = await reader.read(stream_id, at[stream_id], None, 50_000)
                assert got == world.streams[stream_id].records[at[stream_id] :][: len(got)]
                at[stream_id] += len(got)
                await until(lambda: not reader._ranges._ahead, "end of read-ahead")
                assert reader._blocks.size <= config.block_cache_bytes
        stats = reader.stats
        whole = 8 * 2_500 * 1_000
        assert stats.requests <= 300, "an index and about two ranges of each object, not eight"
        assert whole < stats.bytes_fetched < 1.15 * whole, "and nothing comes twice"
        assert stats.blocks_evicted_unread == 0
        assert reader._blocks.size == 0, "all was read, nothing stays"


async def test_a_reader_far_behind_costs_the_others_little() -> None:
    config = ReaderConfig(
        block_cache_bytes=1_600_000, readahead_bytes=200_000, max_readahead_bytes=200_000
    )
    async with side_by_side(2, 40, 100, config) as (_, reader):
        for at in (0, 100, 200):
            assert len(await reader.read(1, at, at + 100)) == 100  # goes on, and then stays here
        at = 0
        while at < 4_000:
            at += len(await reader.read(0, at, None, 100_000))
            await until(lambda: not reader._ranges._ahead, "end of read-ahead")
            assert reader._blocks.size <= config.block_cache_bytes
        block, index = 100 * 1_033, 4_000
        read, ahead = 40 + 3, 2
        beside = 1 + 4  # half of the cache is for two readers, and the last block begins in it
        most = (read + ahead + beside + 1) * block + 40 * index
        assert reader.stats.bytes_fetched <= most < (40 + 40) * block


async def test_readers_here_and_there_are_not_read_ahead_for() -> None:
    async with filled(1_000, small_blocks(10)) as (_, reader):
        rng = random.Random(1)
        for at in rng.sample(range(0, 1_000, 2), 60):
            assert (await reader.read(0, at, at + 1))[0].base_offset == at
            assert reader._blocks.size <= 110_000
        assert reader.stats.blocks_read_ahead == 0


async def test_more_readers_than_memory_lose_what_was_read_ahead_and_still_read_all() -> None:
    async with filled(400, small_blocks(6)) as (_, reader):

        async def read_all(start: int) -> None:
            at = start
            while at < 400:
                got = await reader.read(0, at, None, 5_000)
                assert [batch.base_offset for batch in got] == list(range(at, at + len(got)))
                at += len(got)
                assert reader._blocks.size <= 66_000

        await asyncio.gather(*(read_all(start) for start in range(0, 200, 7)))


async def test_readers_of_the_same_blocks_share_one_request() -> None:
    async with filled(300) as (_, reader):
        await asyncio.gather(*(reader.read(0, 0, 100) for _ in range(20)))
        assert reader.stats.requests == 2, "an index and a range"


async def test_reads_wait_for_memory_instead_of_taking_more() -> None:
    config = ReaderConfig(read_bytes=100_000, block_cache_bytes=0)
    async with filled(300, config) as (_, reader):
        most = 0

        async def read(at: int) -> None:
            nonlocal most
            got = await reader.read(at % 2, at)
            most = max(most, reader._fetcher.held_bytes)
            assert got[0].base_offset == at
            assert sum(2 * (len(batch.payload) + 33) + RECORD_BYTES for batch in got) <= 51_000

        await asyncio.gather(*(read(at) for at in range(0, 290, 3)))
        assert 0 < most <= 100_000
        assert reader._fetcher.held_bytes == 0
        assert reader._blocks.size == 0


async def test_a_cancelled_read_gives_its_memory_back() -> None:
    async with filled(300, ReaderConfig(read_bytes=60_000)) as (_, reader):
        rng = random.Random(3)
        for _ in range(40):
            tasks = [asyncio.create_task(reader.read(0, at)) for at in range(0, 100, 20)]
            await asyncio.sleep(rng.random() * 0.003)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert reader._fetcher.held_bytes == 0
        assert (await reader.read(0, 0))[0].base_offset == 0


async def test_small_objects_are_read_with_one_request_for_all_their_streams() -> None:
    async with placed() as place:
        place.world.create(50)
        place.world.commit(dict.fromkeys(range(50), 3))
        async with place.reader() as reader:
            for stream_id in range(50):
                assert len(await reader.read(stream_id, 0)) == 3
            assert reader.stats.requests == 1
            assert reader._blocks.size == 0


async def test_who_gives_up_leaves_the_shared_request_to_the_others() -> None:
    async with filled(120) as (world, reader):
        await asyncio.gather(reader.read(0, 119), reader.read(1, 119))
        reached, release = threading.Event(), threading.Event()
        world.store.block_on = (reached, release)
        before = len(world.store.gets)
        leaving, staying = (asyncio.create_task(reader.read(stream_id, 0)) for stream_id in (0, 1))
        await until(reached.is_set, "request")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        release.set()
        assert await staying == world.streams[1].records
        assert len(world.store.gets) == before + 1, "both lie side by side"


async def test_a_request_that_nobody_waits_for_is_not_sent() -> None:
    config = ReaderConfig(fetch_threads=1, block_cache_bytes=0)
    async with filled(120, config) as (world, reader):
        await reader.read(0, 119)
        reached, release = threading.Event(), threading.Event()
        world.store.block_on = (reached, release)
        first = asyncio.create_task(reader.read(0, 0, 20))
        await until(reached.is_set, "request")
        second = asyncio.create_task(reader.read(1, 20, 40))
        await until(lambda: len(reader._fetcher._requests._tasks) == 2, "second request")
        before = len(world.store.gets)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        release.set()
        assert len(await first) == 20
        await reader.read(0, 0, 20)
        assert len(world.store.gets) == before + 1
