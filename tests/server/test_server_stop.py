"""A leader that is asked to stop, amid commits, during its start or again during its stop."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
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
from streammeta.v1 import common_pb2, metadata_pb2, objects_pb2
from tests.kit.real_cluster import (
    STEADY,
    controller_command,
    format_data,
    leader_of,
    running_cluster,
)
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
                asyncio.create_task(pipeline.run(cluster.endpoints[leader - 1]))
                for pipeline in pipelines
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


WATCH = "/streammeta.v1.MetadataService/Watch"

STARTING = """
import os, signal, sys
from streammeta.controller.journal.journal import Journal
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.cli.main import main

name, count = sys.argv[1], int(sys.argv[2])
of = {"open": Journal, "check": LocalObjectStore}[name]
known = getattr(of, name)

def signalled(*given, **named):
    done = known(*given, **named)
    for _ in range(count):
        os.kill(os.getpid(), signal.SIGTERM)
    return done

setattr(of, name, staticmethod(signalled) if name == "open" else signalled)
sys.argv[1:] = sys.argv[3:]
main()
"""
"""A controller that gets signals within a step of its start."""


def started(root: Path, step: str, count: int) -> subprocess.CompletedProcess[str]:
    words = controller_command(root)[2:]
    return subprocess.run(
        [sys.executable, "-c", STARTING, step, str(count), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def events(log: str) -> list[str]:
    return [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("step", ["check", "open"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_start_that_is_to_end_serves_nothing_and_ends_well(
    tmp_path: Path, step: str, count: int
) -> None:
    format_data(tmp_path)
    ended = started(tmp_path, step, count)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "controller_ready" not in events(ended.stderr)
    assert {"controller_stopping", "controller_stopped"} <= set(events(ended.stderr))


def test_a_third_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    format_data(tmp_path)
    ended = started(tmp_path, "open", 3)
    assert ended.returncode == -signal.SIGTERM
    assert "controller_stopped" not in events(ended.stderr)


async def test_a_second_signal_hurries_a_stop_that_waits_for_a_caller(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=STEADY) as cluster:
        leader = await asyncio.to_thread(leader_of, cluster)
        child = cluster.children[leader]

        def said() -> list[str]:
            return events(child.log_path.read_text())

        async with client_channel(cluster.endpoints[leader - 1]) as channel:
            watching: Any = channel.unary_stream(WATCH)
            watch = watching(metadata_pb2.WatchRequest().SerializeToString())
            await watch.read()
            child.process.send_signal(signal.SIGTERM)
            await until(lambda: "controller_stopping" in said(), "the stop")
            child.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(child.process.wait, 20) == 0
            assert child.stop() == 0
        assert "controller_stop_hurried" in said()
        assert said()[-1] == "controller_stopped"
        async with ControllerClient(cluster.endpoints) as client:
            assert client is not None
            new = await asyncio.to_thread(leader_of, cluster)
        assert new != leader


async def test_a_stop_is_no_warning_to_the_others(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=STEADY) as cluster:
        leader = await asyncio.to_thread(leader_of, cluster)
        follower = next(node_id for node_id in cluster.node_ids if node_id != leader)
        for node_id in (follower, leader):
            left = [
                member_id for member_id in cluster.node_ids if member_id not in (follower, node_id)
            ]
            assert await asyncio.to_thread(cluster.children[node_id].stop) == 0
            for stopped in left:
                lines = cluster.children[stopped].log_path.read_text().splitlines()
                levels = {json.loads(line)["level"] for line in lines if line.startswith("{")}
                assert levels <= {"info", "debug"}, lines
