"""Metadata of sources: stream set objects of a node, streams, stream objects, and their ranges.

Owns the calls and their pages. Answers describe different moments. A change in between shows when
the compaction is committed, and objects that are no longer committed are left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from streammeta.client.compaction.config import CompactionTarget
from streammeta.client.controllers import methods
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import rejection
from streammeta.storage.compaction.entries import Column
from streammeta.storage.compaction.selection import StreamSetObjects
from streammeta.storage.compaction.stream_objects import ANY_CRC, StreamObject
from streammeta.storage.object_format.object_key import decode_attributes
from streammeta.v1 import common_pb2, nodes_pb2, objects_pb2, streams_pb2
from streammeta.v1.common_pb2 import ErrorCode

_PAGE_SIZE = 10_000
_STREAMS_PER_CALL = 10_000

_OBJECTS_PER_CALL = 20
"""Stream set objects described in one call: each may have 20000 ranges, and an answer fits one
message."""

_STREAMS_PER_PAGE = 200
"""Streams listed with their objects: each may have thousands, and an answer fits one message."""

_STREAM_OBJECTS_PER_CALL = 5_000

_SET_OBJECT = attrgetter(*StreamSetObjects.__slots__)


@dataclass(frozen=True, slots=True, eq=False)
class NodeListing:
    """Committed stream set objects of a node, with time bounds (ms) and CRC-32C by object id."""

    objects: StreamSetObjects
    time_bounds: Mapping[int, tuple[int, int]]
    checksums: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ListedRange:
    """A stream object and its offsets `[start_offset, end_offset)`."""

    object_id: int
    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class ListedStream:
    """A stream, its first visible offset, and its stream objects by start offset.

    The epoch of a shared stream is 0.
    """

    stream_id: int
    epoch: int
    start_offset: int
    objects: tuple[ListedRange, ...]
    is_shared: bool = False

    def __str__(self) -> str:
        return f"stream {self.stream_id} at epoch {self.epoch}"


class Listing:
    """Lists the sources of one cluster."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client

    async def set_objects(self, target: CompactionTarget) -> NodeListing:
        """List the committed stream set objects of a node. Raises errors that fence the node."""
        rows: list[tuple[int, int, int, int, int]] = []
        bounds: dict[int, tuple[int, int]] = {}
        checksums: dict[int, int] = {}
        request = nodes_pb2.ListStreamSetObjectsRequest(node_id=target.node_id)

        async for answer in self._client.pages(methods.LIST_STREAM_SET_OBJECTS, request):
            if answer.error != common_pb2.ERROR_CODE_NONE:
                subject = f"listing the stream set objects of node {target.node_id}"
                raise rejection(answer.error, subject)
            for row in answer.objects:
                rows.append(_SET_OBJECT(row))
                if row.HasField("max_timestamp_ms"):
                    bounds[row.object_id] = (row.min_timestamp_ms, row.max_timestamp_ms)
                if row.HasField("crc32c"):
                    checksums[row.object_id] = row.crc32c
        return NodeListing(StreamSetObjects.of_rows(rows), bounds, checksums)

    async def stream_starts(self, stream_ids: Sequence[int]) -> dict[int, int]:
        """Return the first visible offset of each existing stream."""
        starts: dict[int, int] = {}
        for at in range(0, len(stream_ids), _STREAMS_PER_CALL):
            batch = stream_ids[at : at + _STREAMS_PER_CALL]
            async for stream in self._client.describe_streams(batch):
                starts[stream.stream_id] = stream.start_offset
        return starts

    async def ranges(self, object_ids: Sequence[int]) -> dict[int, Column]:
        """Return the ranges of stream set objects: rows of stream, start and end."""
        found: dict[int, Column] = {}
        async for described in self._describe_committed(object_ids, _OBJECTS_PER_CALL):
            ranges = described.ranges
            # One array per object: planning works on columns.
            columns = (ranges.stream_id, ranges.start_offset, ranges.end_offset)
            found[described.object_id] = np.array(columns, dtype=np.int64).T
        return found

    async def stream(self, stream_id: int) -> ListedStream:
        """Describe one stream and its objects. Raises `StreamNotFoundError`."""
        request = streams_pb2.DescribeStreamsRequest(
            stream_ids=[stream_id], include_stream_objects=True
        )
        answer = await self._client.call(methods.DESCRIBE_STREAMS, request)
        if not answer.streams:
            raise rejection(
                ErrorCode.ERROR_CODE_STREAM_NOT_EXIST, f"compaction of stream {stream_id}"
            )
        return _translate(answer.streams[0])

    async def list_owned(self, node_id: int) -> AsyncIterator[ListedStream]:
        """Describe the streams that a node was the last to open, in id order."""
        request = streams_pb2.DescribeStreamsRequest(
            owner_node_id=node_id,
            include_stream_objects=True,
            page=common_pb2.PageRequest(page_size=_STREAMS_PER_PAGE),
        )
        async for answer in self._client.pages(methods.DESCRIBE_STREAMS, request):
            for stream in answer.streams:
                yield _translate(stream)

    async def list_streams(self, stream_ids: Sequence[int]) -> AsyncIterator[ListedStream]:
        """Describe these streams, without those that do not exist, in id order."""
        for at in range(0, len(stream_ids), _STREAMS_PER_PAGE):
            request = streams_pb2.DescribeStreamsRequest(
                stream_ids=stream_ids[at : at + _STREAMS_PER_PAGE], include_stream_objects=True
            )
            async for answer in self._client.pages(methods.DESCRIBE_STREAMS, request):
                for stream in answer.streams:
                    yield _translate(stream)

    async def stream_objects(self, wanted: Iterable[ListedRange]) -> list[StreamObject]:
        """Describe the listed stream objects, in their order."""
        listed = {range_.object_id: range_ for range_ in wanted}
        descriptions = self._describe_committed(list(listed), _STREAM_OBJECTS_PER_CALL)
        found = {
            described.object_id: _stream_object(listed[described.object_id], described)
            async for described in descriptions
            if described.kind in (common_pb2.OBJECT_KIND_STREAM, common_pb2.OBJECT_KIND_COMPOSITE)
        }
        return [found[object_id] for object_id in listed if object_id in found]

    async def _describe_committed(
        self, object_ids: Sequence[int], per_call: int
    ) -> AsyncIterator[objects_pb2.ObjectDescription]:
        """Describe the committed objects among `object_ids`, in any order."""
        for at in range(0, len(object_ids), per_call):
            request = objects_pb2.DescribeObjectsRequest(
                object_ids=object_ids[at : at + per_call],
                page=common_pb2.PageRequest(page_size=_PAGE_SIZE),
            )
            # One page: a call has few enough objects for one answer.
            answer = await self._client.call(methods.DESCRIBE_OBJECTS, request)
            for described in answer.objects:
                if described.state == common_pb2.OBJECT_STATE_COMMITTED:
                    yield described


def _translate(stream: streams_pb2.StreamDescription) -> ListedStream:
    return ListedStream(
        stream.stream_id,
        stream.epoch,
        stream.start_offset,
        tuple(
            ListedRange(range_.object_id, range_.start_offset, range_.end_offset)
            for range_ in stream.stream_objects
        ),
        is_shared=stream.state == common_pb2.STREAM_STATE_SHARED,
    )


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
