"""What the map says about the stream objects of streams: which there are, and their facts.

Owns the paging of those questions. Two answers are of two moments: what the first lists and the
second no longer knows was compacted or deleted meanwhile, and is left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from streammeta.client import methods
from streammeta.client.controller_client import ControllerClient
from streammeta.client.errors import refusal
from streammeta.storage.compaction.stream_objects import ANY_CRC, StreamObject
from streammeta.storage.object_format.object_key import decode_attributes
from streammeta.v1 import common_pb2, objects_pb2, streams_pb2
from streammeta.v1.common_pb2 import ErrorCode

STREAMS_PER_PAGE = 200
"""Each may have thousands of objects, and an answer has to fit a message."""
OBJECTS_PER_PAGE = 5_000


@dataclass(frozen=True, slots=True)
class ListedRange:
    """A stream object and the offsets `[start_offset, end_offset)` that it holds."""

    object_id: int
    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class ListedStream:
    """A stream, its first visible offset, and its stream objects by start offset."""

    stream_id: int
    epoch: int
    start_offset: int
    objects: tuple[ListedRange, ...]


class StreamObjectListing:
    """Asks the map."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client

    async def stream(self, stream_id: int) -> ListedStream:
        """Describe one stream. Raises `StreamNotFoundError`."""
        request = streams_pb2.DescribeStreamsRequest(
            stream_ids=[stream_id], include_stream_objects=True
        )
        answer = await self._client.call(methods.DESCRIBE_STREAMS, request)
        if not answer.streams:
            raise refusal(
                ErrorCode.ERROR_CODE_STREAM_NOT_EXIST, f"compaction of stream {stream_id}"
            )
        return _listed(answer.streams[0])

    async def owned_by(self, node_id: int) -> AsyncIterator[ListedStream]:
        """Describe the streams that a node was the last to open, in id order."""
        token = ""
        while True:
            request = streams_pb2.DescribeStreamsRequest(
                owner_node_id=node_id,
                include_stream_objects=True,
                page=common_pb2.PageRequest(page_size=STREAMS_PER_PAGE, page_token=token),
            )
            answer = await self._client.call(methods.DESCRIBE_STREAMS, request)
            for stream in answer.streams:
                yield _listed(stream)
            token = answer.next_page_token
            if not token:
                return

    async def objects(self, wanted: Iterable[ListedRange]) -> list[StreamObject]:
        """Describe those of the listed objects that are still there, in their order."""
        listed = list(wanted)
        found: list[StreamObject] = []
        for at in range(0, len(listed), OBJECTS_PER_PAGE):
            some = listed[at : at + OBJECTS_PER_PAGE]
            request = objects_pb2.DescribeObjectsRequest(
                object_ids=[one.object_id for one in some],
                page=common_pb2.PageRequest(page_size=OBJECTS_PER_PAGE),
            )
            answer = await self._client.call(methods.DESCRIBE_OBJECTS, request)
            by_id = {one.object_id: one for one in answer.objects if _is_committed(one)}
            found += [
                _stream_object(one, by_id[one.object_id]) for one in some if one.object_id in by_id
            ]
        return found


def _listed(stream: streams_pb2.StreamDescription) -> ListedStream:
    return ListedStream(
        stream.stream_id,
        stream.epoch,
        stream.start_offset,
        tuple(
            ListedRange(one.object_id, one.start_offset, one.end_offset)
            for one in stream.stream_objects
        ),
    )


def _is_committed(one: objects_pb2.ObjectDescription) -> bool:
    of_one_stream = (common_pb2.OBJECT_KIND_STREAM, common_pb2.OBJECT_KIND_COMPOSITE)
    return one.state == common_pb2.OBJECT_STATE_COMMITTED and one.kind in of_one_stream


def _stream_object(listed: ListedRange, described: objects_pb2.ObjectDescription) -> StreamObject:
    return StreamObject(
        listed.object_id,
        listed.start_offset,
        listed.end_offset,
        described.object_size,
        composite=described.kind == common_pb2.OBJECT_KIND_COMPOSITE,
        bucket_id=decode_attributes(described.attributes).bucket_id,
        crc32c=described.crc32c if described.HasField("crc32c") else ANY_CRC,
    )
