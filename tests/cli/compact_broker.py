"""A small broker for tests of `streammeta compact`: uploads set objects, reads its streams back."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from streammeta.cli.local_cluster import LocalCluster
from streammeta.client import (
    BrokerSession,
    ControllerClient,
    StreamReader,
    StreamWriter,
    WriterConfig,
)
from streammeta.client.methods import GET_NODES
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.v1 import nodes_pb2

ROWS = 5
"""Records of a stream in each upload."""

_CONFIG = WriterConfig(linger_s=60.0)  # an upload is made when the test says so


@dataclass(frozen=True, slots=True)
class Broker:
    """One process of a node, with some open streams."""

    session: BrokerSession
    store: LocalObjectStore
    stream_ids: Sequence[int]
    writer: StreamWriter

    async def upload(self, count: int) -> None:
        """Make `count` set objects, each with `ROWS` records of every stream."""
        for _ in range(count):
            acks = [
                await self.writer.append(stream_id, b"%d/%d|" % (stream_id, row) + b"." * 200)
                for stream_id in self.stream_ids
                for row in range(ROWS)
            ]
            await self.writer.flush()
            for ack in acks:
                await ack

    async def set_objects(self) -> int:
        """Ask how many set objects the node has."""
        request = nodes_pb2.GetNodesRequest(node_ids=[self.session.node.node_id])
        answer = await self.session.client.call(GET_NODES, request)
        return answer.nodes[0].stream_set_object_count

    async def read(self) -> dict[int, list[bytes]]:
        """Read every stream from its beginning to its end."""
        client = self.session.client
        reader = StreamReader(client, self.store, self.session.namespace)
        try:
            return {
                stream_id: [bytes(record.payload) for record in records]
                async for stream_id, records in reader.read_streams(self.stream_ids)
            }
        finally:
            await reader.close()


@asynccontextmanager
async def broker(cluster: LocalCluster, node_id: int, streams: int = 3) -> AsyncIterator[Broker]:
    """Register node `node_id`, open new streams for it; at the end they are closed."""
    async with ControllerClient(cluster.endpoints, rng=random.Random(node_id)) as client:
        session = await BrokerSession.open(client, node_id, 1)
        stream_ids = await session.create_streams([{}] * streams)
        opened = (await session.open_streams(dict.fromkeys(stream_ids, 1))).require_all()
        store = LocalObjectStore(Path(cluster.store_uri.removeprefix("file://")))
        async with StreamWriter(session, store, _CONFIG) as writer:
            writer.attach(opened.values())
            yield Broker(session, store, stream_ids, writer)
        (await session.close_streams(dict.fromkeys(stream_ids, 1))).require_all()
