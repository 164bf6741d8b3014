"""Reads the segments of a log from front to end and says what they add up to, or where they fail.

Changes nothing but this: a torn tail, which was never flushed, is cut, and so is what an
interrupted truncation left. Memory is bounded by the tail that is kept and one batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal.batch_codec import BadBatchError
from streammeta.controller.journal.flushed_mark import FlushedMark
from streammeta.controller.journal.segment import BadSegmentError, Segment, segment_base
from streammeta.controller.quorum.log_view import EpochStart
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.storage.durable_files import FileSystem

_TAIL_BYTES = 4 << 20


@dataclass(slots=True)
class SegmentFile:
    """A segment's file; `segment` is None if it does not even begin as one, for `problem`."""

    path: Path
    base_offset: EndOffset
    segment: Segment | None
    problem: str = ""

    def close(self) -> None:
        """Release the file."""
        if self.segment is not None:
            self.segment.close()


@dataclass(slots=True)
class ScannedLog:
    """What batches read in order add up to; `tail` are the newest."""

    start_offset: EndOffset
    start_epoch: Epoch
    end_offset: EndOffset
    epoch_starts: list[EpochStart] = field(default_factory=list)
    tail: deque[Batch] = field(default_factory=deque)
    tail_size: int = 0
    control: list[Batch] = field(default_factory=list)

    @property
    def last_epoch(self) -> Epoch:
        """Epoch of the last batch, or of the one before the log."""
        return self.epoch_starts[-1].epoch if self.epoch_starts else self.start_epoch

    def epoch_below(self, end_offset: EndOffset) -> Epoch:
        """Return the epoch of the last batch that begins below `end_offset`."""
        index = bisect_left(self.epoch_starts, end_offset, key=lambda item: item.start_offset)
        return self.epoch_starts[index - 1].epoch if index else self.start_epoch

    def take(self, batch: Batch) -> None:
        """Add a batch; raises BadBatchError if it does not continue the log."""
        if batch.base_offset != self.end_offset:
            raise BadBatchError(
                f"its base offset is {batch.base_offset}, the log ends at {self.end_offset}"
            )
        if batch.epoch < self.last_epoch:
            raise BadBatchError(f"its epoch is {batch.epoch}, the one before is {self.last_epoch}")
        if batch.epoch > self.last_epoch or not self.epoch_starts:
            self.epoch_starts.append(EpochStart(batch.epoch, batch.base_offset))
        self.end_offset = batch.end_offset
        if batch.kind is BatchKind.CONTROL:
            self.control.append(batch)
        self.tail.append(batch)
        self.tail_size += batch.size
        while self.tail_size > _TAIL_BYTES and len(self.tail) > 1:
            self.tail_size -= self.tail.popleft().size


@dataclass(frozen=True, slots=True)
class ScanDamage:
    """The first place that is not what was flushed: byte `byte` of the `index`-th file."""

    index: int
    byte: int
    what: str


def open_segments(files: FileSystem, directory: Path, log_id: bytes) -> list[SegmentFile]:
    """Open every segment of a directory, in order of their offsets."""
    found = []
    for name in sorted(files.names(directory)):
        base_offset = segment_base(name)
        if base_offset is None:
            continue
        path = directory / name
        try:
            found.append(SegmentFile(path, base_offset, Segment.open(files, path, log_id)))
        except BadSegmentError as error:
            found.append(SegmentFile(path, base_offset, None, str(error)))
    return found


class LogScanner:
    """Reads the segments of one log; the mark tells damage from a torn tail.

    Where the mark says that the log is being cut, what lies beyond is left from that.
    """

    def __init__(self, found: list[SegmentFile], mark: FlushedMark) -> None:
        self._found = found
        self._flushed_end = mark.end_offset
        self._cut_end = mark.end_offset if mark.is_cutting else None

    def scan(self, first: int) -> tuple[ScannedLog, ScanDamage | None]:
        """Read from the `first` segment on, up to the end or the first damage."""
        segment = self._found[first].segment
        base_offset = self._found[first].base_offset
        previous_epoch = segment.previous_epoch if segment else Epoch(0)
        log = ScannedLog(base_offset, previous_epoch, base_offset)
        for index in range(first, len(self._found)):
            damage = self._scan_one(index, log)
            if damage is not None:
                return log, damage
        return log, None

    def _scan_one(self, index: int, log: ScannedLog) -> ScanDamage | None:
        file = self._found[index]
        segment = file.segment
        if segment is None:
            return ScanDamage(index, 0, file.problem)
        if file.base_offset != log.end_offset:
            return ScanDamage(index, 0, f"the log before it ends at offset {log.end_offset}")
        if segment.previous_epoch != log.last_epoch:
            return ScanDamage(
                index,
                0,
                f"it follows epoch {segment.previous_epoch}, the log before it ends in "
                f"{log.last_epoch}",
            )
        good_size = segment.size
        try:
            for batch, _ in segment.scan():
                if self._cut_end is not None and batch.base_offset >= self._cut_end:
                    break
                log.take(batch)
                good_size = segment.size
        except BadBatchError as error:
            segment.rewind(good_size)
            if self._was_flushed(index, log.end_offset):
                return ScanDamage(index, good_size, f"the batch at {log.end_offset}: {error}")
        if segment.file_size > good_size:
            segment.cut(good_size)
        return None

    def _was_flushed(self, index: int, end_offset: EndOffset) -> bool:
        if self._cut_end is not None and end_offset >= self._cut_end:
            return False
        if index + 1 < len(self._found):
            return True  # the next segment was begun after this one had been flushed
        segment = self._found[index].segment
        assert segment is not None
        return max(self._flushed_end, segment.later_flushed_end()) > end_offset
