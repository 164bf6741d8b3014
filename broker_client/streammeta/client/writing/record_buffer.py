"""Record buffer: per-stream runs of encoded records, and their layout in objects.

Owns the bytes of buffered records, the checks of an append's arguments, and the split rule. A
stream with at least the split size of payload gets a stream object, the others share one stream set
object, and a single stream always gets a stream object. Pure: no I/O, no clock, no controller.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streammeta.client.arguments import INT64_MAX, as_payload, check_int, check_items
from streammeta.client.errors import StreamFailedError, WriterClosedError
from streammeta.storage.object_format import record as record_format

UNKNOWN_TIME = -1
"""Time bound of an object that contains records without a time."""

_SEGMENT_BYTES = 64 * 1024
"""Memory is released in pieces of about this size while a run is moved into its object."""


@dataclass(slots=True, eq=False)
class WriterStream:
    """A stream attached to a writer: its epoch, its ends, and why it failed.

    The next append gets `next_offset`. Everything below `acknowledged` is committed. `repeated` is
    the number of the last submission that committed a part of the stream again.
    """

    stream_id: int
    epoch: int
    next_offset: int
    acknowledged: int
    failure: Exception | None = None
    repeated: int = -1

    @property
    def is_pending(self) -> bool:
        """True if some appended records are not known to be committed."""
        return self.acknowledged < self.next_offset

    def error_after_failure(self) -> StreamFailedError:
        """Build the error of appends that follow the failure of the stream."""
        error = StreamFailedError(
            f"write to stream {self.stream_id}", detail=f"first failure: {self.failure}"
        )
        error.__cause__ = self.failure
        return error


class Ack(Protocol):
    """The answer to an append, such as an `asyncio.Future` of its base offset."""

    def done(self) -> bool:
        """Return whether it has its result, or its caller cancelled it."""

    def set_result(self, result: int, /) -> None:
        """Answer the append with its base offset."""

    def set_exception(self, exception: Exception, /) -> None:
        """Fail the append."""


@dataclass(slots=True, eq=False)
class StreamRun:
    """Consecutive encoded records of one stream, and the answers to their appends.

    `segments` has the records back to back until they are moved into an object. `lengths` and
    `offsets` are the payload size and base offset of each record. `cost` is the run's share of the
    buffer. `outcome` is the error of a settled run, None if it is committed.
    """

    stream: WriterStream
    start_offset: int = field(init=False)
    end_offset: int = field(init=False)
    payload_bytes: int = 0
    cost: int = 0
    segments: deque[bytearray] = field(default_factory=lambda: deque([bytearray()]))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    acks: list[Ack] = field(default_factory=list)
    ack_offsets: array[int] = field(default_factory=lambda: array("q"))
    min_timestamp_ms: int = UNKNOWN_TIME
    max_timestamp_ms: int = UNKNOWN_TIME
    is_settled: bool = False
    outcome: Exception | None = None

    def __post_init__(self) -> None:
        self.start_offset = self.end_offset = self.stream.next_offset

    @property
    def encoded_bytes(self) -> int:
        """Bytes of all records, headers included."""
        return self.payload_bytes + record_format.RECORD_HEADER_SIZE * len(self.lengths)

    def add(self, payload: bytes, count: int) -> bytes:
        """Append a record of `count` offsets and return its header."""
        stream, base, size = self.stream, self.end_offset, len(payload)
        header = record_format.pack_record_header(
            record_format.RECORD_MAGIC, stream.stream_id, stream.epoch, base, count, size
        )

        segment = self.segments[-1]
        # Segments bound how much memory is in use twice while the run moves into an object.
        if len(segment) >= _SEGMENT_BYTES:
            segment = bytearray()
            self.segments.append(segment)
        segment += header
        segment += payload

        self.lengths.append(size)
        self.offsets.append(base)
        self.payload_bytes += size
        self.end_offset = base + count
        return header

    def require_next(self, record: record_format.RecordBatch) -> None:
        """Raise `ValueError` unless `record` starts at the end of the run."""
        if record.base_offset != self.end_offset:
            raise ValueError(
                f"record of stream {record.stream_id} starts at offset {record.base_offset},"
                f" expected {self.end_offset}"
            )

    def add_ack(self, ack: Ack, base_offset: int) -> None:
        """Complete `ack` when the run is answered, or now if it is settled."""
        self.acks.append(ack)
        self.ack_offsets.append(base_offset)
        if self.is_settled:
            self.answer()

    def cover(self, times: tuple[int, int]) -> None:
        """Widen the time bounds for the next record. A record without a time makes them unknown."""
        earliest_ms, latest_ms = times
        if not self.lengths:
            self.min_timestamp_ms, self.max_timestamp_ms = times
        elif self.min_timestamp_ms >= 0:
            if earliest_ms < self.min_timestamp_ms:
                self.min_timestamp_ms = earliest_ms
            if earliest_ms < 0:
                self.max_timestamp_ms = earliest_ms
            elif latest_ms > self.max_timestamp_ms:
                self.max_timestamp_ms = latest_ms

    def settle(self, error: Exception | None) -> None:
        """Set the outcome, which `answer` reports to the appends. The first one stays."""
        # A later failure is only a consequence of the first one.
        if not self.is_settled:
            self.is_settled, self.outcome = True, error

    def cut_short(self, *, was_submitted: bool) -> WriterClosedError:
        """Build the error of a run whose upload was cancelled."""
        end = (
            "it may have been committed, open the stream again to see its next offset"
            if was_submitted
            else "it was not committed"
        )
        return WriterClosedError(
            f"the upload of stream {self.stream.stream_id} [{self.start_offset},"
            f" {self.end_offset}) was cancelled. {end}"
        )

    def answer(self) -> None:
        """Complete every append with its base offset, or with the error of the settled run."""
        error = self.outcome
        for base_offset, ack in zip(self.ack_offsets, self.acks, strict=True):
            # The caller may have cancelled its append.
            if ack.done():
                continue
            if error is None:
                ack.set_result(base_offset)
            else:
                ack.set_exception(error)
        # A settled run may live on in its batch, and must not keep the futures.
        self.acks = []
        self.ack_offsets = array("q")


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """Runs of one object to build, by stream id. `shared` marks the stream set object."""

    runs: tuple[StreamRun, ...]
    shared: bool


def plan_objects(runs: Iterable[StreamRun], split_bytes: int) -> list[ObjectPlan]:
    """Plan the objects of `runs`, one per stream: the stream set object first, then ascending."""
    # The format requires ascending streams within an object.
    ordered = sorted(runs, key=lambda run: run.stream.stream_id)
    # A single stream would be alone in a stream set object, which compaction would have to split.
    if len(ordered) == 1:
        return [ObjectPlan((ordered[0],), shared=False)]
    shared = tuple(run for run in ordered if run.payload_bytes < split_bytes)
    alone = [
        ObjectPlan((run,), shared=False) for run in ordered if run.payload_bytes >= split_bytes
    ]
    return [ObjectPlan(shared, shared=True), *alone] if shared else alone


NO_TIME = (UNKNOWN_TIME, UNKNOWN_TIME)


def check_payloads(payloads: Sequence[bytes]) -> Sequence[bytes]:
    """Return the payloads of many records, after rejecting a single bytes object."""
    wanted = "a sequence of payloads (use `append` for a single one)"
    payloads = check_items("payloads", payloads, wanted)
    if not payloads:
        raise ValueError("payloads is empty, expected at least one")
    # The usual case needs no copy.
    if set(map(type, payloads)) == {bytes}:
        return payloads
    return [
        payload if type(payload) is bytes else as_payload(f"payloads[{index}]", payload)
        for index, payload in enumerate(payloads)
    ]


def time_bounds(earliest_ms: int | None, latest_ms: int | None) -> tuple[int, int]:
    """Return the time bounds of an append, `NO_TIME` without a time, after validating them."""
    if earliest_ms is None and latest_ms is None:
        return NO_TIME
    for name, value in (("timestamp_ms", earliest_ms), ("max_timestamp_ms", latest_ms)):
        # The usual type is checked inline, as this runs for every record with a time.
        if value is not None and type(value) is not int:
            check_int(name, value)
    if earliest_ms is not None and latest_ms is None:
        latest_ms = earliest_ms
    if earliest_ms is None or latest_ms is None or not 0 <= earliest_ms <= latest_ms <= INT64_MAX:
        raise ValueError(
            f"timestamp_ms is {earliest_ms} and max_timestamp_ms {latest_ms}, expected the first or"
            " both, 0 <= timestamp_ms <= max_timestamp_ms"
        )
    return earliest_ms, latest_ms
