"""The services of the map on a real gRPC server in the test's own process, over a log in memory.

What is appended is committed at the end of the turn of the event loop, as if all voters were quick.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.message import Message

from streammeta.controller.lifecycle.broker_sessions import Sessions
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.trust.audit.auditor import Auditor
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import read_failure
from streammeta.v1 import common_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.kit.grpc_servers import served
from tests.kit.map_services import map_services
from tests.kit.memory_log import CommittingLog
from tests.kit.waiting import ManualClock

CLUSTER_ID = "here"
NODE = common_pb2.NodeIdentity(node_id=1000, node_epoch=1)
SESSION_TIMEOUT_MS = 9_000


@dataclass
class Rpcs:
    """A leader and a connection to it."""

    controller: MetadataController
    log: CommittingLog
    clock: ManualClock
    sessions: Sessions
    channel: grpc.aio.Channel
    endpoint: str = ""

    async def call(self, method: str, request: Any, response: type[Any], **options: Any) -> Any:
        """Call e.g. `NodeService/LockNode`."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        send: Any = self.channel.unary_unary(f"/streammeta.v1.{method}")
        return response.FromString(await send(data, **options))

    async def ask(self, request: Message, **options: Any) -> Any:
        """Call the RPC that takes such a request."""
        asked = request.DESCRIPTOR
        services = asked.file.services_by_name.values()
        rpc = next(
            method
            for service in services
            for method in service.methods
            if method.input_type is asked
        )
        response = message_factory.GetMessageClass(rpc.output_type)  # type: ignore[arg-type]
        method = f"{rpc.containing_service.name}/{rpc.name}"
        return await self.call(method, request, response, **options)

    async def refusal(
        self, method: str, request: Any, **options: Any
    ) -> tuple[str, str, dict[str, str]]:
        """Return status code, reason and metadata of a call that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.call(method, request, common_pb2.Tag, **options)
        failure = read_failure(raised.value)
        return failure.code.name, failure.reason, dict(failure.metadata)

    async def register(self, node: common_pb2.NodeIdentity = NODE) -> None:
        """Register a node."""
        await self.ask(nodes_pb2.RegisterNodeRequest(node=node, wal_config="wal-7"))

    async def open_streams(self, count: int) -> list[int]:
        """Create and open streams, at epoch 1."""
        created = await self.ask(
            streams_pb2.CreateStreamsRequest(
                request_id="create", node=NODE, streams=[streams_pb2.NewStream()] * count
            )
        )
        await self.ask(
            streams_pb2.OpenStreamsRequest(
                node=NODE,
                streams=[
                    streams_pb2.StreamToOpen(stream_id=stream_id, stream_epoch=1)
                    for stream_id in created.stream_ids
                ],
            )
        )
        return list(created.stream_ids)

    async def begin(self, streams: int, objects: int) -> tuple[list[int], int]:
        """Register `NODE`; return open streams and the first of prepared objects."""
        await self.register()
        return await self.open_streams(streams), await self.prepare(objects)

    async def prepare(self, count: int) -> int:
        """Prepare objects; return the first id."""
        prepared = await self.ask(
            objects_pb2.PrepareObjectsRequest(
                request_id=f"prepare {count}", node=NODE, count=count, ttl_ms=60_000
            )
        )
        first: int = prepared.first_object_id
        return first


def empty_leader() -> tuple[ManualClock, MetadataController, CommittingLog, Sessions]:
    """Return a leader of an empty map with its clock, log and sessions."""
    clock = ManualClock()
    controller = MetadataController(ClusterMetadata(), clock)
    log = CommittingLog(controller)
    controller.bind(log)
    log.lead()
    sessions = Sessions(SESSION_TIMEOUT_MS)
    sessions.lead(clock.monotonic_ms())
    return clock, controller, log, sessions


@asynccontextmanager
async def serving(auditor: Auditor | None = None, **parts: Any) -> AsyncIterator[Rpcs]:
    """Yield a leader of an empty map; `parts` are further arguments of `map_services`."""
    clock, controller, log, sessions = empty_leader()
    async with (
        served(
            *map_services(CLUSTER_ID, controller, sessions, clock, auditor, **parts)
        ) as endpoint,
        client_channel(endpoint) as channel,
    ):
        yield Rpcs(controller, log, clock, sessions, channel, endpoint)
