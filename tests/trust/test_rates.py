"""Rates and memory of requests: bursts, shares, waits, and what is never limited."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.controller.errors import BusyError, RateExceededError
from streammeta.controller.metadata.registries.limits import MetadataLimits
from streammeta.controller.rpc.calls.memory_budget import RETRY_AFTER_MS, MemoryBudget
from streammeta.controller.trust import rates as module
from streammeta.controller.trust.authenticator import ANONYMOUS, Caller
from streammeta.controller.trust.policy import Policy, Quota
from streammeta.controller.trust.rates import BURST_S, ROWS_A_REQUEST, Rates, rows_of
from streammeta.rpc.failures import RpcFailure, read_failure
from streammeta.tls.identity import Principal, Role
from streammeta.v1 import kv_pb2, nodes_pb2, objects_pb2
from tests.kit.certificates import Authority
from tests.server.rpc_server import NODE
from tests.trust.trusted_server import trusting


def caller(name: str, **quota: int) -> Caller:
    policy = Policy(quotas={"broker/*": Quota(**quota)})
    return Caller(Principal("test", Role.BROKER, name), frozenset((Role.BROKER,)), policy=policy)


def test_a_burst_passes_and_then_as_many_as_come_in_time() -> None:
    rates, one = Rates(), caller("1", requests_per_s=2)
    for _ in range(int(2 * BURST_S)):
        rates.take(one, 0, 100.0)
    with pytest.raises(RateExceededError) as refused:
        rates.take(one, 0, 100.0)
    wait_s = refused.value.retry_after_ms / 1000
    assert (refused.value.quota, refused.value.limit, wait_s) == ("requests_per_s", 2, 0.5)
    rates.take(caller("2", requests_per_s=2), 0, 100.0)
    rates.take(one, 0, 100.0 + wait_s)
    with pytest.raises(RateExceededError):
        rates.take(one, 0, 100.0 + wait_s)


def test_one_large_request_passes_and_is_waited_for() -> None:
    rates, one = Rates(), caller("1", rows_per_s=1_000)
    assert rows_of(32 * 50) == ROWS_A_REQUEST + 50
    rates.take(one, 32 * 99_700, 0.0)  # ten times the bucket
    for now in (0.0, 89.9):
        with pytest.raises(RateExceededError, match="rows_per_s"):
            rates.take(one, 0, now)
    rates.take(one, 0, 90.1)


def test_a_refused_request_takes_nothing_and_another_limit_begins_anew() -> None:
    rates, one = Rates(), caller("1", requests_per_s=1, rows_per_s=100)
    rates.take(one, 0, 0.0)
    rates.take(one, 32 * 1_000, 0.0)
    for _ in range(30):
        with pytest.raises(RateExceededError, match="rows_per_s"):
            rates.take(one, 0, 0.0)
    rates.take(caller("1", requests_per_s=1), 0, 0.0)
    rates.take(caller("1", requests_per_s=1, rows_per_s=101), 0, 0.0)


def test_nobody_is_limited_in_plain_text_or_without_a_quota() -> None:
    rates = Rates()
    for asker in (ANONYMOUS, caller("1"), Caller(Principal("test", Role.ADMIN, "a"))):
        for _ in range(1_000):
            rates.take(asker, 1 << 20, 0.0)


def test_what_is_known_of_principals_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUCKETS_MAX", 3)
    rates = Rates()
    for number in range(20):
        rates.take(caller(str(number), requests_per_s=1), 0, 0.0)
        assert len(rates._buckets) <= 3


async def test_calls_are_refused_with_the_wait_and_heartbeats_and_others_pass(
    tmp_path: Path,
) -> None:
    async with trusting(Authority(tmp_path, "ours")) as server:
        broker, admin = await server.by("broker/1000"), await server.by("admin/root")
        await broker.register()
        server.authenticator.use_policy(Policy(quotas={"broker/1000": Quota(rows_per_s=1)}))
        get = kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(key="k")])
        await broker.ask(get)
        code, reason, metadata = await broker.refusal("KVService/GetKVs", get)
        assert (code, reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert (metadata["quota"], metadata["limit"]) == ("rows_per_s", "1")
        assert not (await broker.ask(nodes_pb2.HeartbeatRequest(node=NODE))).error
        await admin.ask(get)


async def test_a_rate_says_when_to_come_again_and_a_count_does_not(tmp_path: Path) -> None:
    async with trusting(Authority(tmp_path, "ours")) as server:
        broker = await server.by("broker/1000")

        async def refused(key: str) -> RpcFailure:
            request = kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key=key)])
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await broker.ask(request)
            failure = read_failure(raised.value)
            assert failure.reason == "QUOTA_EXCEEDED"
            return failure

        await broker.ask(kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key="a")]))
        server.controller._limits = MetadataLimits(kv_keys=1)
        count = await refused("b")
        assert (count.metadata, count.retry_after_s) == (
            {"quota": "kv_keys", "limit": "1", "used": "1"},
            0.0,
        )
        server.authenticator.use_policy(Policy(quotas={"broker/1000": Quota(rows_per_s=1)}))
        await broker.ask(kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(key="a")]))
        rate = await refused("c")
        assert rate.metadata["quota"] == "rows_per_s"
        assert rate.retry_after_s > 0


async def test_a_pipeline_is_slowed_and_not_refused(tmp_path: Path) -> None:
    async with trusting(Authority(tmp_path, "ours")) as server:
        server.authenticator.use_policy(Policy(quotas={"broker/*": Quota(requests_per_s=20)}))
        broker = await server.by("broker/1000")
        call: Any = broker.channel.stream_stream("/streammeta.v1.ObjectService/CommitPipeline")()
        began = asyncio.get_running_loop().time()
        for sequence in range(1, 207):
            message = objects_pb2.CommitPipelineRequest(sequence=sequence)
            await call.write(message.SerializeToString())
            assert await call.read()
        assert asyncio.get_running_loop().time() - began > 0.2  # what 20 a second take for 6 more
        call.cancel()


def test_a_caller_has_a_fourth_and_all_together_have_the_whole() -> None:
    memory = MemoryBudget(400)
    memory.require("greedy", 60)
    memory.require("greedy", 40)
    with pytest.raises(BusyError, match=r"greedy.*100") as refused:
        memory.require("greedy", 1)
    assert refused.value.retry_after_ms == RETRY_AFTER_MS
    for caller in "abc":
        memory.require(caller, 100)
    with pytest.raises(BusyError, match="400"):
        memory.require("late", 1)
    assert memory.total == 400
    memory.give_back("a", 100)
    memory.require("late", 100)


def test_one_request_alone_may_be_larger_than_its_share() -> None:
    memory = MemoryBudget(400)
    memory.require("a", 900)
    with pytest.raises(BusyError):
        memory.require("b", 1)
    memory.give_back("a", 900)
    memory.require("b", 10)
    memory.require("a", 300)
    assert memory.total == 310


async def test_a_reader_waits_while_its_caller_or_all_hold_too_much() -> None:
    memory = MemoryBudget(400)
    await memory.room("a")
    memory.take("a", 150)  # a message is as large as it is
    waiting = asyncio.create_task(memory.room("a"))
    await memory.room("b")
    memory.take("b", 250)
    other = asyncio.create_task(memory.room("c"))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert not other.done()
    memory.give_back("a", 60)
    await asyncio.wait_for(asyncio.gather(waiting, other), 60)


async def test_what_is_given_back_wakes_all_who_wait() -> None:
    memory = MemoryBudget(4)
    memory.take("a", 4)
    waiting = [asyncio.create_task(memory.room(f"b{index}")) for index in range(5)]
    await asyncio.sleep(0)
    memory.give_back("a", 4)
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
