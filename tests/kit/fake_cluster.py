"""A controller cluster in the test's own process: real gRPC servers over one small map of dicts.

Owns just the RPCs the client uses, with the outcomes of the contract, and the faults a test asks
for: a leader that moves or dies, answers that are lost, calls that fail. It keeps no log, so
whatever was applied once stays, as with a committed entry.

`FakePipelineCluster` serves CommitPipeline alone. Its members share what is committed, as the
members of a quorum do: an object that was committed once is answered as it was the first time, and
an upload is valid if each of its ranges starts where its stream ends.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self, TypeAlias

import grpc

from streammeta.client.controllers import methods
from streammeta.client.controllers.methods import Method
from streammeta.controller.grpc_server.server import Server
from streammeta.rpc.failures import details_trailer
from streammeta.v1 import admin_pb2, common_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.fake_bucket import FAKE_UUID
from tests.kit.grpc_servers import started

NAMESPACE = "_streammeta_fake"
Code: TypeAlias = common_pb2.ErrorCode.ValueType
Message: TypeAlias = objects_pb2.CommitPipelineRequest


@dataclass
class Piece:
    """One object and the part of a stream it holds."""

    object_id: int
    kind: common_pb2.ObjectKind.ValueType
    start: int
    end: int
    size: int
    times: tuple[int, int] = (-1, -1)
    crc32c: int = -1


@dataclass
class FakeStream:
    """A stream as the map has it."""

    stream_id: int = 0
    epoch: int = -1
    node_id: int = -1
    opened: bool = False
    start: int = 0
    end: int = 0
    pieces: list[Piece] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    openings: dict[int, int] = field(default_factory=dict)  # epoch to start of its range

    def ranges(self) -> list[streams_pb2.StreamRange]:
        ends = [*list(self.openings.values())[1:], self.end]
        return [
            streams_pb2.StreamRange(
                range_index=index, epoch=epoch, start_offset=start, end_offset=end
            )
            for index, ((epoch, start), end) in enumerate(
                zip(self.openings.items(), ends, strict=False)
            )
        ]


@dataclass
class Fault:
    """What happens to the next `times` calls of a method on any member."""

    status: grpc.StatusCode
    reason: str
    applied: bool
    times: int


class FakeMap:
    """The state: streams, object ids and nodes, changed by whole requests."""

    def __init__(self) -> None:
        self.streams: dict[int, FakeStream] = {}
        self.nodes: dict[int, int] = {}
        self.prepared: set[int] = set()
        self.answers: dict[int, objects_pb2.CommitStreamSetObjectResponse] = {}
        self.first_answers: dict[str, Any] = {}
        self.next_object_id = 0

    def node_check(self, node: common_pb2.NodeIdentity) -> Code:
        known = self.nodes.get(node.node_id)
        if known is None:
            return common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST
        return (
            common_pb2.ERROR_CODE_NONE
            if known == node.node_epoch
            else common_pb2.ERROR_CODE_NODE_EPOCH_EXPIRED
        )

    def expire_prepared(self) -> None:
        self.prepared.clear()

    def register(self, request: nodes_pb2.RegisterNodeRequest) -> nodes_pb2.RegisterNodeResponse:
        node = request.node
        if self.nodes.get(node.node_id, -1) > node.node_epoch:
            return nodes_pb2.RegisterNodeResponse(error=common_pb2.ERROR_CODE_NODE_EPOCH_EXPIRED)
        self.nodes[node.node_id] = node.node_epoch
        return nodes_pb2.RegisterNodeResponse()

    def list_nodes(self, request: nodes_pb2.GetNodesRequest) -> nodes_pb2.GetNodesResponse:
        found = [node for node in sorted(self.nodes) if node in request.node_ids]
        return nodes_pb2.GetNodesResponse(
            nodes=[
                nodes_pb2.NodeDescription(node_id=id_, node_epoch=self.nodes[id_]) for id_ in found
            ]
        )

    def opening(
        self, request: streams_pb2.GetOpeningStreamsRequest
    ) -> streams_pb2.GetOpeningStreamsResponse:
        return streams_pb2.GetOpeningStreamsResponse(
            error=self.node_check(request.node),
            streams=[
                streams_pb2.OpeningStream(
                    stream_id=stream.stream_id,
                    epoch=stream.epoch,
                    start_offset=stream.start,
                    end_offset=stream.end,
                )
                for stream in self.streams.values()
                if stream.opened and stream.node_id == request.node.node_id
            ],
        )

    def create(self, request: streams_pb2.CreateStreamsRequest) -> Any:
        if request.request_id not in self.first_answers:
            error = self.node_check(request.node)
            ids = []
            for _ in request.streams if error == common_pb2.ERROR_CODE_NONE else ():
                ids.append(len(self.streams))
                self.streams[ids[-1]] = FakeStream(ids[-1])
            self.first_answers[request.request_id] = streams_pb2.CreateStreamsResponse(
                error=error, stream_ids=ids
            )
        return self.first_answers[request.request_id]

    def open(self, request: streams_pb2.OpenStreamsRequest) -> streams_pb2.OpenStreamsResponse:
        opened = []
        for asked in request.streams:
            stream = self.streams.get(asked.stream_id)
            error = self.node_check(request.node)
            if stream is None:
                error = error or common_pb2.ERROR_CODE_STREAM_NOT_EXIST
            elif asked.stream_epoch < stream.epoch:
                error = error or common_pb2.ERROR_CODE_STREAM_FENCED
            if error != common_pb2.ERROR_CODE_NONE or stream is None:
                opened.append(streams_pb2.OpenedStream(error=error))
                continue
            stream.epoch, stream.node_id = asked.stream_epoch, request.node.node_id
            stream.opened = True
            stream.openings.setdefault(stream.epoch, stream.end)
            opened.append(
                streams_pb2.OpenedStream(start_offset=stream.start, next_offset=stream.end)
            )
        return streams_pb2.OpenStreamsResponse(streams=opened)

    def close(self, request: streams_pb2.CloseStreamsRequest) -> streams_pb2.CloseStreamsResponse:
        errors = []
        for asked in request.streams:
            stream = self.streams.get(asked.stream_id)
            errors.append(
                common_pb2.ERROR_CODE_NONE if stream else common_pb2.ERROR_CODE_STREAM_NOT_EXIST
            )
            if stream:
                stream.opened = False
        return streams_pb2.CloseStreamsResponse(errors=errors)

    def describe(
        self, request: streams_pb2.DescribeStreamsRequest
    ) -> streams_pb2.DescribeStreamsResponse:
        wanted = request.stream_ids or sorted(self.streams)
        return streams_pb2.DescribeStreamsResponse(
            streams=[
                streams_pb2.StreamDescription(
                    stream_id=i,
                    epoch=self.streams[i].epoch,
                    start_offset=self.streams[i].start,
                    end_offset=self.streams[i].end,
                    ranges=self.streams[i].ranges() if request.include_ranges else (),
                )
                for i in wanted
                if i in self.streams
            ]
        )

    def prepare(self, request: objects_pb2.PrepareObjectsRequest) -> Any:
        if request.request_id not in self.first_answers:
            error = self.node_check(request.node)
            first = self.next_object_id
            if error == common_pb2.ERROR_CODE_NONE:
                self.next_object_id += request.count
                self.prepared.update(range(first, first + request.count))
            self.first_answers[request.request_id] = objects_pb2.PrepareObjectsResponse(
                error=error, first_object_id=first, deadline_ms=request.ttl_ms
            )
        return self.first_answers[request.request_id]

    def commit(
        self, request: objects_pb2.CommitStreamSetObjectRequest
    ) -> objects_pb2.CommitStreamSetObjectResponse:
        ids = ([request.object_id] if request.HasField("object_id") else []) + list(
            request.stream_objects.object_id
        )
        if ids[0] in self.answers:
            return self.answers[ids[0]]
        rows = len(request.ranges.stream_id) + len(request.stream_objects.stream_id)
        whole = self.node_check(request.node)
        if request.HasField("object_id") and request.object_id not in self.prepared:
            whole = whole or common_pb2.ERROR_CODE_OBJECT_NOT_EXIST
        if whole != common_pb2.ERROR_CODE_NONE:
            return self._commit_answer(request, [whole] * rows, whole)
        verdicts = [self._commit_range(request, i) for i in range(len(request.ranges.stream_id))]
        verdicts += [
            self._commit_alone(request, i) for i in range(len(request.stream_objects.stream_id))
        ]
        if common_pb2.ERROR_CODE_NONE not in verdicts:
            return self._commit_answer(request, verdicts, verdicts[0])
        self.prepared.discard(request.object_id)
        self.answers[ids[0]] = self._commit_answer(request, verdicts, common_pb2.ERROR_CODE_NONE)
        return self.answers[ids[0]]

    @staticmethod
    def _commit_answer(
        request: objects_pb2.CommitStreamSetObjectRequest, verdicts: list[Code], whole: Code
    ) -> objects_pb2.CommitStreamSetObjectResponse:
        cut = len(request.ranges.stream_id)
        return objects_pb2.CommitStreamSetObjectResponse(
            error=whole, range_errors=verdicts[:cut], stream_object_errors=verdicts[cut:]
        )

    def _commit_range(self, request: objects_pb2.CommitStreamSetObjectRequest, i: int) -> Code:
        rows = request.ranges
        span = (rows.start_offset[i], rows.end_offset[i])
        piece = Piece(
            request.object_id, common_pb2.OBJECT_KIND_STREAM_SET, *span, request.object_size
        )
        return self._extend(request.node, rows.stream_id[i], rows.stream_epoch[i], piece)

    def _commit_alone(self, request: objects_pb2.CommitStreamSetObjectRequest, i: int) -> Code:
        rows = request.stream_objects
        if rows.object_id[i] not in self.prepared:
            return common_pb2.ERROR_CODE_OBJECT_NOT_EXIST
        span = (rows.start_offset[i], rows.end_offset[i])
        piece = Piece(rows.object_id[i], common_pb2.OBJECT_KIND_STREAM, *span, rows.object_size[i])
        code = self._extend(request.node, rows.stream_id[i], rows.stream_epoch[i], piece)
        if code == common_pb2.ERROR_CODE_NONE:
            self.prepared.discard(rows.object_id[i])
        return code

    def _extend(
        self, node: common_pb2.NodeIdentity, stream_id: int, epoch: int, piece: Piece
    ) -> Code:
        stream = self.streams.get(stream_id)
        if stream is None:
            return common_pb2.ERROR_CODE_STREAM_NOT_EXIST
        if not stream.opened:
            return common_pb2.ERROR_CODE_STREAM_NOT_OPENED
        if stream.node_id != node.node_id or stream.epoch != epoch:
            return common_pb2.ERROR_CODE_STREAM_FENCED
        if piece.start != stream.end:
            return common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED
        stream.pieces.append(piece)
        stream.end = piece.end
        return common_pb2.ERROR_CODE_NONE

    def objects(self, request: objects_pb2.GetObjectsRequest) -> objects_pb2.GetObjectsResponse:
        results = [located(self.streams.get(query.stream_id), query) for query in request.queries]
        return objects_pb2.GetObjectsResponse(results=results)


def located(
    stream: FakeStream | None, query: objects_pb2.ObjectQuery, *, ends_at_gap: bool = False
) -> objects_pb2.ObjectList:
    """Return what GetObjects answers of a stream."""
    if stream is None:
        return objects_pb2.ObjectList(error=common_pb2.ERROR_CODE_STREAM_NOT_EXIST)
    answer = objects_pb2.ObjectList(stream_start_offset=stream.start, stream_end_offset=stream.end)
    if query.start_offset < stream.start:
        answer.error = common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED
        return answer
    for start, end in stream.lost:
        if start <= query.start_offset < end:
            answer.lost_end_offset = end
    at = query.start_offset
    for piece in stream.pieces:
        past = query.HasField("end_offset") and piece.start >= query.end_offset
        full = len(answer.objects) == (query.limit or 1000)
        if piece.end <= query.start_offset or past or full or (ends_at_gap and piece.start > at):
            continue
        at = piece.end
        row = answer.objects.add(
            object_id=piece.object_id,
            kind=piece.kind,
            start_offset=piece.start,
            end_offset=piece.end,
            object_size=piece.size,
        )
        if piece.times[0] >= 0:
            row.min_timestamp_ms, row.max_timestamp_ms = piece.times
        if piece.crc32c >= 0:
            row.crc32c = piece.crc32c
    return answer


class FakeCluster:
    """Members at local ports; `endpoints` in member order, member 0 leads at first."""

    def __init__(self, members: int = 1) -> None:
        self.map = FakeMap()
        self.leader = 0
        self.epoch = 1
        self.endpoints: list[str] = []
        self.listed: list[str] = []  # endpoints that DescribeCluster names
        self.calls: dict[str, int] = defaultdict(int)
        self.request_ids: dict[str, list[str]] = defaultdict(list)
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.hooks: dict[str, Callable[[Any], Awaitable[None]]] = {}
        self._faults: dict[str, Fault] = {}
        self._servers: list[Server | None] = [None] * members

    async def __aenter__(self) -> Self:
        for member in range(len(self._servers)):
            self.endpoints.append("")
            await self.start(member, "127.0.0.1:0")
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(server.stop(None) for server in self._servers if server))

    def high_watermark(self) -> int:
        """Return up to where entries are committed."""
        return 0

    async def start(self, member: int, address: str) -> None:
        self._servers[member], self.endpoints[member] = await started(
            *self._handlers(member), at=address
        )

    async def kill(self, member: int) -> None:
        server = self._servers[member]
        assert server is not None
        self._servers[member] = None
        await server.stop(None)

    def hold(self, method: str) -> asyncio.Event:
        """Let calls of `method` wait from now on; the result lets them go on."""
        gate = asyncio.Event()

        async def wait(_: object) -> None:
            await gate.wait()

        self.hooks[method] = wait
        return gate

    def move_leader(self, member: int) -> None:
        self.leader = member
        self.epoch += 1

    def fail_next(
        self,
        method: Method[Any, Any],
        status: grpc.StatusCode,
        reason: str = "",
        *,
        applied: bool = False,
        times: int = 1,
    ) -> None:
        """Fail the next calls of `method`; `applied`: the change is made and the answer lost."""
        self._faults[method.name] = Fault(status, reason, applied, times)

    def _handlers(self, member: int) -> list[grpc.GenericRpcHandler]:
        by_service: dict[str, dict[str, Any]] = defaultdict(dict)
        for method, apply in (
            (methods.REGISTER_NODE, self.map.register),
            (methods.GET_NODES, self.map.list_nodes),
            (methods.HEARTBEAT, lambda request: nodes_pb2.HeartbeatResponse(
                error=self.map.node_check(request.node), session_timeout_ms=9000)),
            (methods.GET_OPENING_STREAMS, self.map.opening),
            (methods.CREATE_STREAMS, self.map.create),
            (methods.OPEN_STREAMS, self.map.open),
            (methods.CLOSE_STREAMS, self.map.close),
            (methods.DESCRIBE_STREAMS, self.map.describe),
            (methods.PREPARE_OBJECTS, self.map.prepare),
            (methods.COMMIT_STREAM_SET_OBJECT, self.map.commit),
            (methods.GET_OBJECTS, self.map.objects),
            (methods.DESCRIBE_CLUSTER, lambda request: admin_pb2.DescribeClusterResponse(
                cluster_id="fake", object_namespace=NAMESPACE, answered_by=member,
                cluster_uuid=FAKE_UUID, high_watermark=self.high_watermark(),
                controllers=[admin_pb2.Controller(endpoint=endpoint) for endpoint in self.listed])),
        ):  # fmt: skip
            by_service[method.service][method.name] = self._handler(member, method, apply)
        by_service["ObjectService"]["CommitPipeline"] = self._pipeline(member)
        return [
            grpc.method_handlers_generic_handler(f"streammeta.v1.{service}", handlers)
            for service, handlers in by_service.items()
        ]

    def _handler(self, member: int, method: Method[Any, Any], apply: Callable[[Any], Any]) -> Any:
        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self.calls[method.name] += 1
            self.requests[method.name].append(request)
            if hasattr(request, "request_id"):
                self.request_ids[method.name].append(request.request_id)
            return await self._answer(member, method, apply, request, context)

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )

    def _pipeline(self, member: int) -> Any:
        async def serve(messages: AsyncIterator[Message], context: Any) -> None:
            async for message in messages:
                await context.write(await self._piped(member, message, context))

        return grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=Message.FromString,
            response_serializer=objects_pb2.CommitPipelineResponse.SerializeToString,
        )

    async def _piped(
        self, member: int, message: Message, context: Any
    ) -> objects_pb2.CommitPipelineResponse:
        """Answer a message; to hooks and faults each commit is a call of the unary method."""
        method = methods.COMMIT_STREAM_SET_OBJECT
        answer = objects_pb2.CommitPipelineResponse(sequence=message.sequence)
        for commit in message.commits:
            self.calls[method.name] += 1
            self.requests[method.name].append(commit)
            one = await self._answer(member, method, self.map.commit, commit, context)
            answer.commits.append(one)
        return answer

    async def _answer(
        self,
        member: int,
        method: Method[Any, Any],
        apply: Callable[[Any], Any],
        request: Any,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> Any:
        hook = self.hooks.get(method.name)
        if hook is not None:
            await hook(request)
        if method.leader_only and member != self.leader:
            await self._abort_not_leader(context)
        fault = self._faults.get(method.name)
        if fault is not None and fault.times > 0:
            fault.times -= 1
            if fault.applied:
                apply(request)
            await abort(context, fault.status, fault.reason, {})
        return apply(request)

    async def _abort_not_leader(
        self, context: grpc.aio.ServicerContext[Any, Any], **more: str
    ) -> None:
        where = {
            "leader_id": str(self.leader),
            "leader_endpoint": self.endpoints[self.leader] if self.leader >= 0 else "",
            "epoch": str(self.epoch),
            **more,
        }
        await abort(context, grpc.StatusCode.UNAVAILABLE, "NOT_LEADER", where)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    code: grpc.StatusCode,
    reason: str,
    metadata: dict[str, str],
) -> NoReturn:
    """End a call as the controller does: with `ErrorInfo` in the standard trailer."""
    message = f"fake {reason}"
    await context.abort(code, message, details_trailer(code, message, reason, metadata))
    raise AssertionError("abort returned")


Hook = Callable[[int, Message, Any], Awaitable[None]]


async def _no_hook(member: int, message: Message, context: Any) -> None:
    """Let every message pass."""


class FakePipelineCluster(FakeCluster):
    """Members that serve commits alone.

    `hook` sees each message before it is applied, `answer_hook` before it is answered.
    """

    def __init__(self, members: int = 1) -> None:
        super().__init__(members)
        self.messages: list[Message] = []
        self.hook: Hook = _no_hook
        self.answer_hook: Hook = _no_hook
        self.ends: dict[int, int] = defaultdict(int)
        self.applied: dict[int, int] = defaultdict(int)
        self._answers: dict[int, tuple[Code, list[Code]]] = {}

    async def _piped(
        self, member: int, message: Message, context: Any
    ) -> objects_pb2.CommitPipelineResponse:
        self.messages.append(message)
        if member != self.leader:
            await self._abort_not_leader(context, sequence=str(message.sequence))
        await self.hook(member, message, context)
        answer = self._apply(message)
        await self.answer_hook(member, message, context)
        return answer

    def _apply(self, message: Message) -> objects_pb2.CommitPipelineResponse:
        answer = objects_pb2.CommitPipelineResponse(sequence=message.sequence)
        for commit in message.commits:
            error, rows = self._commit(commit.object_id, commit.ranges, range(1))
            answer.commits.add(error=error, range_errors=rows)
        if not message.HasField("uploads"):
            return answer
        uploads, first = message.uploads, 0
        errors: list[Code] = []
        row_errors: list[Code] = []
        for object_id, count in zip(uploads.object_id, uploads.range_count, strict=True):
            error, rows = self._commit(object_id, uploads.ranges, range(first, first + count))
            errors.append(error)
            row_errors.extend(rows)
            first += count
        answer.uploads.errors.extend(errors if any(errors) else ())
        answer.uploads.range_errors.extend(row_errors if any(row_errors) else ())
        return answer

    def _commit(
        self, object_id: int, ranges: objects_pb2.RangeColumns, rows: range
    ) -> tuple[Code, list[Code]]:
        if object_id not in self._answers:
            verdicts = [
                common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED
                if ranges.start_offset[row] != self.ends[ranges.stream_id[row]]
                else common_pb2.ERROR_CODE_NONE
                for row in rows
            ]
            if any(verdicts):
                return common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED, verdicts
            self.applied[object_id] += 1
            for row in rows:
                self.ends[ranges.stream_id[row]] = ranges.end_offset[row]
            self._answers[object_id] = common_pb2.ERROR_CODE_NONE, verdicts
        return self._answers[object_id]
