"""Calls that come four times as fast as a leader can serve them, whether it answers or not.

Heartbeats go on, leadership stays, and what the leader spends on a call that it serves is not much
more than before, however many it refuses. Shares of its processor's time are compared, and no
times: others may use the machine.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from scripts.benchmarks.http2 import Http2Connection, Http2Error
from streammeta.cli.client import ControllerClient
from streammeta.cli.local_cluster import LocalCluster
from streammeta.rpc.connections import operator_channel
from streammeta.v1 import admin_pb2, columns_pb2, common_pb2, kv_pb2, nodes_pb2
from streammeta.v1.nodes_pb2_grpc import NodeServiceStub
from tests.kit.real_cluster import leader_of, running_cluster
from tests.trust.audited_cluster import ask

pytestmark = pytest.mark.process

NODE = common_pb2.NodeIdentity(node_id=1007, node_epoch=1)
_PUT = "/streammeta.v1.KVService/PutKVs"
_PIPELINE = "/streammeta.v1.ObjectService/CommitPipeline"
_OPTIONS = ("--election-timeout-ms", "1000", "--fetch-timeout-ms", "8000")
_CONNECTIONS = 16
_CALLERS = 64
_TIMES = 4
_SECONDS, _SLOW_SECONDS = 3.0, 20.0
_MEASURED_S = 1.5
_REFUSED_MIN = 2_000
_AT_ONCE_MAX = 200
"""Calls made in one turn: the heartbeats share the interpreter."""
_BEATS_MIN = 5
_GOODPUT_MIN = 0.7
_GROWTH_MAX = 150 << 20
_MESSAGES_AT_ONCE = 50
_ANSWERED_MIN = 1_000


@dataclass
class Heartbeats:
    """Sends heartbeats in a thread, each once; the load keeps the event loop busy."""

    endpoint: str
    done: int = 0
    failures: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        with operator_channel(self.endpoint) as channel:
            stub: Any = NodeServiceStub(channel)
            while not stop.wait(0.05):
                try:
                    stub.Heartbeat(nodes_pb2.HeartbeatRequest(node=NODE), timeout=30)
                except grpc.RpcError as error:
                    self.failures.append(str(error))
                self.done += 1


@dataclass
class Leader:
    """The leader of three controllers, and connections to it."""

    cluster: LocalCluster
    node_id: int
    process: psutil.Process
    connections: list[Http2Connection] = field(default_factory=list)
    served: int = 0
    refused: int = 0
    waiting: int = 0
    sent: int = 0

    @property
    def endpoint(self) -> str:
        return self.cluster.endpoints[self.node_id - 1]

    def epoch(self) -> tuple[int, int]:
        """Return who leads in which epoch."""
        with ControllerClient(self.cluster.endpoints, timeout_s=30) as client:
            seen = ask(client, admin_pb2.DescribeClusterRequest())
        return seen.leader_id, seen.epoch

    def cpu_s(self) -> float:
        spent = self.process.cpu_times()
        return float(spent.user + spent.system)

    def memory(self) -> int:
        return int(self.process.memory_info().rss)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Heartbeats]:
        """Connect, and send heartbeats meanwhile; they, and leadership, must not suffer."""
        epoch = self.epoch()
        self.connections = [
            await Http2Connection.connect(self.endpoint) for _ in range(_CONNECTIONS)
        ]
        heartbeats = Heartbeats(self.endpoint)
        stop = threading.Event()
        beating = threading.Thread(target=heartbeats.run, args=(stop,), name="heartbeats")
        beating.start()
        try:
            yield heartbeats
        finally:
            stop.set()
            for connection in self.connections:
                connection.close()
            await asyncio.to_thread(beating.join)
        assert not heartbeats.failures, heartbeats.failures[:3]
        assert self.epoch() == epoch

    def fire(self) -> None:
        """Make a call, and count how it ends."""
        self.sent += 1
        self.waiting += 1
        request = kv_pb2.PutKVsRequest(
            items=[kv_pb2.KVToPut(key=f"k{self.sent % 100}", value=bytes(50), overwrite=True)]
        )
        connection = self.connections[self.sent % _CONNECTIONS]
        connection.call(_PUT, request.SerializeToString()).add_done_callback(self._ended)

    def _ended(self, call: "asyncio.Future[bytes]") -> None:
        self.waiting -= 1
        if call.exception() is None:
            self.served += 1
        else:
            assert isinstance(call.exception(), Http2Error)
            self.refused += 1

    async def loaded(self, seconds: float) -> tuple[float, float]:
        """Call as fast as it answers; return calls a second, by the clock and by its processor."""
        served, spent, began = self.served, self.cpu_s(), time.monotonic()
        while time.monotonic() - began < seconds:
            while self.waiting < _CALLERS:
                self.fire()
            await asyncio.sleep(0.001)
        count = self.served - served
        return count / (time.monotonic() - began), count / (self.cpu_s() - spent)

    async def overloaded(self, rate: float, seconds: float) -> float:
        """Call at a rate, whatever it answers; return calls served a second of its processor.

        The rate grows until calls are refused: it was found while others used the machine.
        """
        served, refused, spent = self.served, self.refused, self.cpu_s()
        began = now = time.monotonic()
        due = 0.0
        while now - began < seconds or self.refused - refused < _REFUSED_MIN:
            assert now - began < 60, f"{self.refused - refused} calls are refused"
            await asyncio.sleep(0.001)
            passed, now = time.monotonic() - now, time.monotonic()
            if self.refused == refused:
                rate *= 1 + passed
            due = min(due + passed * rate, _AT_ONCE_MAX)
            for _ in range(int(due)):
                self.fire()
            due %= 1
        return (self.served - served) / (self.cpu_s() - spent)

    async def drained(self) -> None:
        """Wait until every call has ended."""
        async with asyncio.timeout(30):
            while self.waiting:  # noqa: ASYNC110 (a number, not an event)
                await asyncio.sleep(0.01)


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    with running_cluster(tmp_path, 3, _OPTIONS) as cluster:
        node_id = leader_of(cluster)
        with ControllerClient(cluster.endpoints, timeout_s=30) as client:
            ask(client, nodes_pb2.RegisterNodeRequest(node=NODE))
        yield Leader(cluster, node_id, psutil.Process(cluster.children[node_id].pid))


def seconds(request: pytest.FixtureRequest) -> float:
    return _SLOW_SECONDS if request.config.getoption("slow") else _SECONDS


async def test_calls_beyond_what_a_leader_can_serve_cost_it_little(
    leader: Leader, request: pytest.FixtureRequest
) -> None:
    async with leader.connected() as heartbeats:
        await leader.loaded(0.5)
        rate, before = await leader.loaded(_MEASURED_S)
        memory, beats = leader.memory(), heartbeats.done
        amid = await leader.overloaded(_TIMES * rate, seconds(request))
        assert heartbeats.done >= beats + _BEATS_MIN
        assert amid >= _GOODPUT_MIN * before
        assert leader.memory() - memory < _GROWTH_MAX
        await leader.drained()
        refused = leader.refused
        await leader.loaded(0.5)
        await leader.drained()
        assert leader.refused == refused, "calls are refused although the load is over"


async def test_pipelines_that_send_more_than_is_answered_are_held_up_and_nothing_else(
    leader: Leader, request: pytest.FixtureRequest
) -> None:
    answered = ended = sequence = 0

    def on_message(_: bytes) -> None:
        nonlocal answered
        answered += 1

    def on_end() -> None:
        nonlocal ended
        ended += 1

    async with leader.connected() as heartbeats:
        memory = leader.memory()
        pipelines = [
            (each, each.open(_PIPELINE, on_message, on_end)) for each in leader.connections
        ]
        began = time.monotonic()
        while time.monotonic() - began < seconds(request) or answered < _ANSWERED_MIN:
            assert time.monotonic() - began < 60, f"{answered} messages are answered"
            for _ in range(_MESSAGES_AT_ONCE):
                sequence += 1
                message = columns_pb2.PackedCommitPipelineRequest(sequence=sequence)
                for connection, stream_id in pipelines:
                    connection.send(stream_id, message.SerializeToString())
            await asyncio.sleep(0)
        assert heartbeats.done >= _BEATS_MIN
        assert sequence * _CONNECTIONS > answered
        assert ended == 0
        assert leader.memory() - memory < _GROWTH_MAX
