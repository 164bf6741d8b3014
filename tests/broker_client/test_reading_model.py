"""Whatever is committed, compacted and trimmed meanwhile: a read gives exactly the right records.

Seeded worlds change while many readers read them. A read may be behind on trims for a moment, but
never has a gap, a wrong byte, a record out of order, or nothing where something was committed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from streammeta.client import OffsetTrimmedError, ReaderConfig, StreamReader
from streammeta.storage.object_format.record import RecordBatch
from tests.kit.fake_broker import until
from tests.kit.reader_world import Place, World, placed

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


def check_trimmed(error: OffsetTrimmedError, world: World, start: int) -> None:
    """Hold a refusal against what was trimmed."""
    assert start < error.start_offset <= world.streams[error.stream_id].start


async def change(world: World, rng: random.Random) -> None:
    """Change the world in one way."""
    stream_id = rng.randrange(STREAMS)
    stream = world.streams[stream_id]
    match rng.choices(["commit", "compact", "trim", "lose", "break"], [10, 5, 2, 0.5, 0.5])[0]:
        case "commit":
            chosen = rng.sample(range(STREAMS), rng.randint(1, STREAMS))
            world.commit({each: rng.randint(1, 6) for each in chosen}, span=rng.randint(1, 3))
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
    except OffsetTrimmedError as error:
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
        except OffsetTrimmedError as error:
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
    world.create(STREAMS)
    world.commit(dict.fromkeys(range(STREAMS), 5))
    reader = place.reader(config)
    tailed: dict[int, list[RecordBatch]] = {each: [] for each in range(STREAMS)}
    tails = [asyncio.create_task(follow(reader, world, each, out)) for each, out in tailed.items()]

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
            all(out and out[-1] == world.streams[each].records[-1] for each, out in tailed.items())
            or any(task.done() for task in tails)
        ),
        "end of all tails",
    )
    for task in tails:
        task.cancel()
    await asyncio.gather(*tails, return_exceptions=True)
    for each, out in tailed.items():
        check_tailed(out, world, each)
        assert out[-1] == world.streams[each].records[-1]
    await reader.close()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(2))
async def test_readers_see_exactly_the_right_records_in_a_changing_world(
    seed: int, config: str
) -> None:
    async with placed(seed) as place:
        await storm(place, CONFIGS[config], random.Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 60))
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
