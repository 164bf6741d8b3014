"""In-memory state of an open partition log, and the effect of one more batch on it.

Appends and recovery apply batches by the same code, so a recovered log has the state of one that
never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streammeta.brokers.partition.leader_epochs import LeaderEpochs
from streammeta.brokers.partition.producer_state import ProducerStates
from streammeta.brokers.partition.segments import Segment, rolled
from streammeta.brokers.partition.time_index import INTERVAL_BYTES, Entry
from streammeta.storage.inspection.kafka_batch import KafkaBatch


@dataclass(slots=True)
class LogState:
    """Streams, bounds, segments, producers and epochs of a log, with offsets in `[start, end)`.

    `times` are the entries of the active segment's time index. The newest `unsaved_times` of them
    are not in the time index stream yet.
    """

    log_id: int
    time_id: int
    start_offset: int
    end_offset: int
    segments: list[Segment]
    producers: ProducerStates
    epochs: LeaderEpochs
    times: list[Entry] = field(default_factory=list)
    unsaved_times: int = 0
    since_time_entry: int = 0

    def take(self, batch: KafkaBatch, base_offset: int, now_ms: int) -> None:
        """Apply a batch that was appended at `base_offset`, at the end of the log."""
        last = base_offset + batch.last_offset_delta
        self.end_offset = last + 1
        self.producers.record(batch, base_offset, now_ms)
        self.segments[-1] = self.segments[-1].grown(batch.size, batch.max_timestamp, last, now_ms)
        self.since_time_entry += batch.size
        newest = self.times[-1] if self.times else (-1, -1)
        is_due = self.since_time_entry > INTERVAL_BYTES
        if is_due and batch.max_timestamp > newest[0] and last > newest[1]:
            self.times.append((batch.max_timestamp, last))
            self.unsaved_times += 1
            self.since_time_entry = 0

    def roll(self, offset: int, time_position: int, now_ms: int) -> None:
        """Start a new segment."""
        self.segments = rolled(self.segments, offset, time_position, now_ms)
        self.times, self.since_time_entry = [], 0

    @property
    def times_to_save(self) -> list[Entry]:
        """Entries that are not in the time index stream yet."""
        return self.times[len(self.times) - self.unsaved_times :]
