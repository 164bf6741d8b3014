"""A batch in flight: its objects, its commit request and verdicts, and its stage.

Rows of a commit are the runs of the stream set object, then one run for each stream object. `core`
decides when a batch enters a stage. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from streammeta.client.errors import ProtocolViolationError
from streammeta.client.writing.object_encoder import EncodedObject
from streammeta.client.writing.record_buffer import StreamRun
from streammeta.rpc.tracing import NOT_TRACED, OpenSpan
from streammeta.v1 import common_pb2, objects_pb2
from streammeta.v1.common_pb2 import ErrorCode

APPEND_SPAN = "streammeta.append"
"""Name of the span of a batch, from its first append until it is settled."""


@dataclass(frozen=True, slots=True, eq=False)
class UploadedObject:
    """An object in the store that no commit names yet."""

    content: EncodedObject
    object_id: int


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """Objects to commit together, and their runs that the metadata is to contain."""

    objects: tuple[UploadedObject, ...]
    shared: UploadedObject | None
    rows: tuple[StreamRun, ...]
    alone: tuple[UploadedObject, ...]

    @classmethod
    def of(cls, uploaded: Sequence[UploadedObject], settled: Container[StreamRun]) -> BatchCommit:
        """Select all objects of `uploaded`, without the shared object's runs in `settled`."""
        shared = next((uploaded_ for uploaded_ in uploaded if uploaded_.content.shared), None)
        # Settled runs stay in the object's bytes, but the metadata never refers to them.
        runs = () if shared is None else shared.content.runs
        rows = tuple(run for run in runs if run not in settled)
        alone = tuple(uploaded_ for uploaded_ in uploaded if not uploaded_.content.shared)
        return cls(tuple(uploaded), shared, rows, alone)

    @property
    def runs(self) -> tuple[StreamRun, ...]:
        """All runs, in row order."""
        return (*self.rows, *(uploaded.content.runs[0] for uploaded in self.alone))

    @property
    def object_ids(self) -> list[int]:
        """All objects of the commit."""
        return [uploaded.object_id for uploaded in self.objects]

    def holders(self) -> dict[StreamRun, int]:
        """Return the object id of each run."""
        return {
            run: uploaded.object_id for uploaded in self.objects for run in uploaded.content.runs
        }

    def request(self, node: common_pb2.NodeIdentity) -> objects_pb2.CommitStreamSetObjectRequest:
        """Build a request that accepts valid rows even if others are rejected."""
        request = objects_pb2.CommitStreamSetObjectRequest(
            node=node,
            stream_objects=_stream_objects(self.alone),
            on_conflict=common_pb2.ON_CONFLICT_ACCEPT_VALID,
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
        # Absent fields mean that the bounds are unknown, zero would be a valid time.
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

    def verdict(
        self, answer: objects_pb2.CommitStreamSetObjectResponse
    ) -> dict[StreamRun, ErrorCode.ValueType]:
        """Return the outcome of each run. A rejected request rejects rows without a code.

        Raises `ProtocolViolationError` when the rows of an accepted commit don't match.
        """
        rows = [*answer.range_errors, *answer.stream_object_errors]
        lengths = (len(answer.range_errors), len(answer.stream_object_errors))
        if lengths != (len(self.rows), len(self.alone)):
            # A rejected request may come without rows, an accepted one may not.
            if answer.error == common_pb2.ERROR_CODE_NONE:
                raise ProtocolViolationError(
                    f"commit of objects {self.object_ids}",
                    detail=f"{lengths} verdicts answer {(len(self.rows), len(self.alone))} rows",
                )
            rows = [answer.error] * len(self.runs)

        return {
            run: answer.error if code == common_pb2.ERROR_CODE_NONE else code
            for run, code in zip(self.runs, rows, strict=True)
        }


def _stream_objects(alone: Sequence[UploadedObject]) -> objects_pb2.StreamObjectColumns:

    runs = [uploaded.content.runs[0] for uploaded in alone]
    columns = objects_pb2.StreamObjectColumns(
        object_id=[uploaded.object_id for uploaded in alone],
        object_size=[uploaded.content.size for uploaded in alone],
        stream_id=[run.stream.stream_id for run in runs],
        stream_epoch=[run.stream.epoch for run in runs],
        start_offset=[run.start_offset for run in runs],
        end_offset=[run.end_offset for run in runs],
        crc32c=[uploaded.content.crc32c for uploaded in alone],
    )
    # A column is complete or absent, so one known bound needs all of them.
    if any(uploaded.content.min_timestamp_ms >= 0 for uploaded in alone):
        columns.min_timestamp_ms.extend(uploaded.content.min_timestamp_ms for uploaded in alone)
        columns.max_timestamp_ms.extend(uploaded.content.max_timestamp_ms for uploaded in alone)
    return columns


class Waiter(Protocol):
    """A caller that waits for its turn, such as an `asyncio.Event`."""

    def set(self) -> None:
        """Let the caller continue."""


class Stage(IntEnum):
    """Stages of a batch, in order."""

    SEALED = 0
    ENCODE = 1
    UPLOAD = 2
    SUBMIT = 3
    FINISH = 4


@dataclass(slots=True, eq=False)
class BatchUpload:
    """State of one batch: its objects, which of them are stored and committed, and failures.

    `stage` is the one that it entered last. `turn` waits for the next one.
    """

    runs: list[StreamRun]
    encoded_bytes: int
    number: int
    stage: Stage = Stage.SEALED
    turn: Waiter | None = None
    log_end: int | None = None
    objects: list[EncodedObject] = field(default_factory=list)
    uploaded: list[UploadedObject] = field(default_factory=list)
    committed: set[StreamRun] = field(default_factory=set)
    failures: dict[StreamRun, Exception] = field(default_factory=dict)
    reuploads: int = 0
    submission: int = -1
    span: OpenSpan = NOT_TRACED
    """From the first append of the batch until it is settled."""
    sealed_at: float = 0.0
    """Monotonic time, in seconds."""

    def open_runs(self, content: EncodedObject) -> list[StreamRun]:
        """Return the runs of an object that are neither committed nor failed."""
        return [
            run for run in content.runs if run not in self.committed and run not in self.failures
        ]

    def begin(self, stage: Stage) -> None:
        """Enter `stage`. Runs of streams that failed earlier are not submitted."""
        self.stage, self.turn = stage, None
        if stage is Stage.SUBMIT:
            # Committing the records after a failure would leave a gap.
            for run in self.runs:
                if run.stream.failure is not None:
                    self.failures.setdefault(run, run.stream.error_after_failure())
