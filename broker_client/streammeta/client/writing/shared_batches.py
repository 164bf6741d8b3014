"""Batches of shared streams: their records, their relative object, and the commit of its rows.

An append is one batch and one row of its commit. Offsets in the object count from 0 in each stream:
the commit assigns the real ones. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

from streammeta.client.arguments import INT32_MAX, check_int
from streammeta.client.config import ACK_OVERHEAD, RECORD_OVERHEAD
from streammeta.client.errors import ProtocolViolationError
from streammeta.client.writing.record_buffer import NO_TIME, Ack
from streammeta.storage.object_format.object_writer import ObjectWriter
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch
from streammeta.v1 import common_pb2, objects_pb2

PRODUCER_EPOCH_MAX = 32_767

SHARED_EPOCH = 0
"""Epoch of every shared stream."""

_NO_PRODUCER = (-1, -1, -1)


@dataclass(frozen=True, slots=True)
class Producer:
    """Who appends a batch, for the recognition of duplicates: an idempotent producer.

    `first_sequence` is the sequence number of the batch's first offset. In each stream the batches
    of a producer follow each other without a gap, and after 2^31 - 1 comes 0. A larger `epoch`
    fences the smaller ones.
    """

    producer_id: int
    epoch: int
    first_sequence: int

    def __post_init__(self) -> None:
        """Reject numbers that no commit can contain."""
        check_int("producer_id", self.producer_id)
        check_int("epoch", self.epoch, 0, PRODUCER_EPOCH_MAX)
        check_int("first_sequence", self.first_sequence, 0, INT32_MAX)


BatchIdentity: TypeAlias = tuple[int, Producer, int]
"""Stream, producer with its first sequence, and number of offsets."""


@dataclass(slots=True, eq=False)
class SharedBatch:
    """The records of one append, which get consecutive offsets together, and its answer.

    `records` are payloads and numbers of offsets. `times` are the bounds of the records' times.
    """

    stream_id: int
    records: Sequence[tuple[bytes, int]]
    ack: Ack
    producer: Producer | None = None
    times: tuple[int, int] = NO_TIME
    count: int = field(init=False)
    size: int = field(init=False)
    """Bytes of the encoded records."""

    def __post_init__(self) -> None:
        self.count = sum(count for _, count in self.records)
        payload = sum(len(payload) for payload, _ in self.records)
        self.size = payload + RECORD_HEADER_SIZE * len(self.records)

    @property
    def cost(self) -> int:
        """Bytes of the buffer: the records exist twice, alone and in their object."""
        return 2 * self.size + RECORD_OVERHEAD * len(self.records) + ACK_OVERHEAD

    @property
    def sequence_key(self) -> tuple[int, int, int] | None:
        """The sequence that the batch continues, None without a producer."""
        if self.producer is None:
            return None
        return self.stream_id, self.producer.producer_id, self.producer.epoch

    @property
    def identity(self) -> BatchIdentity | None:
        """What a batch that a producer sends again has in common with this one."""
        return None if self.producer is None else (self.stream_id, self.producer, self.count)

    def answer(self, result: int | Exception) -> None:
        """Complete the append with its first offset or its error."""
        # The caller may have cancelled it.
        if self.ack.done():
            return
        if isinstance(result, Exception):
            self.ack.set_exception(result)
        else:
            self.ack.set_result(result)


@dataclass(frozen=True, slots=True)
class SharedObject:
    """The bytes of a relative object, their checksum, and the time bounds of its records."""

    data: bytes
    crc32c: int
    times: tuple[int, int]


def encode_shared(batches: Sequence[SharedBatch], block_bytes: int) -> SharedObject:
    """Build the relative object of batches, which are sorted by stream."""
    writer = ObjectWriter(block_bytes, checksum=True, relative=True)
    for stream_id, group in groupby(batches, key=lambda batch: batch.stream_id):
        records: list[RecordBatch] = []
        offset = 0
        for batch in group:
            for payload, count in batch.records:
                records.append(RecordBatch(stream_id, SHARED_EPOCH, offset, count, payload))
                offset += count
        writer.write(records)
    writer.finish()
    data = b"".join(writer.parts())

    times = NO_TIME
    if all(batch.times[0] >= 0 for batch in batches):
        earliest, latest = zip(*(batch.times for batch in batches), strict=True)
        times = min(earliest), max(latest)
    crc32c = writer.summary.crc32c
    assert crc32c is not None
    return SharedObject(data, crc32c, times)


@dataclass(frozen=True, slots=True)
class SharedVerdict:
    """Outcome of a commit: a code for each row, and its first offset, -1 without one.

    `error` is the error of the whole commit.
    """

    error: int
    codes: Sequence[int]
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class SharedCommit:
    """The commit of an object with these batches as its rows, which accepts all valid ones."""

    object_id: int
    content: SharedObject
    batches: tuple[SharedBatch, ...]

    def request(self, node: common_pb2.NodeIdentity) -> objects_pb2.CommitStreamSetObjectRequest:
        """Build the request."""
        rows = objects_pb2.SharedRowColumns(
            stream_id=[batch.stream_id for batch in self.batches],
            record_count=[batch.count for batch in self.batches],
        )
        if any(batch.producer is not None for batch in self.batches):
            producers = [_numbers(batch.producer) for batch in self.batches]
            ids, epochs, sequences = zip(*producers, strict=True)
            rows.producer_id.extend(ids)
            rows.producer_epoch.extend(epochs)
            rows.first_sequence.extend(sequences)

        request = objects_pb2.CommitStreamSetObjectRequest(
            node=node,
            object_id=self.object_id,
            object_size=len(self.content.data),
            crc32c=self.content.crc32c,
            shared_rows=rows,
            on_conflict=common_pb2.ON_CONFLICT_ACCEPT_VALID,
        )
        if self.content.times != NO_TIME:
            request.min_timestamp_ms, request.max_timestamp_ms = self.content.times
        return request

    def verdict(self, answer: objects_pb2.CommitStreamSetObjectResponse) -> SharedVerdict:
        """Return the outcome of each row.

        Raises `ProtocolViolationError` when the rows of an accepted commit don't match.
        """
        results = answer.shared_results
        rows = len(self.batches)
        if len(results.start_offset) == rows and len(results.errors) in (0, rows):
            # No verdicts at all are NONE, which is 0. No row of a rejected commit is committed.
            codes = [code or answer.error for code in results.errors or [0] * rows]
            return SharedVerdict(answer.error, codes, list(results.start_offset))
        # A rejected request may come without rows, an accepted one may not.
        if answer.error == common_pb2.ERROR_CODE_NONE:
            raise ProtocolViolationError(
                f"commit of object {self.object_id}",
                detail=f"{len(results.start_offset)} results answer {rows} rows. The leader"
                " may not know shared streams",
            )
        return SharedVerdict(answer.error, [answer.error] * rows, [-1] * rows)


def _numbers(producer: Producer | None) -> tuple[int, int, int]:
    if producer is None:
        return _NO_PRODUCER
    return producer.producer_id, producer.epoch, producer.first_sequence
