"""The log on the disk: opening, writing, trimming. Blocking, for one thread at a time.

Names in a log's directory: `.lock`, `state`, `<20 digits>.wal`, and kept aside for the operator
`<20 digits>.aside`, `<20 digits>.wal.damaged`. Other names are not ours and are never touched.
Segments go oldest first and only once it is durable that they were trimmed.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from streammeta.client.write_ahead_log.config import LogConfig
from streammeta.client.write_ahead_log.errors import DamagedLogError, LogLockedError, WrongLogError
from streammeta.client.write_ahead_log.frames import (
    BadFrameError,
    FrameKind,
    FrameOrigin,
    FrameReader,
    records_in,
)
from streammeta.client.write_ahead_log.identity import (
    SEGMENT_MAGIC,
    SET_ASIDE_MAGIC,
    STATE_MAGIC,
    FileHeader,
    LogIdentity,
    check_owner,
)
from streammeta.client.write_ahead_log.scan import ScannedLog, scan, segment_paths
from streammeta.client.write_ahead_log.segment import (
    Segment,
    is_kept_aside,
    is_leftover,
)
from streammeta.client.write_ahead_log.set_aside import set_aside_path, write_set_aside
from streammeta.client.write_ahead_log.state_file import STATE_NAME, StateFile, read_state_header
from streammeta.storage.durable_files import DirectoryInUseError, DiskFullError, FileSystem, Lock
from streammeta.storage.object_format.record import RecordBatch

LOCK_NAME = ".lock"
_LEFT_BY_FILE_SYSTEMS = {"lost+found"}
_REWRITE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RecordGroup:
    """Encoded records that are written as one frame."""

    first_sequence: int
    count: int
    pieces: list[bytes]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment by its first sequence, and its bytes."""

    first_sequence: int
    size: int


def lock_directory(
    files: FileSystem, directory: Path, identity: LogIdentity, *, mends: bool = False
) -> Lock:
    """Claim a directory that is this broker's log, or empty and to become it.

    Raises:
        WrongLogError: it is another's, or holds other things; nothing was changed.
        LogLockedError: another process uses it.
        DamagedLogError: the state file is missing or damaged, unless the caller `mends` it.
    """
    try:
        _check_directory(files, directory, identity)
    except DamagedLogError:
        if not mends:
            raise
    files.make_directory(directory)
    try:
        return files.lock(directory / LOCK_NAME)
    except DirectoryInUseError as error:
        raise LogLockedError(f"the write-ahead log in {error}") from None


def _check_directory(files: FileSystem, directory: Path, identity: LogIdentity) -> None:
    path = directory / STATE_NAME
    header = read_state_header(files, path)
    if header is not None:
        check_owner(header, identity, path)
        return
    names = set(files.names(directory)) - _LEFT_BY_FILE_SYSTEMS - {LOCK_NAME}
    if segment_paths(files, directory):
        raise DamagedLogError(path, 0, "the file is missing, though there are segments")
    foreign = sorted(name for name in names if not is_leftover(name) and not is_kept_aside(name))
    if foreign:
        raise WrongLogError(
            f"{directory} holds {', '.join(foreign[:5])} and no write-ahead log; give an empty"
            " directory, or the right one"
        )


class DiskLog:
    """An open log. After any `OSError` from it, only `release` may follow."""

    def __init__(
        self,
        files: FileSystem,
        directory: Path,
        identity: LogIdentity,
        config: LogConfig,
        state: StateFile,
        scanned: ScannedLog,
    ) -> None:
        self._files = files
        self._directory = directory
        self._config = config
        self._state = state
        self._segments = list(scanned.segments)
        self._origin = FrameOrigin(state.header.log_id, identity.node_epoch)
        self._has_unsynced = False
        self._set_aside_count = 0
        self.lost = scanned.lost
        """Records that a quarantine gave up, in segments that were there when it was opened."""
        self.end = scanned.end
        """The sequence behind the last record written."""

    @classmethod
    def open(
        cls, files: FileSystem, directory: Path, identity: LogIdentity, config: LogConfig
    ) -> DiskLog:
        """Open the log in a locked directory, making it if there is none.

        What a crash has left torn or half made is removed, but nothing before the whole log was
        read and found good.

        Raises:
            WrongLogError, DamagedLogError: as `scan` says; nothing was changed.
            OSError: the disk failed or is full.
        """
        path = directory / STATE_NAME
        if STATE_NAME not in files.names(directory):
            header = FileHeader(
                STATE_MAGIC, identity.namespace, identity.node_id, uuid.uuid4().bytes, 0
            )
            StateFile.create(files, path, header, 0, 0)
        state = StateFile.open(files, path)
        try:
            check_owner(state.header, identity, path)
            scanned = scan(files, directory, identity, state)
        except BaseException:
            state.close()
            raise
        opened = cls(files, directory, identity, config, state, scanned)
        try:
            opened._mend(scanned)
        except BaseException:
            opened.release()
            raise
        return opened

    @property
    def trimmed(self) -> int:
        """Records before this sequence are settled."""
        return self._state.trimmed

    @property
    def segments(self) -> tuple[SegmentInfo, ...]:
        """What is on the disk, oldest first; the last one is written to."""
        return tuple(SegmentInfo(one.first_sequence, one.size) for one in self._segments)

    def records(self, end: int) -> Iterator[RecordBatch]:
        """Read the records that are not trimmed, up to sequence `end`, in the order of appends."""
        begin = self.trimmed
        for segment in list(self._segments):
            file = self._files.open(segment.path)
            try:
                frames = FrameReader(file, segment.header.log_id, segment.header.size)
                yield from self._records_of(frames, segment.path, begin, end)
            finally:
                file.close()

    def write(self, groups: Sequence[RecordGroup]) -> int:
        """Append the groups, each one frame, and make them durable.

        Returns how many of them are in the log: fewer than all if the disk has no room, and then
        the others have left no trace.
        """
        done = 0
        try:
            for group in groups:
                self._write_group(group)
                done += 1
                self._roll_when_full()
        except DiskFullError as error:
            _log.warning("the write-ahead log in %s has no room: %s", self._directory, error)
            if self._segments:
                self._segments[-1].take_back()
        self._sync()
        self._remove_trimmed()  # what is committed sooner than it is written
        return done

    def trim(self, position: int) -> None:
        """Forget the records before `position`, and remove the segments that hold no others."""
        position = max(position, self.trimmed)
        if self._note(position, self._state.flushed):
            self._remove_trimmed()

    def set_aside(self, records: Iterable[RecordBatch], reason: str) -> Path | None:
        """Write `records` into a file beside the log; returns None if there are none."""
        path = set_aside_path(self._directory, self.trimmed, self._set_aside_count)
        state = self._state.header
        header = FileHeader(
            SET_ASIDE_MAGIC, state.namespace, state.node_id, state.log_id, self.trimmed
        )
        if not write_set_aside(self._files, path, header, self._origin, records, reason):
            return None
        self._set_aside_count += 1
        return path

    def start_over(self, position: int) -> None:
        """Remove everything and go on at `position`, when nothing before it matters any more."""
        self._state.note(position, self._state.flushed)
        self._has_unsynced = False
        self._remove_oldest(len(self._segments))
        self.end = position

    def close(self) -> None:
        """Make the state durable and release the files."""
        try:
            self._state.sync()
        finally:
            self.release()

    def release(self) -> None:
        """Release the files, whatever their state."""
        for segment in self._segments:
            segment.close()
        self._state.close()

    def _mend(self, scanned: ScannedLog) -> None:
        """Remove what is torn, half made or trimmed, and make durable what was found."""
        for name in self._files.names(self._directory):
            if is_leftover(name):
                self._files.remove(self._directory / name)
        if scanned.end < self.trimmed:
            self.start_over(self.trimmed)
        elif scanned.segments:
            last = scanned.segments[-1]
            last.take_back()
            _rewrite(last, scanned.unflushed_from)
            last.sync()
            self._note(self.trimmed, scanned.end)
            self.trim(self.trimmed)
        if not self._segments:
            self._begin_segment()

    def _write_group(self, group: RecordGroup) -> None:
        if not self._segments:
            self._begin_segment()
        if group.first_sequence != self.end:
            raise ValueError(f"group begins at {group.first_sequence}, the log ends at {self.end}")
        frame = self._origin.encode(
            FrameKind.RECORDS,
            b"".join(group.pieces),
            group.first_sequence,
            group.count,
            self._state.flushed,
        )
        segment = self._segments[-1]
        segment.append(frame)
        group.pieces.clear()
        self._has_unsynced = True
        self.end += group.count

    def _roll_when_full(self) -> None:
        """Begin a new segment, so that this one can go as soon as it is trimmed."""
        if self._segments[-1].size >= self._config.segment_bytes:
            self._sync()
            self._begin_segment()

    def _begin_segment(self) -> None:
        state = self._state.header
        header = FileHeader(SEGMENT_MAGIC, state.namespace, state.node_id, state.log_id, self.end)
        self._segments.append(Segment.create(self._files, self._directory, header))

    def _sync(self) -> None:
        if not self._has_unsynced:
            return
        self._segments[-1].sync()
        self._has_unsynced = False
        self._note(self.trimmed, self.end)

    def _note(self, trimmed: int, flushed: int) -> bool:
        """Write the state down if there is room; an older one is never wrong."""
        try:
            self._state.note(trimmed, flushed)
        except DiskFullError:
            return False
        return True

    def _remove_trimmed(self) -> None:
        """Remove the segments before the last one that hold nothing behind the trimmed end."""
        following = [segment.first_sequence for segment in self._segments[1:]]
        self._remove_oldest(sum(first <= self.trimmed for first in following))

    def _remove_oldest(self, count: int) -> None:
        """Remove segments, once it is durable that nothing in them matters."""
        if count == 0:
            return
        self._state.sync()
        for segment in self._segments[:count]:
            segment.close()
            self._files.remove(segment.path)
        del self._segments[:count]
        self._files.sync_directory(self._directory)

    def _records_of(
        self, frames: FrameReader, path: Path, begin: int, end: int
    ) -> Iterator[RecordBatch]:
        try:
            while frame := frames.next():
                header, body = frame
                if header.first_sequence >= end:
                    return
                skipped = begin - header.first_sequence
                for index, record in enumerate(records_in(header, body, str(path))):
                    if index >= skipped:
                        yield record
        except BadFrameError as error:
            raise DamagedLogError(path, frames.position, str(error)) from error


def _rewrite(segment: Segment, position: int) -> None:
    """Write again what may not be on the disk.

    After a failed sync the kernel may hold pages for clean that never reached the disk; a new sync
    would pass them over.
    """
    while position < segment.size:
        data = segment.file.read(position, min(_REWRITE_BYTES, segment.size - position))
        segment.file.write(position, data)
        position += len(data)
