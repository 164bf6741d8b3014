"""Looks into the data directory of a stopped node, and changes nothing in it.

Unlike recovery it goes on after the first damage: an operator wants to know of all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal.directory import (
    LOCK_NAME,
    DirectoryIdentity,
    lock_directory,
    read_identity,
)
from streammeta.controller.journal.errors import BadSnapshotError, JournalDamagedError
from streammeta.controller.journal.reserve import RESERVE_NAME
from streammeta.controller.journal.segment import JournalSegment, SegmentFile, open_segments
from streammeta.controller.journal.snapshots import SnapshotCheck, parse_snapshot_name
from streammeta.controller.journal.state_files import (
    DAMAGE_NAME,
    MARK_NAME,
    STATE_NAME,
    DamageRecord,
    Finding,
    FlushedMark,
    read_damage,
    read_quorum_state,
)
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import EpochStart
from streammeta.controller.quorum.messages import SnapshotId
from streammeta.storage.durable_files import FileSystem, PosixFileSystem, as_binary_io
from streammeta.storage.segmented_log import Damage, FrameHeader


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One segment: where it begins, where its good batches end, and its bytes on disk."""

    name: str
    base_offset: EndOffset
    end_offset: EndOffset
    size: int


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """One snapshot's file."""

    name: str
    snapshot_id: SnapshotId
    size: int


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """What a data directory holds. `state` and `flushed_end` are None where they can't be read.

    `reserve_bytes` is the room kept for a full disk: less than the whole once that was needed.
    `findings` are all damages; bytes behind the last good batch that were never flushed are no
    damage but `torn_bytes`.
    """

    identity: DirectoryIdentity
    state: QuorumState | None
    flushed_end: EndOffset | None
    start_offset: EndOffset
    end_offset: EndOffset
    epochs: tuple[EpochStart, ...]
    segments: tuple[SegmentFacts, ...]
    snapshots: tuple[SnapshotFacts, ...]
    torn_bytes: int
    batch_count: int
    record: DamageRecord | None
    put_aside: tuple[str, ...]
    reserve_bytes: int
    findings: tuple[Finding, ...]


@contextmanager
def stopped_directory(path: Path) -> Iterator[tuple[FileSystem, DirectoryIdentity]]:
    """Keep others from using a directory while it is looked into.

    Raises:
        DirectoryNotFormattedError, WrongDirectoryError, JournalDamagedError: as `read_identity`.
        DirectoryLockedError: a node uses it.
    """
    files = PosixFileSystem(read_only=True)
    identity = read_identity(path, files)
    if LOCK_NAME not in files.names(path):
        yield files, identity
        return
    lock = lock_directory(files, path)
    try:
        yield files, identity
    finally:
        lock.release()


class Inspection:
    """Reads one directory from front to end, once."""

    def __init__(self, path: Path, files: FileSystem, identity: DirectoryIdentity) -> None:
        self._path = path
        self._files = files
        self.identity = identity
        self._findings: list[Finding] = []
        self._flushed_end: EndOffset | None = None
        self._epochs: list[EpochStart] = []
        self._batch_count = 0
        self._torn_bytes = 0

    def run(self, check_snapshot: SnapshotCheck | None = None) -> DirectoryFacts:
        """Read every batch, and with `check_snapshot` every byte of every snapshot."""
        state = self._read_state()
        self._read_mark()
        record = self._read_record()
        snapshots = self._read_snapshots(check_snapshot)
        found = open_segments(self._files, self._path, self.identity.log_id)
        segments = self._read_segments(found)
        newest = snapshots[-1].snapshot_id.end_offset if snapshots else EndOffset(0)
        start = segments[0].base_offset if segments else newest
        end = segments[-1].end_offset if segments else newest
        self._check_ends(start, max(end, newest), newest)
        self._check_epoch(state)
        names = self._files.names(self._path)
        return DirectoryFacts(
            identity=self.identity,
            state=state,
            flushed_end=self._flushed_end,
            start_offset=start,
            end_offset=end,
            epochs=tuple(self._epochs),
            segments=tuple(segments),
            snapshots=snapshots,
            torn_bytes=self._torn_bytes,
            batch_count=self._batch_count,
            record=record,
            put_aside=tuple(name for name in names if name.endswith(".damaged")),
            reserve_bytes=self._reserve_bytes(),
            findings=tuple(self._findings),
        )

    # -- small files

    def _read_state(self) -> QuorumState | None:
        try:
            return read_quorum_state(self._files, self._path / STATE_NAME)
        except JournalDamagedError as error:
            self._note(STATE_NAME, error.offset, EndOffset(0), error.what)
            return None

    def _read_mark(self) -> None:
        try:
            mark = FlushedMark.open(self._files, self._path / MARK_NAME, self.identity.log_id)
        except JournalDamagedError as error:
            self._note(MARK_NAME, error.offset, EndOffset(0), error.what)
        else:
            self._flushed_end = mark.end_offset

    def _read_record(self) -> DamageRecord | None:
        try:
            record = read_damage(self._files, self._path)
        except JournalDamagedError as error:
            self._note(DAMAGE_NAME, error.offset, EndOffset(0), error.what)
            return None
        if record is not None:
            self._findings.extend(record.findings)
        return record

    def _reserve_bytes(self) -> int:
        path = self._path / RESERVE_NAME
        return _size(self._files, path) if path.name in self._files.names(self._path) else 0

    # -- snapshots

    def _read_snapshots(self, check: SnapshotCheck | None) -> tuple[SnapshotFacts, ...]:
        facts = []
        for name in self._files.names(self._path):
            snapshot_id = parse_snapshot_name(name)
            if snapshot_id is None:
                continue
            with as_binary_io(self._files.open(self._path / name)) as file:
                facts.append(SnapshotFacts(name, snapshot_id, file.seek(0, 2)))
                if check is not None:
                    self._check_snapshot(name, snapshot_id, file, check)
        return tuple(facts)

    def _check_snapshot(
        self, name: str, snapshot_id: SnapshotId, file: BinaryIO, check: SnapshotCheck
    ) -> None:
        file.seek(0)
        try:
            check(snapshot_id, file)
        except BadSnapshotError as error:
            self._note(name, 0, snapshot_id.end_offset, str(error))

    # -- the log

    def _read_segments(self, found: list[SegmentFile]) -> list[SegmentFacts]:
        segments: list[SegmentFacts] = []
        end: EndOffset | None = None
        for index, file in enumerate(found):
            if end is not None and file.base_offset != end:
                self._note(file.path.name, 0, end, f"the log before it ends at offset {end}")
            if file.segment is None:
                self._note(file.path.name, 0, file.base_offset, file.problem)
                end = file.base_offset
                size = _size(self._files, file.path)
            else:
                is_last = index + 1 == len(found)
                end = self._read_segment(file.segment, is_last=is_last)
                size = file.segment.file.size()
            segments.append(SegmentFacts(file.path.name, file.base_offset, end, size))
            file.close()
        return segments

    def _read_segment(self, segment: JournalSegment, *, is_last: bool) -> EndOffset:
        """Read one segment, past every damage; return where its last good batch ends."""
        end = segment.base_offset
        for position, frame in segment.frames_past_damage(segment.header_size):
            if isinstance(frame, Damage):
                segment.size = position
                if is_last and self._is_torn(segment, end):
                    self._torn_bytes = segment.file.size() - position
                    break
                what = f"the batch at offset {end}: {frame.problem}"
                self._note(segment.path.name, position, EndOffset(end), what)
                end = frame.next_header.base_offset if frame.next_header else end
                continue
            header, _ = frame
            self._check_order(segment, position, end, header)
            end = header.end_offset
            self._batch_count += 1
        return EndOffset(end)

    def _check_order(
        self, segment: JournalSegment, byte: int, end: int, header: FrameHeader
    ) -> None:
        name = segment.path.name
        if header.base_offset != end:
            what = f"a batch at offset {header.base_offset}, the log before it ends at {end}"
            self._note(name, byte, EndOffset(end), what)
        last_epoch = self._epochs[-1].epoch if self._epochs else segment.previous_epoch
        if header.epoch < last_epoch:
            what = f"a batch of epoch {header.epoch} follows one of epoch {last_epoch}"
            self._note(name, byte, EndOffset(end), what)
        elif header.epoch > last_epoch or not self._epochs:
            self._epochs.append(EpochStart(Epoch(header.epoch), EndOffset(header.base_offset)))

    def _is_torn(self, segment: JournalSegment, end: int) -> bool:
        return (self._flushed_end or 0) <= end and not segment.vouches_beyond(end)

    def _check_ends(self, start: EndOffset, end: EndOffset, newest: EndOffset) -> None:
        if start > newest:
            what = f"the log begins at offset {start}, the newest snapshot ends at {newest}"
            self._note("*.log", 0, newest, what)
        if self._flushed_end is not None and end < self._flushed_end and not self._findings:
            what = f"the log ends at offset {end}, {self._flushed_end} was flushed"
            self._note("*.log", 0, end, what)

    def _check_epoch(self, state: QuorumState | None) -> None:
        if state is not None and self._epochs and self._epochs[-1].epoch > state.epoch:
            last = self._epochs[-1]
            what = f"it is of epoch {state.epoch}, the log of epoch {last.epoch}: votes are missing"
            self._note(STATE_NAME, 0, last.start_offset, what)

    def _note(self, file: str, byte: int, offset: EndOffset, what: str) -> None:
        self._findings.append(Finding(file, byte, offset, what))


def _size(files: FileSystem, path: Path) -> int:
    file = files.open(path)
    try:
        return file.size()
    finally:
        file.close()
