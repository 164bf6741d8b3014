"""Commits of compaction: outputs replace their sources, all or nothing.

Owns the requests, the meaning of their answers, and the ids of outputs. A commit whose answer is
lost is sent again: the controllers recognise it by its ids. Only the controllers delete replaced
objects, after the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streammeta.client import errors
from streammeta.client.compaction.config import CompactionTarget
from streammeta.client.compaction.listing import ListedStream
from streammeta.client.compaction.report import OutputObject
from streammeta.client.controllers import methods
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.model import NodeIdentity, node_message
from streammeta.storage.compaction.stream_objects import ANY_CRC, StreamObject
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.storage.object_format.object_key import (
    ObjectAttributes,
    ObjectKind,
    encode_attributes,
)
from streammeta.v1 import common_pb2, objects_pb2

_IDS_PER_CALL = 10_000

TimeBounds: TypeAlias = tuple[int, int]
"""Oldest and newest time of a record, in ms since 1970."""
UNKNOWN_BOUNDS = (-1, -1)


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """An uncommitted object in the store. `size` is the size that the metadata is to record.

    `crc32c` covers all its bytes, -1 if unknown.
    """

    object_id: int
    size: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class CompactionOutput:
    """An object in the store, and its ranges by stream: one range for a stream object."""

    written: WrittenObject
    ranges: tuple[StreamRange, ...]
    time_bounds: TimeBounds = UNKNOWN_BOUNDS


@dataclass(frozen=True, slots=True)
class Replacement:
    """Outputs that replace stream set objects of a node."""

    target: CompactionTarget
    source_ids: tuple[int, ...]
    set_object: CompactionOutput | None = None
    stream_objects: tuple[CompactionOutput, ...] = ()

    @property
    def outputs(self) -> list[OutputObject]:
        """The outputs as reports name them."""
        outputs = []
        if self.set_object is not None:
            written = self.set_object.written
            outputs.append(OutputObject(written.object_id, written.size, self.source_ids))
        for output in self.stream_objects:
            written, range_ = output.written, output.ranges[0]
            outputs.append(OutputObject(written.object_id, written.size, self.source_ids, range_))
        return outputs

    def __str__(self) -> str:
        return f"compaction of {len(self.source_ids)} objects of {self.target}"

    def request(self) -> objects_pb2.CommitStreamSetObjectRequest:
        """Build the request. Without time bounds the controllers use the bounds of all sources."""
        request = objects_pb2.CommitStreamSetObjectRequest(
            node=node_message(self.target.identity),
            stream_objects=_stream_objects(self.stream_objects),
            compacted_object_ids=self.source_ids,
            failover=self.target.failover,
            on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        )

        if self.set_object is not None:
            written = self.set_object.written
            request.object_id = written.object_id
            request.object_size = written.size
            request.crc32c = written.crc32c
            if self.set_object.time_bounds != UNKNOWN_BOUNDS:
                request.min_timestamp_ms, request.max_timestamp_ms = self.set_object.time_bounds
            ranges = self.set_object.ranges
            request.ranges.stream_id.extend(range_.stream_id for range_ in ranges)
            request.ranges.start_offset.extend(range_.start_offset for range_ in ranges)
            request.ranges.end_offset.extend(range_.end_offset for range_ in ranges)
        return request


@dataclass(frozen=True, slots=True)
class StreamReplacement:
    """An object that replaces objects of one stream. Without `output` they are only removed.

    A composite keeps the data of its normal sources, which it links. For a composite source only
    the links are dropped. Removed objects are deleted with all objects that they link.
    """

    writer: NodeIdentity
    stream: ListedStream
    sources: Sequence[StreamObject]
    output: CompactionOutput | None = None
    composite: bool = False

    def __str__(self) -> str:
        if self.output is None:
            return f"removal of {len(self.sources)} objects of {self.stream}"
        object_id = self.output.written.object_id
        return f"object {object_id} in place of {len(self.sources)} of {self.stream}"

    def request(self) -> objects_pb2.CommitStreamObjectRequest:
        """Build the request."""
        request = objects_pb2.CommitStreamObjectRequest(
            node=node_message(self.writer),
            stream_id=self.stream.stream_id,
            stream_epoch=self.stream.epoch,
            source_object_ids=[source.object_id for source in self.sources],
            operations=[self._operation(source) for source in self.sources],
        )

        if self.output is not None:
            written, (range_,) = self.output.written, self.output.ranges
            kind = ObjectKind.COMPOSITE if self.composite else ObjectKind.NORMAL
            request.object_id = written.object_id
            request.object_size = written.size
            request.start_offset, request.end_offset = range_.start_offset, range_.end_offset
            # All sources of a group are in one bucket.
            attributes = ObjectAttributes(kind, self.sources[0].bucket_id)
            request.attributes = encode_attributes(attributes)
            if written.crc32c != ANY_CRC:
                request.crc32c = written.crc32c

        return request

    def _operation(self, source: StreamObject) -> objects_pb2.SourceOperation.ValueType:
        if self.output is None:
            return objects_pb2.SOURCE_OPERATION_DEEP_DELETE
        # The composite refers to the blocks of a normal source, so its data must stay.
        if self.composite and not source.composite:
            return objects_pb2.SOURCE_OPERATION_KEEP_DATA
        return objects_pb2.SOURCE_OPERATION_DELETE


async def prepare_ids(
    client: ControllerClient, writer: NodeIdentity, count: int, ttl_s: float
) -> list[int]:
    """Prepare object ids for outputs, in the name of the process that writes them."""
    ids: list[int] = []
    # One call prepares a limited number of ids.
    while len(ids) < count:
        batch_size = min(_IDS_PER_CALL, count - len(ids))
        request = objects_pb2.PrepareObjectsRequest(
            node=node_message(writer), count=batch_size, ttl_ms=round(ttl_s * 1000)
        )
        answer = await client.call(methods.PREPARE_OBJECTS, request)
        if answer.error != common_pb2.ERROR_CODE_NONE:
            by = f"node {writer.node_id} at epoch {writer.node_epoch}"
            raise errors.rejection(answer.error, f"preparing {batch_size} objects for {by}")
        ids.extend(range(answer.first_object_id, answer.first_object_id + batch_size))
    return ids


async def commit(
    client: ControllerClient, replacement: Replacement | StreamReplacement, deadline_s: float
) -> None:
    """Commit a replacement, retrying for at most `deadline_s` seconds.

    Raises `OutcomeUnknownError` without an answer. If the commit took effect, the sources are no
    longer listed. Otherwise the outputs may be committed until their ids expire. Raises
    `CompactedObjectsNotFoundError` when a source is no longer committed, and errors of other
    rejections, which change nothing.
    """
    try:
        if isinstance(replacement, StreamReplacement):
            answer = await client.call(
                methods.COMMIT_STREAM_OBJECT, replacement.request(), deadline_s
            )
            if answer.error != common_pb2.ERROR_CODE_NONE:
                raise errors.rejection(answer.error, str(replacement))
        else:
            done = await client.call(
                methods.COMMIT_STREAM_SET_OBJECT, replacement.request(), deadline_s
            )
            if done.error != common_pb2.ERROR_CODE_NONE:
                raise _rejection(done, replacement)
    except errors.ControllerUnavailableError as error:
        raise errors.OutcomeUnknownError(str(replacement), error) from error


def _rejection(
    answer: objects_pb2.CommitStreamSetObjectResponse, replacement: Replacement
) -> errors.RejectedError:
    error = errors.rejection(answer.error, str(replacement))
    rows = [*answer.range_errors, *answer.stream_object_errors]
    bad = [row for row, code in enumerate(rows) if code != common_pb2.ERROR_CODE_NONE]
    if bad and not isinstance(error, errors.CompactedObjectsNotFoundError):
        request = replacement.request()
        streams = [*request.ranges.stream_id, *request.stream_objects.stream_id]
        starts = [*request.ranges.start_offset, *request.stream_objects.start_offset]
        error.add_note(f"the first rejected row is stream {streams[bad[0]]} from {starts[bad[0]]}")
    return error


def _stream_objects(outputs: Sequence[CompactionOutput]) -> objects_pb2.StreamObjectColumns:
    ranges = [range_ for output in outputs for range_ in output.ranges]
    return objects_pb2.StreamObjectColumns(
        object_id=[output.written.object_id for output in outputs],
        object_size=[output.written.size for output in outputs],
        stream_id=[range_.stream_id for range_ in ranges],
        start_offset=[range_.start_offset for range_ in ranges],
        end_offset=[range_.end_offset for range_ in ranges],
        min_timestamp_ms=[output.time_bounds[0] for output in outputs],
        max_timestamp_ms=[output.time_bounds[1] for output in outputs],
        crc32c=[output.written.crc32c for output in outputs],
    )
