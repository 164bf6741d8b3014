"""Reading streams back: ask the map which objects hold a range, fetch their blocks, check the join.

Owns the order and completeness of what it returns: records of a stream follow each other without a
gap, from the offset asked for. Objects vanish under a reader when they are compacted away, so a
missing one makes it ask the map again; only one that the map goes on listing is an error.
Streams are read one by one with `read` and `iterate`, or many at once, object by object, with
`read_streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from broker_client import methods
from broker_client.controller_client import ControllerClient
from broker_client.errors import (
    CorruptObjectError,
    MissingObjectError,
    OffsetTrimmedError,
    ProtocolViolationError,
    refusal,
)
from broker_client.object_source import Block, ObjectSource, ReaderStats, merge_blocks
from broker_client.store_threads import StoreThreads
from proto import common_pb2, objects_pb2
from storage.errors import ObjectNotFoundError
from storage.object_format.index_block import UNLIMITED
from storage.object_format.object_key import OwnKey, parse_key
from storage.object_format.record import RecordBatch
from storage.object_store.base import ObjectStore

_MIB = 1024 * 1024
_QUERIES_PER_CALL = 2_000
_OBJECTS_PER_READ = 16
_VANISHED_RETRIES = 3
_VANISHED_WAIT = 0.05


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """Bounds of a reader, in bytes unless named otherwise."""

    index_cache_bytes: int = 64 * _MIB  # indexes kept for the next read
    bulk_bytes: int = 64 * _MIB  # blocks that `read_streams` holds at the same time
    fetch_threads: int = 8  # requests to the store at the same time


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """Asks for the objects of `[start, end)` of a stream; `end` -1: no end; `limit` 0: 1000."""

    stream_id: int
    start: int
    end: int = UNLIMITED
    limit: int = 0


@dataclass(frozen=True, slots=True)
class _StreamPlan:
    """All blocks of one stream, in offset order, covering `[start, end)`."""

    stream_id: int
    start: int
    end: int
    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        return sum(block.entry.size for block in self.blocks)


class StreamReader:
    """Reads streams of the cluster whose objects have `namespace` in their keys."""

    def __init__(
        self,
        client: ControllerClient,
        store: ObjectStore,
        namespace: str,
        config: ReaderConfig | None = None,
    ) -> None:
        self._config = config or ReaderConfig()
        self._client = client
        self._namespace = namespace
        self._threads = StoreThreads(store, self._config.fetch_threads, "fetch")
        self._source = ObjectSource(self._threads, namespace, self._config.index_cache_bytes)

    @property
    def stats(self) -> ReaderStats:
        """What was asked of the store so far."""
        return self._source.stats

    def close(self) -> None:
        """Stop the threads; reads that wait fail."""
        self._threads.close()

    async def locate(self, queries: Sequence[StreamQuery]) -> list[objects_pb2.ObjectList]:
        """Ask the map about many ranges in few calls; the answers are in the order of `queries`.

        Error codes are left in the answers.
        """
        answers: list[objects_pb2.ObjectList] = []
        for at in range(0, len(queries), _QUERIES_PER_CALL):
            part = queries[at : at + _QUERIES_PER_CALL]
            request = objects_pb2.GetObjectsRequest(
                queries=[
                    objects_pb2.ObjectQuery(
                        stream_id=one.stream_id,
                        start_offset=one.start,
                        end_offset=one.end,
                        limit=one.limit,
                    )
                    for one in part
                ]
            )
            answer = await self._client.call(methods.GET_OBJECTS, request)
            if len(answer.results) != len(part):
                raise ProtocolViolationError(
                    "GetObjects", detail=f"{len(answer.results)} lists answer {len(part)} queries"
                )
            answers.extend(answer.results)
        return answers

    async def read(
        self, stream_id: int, start: int, end: int | None = None, max_bytes: int = 8 * _MIB
    ) -> list[RecordBatch]:
        """Read record batches that cover `[start, end)`, or the front of it, without a gap.

        The first may begin before `start` and the last reach beyond `end`, since batches are not
        cut. About `max_bytes` of payload are read, at least one batch if there is any; none at
        the stream's end. Raises `StreamNotFoundError`, `OffsetTrimmedError`, `CorruptObjectError`,
        `MissingObjectError`.
        """
        if start < 0 or (end is not None and end <= start) or max_bytes < 1:
            raise ValueError(
                f"read of stream {stream_id} [{start}, {end}), max_bytes {max_bytes}: wanted"
                " 0 <= start < end and at least 1 byte"
            )
        query = StreamQuery(stream_id, start, UNLIMITED if end is None else end, _OBJECTS_PER_READ)
        for attempt in range(_VANISHED_RETRIES + 1):
            try:
                return await self._read_once(query, max_bytes)
            except ObjectNotFoundError as error:
                await self._pause_or_raise(error, stream_id, attempt)
        raise AssertionError("the last attempt returns or raises")

    async def iterate(
        self, stream_id: int, start: int | None = None, end: int | None = None
    ) -> AsyncIterator[RecordBatch]:
        """Go through a stream from `start` (None: its first visible offset) to `end`.

        Without `end` it stops where the stream ends when it gets there.
        """
        at = await self._first_offset(stream_id) if start is None else start
        while end is None or at < end:
            records = await self.read(stream_id, at, end)
            if not records:
                return
            for record in records:
                yield record
            at = records[-1].end_offset

    async def read_streams(
        self, stream_ids: Iterable[int]
    ) -> AsyncIterator[tuple[int, list[RecordBatch]]]:
        """Read whole streams, as far as objects hold them now, in ascending order of id.

        Blocks of many streams lie together in a stream set object, so streams are read in groups
        of neighbouring ids of at most `bulk_bytes`, each object once for a group. A stream larger
        than that makes a group alone, whole in memory: use `iterate` for such.
        """
        wanted = sorted(set(stream_ids))
        for at in range(0, len(wanted), _QUERIES_PER_CALL):
            pending = wanted[at : at + _QUERIES_PER_CALL]
            attempt = 0
            while pending:
                try:
                    for group in self._groups(await self._plan(pending)):
                        for stream_id, records in await self._read_group(group):
                            yield stream_id, records
                        pending = pending[len(group) :]
                        attempt = 0
                except ObjectNotFoundError as error:
                    await self._pause_or_raise(error, pending[0], attempt)
                    attempt += 1

    async def _pause_or_raise(
        self, error: ObjectNotFoundError, stream_id: int, attempt: int
    ) -> None:
        """Wait before the map is asked again, unless that was done often enough."""
        if attempt < _VANISHED_RETRIES:
            await asyncio.sleep(_VANISHED_WAIT * 2**attempt)
            return
        parsed = parse_key(error.key, self._namespace)
        object_id = parsed.object_id if isinstance(parsed, OwnKey) else -1
        raise MissingObjectError(error.key, object_id, stream_id) from error

    async def _first_offset(self, stream_id: int) -> int:
        located = (await self.locate([StreamQuery(stream_id, 0, limit=1)]))[0]
        if located.error not in (common_pb2.NONE, common_pb2.OFFSET_NOT_MATCHED):
            raise refusal(located.error, f"read of stream {stream_id}")
        return located.stream_start_offset

    async def _read_once(self, query: StreamQuery, max_bytes: int) -> list[RecordBatch]:
        located = (await self.locate([query]))[0]
        _check_located(query, located)
        blocks = await self._find_blocks(query, located.objects, max_bytes)
        records = await self._fetch(blocks)
        return _trimmed(records, query, max_bytes)

    async def _find_blocks(
        self,
        query: StreamQuery,
        pieces: Iterable[objects_pb2.ObjectSlice],
        max_bytes: int,
    ) -> list[Block]:
        """List the blocks of a stream, object after object, until the end or `max_bytes`."""
        blocks: list[Block] = []
        at, left = query.start, max_bytes
        for piece in pieces:
            if left <= 0 or (query.end != UNLIMITED and at >= query.end):
                break
            index = await self._source.index(piece, query.stream_id)
            wanted_end = piece.end_offset if query.end == UNLIMITED else query.end
            for block in index.find(query.stream_id, at, min(wanted_end, piece.end_offset), left):
                if blocks and block.entry.start_offset != at:
                    raise self._mismatch(piece, query, f"a block starts below offset {at}")
                blocks.append(block)
                at = block.entry.end_offset
                left -= block.entry.payload_size
            self._check_covered(piece, query, at, left)
        return blocks

    def _check_covered(
        self, piece: objects_pb2.ObjectSlice, query: StreamQuery, at: int, left: int
    ) -> None:
        """Hold an object's index against what the map says is in it."""
        wanted = piece.end_offset
        if query.end != UNLIMITED:
            wanted = min(wanted, query.end)
        if at < wanted and left > 0:
            raise self._mismatch(piece, query, f"its index holds nothing at offset {at}")

    def _mismatch(
        self, piece: objects_pb2.ObjectSlice, query: StreamQuery, found: str
    ) -> CorruptObjectError:
        return CorruptObjectError(
            self._source.key(piece.object_id),
            piece.object_id,
            query.stream_id,
            f"{found}; the map lists [{piece.start_offset}, {piece.end_offset}) in it",
        )

    async def _fetch(self, blocks: Sequence[Block]) -> list[RecordBatch]:
        """Fetch and decode blocks of one stream, and put them into offset order."""
        ranges = merge_blocks(blocks)
        decoded = await asyncio.gather(*(self._source.records(one) for one in ranges))
        by_entry = {
            (block.object_id, block.entry.position): records
            for one, lists in zip(ranges, decoded, strict=True)
            for block, records in zip(one.blocks, lists, strict=True)
        }
        return [
            record for block in blocks for record in by_entry[block.object_id, block.entry.position]
        ]

    async def _plan(self, stream_ids: Sequence[int]) -> list[_StreamPlan]:
        """Find all blocks of each stream."""
        located = await self._locate_whole(stream_ids)
        await self._warm_indexes(located)
        plans: list[_StreamPlan] = []
        for query, pieces in located:
            blocks = await self._find_blocks(query, pieces, 1 << 62)
            plans.append(_StreamPlan(query.stream_id, query.start, query.end, tuple(blocks)))
            await asyncio.sleep(0)  # cached indexes never wait: let other work of the loop run
        return plans

    async def _locate_whole(
        self, stream_ids: Sequence[int]
    ) -> list[tuple[StreamQuery, list[objects_pb2.ObjectSlice]]]:
        """List the objects of whole streams, from their first visible offset to their end."""
        found: dict[int, tuple[StreamQuery, list[objects_pb2.ObjectSlice]]] = {}
        queries = [StreamQuery(stream_id, 0) for stream_id in stream_ids]
        while queries:
            further: list[StreamQuery] = []
            for query, answer in zip(queries, await self.locate(queries), strict=True):
                trimmed = answer.error == common_pb2.OFFSET_NOT_MATCHED
                if trimmed and answer.stream_start_offset > query.start:
                    further.append(StreamQuery(query.stream_id, answer.stream_start_offset))
                    continue
                _check_located(query, answer)
                whole = StreamQuery(query.stream_id, query.start, answer.stream_end_offset)
                known, pieces = found.setdefault(query.stream_id, (whole, []))
                pieces.extend(answer.objects)
                if answer.objects and answer.objects[-1].end_offset < known.end:
                    further.append(StreamQuery(query.stream_id, answer.objects[-1].end_offset))
            queries = further
        return [found[stream_id] for stream_id in stream_ids]

    async def _warm_indexes(
        self, located: Iterable[tuple[StreamQuery, list[objects_pb2.ObjectSlice]]]
    ) -> None:
        """Fetch the index of each object once, side by side."""
        first_use = {
            piece.object_id: (piece, query.stream_id) for query, pieces in located
            for piece in reversed(pieces)
        }  # fmt: skip
        await asyncio.gather(*(self._source.index(*use) for use in first_use.values()))

    def _groups(self, plans: Sequence[_StreamPlan]) -> Iterable[Sequence[_StreamPlan]]:
        """Cut `plans` into groups of at most `bulk_bytes`, or of one stream."""
        group: list[_StreamPlan] = []
        size = 0
        for plan in plans:
            if group and size + plan.size > self._config.bulk_bytes:
                yield group
                group, size = [], 0
            group.append(plan)
            size += plan.size
        if group:
            yield group

    async def _read_group(
        self, group: Sequence[_StreamPlan]
    ) -> list[tuple[int, list[RecordBatch]]]:
        """Read the streams of a group together, and cut the result by stream again."""
        records = await self._fetch([block for plan in group for block in plan.blocks])
        by_stream: dict[int, list[RecordBatch]] = {plan.stream_id: [] for plan in group}
        for record in records:
            by_stream[record.stream_id].append(record)
        return [
            (plan.stream_id, _trimmed(by_stream[plan.stream_id], plan, 1 << 62)) for plan in group
        ]


def _check_located(query: StreamQuery, located: objects_pb2.ObjectList) -> None:
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


def _trimmed(
    records: Sequence[RecordBatch], query: StreamQuery | _StreamPlan, max_bytes: int
) -> list[RecordBatch]:
    """Keep the batches that overlap the range asked for, until `max_bytes` are spent."""
    kept: list[RecordBatch] = []
    left = max_bytes
    for record in records:
        if record.end_offset <= query.start:
            continue
        if left <= 0 or (query.end != UNLIMITED and record.base_offset >= query.end):
            break
        kept.append(record)
        left -= len(record.payload)
    return kept
