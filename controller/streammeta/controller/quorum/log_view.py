"""In-memory index of a replica's log: offsets, epochs, the flushed end, and the newest batches.

The driver owns the log on disk and reads older batches on request.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.quorum.messages import Batch, EpochEnd
from streammeta.controller.quorum.voters import VoterSet

EMPTY_LOG_END = EndOffset(0)
_NO_EPOCH = Epoch(0)

_TRIMMED_SHARE = 16
"""Share of the batches in memory that one trim drops. A larger one would block all other work."""


@dataclass(frozen=True, slots=True)
class EpochStart:
    """Base offset of the first batch of an epoch."""

    epoch: Epoch
    start_offset: EndOffset


@dataclass(frozen=True, slots=True)
class LostEntries:
    """End and epoch of acknowledged entries that damage removed."""

    end_offset: EndOffset
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class LogStart:
    """The log as recovery found it on disk, all of it durable. `tail` ends at `end_offset`.

    A log that does not begin at 0 begins at or below the end of a snapshot, and `start_epoch` is
    the epoch of the last batch before it. `control` has all control batches of the log. `snapshots`
    ascend, and the newest of them names `snapshot_voters`.
    """

    start_offset: EndOffset = EMPTY_LOG_END
    end_offset: EndOffset = EMPTY_LOG_END
    epoch_starts: tuple[EpochStart, ...] = ()
    tail: tuple[Batch, ...] = ()
    start_epoch: Epoch = _NO_EPOCH
    control: tuple[Batch, ...] = ()
    snapshots: tuple[SnapshotId, ...] = ()
    snapshot_voters: VoterSet | None = None
    lost: LostEntries | None = None


class LogView:
    """Index of the log, with the newest batches."""

    def __init__(self, recovered: LogStart, tail_bytes: int) -> None:
        self.start_offset = recovered.start_offset
        self.start_epoch = recovered.start_epoch
        self.end_offset = recovered.end_offset
        self.flushed_end = recovered.end_offset
        self._epochs = [item.epoch for item in recovered.epoch_starts]
        self._starts = [item.start_offset for item in recovered.epoch_starts]
        self._enter_epoch_at_start()
        self._tail: list[Batch] = list(recovered.tail)
        self._tail_held = sum(batch.held_bytes for batch in self._tail)
        self._tail_limit = tail_bytes
        self._unflushed: deque[tuple[int, EndOffset]] = deque()

    def _enter_epoch_at_start(self) -> None:
        """Add the epoch in which the log begins, which may have started before the log."""
        # Every offset of the log then has an epoch, even if its first batch was trimmed.
        begins_within = not self._starts or self._starts[0] > self.start_offset
        if begins_within and self.end_offset > self.start_offset:
            self._epochs.insert(0, self.start_epoch)
            self._starts.insert(0, self.start_offset)

    @property
    def last_epoch(self) -> Epoch:
        """Epoch of the last batch. For an empty log, of the batch before its start."""
        return self._epochs[-1] if self._epochs else self.start_epoch

    @property
    def last_epoch_start(self) -> EndOffset:
        """Start offset of the last epoch, as far as the log reaches back."""
        return self._starts[-1] if self._starts else self.start_offset

    @property
    def tail_start(self) -> EndOffset:
        """Offset from which batches are in memory."""
        return self._tail[0].base_offset if self._tail else self.end_offset

    def append(self, batches: Sequence[Batch], token: int) -> None:
        """Add batches that continue the log. The write `token` makes them durable."""
        for batch in batches:
            if batch.base_offset != self.end_offset or batch.epoch < self.last_epoch:
                raise InvariantError(
                    f"batch at {batch.base_offset} of epoch {batch.epoch} does not continue a log "
                    f"that ends at {self.end_offset} in epoch {self.last_epoch}"
                )
            if not self._epochs or batch.epoch > self.last_epoch:
                self._epochs.append(batch.epoch)
                self._starts.append(batch.base_offset)
            self._tail.append(batch)
            self._tail_held += batch.held_bytes
            self.end_offset = batch.end_offset
        self._unflushed.append((token, self.end_offset))

    def truncate(self, end_offset: EndOffset) -> None:
        """Remove everything from `end_offset` on, which must be the start of a batch."""
        while self._tail and self._tail[-1].base_offset >= end_offset:
            self._tail_held -= self._tail.pop().held_bytes
        if self._tail and self._tail[-1].end_offset != end_offset:
            raise InvariantError(
                f"truncation to {end_offset} would cut the batch at {self._tail[-1].base_offset}"
            )

        keep = bisect_left(self._starts, end_offset)
        del self._epochs[keep:], self._starts[keep:]
        self.end_offset = end_offset
        self.flushed_end = min(self.flushed_end, end_offset)
        # A write in flight may finish later. It must not vouch for batches that replace its own.
        self._unflushed = deque((token, min(end, end_offset)) for token, end in self._unflushed)

    def write_done(self, token: int) -> None:
        """Advance the flushed end: every write up to `token` is durable."""
        while self._unflushed and self._unflushed[0][0] <= token:
            self.flushed_end = max(self.flushed_end, self._unflushed.popleft()[1])

    def trim(self, start_offset: EndOffset) -> None:
        """Remove everything below `start_offset`, the end of a committed batch."""
        self.start_epoch = self.epoch_before(start_offset)
        self.start_offset = start_offset
        # The epoch that contains the new start must stay, to answer where it ends.
        drop = max(0, bisect_right(self._starts, start_offset) - 1)
        del self._epochs[:drop], self._starts[:drop]

    def restart_at_snapshot(self, snapshot_id: SnapshotId) -> None:
        """Drop everything: the log begins and ends at the end of a durable snapshot."""
        self.start_offset = self.end_offset = self.flushed_end = snapshot_id.end_offset
        self.start_epoch = snapshot_id.epoch
        self._epochs, self._starts = [], []
        self._tail, self._tail_held = [], 0
        self._unflushed.clear()

    def epoch_before(self, end_offset: EndOffset) -> Epoch:
        """Return the epoch of the batch that contains the last offset below `end_offset`."""
        index = bisect_left(self._starts, end_offset) - 1
        return self._epochs[index] if index >= 0 else self.start_epoch

    def end_of_epoch(self, epoch: Epoch) -> EpochEnd:
        """Return the largest epoch here that is <= `epoch`, and its end.

        Only the last epoch before the log's start is known. An older `epoch` returns epoch 0.
        """
        index = bisect_right(self._epochs, epoch) - 1
        if index < 0:
            known = self.start_epoch if epoch >= self.start_epoch else _NO_EPOCH
            return EpochEnd(known, self.start_offset)
        is_last = index + 1 == len(self._starts)
        return EpochEnd(
            self._epochs[index], self.end_offset if is_last else self._starts[index + 1]
        )

    def read(
        self, start: EndOffset, *, max_bytes: int, end: EndOffset | None = None
    ) -> tuple[Batch, ...] | None:
        """Return whole batches from `start`, or None if they are no longer in memory.

        Stops at `end` and after about `max_bytes`. Returns at least one batch if one exists.
        """
        if start < self.tail_start:
            return None
        limit = self.end_offset if end is None else end
        index = self._index_of(start)
        chosen: list[Batch] = []
        size = 0
        while index < len(self._tail) and self._tail[index].end_offset <= limit:
            size += self._tail[index].size
            if chosen and size > max_bytes:
                break
            chosen.append(self._tail[index])
            index += 1
        return tuple(chosen)

    def _index_of(self, start: EndOffset) -> int:
        """Return the position in the tail of the first batch at or after `start`."""
        if self._tail and self._tail[-1].base_offset == start:
            return len(self._tail) - 1  # the newest, which is read by far the most often
        return bisect_left(self._tail, start, key=lambda batch: batch.base_offset)

    def trim_tail(self, high_watermark: EndOffset) -> None:
        """Drop the oldest committed batches from memory when they exceed the limit."""
        if self._tail_held <= self._tail_limit:
            return
        drop = 0
        # Dropping below the limit leaves room, so that the list is not shifted for every batch.
        target = self._tail_limit - self._tail_limit // _TRIMMED_SHARE
        for batch in self._tail:
            if self._tail_held <= target or batch.end_offset > high_watermark:
                break
            self._tail_held -= batch.held_bytes
            drop += 1
        del self._tail[:drop]
