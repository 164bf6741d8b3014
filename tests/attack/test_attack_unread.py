"""Answers that their callers do not read: gRPC holds them, so their bytes are bounded."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.grpc_server.server import new_server
from streammeta.controller.rpc.calls.interceptors import CallPipeline, unread_answers
from streammeta.controller.rpc.calls.memory_budget import MemoryBudget
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.v1 import kv_pb2
from tests.attack.direct_calls import AbortedError, DirectContext
from tests.attack.hostile import Target, ended, unread
from tests.kit.waiting import until
from tests.server.rpc_server import Rpcs, serving
from tests.trust.callers import CLUSTER, PLAIN_TEXT

_MIB = 1 << 20
_LIST = "/streammeta.v1.KVService/ListKVs"
_CALLS = 20
_AGE_MS = 300
_GET = "streammeta.v1.KVService.GetKVs"


@pytest.fixture
def answers() -> MemoryBudget:
    return unread_answers(8 * _MIB)


@pytest_asyncio.fixture
async def rpcs(answers: MemoryBudget) -> AsyncIterator[Rpcs]:
    async with serving(answers=answers) as leader:
        for index in range(3):
            item = kv_pb2.KVToPut(key=f"{index}", value=bytes(_MIB))
            await leader.ask(kv_pb2.PutKVsRequest(items=[item]))
        yield leader


async def test_unread_answers_are_refused_beyond_a_callers_share(
    rpcs: Rpcs, answers: MemoryBudget
) -> None:
    async with unread(Target(rpcs.endpoint), _LIST, _CALLS) as reader:
        await ended(reader, _CALLS - 1)  # all but the first, refused
        assert 3 * _MIB < answers.total < 4 * _MIB
        listed = await rpcs.ask(kv_pb2.ListKVsRequest())
        assert len(listed.entries) == 3
    await until(lambda: answers.total == 0, "the memory of a caller that has gone")


async def test_a_connection_whose_answers_are_not_read_ends_at_its_age(
    answers: MemoryBudget,
) -> None:
    """Nothing else ends it: gRPC can't take back an answer that waits for its caller."""
    entrance = CallPipeline(Authenticator(CLUSTER), answers=answers)

    async def listed(_: bytes, __: Any) -> kv_pb2.GetKVsResponse:
        return kv_pb2.GetKVsResponse(results=[kv_pb2.KVResult(value=bytes(_MIB))])

    server = new_server(connection_age_ms=_AGE_MS)
    server.add_generic_rpc_handlers([_OneMethod(entrance.wrap(_GET, listed))])
    port = server.listen("127.0.0.1:0")
    await server.start()
    try:
        async with unread(Target(f"127.0.0.1:{port}"), f"/{_GET}", 1) as reader:
            await until(lambda: answers.total > _MIB, "an answer that is not read")
            while await reader.read(1 << 16):
                pass
            await until(lambda: answers.total == 0, "its memory")
    finally:
        await server.stop(None)


class _OneMethod(grpc.GenericRpcHandler):
    def __init__(self, call: Any) -> None:
        self._call = call

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._call)


async def test_answers_that_are_read_are_counted_no_more(rpcs: Rpcs, answers: MemoryBudget) -> None:
    for _ in range(_CALLS):
        await rpcs.ask(kv_pb2.ListKVsRequest())
    await until(lambda: answers.total == 0, "the memory of answers that were read")


class Unread(DirectContext):
    """A call whose caller reads nothing."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Keep quiet: the answer is not sent."""


async def test_answers_that_are_made_at_the_same_time_are_refused_too(
    answers: MemoryBudget,
) -> None:
    begun, goes_on = 0, asyncio.Event()

    async def listed(_: bytes, __: Any) -> kv_pb2.GetKVsResponse:
        nonlocal begun
        begun += 1
        await goes_on.wait()
        return kv_pb2.GetKVsResponse(results=[kv_pb2.KVResult(value=bytes(3 * _MIB))])

    entrance = CallPipeline(Authenticator(CLUSTER), answers=answers)
    call: Any = entrance.wrap(_GET, listed)
    contexts = [Unread(PLAIN_TEXT) for _ in range(3)]
    calls = [asyncio.ensure_future(call(b"", context)) for context in contexts]
    await until(lambda: begun == 3, "calls that have begun")
    goes_on.set()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(end) for end in ends] == [bytes, AbortedError, AbortedError]
    assert [context.code for context in contexts] == ["OK", *["RESOURCE_EXHAUSTED"] * 2]
