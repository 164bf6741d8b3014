"""A leader that is asked to stop amid commits: every one is answered or can be repeated."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client.controllers.methods import PREPARE_OBJECTS, Method
from streammeta.client.model import node_message
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import Reason, RpcFailure, read_failure
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.real_cluster import STEADY, leader_of, running_cluster
from tests.kit.waiting import until

pytestmark = pytest.mark.process

CHECK_OBJECTS = Method(objects_pb2.CheckObjectsRequest, objects_pb2.CheckObjectsResponse)
PATH = "/streammeta.v1.ObjectService/CommitPipeline"
PIPELINES = 4
AHEAD = 8
STOPS_WITHIN_S = 60.0
REPEATABLE = {
    (grpc.StatusCode.UNAVAILABLE, ""),  # the connection has gone
    (grpc.StatusCode.UNAVAILABLE, Reason.NOT_LEADER),
    (grpc.StatusCode.ABORTED, Reason.OUTCOME_UNKNOWN),
    (grpc.StatusCode.CANCELLED, ""),
    (grpc.StatusCode.INTERNAL, ""),  # said by gRPC of a connection that has gone
}


@dataclass
class Pipeline:
    """Commits of one stream, one object of ten offsets each, `AHEAD` of them unanswered."""

    session: BrokerSession
    stream_id: int
    objects: range
    acknowledged: list[int] = field(default_factory=list)
    ended: RpcFailure | None = None

    async def run(self, endpoint: str) -> None:
        """Commit until the controller ends the stream."""
        async with client_channel(endpoint) as channel:
            call: Any = channel.stream_stream(PATH)()
            room = asyncio.Semaphore(AHEAD)
            sending = asyncio.create_task(self._send(call, room))
            try:
                for object_id in self.objects:
                    answer = objects_pb2.CommitPipelineResponse.FromString(await call.read())
                    assert not any(answer.uploads.errors), answer
                    self.acknowledged.append(object_id)
                    room.release()
                raise AssertionError("all objects are committed and the leader goes on")
            except grpc.aio.AioRpcError as error:
                self.ended = read_failure(error)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, call: Any, room: asyncio.Semaphore) -> None:
        for number, object_id in enumerate(self.objects):
            await room.acquire()
            uploads = objects_pb2.UploadColumns(
                node=node_message(self.session.node),
                object_id=[object_id],
                object_size=[100],
                range_count=[1],
                ranges=objects_pb2.RangeColumns(
                    stream_id=[self.stream_id],
                    start_offset=[number * 10],
                    end_offset=[number * 10 + 10],
                ),
            )
            message = objects_pb2.CommitPipelineRequest(sequence=number + 1, uploads=uploads)
            await call.write(message.SerializeToString())


async def begun(cluster: LocalCluster, client: ControllerClient) -> list[Pipeline]:
    """Return pipelines of one broker with a stream and ten thousand prepared objects each."""
    session = await BrokerSession.open(client, 1000, 1)
    created = await session.create_streams([{}] * PIPELINES)
    await session.open_streams(dict.fromkeys(created, 1))
    pipelines = []
    for stream_id in created:
        prepare = objects_pb2.PrepareObjectsRequest(
            node=node_message(session.node), count=10_000, ttl_ms=600_000
        )
        first = (await client.call(PREPARE_OBJECTS, prepare)).first_object_id
        pipelines.append(Pipeline(session, stream_id, range(first, first + 10_000)))
    return pipelines


async def test_a_leader_that_stops_amid_commits_answers_or_lets_them_be_repeated(
    tmp_path: Path,
) -> None:
    with running_cluster(tmp_path, options=STEADY) as cluster:
        leader = await asyncio.to_thread(leader_of, cluster)
        async with ControllerClient(cluster.endpoints) as client:
            pipelines = await begun(cluster, client)
            runs = [
                asyncio.create_task(each.run(cluster.endpoints[leader - 1])) for each in pipelines
            ]
            await until(lambda: all(len(one.acknowledged) > 20 for one in pipelines), "commits")
            exit_code = await asyncio.to_thread(cluster.children[leader].stop, STOPS_WITHIN_S)
            assert exit_code == 0  # it was not killed: `stop` would have done so after that time
            await asyncio.gather(*runs)

            for pipeline in pipelines:
                assert pipeline.ended is not None
                ended = (pipeline.ended.code, pipeline.ended.reason)
                assert ended in REPEATABLE, pipeline.ended
                asked = objects_pb2.CheckObjectsRequest(object_ids=pipeline.acknowledged)
                states = (await client.call(CHECK_OBJECTS, asked)).states
                assert set(states) == {common_pb2.OBJECT_STATE_COMMITTED}
        assert await asyncio.to_thread(leader_of, cluster) != leader
