"""Commits of compaction: outputs replace their sources, all or nothing.

Owns the requests and the meaning of their answers, and the ids that outputs are written under. A
commit whose answer is lost is sent again: the controllers know it by its ids. They alone delete
replaced objects, after the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streammeta.client.compaction.config import CompactionTarget
from streammeta.client.compaction.listing import ListedStream
from streammeta.client.compaction.report import MadeObject
from streammeta.client.controllers import methods
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import (
    CompactedObjectsNotFoundError,
    ControllerUnavailableError,
    OutcomeUnknownError,
    RefusedError,
    refusal,
)
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
"""The oldest and the newest time of a record, in ms since 1970."""
UNKNOWN_BOUNDS = (-1, -1)


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """An object in the store that no commit names yet; `size` as the metadata is to record it.

    `crc32c` is that of all its bytes, -1 if unknown.
    """

    object_id: int
    size: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class CompactionOutput:
    """An object in the store, and the ranges it holds by stream: one if it is a stream object."""

    written: WrittenObject
    ranges: tuple[StreamRange, ...]
    time_bounds: TimeBounds = UNKNOWN_BOUNDS


@dataclass(frozen=True, slots=True)
class Replacement:
    """Outputs that replace set objects of a node."""

    target: CompactionTarget
    source_ids: tuple[int, ...]
    set_object: CompactionOutput | None = None
    stream_objects: tuple[CompactionOutput, ...] = ()

    @property
    def made(self) -> list[MadeObject]:
        """The outputs as reports name them."""
        made = []
        if self.set_object is not None:
            one = self.set_object.written
            made.append(MadeObject(one.object_id, one.size, self.source_ids))
        for each in self.stream_objects:
            one = each.written
            made.append(MadeObject(one.object_id, one.size, self.source_ids, each.ranges[0]))
        return made

    def __str__(self) -> str:
        return f"compaction of {len(self.source_ids)} objects of {self.target}"

    def request(self) -> objects_pb2.CommitStreamSetObjectRequest:
        """Make the request; unknown time bounds become those of all sources."""
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
            request.ranges.stream_id.extend(one.stream_id for one in ranges)
            request.ranges.start_offset.extend(one.start_offset for one in ranges)
            request.ranges.end_offset.extend(one.end_offset for one in ranges)
        return request


@dataclass(frozen=True, slots=True)
class StreamReplacement:
    """An object that replaces objects of one stream; without `output` they are only removed.

    A composite keeps the data of its normal sources, which it links; of a composite source only the
    links are dropped. Objects that are removed go with everything they link.
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
        """Make the request."""
        request = objects_pb2.CommitStreamObjectRequest(
            node=node_message(self.writer),
            stream_id=self.stream.stream_id,
            stream_epoch=self.stream.epoch,
            source_object_ids=[one.object_id for one in self.sources],
            operations=[self._operation(one) for one in self.sources],
        )
        if self.output is not None:
            written, (held,) = self.output.written, self.output.ranges
            kind = ObjectKind.COMPOSITE if self.composite else ObjectKind.NORMAL
            request.object_id = written.object_id
            request.object_size = written.size
            request.start_offset, request.end_offset = held.start_offset, held.end_offset
            attributes = ObjectAttributes(kind, self.sources[0].bucket_id)
            request.attributes = encode_attributes(attributes)
            if written.crc32c != ANY_CRC:
                request.crc32c = written.crc32c
        return request

    def _operation(self, source: StreamObject) -> objects_pb2.SourceOperation.ValueType:
        if self.output is None:
            return objects_pb2.SOURCE_OPERATION_DEEP_DELETE
        if self.composite and not source.composite:
            return objects_pb2.SOURCE_OPERATION_KEEP_DATA
        return objects_pb2.SOURCE_OPERATION_DELETE


async def prepare_ids(
    client: ControllerClient, writer: NodeIdentity, count: int, ttl_s: float
) -> list[int]:
    """Prepare object ids for outputs, in the name of the process that writes them."""
    ids: list[int] = []
    while len(ids) < count:
        some = min(_IDS_PER_CALL, count - len(ids))
        request = objects_pb2.PrepareObjectsRequest(
            node=node_message(writer), count=some, ttl_ms=round(ttl_s * 1000)
        )
        answer = await client.call(methods.PREPARE_OBJECTS, request)
        if answer.error != common_pb2.ERROR_CODE_NONE:
            raise refusal(
                answer.error,
                f"preparing {some} objects for node {writer.node_id} at epoch {writer.node_epoch}",
            )
        ids.extend(range(answer.first_object_id, answer.first_object_id + some))
    return ids


async def commit(
    client: ControllerClient, replacement: Replacement | StreamReplacement, deadline_s: float
) -> None:
    """Commit, or find that it has been committed; repeated for at most `deadline_s` seconds.

    Raises `OutcomeUnknownError` when no answer came: after a commit the sources are not listed any
    more, and otherwise the outputs may be committed until their ids expire. Raises
    `CompactedObjectsNotFoundError` when a source of set objects is gone, and other refusals; a
    refusal changed nothing.
    """
    try:
        if isinstance(replacement, StreamReplacement):
            answer = await client.call(
                methods.COMMIT_STREAM_OBJECT, replacement.request(), deadline_s
            )
            if answer.error != common_pb2.ERROR_CODE_NONE:
                raise refusal(answer.error, str(replacement))
        else:
            done = await client.call(
                methods.COMMIT_STREAM_SET_OBJECT, replacement.request(), deadline_s
            )
            if done.error != common_pb2.ERROR_CODE_NONE:
                raise _refused(done, replacement)
    except ControllerUnavailableError as error:
        raise OutcomeUnknownError(str(replacement), error) from error


def _refused(
    answer: objects_pb2.CommitStreamSetObjectResponse, replacement: Replacement
) -> RefusedError:
    error = refusal(answer.error, str(replacement))
    rows = [*answer.range_errors, *answer.stream_object_errors]
    bad = [row for row, code in enumerate(rows) if code != common_pb2.ERROR_CODE_NONE]
    if bad and not isinstance(error, CompactedObjectsNotFoundError):
        request = replacement.request()
        streams = [*request.ranges.stream_id, *request.stream_objects.stream_id]
        starts = [*request.ranges.start_offset, *request.stream_objects.start_offset]
        error.add_note(f"the first refused row is stream {streams[bad[0]]} from {starts[bad[0]]}")
    return error


def _stream_objects(outputs: Sequence[CompactionOutput]) -> objects_pb2.StreamObjectColumns:
    ranges = [held for one in outputs for held in one.ranges]
    return objects_pb2.StreamObjectColumns(
        object_id=[one.written.object_id for one in outputs],
        object_size=[one.written.size for one in outputs],
        stream_id=[held.stream_id for held in ranges],
        start_offset=[held.start_offset for held in ranges],
        end_offset=[held.end_offset for held in ranges],
        min_timestamp_ms=[one.time_bounds[0] for one in outputs],
        max_timestamp_ms=[one.time_bounds[1] for one in outputs],
        crc32c=[one.written.crc32c for one in outputs],
    )
