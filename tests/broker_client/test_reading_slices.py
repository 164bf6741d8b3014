"""Reads against a model: what is remembered of a stream is never wrong, nor is what is read.

Seeded worlds change while many readers read them. A read may be behind on trims for a moment, but
never has a gap, a wrong byte, a record out of order, or nothing where something was committed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from streammeta.client import ReaderConfig, errors
from streammeta.client.config import ReaderStats
from streammeta.client.parts import StreamReader
from streammeta.client.reading.lookups import Lookups, Slice, StreamQuery, StreamSlices
from streammeta.client.reading.slice_cache import SliceCache
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import records_pb2
from streammeta.v1.common_pb2 import OBJECT_KIND_STREAM
from tests.kit.fake_broker import broker
from tests.kit.reader_world import Place, World, column, placed, set_objects_record
from tests.kit.seeds import seeds
from tests.kit.waiting import until


def part(object_id: int, start: int, end: int) -> Slice:
    return Slice(object_id, OBJECT_KIND_STREAM, start, end, 100)


def known_of(*slices: Slice, start: int = 0, end: int = 100) -> StreamSlices:
    known = StreamSlices(start, end)
    known.learn(slices, start, end)
    return known


def runs(known: StreamSlices, offset: int) -> list[tuple[int, int, int]]:
    return [(one.object_id, one.start_offset, one.end_offset) for one in known.run_from(offset, 99)]


@pytest.mark.parametrize(
    "late",
    [part(9, 0, 10), part(9, 0, 15), part(9, 5, 20), part(9, 16, 20)],
    ids=["same range", "two in one", "reaches beyond", "behind a gap"],
)
def test_what_does_not_fit_makes_the_stream_unknown(late: Slice) -> None:
    known = known_of(part(1, 0, 10), part(2, 10, 15), end=15)
    assert not known.add_committed(late)


def test_commits_below_the_start_or_in_the_unknown_change_nothing() -> None:
    known = known_of(part(7, 50, 60), start=20, end=60)
    assert known.add_committed(part(1, 0, 20))
    assert known.add_committed(part(2, 30, 40)), "a compaction of what is not known here"
    assert runs(known, 50) == [(7, 50, 60)]
    assert len(known) == 1


def test_what_was_owed_joins_when_it_comes() -> None:
    known = known_of(part(1, 0, 10), end=10)
    known.close_at(30)
    assert known.add_committed(part(3, 30, 35)), "by the next owner"
    assert known.add_committed(part(2, 10, 20)), "by the one who owed it"
    assert runs(known, 0) == [(1, 0, 10), (2, 10, 20)]
    assert known.add_committed(part(4, 20, 30))
    assert runs(known, 0)[-1] == (3, 30, 35)
    assert known.end_offset == 35


def test_a_trim_keeps_the_slice_that_the_start_lies_in() -> None:
    known = known_of(part(1, 0, 10), part(2, 10, 20), part(3, 20, 30), end=30)
    known.trim(15)
    assert (runs(known, 15), known.start_offset) == ([(2, 10, 20), (3, 20, 30)], 15)
    known.trim(5)
    assert known.start_offset == 15, "trims never go back"
    known.trim(30)
    assert len(known) == 0


@pytest.mark.parametrize("seed", seeds(10, slow=20))
def test_known_slices_always_say_what_the_map_says_or_said(seed: int) -> None:
    """Answers of any age and all changes since, some of them twice, against a full history."""
    rng = random.Random(seed)
    pieces: list[Slice] = []
    states: list[list[Slice]] = [[]]
    changes: list[Slice] = []
    for object_id in range(60):
        if pieces and rng.random() < 0.4:
            first = rng.randrange(len(pieces))
            old = pieces[first : first + rng.randint(1, 3)]
            new = part(object_id, old[0].start_offset, old[-1].end_offset)
            pieces = [*pieces[:first], new, *pieces[first + len(old) :]]
        else:
            end = pieces[-1].end_offset if pieces else 0
            new = part(object_id, end, end + rng.randint(1, 9))
            pieces = [*pieces, new]
        changes.append(new)
        states.append(pieces)
    asked = rng.randrange(len(states))
    answered = states[asked]
    end = answered[-1].end_offset if answered else 0
    offset = rng.randint(0, end)
    shown = [slice_ for slice_ in answered if slice_.end_offset > offset][: rng.randint(1, 20)]
    known = StreamSlices(0, end)
    known.learn(shown, 0, end)
    for at in range(max(0, asked - rng.randint(0, 5)), len(changes)):
        if not known.add_committed(changes[at]):
            return  # forgotten: the map is asked again
        if at + 1 >= asked:
            true_now = states[at + 1]
            run = known.run_from(offset, 99)
            assert all(slice_ in true_now for slice_ in run), f"seed {seed}, change {at}"
            assert known.end_offset == true_now[-1].end_offset


class Clock:
    """The time, and what is known of changes, as a test says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.caught_up_at = float("-inf")
        self.number: int | None = None
        self.tracked: list[int] = []

    def continuity(self, _stream_id: int) -> int | None:
        return self.number

    def track(self, stream_id: int) -> None:
        self.tracked.append(stream_id)


@dataclass
class Scene:
    """A cache of twenty streams of three objects of ten records each."""

    world: World
    place: Place
    clock: Clock
    cache: SliceCache
    stats: ReaderStats


@asynccontextmanager
async def scene(
    continuity: int | None = None, max_slices: int = 1000, objects: int = 3
) -> AsyncIterator[Scene]:
    async with placed() as place:
        place.world.create(20)
        for _ in range(objects):
            place.world.commit(dict.fromkeys(range(20), 10))
        clock, stats = Clock(), ReaderStats()
        clock.number = continuity
        cache = SliceCache(Lookups(place.client), stats, max_slices, 5.0, lambda: clock.now)
        cache.follow(clock)
        yield Scene(place.world, place, clock, cache, stats)


def told(world: World, act: Callable[[], object]) -> records_pb2.RecordSet:
    """Do something; return the change that tells of it."""
    before = world.feed.end_offset
    act()
    change = world.feed.cursor(before).advance()
    assert change is not None
    return records_pb2.RecordSet.FromString(change.payload)


async def test_the_map_is_asked_once_and_again_when_the_answer_is_too_old() -> None:
    async with scene() as s:
        for offset in (0, 15, 29):
            located = await s.cache.locate(3, offset)
            assert located.slices[0].start_offset <= offset < located.slices[0].end_offset
        assert (s.stats.lookups, s.stats.metadata_hits) == (1, 2)
        s.clock.now += 5.1
        await s.cache.locate(3, 0)
        assert s.stats.lookups == 2


async def test_changes_keep_an_answer_true_while_they_come_without_a_break() -> None:
    async with scene(7) as s:
        await s.cache.locate(3, 0)
        s.cache.on_records(told(s.world, lambda: s.world.commit({3: 5})))
        s.clock.now += 3600
        s.clock.caught_up_at = s.clock.now - 1
        located = await s.cache.locate(3, 30)
        assert [slice_.end_offset for slice_ in located.slices] == [35]
        assert s.stats.lookups == 1
        assert s.cache.ends_at(3, 35)
        s.clock.caught_up_at = s.clock.now - 6
        await s.cache.locate(3, 0)
        assert s.stats.lookups == 2, "the watch is too far behind"
        s.clock.caught_up_at, s.clock.number = s.clock.now + 10, 8
        s.clock.now += 10
        assert not s.cache.ends_at(3, 35)
        await s.cache.locate(3, 0)
        assert s.stats.lookups == 3, "changes were missed in between"


@pytest.mark.parametrize(("ends", "end"), [(b"", 30), (column(-1), 30), (column(34), 34)])
async def test_a_close_moves_the_end_if_it_says_so(ends: bytes, end: int) -> None:
    async with scene(7) as s:
        await s.cache.locate(3, 0)
        closed = records_pb2.StreamsClosedRecord(stream_id=column(3), end_offset=ends)
        record = records_pb2.Record(streams_closed=closed)
        s.cache.on_records(records_pb2.RecordSet(records=[record]))
        remembered = s.cache.get(3, 0)
        assert remembered is not None
        assert remembered.end_offset == end


async def test_that_there_is_nothing_is_never_believed_from_memory() -> None:
    async with scene() as s:
        assert not (await s.cache.locate(3, 30)).slices
        s.world.tells = False
        s.world.commit({3: 5})
        assert [slice_.end_offset for slice_ in (await s.cache.locate(3, 30)).slices] == [35]


async def test_a_change_that_overtakes_the_answer_is_not_lost() -> None:
    async with scene(1) as s:

        async def overtake(_: object) -> None:
            """Between the question and its answer a compaction comes, which the answer holds."""
            for change in (lambda: s.world.compact(3, 0, 2), lambda: s.world.commit({3: 4})):
                s.cache.on_records(told(s.world, change))

        s.place.cluster.hooks["GetObjects"] = overtake
        await s.cache.locate(3, 0)
        del s.place.cluster.hooks["GetObjects"]
        located = await s.cache.locate(3, 0)
        assert [slice_.end_offset for slice_ in located.slices] == [20, 30, 34]
        assert s.stats.lookups == 1, "the answer held both changes already"


async def test_an_answer_older_than_the_changes_beside_it_is_corrected() -> None:
    async with scene(1) as s:

        def go_on() -> None:
            for change in (lambda: s.world.commit({3: 4}), lambda: s.world.trim(3, 12)):
                s.cache.on_records(told(s.world, change))

        s.world.once_answered = go_on
        await s.cache.locate(3, 0)
        remembered = s.cache.get(3, 12)
        assert remembered is not None
        assert (remembered.start_offset, remembered.end_offset) == (12, 34)
        assert [slice_.end_offset for slice_ in remembered.slices] == [20, 30, 34]


async def test_refusals_are_raised_and_forgotten() -> None:
    async with scene(1) as s:
        await s.cache.locate(3, 0)
        s.cache.on_records(told(s.world, lambda: s.world.trim(3, 15)))
        with pytest.raises(errors.OffsetTrimmedError, match=r"14.*15"):
            await s.cache.locate(3, 14)
        s.cache.on_records(told(s.world, lambda: s.world.delete(3)))
        with pytest.raises(errors.StreamNotFoundError, match="stream 3"):
            await s.cache.locate(3, 20)
        assert s.cache.size == 0


async def test_memory_is_bounded_and_the_longest_unused_streams_go() -> None:
    async with scene(max_slices=32, objects=4) as s:
        for stream_id in range(20):
            await s.cache.locate(stream_id, 0)
            assert s.cache.size <= 32
        asked = s.stats.lookups
        for stream_id in (19, 18, 17):
            await s.cache.locate(stream_id, 0)
        assert s.stats.lookups == asked
        await s.cache.locate(0, 0)
        assert s.stats.lookups == asked + 1


async def test_a_stream_that_grows_without_end_does_not_outgrow_the_memory() -> None:
    async with scene(1, max_slices=32) as s:
        for _ in range(100):
            await s.cache.locate(3, s.world.streams[3].end - 1)
            s.cache.on_records(told(s.world, lambda: s.world.commit({3: 1})))
            assert s.cache.size <= 32


async def test_news_wake_those_who_wait_for_the_stream_and_nobody_else() -> None:
    async with scene() as s:
        with s.cache.watch_changes(3) as mine, s.cache.watch_changes(4) as others:
            assert set(s.cache.list_tracked()) == {3, 4}
            s.cache.on_records(told(s.world, lambda: s.world.commit({3: 1})))
            assert (mine.is_set(), others.is_set()) == (True, False)
            s.cache.on_gap()
            assert others.is_set()
        assert not s.cache.list_tracked()
        assert s.clock.tracked == [3, 4]


async def test_questions_of_one_turn_go_out_in_one_call() -> None:
    async with scene() as s:
        await asyncio.gather(*(s.cache.locate(stream_id, 0) for stream_id in range(20)))
        assert s.place.cluster.calls["GetObjects"] == 1


def test_a_row_of_a_commit_for_many_streams_reaches_its_own_stream_alone() -> None:
    stats = ReaderStats()
    cache = SliceCache(None, stats, 10, 5.0)  # type: ignore[arg-type]
    world = World()
    world.create(3)
    world.commit(dict.fromkeys(range(3), 2))
    record = set_objects_record({stream: world.streams[stream].pieces[0] for stream in range(3)})
    with cache.watch_changes(1) as news:
        cache.on_records(records_pb2.RecordSet(records=[record]))
        assert news.is_set()
    assert cache.size == 0
    assert column(5) == b"\5" + bytes(7)


TURNS = range(6)
"""Of the event loop: before, while and after a question is handed over to the task that asks it."""


@pytest.mark.parametrize("turns", TURNS)
async def test_a_question_ends_when_the_reader_is_closed_after_any_turn(turns: int) -> None:
    async with broker() as b:
        never = b.hold("GetObjects")
        lookups = Lookups(b.client)
        asking = asyncio.create_task(lookups.ask(StreamQuery(7, 0)))
        for _ in range(turns):
            await asyncio.sleep(0)
        lookups.close()
        async with asyncio.timeout(60.0):
            with pytest.raises(errors.ReaderClosedError, match="stream 7"):
                await asking
        never.set()


STREAMS = 4
STEPS = 80
TINY = ReaderConfig(
    index_cache_bytes=3_000,
    block_cache_bytes=400,
    read_bytes=600,
    readahead_bytes=100,
    max_readahead_bytes=300,
    max_slices=6,
    max_staleness_s=0.05,
    poll_interval_s=0.02,
)
CONFIGS = {"roomy": ReaderConfig(), "tiny": TINY, "forgetful": ReaderConfig(max_staleness_s=0)}


def check_run(got: Sequence[RecordBatch], world: World, stream_id: int, start: int) -> None:
    """Hold records read from `start` on against all that the stream ever had."""
    wanted = world.streams[stream_id].covering(start)[: len(got)]
    assert list(got) == wanted, f"stream {stream_id} from {start}"


def check_trimmed(error: errors.OffsetTrimmedError, world: World, start: int) -> None:
    """Hold a refusal against what was trimmed."""
    assert start < error.start_offset <= world.streams[error.stream_id].start


async def change(world: World, rng: random.Random) -> None:
    """Change the world in one way."""
    stream_id = rng.randrange(STREAMS)
    stream = world.streams[stream_id]
    match rng.choices(["commit", "compact", "trim", "lose", "break"], [10, 5, 2, 0.5, 0.5])[0]:
        case "commit":
            chosen = rng.sample(range(STREAMS), rng.randint(1, STREAMS))
            world.commit({stream: rng.randint(1, 6) for stream in chosen}, span=rng.randint(1, 3))
        case "compact" if len(stream.pieces) >= 2:
            first = rng.randrange(len(stream.pieces) - 1)
            count = rng.randint(2, min(5, len(stream.pieces) - first))
            world.compact(stream_id, first, count, composite=rng.random() < 0.3)
        case "trim" if stream.end > stream.start:
            world.trim(stream_id, rng.randint(stream.start, (stream.start + stream.end) // 2))
        case "lose":
            world.lose_changes()
        case "break":
            world.watch_is_broken = not world.watch_is_broken
    await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))


async def read_at_random(reader: StreamReader, world: World, rng: random.Random) -> None:
    """Read one range and check it against what was there before and after."""
    stream_id = rng.randrange(STREAMS)
    stream = world.streams[stream_id]
    committed = stream.end
    start = rng.randint(max(0, stream.start - 3), committed + 2)
    end = rng.choice([None, start + rng.randint(1, 20)])
    max_bytes = rng.choice([1, 50, 200, 8 << 20])
    try:
        got = await reader.read(stream_id, start, end, max_bytes)
    except errors.OffsetTrimmedError as error:
        check_trimmed(error, world, start)
        return
    check_run(got, world, stream_id, start)
    if end is not None:
        assert all(record.base_offset < end for record in got)
    assert got or start >= committed, f"nothing at {start} of {committed} offsets"


async def follow(
    reader: StreamReader, world: World, stream_id: int, out: list[RecordBatch]
) -> None:
    """Tail a stream from its start; go on where a trim allows."""
    position = 0
    while True:
        tail = reader.tail(stream_id, position, max_bytes=100)
        try:
            while True:
                out.append(await anext(tail))
        except errors.OffsetTrimmedError as error:
            check_trimmed(error, world, tail.position)
            position = error.start_offset
        finally:
            await tail.close()


def check_tailed(got: Sequence[RecordBatch], world: World, stream_id: int) -> None:
    """Check that what a tail gave is all there was, but for what was trimmed before it came."""
    history = world.streams[stream_id].records
    places = {record.base_offset: place for place, record in enumerate(history)}
    taken = [places[record.base_offset] for record in got]
    assert [history[place] for place in taken] == list(got)
    assert taken == sorted(set(taken)), f"stream {stream_id} came twice or out of order"
    missing = set(range(taken[0], taken[-1])) - set(taken) if taken else set()
    trimmed = world.streams[stream_id].start
    assert all(history[place].base_offset < trimmed for place in missing)


async def storm(place: Place, config: ReaderConfig, rng: random.Random) -> None:
    world = place.world
    world.is_relative = lambda object_id: object_id % 2 == 1
    world.create(STREAMS)
    world.commit(dict.fromkeys(range(STREAMS), 5))
    reader = place.reader(config)
    tailed: dict[int, list[RecordBatch]] = {stream_id: [] for stream_id in range(STREAMS)}
    tails = [asyncio.create_task(follow(reader, world, id_, out)) for id_, out in tailed.items()]

    async def read_many(own: random.Random) -> None:
        for _ in range(STEPS):
            await read_at_random(reader, world, own)
            await asyncio.sleep(0)

    async def change_many() -> None:
        for _ in range(STEPS):
            await change(world, rng)

    readers = [read_many(random.Random(rng.random())) for _ in range(4)]
    await asyncio.gather(change_many(), *readers)
    world.watch_is_broken = False
    world.commit(dict.fromkeys(range(STREAMS), 1))
    await until(
        lambda: (
            all(out and out[-1] == world.streams[id_].records[-1] for id_, out in tailed.items())
            or any(task.done() for task in tails)
        ),
        "end of all tails",
    )
    for task in tails:
        task.cancel()
    await asyncio.gather(*tails, return_exceptions=True)
    for stream_id, out in tailed.items():
        check_tailed(out, world, stream_id)
        assert out[-1] == world.streams[stream_id].records[-1]
    await reader.close()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", seeds(2))
async def test_readers_see_exactly_the_records_of_a_changing_world(seed: int, config: str) -> None:
    async with placed(seed) as place:
        await storm(place, CONFIGS[config], random.Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(19, slow=39, start=2))
async def test_readers_see_exactly_the_right_records_in_many_worlds(seed: int) -> None:
    async with placed(seed) as place:
        await storm(place, list(CONFIGS.values())[seed % 3], random.Random(seed))


async def test_iterating_reads_each_record_once_while_objects_are_replaced() -> None:
    async with placed() as place:
        world = place.world
        world.create(1)
        for _ in range(40):
            world.commit({0: 5})
        reader = place.reader(ReaderConfig(block_cache_bytes=2_000, readahead_bytes=200))
        got: list[RecordBatch] = []
        at = 0
        while at < 200:
            records = await reader.read(0, at, 200, max_bytes=120)
            got.extend(records)
            at = records[-1].end_offset
            if len(world.streams[0].pieces) > 12:
                world.compact(0, place.world.rng.randrange(10), 3)
        assert got == world.streams[0].records
        await reader.close()
