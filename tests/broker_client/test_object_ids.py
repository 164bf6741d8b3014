"""Ids come ascending, few calls bring many, and none is given out that may have expired."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from streammeta.client import BrokerSession, InvalidRequestError, NodeEpochExpiredError
from streammeta.client.methods import PREPARE_OBJECTS
from streammeta.client.object_ids import STOCK_MAX, STOCK_MIN, ObjectIds
from tests.kit.fake_broker import broker

PREPARES = "PrepareObjects"


async def test_ids_ascend_in_the_order_of_the_calls_and_few_calls_bring_them() -> None:
    seed = 5
    rng = random.Random(seed)
    async with broker() as b:
        ids = ObjectIds(b.session, 600.0)
        counts = [rng.choice([1, 1, 2, 30]) for _ in range(500)]
        taken = await asyncio.gather(*(ids.take(count) for count in counts))
        assert [len(one.ids) for one in taken] == counts
        every = [object_id for one in taken for object_id in one.ids]
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
