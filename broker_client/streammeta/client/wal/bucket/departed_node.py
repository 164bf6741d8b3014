"""A departed node at the controllers: another process speaks for it, by their assignment.

Owns the calls of a failover: what the node has open and owes, the upload of its records as objects
of its own, and the closing of its streams. Every call names this process as the recoverer, so one
that is not, or no longer, assigned is refused with `NodeFencedError`. Knows nothing of logs.
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
from streammeta.client.wal.disk.recovery import StreamHistory, stream_histories
from streammeta.client.wal.disk.stored_records import StoredRecords
from streammeta.client.writing.batch import BatchCommit, UploadedObject
from streammeta.client.writing.object_encoder import EncodedObject, encode_object
from streammeta.client.writing.object_ids import ObjectIds
from streammeta.client.writing.record_buffer import StreamRun, WriterStream, plan_objects
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import common_pb2, objects_pb2, streams_pb2

_CLOSED_AT_ONCE = 5_000

_GONE = (
    common_pb2.ERROR_CODE_NONE,
    common_pb2.ERROR_CODE_STREAM_FENCED,
    common_pb2.ERROR_CODE_STREAM_NOT_EXIST,
    common_pb2.ERROR_CODE_STREAM_NOT_OPENED,
)
"""Answers to a closing that say that the stream is not the node's any more."""

_OF_THE_NODE = (
    common_pb2.ERROR_CODE_NODE_EPOCH_EXPIRED,
    common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST,
    common_pb2.ERROR_CODE_NODE_FENCED,
)


@dataclass(frozen=True, slots=True)
class OwedStream:
    """A stream that a node has open, or of which it owes the upload up to `owed_to`."""

    stream_id: int
    epoch: int
    start_offset: int
    next_offset: int
    owed_to: int | None = None


class DepartedNode:
    """The process `node` of another node, for which the process of `session` speaks.

    Every call raises what refuses it: `NodeFencedError` if the recovery is not, or no longer,
    assigned here, `NodeEpochExpiredError` if a newer process of the node has registered.
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

    async def owed(self) -> list[OwedStream]:
        """List what the node has open or owes; from then on its own calls are fenced."""
        await self._bucket.require()
        request = streams_pb2.GetOpeningStreamsRequest(
            node=node_message(self.node),
            failover=True,
            recoverer=node_message(self._session.node),
        )
        found: list[OwedStream] = []
        async for answer in self._session.client.pages(methods.GET_OPENING_STREAMS, request):
            self._check(answer.error, "open streams")
            found += [
                OwedStream(
                    one.stream_id,
                    one.epoch,
                    one.start_offset,
                    one.end_offset,
                    one.upload_end_offset if one.HasField("upload_end_offset") else None,
                )
                for one in answer.streams
            ]
        return found

    async def histories(self, stream_ids: Iterable[int]) -> Mapping[int, StreamHistory]:
        """Return the epochs of streams; those that don't exist are left out."""
        return await stream_histories(self._session.client, stream_ids)

    async def is_stored(self, record: RecordBatch) -> bool:
        """Return whether the stream holds this very record."""
        return await self._stored.hold(record)

    async def upload(self, records: Mapping[int, Sequence[RecordBatch]]) -> bool:
        """Upload consecutive records of streams in the node's name; False: some were refused.

        What is refused may have been committed by another: ask for what is owed again.
        """
        runs = [_run_of(of_stream) for of_stream in records.values()]
        contents = await run_blocking(self._encode, runs)
        taken = await self._ids.take(len(contents))
        uploaded = [
            UploadedObject(content, object_id)
            for content, object_id in zip(contents, taken.ids, strict=True)
        ]
        for one in uploaded:
            key = key_for(one.object_id, self._session.namespace)
            await run_blocking(self._store.put, key, one.content.data)
        commit = BatchCommit.of(uploaded, ())
        request = commit.request(node_message(self.node))
        request.failover = True
        request.recoverer.CopyFrom(node_message(self._session.node))
        answer: objects_pb2.CommitStreamSetObjectResponse = await self._session.client.call(
            methods.COMMIT_STREAM_SET_OBJECT, request
        )
        verdicts = set(commit.verdict(answer).values())
        for code in verdicts & set(_OF_THE_NODE):
            self._check(code, f"commit of objects {commit.object_ids}")
        return verdicts == {common_pb2.ERROR_CODE_NONE}

    async def close(self, streams: Sequence[OwedStream]) -> None:
        """Close streams in the node's name; those that are another's by now count as closed."""
        for at in range(0, len(streams), _CLOSED_AT_ONCE):
            batch = streams[at : at + _CLOSED_AT_ONCE]
            request = streams_pb2.CloseStreamsRequest(
                node=node_message(self.node),
                recoverer=node_message(self._session.node),
                streams=[
                    streams_pb2.StreamToClose(stream_id=one.stream_id, stream_epoch=one.epoch)
                    for one in batch
                ],
            )
            answer = await self._session.client.call(methods.CLOSE_STREAMS, request)
            for one, code in zip(batch, answer.errors, strict=True):
                if code not in _GONE:
                    self._check(code, f"closing stream {one.stream_id}")

    def _encode(self, runs: Sequence[StreamRun]) -> list[EncodedObject]:
        plans = plan_objects(runs, self._config.split_bytes)
        return [encode_object(plan, self._config.block_bytes) for plan in plans]

    def _check(self, code: common_pb2.ErrorCode.ValueType, subject: str) -> None:
        if code != common_pb2.ERROR_CODE_NONE:
            node = self.node
            raise errors.refusal(
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
