"""Stream slices: the objects that hold the offsets of a stream, and batched lookups of them.

Owns the batching of queries, the checks of an answer, and how an answer and the changes that follow
it fit together. Queries made in the same turn of the event loop share one call and never join a
call that was sent before, so an answer holds everything acknowledged before its query. A change may
come twice, or late, after an answer that includes it; a change that does not fit for certain makes
the stream unknown again, never wrong.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from streammeta.client.controllers import methods
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import (
    OffsetTrimmedError,
    ProtocolViolationError,
    ReaderClosedError,
    RefusedError,
    refusal,
)
from streammeta.client.resources.resources import all_of
from streammeta.storage.object_format.index_block import UNLIMITED
from streammeta.v1 import common_pb2, objects_pb2

UNKNOWN_TIME = -1
UNKNOWN_CRC = -1


@dataclass(frozen=True, slots=True)
class Slice:
    """One object and the offsets `[start_offset, end_offset)` of a stream in it.

    `object_size` is in bytes. No record in the object, of whatever stream, is older than
    `min_timestamp_ms` or newer than `max_timestamp_ms`; `crc32c` is that of all its bytes. What
    is unknown is -1.
    """

    object_id: int
    kind: common_pb2.ObjectKind.ValueType
    start_offset: int
    end_offset: int
    object_size: int
    min_timestamp_ms: int = UNKNOWN_TIME
    max_timestamp_ms: int = UNKNOWN_TIME
    crc32c: int = UNKNOWN_CRC

    @property
    def place(self) -> tuple[int, int, int]:
        """What tells it from all other slices of its stream."""
        return self.object_id, self.start_offset, self.end_offset

    @property
    def is_composite(self) -> bool:
        """Whether the object only links to others."""
        return self.kind == common_pb2.OBJECT_KIND_COMPOSITE


def slice_of(piece: objects_pb2.ObjectSlice) -> Slice:
    """Read one row of an answer."""
    return Slice(
        piece.object_id,
        piece.kind,
        piece.start_offset,
        piece.end_offset,
        piece.object_size,
        piece.min_timestamp_ms if piece.HasField("min_timestamp_ms") else UNKNOWN_TIME,
        piece.max_timestamp_ms if piece.HasField("max_timestamp_ms") else UNKNOWN_TIME,
        piece.crc32c if piece.HasField("crc32c") else UNKNOWN_CRC,
    )


class StreamSlices:
    """The slices known of one stream, in offset order, apart where nothing is known between."""

    __slots__ = ("_slices", "_starts", "end_offset", "start_offset")

    def __init__(self, start_offset: int, end_offset: int) -> None:
        self.start_offset = start_offset
        self.end_offset = end_offset
        self._starts: list[int] = []
        self._slices: list[Slice] = []

    def __len__(self) -> int:
        return len(self._slices)

    def run_from(self, offset: int, limit: int) -> list[Slice]:
        """List at most `limit` slices that follow each other, from the one holding `offset` on."""
        at = bisect_right(self._starts, offset) - 1
        if at < 0 or self._slices[at].end_offset <= offset:
            return []
        run = [self._slices[at]]
        for one in self._slices[at + 1 : at + limit]:
            if one.start_offset != run[-1].end_offset:
                break
            run.append(one)
        return run

    def learn(self, slices: Sequence[Slice], start_offset: int, end_offset: int) -> None:
        """Take what the map answered: it replaces what was known of the same offsets."""
        self.end_offset = end_offset
        self.trim(start_offset)
        if not slices:
            return
        low, high = self._overlapped(slices[0].start_offset, slices[-1].end_offset)
        self._starts[low:high] = [one.start_offset for one in slices]
        self._slices[low:high] = slices

    def add_committed(self, one: Slice) -> bool:
        """Take the row of a commit; tell whether what is known still holds."""
        if one.end_offset <= self.start_offset:
            return True  # trimmed meanwhile: without effect
        low, high = self._overlapped(one.start_offset, one.end_offset)
        if low < high:
            held = [known.place for known in self._slices[low:high]]
            return held == [one.place]  # else it took the place of others
        joins = low > 0 and self._slices[low - 1].end_offset == one.start_offset
        if joins or one.start_offset == self.end_offset:
            self._starts.insert(low, one.start_offset)
            self._slices.insert(low, one)
            self.end_offset = max(self.end_offset, one.end_offset)
            return True
        return one.end_offset <= self.end_offset

    def trim(self, start_offset: int) -> bool:
        """Take a new first visible offset; what is known always still holds."""
        self.start_offset = max(self.start_offset, start_offset)
        gone = bisect_right(self._starts, self.start_offset)
        if gone and self._slices[gone - 1].end_offset > self.start_offset:
            gone -= 1
        del self._starts[:gone], self._slices[:gone]
        return True

    def close_at(self, end_offset: int) -> bool:
        """Take the end that a close gave the stream; -1: as it is."""
        if end_offset >= 0:
            self.end_offset = end_offset
        return True

    def _overlapped(self, start: int, end: int) -> tuple[int, int]:
        """Places `[low, high)` of the slices that share an offset with `[start, end)`."""
        low = bisect_right(self._starts, start)
        if low and self._slices[low - 1].end_offset > start:
            low -= 1
        return low, max(low, bisect_left(self._starts, end))


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

    async def whole(self, stream_ids: Iterable[int], limit: int = 0) -> dict[int, Located]:
        """List all objects of streams, from the first visible offset to the end of the last one.

        Lost offsets are passed over. At most `limit` objects of a stream are listed in one call.
        """
        found: dict[int, Located] = {}
        queries = [StreamQuery(stream_id, 0, limit=limit) for stream_id in stream_ids]
        while queries:
            further: list[StreamQuery] = []
            for query, answer in zip(queries, await all_of(map(self.ask, queries)), strict=True):
                start = answer.stream_start_offset
                if answer.error == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED and start > query.start:
                    found.pop(query.stream_id, None)  # what was listed is trimmed by now
                    further.append(replace(query, start=start))
                    continue
                check_located(query, answer)
                located = located_of(query, answer)
                known = found.get(query.stream_id, located).slices
                if query.stream_id in found:
                    known += located.slices
                slices = tuple(one for one in known if one.end_offset > located.start_offset)
                listed = located.slices[-1].end_offset if located.slices else query.start
                end = max(listed, located.lost_end_offset)
                found[query.stream_id] = Located(slices, located.start_offset, end)
                if query.start < end < located.end_offset:
                    further.append(replace(query, start=end))
            queries = further
        return found

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
        except Exception as error:  # noqa: BLE001 - every caller gets it
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), answer in zip(asked, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    async def _send(self, queries: Sequence[StreamQuery]) -> Sequence[objects_pb2.ObjectList]:
        answers: list[objects_pb2.ObjectList] = []
        while len(answers) < len(queries):
            answers.extend(await self._send_some(queries[len(answers) :]))
        return answers

    async def _send_some(self, queries: Sequence[StreamQuery]) -> Sequence[objects_pb2.ObjectList]:
        """Return the answers to the first queries, one at least."""
        request = objects_pb2.GetObjectsRequest(
            may_stop=True,
            queries=[
                objects_pb2.ObjectQuery(
                    stream_id=one.stream_id,
                    start_offset=one.start,
                    end_offset=None if one.end == UNLIMITED else one.end,
                    limit=one.limit,
                )
                for one in queries
            ],
        )
        answer = await self._client.call(methods.GET_OBJECTS, request)
        if not 0 < len(answer.results) <= len(queries):
            raise ProtocolViolationError(
                "GetObjects", detail=f"{len(answer.results)} lists answer {len(queries)} queries"
            )
        return answer.results


@dataclass(frozen=True, slots=True)
class Located:
    """Slices that follow each other, the first of which holds the offset asked for.

    There are none if no object holds that offset: at the end of what is committed, or where
    offsets are lost, up to `lost_end_offset` (-1: they are not). Only `StreamReader.locate`
    returns `error`, the refusal of the query.
    """

    slices: tuple[Slice, ...]
    start_offset: int
    end_offset: int
    lost_end_offset: int = -1
    error: RefusedError | None = None


def located_of(query: StreamQuery, answer: objects_pb2.ObjectList) -> Located:
    """Translate an answer; its error code is left out."""
    return Located(
        tuple(slice_of(piece) for piece in answer.objects),
        answer.stream_start_offset,
        answer.stream_end_offset,
        answer.lost_end_offset if answer.lost_end_offset > query.start else -1,
    )


def check_located(query: StreamQuery, located: objects_pb2.ObjectList) -> None:
    """Raise the refusal of a query, or what is wrong with its answer."""
    if located.error == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED:
        raise OffsetTrimmedError(query.stream_id, query.start, located.stream_start_offset)
    if located.error != common_pb2.ERROR_CODE_NONE:
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
