"""The split rule: big streams get objects of their own, the rest shares one; ids are fresh."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streammeta.client.controllers.methods import PREPARE_OBJECTS
from streammeta.client.errors import InvalidRequestError, NodeEpochExpiredError
from streammeta.client.parts import BrokerSession
from streammeta.client.writing import object_encoder
from streammeta.client.writing.object_encoder import encode_object
from streammeta.client.writing.object_ids import STOCK_MAX, STOCK_MIN, ObjectIds
from streammeta.client.writing.record_buffer import (
    UNKNOWN_TIME,
    StreamRun,
    WriterStream,
    plan_objects,
)
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.record import RecordBatch
from tests.kit.built_objects import ObjectBuilder
from tests.kit.fake_broker import broker

SPLIT = 100
EPOCH = 3

MIB = 1024 * 1024


def run_of(stream_id: int, sizes: list[int], counts: list[int] | None = None) -> StreamRun:
    run = StreamRun(WriterStream(stream_id, EPOCH, 7 * stream_id, 0))
    for i, size in enumerate(sizes):
        run.add(bytes([i % 256]) * size, 1 if counts is None else counts[i])
    return run


def records_of(stream_id: int, sizes: list[int], counts: list[int]) -> list[RecordBatch]:
    records: list[RecordBatch] = []
    base = 7 * stream_id
    for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        records.append(RecordBatch(stream_id, EPOCH, base, count, bytes([i % 256]) * size))
        base += count
    return records


def test_a_stream_of_exactly_the_split_size_stands_alone() -> None:
    runs = [run_of(1, [99]), run_of(2, [50, 50]), run_of(3, [1])]
    plans = plan_objects(runs, SPLIT)
    assert [(plan.shared, [run.stream.stream_id for run in plan.runs]) for plan in plans] == [
        (True, [1, 3]),
        (False, [2]),
    ]


SIZES = st.integers(0, 60) | st.integers(0, 60) | st.just(66_000)
STREAMS = st.dictionaries(
    st.integers(0, 50),
    st.lists(st.tuples(SIZES, st.integers(1, 3)), min_size=1, max_size=6),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60)
@given(STREAMS, st.sampled_from([1, 64, 100, 128_000]), st.sampled_from([SPLIT, 1 << 30]))
@example({1: [(30, 1)], 2: [(40, 1)] * 4}, 64, 1 << 30)
@example({1: [(30, 1)], 2: [(30, 1)], 3: [(10, 1)] * 4}, 64, 1 << 30)
def test_objects_have_the_bytes_that_the_format_gives_for_their_records(
    streams: dict[int, list[tuple[int, int]]], block_bytes: int, split_bytes: int
) -> None:
    """The same cuts, also where a block's payload count outlives the end of a stream."""
    columns = {
        stream_id: ([size for size, _ in rows], [count for _, count in rows])
        for stream_id, rows in streams.items()
    }
    runs = [run_of(stream_id, *column) for stream_id, column in columns.items()]
    plans = plan_objects(runs, split_bytes)
    assert sum(plan.shared for plan in plans) <= 1
    assert not (len(streams) == 1 and plans[0].shared)
    found: list[int] = []
    for plan in plans:
        content = encode_object(plan, block_bytes)
        builder = ObjectBuilder(block_bytes)
        for run in plan.runs:
            stream_id = run.stream.stream_id
            found.append(stream_id)
            wanted = records_of(stream_id, *columns[stream_id])
            builder.write(wanted)
            assert content.records_of(run) == wanted
            assert not run.segments, "the object and the run hold the same records"
        assert bytes(content.data) == builder.finish().data
        checksum = ObjectChecksum()
        checksum.update(bytes(content.data))
        assert content.crc32c == checksum.value
        if not plan.shared and len(streams) > 1:
            assert plan.runs[0].payload_bytes >= split_bytes
    assert sorted(found) == sorted(streams), "every stream is in exactly one object"


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(
            st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3
        ),
        min_size=1,
        max_size=3,
    )
)
def test_time_bounds_hold_or_are_unknown(streams: list[list[tuple[int, int] | None]]) -> None:
    runs = []
    for stream_id, times in enumerate(streams):
        run = run_of(stream_id, [])
        for time_ in times:
            run.cover((UNKNOWN_TIME,) * 2 if time_ is None else (time_[0], time_[0] + time_[1]))
            run.add(b"x", 1)
        runs.append(run)
    (plan,) = plan_objects(runs, SPLIT)
    content = encode_object(plan, 64)
    every = [time_ for times in streams for time_ in times]
    known = [(span[0], span[0] + span[1]) for span in every if span is not None]
    wanted = (UNKNOWN_TIME, UNKNOWN_TIME)
    if len(known) == len(every):
        wanted = (min(low for low, _ in known), max(high for _, high in known))
    assert (content.min_timestamp_ms, content.max_timestamp_ms) == wanted


def test_memory_is_released_while_records_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object may be as large as a batch: it must not be in memory twice."""
    runs = [run_of(stream_id, [100_000] * 10) for stream_id in range(8)]
    left = [sum(run.encoded_bytes for run in runs)]

    def note() -> None:
        left.append(sum(len(segment) for run in runs for segment in run.segments))

    monkeypatch.setattr(object_encoder, "give_back", note)
    block_bytes = 200_000
    encode_object(plan_objects(runs, 1 << 30)[0], block_bytes)

    moved = [before - after for before, after in itertools.pairwise([*left, 0])]
    assert max(moved) < MIB + 2 * block_bytes


async def test_the_first_outcome_of_a_run_is_everybodys() -> None:

    loop = asyncio.get_running_loop()
    good, bad = run_of(1, [1, 1]), run_of(2, [1])
    acks = [loop.create_future() for _ in range(4)]
    good.add_ack(acks[0], 7)
    good.settle(None)
    good.settle(ValueError("too late"))
    good.answer()
    good.add_ack(acks[1], 8)
    bad.add_ack(acks[2], 14)
    bad.settle(ValueError("first"))
    bad.settle(ValueError("second"))
    bad.answer()
    bad.add_ack(acks[3], 15)
    assert [acks[0].result(), acks[1].result()] == [7, 8]
    assert [str(ack.exception()) for ack in acks[2:]] == ["first", "first"]


PREPARES = "PrepareObjects"


async def test_ids_ascend_in_the_order_of_the_calls_and_few_calls_bring_them() -> None:
    seed = 5
    rng = random.Random(seed)
    async with broker() as b:
        ids = ObjectIds(b.session, 600.0)
        counts = [rng.choice([1, 1, 2, 30]) for _ in range(500)]
        taken = await asyncio.gather(*(ids.take(count) for count in counts))
        assert [len(batch.ids) for batch in taken] == counts
        every = [object_id for batch in taken for object_id in batch.ids]
        assert every == sorted(set(every)), f"seed {seed}"
        assert b.cluster.map.prepared.issuperset(every)
        assert b.cluster.calls[PREPARES] <= 16, "the stock does not grow"
        assert b.cluster.map.next_object_id - len(every) <= STOCK_MAX


async def test_more_ids_than_one_call_may_ask_for() -> None:
    async with broker() as b:
        ids = ObjectIds(b.session, 600.0)
        taken = await ids.take(20_001)
        assert taken.ids == tuple(range(20_001))
        assert max(request.count for request in b.cluster.requests[PREPARES]) == 10_000


async def test_what_may_have_expired_is_not_given_out() -> None:
    now = [0.0]
    async with broker() as b:
        ids = ObjectIds(b.session, 600.0, clock=lambda: now[0])
        assert (await ids.take(1)).ids == (0,)
        now[0] = 299.0
        assert (await ids.take(1)).ids == (1,)
        now[0] = 300.0
        assert (await ids.take(1)).ids == (STOCK_MIN,)


async def test_discarded_ids_are_not_given_out() -> None:
    async with broker() as b:
        ids = ObjectIds(b.session, 600.0)
        await ids.take(3)
        ids.discard()
        assert (await ids.take(2)).ids == (STOCK_MIN, STOCK_MIN + 1)


async def test_a_discarded_stock_of_ids_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker() as b:
        ids = ObjectIds(b.session, 600.0)
        await ids.take(3)
        call = b.session.client.call
        calls = []

        async def discard_first(*args: Any) -> Any:
            answer = await call(*args)
            calls.append(args)
            if len(calls) == 1:
                ids.discard()
            return answer

        monkeypatch.setattr(b.session.client, "call", discard_first)
        taken = (await ids.take(STOCK_MIN + 1)).ids
        assert taken == tuple(range(STOCK_MIN, 2 * STOCK_MIN + 1))
        assert len(calls) == 2


async def test_a_call_that_fails_leaves_the_stock_as_it_was() -> None:
    async with broker() as b:
        ids = ObjectIds(b.session, 600.0)
        await ids.take(STOCK_MIN - 2)
        b.cluster.fail_next(PREPARE_OBJECTS, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        with pytest.raises(InvalidRequestError):
            await ids.take(3)
        assert (await ids.take(2)).ids == (STOCK_MIN - 2, STOCK_MIN - 1)
        await BrokerSession.open(b.client, 1000, 2)
        with pytest.raises(NodeEpochExpiredError, match="preparing"):
            await ids.take(1)
