"""Read-only inspection of the data directory of a stopped node.

Unlike recovery it continues after damage, so that an operator sees all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.journal import directory, state_files
from streammeta.controller.journal.errors import BadSnapshotError, JournalDamagedError
from streammeta.controller.journal.reserve import RESERVE_NAME
from streammeta.controller.journal.segment import JournalSegment, SegmentFile, open_segments
from streammeta.controller.journal.snapshots import SnapshotCheck, parse_snapshot_name
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import EpochStart
from streammeta.storage import durable_files
from streammeta.storage.segmented_log import Damage, FrameHeader

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """A segment: its base offset, the end of its last good batch, and its size on disk."""

    name: str
    base_offset: EndOffset
    end_offset: EndOffset
    size: int


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """A snapshot's file."""

    name: str
    snapshot_id: SnapshotId
    size: int


@contextmanager
def open_stopped_directory(
    path: Path,
) -> Iterator[tuple[durable_files.FileSystem, directory.DirectoryIdentity]]:
    """Lock a stopped node's directory while it is inspected.

    Raises:
        DirectoryNotFormattedError, WrongDirectoryError, JournalDamagedError: as `read_identity`.
        DirectoryLockedError: a node uses the directory.
    """
    files = durable_files.PosixFileSystem(read_only=True)
    identity = directory.read_identity(path, files)
    # A directory restored from a copy may have no lock file, and inspection creates no files.
    if directory.LOCK_NAME not in files.names(path):
        yield files, identity
        return
    lock = directory.lock_directory(files, path)
    try:
        yield files, identity
    finally:
        lock.release()


@dataclass(slots=True)
class Inspection:
    """Contents of a data directory, filled in by `run`.

    `state` and `flushed_end` are None if they cannot be read. `reserve_bytes` is the size of the
    reserve, smaller after a full disk used it. `findings` are all damages. Unflushed bytes after
    the last good batch are not damage but `torn_bytes`, and zeros at the end are room for the next
    batches.
    """

    path: Path
    files: durable_files.FileSystem
    identity: directory.DirectoryIdentity
    state: QuorumState | None = None
    flushed_end: EndOffset | None = None
    start_offset: EndOffset = field(init=False)
    end_offset: EndOffset = field(init=False)
    epochs: list[EpochStart] = field(default_factory=list)
    segments: list[SegmentFacts] = field(default_factory=list)
    snapshots: list[SnapshotFacts] = field(default_factory=list)
    torn_bytes: int = 0
    batch_count: int = 0
    record: state_files.DamageRecord | None = None
    put_aside: tuple[str, ...] = ()
    reserve_bytes: int = 0
    findings: list[state_files.Finding] = field(default_factory=list)

    def run(self, check_snapshot: SnapshotCheck | None = None) -> None:
        """Read every batch, and with `check_snapshot` every byte of every snapshot."""
        files, path = self.files, self.path
        self.state = self._intact(
            state_files.STATE_NAME,
            lambda: state_files.read_quorum_state(files, path / state_files.STATE_NAME),
        )

        log_id = self.identity.log_id
        mark = self._intact(
            state_files.MARK_NAME,
            lambda: state_files.FlushedMark.open(files, path / state_files.MARK_NAME, log_id),
        )
        self.flushed_end = mark.end_offset if mark else None

        self.record = self._intact(
            state_files.DAMAGE_NAME, lambda: state_files.read_damage(files, path)
        )
        self.findings.extend(self.record.findings if self.record else ())

        self._read_snapshots(check_snapshot)
        self._read_segments(open_segments(files, path, log_id))
        newest = self.snapshots[-1].snapshot_id.end_offset if self.snapshots else EndOffset(0)
        self.start_offset = self.segments[0].base_offset if self.segments else newest
        self.end_offset = self.segments[-1].end_offset if self.segments else newest
        self._check_ends(self.start_offset, max(self.end_offset, newest), newest)
        self._check_epoch()

        names = files.names(path)
        self.put_aside = tuple(name for name in names if name.endswith(".damaged"))
        self.reserve_bytes = _size(files, path / RESERVE_NAME) if RESERVE_NAME in names else 0

    def _intact(self, name: str, read: Callable[[], _T]) -> _T | None:
        """Return the result of `read`, or None, with a finding, if the file is damaged."""
        try:
            return read()
        except JournalDamagedError as error:
            self._note(name, error.offset, EndOffset(0), error.what)
            return None

    # -- snapshots

    def _read_snapshots(self, check: SnapshotCheck | None) -> None:
        for name in self.files.names(self.path):
            snapshot_id = parse_snapshot_name(name)
            if snapshot_id is None:
                continue
            with durable_files.as_binary_io(self.files.open(self.path / name)) as file:
                self.snapshots.append(SnapshotFacts(name, snapshot_id, file.seek(0, 2)))
                file.seek(0)
                try:
                    if check is not None:
                        check(snapshot_id, file)
                except BadSnapshotError as error:
                    self._note(name, 0, snapshot_id.end_offset, str(error))

    # -- the log

    def _read_segments(self, found: list[SegmentFile]) -> None:
        end: EndOffset | None = None

        for index, file in enumerate(found):
            # Inspection continues after every problem, to list all of them.
            if end is not None and file.base_offset != end:
                self._note(file.path.name, 0, end, f"the log before it ends at offset {end}")
            if file.segment is None:
                self._note(file.path.name, 0, file.base_offset, file.problem)
                end = file.base_offset
                size = _size(self.files, file.path)
            else:
                is_last = index + 1 == len(found)
                end = self._read_segment(file.segment, is_last=is_last)
                size = file.segment.file.size()
            self.segments.append(SegmentFacts(file.path.name, file.base_offset, end, size))
            file.close()

    def _read_segment(self, segment: JournalSegment, *, is_last: bool) -> EndOffset:
        """Read a segment past all damage and return the end of its last good batch."""
        end = segment.base_offset
        for position, frame in segment.frames_past_damage(segment.header_size):
            if isinstance(frame, Damage):
                segment.size = position
                # A crash may leave half a batch at the end of the log, if it was not flushed.
                if is_last and self._is_torn(segment, end):
                    self.torn_bytes = _without_room(segment.file, position) - position
                    break

                what = f"the batch at offset {end}: {frame.problem}"
                self._note(segment.path.name, position, EndOffset(end), what)
                end = frame.next_header.base_offset if frame.next_header else end
                continue

            header, _ = frame
            self._check_order(segment, position, end, header)
            end = header.end_offset
            self.batch_count += 1
        return EndOffset(end)

    def _check_order(
        self, segment: JournalSegment, byte: int, end: int, header: FrameHeader
    ) -> None:
        name = segment.path.name
        if header.base_offset != end:
            what = f"a batch at offset {header.base_offset}, the log before it ends at {end}"
            what = f"a batch at offset {header.base_offset}, but the log before it ends at {end}"
        last_epoch = self.epochs[-1].epoch if self.epochs else segment.previous_epoch
        if header.epoch < last_epoch:
            what = f"a batch of epoch {header.epoch} follows one of epoch {last_epoch}"
            self._note(name, byte, EndOffset(end), what)
        elif header.epoch > last_epoch or not self.epochs:
            self.epochs.append(EpochStart(Epoch(header.epoch), EndOffset(header.base_offset)))

    def _is_torn(self, segment: JournalSegment, end: int) -> bool:
        return (self.flushed_end or 0) <= end and not segment.vouches_beyond(end)

    def _check_ends(self, start: EndOffset, end: EndOffset, newest: EndOffset) -> None:
        if start > newest:
            what = f"the log begins at offset {start}, but the newest snapshot ends at {newest}"
            self._note("*.log", 0, newest, what)
        if self.flushed_end is not None and end < self.flushed_end and not self.findings:
            what = f"the log ends at offset {end}, but {self.flushed_end} was flushed"
            self._note("*.log", 0, end, what)

    def _check_epoch(self) -> None:
        state = self.state
        if state is not None and self.epochs and self.epochs[-1].epoch > state.epoch:
            last = self.epochs[-1]
            what = f"it has epoch {state.epoch}, the log epoch {last.epoch}: votes are missing"
            self._note(state_files.STATE_NAME, 0, last.start_offset, what)

    def _note(self, file: str, byte: int, offset: EndOffset, what: str) -> None:
        self.findings.append(state_files.Finding(file, byte, offset, what))


def _without_room(file: durable_files.File, position: int) -> int:
    """Return the end of the non-zero bytes of a file, from a position on."""
    end = position
    for piece in durable_files.pieces_of(file, position):
        if used := len(piece.rstrip(b"\0")):
            end = position + used
        position += len(piece)
    return end


def _size(files: durable_files.FileSystem, path: Path) -> int:
    file = files.open(path)
    try:
        return file.size()
    finally:
        file.close()
