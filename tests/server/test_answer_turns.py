"""One call never holds the event loop: large answers are made in turns, small look-ups at once.

Turns are measured in instructions of the interpreter, which are the same on every machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from random import Random
from types import FrameType
from typing import Any

import pytest
from google.protobuf.message import Message

from streammeta.controller.lifecycle.broker_sessions import NodeState
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.object_listings import ListStreamSetObjects
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.tables import values as v
from streammeta.controller.rpc.calls.error_mapping import OFFSET_KEY
from streammeta.controller.rpc.services import routes as routes_module
from streammeta.controller.rpc.services.routes import LeaderView, routes
from streammeta.controller.runtime.load.admission import LIMITS
from streammeta.rpc.method_facts import RequestClass
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.attack.direct_calls import METHODS, Controller, DirectContext
from tests.kit.seeds import seeds
from tests.metadata.small_world import World
from tests.server.rpc_server import NODE as OWNER
from tests.server.rpc_server import serving
from tests.trust.trusted_server import PLAIN_TEXT

NODE = v.NodeIdentity(7, 1)
STREAMS = 2_000
QUERIES = 10_000
TURN_MAX = 500_000
"""Instructions in one turn; a few milliseconds. A call of ten thousand queries takes millions."""

GET_OBJECTS = next(method for method in METHODS if method.name == "GetObjects")


class Turns:
    """Instructions of each turn of the event loop."""

    def __init__(self) -> None:
        self.counts = [0]

    async def watch(self) -> None:
        """Begin another count with each turn."""
        while True:
            await asyncio.sleep(0)
            self.counts.append(0)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count instructions inside."""
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            self.counts[-1] += 1
        return self._trace


async def filled(rng: Random) -> Controller:
    """Return a leader with streams of one to five objects each."""
    leader = Controller()
    await leader.map.write(requests.RegisterNode(node=NODE))
    new = (requests.NewStream(),) * STREAMS
    await leader.map.write(requests.CreateStreams(request_id="c", node=NODE, streams=new))
    opened = tuple(requests.StreamToOpen(stream, 1) for stream in range(STREAMS))
    await leader.map.write(requests.OpenStreams(node=NODE, streams=opened))
    await leader.map.write(
        requests.PrepareObjects(request_id="p", node=NODE, count=500, ttl_ms=60_000)
    )
    for object_id in range(5):
        longer = [stream for stream in range(STREAMS) if stream % 5 >= object_id]
        await leader.map.write(upload(object_id, longer, object_id))
    return leader


def upload(object_id: int, streams: list[int], start: int) -> requests.CommitUploads:
    """Return a commit of one offset of each stream."""
    return requests.CommitUploads(
        node=NODE,
        object_id=v.column([object_id]),
        object_size=v.column([1]),
        range_count=v.column([len(streams)]),
        ranges=v.RangeColumns(
            stream_id=v.column(streams),
            start_offset=v.column([start] * len(streams)),
            end_offset=v.column([start + 1] * len(streams)),
        ),
    )


def asked(rng: Random, count: int) -> objects_pb2.GetObjectsRequest:
    queries = (
        objects_pb2.ObjectQuery(stream_id=rng.randrange(STREAMS + 5), start_offset=rng.randrange(5))
        for _ in range(count)
    )
    return objects_pb2.GetObjectsRequest(queries=queries)


async def get_objects(
    leader: Controller, request: objects_pb2.GetObjectsRequest
) -> tuple[objects_pb2.GetObjectsResponse, int]:
    """Return an answer and the offset that it holds at."""
    context = DirectContext(PLAIN_TEXT)
    answer: Any = await leader.call(GET_OBJECTS, request.SerializeToString(), context)
    assert answer is not None, context.message
    data = answer if isinstance(answer, bytes) else answer.SerializeToString()
    return objects_pb2.GetObjectsResponse.FromString(data), int(dict(context.trailing)[OFFSET_KEY])


@pytest.mark.parametrize("seed", seeds(2))
async def test_ten_thousand_queries_take_many_short_turns(seed: int) -> None:
    rng = Random(seed)
    leader, turns = await filled(rng), Turns()
    request = asked(rng, QUERIES)
    watching = asyncio.create_task(turns.watch())
    with turns.counting():
        answer, _ = await get_objects(leader, request)
    watching.cancel()
    assert len(answer.results) == QUERIES
    assert max(turns.counts) < TURN_MAX, f"seed {seed}"
    assert sum(turns.counts) > TURN_MAX, "else it would be no work at all"


@pytest.mark.parametrize("seed", seeds(2, slow=1))
async def test_an_answer_in_turns_is_that_of_the_map_at_one_offset(seed: int) -> None:
    """Commits in all turns: none is half seen."""
    rng = Random(seed)
    leader = await filled(rng)
    request = asked(rng, 1_500)
    expected: dict[int, list[Any]] = {}

    def note() -> None:
        """Remember what the map would answer now, query by query."""
        results = []
        for query in request.queries:
            one = ObjectQuery(query.stream_id, query.start_offset, -1)
            found: Any = leader.map.cluster_metadata.query(requests.GetObjects(queries=(one,)))
            results.append([object_.object_id for object_ in found.results[0].objects])
        expected[leader.log.next_offset] = results

    async def keep_committing() -> None:
        for number in range(12):
            streams = [stream for stream in range(STREAMS) if stream % 5 == 4]
            await leader.map.write(upload(5 + number, streams, 5 + number))
            note()

    note()
    committing = asyncio.create_task(keep_committing())
    for _ in range(rng.randrange(4)):
        await asyncio.sleep(0)
    reads = [asyncio.create_task(get_objects(leader, request)) for _ in range(3)]
    offsets = set()
    for answer, offset in await asyncio.gather(*reads):
        offsets.add(offset)
        found = [[object_.object_id for object_ in result.objects] for result in answer.results]
        assert found == expected[offset], f"seed {seed}"
    assert max(offsets) < leader.log.next_offset or committing.done() is False, "commits went on"
    await committing


def lists() -> World:
    """Return a map in which every list has some items."""
    world = World(streams=3)
    for object_id in range(3):
        world.commit(object_id, (0, object_id, object_id + 1))
    items = tuple(requests.KVToPut(namespace="n", key=key, value=b"v") for key in "abc")
    world.write(requests.PutKVs(items=items))
    return world


LISTS: dict[str, Any] = {
    "StreamService.DescribeStreams": requests.DescribeStreams(include_ranges=True),
    "ObjectService.DescribeObjects": requests.DescribeObjects(page=v.PageRequest(5)),
    "NodeService.GetNodes": requests.GetNodes(),
    "NodeService.ListStreamSetObjects": ListStreamSetObjects(node_id=0, include_ranges=True),
    "KVService.GetKVs": requests.GetKVs(
        keys=tuple(requests.KVKey(namespace="n", key=key) for key in "abx")
    ),
    "KVService.ListKVs": requests.ListKVs(namespace="n", page=v.PageRequest(2)),
}


@pytest.mark.parametrize("method", LISTS)
def test_pieces_of_a_list_are_the_whole(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    view = LeaderView(lambda _: NodeState.ACTIVE, lambda _: -1)
    route = routes("cluster", view)[f"streammeta.v1.{method}"]
    answer = lists().map.query(LISTS[method])
    whole = route.encode(answer)
    assert isinstance(whole, Message), "it is short"
    monkeypatch.setattr(routes_module, "PIECE_ITEMS", 1)
    pieces = route.encode(answer)
    assert isinstance(pieces, Iterator)
    encoded = [piece.SerializeToString() for piece in pieces]
    assert len(encoded) > 1
    assert type(whole).FromString(b"".join(encoded)) == whole


_AT_ONCE = 800
_ONE = common_pb2.PageRequest(page_size=1)

_LOOKUPS = {
    "a stream": streams_pb2.DescribeStreamsRequest(stream_ids=[0]),
    "a stream with its ranges": streams_pb2.DescribeStreamsRequest(
        stream_ids=[0], include_ranges=True, include_stream_objects=True
    ),
    "an object": objects_pb2.DescribeObjectsRequest(object_ids=[0]),
    "a named object": objects_pb2.DescribeNamedObjectsRequest(names=["n"]),
    "the first set object": nodes_pb2.ListStreamSetObjectsRequest(node_id=OWNER.node_id, page=_ONE),
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
