"""Rules by which a partition tells new batches of idempotent producers from repeated and lost ones.

Owns what is remembered of each producer (epoch and up to five batches), the order of the checks
(Kafka's `ProducerAppendInfo` and `ProducerStateManager`), and the bytes of a snapshot. A snapshot
holds a row for each batch remembered, the newest of a producer last: readers that know one row for
a producer take the last and see its newest sequence. Transactions are not known here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import google_crc32c

from streammeta.brokers.partition.errors import (
    InvalidProducerEpochError,
    OutOfOrderSequenceError,
)
from streammeta.storage.inspection.kafka_batch import KafkaBatch
from streammeta.storage.inspection.meta_stream import SNAPSHOT_VERSION, ProducerState

REMEMBERED_BATCHES = 5
EXPIRATION_MS = 86_400_000
"""Age in ms at which an idle producer is forgotten (`producer.id.expiration.ms` of Kafka)."""

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
    """A producer in its newest epoch, and its newest batches, oldest first."""

    epoch: int
    batches: tuple[SequencedBatch, ...]


def sequence_after(sequence: int) -> int:
    """Return the sequence number that follows; 2^31-1 is followed by 0."""
    return (sequence + 1) % _SEQUENCES


class ProducerStates:
    """What a partition knows of its producers up to the offset `map_end`."""

    def __init__(self, map_end: int = 0) -> None:
        self.map_end = map_end
        self.producers: dict[int, Producer] = {}

    @classmethod
    def of_snapshot(cls, offset: int, rows: tuple[ProducerState, ...]) -> ProducerStates:
        """Return the state that was written as the snapshot of `offset`."""
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
        """Return the remembered batch that `batch` repeats, None if it repeats none."""
        known = self.producers.get(batch.producer_id)
        if known is None or known.epoch != batch.producer_epoch:
            return None
        wanted = (batch.base_sequence, batch.last_sequence)
        return next(
            (one for one in known.batches if (one.first_sequence, one.last_sequence) == wanted),
            None,
        )

    def check(self, producer_id: int, epoch: int, first_sequence: int) -> None:
        """Check that a batch, which repeats none, may be appended.

        Raises `InvalidProducerEpochError` or `OutOfOrderSequenceError`. Any sequence is taken from
        a producer that is not known: it may have been forgotten.
        """
        known = self.producers.get(producer_id)
        if known is None:
            return
        if epoch < known.epoch:
            raise InvalidProducerEpochError(
                f"producer {producer_id} has epoch {epoch}, wanted at least {known.epoch}"
            )
        wanted = 0 if epoch > known.epoch else sequence_after(known.batches[-1].last_sequence)
        if first_sequence != wanted:
            raise OutOfOrderSequenceError(
                f"producer {producer_id} continues with sequence {first_sequence}, wanted {wanted}"
            )

    def record(self, batch: KafkaBatch, base_offset: int, now_ms: int | None = None) -> None:
        """Note a batch that was appended at `base_offset`, or that was found in the log.

        `now_ms` is the time of the append, from which the idle time of the producer counts; without
        it that of the records, which may be far from it.
        """
        self.map_end = base_offset + batch.last_offset_delta + 1
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
        """Forget producers whose newest batch is older than `EXPIRATION_MS`."""
        self.producers = {
            producer_id: one
            for producer_id, one in self.producers.items()
            if one.batches[-1].timestamp > now_ms - EXPIRATION_MS
        }

    def snapshot(self) -> bytes:
        """Return the bytes of Kafka's snapshot file, version 1."""
        rows = [
            _ROW.pack(
                producer_id,
                known.epoch,
                one.last_sequence,
                one.last_offset,
                one.last_offset - one.first_offset,
                one.timestamp,
                -1,  # epoch of a transaction coordinator
                -1,  # first offset of a transaction
            )
            for producer_id, known in sorted(self.producers.items())
            for one in known.batches
        ]
        checked = _COUNT.pack(len(rows)) + b"".join(rows)
        return _HEADER.pack(SNAPSHOT_VERSION, google_crc32c.value(checked), len(rows)) + b"".join(
            rows
        )

    def _remember(self, producer_id: int, epoch: int, batch: SequencedBatch) -> None:
        known = self.producers.get(producer_id)
        earlier = known.batches if known is not None and known.epoch == epoch else ()
        batches = (*earlier, batch)[-REMEMBERED_BATCHES:]
        self.producers[producer_id] = Producer(epoch, batches)
