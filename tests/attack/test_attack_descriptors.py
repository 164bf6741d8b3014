"""Connections that want every file descriptor of a controller: it keeps enough to go on."""

import asyncio
import contextlib
import itertools
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streammeta.cli.client import ControllerClient
from streammeta.cli.local_cluster import LocalCluster, free_ports, start_child
from streammeta.rpc.connections import operator_channel
from streammeta.v1 import admin_pb2
from streammeta.v1.admin_pb2_grpc import AdminServiceStub
from tests.kit.real_cluster import (
    FAST,
    controller_command,
    format_data,
    leader_of,
    put,
    values,
    wait_until,
)

pytestmark = pytest.mark.process

_LIMIT = 320
_CONNECTIONS = 600
_FLOOD = 400
"""Connections to each port, more than a process has descriptors."""


def limited(*command: str) -> list[str]:
    """Return a command that runs another with few file descriptors."""
    return ["sh", "-c", f'ulimit -Sn 128; ulimit -Hn {_LIMIT}; exec "$@"', "sh", *command]


class LimitedCluster(LocalCluster):
    """Controllers with few file descriptors each."""

    def _command(self, node_id: int) -> list[str]:
        return limited(*LocalCluster._command(self, node_id))

    def descriptors(self, node_id: int) -> int:
        """Return how many a controller has in use."""
        return len([*Path(f"/proc/{self.children[node_id].pid}/fd").iterdir()])


def test_a_controller_with_few_descriptors_writes_and_takes_snapshots_amid_a_flood(
    tmp_path: Path,
) -> None:
    format_data(tmp_path)
    command = controller_command(tmp_path)
    endpoint = command[command.index("--listen") + 1]
    child = start_child("limited", limited(sys.executable, *command), tmp_path / "limited.log")
    host, _, port = endpoint.rpartition(":")
    with contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        child.wait_ready()
        client = stack.enter_context(ControllerClient([endpoint], timeout_s=30))
        put(client, "before", "1")
        for _ in range(_CONNECTIONS):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
        put(client, "amid", "2")
        taken = client.call(
            lambda channel: AdminServiceStub(channel).TakeSnapshot,
            admin_pb2.TakeSnapshotRequest(),
        )
        assert taken.end_offset > 0
        assert values(client) == {"before": "1", "amid": "2"}
        assert child.process.poll() is None


@asynccontextmanager
async def flooded(cluster: LimitedCluster) -> AsyncIterator[set[int]]:
    """Hold as many connections to every port as it takes; those that are closed are made again.

    They come from another host than the controllers'. The set grows by each that was made.
    """
    made: set[int] = set()

    async def hold(number: int, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    host, int(port), local_addr=("127.0.0.2", 0)
                )
                made.add(number)
                try:
                    await reader.read()
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.5)

    endpoints = (*cluster.endpoints, *cluster.peer_endpoints)
    wanted = enumerate(itertools.chain(*[endpoints] * _FLOOD))
    holding = [asyncio.create_task(hold(number, endpoint)) for number, endpoint in wanted]
    try:
        yield made
    finally:
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)


async def test_two_of_three_elect_a_leader_while_connections_want_all_descriptors(
    tmp_path: Path,
) -> None:
    (tmp_path / "bucket").mkdir()
    store = f"file://{tmp_path}/bucket"
    cluster = LimitedCluster(tmp_path, "test", store, free_ports(3), FAST)
    try:
        cluster.start_all()
        old = leader_of(cluster)
        rest = [each for each in cluster.node_ids if each != old]
        async with contextlib.AsyncExitStack() as stack:
            # Connected before the flood: it may take all places of clients.
            asked = [
                stack.enter_context(operator_channel(cluster.endpoints[each - 1])) for each in rest
            ]
            assert not any(map(leads, asked))
            quiet = {each: cluster.descriptors(each) for each in rest}
            made = await stack.enter_async_context(flooded(cluster))
            await waited_for(lambda: len(made) == 6 * _FLOOD, "the flood")
            assert all(cluster.descriptors(each) > quiet[each] + 60 for each in rest)
            cluster.children[old].kill()
            await waited_for(lambda: any(map(leads, asked)), "another leader")
            assert all(cluster.children[each].is_running for each in rest)
    finally:
        cluster.stop_all()


def leads(channel: grpc.Channel) -> bool:
    """Whether a controller says that it leads and serves; it must answer."""
    request = health_pb2.HealthCheckRequest(service="leader")
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def waited_for(condition: Callable[[], bool], what: str) -> None:
    """Wait in a thread: the flood goes on."""
    await asyncio.to_thread(wait_until, condition, what)
