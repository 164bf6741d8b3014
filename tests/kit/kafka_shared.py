"""Brokers of diskless topics over shared streams in memory, which all of them write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import Endpoint, Topic
from streammeta.brokers.kafka.cluster.keys import topic_key
from streammeta.brokers.kafka.diskless.partitions import DisklessPartitions
from streammeta.client import EntityChange, OffsetAtTime, Producer, RecordBatch
from streammeta.client.controllers import methods
from streammeta.client.errors import (
    BrokerClientError,
    OffsetTrimmedError,
    StreamNotFoundError,
)
from streammeta.client.parts import Located, StreamQuery
from streammeta.v1 import common_pb2, streams_pb2
from tests.kit.kafka_cluster import Client, Cluster, node
from tests.kit.memory_keys import MemoryControllers
from tests.kit.memory_streams import StreamTable, TableStream

_NONE = common_pb2.ERROR_CODE_NONE
DISKLESS = {"diskless.enable": "true"}


@dataclass
class Commits:
    """What is committed in shared streams, and who waits for changes of them."""

    table: StreamTable
    placed: dict[tuple[int, Producer], int] = field(default_factory=dict)
    watchers: list[Callable[[int], None]] = field(default_factory=list)

    def commit(self, stream_id: int, payload: bytes, count: int, producer: Producer | None) -> int:
        """Append a batch, or find the same one, and return its first offset."""
        stream = self.stream(stream_id)
        if producer is not None and (stream_id, producer) in self.placed:
            return self.placed[stream_id, producer]
        base = stream.end
        stream.records.append(RecordBatch(stream_id, 0, base, count, payload))
        stream.end = base + count
        if producer is not None:
            self.placed[stream_id, producer] = base
        self.notify(stream_id)
        return base

    def stream(self, stream_id: int) -> TableStream:
        """Return a stream. Raises `StreamNotFoundError`."""
        if stream_id not in self.table.streams:
            raise StreamNotFoundError(f"stream {stream_id}")
        return self.table.streams[stream_id]

    def notify(self, stream_id: int) -> None:
        """Report a change of a stream to all watches."""
        for watcher in self.watchers:
            watcher(stream_id)


class MemorySharedWriter:
    """Appends to shared streams. With `holds_back` they wait for `settle`."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits
        self.holds_back = False
        self.pending: list[tuple[Callable[[], int], asyncio.Future[int]]] = []

    async def append(
        self,
        stream_id: int,
        record: bytes,
        count: int = 1,
        *,
        producer: Producer | None = None,
        timestamp_ms: int | None = None,
    ) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def commit() -> int:
            return self._commits.commit(stream_id, record, count, producer)

        self.pending.append((commit, future))
        if not self.holds_back:
            self.settle()
        return future

    def settle(self, failure: BrokerClientError | None = None) -> None:
        """Commit the pending appends, or let all of them fail."""
        pending, self.pending = self.pending, []
        for commit, future in pending:
            try:
                if failure is not None:
                    raise failure
                future.set_result(commit())
            except BrokerClientError as error:
                future.set_exception(error)


class MemoryReader:
    """Bounds and times of streams."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits
        self.located = 0

    async def locate(self, queries: Sequence[StreamQuery]) -> list[Located]:
        self.located += 1
        found = []
        for query in queries:
            stream = self._commits.stream(query.stream_id)
            found.append(Located((), stream.start, stream.end))
        return found

    async def offset_for_timestamp(
        self, stream_id: int, timestamp_ms: int, *, timestamp_of: Callable[[RecordBatch], int]
    ) -> OffsetAtTime:
        stream = self._commits.stream(stream_id)
        for record in stream.records:
            if timestamp_of(record) >= timestamp_ms:
                return OffsetAtTime(max(stream.start, record.base_offset), timestamp_of(record))
        return OffsetAtTime(stream.end, None)


class SharedClient(Client):
    """A client of a node that also writes shared streams."""

    def __init__(self, controllers: MemoryControllers, node_id: int, commits: Commits) -> None:
        super().__init__(controllers, node_id, commits.table)
        self._commits = commits
        self.shared_writer = MemorySharedWriter(commits)
        self.reader = MemoryReader(commits)

    async def create_streams(
        self, tags: Sequence[Mapping[str, str]], *, shared: bool = False
    ) -> list[int]:
        return await super().create_streams(tags)

    async def fetch(self, stream_id: int, offset: int, max_bytes: int = 2**20) -> Any:
        stream = self._commits.stream(stream_id)
        if offset < stream.start:
            raise OffsetTrimmedError(stream_id, offset, stream.start)
        return await super().fetch(stream_id, offset, max_bytes)

    async def read(self, stream_id: int, start: int, *, max_bytes: int) -> list[RecordBatch]:
        return list((await self.fetch(stream_id, start, max_bytes)).records)

    @asynccontextmanager
    async def watch(
        self, kinds: Collection[str], *, stream_ids: Sequence[int] = ()
    ) -> AsyncIterator[AsyncIterator[EntityChange]]:
        changes: asyncio.Queue[EntityChange] = asyncio.Queue()

        def note(stream_id: int) -> None:
            changes.put_nowait(EntityChange(1, "stream", "committed", stream_id))

        async def iterate() -> AsyncIterator[EntityChange]:
            while True:
                yield await changes.get()

        self._commits.watchers.append(note)
        try:
            yield iterate()
        finally:
            self._commits.watchers.remove(note)


class SharedCluster(Cluster):
    """Brokers that are started with --shared, over one map of streams."""

    def __init__(self) -> None:
        super().__init__()
        self.commits = Commits(self.table)
        self.issued = 0
        self.clients: dict[int, SharedClient] = {}
        self.controllers.more[methods.TRIM_STREAMS.name] = self._trim
        self.controllers.more[methods.ISSUE_PRODUCER_IDS.name] = self._issue
        self.controllers.more[methods.DELETE_STREAMS.name] = self._delete

    async def share(self, node_id: int, rack: str | None = None) -> Broker:
        """Return a broker that is in the view, and reads it when a test says so."""
        client = self.clients[node_id] = SharedClient(self.controllers, node_id, self.commits)
        self.controllers.nodes.append(node(node_id))
        endpoint = Endpoint("h", 1, 1, rack, is_shared=True)
        await self.keys.put({f"broker/{node_id}": endpoint.document()})
        broker = Broker(cast(Any, client), self.keys, "c", node_id, rack=rack)
        broker.diskless = DisklessPartitions(cast(Any, client))
        return broker

    async def make_diskless(
        self, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> Topic:
        """Put the key of a diskless topic, whose streams the first broker to look provides."""
        topic = Topic("t", "id-t", partitions, {**DISKLESS, **(configs or {})})
        await self.keys.put({topic_key("t"): topic.document()})
        return topic

    def _trim(self, asked: streams_pb2.TrimStreamsRequest) -> streams_pb2.TrimStreamsResponse:
        starts = []
        for trim in asked.streams:
            stream = self.commits.stream(trim.stream_id)
            stream.start = max(stream.start, min(trim.new_start_offset, stream.end))
            stream.records = [row for row in stream.records if row.end_offset > stream.start]
            starts.append(stream.start)
            self.commits.notify(trim.stream_id)
        return streams_pb2.TrimStreamsResponse(errors=[_NONE] * len(starts), start_offsets=starts)

    def _issue(
        self, asked: streams_pb2.IssueProducerIdsRequest
    ) -> streams_pb2.IssueProducerIdsResponse:
        first, self.issued = self.issued, self.issued + asked.count
        return streams_pb2.IssueProducerIdsResponse(first_producer_id=first)

    def _delete(self, asked: streams_pb2.DeleteStreamsRequest) -> streams_pb2.DeleteStreamsResponse:
        for stream in asked.streams:
            self.table.streams.pop(stream.stream_id, None)
        return streams_pb2.DeleteStreamsResponse(errors=[_NONE] * len(asked.streams))


async def two_brokers(
    partitions: int = 1, configs: Mapping[str, str] | None = None
) -> tuple[SharedCluster, Topic, Broker, Broker]:
    """Return a cluster with a diskless topic, and two brokers that serve it."""
    cluster = SharedCluster()
    topic = await cluster.make_diskless(partitions, configs)
    brokers = [await cluster.share(node_id) for node_id in (1, 2)]
    for broker in brokers:
        await broker.refresh()
    return cluster, topic, brokers[0], brokers[1]
