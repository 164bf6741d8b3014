"""The controllers of a compaction test: one leader in the test's own process, real to its RPCs.

A log in memory commits by itself; every call goes through the conversion, the admission and the map
that a controller has. Clients are connected without a network, or over a port on loopback.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any, cast

import grpc

from streammeta.client import ControllerClient
from streammeta.controller.lifecycle.sessions import Sessions
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.requests import ReadRequest, WriteRequest
from streammeta.controller.runtime.controller import MetadataController
from streammeta.storage.object_format.object_key import cluster_namespace
from streammeta.v1 import admin_pb2
from tests.compaction.compaction_steps import DirectChannel, Handler, Steps
from tests.fake_bucket import FAKE_UUID
from tests.kit.clock import ManualClock
from tests.kit.grpc_servers import served
from tests.kit.map_services import MODULES, map_services
from tests.kit.memory_log import CommittingLog

CLUSTER_ID = "compaction"
NAMESPACE = cluster_namespace(CLUSTER_ID)
SESSION_TIMEOUT_MS = 9_000
_ENDPOINT = "leader:1"
_DESCRIBE = "/streammeta.v1.AdminService/DescribeCluster"


class LeadingMap:
    """One controller that leads."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.controller = MetadataController(ClusterMap(), self.clock)
        self._log = CommittingLog(self.controller)
        self.controller.bind(self._log)
        self._log.lead()
        self.sessions = Sessions(SESSION_TIMEOUT_MS)
        self.sessions.lead(self.clock.monotonic_ms())
        self._generic = self._handlers()
        self._direct = self._by_path()
        self._request_ids = itertools.count()

    async def write(self, request: WriteRequest) -> Any:
        """Return the answer once it is committed."""
        return (await self.controller.write(request)).answer

    def query(self, request: ReadRequest) -> Any:
        """Return the answer of the map as it is now."""
        return self.controller.cluster_map.query(request)

    def request_id(self) -> str:
        """Return an id that no request had."""
        return f"request {next(self._request_ids)}"

    def load(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Put a map with these sections in the place of the present one."""
        source = MetadataController(
            ClusterMap.from_sections(sections, self._log.committed), self.clock
        )
        source.bind(self._log)
        self._log.lose_leadership(truncate=False)
        point = self._log.snapshot_point()
        file = BytesIO()
        source.freeze(point)(file)
        file.seek(0)
        self.controller.load(file, point.snapshot_id)()
        self._log.lead()

    def client(self, steps: Steps, *, deadline: float = 10.0) -> ControllerClient:
        """Return a client without a network, whose attempts are steps."""
        return _SteppedClient(DirectChannel(self._direct, steps), deadline)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[ControllerClient]:
        """Serve on a port of loopback; yield a client that calls there."""
        async with (
            served(*self._generic) as endpoint,
            ControllerClient([endpoint], rng=random.Random(1)) as client,
        ):
            yield client

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        services = map_services(CLUSTER_ID, self.controller, self.sessions, self.clock)
        described: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            self._describe,
            request_deserializer=None,
            response_serializer=admin_pb2.DescribeClusterResponse.SerializeToString,
        )
        admin = {"DescribeCluster": described}
        return *services, grpc.method_handlers_generic_handler("streammeta.v1.AdminService", admin)

    async def _describe(self, _data: bytes, _context: Any) -> admin_pb2.DescribeClusterResponse:
        return admin_pb2.DescribeClusterResponse(
            cluster_id=CLUSTER_ID,
            object_namespace=NAMESPACE,
            cluster_uuid=FAKE_UUID,
            high_watermark=self.controller.committed_end,
        )

    def _by_path(self) -> dict[str, Handler]:
        found: dict[str, Handler] = {_DESCRIBE: self._describe}
        for module in MODULES:
            for service in module.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    path = f"/{service.full_name}/{method.name}"
                    handler = self._handler_of(path)
                    if handler is not None:
                        found[path] = handler
        return found

    def _handler_of(self, path: str) -> Handler | None:
        for generic in self._generic:
            found = cast(Any, generic).service(_Called(path))
            if found is not None:
                return cast(Handler | None, found.unary_unary)
        return None


class _Called:
    """Asks a generic handler for one method."""

    def __init__(self, path: str) -> None:
        self.method = path
        self.invocation_metadata = ()


class _SteppedClient(ControllerClient):
    """Calls over one channel that is there already."""

    def __init__(self, channel: DirectChannel, deadline: float) -> None:
        super().__init__([_ENDPOINT], deadline_s=deadline, rng=random.Random(1))
        self._direct = channel

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        """Return the channel."""
        return cast(grpc.aio.Channel, self._direct)
