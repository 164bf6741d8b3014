"""One commit of a batch: its rows, the request that carries them, and what the answer says of each.

Rows are the runs of the stream set object, then one run for each stream object. Pure.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from streammeta.client.errors import ProtocolViolationError
from streammeta.client.object_encoder import EncodedObject
from streammeta.client.upload_batch import StreamRun
from streammeta.v1 import common_pb2, objects_pb2
from streammeta.v1.common_pb2 import ErrorCode


@dataclass(frozen=True, slots=True, eq=False)
class UploadedObject:
    """An object in the store that no commit names yet."""

    content: EncodedObject
    object_id: int

    @property
    def runs(self) -> tuple[StreamRun, ...]:
        """What is in it."""
        return self.content.runs


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """Objects that are committed together, and which of their runs the map is to know of."""

    objects: tuple[UploadedObject, ...]
    shared: UploadedObject | None
    rows: tuple[StreamRun, ...]
    alone: tuple[UploadedObject, ...]

    @classmethod
    def of(cls, uploaded: Sequence[UploadedObject], settled: Container[StreamRun]) -> BatchCommit:
        """Take all objects of `uploaded`, and of the set object the runs not in `settled`."""
        shared = next((one for one in uploaded if one.content.shared), None)
        runs = () if shared is None else shared.runs
        rows = tuple(run for run in runs if run not in settled)
        alone = tuple(one for one in uploaded if not one.content.shared)
        return cls(tuple(uploaded), shared, rows, alone)

    @property
    def runs(self) -> tuple[StreamRun, ...]:
        """All runs, in row order."""
        return (*self.rows, *(one.runs[0] for one in self.alone))

    @property
    def object_ids(self) -> list[int]:
        """All objects of the commit."""
        return [one.object_id for one in self.objects]

    def holders(self) -> dict[StreamRun, int]:
        """Tell which object each run is in."""
        return {run: one.object_id for one in self.objects for run in one.runs}

    def request(self, node: common_pb2.NodeIdentity) -> objects_pb2.CommitStreamSetObjectRequest:
        """Make the request that accepts valid rows whatever happens to the others."""
        request = objects_pb2.CommitStreamSetObjectRequest(
            node=node,
            object_id=-1,
            order_id=-1,
            stream_objects=_stream_objects(self.alone),
            on_conflict=common_pb2.ACCEPT_VALID,
        )
        if self.shared is not None:
            self._add_shared(request, self.shared)
        return request

    def _add_shared(
        self, request: objects_pb2.CommitStreamSetObjectRequest, shared: UploadedObject
    ) -> None:
        content = shared.content
        request.object_id = request.order_id = shared.object_id
        request.object_size = content.size
        request.crc32c = content.crc32c
        if content.min_timestamp_ms >= 0:
            request.min_timestamp_ms = content.min_timestamp_ms
            request.max_timestamp_ms = content.max_timestamp_ms
        request.ranges.CopyFrom(
            objects_pb2.RangeColumns(
                stream_id=[run.stream.stream_id for run in self.rows],
                stream_epoch=[run.stream.epoch for run in self.rows],
                start_offset=[run.start_offset for run in self.rows],
                end_offset=[run.end_offset for run in self.rows],
            )
        )

    def verdicts(
        self, answer: objects_pb2.CommitStreamSetObjectResponse
    ) -> dict[StreamRun, ErrorCode.ValueType]:
        """Return the outcome of each run. A refused whole refuses the rows that it has no word on.

        Raises `ProtocolViolationError` when the rows of an accepted commit don't match.
        """
        rows = [*answer.range_errors, *answer.stream_object_errors]
        lengths = (len(answer.range_errors), len(answer.stream_object_errors))
        if lengths != (len(self.rows), len(self.alone)):
            if answer.error == common_pb2.NONE:
                raise ProtocolViolationError(
                    f"commit of objects {self.object_ids}",
                    detail=f"{lengths} verdicts answer {(len(self.rows), len(self.alone))} rows",
                )
            rows = [answer.error] * len(self.runs)
        return {
            run: answer.error if code == common_pb2.NONE else code
            for run, code in zip(self.runs, rows, strict=True)
        }


def _stream_objects(alone: Sequence[UploadedObject]) -> objects_pb2.StreamObjectColumns:
    runs = [one.runs[0] for one in alone]
    columns = objects_pb2.StreamObjectColumns(
        object_id=[one.object_id for one in alone],
        object_size=[one.content.size for one in alone],
        stream_id=[run.stream.stream_id for run in runs],
        stream_epoch=[run.stream.epoch for run in runs],
        start_offset=[run.start_offset for run in runs],
        end_offset=[run.end_offset for run in runs],
        crc32c=[one.content.crc32c for one in alone],
    )
    if any(one.content.min_timestamp_ms >= 0 for one in alone):
        columns.min_timestamp_ms.extend(one.content.min_timestamp_ms for one in alone)
        columns.max_timestamp_ms.extend(one.content.max_timestamp_ms for one in alone)
    return columns
