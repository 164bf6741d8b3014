"""Answers that their callers do not read: gRPC holds them, so their bytes are bounded."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from streammeta.controller.rpc.entrance import LARGE_ANSWERS, unread_answers
from streammeta.controller.rpc.memory_budget import MemoryBudget
from streammeta.controller.trust.method_rules import RULES
from streammeta.v1 import kv_pb2
from tests.attack.hostile import Target, ended, unread
from tests.kit.fake_broker import until
from tests.server.rpc_server import Rpcs, serving

_MIB = 1 << 20
_LIST = "/streammeta.v1.KVService/ListKVs"
_CALLS = 20


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


async def test_answers_that_are_read_are_counted_no_more(rpcs: Rpcs, answers: MemoryBudget) -> None:
    for _ in range(_CALLS):
        await rpcs.ask(kv_pb2.ListKVsRequest())
    await until(lambda: answers.total == 0, "the memory of answers that were read")


def test_what_is_counted_is_asked_for_by_methods_there_are() -> None:
    assert set(RULES) >= LARGE_ANSWERS
