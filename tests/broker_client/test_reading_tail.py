"""A waiting reader gets data when it is committed, without asking for it, and loses none of it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from streammeta.client import ReaderConfig, StreamTail, errors
from streammeta.client.controllers.methods import GET_OBJECTS
from streammeta.client.parts import StreamReader
from streammeta.client.reading import metadata_follower
from streammeta.storage.errors import (
    AccessDeniedError,
    StorageError,
    StoreRejectedError,
    StoreUnavailableError,
    WrongBucketError,
)
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.reader_world import Place, payload_of, placed
from tests.kit.waiting import PATIENCE_S, until


@asynccontextmanager
async def tailing(
    streams: int = 3, config: ReaderConfig | None = None, members: int = 1
) -> AsyncIterator[tuple[Place, StreamReader]]:
    """Yield a place whose streams have ten records each."""
    async with placed(members=members) as place:
        place.world.create(streams)
        place.world.commit(dict.fromkeys(range(streams), 10))
        async with place.reader(config or ReaderConfig(poll_interval_s=60.0)) as reader:
            yield place, reader


async def take(tail: StreamTail, count: int, within_s: float = PATIENCE_S) -> list[RecordBatch]:
    async with asyncio.timeout(within_s):
        return [await anext(tail) for _ in range(count)]


async def followed(place: Place, reader: StreamReader) -> None:
    """Wait until news come by themselves."""
    await until(lambda: reader._follower.is_healthy, "watch")


async def test_a_tail_gives_what_is_there_and_then_what_comes() -> None:
    async with tailing() as (place, reader):
        tail = reader.tail(1, 4)
        assert [batch.base_offset for batch in await take(tail, 6)] == list(range(4, 10))
        waiting = asyncio.create_task(take(tail, 3))
        await followed(place, reader)
        place.world.commit({0: 1})
        place.world.commit({1: 3})
        got = await waiting
        assert [batch.payload for batch in got] == [payload_of(1, at) for at in (10, 11, 12)]
        assert tail.position == 13


async def test_idle_tails_ask_nothing_and_share_one_watch() -> None:
    async with tailing(streams=300) as (place, reader):
        tails = [reader.tail(stream_id, 0) for stream_id in range(300)]
        await asyncio.gather(*(take(tail, 10) for tail in tails))
        waiting = [asyncio.create_task(take(tail, 2)) for tail in tails]
        await until(lambda: reader._follower.is_healthy, "watch")
        await until(lambda: all(reader._slices.ends_at(id_, 10) for id_ in range(300)), "ends")
        asked, watches = place.cluster.calls["GetObjects"], place.cluster.calls["Watch"]
        for _ in range(2):
            place.world.commit(dict.fromkeys(range(300), 1))
            await asyncio.sleep(0)
        for got in await asyncio.gather(*waiting):
            assert [batch.base_offset for batch in got] == [10, 11]
        assert place.cluster.calls["GetObjects"] == asked
        assert place.cluster.calls["Watch"] == watches <= 3
        assert set(place.cluster.requests["Watch"][-1].stream_ids) == set(range(300))


async def test_more_streams_than_a_filter_takes_are_watched_without_one() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata_follower, "MAX_FILTERED_STREAMS", 2)
        async with tailing(streams=5) as (place, reader):
            tails = [reader.tail(stream_id, 10) for stream_id in range(5)]
            waiting = [asyncio.create_task(take(tail, 1)) for tail in tails]
            await until(lambda: all(reader._slices.ends_at(id_, 10) for id_ in range(5)), "ends")
            place.world.commit(dict.fromkeys(range(5), 1))
            await asyncio.gather(*waiting)
            assert not place.cluster.requests["Watch"][-1].stream_ids


async def test_a_cancelled_tail_goes_on_where_it_was() -> None:
    async with tailing() as (place, reader):
        tail, got, rng = reader.tail(0, 0, max_bytes=60), list[int](), random.Random(5)
        while len(got) < 40:
            if rng.random() < 0.3 and place.world.streams[0].end < 40:
                place.world.commit({0: rng.randint(1, 4)})
            try:
                async with asyncio.timeout(rng.random() * 0.004):
                    got.append((await anext(tail)).base_offset)
            except TimeoutError:
                assert tail.position == len(got)
        assert got == list(range(40))


async def test_many_tails_of_one_stream_read_its_blocks_together() -> None:
    async with tailing() as (place, reader):
        tails = [reader.tail(0, 10) for _ in range(50)]
        waiting = [asyncio.create_task(take(tail, 5)) for tail in tails]
        await until(lambda: reader._slices.ends_at(0, 10), "end")
        await followed(place, reader)
        before = reader.stats.requests
        place.world.block_bytes = 1 << 20
        place.world.commit({0: 5, 1: 300}, payload=1_000)
        await asyncio.gather(*waiting)
        assert reader.stats.requests - before <= 2, "an index and the blocks"


async def test_a_closed_tail_ends_even_while_it_waits() -> None:
    async with tailing() as (place, reader):
        tail = reader.tail(0, 10)
        waiting = asyncio.create_task(take(tail, 1))
        await until(lambda: reader._slices.ends_at(0, 10), "end")
        assert set(reader._slices.list_tracked()) == {0}
        await tail.close()
        with pytest.raises(StopAsyncIteration):
            async with asyncio.timeout(PATIENCE_S):
                await anext(tail)
        place.world.commit({0: 1})
        with pytest.raises((StopAsyncIteration, RuntimeError)):
            await waiting
        assert not reader._slices._waiting


async def test_a_tail_that_is_dropped_is_followed_no_longer() -> None:
    async with tailing() as (_, reader):
        tail = reader.tail(0, 0)
        await take(tail, 1)
        assert reader._slices._waiting
        del tail
        assert not reader._slices._waiting


async def test_a_waiting_tail_hears_of_trims_and_deletion() -> None:
    async with tailing() as (place, reader):
        trimmed, deleted = reader.tail(0, 10), reader.tail(1, 10)
        waiting = [asyncio.create_task(take(tail, 1)) for tail in (trimmed, deleted)]
        await until(lambda: reader._slices.ends_at(0, 10) and reader._slices.ends_at(1, 10), "ends")
        await followed(place, reader)
        place.world.tells = False
        place.world.commit({0: 5})
        place.world.tells = True
        place.world.trim(0, 12)
        place.world.delete(1)
        with pytest.raises(errors.OffsetTrimmedError, match=r"10.*12"):
            await waiting[0]
        with pytest.raises(errors.StreamNotFoundError):
            await waiting[1]


async def test_offsets_that_are_owed_are_waited_for_and_those_given_up_are_passed_over() -> None:
    async with tailing() as (place, reader):
        tail = reader.tail(0, 8)
        await take(tail, 2)
        waiting = asyncio.create_task(take(tail, 3))
        await until(lambda: reader._slices.ends_at(0, 10), "end")
        place.world.close_beyond(0, 15)
        place.world.commit({0: 3})
        await asyncio.sleep(0.05)
        assert not waiting.done(), "offsets 10 to 15 are not there yet"
        assert (await reader.fetch(0, 10)).records == []
        place.world.give_up(0, 10, 15)
        assert [batch.base_offset for batch in await waiting] == [15, 16, 17]
        fetched = await reader.fetch(0, 12)
        assert [record.base_offset for record in fetched.records] == [15, 16, 17]
        assert (fetched.next_offset, fetched.end_offset) == (18, 18)
        assert await reader.read(0, 10, 15) == []
        assert [batch.base_offset async for batch in reader.iterate(0, 9)] == [9, 15, 16, 17]
        ((_, records),) = [stream async for stream in reader.read_streams([0])]
        assert [record.base_offset for record in records] == [*range(10), 15, 16, 17]
        assert reader.stats.lost_offsets > 0


async def test_without_a_watch_waiters_ask_from_time_to_time() -> None:
    async with tailing(config=ReaderConfig(poll_interval_s=0.02)) as (place, reader):
        place.world.watch_is_broken = True
        tail = reader.tail(0, 10)
        waiting = asyncio.create_task(take(tail, 2))
        asked = place.cluster.calls["GetObjects"]
        await until(lambda: place.cluster.calls["GetObjects"] > asked + 3, "questions")
        place.world.commit({0: 2})
        assert [batch.base_offset for batch in await waiting] == [10, 11]


async def test_a_tail_waits_for_controllers_and_resumes(caplog: pytest.LogCaptureFixture) -> None:
    """Its calls end at their deadlines meanwhile, again and again; the tail does not."""
    async with tailing() as (place, reader):
        place.client.deadline_s = 0.05
        place.world.watch_is_broken = True
        tail = reader.tail(0, 0)
        await take(tail, 10)
        place.cluster.fail_next(GET_OBJECTS, grpc.StatusCode.UNAVAILABLE, times=1_000_000)
        place.world.commit({0: 5})
        waiting = asyncio.create_task(take(tail, 5, within_s=60.0))
        retries = place.client.tally.retries
        await until(lambda: retries["tail"] >= 3 or waiting.done(), "repeated reads", 60.0)
        assert not waiting.done()
        place.cluster.fail_next(GET_OBJECTS, grpc.StatusCode.UNAVAILABLE, times=0)
        assert [record.base_offset for record in await waiting] == [10, 11, 12, 13, 14]
    assert "tail at offset 10 failed, retrying in" in caplog.text


async def test_a_tail_waits_for_a_store_that_fails_longer_than_a_read_may() -> None:
    config = ReaderConfig(poll_interval_s=60.0, request_timeout_s=0.02)
    async with tailing(config=config) as (place, reader):
        place.world.store.fail_next("get_range", AccessDeniedError("skewed"), times=8)
        records = await take(reader.tail(0, 0), 10, within_s=60.0)
        assert [record.base_offset for record in records] == list(range(10))
        assert place.client.tally.retries["tail"] > 0


@pytest.mark.parametrize("error", [StoreRejectedError("no"), WrongBucketError("n", "a", "b")])
async def test_a_failure_that_does_not_pass_ends_a_tail(error: StorageError) -> None:
    async with tailing() as (place, reader):
        place.world.store.fail_next("get_range", error)
        with pytest.raises(type(error)):
            await take(reader.tail(0, 0), 1)
        assert place.client.tally.retries["tail"] == 0


async def test_a_tail_that_waits_out_an_outage_ends_when_it_or_its_reader_is_closed() -> None:
    async with tailing() as (place, reader):
        place.client.deadline_s = 0.05
        place.cluster.fail_next(GET_OBJECTS, grpc.StatusCode.UNAVAILABLE, times=1_000_000)
        tails = [reader.tail(0, 0), reader.tail(1, 0)]
        waiting = [asyncio.create_task(take(tail, 1, within_s=60.0)) for tail in tails]
        await until(lambda: place.client.tally.retries["tail"] >= 6, "repeated reads", 60.0)
        await tails[0].close()
        await reader.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in ended] == [StopAsyncIteration, errors.ReaderClosedError]


async def test_changes_that_are_gone_everywhere_lose_nothing() -> None:
    async with tailing() as (place, reader):
        tail = reader.tail(0, 10)
        waiting = asyncio.create_task(take(tail, 7))
        await until(lambda: reader._slices.ends_at(0, 10), "end")
        await followed(place, reader)
        place.world.tells = False
        place.world.commit({0: 7})
        place.world.tells = True
        place.world.lose_changes()
        assert [batch.base_offset for batch in await waiting] == list(range(10, 17))


async def test_a_watch_that_lags_behind_the_leader_is_given_up() -> None:
    """A controller that is cut off goes on saying that it has everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata_follower, "_LAG_CHECK_S", 0.05)
        patch.setattr(metadata_follower, "_LAG_ALLOWED_S", 0.3)
        async with tailing() as (place, reader):
            await take(reader.tail(0, 0), 10)
            await until(lambda: place.cluster.calls["Watch"] >= 1, "watch")
            place.world.committed_elsewhere = 5
            watches = place.cluster.calls["Watch"]
            await until(lambda: place.cluster.calls["Watch"] > watches, "another watch")
            assert not reader._follower.is_healthy


async def test_a_new_stream_joins_the_watch_and_misses_nothing() -> None:
    async with tailing(streams=30) as (place, reader):
        rng, ends = random.Random(9), dict.fromkeys(range(30), 10)
        tails = {}
        waiting = []
        for stream_id in range(30):
            tails[stream_id] = reader.tail(stream_id, 0)
            waiting.append(asyncio.create_task(take(tails[stream_id], 20)))
            for other in rng.sample(range(30), 10):
                if ends[other] < 20:
                    place.world.commit({other: 1})
                    ends[other] += 1
            await asyncio.sleep(rng.choice([0, 0.002]))
        place.world.commit({stream_id: 20 - end for stream_id, end in ends.items() if end < 20})
        for got in await asyncio.gather(*waiting):
            assert [batch.base_offset for batch in got] == list(range(20))


async def test_fetch_returns_at_once_when_there_is_something_or_no_wait() -> None:
    async with tailing() as (_, reader):
        fetched = await reader.fetch(0, 4)
        assert [record.base_offset for record in fetched.records] == list(range(4, 10))
        assert (fetched.next_offset, fetched.start_offset, fetched.end_offset) == (10, 0, 10)
        assert fetched.payload_bytes == 120
        nothing = await reader.fetch(0, 10)
        assert (nothing.records, nothing.next_offset) == ([], 10)


async def test_fetch_waits_for_enough_and_no_longer() -> None:
    async with tailing() as (place, reader):
        waiting = asyncio.create_task(reader.fetch(0, 8, min_bytes=100, wait_s=PATIENCE_S))
        await until(lambda: reader._slices.ends_at(0, 10), "end")
        await followed(place, reader)
        for _ in range(3):
            assert not waiting.done()
            place.world.commit({0: 1})
            await asyncio.sleep(0.01)
        fetched = await waiting
        assert [record.base_offset for record in fetched.records] == list(range(8, 13))
        some = await reader.fetch(0, 11, min_bytes=1_000_000, wait_s=0.05)
        assert [record.base_offset for record in some.records] == [11, 12]
        assert (await reader.fetch(0, 13, wait_s=0.05)).records == []
        few = await reader.fetch(0, 0, max_bytes=30, min_bytes=30, wait_s=PATIENCE_S)
        assert [record.base_offset for record in few.records] == [0, 1]


async def test_requests_that_make_no_sense_are_refused() -> None:
    async with tailing() as (_, reader):
        with pytest.raises(ValueError, match="max_bytes"):
            await reader.fetch(0, 0, 10, min_bytes=11)
        with pytest.raises(ValueError, match="offset"):
            await reader.fetch(0, -1)
        with pytest.raises(ValueError, match="offset"):
            reader.tail(0, -1)
        with pytest.raises(ValueError, match="readahead_bytes is 0"):
            ReaderConfig(readahead_bytes=0)
        with pytest.raises(ValueError, match="poll_interval_s"):
            ReaderConfig(poll_interval_s=0)


async def test_a_read_ends_by_its_deadline() -> None:
    async with tailing() as (place, reader):
        never = place.cluster.hold("GetObjects")
        with pytest.raises(errors.ReadDeadlineError, match=r"stream 0 .*0.05 s"):
            await reader.read(0, 0, deadline_s=0.05)
        with pytest.raises(errors.ReadDeadlineError, match="stream 0"):
            await reader.offset_for_timestamp(0, 5, timestamp_of=lambda _: 0, deadline_s=0.05)
        never.set()
        assert len(await reader.read(0, 0)) == 10


@pytest.mark.parametrize("waits_for", ["map", "index", "block"])
async def test_a_closed_reader_refuses_and_lets_nobody_wait(waits_for: str) -> None:
    async with tailing() as (place, reader):
        never, reached = asyncio.Event(), threading.Event()

        async def hang(_: object) -> None:
            reached.set()
            await never.wait()

        release = threading.Event()
        if waits_for == "map":
            place.cluster.hooks["GetObjects"] = hang
        else:
            if waits_for == "block":
                place.world.block_bytes = 1 << 20
                place.world.commit({0: 200, 1: 1}, payload=1_000)  # too large to come as a whole
                await reader.read(1, 10)
            place.world.store.block_on = (reached, release)
        reading = asyncio.create_task(reader.read(0, 10 if waits_for == "block" else 0))
        tail = asyncio.create_task(take(reader.tail(1, place.world.streams[1].end), 1))
        await until(reached.is_set, f"wait for the {waits_for}")
        await reader.close()
        release.set()
        for task in (reading, tail):
            with pytest.raises(errors.ReaderClosedError):
                await task
        with pytest.raises(errors.ReaderClosedError, match="stream 0"):
            await reader.read(0, 0)
        never.set()


async def test_a_store_that_refuses_one_request_fails_that_read_alone() -> None:
    async with tailing() as (place, reader):
        for stream_id in range(3):
            place.world.commit({stream_id: 5})
            place.world.store.fail_next("get_range", StoreRejectedError("fake: no"))
            with pytest.raises(StoreRejectedError, match="fake: no"):
                await reader.read(stream_id, 10)
            assert len(await reader.read(stream_id, 0)) == 15
            assert reader.held_bytes < 10_000


@pytest.mark.parametrize(
    "error", [StoreUnavailableError("fake: down"), AccessDeniedError("RequestTimeTooSkewed")]
)
async def test_a_store_that_fails_for_a_moment_fails_no_read(error: StorageError) -> None:
    async with tailing() as (place, reader):
        place.world.commit({0: 5})
        place.world.store.fail_next("get_range", error, times=3)
        assert len(await reader.read(0, 0)) == 15


async def test_a_read_gives_up_at_its_timeout_while_the_store_fails() -> None:
    async with tailing(config=ReaderConfig(request_timeout_s=0.2)) as (place, reader):
        place.world.commit({0: 5})
        place.world.store.fail_next("get_range", AccessDeniedError("revoked"), times=1_000)
        with pytest.raises(AccessDeniedError, match="revoked"):
            await reader.read(0, 10)


async def test_an_object_that_is_gone_while_it_is_still_remembered_is_asked_for_again() -> None:
    async with tailing() as (place, reader):
        world = place.world
        world.block_bytes = 10_000
        world.commit({0: 300}, payload=1_000)
        await take(reader.tail(1, 0), 1)
        await followed(place, reader)
        await reader.read(0, 10, 11)
        world.tells = False
        world.compact(0, 0, 2)
        assert await reader.read(0, 200) == world.streams[0].covering(200)
        assert reader.stats.vanished_objects == 1


async def test_a_wider_watch_goes_on_where_the_narrow_one_was_even_if_that_was_behind() -> None:
    async with tailing() as (place, reader):
        place.world.watch_hangs = True
        first = asyncio.create_task(take(reader.tail(0, 10), 1))
        await until(lambda: place.cluster.calls["Watch"] == 1, "watch")
        await until(lambda: (watch := reader._follower._watch) is not None
                    and watch.high_watermark > watch.next_offset, "lag")  # fmt: skip
        place.world.commit({0: 1})
        place.world.watch_hangs = False
        second = asyncio.create_task(take(reader.tail(1, 10), 1))
        await first
        place.world.commit({1: 1})
        await second
        watches = place.cluster.requests["Watch"]
        assert {watch.from_offset for watch in watches} == {watches[0].from_offset}


async def test_streams_that_come_one_by_one_do_not_keep_the_watch_from_being_heard() -> None:
    async with tailing(streams=60) as (place, reader):
        tails = [reader.tail(stream_id, 10) for stream_id in range(60)]
        waiting = []
        for tail in tails:
            waiting.append(asyncio.create_task(take(tail, 1)))
            await asyncio.sleep(0.015)
        await followed(place, reader)
        assert place.cluster.calls["Watch"] <= 12
        assert not place.cluster.requests["Watch"][-1].stream_ids
        place.world.commit(dict.fromkeys(range(60), 1))
        await asyncio.gather(*waiting)


@pytest.mark.parametrize("composite", [False, True])
async def test_bytes_that_no_format_rule_protects_fail_the_checksum(composite: bool) -> None:
    async with tailing() as (place, reader):
        place.world.commit({0: 5})
        object_id = place.world.compact(0, 0, 2, composite=composite)
        key = key_for(object_id, NAMESPACE)
        broken = bytearray(place.world.store.objects()[key])
        broken[20] ^= 1  # of an epoch, or of a bucket id
        place.world.store.put(key, bytes(broken))
        with pytest.raises(errors.CorruptObjectError, match="CRC-32C") as caught:
            await reader.read(0, 0)
        assert (caught.value.key, caught.value.stream_id) == (key, 0)
