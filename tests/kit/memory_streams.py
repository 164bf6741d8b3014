"""Streams in memory, as `StreamClient` offers them; a test says when appends are durable.

Several `MemoryStreams` share one `StreamTable`, as brokers share a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from streammeta.client import Fetched, OpenedStream, Outcomes, RecordBatch
from streammeta.client.errors import StreamFencedError
from streammeta.v1 import common_pb2

_NODE = 1


@dataclass
class TableStream:
    """A stream: its durable records, bounds, epoch and tags."""

    tags: Mapping[str, str]
    records: list[RecordBatch] = field(default_factory=list)
    start: int = 0
    end: int = 0
    epoch: int = -1
    is_open: bool = False


@dataclass
class StreamTable:
    """The streams of a cluster, by id."""

    streams: dict[int, TableStream] = field(default_factory=dict)


@dataclass
class _Pending:
    stream_id: int
    epoch: int
    records: list[RecordBatch]
    future: asyncio.Future[int]


class MemoryStreams:
    """Streams of one process. With `holds_back` appends wait for `settle` to become durable."""

    def __init__(self, table: StreamTable | None = None, *, holds_back: bool = False) -> None:
        self.table = StreamTable() if table is None else table
        self.holds_back = holds_back
        self.epochs: dict[int, int] = {}
        self.next: dict[int, int] = {}
        self.pending: list[_Pending] = []
        self.fetches: list[tuple[int, int]] = []

    @property
    def writer(self) -> MemoryStreams:
        return self

    def next_offset(self, stream_id: int) -> int:
        return self.next[stream_id]

    async def create_streams(self, tags: Sequence[Mapping[str, str]]) -> list[int]:
        first = len(self.table.streams)
        for index, tag in enumerate(tags):
            self.table.streams[first + index] = TableStream(tag)
        return list(range(first, first + len(tags)))

    async def open_streams(self, streams: Mapping[int, int]) -> Outcomes[OpenedStream]:
        outcomes: Outcomes[OpenedStream] = Outcomes()
        for stream_id, epoch in streams.items():
            stream = self.table.streams[stream_id]
            if epoch <= stream.epoch:
                outcomes.failed[stream_id] = StreamFencedError(
                    f"opening stream {stream_id}", code=common_pb2.ERROR_CODE_STREAM_FENCED
                )
                continue
            stream.epoch, stream.is_open = epoch, True
            self.epochs[stream_id] = epoch
            self.next[stream_id] = stream.end
            outcomes.done[stream_id] = OpenedStream(stream_id, epoch, stream.start, stream.end)
        return outcomes

    async def close_streams(self, stream_ids: Iterable[int]) -> Outcomes[None]:
        self.settle()
        for stream_id in stream_ids:
            self.table.streams[stream_id].is_open = False
        return Outcomes(dict.fromkeys(stream_ids))

    async def trim_streams(self, new_starts: Mapping[int, int]) -> Outcomes[int]:
        for stream_id, start in new_starts.items():
            stream = self.table.streams[stream_id]
            assert start <= stream.end
            stream.start = max(stream.start, start)
            stream.records = [row for row in stream.records if row.end_offset > stream.start]
        return Outcomes(
            {stream_id: self.table.streams[stream_id].start for stream_id in new_starts}
        )

    async def append(
        self,
        stream_id: int,
        payload: bytes,
        count: int = 1,
        *,
        timestamp_ms: int | None = None,
        max_timestamp_ms: int | None = None,
    ) -> asyncio.Future[int]:
        return self._admit(stream_id, [(payload, count)])

    async def append_many(
        self, stream_id: int, payloads: Sequence[bytes], *, timestamp_ms: int | None = None
    ) -> asyncio.Future[int]:
        return self._admit(stream_id, [(payload, 1) for payload in payloads])

    def _admit(self, stream_id: int, items: list[tuple[bytes, int]]) -> asyncio.Future[int]:
        epoch = self.epochs[stream_id]
        records = []
        for payload, count in items:
            base = self.next[stream_id]
            records.append(RecordBatch(stream_id, epoch, base, count, payload))
            self.next[stream_id] = base + count
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.pending.append(_Pending(stream_id, epoch, records, future))
        if not self.holds_back:
            self.settle()
        return future

    def settle(self, count: int | None = None) -> None:
        """Make the first `count` pending appends durable, all by default, or fail fenced ones."""
        taken = self.pending[:count]
        del self.pending[: len(taken)]
        for write in taken:
            stream = self.table.streams[write.stream_id]
            if stream.epoch != write.epoch:
                error = StreamFencedError(
                    f"append to stream {write.stream_id}", code=common_pb2.ERROR_CODE_STREAM_FENCED
                )
                write.future.set_exception(error)
                continue
            stream.records.extend(write.records)
            stream.end = write.records[-1].end_offset
            write.future.set_result(write.records[0].base_offset)

    async def fetch(self, stream_id: int, offset: int, max_bytes: int = 2**20) -> Fetched:
        self.fetches.append((stream_id, offset))
        stream = self.table.streams[stream_id]
        assert offset >= stream.start
        found: list[RecordBatch] = []
        size = 0
        for record in stream.records:
            if record.end_offset <= offset:
                continue
            size += len(record.payload)
            if found and size > max_bytes:
                break
            found.append(record)
        following = found[-1].end_offset if found else offset
        return Fetched(found, following, stream.start, stream.end)
