"""Streams are found by tag on every controller, after a change of the leader and a restart."""

from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.rpc.connections import operator_channel
from streammeta.v1 import common_pb2, streams_pb2
from streammeta.v1.streams_pb2_grpc import StreamServiceStub
from tests.kit.real_cluster import leader_of, running_cluster

pytestmark = pytest.mark.process


def found_at(endpoint: str, offset: int) -> list[int]:
    """Return the streams that one controller finds, by a read at an offset."""
    request = streams_pb2.FindStreamsRequest(tags=[common_pb2.Tag(key="topic", value="orders")])
    after = (("streammeta-read-after", str(offset)),)
    with operator_channel(endpoint) as channel:
        answer = StreamServiceStub(channel).FindStreams(request, metadata=after, timeout=60)
    return [stream.stream_id for stream in answer.streams]


async def find(cluster: LocalCluster, **tags: str) -> list[int]:
    async with ControllerClient(cluster.endpoints) as client:
        return [stream.stream_id async for stream in client.find_streams(tags)]


async def test_every_controller_finds_streams_by_tag(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        async with ControllerClient(cluster.endpoints) as client:
            session = await BrokerSession.open(client, 1001, 1)
            tags = [{"topic": "orders", "zone": zone} for zone in "aba"]
            ids = await session.create_streams([*tags, {"topic": "payments", "zone": "a"}])
            await session.delete_streams({ids[0]: None})
            offset = client.seen_offset

        for endpoint in cluster.endpoints:
            assert found_at(endpoint, offset) == ids[1:3]
        assert await find(cluster, topic="orders", zone="a") == [ids[2]]

        leader = leader_of(cluster)
        cluster.children[leader].kill()
        assert await find(cluster, topic="orders") == ids[1:3]
