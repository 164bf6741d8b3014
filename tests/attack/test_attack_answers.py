"""Calls that ask for far more than one answer may hold, at a leader in this process.

The answer's budget is a few MiB whatever is asked; a caller goes on by page or behind the end.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest_asyncio

from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answer_budget import ANSWER_BYTES
from streammeta.controller.metadata.tables.values import NodeIdentity, RangeColumns, column
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.server.rpc_server import NODE, Rpcs, serving

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
    assert [len(each.value) for each in answer.results] == [_MIB] * 3
    assert answer.ByteSize() <= ANSWER_BYTES


async def test_large_values_are_listed_in_pages_of_a_few(rpcs: Rpcs) -> None:
    keys = await put_large_values(rpcs, 10)
    request = kv_pb2.ListKVsRequest()
    request.page.page_size = 10_000
    found, largest = await all_pages(rpcs, request, lambda answer: answer.entries)
    assert [each.key for each in found] == keys
    assert largest <= ANSWER_BYTES
    request = kv_pb2.ListKVsRequest(keys_only=True)
    assert [each.key for each in (await rpcs.ask(request)).entries] == keys


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
    assert [each.key for each in listed] == keys
    for part in (keys[:3], keys[3:]):
        delete = kv_pb2.DeleteKVsRequest(keys=[kv_pb2.KVKey(key=key) for key in part])
        assert [each.error for each in (await rpcs.ask(delete)).results] == [0] * 3


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
    assert {len(each.objects) for each in answer.results} == {1_000}


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
    assert [each.node_id for each in found] == list(range(300))
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
    assert [each.stream_id for each in found] == created
    assert largest <= ANSWER_BYTES
