"""The upload pool: groups, their bounds, and writes that are refused or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from streammeta.brokers.rocketmq.cluster.upload_pool import PoolConfig, PoolWrite, UploadPool
from streammeta.client import OpenedStream, PutResult, ValueToPut
from streammeta.client.commits.effects import EffectsVerdict
from streammeta.client.errors import ObjectExpiredError, RejectedError, StreamFencedError
from streammeta.v1 import common_pb2
from tests.kit.fake_broker import Broker, broker
from tests.kit.waiting import until

NONE = common_pb2.ERROR_CODE_NONE
FENCED = common_pb2.ERROR_CODE_STREAM_FENCED
KEY_EXISTS = common_pb2.ERROR_CODE_KEY_EXIST
EXPIRED = common_pb2.ERROR_CODE_OBJECT_NOT_EXIST


class Pool(UploadPool):
    """A pool whose commits the test answers; `sent` has the streams of each."""

    def __init__(self, b: Broker, config: PoolConfig) -> None:
        client: Any = SimpleNamespace(session=b.session, store=b.store, controllers=b.client)
        super().__init__(client, config)
        self.sent: list[list[int]] = []
        self.errors: dict[int, common_pb2.ErrorCode.ValueType] = {}
        self.put_errors: dict[int, common_pb2.ErrorCode.ValueType] = {}
        self.whole: list[common_pb2.ErrorCode.ValueType | Exception] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def _commit(self, writes: Sequence[PoolWrite]) -> EffectsVerdict:
        ids = [write.stream.stream_id for write in writes]
        self.sent.append(ids)
        await self.may_answer.wait()
        if self.whole:
            whole = self.whole.pop(0)
            if isinstance(whole, Exception):
                raise whole
            return EffectsVerdict(whole)
        ranges = [self.errors.get(stream_id, NONE) for stream_id in ids]
        puts = [PutResult(self.put_errors.get(stream_id, NONE), stream_id) for stream_id in ids]
        failed = [code for code in (*ranges, *(put.error for put in puts)) if code != NONE]
        if not failed:
            return EffectsVerdict(NONE, put_results=puts)
        return EffectsVerdict(failed[0], range_errors=ranges, put_results=puts)


def a_write(stream_id: int, size: int = 10) -> PoolWrite:
    put = ValueToPut(key=f"k{stream_id}", value=b"v")
    return PoolWrite(OpenedStream(stream_id, 1, 0, 0), 0, b"x" * size, put, (1, 1))


async def outcomes(pool: UploadPool, writes: Sequence[PoolWrite]) -> list[Any]:
    return await asyncio.gather(*(pool.write(write) for write in writes), return_exceptions=True)


QUICK = PoolConfig(linger_s=0.01)


async def test_a_refused_write_leaves_its_group_and_the_others_are_committed() -> None:
    async with broker() as b:
        pool = Pool(b, QUICK)
        pool.errors, pool.put_errors = {2: FENCED}, {4: KEY_EXISTS}
        first, second, third, fourth = await outcomes(pool, [a_write(at) for at in (1, 2, 3, 4)])
        assert (first, third) == (PutResult(NONE, 1), PutResult(NONE, 3))
        assert isinstance(second, StreamFencedError)
        assert isinstance(fourth, RejectedError)
        assert pool.sent == [[1, 2, 3, 4], [1, 3]]
        await pool.close()


async def test_a_group_of_refused_writes_alone_is_not_sent_again() -> None:
    async with broker() as b:
        pool = Pool(b, QUICK)
        pool.errors = {1: FENCED, 2: FENCED}
        found = await outcomes(pool, [a_write(1), a_write(2)])
        assert [type(outcome) for outcome in found] == [StreamFencedError] * 2
        assert pool.sent == [[1, 2]]
        await pool.close()


async def test_an_object_that_expired_is_uploaded_again_a_few_times() -> None:
    async with broker() as b:
        pool = Pool(b, QUICK)
        pool.whole = [EXPIRED] * 3
        assert await pool.write(a_write(1)) == PutResult(NONE, 1)
        assert len(pool.sent) == 4
        pool.whole = [EXPIRED] * 9
        with pytest.raises(ObjectExpiredError):
            await pool.write(a_write(1))
        assert len(pool.sent) == 8
        await pool.close()


@pytest.mark.parametrize("failure", [FENCED, RuntimeError("a defect")])
async def test_a_group_that_fails_as_a_whole_is_not_repeated_and_ends_no_pool(
    failure: common_pb2.ErrorCode.ValueType | Exception,
) -> None:
    """Whether it is committed may be unknown: a repeat is the caller's."""
    async with broker() as b:
        pool = Pool(b, QUICK)
        pool.whole = [failure]
        found = await outcomes(pool, [a_write(1), a_write(2)])
        assert all(isinstance(outcome, Exception) for outcome in found)
        assert pool.sent == [[1, 2]]
        assert await pool.write(a_write(3)) == PutResult(NONE, 3)
        assert pool.held_bytes == 0
        await pool.close()


async def test_groups_have_a_size_and_take_the_oldest_writes_first() -> None:
    async with broker() as b:
        pool = Pool(b, PoolConfig(linger_s=0.01, group_bytes=25))
        found = await outcomes(pool, [a_write(at) for at in (5, 4, 3, 2)] + [a_write(1, 90)])
        assert found == [PutResult(NONE, at) for at in (5, 4, 3, 2, 1)]
        assert pool.sent == [[4, 5], [2, 3], [1]]
        await pool.close()


async def test_a_full_group_waits_for_no_linger() -> None:
    async with broker() as b:
        pool = Pool(b, PoolConfig(linger_s=3600, group_bytes=20))
        found = await outcomes(pool, [a_write(at) for at in (1, 2, 3, 4)])
        assert found == [PutResult(NONE, at) for at in (1, 2, 3, 4)]
        await pool.close()


async def test_the_pool_holds_no_more_than_its_bound_or_one_larger_write() -> None:
    async with broker() as b:
        pool = Pool(b, PoolConfig(linger_s=0.001, group_bytes=10, max_bytes=25))
        pool.may_answer.clear()
        writes = [asyncio.create_task(pool.write(a_write(at))) for at in range(5)]
        large = asyncio.create_task(pool.write(a_write(9, 100)))
        await until(lambda: bool(pool.sent), "the first commit")
        assert pool.held_bytes == 20
        pool.may_answer.set()
        await asyncio.gather(*writes, large)
        assert sorted(stream_id for ids in pool.sent for stream_id in ids) == [0, 1, 2, 3, 4, 9]
        assert pool.held_bytes == 0
        await pool.close()


async def test_writes_that_wait_end_with_the_pool() -> None:
    async with broker() as b:
        pool = Pool(b, PoolConfig(linger_s=0.001, group_bytes=10))
        pool.may_answer.clear()
        writes = [asyncio.create_task(pool.write(a_write(at))) for at in range(3)]
        await until(lambda: bool(pool.sent), "the first commit")
        await pool.close()
        done, pending = await asyncio.wait(writes, timeout=60)
        assert not pending
        assert all(task.cancelled() for task in done)


def test_bytes_become_records_of_as_many_offsets() -> None:
    write = PoolWrite(
        OpenedStream(7, 3, 0, 100), 100, b"abcdefg", ValueToPut(key="k", value=b"v"), (1, 1)
    )
    records = [(record.base_offset, record.count, record.payload) for record in write.records(3)]
    assert records == [(100, 3, b"abc"), (103, 3, b"def"), (106, 1, b"g")]
    assert write.end == 107
