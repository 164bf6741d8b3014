"""In-memory state of an open partition log, and the effect of one more batch on it.

Appends and recovery apply batches by the same code, so a recovered log has the state of one that
never stopped.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from streammeta.brokers.partition.producer_state import ProducerStates
from streammeta.brokers.partition.segments import Segment, rolled
from streammeta.storage.inspection.kafka_batch import KafkaBatch

# Sparse index from time to offset of one segment: rows of i64 timestamp, i32 offset - base.
#
# Times ascend strictly: a row means that no earlier record of the segment has a later time.

ROW_SIZE = 12
INTERVAL_BYTES = 4096
"""Bytes of batches between two rows (Kafka's `index.interval.bytes`)."""

_ROW = struct.Struct(">qi")

Entry = tuple[int, int]
"""A timestamp in ms, and an offset."""


def encode_entries(entries: Iterable[Entry], base_offset: int) -> bytes:
    """Return the rows of entries of the segment that begins at `base_offset`."""
    return b"".join(_ROW.pack(time, offset - base_offset) for time, offset in entries)


def decode_entries(rows: bytes, base_offset: int) -> list[Entry]:
    """Return the entries of whole rows. An incomplete row at the end is ignored."""
    whole = rows[: len(rows) // ROW_SIZE * ROW_SIZE]
    return [(time, base_offset + delta) for time, delta in _ROW.iter_unpack(whole)]


def lookup(entries: Sequence[Entry], timestamp: int, base_offset: int) -> Entry:
    """Return the last entry not newer than `timestamp`, (-1, `base_offset`) for none."""
    found = bisect_right(entries, timestamp, key=lambda entry: entry[0])
    return entries[found - 1] if found else (-1, base_offset)


# -- Start offsets of leader epochs, which show where each epoch ended (KIP-101, KIP-320)

_HEAD = struct.Struct(">ii")
_ENTRY = struct.Struct(">iq")
_VERSION = 0


class LeaderEpochs:
    """Epochs in ascending order with their start offsets."""

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self.entries = list(entries)

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Record that `epoch` writes from `start_offset` on, and return whether that is new."""
        if self.entries and self.entries[-1][0] >= epoch:
            return False
        while self.entries and self.entries[-1][1] >= start_offset:
            self.entries.pop()  # wrote nothing
        self.entries.append((epoch, start_offset))
        return True

    def trim(self, start_offset: int) -> None:
        """Drop epochs that ended at or before `start_offset`. The current one then begins there."""
        while len(self.entries) > 1 and self.entries[1][1] <= start_offset:
            self.entries.pop(0)
        if self.entries and self.entries[0][1] < start_offset:
            self.entries[0] = (self.entries[0][0], start_offset)

    def end_of(self, epoch: int, log_end: int) -> tuple[int, int]:
        """Return the largest known epoch up to `epoch`, and the offset after its last record.

        (-1, -1) if there is none, or if `epoch` is larger than all known ones.
        """
        if not self.entries or epoch > self.entries[-1][0]:
            return -1, -1
        found = (-1, -1)
        for index, (known, _) in enumerate(self.entries):
            if known > epoch:
                break
            is_last = index + 1 == len(self.entries)
            found = (known, log_end if is_last else self.entries[index + 1][1])
        return found

    def at(self, offset: int) -> int:
        """Return the epoch that wrote, or will write, the record at `offset`, -1 for none."""
        return max((epoch for epoch, start in self.entries if start <= offset), default=-1)

    def encode(self) -> bytes:
        """Return the value of LEADER_EPOCH_CHECKPOINT."""
        rows = b"".join(_ENTRY.pack(*entry) for entry in self.entries)
        return _HEAD.pack(_VERSION, len(self.entries)) + rows


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
