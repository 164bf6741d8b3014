"""What waits in the writer's memory, and how a full batch is laid out in objects.

Owns the runs of records of each stream and the split rule: a stream with at least the split size
of payload becomes a stream object of its own, the others share one stream set object, and a
single stream is always a stream object. Pure: no I/O, no clock, no controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from storage.object_format.object_builder import BuiltObject, ObjectBuilder
from storage.object_format.record import RecordBatch

RECORD_OVERHEAD = 256
"""Bytes a waiting record costs beside its payload, for the buffer's bound."""


@dataclass(slots=True, eq=False)
class WriterStream:
    """A stream attached to a writer: its epoch, its ends, and why it failed.

    The next append gets `next_offset`; everything below `acknowledged` is committed.
    """

    stream_id: int
    epoch: int
    next_offset: int
    acknowledged: int
    failure: Exception | None = None


@dataclass(slots=True, eq=False)
class StreamRun:
    """Consecutive records of one stream, and the acknowledgement that each one's caller awaits."""

    stream: WriterStream
    records: list[RecordBatch] = field(default_factory=list)
    acks: list[asyncio.Future[int]] = field(default_factory=list)
    payload_bytes: int = 0

    @property
    def start_offset(self) -> int:
        """First offset of the run."""
        return self.records[0].base_offset

    @property
    def end_offset(self) -> int:
        """Offset behind the last one of the run."""
        return self.records[-1].end_offset

    @property
    def buffered_bytes(self) -> int:
        """What the run takes of the buffer's bound."""
        return self.payload_bytes + RECORD_OVERHEAD * len(self.records)

    def add(self, record: RecordBatch, ack: asyncio.Future[int]) -> None:
        """Append `record`, which starts where the run ends."""
        self.records.append(record)
        self.acks.append(ack)
        self.payload_bytes += len(record.payload)

    def succeed(self) -> None:
        """Tell every caller the base offset of its record."""
        for record, ack in zip(self.records, self.acks, strict=True):
            if not ack.done():
                ack.set_result(record.base_offset)

    def fail(self, error: Exception) -> None:
        """Tell every caller that its record is not known to be committed."""
        for ack in self.acks:
            if not ack.done():
                ack.set_exception(error)


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """One object to build: the runs in it, by stream id; `shared` for the stream set object."""

    runs: tuple[StreamRun, ...]
    shared: bool

    def build(self, block_bytes: int) -> BuiltObject:
        """Make the bytes of the object, with data blocks of about `block_bytes` of payload."""
        builder = ObjectBuilder(block_bytes)
        for run in self.runs:
            builder.write(run.records)
        return builder.finish()


def plan_objects(runs: Iterable[StreamRun], split_bytes: int) -> list[ObjectPlan]:
    """Lay out `runs`, one for each stream: the stream set object first, then ascending streams."""
    ordered = sorted(runs, key=lambda run: run.stream.stream_id)
    if len(ordered) == 1:
        return [ObjectPlan((ordered[0],), shared=False)]
    shared = tuple(run for run in ordered if run.payload_bytes < split_bytes)
    alone = [
        ObjectPlan((run,), shared=False) for run in ordered if run.payload_bytes >= split_bytes
    ]
    return [ObjectPlan(shared, shared=True), *alone] if shared else alone
