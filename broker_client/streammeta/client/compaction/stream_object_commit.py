"""Telling the map what became of stream objects: one commit for each new object, or removal.

Owns the requests and what their answers mean. A commit whose answer was lost is sent again until
its deadline: it is known by the id of its result, or by its sources being gone. Bytes are deleted
by the controllers alone, after the commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.client import methods
from streammeta.client.compaction.stream_object_listing import ListedStream
from streammeta.client.compaction.stream_object_output import NewObject
from streammeta.client.controller_client import ControllerClient
from streammeta.client.errors import ControllerUnavailableError, OutcomeUnknownError, refusal
from streammeta.storage.compaction.stream_objects import ANY_CRC, StreamObject
from streammeta.storage.object_format.object_key import (
    ObjectAttributes,
    ObjectKind,
    encode_attributes,
)
from streammeta.v1 import common_pb2, objects_pb2

_NONE = -1


class StreamObjectCommits:
    """Commits in the name of the node that owns the streams."""

    def __init__(
        self, client: ControllerClient, writer: common_pb2.NodeIdentity, deadline: float
    ) -> None:
        self._client = client
        self._writer = writer
        self._deadline = deadline

    async def remove(self, stream: ListedStream, object_ids: Sequence[int]) -> None:
        """Let objects go that hold nothing readable, and all that they link."""
        request = objects_pb2.CommitStreamObjectRequest(
            node=self._writer,
            object_id=_NONE,
            stream_id=stream.stream_id,
            stream_epoch=stream.epoch,
            start_offset=_NONE,
            end_offset=_NONE,
            source_object_ids=object_ids,
            operations=[objects_pb2.SOURCE_OPERATION_DEEP_DELETE] * len(object_ids),
        )
        await self._commit(request, f"removal of {len(object_ids)} objects of {_name(stream)}")

    async def replace(
        self,
        stream: ListedStream,
        object_id: int,
        new: NewObject,
        sources: Sequence[StreamObject],
        *,
        composite: bool,
    ) -> None:
        """Put a new object in the place of its sources.

        A composite keeps the bytes of normal sources, which it links; of a composite source nothing
        but the links is to go.
        """
        kind = ObjectKind.COMPOSITE if composite else ObjectKind.NORMAL
        keeps = [composite and not one.composite for one in sources]
        request = objects_pb2.CommitStreamObjectRequest(
            node=self._writer,
            object_id=object_id,
            object_size=new.size,
            stream_id=stream.stream_id,
            stream_epoch=stream.epoch,
            start_offset=new.start_offset,
            end_offset=new.end_offset,
            attributes=encode_attributes(ObjectAttributes(kind, sources[0].bucket_id)),
            source_object_ids=[one.object_id for one in sources],
            operations=[
                objects_pb2.SOURCE_OPERATION_KEEP_DATA
                if kept
                else objects_pb2.SOURCE_OPERATION_DELETE
                for kept in keeps
            ],
        )
        if new.crc32c != ANY_CRC:
            request.crc32c = new.crc32c
        subject = f"object {object_id} in place of {len(sources)} of {_name(stream)}"
        await self._commit(request, subject)

    async def _commit(self, request: objects_pb2.CommitStreamObjectRequest, subject: str) -> None:
        """Commit, or find that it has been committed.

        Raises `OutcomeUnknownError` when no answer came: the stream's objects tell. Any refusal
        changed nothing.
        """
        try:
            answer = await self._client.call(methods.COMMIT_STREAM_OBJECT, request, self._deadline)
        except ControllerUnavailableError as error:
            raise OutcomeUnknownError(subject, error) from error
        if answer.error != common_pb2.ERROR_CODE_NONE:
            raise refusal(answer.error, subject)


def _name(stream: ListedStream) -> str:
    return f"stream {stream.stream_id} at epoch {stream.epoch}"
