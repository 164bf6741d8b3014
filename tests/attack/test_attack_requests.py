"""Floods of large requests: their bytes are bounded, and small calls go on meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.grpc_server.limits import REQUEST_BYTES_MAX
from streammeta.controller.rpc.calls.memory_budget import MemoryBudget
from streammeta.rpc.failures import Reason, read_failure
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, objects_pb2
from tests.kit.waiting import until
from tests.server.rpc_server import NODE, Rpcs, serving

_MIB = 1 << 20
_PIPELINE = "/streammeta.v1.ObjectService/CommitPipeline"


@pytest.fixture
def memory() -> MemoryBudget:
    return MemoryBudget(8 * _MIB)


@pytest_asyncio.fixture
async def rpcs(memory: MemoryBudget) -> AsyncIterator[Rpcs]:
    async with serving(memory=memory) as leader:
        yield leader


def put_of(size: int, key: str) -> kv_pb2.PutKVsRequest:
    return kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key=key, value=bytes(size))])


async def test_large_requests_beyond_a_callers_share_are_refused_for_now(
    rpcs: Rpcs, memory: MemoryBudget
) -> None:
    await rpcs.register()
    rpcs.log.is_held = True  # nothing is answered
    puts = [asyncio.create_task(rpcs.ask(put_of(_MIB, f"{index}"))) for index in range(20)]
    await until(lambda: sum(put.done() for put in puts) >= 19, "refusals")
    assert memory.total <= 2 * _MIB + 100
    failures = [read_failure(put.exception()) for put in puts if put.done()]  # type: ignore[arg-type]
    assert {failure.reason for failure in failures} == {Reason.BUSY}
    assert all(failure.retry_after_s > 0 for failure in failures)
    beat = asyncio.create_task(rpcs.ask(nodes_pb2.HeartbeatRequest(node=NODE)))
    rpcs.log.release()
    assert (await beat).error == common_pb2.ERROR_CODE_NONE
    await until(lambda: all(put.done() for put in puts), "the rest")
    await until(lambda: memory.total == 0, "memory given back")


async def test_heartbeats_pass_when_requests_have_taken_all_memory(
    rpcs: Rpcs, memory: MemoryBudget
) -> None:
    await rpcs.register()
    await rpcs.ask(nodes_pb2.HeartbeatRequest(node=NODE))
    memory.take("greedy", 100 * _MIB)
    beat = await rpcs.ask(nodes_pb2.HeartbeatRequest(node=NODE))
    assert beat.error == common_pb2.ERROR_CODE_NONE
    _, reason, _ = await rpcs.refusal("KVService/PutKVs", put_of(_MIB, "large"))
    assert reason == Reason.BUSY
    memory.give_back("greedy", 100 * _MIB)
    assert not (await rpcs.ask(put_of(_MIB, "large"))).results[0].error


def large_message(sequence: int) -> bytes:
    """A message of a pipeline of 1 MiB, whose one commit is of a stream that does not exist."""
    ranges = objects_pb2.RangeColumns(stream_id=[9], start_offset=[0], end_offset=[1])
    commit = objects_pb2.CommitStreamSetObjectRequest(
        request_id="r" * _MIB,
        node=NODE,
        object_id=5,
        object_size=1,
        ranges=ranges,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
    )
    message = objects_pb2.CommitPipelineRequest(sequence=sequence, commits=[commit])
    return message.SerializeToString()


async def test_pipelines_are_read_on_only_while_there_is_memory(
    rpcs: Rpcs, memory: MemoryBudget
) -> None:
    await rpcs.register()
    memory.take("greedy", 100 * _MIB)
    calls: list[Any] = [rpcs.channel.stream_stream(_PIPELINE)() for _ in range(10)]

    async def send(call: Any) -> None:
        for sequence in range(3):
            await call.write(large_message(sequence))
        await call.done_writing()

    sending = [asyncio.create_task(send(call)) for call in calls]
    for _ in range(20):
        await rpcs.ask(nodes_pb2.HeartbeatRequest(node=NODE))
    assert memory.total == 100 * _MIB  # not one was read
    memory.give_back("greedy", 100 * _MIB)
    largest = 0
    for call in calls:
        while await call.read() is not grpc.aio.EOF:
            largest = max(largest, memory.total)
    await asyncio.gather(*sending)
    assert largest <= 2 * _MIB + 10 * (_MIB + 1_000)  # a share, and a message of each pipeline
    await until(lambda: memory.total == 0, "memory given back")


def padded(message: objects_pb2.CommitPipelineRequest, size: int) -> bytes:
    """Return a message of so many bytes; a field that no release knows fills it."""
    known = message.SerializeToString()
    tag, length_bytes = b"\xfa\x7f", 4  # field 2047, bytes
    left = size - len(known) - len(tag) - length_bytes
    length = bytes(left >> 7 * part & 0x7F | 0x80 * (part < 3) for part in range(length_bytes))
    return known + tag + length + bytes(left)


async def test_a_message_of_a_pipeline_may_be_as_large_as_a_request_and_no_larger() -> None:
    held: list[int] = []
    memory = MemoryBudget(64 * _MIB, held.append)
    async with serving(memory=memory) as rpcs:
        (stream_id,), first = await rpcs.begin(1, 3)

        def message(number: int, size: int) -> bytes:
            commit = objects_pb2.CommitStreamSetObjectRequest(
                node=NODE,
                object_id=first + number,
                object_size=1,
                ranges=objects_pb2.RangeColumns(
                    stream_id=[stream_id], start_offset=[number], end_offset=[number + 1]
                ),
                on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
            )
            sent = objects_pb2.CommitPipelineRequest(sequence=number, commits=[commit])
            made = padded(sent, size)
            assert len(made) == size
            return made

        call: Any = rpcs.channel.stream_stream(_PIPELINE)()
        for number, size in enumerate((REQUEST_BYTES_MAX - 1, REQUEST_BYTES_MAX)):
            await call.write(message(number, size))
            answer = objects_pb2.CommitPipelineResponse.FromString(await call.read())
            assert [commit.error for commit in answer.commits] == [common_pb2.ERROR_CODE_NONE]
        state = rpcs.log.next_offset, rpcs.controller.cluster_metadata.state_hash()
        await call.write(message(2, REQUEST_BYTES_MAX + 1))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        failure = read_failure(raised.value)
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (failure.code, failure.reason) == (code, "LIMIT_EXCEEDED")
        assert (rpcs.log.next_offset, rpcs.controller.cluster_metadata.state_hash()) == state
        assert sorted(held)[-2:] == [REQUEST_BYTES_MAX - 1, REQUEST_BYTES_MAX]
        await until(lambda: memory.total == 0, "memory given back")
        again = await rpcs.ask(nodes_pb2.HeartbeatRequest(node=NODE))
        assert again.error == common_pb2.ERROR_CODE_NONE
