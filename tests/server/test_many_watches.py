"""As many watches as a leader takes, real processes: it keeps its office and loses no change."""

import asyncio
import itertools
from pathlib import Path

import pytest

from scripts.benchmarks.http2 import Http2Connection
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.methods import PUT_KVS
from streammeta.controller.rpc.watch.service import WATCHERS_MAX
from streammeta.v1 import kv_pb2, records_pb2
from streammeta.v1 import metadata_pb2 as pb
from tests.kit.real_cluster import describe, leader_of, running_cluster
from tests.kit.waiting import until

CONNECTIONS = 20
PUTS = 300
WRITERS = 16
PATIENCE_S = 90.0


class Watch:
    """The keys that one watch has seen put, in order."""

    def __init__(self, connection: Http2Connection) -> None:
        self.keys: list[str] = []
        self.has_begun = self.has_ended = False
        stream_id = connection.open("/streammeta.v1.MetadataService/Watch", self._take, self._end)
        request = pb.WatchRequest(kinds=[pb.ENTITY_KIND_KV], may_combine=True)
        connection.send(stream_id, request.SerializeToString(), is_last=True)

    def _take(self, message: bytes) -> None:
        self.has_begun = True
        records = records_pb2.RecordSet.FromString(pb.WatchResponse.FromString(message).records)
        for record in records.records:
            self.keys += record.kvs_put.keys

    def _end(self) -> None:
        self.has_ended = True


async def put_all(client: ControllerClient, numbers: "itertools.count[int]") -> None:
    while (number := next(numbers)) < PUTS:
        item = kv_pb2.KVToPut(key=f"k{number:05}", value=b"v", overwrite=True)
        answer = await client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
        assert answer.results[0].error == 0


@pytest.mark.process
def test_a_leader_that_all_watch_keeps_its_office(tmp_path: Path) -> None:
    """With the product's own timeouts."""
    with running_cluster(tmp_path, options=()) as cluster:
        leader = leader_of(cluster)
        before = describe(cluster, leader)

        async def scenario() -> None:
            endpoint = cluster.endpoints[leader - 1]
            connections = [await Http2Connection.connect(endpoint) for _ in range(CONNECTIONS)]
            watches = [Watch(connections[at % CONNECTIONS]) for at in range(WATCHERS_MAX)]
            await until(lambda: all(each.has_begun for each in watches), "watches", PATIENCE_S)
            async with ControllerClient(cluster.endpoints, deadline_s=PATIENCE_S) as client:
                numbers = itertools.count()
                await asyncio.gather(*(put_all(client, numbers) for _ in range(WRITERS)))
            await until(
                lambda: all(len(each.keys) >= PUTS for each in watches), "changes", PATIENCE_S
            )
            assert not any(each.has_ended for each in watches)
            order = watches[0].keys
            assert sorted(order) == [f"k{number:05}" for number in range(PUTS)]
            assert all(each.keys == order for each in watches)
            for connection in connections:
                connection.close()

        asyncio.run(scenario())
        after = describe(cluster, leader)
        assert (after.leader_id, after.epoch) == (before.leader_id, before.epoch)
