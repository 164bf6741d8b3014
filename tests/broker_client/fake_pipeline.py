"""Controllers in the test's own process that serve CommitPipeline alone, and fail as told.

The members share what is committed, as the members of a quorum do: an object that was committed
once is answered as it was the first time. An upload is valid if each of its ranges starts where
its stream ends.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from streammeta.v1 import objects_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_NONE, ERROR_CODE_OFFSET_NOT_MATCHED, ErrorCode
from tests.broker_client.fake_controller import abort
from tests.kit.grpc_servers import started

Message = objects_pb2.CommitPipelineRequest
Hook = Callable[[int, Message, Any], Awaitable[None]]


async def _no_hook(member: int, message: Message, context: Any) -> None:
    """Let every message pass."""


class FakePipelineCluster:
    """Members at local ports; member 0 leads at first.

    `hook` sees each message before it is applied, `answer_hook` before it is answered.
    """

    def __init__(self, members: int = 1) -> None:
        self.leader = 0
        self.epoch = 1
        self.endpoints: list[str] = []
        self.messages: list[Message] = []
        self.hook: Hook = _no_hook
        self.answer_hook: Hook = _no_hook
        self.ends: dict[int, int] = defaultdict(int)
        self.applied: dict[int, int] = defaultdict(int)
        self._answers: dict[int, tuple[ErrorCode.ValueType, list[ErrorCode.ValueType]]] = {}
        self._servers: list[grpc.aio.Server | None] = [None] * members

    async def __aenter__(self) -> FakePipelineCluster:
        for member in range(len(self._servers)):
            self._servers[member], endpoint = await started(self._handlers(member))
            self.endpoints.append(endpoint)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(server.stop(None) for server in self._servers if server))

    async def kill(self, member: int) -> None:
        server = self._servers[member]
        assert server is not None
        self._servers[member] = None
        await server.stop(None)

    def move_leader(self, member: int) -> None:
        self.leader = member
        self.epoch += 1

    def _handlers(self, member: int) -> grpc.GenericRpcHandler:
        async def serve(messages: AsyncIterator[Message], context: Any) -> None:
            async for message in messages:
                self.messages.append(message)
                if member != self.leader:
                    await self._send_on(context, message)
                await self.hook(member, message, context)
                answer = self._apply(message)
                await self.answer_hook(member, message, context)
                await context.write(answer)

        handler = grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=Message.FromString,
            response_serializer=objects_pb2.CommitPipelineResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(
            "streammeta.v1.ObjectService", {"CommitPipeline": handler}
        )

    async def _send_on(self, context: Any, message: Message) -> None:
        where = {
            "leader_id": str(self.leader),
            "leader_endpoint": self.endpoints[self.leader] if self.leader >= 0 else "",
            "epoch": str(self.epoch),
            "sequence": str(message.sequence),
        }
        await abort(context, grpc.StatusCode.UNAVAILABLE, "NOT_LEADER", where)

    def _apply(self, message: Message) -> objects_pb2.CommitPipelineResponse:
        answer = objects_pb2.CommitPipelineResponse(sequence=message.sequence)
        for commit in message.commits:
            error, rows = self._commit(commit.object_id, commit.ranges, range(1))
            answer.commits.add(error=error, range_errors=rows)
        if not message.HasField("uploads"):
            return answer
        uploads, first = message.uploads, 0
        errors: list[ErrorCode.ValueType] = []
        row_errors: list[ErrorCode.ValueType] = []
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
    ) -> tuple[ErrorCode.ValueType, list[ErrorCode.ValueType]]:
        if object_id not in self._answers:
            verdicts = [
                ERROR_CODE_NONE if ranges.start_offset[row] == self.ends[ranges.stream_id[row]]
                else ERROR_CODE_OFFSET_NOT_MATCHED
                for row in rows
            ]  # fmt: skip
            if any(verdicts):
                return ERROR_CODE_OFFSET_NOT_MATCHED, verdicts
            self.applied[object_id] += 1
            for row in rows:
                self.ends[ranges.stream_id[row]] = ranges.end_offset[row]
            self._answers[object_id] = ERROR_CODE_NONE, verdicts
        return self._answers[object_id]
