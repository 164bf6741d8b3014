"""The client lists the objects of a stream and of a node of a real controller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streammeta.client import StreamObject, errors
from streammeta.client.controllers.methods import COMMIT_STREAM_SET_OBJECT, PREPARE_OBJECTS
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.real_cluster import leader_of, running_cluster

pytestmark = pytest.mark.process

NODE = common_pb2.NodeIdentity(node_id=7, node_epoch=1)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ControllerClient]:
    with running_cluster(tmp_path, 1) as cluster:
        leader_of(cluster)
        async with ControllerClient(cluster.endpoints) as client:
            yield client


async def commit(client: ControllerClient, object_id: int, stream_id: int, first: int) -> None:
    """Commit a stream set object with one record, and a stream object with the next one."""
    request = objects_pb2.CommitStreamSetObjectRequest(
        node=NODE,
        object_id=object_id,
        object_size=100,
        attributes=4,
        ranges=objects_pb2.RangeColumns(
            stream_id=[stream_id], start_offset=[first], end_offset=[first + 1]
        ),
        stream_objects=objects_pb2.StreamObjectColumns(
            object_id=[object_id + 1],
            object_size=[10],
            stream_id=[stream_id + 1],
            start_offset=[first],
            end_offset=[first + 1],
            crc32c=[9],
        ),
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
    )
    answer = await client.call(COMMIT_STREAM_SET_OBJECT, request)
    assert answer.error == common_pb2.ERROR_CODE_NONE


async def test_objects_are_listed_with_their_facts(client: ControllerClient) -> None:
    session = await BrokerSession.open(client, NODE.node_id, NODE.node_epoch)
    first, second = await session.create_streams([{}, {}])
    await session.open_streams({first: 1, second: 1})
    prepared = await client.call(
        PREPARE_OBJECTS,
        objects_pb2.PrepareObjectsRequest(request_id="p", node=NODE, count=4, ttl_ms=60_000),
    )
    ids = range(prepared.first_object_id, prepared.first_object_id + 4)
    await commit(client, ids[0], first, 0)
    await commit(client, ids[2], first, 1)

    listed = [object_ async for object_ in client.list_stream_objects(second, 1)]
    assert listed == [
        StreamObject(
            stream_id=second,
            object_id=ids[3],
            kind="stream",
            start_offset=1,
            end_offset=2,
            object_size=10,
            attributes=0,
            committed_at_ms=listed[0].committed_at_ms,
            min_timestamp_ms=None,
            max_timestamp_ms=None,
            crc32c=9,
        )
    ]
    assert listed[0].committed_at_ms > 0
    before = [object_.object_id async for object_ in client.list_stream_objects(second, 0, 1)]
    assert before == [ids[1]]

    for ranges in ((), ((first, 0, 1),)):
        listing = client.list_stream_set_objects(NODE.node_id, include_ranges=bool(ranges))
        objects = [object_ async for object_ in listing]
        assert [object_.object_id for object_ in objects] == [ids[0], ids[2]]
        assert (objects[0].attributes, objects[0].object_size) == (4, 100)
        assert objects[0].ranges == ranges


async def test_a_listing_of_an_unknown_owner_raises(client: ControllerClient) -> None:
    with pytest.raises(errors.StreamNotFoundError):
        await anext(client.list_stream_objects(99))
    with pytest.raises(errors.NodeNotRegisteredError):
        await anext(client.list_stream_set_objects(99))
