"""Look-ups of one item that come all at once, as after a restart of all brokers."""

import asyncio
from typing import Any

import pytest

from streammeta.controller.runtime.load.admission import LIMITS
from streammeta.rpc.method_facts import RequestClass
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.server.rpc_server import NODE, serving

_AT_ONCE = 800
_ONE = common_pb2.PageRequest(page_size=1)

_LOOKUPS = {
    "a stream": streams_pb2.DescribeStreamsRequest(stream_ids=[0]),
    "a stream with its ranges": streams_pb2.DescribeStreamsRequest(
        stream_ids=[0], include_ranges=True, include_stream_objects=True
    ),
    "an object": objects_pb2.DescribeObjectsRequest(object_ids=[0]),
    "a named object": objects_pb2.DescribeNamedObjectsRequest(names=["n"]),
    "the first set object": nodes_pb2.ListStreamSetObjectsRequest(node_id=NODE.node_id, page=_ONE),
    "the first key": kv_pb2.ListKVsRequest(page=_ONE),
}


@pytest.mark.parametrize("lookup", _LOOKUPS)
async def test_hundreds_of_lookups_at_once_are_all_answered(lookup: str) -> None:
    assert sum((LIMITS[RequestClass.SCAN].running, LIMITS[RequestClass.SCAN].waiting)) < _AT_ONCE
    async with serving() as rpcs:
        await rpcs.begin(streams=1, objects=1)
        request: Any = _LOOKUPS[lookup]
        asked = (rpcs.ask(request) for _ in range(_AT_ONCE))
        assert len(await asyncio.gather(*asked)) == _AT_ONCE
        assert rpcs.controller.gate.admission.refused(RequestClass.READ) == 0
