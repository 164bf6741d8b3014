"""A controller, a bucket and streams to be compacted; written and read by the product's client."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.bench_cluster import running_cluster
from scripts.benchmarks.committer import LoadError
from streammeta.client import (
    BrokerSession,
    ControllerClient,
    ReaderConfig,
    StreamReader,
    StreamWriter,
    WriterConfig,
)
from streammeta.client.compaction.config import CompactionTarget
from streammeta.client.methods import LIST_STREAM_SET_OBJECTS
from streammeta.storage.object_store.base import ObjectStore
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.v1 import common_pb2, nodes_pb2

MIB = 1 << 20
NODE_ID, NODE_EPOCH = 900_001, 1
FETCH_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdReads:
    """What reading streams whole cost a reader with nothing in memory."""

    payload_bytes: int
    gets: int

    @property
    def gets_per_mib(self) -> float:
        """Requests for each MiB of payload."""
        return round(self.gets / (self.payload_bytes / MIB), 3)


def require_same(before: ColdReads, after: ColdReads) -> None:
    """Raise `LoadError` unless as much could be read after compaction as before."""
    if before.payload_bytes != after.payload_bytes:
        raise LoadError(
            f"after compaction {after.payload_bytes} bytes are readable, before it were"
            f" {before.payload_bytes}"
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Streams of one node; `endpoint` is that of its only controller."""

    endpoint: str
    session: BrokerSession
    store: ObjectStore
    store_uri: str
    writer: StreamWriter
    stream_ids: tuple[int, ...]

    @property
    def target(self) -> CompactionTarget:
        """Node whose objects are compacted."""
        return CompactionTarget.of(self.session.node)

    async def set_object_sizes(self) -> list[int]:
        """Return the bytes of each set object."""
        sizes: list[int] = []
        token = ""
        while True:
            request = nodes_pb2.ListStreamSetObjectsRequest(
                node_id=NODE_ID, page=common_pb2.PageRequest(page_size=1_000, page_token=token)
            )
            answer = await self.session.client.call(LIST_STREAM_SET_OBJECTS, request)
            sizes += [each.object_size for each in answer.objects]
            token = answer.next_page_token
            if not token:
                return sizes

    async def read(self, stream_ids: Sequence[int]) -> ColdReads:
        """Read streams from start to end, one after the other, each with a new reader."""
        payload_bytes = gets = 0
        for stream_id in stream_ids:
            client, namespace = self.session.client, self.session.namespace
            async with StreamReader(client, self.store, namespace, ReaderConfig()) as reader:
                at = 0
                while (fetched := await reader.fetch(stream_id, at, FETCH_BYTES)).records:
                    at = fetched.next_offset
                    payload_bytes += fetched.payload_bytes
                gets += reader.stats.requests
        return ColdReads(payload_bytes=payload_bytes, gets=gets)


@contextlib.asynccontextmanager
async def running_place(root: Path, streams: int, config: WriterConfig) -> AsyncIterator[Place]:
    """Run a controller over `root`, and open `streams` streams of one node."""
    with running_cluster(root, 1) as cluster:
        bucket = root / "bucket"
        store = LocalObjectStore(bucket)
        async with ControllerClient(cluster.endpoints) as client:
            session = await BrokerSession.open(client, NODE_ID, NODE_EPOCH)
            ids = await session.create_streams([{}] * streams)
            opened = (await session.open_streams(dict.fromkeys(ids, 1))).require_all()
            async with StreamWriter(session, store, config) as writer:
                writer.attach(opened.values())
                yield Place(
                    cluster.endpoints[0], session, store, f"file://{bucket}", writer, tuple(ids)
                )
