"""Calls that ask for more than one answer may hold, and answers that their callers do not read.

The answer's budget is a few MiB whatever is asked; a caller goes on by page or behind the end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.grpc_server.server import new_server
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answer_budget import ANSWER_BYTES
from streammeta.controller.metadata.tables.values import NodeIdentity, RangeColumns, column
from streammeta.controller.rpc.calls.interceptors import CallPipeline, unread_answers
from streammeta.controller.rpc.calls.memory_budget import MemoryBudget
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.attack.direct_calls import AbortedError, DirectContext
from tests.attack.hostile import Target, ended, unread
from tests.kit.grpc_servers import listening
from tests.kit.waiting import until
from tests.server.rpc_server import NODE, Rpcs, serving
from tests.trust.trusted_server import CLUSTER, PLAIN_TEXT

_MIB = 1 << 20


def refused(field: str) -> tuple[str, str, dict[str, str]]:
    limit = {"field": field, "limit": str(ANSWER_BYTES)}
    return "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED", limit


@pytest_asyncio.fixture
async def rpcs() -> AsyncIterator[Rpcs]:
    async with serving() as leader:
        yield leader


async def put_large_values(rpcs: Rpcs, count: int) -> list[str]:
    keys = [f"key-{index:02d}" for index in range(count)]
    for key in keys:
        put = kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key=key, value=bytes(_MIB))])
        await rpcs.ask(put)
    return keys


async def all_pages(rpcs: Rpcs, request: Any, items: Callable[[Any], Any]) -> tuple[list[Any], int]:
    """Ask page after page; return the items, and the size of the largest answer in bytes."""
    found: list[Any] = []
    largest = 0
    while True:
        answer = await rpcs.ask(request)
        largest = max(largest, answer.ByteSize())
        found += items(answer)
        if not answer.next_page_token:
            return found, largest
        request.page.page_token = answer.next_page_token


async def test_one_large_value_asked_for_thousands_of_times_is_refused_or_cut_off(
    rpcs: Rpcs,
) -> None:
    (key,) = await put_large_values(rpcs, 1)
    request = kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(key=key)] * 3_000)
    assert await rpcs.refusal("KVService/GetKVs", request) == refused("keys")
    request.may_stop = True
    answer = await rpcs.ask(request)
    assert [len(result.value) for result in answer.results] == [_MIB] * 3
    assert answer.ByteSize() <= ANSWER_BYTES


async def test_large_values_are_listed_in_pages_of_a_few(rpcs: Rpcs) -> None:
    keys = await put_large_values(rpcs, 10)
    request = kv_pb2.ListKVsRequest()
    request.page.page_size = 10_000
    found, largest = await all_pages(rpcs, request, lambda answer: answer.entries)
    assert [object_.key for object_ in found] == keys
    assert largest <= ANSWER_BYTES
    request = kv_pb2.ListKVsRequest(keys_only=True)
    assert [entry.key for entry in (await rpcs.ask(request)).entries] == keys


async def test_long_names_of_namespaces_are_listed_in_pages(rpcs: Rpcs) -> None:
    names = [f"{index:05d}".ljust(1_024, "n") for index in range(5_000)]
    for first in range(0, len(names), 1_000):
        items = [kv_pb2.KVToPut(namespace=n, key="k") for n in names[first : first + 1_000]]
        await rpcs.ask(kv_pb2.PutKVsRequest(items=items))
    request = kv_pb2.ListKVsRequest(namespaces=True)
    request.page.page_size = 10_000
    found, largest = await all_pages(rpcs, request, lambda answer: answer.namespace_names)
    assert found == names
    assert largest <= ANSWER_BYTES


async def test_values_in_the_way_and_deleted_values_are_not_sent_back_without_bound(
    rpcs: Rpcs,
) -> None:
    keys = await put_large_values(rpcs, 6)
    put = kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key=key) for key in (*keys, "new")])
    assert await rpcs.refusal("KVService/PutKVs", put) == refused("items")
    delete = kv_pb2.DeleteKVsRequest(keys=[kv_pb2.KVKey(key=key) for key in keys])
    assert await rpcs.refusal("KVService/DeleteKVs", delete) == refused("keys")
    listed = (await rpcs.ask(kv_pb2.ListKVsRequest(keys_only=True))).entries
    assert [object_.key for object_ in listed] == keys
    for part in (keys[:3], keys[3:]):
        delete = kv_pb2.DeleteKVsRequest(keys=[kv_pb2.KVKey(key=key) for key in part])
        assert [result.error for result in (await rpcs.ask(delete)).results] == [0] * 3


async def test_thousands_of_queries_of_a_long_stream_are_refused_or_cut_off(rpcs: Rpcs) -> None:
    (stream_id,), first = await rpcs.begin(streams=1, objects=1_000)
    commits = requests.CommitUploads(
        node=NodeIdentity(NODE.node_id, NODE.node_epoch),
        object_id=column(range(first, first + 1_000)),
        object_size=column([1] * 1_000),
        range_count=column([1] * 1_000),
        ranges=RangeColumns(
            stream_id=column([stream_id] * 1_000),
            start_offset=column(range(1_000)),
            end_offset=column(range(1, 1_001)),
        ),
    )
    await rpcs.controller.write(commits)
    query = objects_pb2.ObjectQuery(stream_id=stream_id, limit=10_000)
    request = objects_pb2.GetObjectsRequest(queries=[query] * 10_000)
    assert await rpcs.refusal("ObjectService/GetObjects", request) == refused("queries")
    request.may_stop = True
    answer = await rpcs.ask(request)
    assert answer.ByteSize() <= ANSWER_BYTES
    assert 1 < len(answer.results) < 100
    assert {len(result.objects) for result in answer.results} == {1_000}


async def test_many_small_queries_are_answered_by_one_call(rpcs: Rpcs) -> None:
    query = objects_pb2.ObjectQuery(stream_id=77)
    request = objects_pb2.GetObjectsRequest(queries=[query] * 10_000)
    assert len((await rpcs.ask(request)).results) == 10_000


async def test_many_nodes_with_long_configurations_are_described_in_pages(rpcs: Rpcs) -> None:
    wal_config = "w" * 16_384
    for node_id in range(300):
        node = NodeIdentity(node_id, 1)
        await rpcs.controller.write(requests.RegisterNode(node=node, wal_config=wal_config))
    assert await rpcs.refusal("NodeService/GetNodes", nodes_pb2.GetNodesRequest()) == refused(
        "node_ids"
    )
    request = nodes_pb2.GetNodesRequest(page=common_pb2.PageRequest(page_size=10_000))
    found, largest = await all_pages(rpcs, request, lambda answer: answer.nodes)
    assert [node.node_id for node in found] == list(range(300))
    assert largest <= ANSWER_BYTES


async def test_streams_with_many_long_tags_are_described_in_pages(rpcs: Rpcs) -> None:
    await rpcs.register()
    text = "t" * 1_000
    tags = [common_pb2.Tag(key=f"{index:02d}{text}", value=text) for index in range(16)]
    created: list[int] = []
    for part in range(3):
        create = streams_pb2.CreateStreamsRequest(
            request_id=f"tags {part}", node=NODE, streams=[streams_pb2.NewStream(tags=tags)] * 100
        )
        created += (await rpcs.ask(create)).stream_ids
    request = streams_pb2.DescribeStreamsRequest()
    request.page.page_size = 10_000
    found, largest = await all_pages(rpcs, request, lambda answer: answer.streams)
    assert [stream.stream_id for stream in found] == created
    assert largest <= ANSWER_BYTES


_LIST = "/streammeta.v1.KVService/ListKVs"
_CALLS = 20
_AGE_MS = 300
_GET = "streammeta.v1.KVService.GetKVs"


@pytest.fixture
def answers() -> MemoryBudget:
    return unread_answers(8 * _MIB)


@pytest_asyncio.fixture
async def filled(answers: MemoryBudget) -> AsyncIterator[Rpcs]:
    async with serving(answers=answers) as leader:
        for index in range(3):
            item = kv_pb2.KVToPut(key=f"{index}", value=bytes(_MIB))
            await leader.ask(kv_pb2.PutKVsRequest(items=[item]))
        yield leader


async def test_unread_answers_are_refused_beyond_a_callers_share(
    filled: Rpcs, answers: MemoryBudget
) -> None:
    async with unread(Target(filled.endpoint), _LIST, _CALLS) as reader:
        await ended(reader, _CALLS - 1)  # all but the first, refused
        assert 3 * _MIB < answers.total < 4 * _MIB
        listed = await filled.ask(kv_pb2.ListKVsRequest())
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
    async with (
        listening(server) as endpoint,
        unread(Target(endpoint), f"/{_GET}", 1) as reader,
    ):
        await until(lambda: answers.total > _MIB, "an answer that is not read")
        while await reader.read(1 << 16):
            pass
        await until(lambda: answers.total == 0, "its memory")


class _OneMethod(grpc.GenericRpcHandler):
    def __init__(self, call: Any) -> None:
        self._call = call

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._call)


async def test_answers_that_are_read_are_counted_no_more(
    filled: Rpcs, answers: MemoryBudget
) -> None:
    for _ in range(_CALLS):
        await filled.ask(kv_pb2.ListKVsRequest())
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
