"""Stream slices: the objects that contain a stream's offsets, and batched lookups of them.

Owns the batching of queries, the validation of an answer, and the combination of an answer with
later changes. Queries of the same iteration of the event loop share one call and never join an
earlier call, so an answer contains everything acknowledged before its query. A change may arrive
twice, or after an answer that includes it. A change that does not fit for certain makes the stream
unknown, never wrong.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from streammeta.client import errors
from streammeta.client.controllers import methods
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.resources.resources import all_of
from streammeta.storage.object_format.index_block import UNLIMITED
from streammeta.v1 import common_pb2, objects_pb2

UNKNOWN_TIME = -1
UNKNOWN_CRC = -1


@dataclass(frozen=True, slots=True)
class Slice:
    """One object and the offsets `[start_offset, end_offset)` of a stream in it.

    `object_size` is in bytes. No record in the object, of any stream, is older than
    `min_timestamp_ms` or newer than `max_timestamp_ms`. `crc32c` covers all its bytes. Unknown
    values are -1.
    """

    object_id: int
    kind: int
    start_offset: int
    end_offset: int
    object_size: int
    min_timestamp_ms: int = UNKNOWN_TIME
    max_timestamp_ms: int = UNKNOWN_TIME
    crc32c: int = UNKNOWN_CRC

    @property
    def place(self) -> tuple[int, int, int]:
        """The identity of the slice within its stream."""
        return self.object_id, self.start_offset, self.end_offset

    @property
    def is_composite(self) -> bool:
        """Whether the object only links to others."""
        return self.kind == common_pb2.OBJECT_KIND_COMPOSITE

    @property
    def is_stream_set_object(self) -> bool:
        """Whether the object may be relative: a commit of a stream object names its offsets."""
        return self.kind == common_pb2.OBJECT_KIND_STREAM_SET


def slice_of(piece: objects_pb2.ObjectSlice) -> Slice:
    """Translate one row of an answer."""
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
    """Known slices of one stream, in offset order, with gaps between unknown offsets."""

    __slots__ = ("_slices", "_starts", "end_offset", "start_offset")

    def __init__(self, start_offset: int, end_offset: int) -> None:
        self.start_offset = start_offset
        self.end_offset = end_offset
        self._starts: list[int] = []
        self._slices: list[Slice] = []

    def __len__(self) -> int:
        return len(self._slices)

    def run_from(self, offset: int, limit: int) -> list[Slice]:
        """List at most `limit` consecutive slices, from the one that contains `offset`."""
        at = bisect_right(self._starts, offset) - 1
        if at < 0 or self._slices[at].end_offset <= offset:
            return []
        run = [self._slices[at]]
        for slice_ in self._slices[at + 1 : at + limit]:
            if slice_.start_offset != run[-1].end_offset:
                break
            run.append(slice_)
        return run

    def learn(self, slices: Sequence[Slice], start_offset: int, end_offset: int) -> None:
        """Replace the known slices of the same offsets by an answer of the controllers."""
        self.end_offset = end_offset
        self.trim(start_offset)
        if not slices:
            return
        low, high = self._find_overlap(slices[0].start_offset, slices[-1].end_offset)
        self._starts[low:high] = [slice_.start_offset for slice_ in slices]
        self._slices[low:high] = slices

    def add_committed(self, slice_: Slice) -> bool:
        """Add the slice of a commit and return whether the known slices are still valid."""
        if slice_.end_offset <= self.start_offset:
            return True  # trimmed meanwhile: without effect

        low, high = self._find_overlap(slice_.start_offset, slice_.end_offset)
        if low < high:
            # The same slice arrives twice after a lookup; any other one replaces known slices.
            overlap = [known.place for known in self._slices[low:high]]
            return overlap == [slice_.place]
        joins = low > 0 and self._slices[low - 1].end_offset == slice_.start_offset
        if joins or slice_.start_offset == self.end_offset:
            self._starts.insert(low, slice_.start_offset)
            self._slices.insert(low, slice_)
            self.end_offset = max(self.end_offset, slice_.end_offset)
            return True
        return slice_.end_offset <= self.end_offset

    def trim(self, start_offset: int) -> bool:
        """Apply a new first visible offset. The known slices stay valid."""
        self.start_offset = max(self.start_offset, start_offset)
        trimmed = bisect_right(self._starts, self.start_offset)
        if trimmed and self._slices[trimmed - 1].end_offset > self.start_offset:
            trimmed -= 1
        # The last slice may be trimmed in part: it stays as long as one of its offsets is visible.
        del self._starts[:trimmed], self._slices[:trimmed]
        return True

    def close_at(self, end_offset: int) -> bool:
        """Apply the end offset of a close, -1 if it is unchanged."""
        if end_offset >= 0:
            self.end_offset = end_offset
        return True

    def _find_overlap(self, start: int, end: int) -> tuple[int, int]:
        """Return the positions `[low, high)` of the slices that overlap `[start, end)`."""
        # The slice before may still reach into the range.
        low = bisect_right(self._starts, start)
        if low and self._slices[low - 1].end_offset > start:
            low -= 1
        return low, max(low, bisect_left(self._starts, end))


QUERIES_PER_CALL = 2_000

Answer = asyncio.Future[objects_pb2.ObjectList]


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """Query for `[start, end)` of a stream. `end` -1 means no end, `limit` 0 means 1000 objects."""

    stream_id: int
    start: int
    end: int = UNLIMITED
    limit: int = 0


class Lookups:
    """Sends queries to the controllers, at most 2000 per call."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._waiting: list[tuple[StreamQuery, Answer]] = []
        self._in_flight: dict[asyncio.Task[None], Sequence[tuple[StreamQuery, Answer]]] = {}
        self._closed = False

    async def ask(self, query: StreamQuery) -> objects_pb2.ObjectList:
        """Return the answer to one query, which may have an error code."""
        if self._closed:
            raise errors.ReaderClosedError(query.stream_id)
        answer: Answer = asyncio.get_running_loop().create_future()
        # The first query of an iteration schedules the call that sends all of them.
        if not self._waiting:
            # Later queries of this iteration join the call.
            asyncio.get_running_loop().call_soon(self._send_waiting)
        self._waiting.append((query, answer))
        return await answer

    async def ask_many(self, queries: Sequence[StreamQuery]) -> list[objects_pb2.ObjectList]:
        """Return the answers in the order of the queries. They may have error codes."""
        answers: list[objects_pb2.ObjectList] = []
        for at in range(0, len(queries), QUERIES_PER_CALL):
            answers.extend(await self._send(queries[at : at + QUERIES_PER_CALL]))
        return answers

    async def list_all(self, stream_ids: Iterable[int], limit: int = 0) -> dict[int, Located]:
        """List all objects of streams, from the first visible offset to the end of the last one.

        Lost offsets are skipped. One call lists at most `limit` objects of a stream.
        """
        found: dict[int, Located] = {}
        queries = [StreamQuery(stream_id, 0, limit=limit) for stream_id in stream_ids]
        while queries:
            further: list[StreamQuery] = []
            for query, answer in zip(queries, await all_of(map(self.ask, queries)), strict=True):
                start = answer.stream_start_offset
                if answer.error == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED and start > query.start:
                    # The stream was trimmed since the last page: start over at its new start.
                    found.pop(query.stream_id, None)
                    further.append(replace(query, start=start))
                    continue

                check_located(query, answer)
                located = located_of(query, answer)
                known = found.get(query.stream_id, located).slices
                if query.stream_id in found:
                    # Pages follow each other, so the list stays in offset order.
                    known += located.slices
                slices = tuple(piece for piece in known if piece.end_offset > located.start_offset)
                listed = located.slices[-1].end_offset if located.slices else query.start
                end = max(listed, located.lost_end_offset)
                found[query.stream_id] = Located(slices, located.start_offset, end)
                if query.start < end < located.end_offset:
                    further.append(replace(query, start=end))
            queries = further
        return found

    def close(self) -> None:
        """Fail all waiting queries with `ReaderClosedError`."""
        self._closed = True
        for task in self._in_flight:
            task.cancel()
        # The tasks can't do this: a task that is cancelled before its first step never runs.
        for asked in (self._waiting, *self._in_flight.values()):
            for query, answer in asked:
                if not answer.done():
                    answer.set_exception(errors.ReaderClosedError(query.stream_id))

    def _send_waiting(self) -> None:
        waiting = [item for item in self._waiting if not item[1].done()]
        self._waiting = []
        for at in range(0, len(waiting), QUERIES_PER_CALL):
            asked = waiting[at : at + QUERIES_PER_CALL]
            task = asyncio.create_task(self._answer(asked))
            self._in_flight[task] = asked
            task.add_done_callback(self._in_flight.pop)

    async def _answer(self, asked: Sequence[tuple[StreamQuery, Answer]]) -> None:
        try:
            answers = await self._send([query for query, _ in asked])
        except Exception as error:  # noqa: BLE001 - every caller receives it
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
        """Return the answers to the first queries, at least one."""
        request = objects_pb2.GetObjectsRequest(
            may_stop=True,
            queries=[
                objects_pb2.ObjectQuery(
                    stream_id=query.stream_id,
                    start_offset=query.start,
                    end_offset=None if query.end == UNLIMITED else query.end,
                    limit=query.limit,
                )
                for query in queries
            ],
        )
        answer = await self._client.call(methods.GET_OBJECTS, request)

        # A controller may stop early when the answer gets too large.
        if not 0 < len(answer.results) <= len(queries):
            raise errors.ProtocolViolationError(
                "GetObjects", detail=f"{len(answer.results)} lists answer {len(queries)} queries"
            )

        return answer.results


@dataclass(frozen=True, slots=True)
class Located:
    """Consecutive slices, the first of which contains the requested offset.

    They are empty if no object contains the offset: at the end of the committed records, or where
    offsets up to `lost_end_offset` are lost (-1: they are not). Only `StreamReader.locate` sets
    `error`, the error of a rejected query.
    """

    slices: tuple[Slice, ...]
    start_offset: int
    end_offset: int
    lost_end_offset: int = -1
    error: errors.RejectedError | None = None


def located_of(query: StreamQuery, answer: objects_pb2.ObjectList) -> Located:
    """Translate an answer, without its error code."""
    return Located(
        tuple(slice_of(piece) for piece in answer.objects),
        answer.stream_start_offset,
        answer.stream_end_offset,
        answer.lost_end_offset if answer.lost_end_offset > query.start else -1,
    )


def check_located(query: StreamQuery, located: objects_pb2.ObjectList) -> None:
    """Raise the error of a rejected query or an invalid answer."""
    if located.error == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED:
        raise errors.OffsetTrimmedError(query.stream_id, query.start, located.stream_start_offset)
    if located.error != common_pb2.ERROR_CODE_NONE:
        raise errors.rejection(located.error, f"read of stream {query.stream_id}")
    at = query.start
    for piece in located.objects:
        joins = piece.start_offset == at or (at == query.start and piece.start_offset <= at)
        if not joins or piece.end_offset <= at:
            raise errors.ProtocolViolationError(
                f"GetObjects of stream {query.stream_id}",
                detail=f"object {piece.object_id} contains [{piece.start_offset},"
                f" {piece.end_offset}), expected offset {at}",
            )
        at = piece.end_offset
