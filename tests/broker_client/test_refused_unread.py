"""Calls that a controller's gRPC refuses unread, without a reason and a wait: they are repeated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from streammeta.client.controllers import methods
from streammeta.client.parts import ControllerClient
from streammeta.controller.grpc_server.limits import Limits
from streammeta.rpc import connections
from streammeta.rpc.failures import Reason, read_failure
from streammeta.rpc.leader_router import FailureKind, LeaderRouter
from streammeta.v1 import streams_pb2
from tests.kit.grpc_servers import served
from tests.kit.waiting import until

_CALLS = 40
_ATTEMPTS_MAX = 20
"""Attempts of one call, far below those of a tight loop."""
METHOD = methods.DESCRIBE_STREAMS
REQUEST = streams_pb2.DescribeStreamsRequest()


class Answering(grpc.GenericRpcHandler):
    """Answers every call by an empty message, once a coroutine has ended."""

    def __init__(self, wait: Callable[[], Awaitable[None]]) -> None:
        self._wait = wait

    def service(self, handler_call_details: Any) -> Any:
        async def answer(_: bytes, __: Any) -> bytes:
            await self._wait()
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[FailureKind]:
    """Give the failures that the client's calls are repeated for."""
    seen: list[FailureKind] = []
    failed = LeaderRouter.record_failure

    def noting(router: LeaderRouter, endpoint: str, kind: FailureKind, *more: Any) -> Any:
        seen.append(kind)
        return failed(router, endpoint, kind, *more)

    monkeypatch.setattr(LeaderRouter, "record_failure", noting)
    return seen


async def test_a_call_above_the_number_that_may_be_under_way_is_repeated_until_there_is_room(
    failures: list[FailureKind],
) -> None:
    has_room, arrived = asyncio.Event(), 0

    async def wait() -> None:
        nonlocal arrived
        arrived += 1
        await has_room.wait()

    async with (
        served(Answering(wait), limits=Limits(calls=2)) as endpoint,
        connections.client_channel(endpoint) as channel,
        ControllerClient([endpoint]) as client,
    ):
        call: Any = channel.unary_unary(METHOD.path)
        under_way = [asyncio.ensure_future(call(b"")) for _ in range(2)]
        await until(lambda: arrived == 2, "as many calls as may be")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"")
        failure = read_failure(refused.value)
        assert (failure.code, failure.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.BUSY,
        )
        repeated = asyncio.create_task(client.call(METHOD, REQUEST))
        await until(lambda: len(failures) >= 2, "a second refusal")
        has_room.set()
        assert await repeated == streams_pb2.DescribeStreamsResponse()
        await asyncio.gather(*under_way)
    assert set(failures) == {FailureKind.NOT_NOW}
    assert len(failures) < _ATTEMPTS_MAX


async def test_calls_that_a_busy_controller_has_not_begun_are_repeated_and_all_answered(
    failures: list[FailureKind],
) -> None:
    """Those beyond what may wait are cancelled; to the client their outcome is unknown."""
    few = Limits(waiting_some=2, waiting_most=4, begun_a_turn=1)

    async def hold_up() -> None:
        time.sleep(0.01)  # noqa: ASYNC251 - a loop that is busy

    async with (
        served(Answering(hold_up), limits=few) as endpoint,
        ControllerClient([endpoint]) as client,
    ):
        answers = await asyncio.gather(*(client.call(METHOD, REQUEST) for _ in range(_CALLS)))
    assert answers == [streams_pb2.DescribeStreamsResponse()] * _CALLS
    assert set(failures) == {FailureKind.UNREACHABLE}
    assert len(failures) < _ATTEMPTS_MAX * _CALLS
