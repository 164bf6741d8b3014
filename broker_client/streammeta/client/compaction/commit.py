"""Telling the map that outputs take the place of their sources: one commit, all or nothing.

Owns the request and what its answer means. When no answer comes the same request is sent again: a
commit is known by the ids in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streammeta.client import methods
from streammeta.client.compaction.output_writer import WrittenObject
from streammeta.client.compaction.target import CompactionTarget
from streammeta.client.controller_client import ControllerClient
from streammeta.client.errors import (
    CompactedObjectsNotFoundError,
    ControllerUnavailableError,
    OutcomeUnknownError,
    RefusedError,
    refusal,
)
from streammeta.storage.compaction.entries import EntryTable, stream_ranges
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.v1 import common_pb2, objects_pb2

NO_OBJECT = -1
LEAST_ORDER_OF_SOURCES = -1

TimeBounds: TypeAlias = tuple[int, int]
"""No record is older than the first or newer than the second, in ms since 1970."""
UNKNOWN_BOUNDS = (-1, -1)


@dataclass(frozen=True, slots=True)
class StreamObjectWritten:
    """A stream object in the store, and the range it holds."""

    written: WrittenObject
    range: StreamRange
    time_bounds: TimeBounds = UNKNOWN_BOUNDS


@dataclass(frozen=True, slots=True, eq=False)
class SetObjectWritten:
    """A set object in the store, and the entries in it, by stream and offset."""

    written: WrittenObject
    entries: EntryTable
    time_bounds: TimeBounds = UNKNOWN_BOUNDS


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """Outputs in the store, and the sources they replace."""

    target: CompactionTarget
    source_ids: tuple[int, ...]
    set_object: SetObjectWritten | None
    stream_objects: tuple[StreamObjectWritten, ...]

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The ids of all outputs."""
        shared = () if self.set_object is None else (self.set_object.written.object_id,)
        return (*shared, *(one.written.object_id for one in self.stream_objects))

    def request(self) -> objects_pb2.CommitStreamSetObjectRequest:
        """Make the request; for unknown time bounds the map has those of all sources."""
        request = objects_pb2.CommitStreamSetObjectRequest(
            node=self.target.identity,
            on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
            object_id=NO_OBJECT,
            order_id=LEAST_ORDER_OF_SOURCES,
            stream_objects=_stream_objects(self.stream_objects),
            compacted_object_ids=self.source_ids,
            failover=self.target.failover,
        )
        if self.set_object is not None:
            written = self.set_object.written
            request.object_id = written.object_id
            request.object_size = written.size
            request.crc32c = written.crc32c
            if self.set_object.time_bounds != UNKNOWN_BOUNDS:
                request.min_timestamp_ms, request.max_timestamp_ms = self.set_object.time_bounds
            ranges = stream_ranges(self.set_object.entries)
            request.ranges.CopyFrom(
                objects_pb2.RangeColumns(
                    stream_id=[one.stream_id for one in ranges],
                    start_offset=[one.start_offset for one in ranges],
                    end_offset=[one.end_offset for one in ranges],
                )
            )
        return request


async def commit(client: ControllerClient, replacement: Replacement, deadline: float) -> None:
    """Commit, or find that it has been committed; repeated for at most `deadline` seconds.

    Raises `OutcomeUnknownError` when no answer came: if it was made the sources are not listed any
    more, and if it was not, the outputs may be committed until their ids expire. Raises
    `CompactedObjectsNotFoundError` when a source is gone, and other refusals; nothing was changed
    then.
    """
    subject = f"compaction of {len(replacement.source_ids)} objects of {replacement.target}"
    try:
        answer = await client.call(
            methods.COMMIT_STREAM_SET_OBJECT, replacement.request(), deadline
        )
    except ControllerUnavailableError as error:
        raise OutcomeUnknownError(subject, error) from error
    if answer.error != common_pb2.ERROR_CODE_NONE:
        raise _refused(answer, subject, replacement)


def _refused(
    answer: objects_pb2.CommitStreamSetObjectResponse, subject: str, replacement: Replacement
) -> RefusedError:
    error = refusal(answer.error, subject)
    rows = [*answer.range_errors, *answer.stream_object_errors]
    bad = [row for row, code in enumerate(rows) if code != common_pb2.ERROR_CODE_NONE]
    if bad and not isinstance(error, CompactedObjectsNotFoundError):
        request = replacement.request()
        streams = [*request.ranges.stream_id, *request.stream_objects.stream_id]
        starts = [*request.ranges.start_offset, *request.stream_objects.start_offset]
        error.add_note(f"the first refused row is stream {streams[bad[0]]} from {starts[bad[0]]}")
    return error


def _stream_objects(outputs: Sequence[StreamObjectWritten]) -> objects_pb2.StreamObjectColumns:
    return objects_pb2.StreamObjectColumns(
        object_id=[one.written.object_id for one in outputs],
        object_size=[one.written.size for one in outputs],
        stream_id=[one.range.stream_id for one in outputs],
        start_offset=[one.range.start_offset for one in outputs],
        end_offset=[one.range.end_offset for one in outputs],
        min_timestamp_ms=[one.time_bounds[0] for one in outputs],
        max_timestamp_ms=[one.time_bounds[1] for one in outputs],
        crc32c=[one.written.crc32c for one in outputs],
    )
