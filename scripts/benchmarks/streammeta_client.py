"""Commits to a streammeta leader, unary or on one stream of messages, and small puts.

Requests consist of columns encoded beforehand and go over the small HTTP/2 client, so that the load
costs little CPU compared with the controllers. On a stream of messages all commits that came
together travel in one message, as the product's client sends them.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.committer import (
    OBJECT_BYTES,
    STEP,
    Connected,
    Load,
    LoadError,
    SlotStreams,
    id_column,
)
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.protobuf_bytes import length_delimited, number
from streammeta.client import NodeIdentity
from streammeta.client.commits.messages import Upload
from streammeta.client.commits.pipeline import CommitPipeline
from streammeta.client.errors import code_name
from streammeta.client.parts import ControllerClient
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2

NODE_ID = 1_000
BATCH_MAX = 10_000
"""Streams, or prepared ids, of one request."""
ROWS_MAX = 20_000
"""Ranges of one message."""
MESSAGES_IN_FLIGHT = 4
"""Unanswered messages on the pipeline. Later commits wait and share a message."""
SERVING_WITHIN_S = 10.0
OBJECT_TTL_MS = 3_600_000
VALUE_BYTES = 100
NODE = common_pb2.NodeIdentity(node_id=NODE_ID, node_epoch=1)
_NODE_FIELD = length_delimited(1, NODE.SerializeToString())


@dataclass(slots=True)
class OpenSlot:
    """A slot's streams, open, and the columns of a commit that never change."""

    streams: SlotStreams
    stream_ids: bytes
    epochs: bytes
    id_and_epoch_columns: bytes
    """Fields 1 and 2 of this slot's RangeColumns."""


class PreparedIds:
    """Prepared object ids, fetched before they run out."""

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._ids: list[int] = []
        self._fetching = asyncio.Lock()

    async def fetch(self, count: int) -> None:
        """Prepare at least `count` more."""
        for turn in range(-(-count // BATCH_MAX)):
            answer = await call(
                self._connection,
                "ObjectService/PrepareObjects",
                objects_pb2.PrepareObjectsRequest(
                    request_id=f"bench-{time.monotonic_ns()}-{turn}",
                    node=NODE,
                    count=BATCH_MAX,
                    ttl_ms=OBJECT_TTL_MS,
                ),
                objects_pb2.PrepareObjectsResponse,
            )
            require(answer.error, "PrepareObjects")
            first = answer.first_object_id
            # Taken from the end of the list, where it is fast.
            self._ids.extend(reversed(range(first, first + BATCH_MAX)))

    async def next(self) -> int:
        """Return an id not used before."""
        while not self._ids:
            async with self._fetching:  # one fetch serves all that wait
                if not self._ids:
                    await self.fetch(BATCH_MAX)
        return self._ids.pop()


class _Committer(Connected):
    """Connection, open streams and prepared object ids of a load."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._slots: list[OpenSlot] = []

    async def open(self) -> None:
        """Register the node, create and open all streams, prepare the objects."""
        await super().open()
        self._prepared = PreparedIds(self._connection)
        self._slots = await open_slots(self._connection, self._load)
        await self._prepared.fetch(self._load.objects)


class UnaryCommitter(_Committer):
    """CommitStreamSetObject, one call for each commit."""

    _CONSTANT = objects_pb2.CommitStreamSetObjectRequest(
        node=NODE, object_size=OBJECT_BYTES, on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL
    ).SerializeToString()

    def stream_ids(self, slot: int) -> list[int]:
        """Return the streams of a slot."""
        return self._slots[slot].streams.ids

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        at = self._slots[slot]
        object_id = await self._prepared.next()
        starts, ends = at.streams.columns()
        ranges = (at.id_and_epoch_columns, length_delimited(3, starts), length_delimited(4, ends))
        request = (
            *(self._CONSTANT, number(3, object_id), number(4, object_id)),
            length_delimited(7, b"".join(ranges)),
        )

        path = "/streammeta.v1.ObjectService/CommitStreamSetObject"
        received = await self._connection.call(path, b"".join(request))
        answer = objects_pb2.CommitStreamSetObjectResponse.FromString(received)
        require(answer.error, "CommitStreamSetObject")
        at.streams.advance()


@dataclass(slots=True)
class _Waiting:
    slot: OpenSlot
    object_id: int
    done: asyncio.Future[None]


class PipelinedCommitter(_Committer):
    """CommitPipeline: one stream of messages, each with all commits that came together."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._waiting: deque[_Waiting] = deque()
        self._sent: deque[list[_Waiting]] = deque()
        self._is_sending = False

    async def open(self) -> None:
        """Register the node, create and open all streams, prepare the objects, begin the stream."""
        await super().open()
        self._stream_id = self._connection.open(
            "/streammeta.v1.ObjectService/CommitPipeline", self._on_answer, self._on_end
        )

    async def commit(self, slot: int) -> int:
        """Make the next commit of a slot and return the id of its object.

        The commit travels with all others of this turn of the event loop.
        """
        object_id = await self._prepared.next()
        loop = asyncio.get_running_loop()
        waiting = _Waiting(self._slots[slot], object_id, loop.create_future())
        self._waiting.append(waiting)
        if not self._is_sending:
            self._is_sending = True
            loop.call_soon(self._send)
        await waiting.done
        waiting.slot.streams.advance()
        return object_id

    def _send(self) -> None:
        self._is_sending = False
        # Commits that wait for a free message share the next one, as in the product's client.
        commits_max = max(1, ROWS_MAX // self._load.ranges)
        while self._waiting and len(self._sent) < MESSAGES_IN_FLIGHT:
            count = min(commits_max, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(count)]
            self._sent.append(batch)
            self._connection.send(
                self._stream_id,
                upload_message([(waiting.slot, waiting.object_id) for waiting in batch]),
            )

    def _on_answer(self, message: bytes) -> None:
        answer = objects_pb2.CommitPipelineResponse.FromString(message)
        batch = self._sent.popleft()
        # No errors at all stand for success of every commit.
        errors = answer.uploads.errors or [common_pb2.ERROR_CODE_NONE] * len(batch)
        for waiting, error in zip(batch, errors, strict=True):
            if waiting.done.done():
                continue
            if error == common_pb2.ERROR_CODE_NONE:
                waiting.done.set_result(None)
            else:
                waiting.done.set_exception(_rejected("CommitPipeline", error))
        self._send()

    def _on_end(self) -> None:
        for waiting in [*itertools.chain.from_iterable(self._sent), *self._waiting]:
            if not waiting.done.done():
                waiting.done.set_exception(LoadError("the controller ended CommitPipeline"))


def upload_message(uploads: Sequence[tuple[OpenSlot, int]]) -> bytes:
    """Return the CommitPipeline message that commits each slot's next range as an object id."""
    slots = [slot for slot, _ in uploads]
    offsets = [slot.streams.columns() for slot in slots]
    ranges = (
        length_delimited(1, b"".join([slot.stream_ids for slot in slots])),
        length_delimited(2, b"".join([slot.epochs for slot in slots])),
        length_delimited(3, b"".join([starts for starts, _ in offsets])),
        length_delimited(4, b"".join([ends for _, ends in offsets])),
    )
    columns = (
        _NODE_FIELD,
        length_delimited(2, id_column([object_id for _, object_id in uploads])),
        length_delimited(3, id_column([OBJECT_BYTES] * len(uploads))),
        length_delimited(4, id_column([len(slot.streams.ids) for slot in slots])),
        length_delimited(5, b"".join(ranges)),
    )
    return length_delimited(3, b"".join(columns))


class ProductCommitter(_Committer):
    """Commits by the product's own client, to compare its cost with the small one's."""

    async def open(self) -> None:
        """Register the node, create and open all streams, prepare the objects."""
        await super().open()
        self._client = ControllerClient([self._load.endpoint], tls=self._load.files)
        self._pipeline = CommitPipeline(self._client, NodeIdentity(NODE_ID, 1))

    async def close(self) -> None:
        """Wait for commits in flight and release the connections."""
        await self._pipeline.close()
        await self._client.close()
        await super().close()

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        streams = self._slots[slot].streams
        count, start = len(streams.ids), streams.end_offset
        upload = Upload(
            object_id=await self._prepared.next(),
            object_size=OBJECT_BYTES,
            stream_ids=streams.ids,
            start_offsets=[start] * count,
            end_offsets=[start + STEP] * count,
            stream_epochs=[1] * count,
        )
        result = await (await self._pipeline.upload(upload))
        require(result.error, "CommitPipeline")
        streams.advance()


class Putter(Connected):
    """PutKVs of one small value, under a key for each slot."""

    async def commit(self, slot: int) -> None:
        """Put the slot's value again."""
        item = kv_pb2.KVToPut(
            namespace="bench", key=f"key-{slot}", value=bytes(VALUE_BYTES), overwrite=True
        )
        request = kv_pb2.PutKVsRequest(items=[item])
        answer = await call(self._connection, "KVService/PutKVs", request, kv_pb2.PutKVsResponse)
        require(answer.results[0].error, "PutKVs")


async def register_node(connection: Http2Connection) -> None:
    """Register the streams' node, and wait for a new leader to serve if need be.

    Raises:
        Http2Error: no leader serves within `SERVING_WITHIN_S`.
    """
    request = nodes_pb2.RegisterNodeRequest(node=NODE)
    deadline = time.monotonic() + SERVING_WITHIN_S
    while True:
        try:
            answer = await call(
                connection, "NodeService/RegisterNode", request, nodes_pb2.RegisterNodeResponse
            )
            return require(answer.error, "RegisterNode")
        except Http2Error:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def add_stream_objects(connection: Http2Connection, stream_ids: list[int]) -> None:
    """Commit the first range of each of at most `BATCH_MAX` streams as a stream object."""
    prepared = PreparedIds(connection)
    count = len(stream_ids)
    answer = await call(
        connection,
        "ObjectService/CommitStreamSetObject",
        objects_pb2.CommitStreamSetObjectRequest(
            node=NODE,
            on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
            stream_objects=objects_pb2.StreamObjectColumns(
                object_id=[await prepared.next() for _ in stream_ids],
                object_size=[OBJECT_BYTES] * count,
                stream_id=stream_ids,
                stream_epoch=[1] * count,
                start_offset=[0] * count,
                end_offset=[STEP] * count,
            ),
        ),
        objects_pb2.CommitStreamSetObjectResponse,
    )
    require(answer.error, "CommitStreamSetObject")


async def get_objects(
    connection: Http2Connection, stream_id: int, start_offset: int, limit: int
) -> int:
    """Read which objects contain a stream; return how many were listed."""
    query = objects_pb2.ObjectQuery(stream_id=stream_id, start_offset=start_offset, limit=limit)
    answer = await call(
        connection,
        "ObjectService/GetObjects",
        objects_pb2.GetObjectsRequest(queries=[query]),
        objects_pb2.GetObjectsResponse,
    )
    require(answer.results[0].error, "GetObjects")
    return len(answer.results[0].objects)


async def open_slots(connection: Http2Connection, load: Load) -> list[OpenSlot]:
    """Register the node, create and open the streams, and deal them out to the slots."""
    await register_node(connection)
    ids: list[int] = []
    wanted = load.ranges * load.in_flight
    while len(ids) < wanted:
        ids += await open_streams(connection, min(BATCH_MAX, wanted - len(ids)))
    return [
        _slot(sorted(ids[at * load.ranges : (at + 1) * load.ranges]))
        for at in range(load.in_flight)
    ]


def _slot(ids: list[int]) -> OpenSlot:
    stream_ids, epochs = id_column(ids), id_column([1] * len(ids))
    return OpenSlot(
        SlotStreams(ids),
        stream_ids,
        epochs,
        length_delimited(1, stream_ids) + length_delimited(2, epochs),
    )


async def fill(leader: str, entities: int) -> int:
    """Add streams, each with a stream object, at the leader's endpoint; return the id of one."""
    with contextlib.closing(await Http2Connection.connect(leader)) as connection:
        await register_node(connection)
        added = 0
        while added < entities:
            stream_ids = await open_streams(connection, min(BATCH_MAX, entities - added))
            await add_stream_objects(connection, stream_ids)
            added += len(stream_ids)
    return stream_ids[-1]


async def open_streams(connection: Http2Connection, count: int) -> list[int]:
    """Create and open at most `BATCH_MAX` streams of the node; return their ids."""
    created = await call(
        connection,
        "StreamService/CreateStreams",
        streams_pb2.CreateStreamsRequest(
            request_id=f"bench-{time.monotonic_ns()}",
            node=NODE,
            streams=[streams_pb2.NewStream()] * count,
        ),
        streams_pb2.CreateStreamsResponse,
    )
    require(created.error, "CreateStreams")
    opened = await call(
        connection,
        "StreamService/OpenStreams",
        streams_pb2.OpenStreamsRequest(
            node=NODE,
            streams=[
                streams_pb2.StreamToOpen(stream_id=stream_id, stream_epoch=1)
                for stream_id in created.stream_ids
            ],
        ),
        streams_pb2.OpenStreamsResponse,
    )
    for stream in opened.streams:
        require(stream.error, "OpenStreams")
    return list(created.stream_ids)


async def call(connection: Http2Connection, path: str, request: Any, response: type[Any]) -> Any:
    """Call a unary RPC of streammeta, SERVICE/METHOD.

    Raises:
        Http2Error: there was no answer.
    """
    received = await connection.call(f"/streammeta.v1.{path}", request.SerializeToString())
    return response.FromString(received)


def require(error: int, what: str) -> None:
    """Raise `LoadError` if a call was answered with an error."""
    if error != common_pb2.ERROR_CODE_NONE:
        raise _rejected(what, error)


def _rejected(what: str, error: int) -> LoadError:
    return LoadError(f"{what} was answered with error {code_name(error)}")
