"""What must hold of the batches of idempotent producers in the committed log."""

from collections.abc import Sequence

from streammeta.controller.records import record as rec
from tests.sim.sim_time import check

FIRST_PRODUCER = 10_000
"""Smaller ids are those of clients that repeat sequences at will."""


class AppendWatch:
    """Batches of idempotent producers in the committed log."""

    def __init__(self) -> None:
        self._starts: dict[tuple[int, int, int, int], int] = {}
        self._ends: dict[tuple[int, int], int] = {}

    def commit(self, records: Sequence[rec.Record], offset: int) -> None:
        """An entry is committed."""
        for record in records:
            if not isinstance(record, rec.ProducerBatchesCommitted):
                continue
            columns = (record.stream_id, record.producer_id, record.producer_epoch)
            others = (record.first_sequence, record.record_count, record.start_offset)
            for stream, producer, epoch, first, count, start in zip(
                *(values.tolist() for values in (*columns, *others)), strict=True
            ):
                # Those of other clients repeat sequences at will, under small numbers.
                if producer < FIRST_PRODUCER:
                    continue
                key = (stream, producer, epoch, first)
                detail = f"{key} at {start} by entry {offset}, before at {self._starts.get(key)}"
                check(key not in self._starts, "no batch is committed twice", detail)
                in_order = start >= self._ends.get((stream, producer), 0)
                check(in_order, "batches keep their producer's order", detail)
                self._starts[key], self._ends[(stream, producer)] = start, start + count

    def start_of(self, stream: int, producer: int, first: int) -> int | None:
        """Return where a batch was committed, or None."""
        return self._starts.get((stream, producer, 0, first))
