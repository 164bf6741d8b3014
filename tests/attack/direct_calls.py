"""Handlers of every service called in this process, by callers with certificates of any role.

The way of a call is the real one, from the entrance on; only the transport is left out, since it
costs ten times as much. Services of operators, which need a quorum, note that they were reached.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.controller.lifecycle.broker_sessions import Sessions
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.services.contract import service_handler
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.trust.audit.auditor import Auditor
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.rpc.contract import SERVICES
from tests.kit.map_services import map_services
from tests.kit.memory_log import CommittingLog
from tests.kit.waiting import ManualClock
from tests.trust.trusted_server import CLUSTER, ShownContext

SESSION_TIMEOUT_MS = 9_000
METHODS: Sequence[MethodDescriptor] = [
    method for service in SERVICES.values() for method in service.methods
]


class AbortedError(Exception):
    """The call was ended by a status."""


@dataclass
class DirectContext:
    """A call's context: its caller and its outcome."""

    shown: ShownContext
    code: str = "OK"
    message: str = ""
    trailing: Any = ()
    metadata: Sequence[tuple[str, str]] = ()
    written: list[Any] = field(default_factory=list)

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return self.shown.auth_context()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self.metadata

    def time_remaining(self) -> float:
        return 60.0

    def set_trailing_metadata(self, trailing: Any) -> None:
        self.trailing = trailing

    async def abort(self, code: grpc.StatusCode, message: str, trailing: Any = ()) -> None:
        self.code, self.message, self.trailing = code.name, message, trailing
        raise AbortedError

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)  # nothing is sent

    async def write(self, data: Any) -> None:
        self.written.append(data)


class Controller:
    """A leader of an empty map, and the handlers of all services."""

    def __init__(self, auditor: Auditor | None = None) -> None:
        self.clock = ManualClock()
        self.map = MetadataController(ClusterMetadata(), self.clock)
        self.log = CommittingLog(self.map)
        self.map.bind(self.log)
        self.log.lead()
        self.reached: list[str] = []
        sessions = Sessions(SESSION_TIMEOUT_MS)
        sessions.lead(self.clock.monotonic_ms())
        services = (
            *map_services(CLUSTER, self.map, sessions, self.clock, auditor),
            *self._of_operators(CallPipeline(Authenticator(CLUSTER), auditor)),
        )
        self._handlers: dict[str, Any] = {}
        for method in METHODS:
            path = f"/{method.containing_service.full_name}/{method.name}"
            details: Any = SimpleNamespace(method=path)
            found = (service.service(details) for service in services)
            self._handlers[method.full_name] = next(filter(None, found))

    async def call(self, method: MethodDescriptor, data: bytes, context: DirectContext) -> Any:
        """Make a call; return its answer if it has one, None if a status ended it."""
        handler = self._handlers[method.full_name]
        try:
            if handler.unary_unary is not None:
                return await handler.unary_unary(data, context)
            if handler.unary_stream is not None:
                return await _briefly(handler.unary_stream(data, context))
            return await handler.stream_stream(_one(data), context)
        except AbortedError:
            return None

    def _of_operators(self, entrance: CallPipeline) -> Sequence[grpc.GenericRpcHandler]:
        return [
            service_handler(
                service, entrance, {method.name: self._noting(method) for method in service.methods}
            )
            for service in (SERVICES["AdminService"], SERVICES["QuorumService"])
        ]

    def _noting(self, method: MethodDescriptor) -> Any:
        async def note(_: Message, __: Any) -> Message:
            self.reached.append(method.full_name)
            return GetMessageClass(method.output_type)()

        return note


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _briefly(call: Any) -> None:
    """Let a stream begin, and leave it: a watch has no end."""
    task = asyncio.ensure_future(call)
    _, running = await asyncio.wait([task], timeout=0.002)
    if running:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
