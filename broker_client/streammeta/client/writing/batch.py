"""One batch on its way to a commit: its objects, its commit request and verdicts, and its turn.

Rows of a commit are the runs of the stream set object, then one run for each stream object. Batches
are submitted one after the other, without waiting for answers, and completed in the same order.
When one has to be committed anew, those behind it were judged without it; no other is submitted
until all of them are completed. No I/O but the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

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
    """Objects that are committed together, and which of their runs the map is to know of."""

    objects: tuple[UploadedObject, ...]
    shared: UploadedObject | None
    rows: tuple[StreamRun, ...]
    alone: tuple[UploadedObject, ...]

    @classmethod
    def of(cls, uploaded: Sequence[UploadedObject], settled: Container[StreamRun]) -> BatchCommit:
        """Take all objects of `uploaded`, and of the set object the runs not in `settled`."""
        shared = next((one for one in uploaded if one.content.shared), None)
        runs = () if shared is None else shared.content.runs
        rows = tuple(run for run in runs if run not in settled)
        alone = tuple(one for one in uploaded if not one.content.shared)
        return cls(tuple(uploaded), shared, rows, alone)

    @property
    def runs(self) -> tuple[StreamRun, ...]:
        """All runs, in row order."""
        return (*self.rows, *(one.content.runs[0] for one in self.alone))

    @property
    def object_ids(self) -> list[int]:
        """All objects of the commit."""
        return [one.object_id for one in self.objects]

    def holders(self) -> dict[StreamRun, int]:
        """Tell which object each run is in."""
        return {run: one.object_id for one in self.objects for run in one.content.runs}

    def request(self, node: common_pb2.NodeIdentity) -> objects_pb2.CommitStreamSetObjectRequest:
        """Make the request that accepts valid rows whatever happens to the others."""
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
        """Return the outcome of each run. A refused whole refuses the rows that it has no word on.

        Raises `ProtocolViolationError` when the rows of an accepted commit don't match.
        """
        rows = [*answer.range_errors, *answer.stream_object_errors]
        lengths = (len(answer.range_errors), len(answer.stream_object_errors))
        if lengths != (len(self.rows), len(self.alone)):
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
    runs = [one.content.runs[0] for one in alone]
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


@dataclass(slots=True, eq=False)
class BatchUpload:
    """The state of one batch: its objects, what is in the store and the map, and what failed."""

    runs: list[StreamRun]
    encoded_bytes: int
    before: BatchUpload | None = None
    log_end: int | None = None
    objects: list[EncodedObject] = field(default_factory=list)
    uploaded: list[UploadedObject] = field(default_factory=list)
    committed: set[StreamRun] = field(default_factory=set)
    failures: dict[StreamRun, Exception] = field(default_factory=dict)
    reuploads: int = 0
    submission: int = -1
    span: OpenSpan = NOT_TRACED
    """From the first append of the batch until it is settled."""
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    closed_at: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """Time since the batch was closed, in seconds."""
        return time.monotonic() - self.closed_at

    def open_runs(self, content: EncodedObject) -> list[StreamRun]:
        """Return the runs of an object that are neither committed nor failed."""
        return [
            run for run in content.runs if run not in self.committed and run not in self.failures
        ]


class CommitOrder:
    """Lets each batch wait for its turns; `BatchUpload.before` says what it comes after."""

    def __init__(self) -> None:
        self._newest: BatchUpload | None = None
        self._may_submit = asyncio.Event()
        self._may_submit.set()

    async def submission(self, batch: BatchUpload) -> None:
        """Wait until `batch` may be submitted."""
        if batch.before is not None:
            await batch.before.submitted.wait()
        await self._may_submit.wait()

    def submitted(self, batch: BatchUpload) -> None:
        """Let the next one be submitted."""
        self._newest = batch
        batch.submitted.set()

    async def settlement(self, batch: BatchUpload) -> None:
        """Wait until all before `batch` are settled."""
        if batch.before is not None:
            await batch.before.settled.wait()

    def hold(self) -> None:
        """Submit nothing more until all that is submitted is settled."""
        self._may_submit.clear()

    def settled(self, batch: BatchUpload) -> None:
        """Let the next one be settled; `batch` is over, whatever became of it."""
        batch.submitted.set()
        batch.settled.set()
        batch.before = None
        if self._newest is batch:
            self._newest = None
            self._may_submit.set()
