"""Detection of repeated and missing batches of idempotent producers in a partition.

Owns the remembered state of each producer (epoch and up to five batches), the order of the checks
(Kafka's `ProducerAppendInfo` and `ProducerStateManager`), and the bytes of a snapshot. A snapshot
contains a row for each remembered batch, the newest of a producer last. Readers that expect one row
per producer use the last one and see its newest sequence. Transactions are not supported.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import google_crc32c

from streammeta.brokers.partition import errors
from streammeta.storage.inspection.kafka_batch import KafkaBatch
from streammeta.storage.inspection.meta_stream import SNAPSHOT_VERSION, ProducerState

REMEMBERED_BATCHES = 5
EXPIRATION_MS = 86_400_000
"""Age at which an idle producer expires, in ms (Kafka's `producer.id.expiration.ms`)."""

_SEQUENCES = 2**31
_HEADER = struct.Struct(">hIi")
_COUNT = struct.Struct(">i")
_ROW = struct.Struct(">qhiqiqiq")


@dataclass(frozen=True, slots=True)
class SequencedBatch:
    """A batch of a producer: first and last sequence, first and last offset, time in ms."""

    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    timestamp: int


@dataclass(frozen=True, slots=True)
class Producer:
    """A producer in its newest epoch, with its newest batches, oldest first."""

    epoch: int
    batches: tuple[SequencedBatch, ...]


def sequence_after(sequence: int) -> int:
    """Return the next sequence number. 0 follows 2^31-1."""
    return (sequence + 1) % _SEQUENCES


class ProducerStates:
    """State of a partition's producers up to the offset `map_end`."""

    def __init__(self, map_end: int = 0) -> None:
        self.map_end = map_end
        self.producers: dict[int, Producer] = {}

    @classmethod
    def of_snapshot(cls, offset: int, rows: tuple[ProducerState, ...]) -> ProducerStates:
        """Return the state stored as the snapshot of `offset`."""
        states = cls(offset)
        for row in rows:
            if not row.has_batch:
                continue
            batch = SequencedBatch(
                (row.last_sequence - row.offset_delta) % _SEQUENCES,
                row.last_sequence,
                row.last_offset - row.offset_delta,
                row.last_offset,
                row.timestamp,
            )
            states._remember(row.producer_id, row.producer_epoch, batch)
        return states

    def duplicate_of(self, batch: KafkaBatch) -> SequencedBatch | None:
        """Return the remembered batch that `batch` repeats, None for a new batch."""
        known = self.producers.get(batch.producer_id)
        # Sequences of different epochs are independent.
        if known is None or known.epoch != batch.producer_epoch:
            return None
        wanted = (batch.base_sequence, batch.last_sequence)
        return next(
            (old for old in known.batches if (old.first_sequence, old.last_sequence) == wanted),
            None,
        )

    def check(self, producer_id: int, epoch: int, first_sequence: int) -> None:
        """Check that a new batch may be appended.

        Raises `InvalidProducerEpochError` or `OutOfOrderSequenceError`. An unknown producer may
        start with any sequence, because it may have expired.
        """
        known = self.producers.get(producer_id)
        if known is None:
            return
        if epoch < known.epoch:
            raise errors.InvalidProducerEpochError(
                f"producer {producer_id} has epoch {epoch}, expected at least {known.epoch}"
            )
        # A new epoch restarts its sequences.
        wanted = 0 if epoch > known.epoch else sequence_after(known.batches[-1].last_sequence)
        if first_sequence != wanted:
            raise errors.OutOfOrderSequenceError(
                f"producer {producer_id} continues with sequence {first_sequence}, expected"
                f" {wanted}"
            )

    def record(self, batch: KafkaBatch, base_offset: int, now_ms: int | None = None) -> None:
        """Record a batch that was appended at `base_offset`, or found in the log.

        `now_ms` is the time of the append, at which the producer's idle time begins. Without it the
        records' time is used, which may be far off.
        """
        self.map_end = base_offset + batch.last_offset_delta + 1
        # Such batches have no sequence.
        if batch.producer_id < 0 or batch.is_control:
            return
        self._remember(
            batch.producer_id,
            batch.producer_epoch,
            SequencedBatch(
                batch.base_sequence,
                batch.last_sequence,
                base_offset,
                base_offset + batch.last_offset_delta,
                batch.max_timestamp if now_ms is None else now_ms,
            ),
        )

    def expire(self, now_ms: int) -> None:
        """Drop producers whose newest batch is older than `EXPIRATION_MS`."""
        self.producers = {
            producer_id: known
            for producer_id, known in self.producers.items()
            if known.batches[-1].timestamp > now_ms - EXPIRATION_MS
        }

    def snapshot(self) -> bytes:
        """Return the bytes of Kafka's snapshot file, version 1."""
        rows = [
            _ROW.pack(
                producer_id,
                known.epoch,
                past.last_sequence,
                past.last_offset,
                past.last_offset - past.first_offset,
                past.timestamp,
                -1,  # epoch of a transaction coordinator
                -1,  # first offset of a transaction
            )
            for producer_id, known in sorted(self.producers.items())
            for past in known.batches
        ]
        checked = _COUNT.pack(len(rows)) + b"".join(rows)
        return _HEADER.pack(SNAPSHOT_VERSION, google_crc32c.value(checked), len(rows)) + b"".join(
            rows
        )

    def _remember(self, producer_id: int, epoch: int, batch: SequencedBatch) -> None:
        known = self.producers.get(producer_id)
        # A new epoch drops the batches of the old one.
        earlier = known.batches if known is not None and known.epoch == epoch else ()
        batches = (*earlier, batch)[-REMEMBERED_BATCHES:]
        self.producers[producer_id] = Producer(epoch, batches)
