"""Recovery of a data directory: reads its log, cuts a torn tail, puts damage aside.

A torn tail was never flushed. It is cut, as is the rest of an interrupted truncation. Damage is
never repaired by forgetting it: the promised end offset is recorded durably, then the damaged
segments are renamed to `<name>.damaged`, and the good log before them stays. Every step can be
interrupted and is repeated at the next start. Memory is bounded by the kept tail and one batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.journal import state_files
from streammeta.controller.journal.directory import META_NAME
from streammeta.controller.journal.errors import JournalDamagedError
from streammeta.controller.journal.segment import (
    SEGMENT_HEADER_SIZE,
    JournalSegment,
    SegmentFile,
    batch_codec,
    is_temporary_segment,
    open_segments,
)
from streammeta.controller.journal.snapshots import SnapshotStore
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import EpochStart, LogStart, LostEntries
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.storage.durable_files import FileSystem, pieces_of, replace_file
from streammeta.storage.segmented_log import BadFrameError

NO_SNAPSHOT = SnapshotId(EndOffset(0), Epoch(0))
"""Start of a log without a snapshot."""

_TEMPORARY_NAMES = frozenset(
    f"{name}.tmp" for name in (META_NAME, state_files.STATE_NAME, state_files.DAMAGE_NAME)
)
_TAIL_BYTES = 4 << 20

_logger = structlog.get_logger(component="journal")


@dataclass(slots=True)
class _ScannedLog:
    """Summary of batches read in order. `tail` contains the newest."""

    start_offset: EndOffset
    start_epoch: Epoch
    end_offset: EndOffset
    epoch_starts: list[EpochStart] = field(default_factory=list)
    tail: deque[Batch] = field(default_factory=deque)
    tail_held: int = 0
    control: list[Batch] = field(default_factory=list)

    @property
    def last_epoch(self) -> Epoch:
        """Epoch of the last batch, or of the batch before the log."""
        return self.epoch_starts[-1].epoch if self.epoch_starts else self.start_epoch

    def epoch_below(self, end_offset: EndOffset) -> Epoch:
        """Return the epoch of the last batch that begins below `end_offset`."""
        index = bisect_left(self.epoch_starts, end_offset, key=lambda item: item.start_offset)
        return self.epoch_starts[index - 1].epoch if index else self.start_epoch

    def take(self, batch: Batch) -> None:
        """Add a batch. Raises BadFrameError if it does not continue the log."""
        if batch.base_offset != self.end_offset:
            raise BadFrameError(
                f"its base offset is {batch.base_offset}, but the log ends at {self.end_offset}"
            )
        if batch.epoch < self.last_epoch:
            raise BadFrameError(f"its epoch is {batch.epoch}, the previous one {self.last_epoch}")

        if batch.epoch > self.last_epoch or not self.epoch_starts:
            self.epoch_starts.append(EpochStart(batch.epoch, batch.base_offset))
        self.end_offset = batch.end_offset
        if batch.kind is BatchKind.CONTROL:
            self.control.append(batch)

        self.tail.append(batch)
        self.tail_held += batch.held_bytes
        # The newest batch stays even if it exceeds the limit alone.
        while self.tail_held > _TAIL_BYTES and len(self.tail) > 1:
            self.tail_held -= self.tail.popleft().held_bytes


@dataclass(frozen=True, slots=True)
class _ScanDamage:
    """The first damaged place: byte `byte` of the `index`-th file."""

    index: int
    byte: int
    what: str


@dataclass(frozen=True, slots=True)
class _Reading:
    """Result of reading the segments from `first` on. Earlier ones are not needed."""

    first: int
    log: _ScannedLog
    damage: _ScanDamage | None
    skipped: frozenset[int]


@dataclass(slots=True)
class Recovery:
    """Recovery of one directory, once. The mark distinguishes damage from a torn tail."""

    directory: Path
    files: FileSystem
    log_id: bytes
    mark: state_files.FlushedMark
    state: QuorumState
    snapshots: SnapshotStore
    _record: state_files.DamageRecord | None = None
    _base: SnapshotId = NO_SNAPSHOT
    _found: list[SegmentFile] = field(default_factory=list)

    def run(self) -> tuple[list[JournalSegment], LogStart]:
        """Find snapshots and log, put damage aside, and return the segments and the log's start.

        Raises:
            JournalDamagedError: the quorum-state is older than the log, so votes are missing.
        """
        self._remove_leftovers()
        # The last process may have left data that a power failure could still undo.
        self.mark.sync()
        self._record = state_files.read_damage(self.files, self.directory)
        self.snapshots.recover()
        self._base = self.snapshots.kept[-1] if self.snapshots.kept else NO_SNAPSHOT
        self._found = open_segments(self.files, self.directory, self.log_id)

        try:
            self._remove_truncated_segments()
            log = self._settle(self._read())
        except BaseException:
            for file in self._found:
                file.close()
            raise

        segments = [file.segment for file in self._found if file.segment is not None]
        self._catch_up_mark(segments, log.end_offset)
        self.snapshots.forget_below(log.start_offset)
        return segments, self._log_start(log)

    # -- reading

    def _remove_leftovers(self) -> None:
        for name in self.files.names(self.directory):
            if is_temporary_segment(name) or name in _TEMPORARY_NAMES:
                self.files.remove(self.directory / name)

    def _remove_truncated_segments(self) -> None:
        """Finish a truncation that a crash interrupted."""
        if self.mark.is_cutting:
            while len(self._found) > 1 and self._found[-1].base_offset >= self.mark.end_offset:
                self._remove(self._found.pop())

    def _read(self) -> _Reading:
        """Read the longest log that continues the newest snapshot."""
        first = 0
        skipped: set[int] = set()
        while first < len(self._found):
            log, damage = self._scan(first)
            if self._found[first].base_offset > self._base.end_offset:
                before = f"the newest snapshot ends at {self._base.end_offset}"
                damage = _ScanDamage(first, 0, f"the log before it is missing: {before}")
                log = self._empty_log()

            if damage is None:
                return _Reading(first, log, None, frozenset(skipped))

            # Damage below the newest snapshot is harmless if a later segment continues it.
            later = self._first_after(damage.index)
            if later is None:
                return _Reading(first, log, damage, frozenset(skipped))
            self._tell(damage, log.end_offset, promised_end=None)
            skipped.add(damage.index)
            first = later
        return _Reading(first, self._empty_log(), None, frozenset(skipped))

    def _scan(self, first: int) -> tuple[_ScannedLog, _ScanDamage | None]:
        """Read from segment `first` on, up to the end or the first damage."""
        segment = self._found[first].segment
        base_offset = self._found[first].base_offset
        previous_epoch = segment.previous_epoch if segment else Epoch(0)
        log = _ScannedLog(base_offset, previous_epoch, base_offset)
        for index in range(first, len(self._found)):
            damage = self._scan_one(index, log)
            if damage is not None:
                return log, damage
        return log, None

    def _scan_one(self, index: int, log: _ScannedLog) -> _ScanDamage | None:
        file = self._found[index]
        segment = file.segment
        if segment is None:
            return _ScanDamage(index, 0, file.problem)
        if file.base_offset != log.end_offset:
            return _ScanDamage(index, 0, f"the log before it ends at offset {log.end_offset}")
        # Matching offsets do not prove that a segment continues this log.
        if segment.previous_epoch != log.last_epoch:
            return _ScanDamage(
                index,
                0,
                f"it follows epoch {segment.previous_epoch}, but the log before it ends in "
                f"{log.last_epoch}",
            )

        good_size = segment.size
        cut_end = self._cut_end
        try:
            for batch in segment.scan():
                if cut_end is not None and batch.base_offset >= cut_end:
                    break
                log.take(batch)
                good_size = segment.size
        except BadFrameError as error:
            segment.rewind(good_size)
            if self._was_flushed(index, log.end_offset):
                return _ScanDamage(index, good_size, f"the batch at {log.end_offset}: {error}")

        # The rest was never flushed, or belongs to an interrupted truncation.
        if segment.file.size() > good_size:
            segment.cut(good_size)
        return None

    @property
    def _cut_end(self) -> EndOffset | None:
        """End offset of an interrupted truncation. Later batches are leftovers."""
        return self.mark.end_offset if self.mark.is_cutting else None

    def _was_flushed(self, index: int, end_offset: EndOffset) -> bool:
        if self._cut_end is not None and end_offset >= self._cut_end:
            return False
        if index + 1 < len(self._found):
            return True  # the next segment was begun after this one was flushed
        segment = self._found[index].segment
        assert segment is not None
        return self.mark.end_offset > end_offset or segment.vouches_beyond(end_offset)

    def _first_after(self, index: int) -> int | None:
        """Return the first later segment that continues the newest snapshot, or None."""
        for later in range(index + 1, len(self._found)):
            file = self._found[later]
            if file.segment is not None and file.base_offset <= self._base.end_offset:
                return later
        return None

    def _empty_log(self) -> _ScannedLog:
        end_offset, epoch = self._base.end_offset, self._base.epoch
        return _ScannedLog(end_offset, epoch, end_offset)

    # -- settling

    def _settle(self, reading: _Reading) -> _ScannedLog:
        """Reduce the directory to the good log found by `reading`."""
        log, damage = reading.log, reading.damage
        self._check_epoch(log)
        # The log may only stay if it agrees with the newest snapshot about the batch at its end.
        reaches_base = (
            log.end_offset >= self._base.end_offset
            and log.epoch_below(self._base.end_offset) == self._base.epoch
        )

        promised_end = self._promised_end(damage)
        new_end = log.end_offset if reaches_base else self._base.end_offset
        is_replaced = log.end_offset >= self._base.end_offset and not reaches_base
        if promised_end > new_end and not (is_replaced and damage is None):
            self._note_lost(damage, log.end_offset, promised_end)
        elif damage is not None:
            self._tell(damage, log.end_offset, promised_end=None)

        self._drop_skipped(reading)
        if damage is not None:
            self._put_aside_from(damage.index - reading.first, damage.byte, keeps=reaches_base)
        if reaches_base:
            self.mark.lower(new_end)
            return log
        # Lower the mark before removing batches, so that they no longer count as promised.
        self.mark.lower(new_end)
        while self._found:
            self._remove(self._found.pop())
        return self._empty_log()

    def _check_epoch(self, log: _ScannedLog) -> None:
        last_epoch = max(log.last_epoch, self._base.epoch)
        if last_epoch > self.state.epoch:
            raise JournalDamagedError(
                self.directory / state_files.STATE_NAME,
                0,
                f"it has epoch {self.state.epoch}, the log epoch {last_epoch}: the file was "
                "replaced by an old one, and votes are missing",
            )

    def _promised_end(self, damage: _ScanDamage | None) -> EndOffset:
        """Return the highest end offset that may have been acknowledged. Too high only costs time.

        The mark may be older than the last flush, so all batches after the damage count as well.
        """
        promised_end = self.mark.end_offset
        if damage is None:
            return promised_end

        promised_end = max(promised_end, self._found[-1].base_offset)
        position = max(SEGMENT_HEADER_SIZE, damage.byte)
        for file in self._found[damage.index :]:
            promised_end = max(promised_end, self._last_end_in(file, position))
            position = SEGMENT_HEADER_SIZE
        return promised_end

    def _last_end_in(self, file: SegmentFile, position: int) -> EndOffset:
        """Return the highest end of the batches from a position on, even after a bad header."""
        opened = file.segment.file if file.segment else self.files.open(file.path)
        headers = batch_codec(self.log_id).headers_from(opened, position)
        ends = [header.end_offset for _, header in headers]
        if file.segment is None:
            opened.close()
        return EndOffset(max(ends, default=0))

    def _note_lost(
        self, damage: _ScanDamage | None, end_offset: EndOffset, promised_end: EndOffset
    ) -> None:
        if damage is None:
            last = self._found[-1] if self._found else None
            # Whole segments are missing, so the finding names the end of the log.
            name = last.path.name if last else "*.log"
            byte = last.segment.size if last and last.segment else 0
            what = f"the log ends at {end_offset}, but {promised_end} was flushed"
        else:
            self._tell(damage, end_offset, promised_end=promised_end)
            name, byte, what = self._found[damage.index].path.name, damage.byte, damage.what

        finding = state_files.Finding(name, byte, end_offset, what)
        lost = LostEntries(promised_end, self.state.epoch)
        self._record = state_files.note_damage(
            self.files, self.directory, self._record, finding, lost
        )

    def _tell(
        self, damage: _ScanDamage, end_offset: EndOffset, *, promised_end: EndOffset | None
    ) -> None:
        _logger.error(
            "log_damaged",
            file=str(self._found[damage.index].path),
            byte=damage.byte,
            offset=end_offset,
            reason=damage.what,
            promised_end_offset=promised_end,
            spared_by_snapshot=promised_end is None,
        )

    # -- changing

    def _drop_skipped(self, reading: _Reading) -> None:
        for index in range(reading.first):
            file = self._found[index]
            if index in reading.skipped:
                self._rename_aside(file)
            else:
                self._remove(file)
        del self._found[: reading.first]

    def _put_aside_from(self, index: int, good_size: int, *, keeps: bool) -> None:
        """Keep the damaged segments for the operator, last first."""
        while len(self._found) > index + 1:
            self._rename_aside(self._found.pop())
        file = self._found[index]
        if keeps and file.segment is not None and good_size > 0:
            # Copy before cutting: a crash in between leaves the damaged bytes in place.
            copy = file.path.with_name(file.path.name + ".damaged")
            replace_file(self.files, copy, pieces_of(file.segment.file))
            file.segment.cut(good_size)
        else:
            self._rename_aside(self._found.pop())

    def _rename_aside(self, file: SegmentFile) -> None:
        file.close()
        self.files.rename(file.path, file.path.with_name(file.path.name + ".damaged"))
        self.files.sync_directory(self.directory)

    def _remove(self, file: SegmentFile) -> None:
        file.close()
        self.files.remove(file.path)
        self.files.sync_directory(self.directory)

    def _catch_up_mark(self, segments: list[JournalSegment], end_offset: EndOffset) -> None:
        # An interrupted cut is complete now.
        self.mark.end_cut()
        if end_offset > self.mark.end_offset:
            # The tail may have reached the disk without a flush; from now on it counts as flushed.
            if segments:
                segments[-1].sync()
            self.mark.advance(end_offset)

    def _log_start(self, log: _ScannedLog) -> LogStart:
        return LogStart(
            start_offset=log.start_offset,
            end_offset=log.end_offset,
            epoch_starts=tuple(log.epoch_starts),
            tail=tuple(log.tail),
            start_epoch=log.start_epoch,
            control=tuple(log.control),
            snapshots=self.snapshots.kept,
            snapshot_voters=self.snapshots.newest_voters,
            lost=self._record.lost if self._record else None,
        )
