"""The services of the map on a real gRPC server in the test's own process, over a log in memory.

What is appended is committed at the end of the turn of the event loop, as if all voters were quick.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from streammeta.controller.lifecycle.failover import Heartbeats
from streammeta.controller.lifecycle.sessions import Sessions
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.rpc.commit_pipeline import CommitPipeline
from streammeta.controller.rpc.convert_nodes import LeaderView
from streammeta.controller.rpc.services import (
    MetadataHandlers,
    NodeHandlers,
    routed,
    routes,
    service_handler,
)
from streammeta.controller.runtime.controller import MetadataController
from streammeta.rpc.connections import client_channel, listen, new_server
from streammeta.rpc.failures import read_failure
from streammeta.v1 import common_pb2, kv_pb2, metadata_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.kit.clock import ManualClock
from tests.kit.memory_log import MemoryLog

DEADLINE_S = 20.0
CLUSTER_ID = "here"
NODE = common_pb2.NodeIdentity(node_id=1000, node_epoch=1)
SESSION_TIMEOUT_MS = 9_000
MODULES = (streams_pb2, objects_pb2, nodes_pb2, kv_pb2, metadata_pb2)


class CommittingLog(MemoryLog):
    """Commits by itself."""

    def append(self, payloads: Sequence[bytes], *, required_base_offset: int) -> int:
        """Append, and commit soon."""
        end_offset = super().append(payloads, required_base_offset=required_base_offset)
        asyncio.get_running_loop().call_soon(self.commit)
        return end_offset


@dataclass
class Rpcs:
    """A leader and a connection to it."""

    controller: MetadataController
    log: CommittingLog
    clock: ManualClock
    sessions: Sessions
    channel: grpc.aio.Channel

    async def call(self, method: str, request: Any, response: type[Any], **options: Any) -> Any:
        """Call e.g. `NodeService/LockNode`."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        send: Any = self.channel.unary_unary(f"/streammeta.v1.{method}")
        return response.FromString(await send(data, **options))

    async def refusal(
        self, method: str, request: Any, **options: Any
    ) -> tuple[grpc.StatusCode, str, dict[str, str]]:
        """Return status code, reason and metadata of a call that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.call(method, request, common_pb2.Tag, **options)
        failure = read_failure(raised.value)
        return raised.value.code(), failure.reason, dict(failure.metadata)

    async def register(self, node: common_pb2.NodeIdentity = NODE) -> None:
        """Register a node."""
        await self.call(
            "NodeService/RegisterNode",
            nodes_pb2.RegisterNodeRequest(node=node, wal_config="wal-7"),
            nodes_pb2.RegisterNodeResponse,
        )

    async def open_streams(self, count: int) -> list[int]:
        """Create and open streams, at epoch 1."""
        created = await self.call(
            "StreamService/CreateStreams",
            streams_pb2.CreateStreamsRequest(
                request_id="create", node=NODE, streams=[streams_pb2.NewStream()] * count
            ),
            streams_pb2.CreateStreamsResponse,
        )
        await self.call(
            "StreamService/OpenStreams",
            streams_pb2.OpenStreamsRequest(
                node=NODE,
                streams=[
                    streams_pb2.StreamToOpen(stream_id=one, stream_epoch=1)
                    for one in created.stream_ids
                ],
            ),
            streams_pb2.OpenStreamsResponse,
        )
        return list(created.stream_ids)

    async def prepare(self, count: int) -> int:
        """Prepare objects; return the first id."""
        prepared = await self.call(
            "ObjectService/PrepareObjects",
            objects_pb2.PrepareObjectsRequest(
                request_id=f"prepare {count}", node=NODE, count=count, ttl_ms=60_000
            ),
            objects_pb2.PrepareObjectsResponse,
        )
        first: int = prepared.first_object_id
        return first


@asynccontextmanager
async def serving() -> AsyncIterator[Rpcs]:
    """Yield a leader of an empty map."""
    clock = ManualClock()
    controller = MetadataController(ClusterMap(), clock)
    log = CommittingLog(controller)
    controller.bind(log)
    log.lead()
    sessions = Sessions(SESSION_TIMEOUT_MS)
    sessions.lead(clock.monotonic_ms())
    server = new_server()
    server.add_generic_rpc_handlers(_handlers(controller, sessions, clock))
    port = listen(server, "127.0.0.1:0")
    await server.start()
    try:
        async with client_channel(f"127.0.0.1:{port}") as channel:
            yield Rpcs(controller, log, clock, sessions, channel)
    finally:
        await server.stop(None)


def _handlers(
    controller: MetadataController, sessions: Sessions, clock: ManualClock
) -> tuple[grpc.GenericRpcHandler, ...]:
    heartbeats = Heartbeats(controller, sessions, clock)
    view = LeaderView(sessions.state, heartbeats.compacted_by)
    unary = {
        name.rpartition(".")[2]: routed(route, controller)
        for name, route in routes(CLUSTER_ID, view).items()
    }
    unary |= NodeHandlers(heartbeats, controller.gate).unary()
    streams = MetadataHandlers(controller).streams()
    pipelines = {"CommitPipeline": CommitPipeline(controller).handle}
    return tuple(
        service_handler(service, unary, streams, pipelines)
        for module in MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
    )


def rpc_test(test: Callable[[Rpcs], Awaitable[None]]) -> Callable[[], None]:
    """Run an async test against a leader of its own."""

    def run() -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S), serving() as rpcs:
                await test(rpcs)

        asyncio.run(bounded())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run
