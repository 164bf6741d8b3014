"""Asking the map which objects hold a range: many questions in few calls.

Owns the batching of questions and what is checked in an answer. Questions asked in the same turn of
the event loop go out in one call; none ever joins a call that was sent before, so an answer holds
everything acknowledged before its question was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.client import methods
from streammeta.client.controller_client import ControllerClient
from streammeta.client.errors import (
    OffsetTrimmedError,
    ProtocolViolationError,
    ReaderClosedError,
    refusal,
)
from streammeta.storage.object_format.index_block import UNLIMITED
from streammeta.v1 import common_pb2, objects_pb2

QUERIES_PER_CALL = 2_000

Answer = asyncio.Future[objects_pb2.ObjectList]


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """Asks for the objects of `[start, end)` of a stream; `end` -1: no end; `limit` 0: 1000."""

    stream_id: int
    start: int
    end: int = UNLIMITED
    limit: int = 0


class Lookups:
    """Sends questions to the controllers, at most 2000 a call."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._waiting: list[tuple[StreamQuery, Answer]] = []
        self._under_way: dict[asyncio.Task[None], Sequence[tuple[StreamQuery, Answer]]] = {}
        self._closed = False
        self.sent = 0

    async def ask(self, query: StreamQuery) -> objects_pb2.ObjectList:
        """Return the answer to one question; its error code is left in it."""
        if self._closed:
            raise ReaderClosedError(query.stream_id)
        answer: Answer = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send_waiting)
        self._waiting.append((query, answer))
        return await answer

    async def ask_many(self, queries: Sequence[StreamQuery]) -> list[objects_pb2.ObjectList]:
        """Return the answers in the order of the questions; their error codes are left in them."""
        answers: list[objects_pb2.ObjectList] = []
        for at in range(0, len(queries), QUERIES_PER_CALL):
            answers.extend(await self._send(queries[at : at + QUERIES_PER_CALL]))
        return answers

    def close(self) -> None:
        """Give up what is asked: it fails with `ReaderClosedError`."""
        self._closed = True
        for task in self._under_way:
            task.cancel()
        # Not left to the tasks: one that is cancelled before its first step never takes any.
        for asked in (self._waiting, *self._under_way.values()):
            for query, answer in asked:
                if not answer.done():
                    answer.set_exception(ReaderClosedError(query.stream_id))

    def _send_waiting(self) -> None:
        waiting = [one for one in self._waiting if not one[1].done()]
        self._waiting = []
        for at in range(0, len(waiting), QUERIES_PER_CALL):
            asked = waiting[at : at + QUERIES_PER_CALL]
            task = asyncio.create_task(self._answer(asked))
            self._under_way[task] = asked
            task.add_done_callback(self._under_way.pop)

    async def _answer(self, asked: Sequence[tuple[StreamQuery, Answer]]) -> None:
        try:
            answers = await self._send([query for query, _ in asked])
        except Exception as error:  # noqa: BLE001 - each who asked hears of it
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), answer in zip(asked, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    async def _send(self, queries: Sequence[StreamQuery]) -> Sequence[objects_pb2.ObjectList]:
        request = objects_pb2.GetObjectsRequest(
            queries=[
                objects_pb2.ObjectQuery(
                    stream_id=one.stream_id,
                    start_offset=one.start,
                    end_offset=one.end,
                    limit=one.limit,
                )
                for one in queries
            ]
        )
        self.sent += 1
        answer = await self._client.call(methods.GET_OBJECTS, request)
        if len(answer.results) != len(queries):
            raise ProtocolViolationError(
                "GetObjects", detail=f"{len(answer.results)} lists answer {len(queries)} queries"
            )
        return answer.results


def check_located(query: StreamQuery, located: objects_pb2.ObjectList) -> None:
    """Raise what the map says against a query, or what is wrong with its answer."""
    if located.error == common_pb2.OFFSET_NOT_MATCHED:
        raise OffsetTrimmedError(query.stream_id, query.start, located.stream_start_offset)
    if located.error != common_pb2.NONE:
        raise refusal(located.error, f"read of stream {query.stream_id}")
    at = query.start
    for piece in located.objects:
        joins = piece.start_offset == at or (at == query.start and piece.start_offset <= at)
        if not joins or piece.end_offset <= at:
            raise ProtocolViolationError(
                f"GetObjects of stream {query.stream_id}",
                detail=f"object {piece.object_id} holds [{piece.start_offset},"
                f" {piece.end_offset}), wanted offset {at}",
            )
        at = piece.end_offset
