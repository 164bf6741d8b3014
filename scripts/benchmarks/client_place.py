"""A controller, a bucket and streams of one node, written and read by the product's client."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.cluster import running_cluster
from scripts.benchmarks.committer import LoadError
from streammeta.client import ReaderConfig, WriterConfig
from streammeta.client.compaction.config import CompactionTarget
from streammeta.client.controllers.methods import LIST_STREAM_SET_OBJECTS
from streammeta.client.parts import BrokerSession, ControllerClient, StreamReader, StreamWriter
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import common_pb2, nodes_pb2

MIB = 1 << 20
NODE_ID, NODE_EPOCH = 900_001, 1
FETCH_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdReads:
    """Cost of reading whole streams by a reader with nothing in memory."""

    payload_bytes: int
    gets: int

    @property
    def gets_per_mib(self) -> float:
        """Requests for each MiB of payload."""
        return round(self.gets / (self.payload_bytes / MIB), 3)


def require_same(before: ColdReads, after: ColdReads) -> None:
    """Raise `LoadError` unless compaction left as many readable bytes as before."""
    if before.payload_bytes != after.payload_bytes:
        raise LoadError(
            f"{after.payload_bytes} bytes are readable after compaction,"
            f" {before.payload_bytes} were before"
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Streams of one node. `endpoint` belongs to its only controller."""

    endpoint: str
    session: BrokerSession
    store: ObjectStore
    store_uri: str
    writer: StreamWriter
    stream_ids: tuple[int, ...]

    @property
    def target(self) -> CompactionTarget:
        """The node, for compaction of its objects."""
        return CompactionTarget.of(self.session.node)

    def reader(self) -> StreamReader:
        """Return a new reader, with nothing in memory."""
        return StreamReader(self.session.client, self.store, self.session.namespace, ReaderConfig())

    def requests(self) -> dict[str, int]:
        """Return the requests that the store has counted, by operation."""
        names = ("get_range", "put", "start_multipart", "upload_part", "copy_part")
        metrics = self.store.metrics()
        return {name: metrics.of(name).requests for name in names}

    async def set_object_count(self) -> int:
        """Return the number of SSOs."""
        count, token = 0, ""
        while True:
            page = common_pb2.PageRequest(page_size=1_000, page_token=token)
            request = nodes_pb2.ListStreamSetObjectsRequest(node_id=NODE_ID, page=page)
            answer = await self.session.client.call(LIST_STREAM_SET_OBJECTS, request)
            count += len(answer.objects)
            token = answer.next_page_token
            if not token:
                return count

    async def read(self, stream_ids: Sequence[int]) -> ColdReads:
        """Read streams from start to end, one after the other, each with a new reader."""
        payload_bytes = gets = 0
        for stream_id in stream_ids:
            async with self.reader() as reader:
                at = 0
                while (fetched := await reader.fetch(stream_id, at, FETCH_BYTES)).records:
                    at = fetched.next_offset
                    payload_bytes += fetched.payload_bytes
                gets += reader.stats.requests
        return ColdReads(payload_bytes=payload_bytes, gets=gets)


@contextlib.asynccontextmanager
async def running_place(
    root: Path, streams: int, config: WriterConfig, store_uri: str | None = None
) -> AsyncIterator[Place]:
    """Run a controller in `root`, and open `streams` streams of one node.

    Their objects go to `store_uri`, by default a directory.
    """
    with running_cluster(root, 1, store_uri=store_uri) as cluster:
        uri = cluster.store_uri
        with contextlib.closing(open_object_store(uri)) as store:
            async with ControllerClient(cluster.endpoints) as client:
                session = await BrokerSession.open(client, NODE_ID, NODE_EPOCH)
                ids = await session.create_streams([{}] * streams)
                opened = (await session.open_streams(dict.fromkeys(ids, 1))).require_all()
                async with StreamWriter(session, store, config) as writer:
                    writer.attach(opened.values())
                    yield Place(cluster.endpoints[0], session, store, uri, writer, tuple(ids))
