"""A departed node at the controllers, which assigned its recovery to this process.

Owns the calls of a failover: the node's open and pending streams, the upload of its records as its
objects, and the closing of its streams. Every call names this process as the recoverer. If the
recovery is not, or no longer, assigned here, the controllers reject it with `NodeFencedError`.
Knows nothing of logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from streammeta.client import errors
from streammeta.client.config import WriterConfig
from streammeta.client.controllers import methods
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.model import NodeIdentity, node_message
from streammeta.client.nodes.session import BrokerSession
from streammeta.client.resources.daemon_threads import run_blocking
from streammeta.client.wal.disk.recovery import StoredRecords, StreamHistory, stream_histories
from streammeta.client.writing.batch import BatchCommit, UploadedObject
from streammeta.client.writing.object_encoder import EncodedObject, encode_object
from streammeta.client.writing.object_ids import ObjectIds
from streammeta.client.writing.record_buffer import StreamRun, WriterStream, plan_objects
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import common_pb2, objects_pb2, streams_pb2

_CLOSED_AT_ONCE = 5_000

_NO_LONGER_OWNED = (
    common_pb2.ERROR_CODE_NONE,
    common_pb2.ERROR_CODE_STREAM_FENCED,
    common_pb2.ERROR_CODE_STREAM_NOT_EXIST,
    common_pb2.ERROR_CODE_STREAM_NOT_OPENED,
)
"""Answers to a close that mean that the node no longer owns the stream."""

_NODE_REJECTED = (
    common_pb2.ERROR_CODE_NODE_EPOCH_EXPIRED,
    common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST,
    common_pb2.ERROR_CODE_NODE_FENCED,
)


@dataclass(frozen=True, slots=True)
class PendingStream:
    """A stream that a node has open, or has to upload up to `upload_end`."""

    stream_id: int
    epoch: int
    start_offset: int
    next_offset: int
    upload_end: int | None = None


class DepartedNode:
    """The process `node` of another node, recovered by the process of `session`.

    Every call raises `NodeFencedError` if the recovery is not, or no longer, assigned here, and
    `NodeEpochExpiredError` if a newer process of the node has registered.
    """

    def __init__(
        self,
        session: BrokerSession,
        node: NodeIdentity,
        store: ObjectStore,
        stored: StoredRecords,
    ) -> None:
        self.node = node
        self._session = session
        self._store = store
        self._config = WriterConfig()
        self._bucket = BucketCheck(session.client, store, session.namespace)
        self._ids = ObjectIds(session, self._config.ttl_s)
        self._stored = stored

    async def list_pending(self) -> list[PendingStream]:
        """List the streams that the node has open or has to upload. This fences the node."""
        await self._bucket.require()
        request = streams_pb2.GetOpeningStreamsRequest(
            node=node_message(self.node),
            failover=True,
            recoverer=node_message(self._session.node),
        )

        found: list[PendingStream] = []
        async for answer in self._session.client.pages(methods.GET_OPENING_STREAMS, request):
            self._check(answer.error, "open streams")
            found += [
                PendingStream(
                    stream.stream_id,
                    stream.epoch,
                    stream.start_offset,
                    stream.end_offset,
                    stream.upload_end_offset if stream.HasField("upload_end_offset") else None,
                )
                for stream in answer.streams
            ]
        return found

    async def histories(self, stream_ids: Iterable[int]) -> Mapping[int, StreamHistory]:
        """Return the epochs of streams. Those that don't exist are left out."""
        return await stream_histories(self._session.client, stream_ids)

    async def is_stored(self, record: RecordBatch) -> bool:
        """Return whether the stream contains exactly this record."""
        return await self._stored.contain(record)

    async def upload(self, records: Mapping[int, Sequence[RecordBatch]]) -> bool:
        """Upload consecutive records in the node's name. Return False if some were rejected.

        Another process may have committed the rejected records: list the pending streams again.
        """
        runs = [_run_of(stream_records) for stream_records in records.values()]
        # In a thread: encoding of a chunk would block the event loop, and with it the heartbeats.
        contents = await run_blocking(self._encode, runs)
        # In this process's name: the ids are only reserved, and the commit names the departed node.
        taken = await self._ids.take(len(contents))
        uploaded = [
            UploadedObject(content, object_id)
            for content, object_id in zip(contents, taken.ids, strict=True)
        ]
        for object_ in uploaded:
            key = key_for(object_.object_id, self._session.namespace)
            await run_blocking(self._store.put, key, object_.content.data)

        commit = BatchCommit.of(uploaded, ())
        request = commit.request(node_message(self.node))
        # Without it the controllers reject a commit of a fenced node.
        request.failover = True
        request.recoverer.CopyFrom(node_message(self._session.node))
        answer: objects_pb2.CommitStreamSetObjectResponse = await self._session.client.call(
            methods.COMMIT_STREAM_SET_OBJECT, request
        )
        # A rejected node rejects every row, and raises; a rejected row needs another attempt.
        verdicts = set(commit.verdict(answer).values())
        for code in verdicts & set(_NODE_REJECTED):
            self._check(code, f"commit of objects {commit.object_ids}")
        return verdicts == {common_pb2.ERROR_CODE_NONE}

    async def close(self, streams: Sequence[PendingStream]) -> None:
        """Close streams in the node's name. Streams of other owners count as closed."""
        for at in range(0, len(streams), _CLOSED_AT_ONCE):
            batch = streams[at : at + _CLOSED_AT_ONCE]
            request = streams_pb2.CloseStreamsRequest(
                node=node_message(self.node),
                recoverer=node_message(self._session.node),
                streams=[
                    streams_pb2.StreamToClose(stream_id=stream.stream_id, stream_epoch=stream.epoch)
                    for stream in batch
                ],
            )
            answer = await self._session.client.call(methods.CLOSE_STREAMS, request)
            for stream, code in zip(batch, answer.errors, strict=True):
                if code not in _NO_LONGER_OWNED:
                    self._check(code, f"closing stream {stream.stream_id}")

    def _encode(self, runs: Sequence[StreamRun]) -> list[EncodedObject]:
        plans = plan_objects(runs, self._config.split_bytes)
        return [encode_object(plan, self._config.block_bytes) for plan in plans]

    def _check(self, code: common_pb2.ErrorCode.ValueType, subject: str) -> None:
        if code != common_pb2.ERROR_CODE_NONE:
            node = self.node
            raise errors.rejection(
                code, f"{subject} for node {node.node_id} at epoch {node.node_epoch}"
            )


def _run_of(records: Sequence[RecordBatch]) -> StreamRun:
    """Return the run of consecutive records of one stream and epoch."""
    first = records[0]
    run = StreamRun(
        WriterStream(first.stream_id, first.epoch, first.base_offset, first.base_offset)
    )
    for record in records:
        run.add(record.payload, record.count)
    return run
