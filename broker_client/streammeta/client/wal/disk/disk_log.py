"""Log on the disk: opening, writing, trimming. Blocking, for one thread at a time.

Names in a log's directory: `.lock`, `state`, `<20 digits>.wal`, and for the operator
`<20 digits>-<n>.aside` and `<20 digits>.wal.damaged`. Other files are never touched. Segments are
removed oldest first, and only once their trim is durable. Opening a log changes nothing before the
whole log is read and valid.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from streammeta.client.errors import DamagedLogError, LogLockedError, WrongLogError
from streammeta.client.wal.disk import files as log_files
from streammeta.client.wal.disk.config import LogConfig, LogIdentity
from streammeta.client.wal.disk.set_aside import set_aside_path, write_set_aside
from streammeta.storage.durable_files import (
    DirectoryInUseError,
    DiskFullError,
    FileSystem,
    Lock,
    pieces_of,
)
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.segmented_log import BadFrameError, FrameReader

LOCK_NAME = ".lock"
_LEFT_BY_FILE_SYSTEMS = {"lost+found"}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RecordGroup:
    """Encoded records that are written as one frame."""

    base_offset: int
    count: int
    pieces: list[bytes]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment: the offset of its first record, and its size in bytes."""

    base_offset: int
    size: int


def lock_directory(
    files: FileSystem, directory: Path, identity: LogIdentity, *, mends: bool = False
) -> Lock:
    """Claim a directory that is this broker's log, or that is empty.

    Raises:
        WrongLogError: it belongs to another broker, or has other files. Nothing was changed.
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
    path = directory / log_files.STATE_NAME
    # The lock is taken later: a foreign directory must not even get a lock file.
    header = log_files.read_state_header(files, path)
    if header is not None:
        log_files.check_owner(header, identity, path)
        return
    # A new volume is empty except for files of its file system.
    names = set(files.names(directory)) - _LEFT_BY_FILE_SYSTEMS - {LOCK_NAME}
    if log_files.segment_paths(files, directory):
        raise DamagedLogError(path, 0, "the file is missing, though there are segments")
    foreign = sorted(
        name
        for name in names
        if not log_files.is_leftover(name) and not log_files.is_kept_aside(name)
    )
    if foreign:
        raise WrongLogError(
            f"{directory} contains {', '.join(foreign[:5])} but no write-ahead log. Pass an empty"
            " directory, or the right one"
        )


@dataclass(frozen=True, slots=True)
class _ScannedLog:
    """Result of a scan: the segments, oldest first, and the offset after the last record.

    Each segment's `size` is the end of its last valid frame. The rest of the last segment is torn.
    From byte `unflushed_from` on, the last segment may not be on the disk. `lost` counts the
    records that a quarantine gave up.
    """

    segments: tuple[log_files.LogSegment, ...]
    end: int
    unflushed_from: int
    lost: int


@dataclass(slots=True)
class _Reading:
    """Valid part of one segment. `problem` says why it ends, None at the end of the file."""

    end: int
    unflushed_from: int
    newest_epoch: int = 0
    lost: int = 0
    problem: str | None = None


class DiskLog:
    """An open log. After any `OSError` from it, only `release` may follow."""

    def __init__(
        self,
        files: FileSystem,
        directory: Path,
        identity: LogIdentity,
        config: LogConfig,
        state: log_files.StateFile,
        scanned: _ScannedLog,
    ) -> None:
        self._files = files
        self._directory = directory
        self._config = config
        self._state = state
        self._segments = list(scanned.segments)
        self._node_epoch = identity.node_epoch
        self._has_unsynced = False
        self._set_aside_count = 0
        self.lost = scanned.lost
        """Records that a quarantine gave up, in segments that existed when the log was opened."""
        self.end = scanned.end
        """The sequence after the last written record."""

    @classmethod
    def open(
        cls, files: FileSystem, directory: Path, identity: LogIdentity, config: LogConfig
    ) -> DiskLog:
        """Open the log in a locked directory, creating it if there is none.

        Torn or unfinished files of a crash are removed, but only after the whole log is read and
        valid.

        Raises:
            WrongLogError, DamagedLogError: as `_scan` raises them. Nothing was changed.
            OSError: the disk failed or is full.
        """
        path = directory / log_files.STATE_NAME
        # `lock_directory` has made sure that there are no segments without a state.
        if log_files.STATE_NAME not in files.names(directory):
            header = log_files.FileHeader(
                log_files.STATE_MAGIC, identity.namespace, identity.node_id, uuid.uuid4().bytes, 0
            )
            log_files.StateFile.create(files, path, header, 0, 0)

        with ExitStack() as undo:
            state = log_files.StateFile.open(files, path)
            undo.callback(state.close)
            log_files.check_owner(state.header, identity, path)
            scanned = _scan(files, directory, identity, state)
            opened = cls(files, directory, identity, config, state, scanned)
            undo.pop_all()
            undo.callback(opened.release)
            # After the scan succeeded: a log with a problem must stay as it was found.
            opened._repair(scanned)
            undo.pop_all()
        return opened

    @property
    def trimmed(self) -> int:
        """Records before this sequence are settled."""
        return self._state.trimmed

    @property
    def segments(self) -> tuple[SegmentInfo, ...]:
        """Segments on the disk, oldest first. The last one is written to."""
        return tuple(SegmentInfo(segment.base_offset, segment.size) for segment in self._segments)

    def records(self, end: int) -> Iterator[RecordBatch]:
        """Read the records that are not trimmed, up to sequence `end`, in append order."""
        begin = self.trimmed
        for segment in list(self._segments):
            with closing(self._files.open(segment.path)) as file:
                frames = segment.codec.frames(file, segment.header_size)
                yield from _records_of(frames, segment.path, begin, end)

    def write(self, groups: Sequence[RecordGroup]) -> int:
        """Append the groups, each one frame, and make them durable.

        Returns how many of them are in the log: fewer than all if the disk is full. The rest has
        left no trace.
        """
        done = 0
        try:
            for group in groups:
                self._write_group(group)
                done += 1
                self._roll_when_full()
        except DiskFullError as error:
            _log.warning("the write-ahead log in %s has no space: %s", self._directory, error)
        self._sync()
        # Records may be committed, and trimmed, before they are written.
        self._remove_trimmed()
        return done

    def trim(self, position: int) -> None:
        """Drop the records before `position`, and remove the segments that contain no others."""
        # Trims may arrive out of order after a start over.
        position = max(position, self.trimmed)
        if self._note(position, self._state.flushed):
            self._remove_trimmed()

    def set_aside(self, records: Iterable[RecordBatch], reason: str) -> Path | None:
        """Write `records` into a file next to the log and return None for no records."""
        path = set_aside_path(self._directory, self.trimmed, self._set_aside_count)
        state = self._state.header
        header = log_files.FileHeader(
            log_files.SET_ASIDE_MAGIC, state.namespace, state.node_id, state.log_id, self.trimmed
        )
        if not write_set_aside(self._files, path, header, self._node_epoch, records, reason):
            return None
        self._set_aside_count += 1
        return path

    def start_over(self, position: int) -> None:
        """Remove all segments and continue at `position`. The records before it are settled."""
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
        """Release the files, even after a failure."""
        for segment in self._segments:
            segment.close()
        self._state.close()

    def _repair(self, scanned: _ScannedLog) -> None:
        """Remove torn, unfinished and trimmed data, and make the rest durable."""
        for name in self._files.names(self._directory):
            if log_files.is_leftover(name):
                self._files.remove(self._directory / name)
        if scanned.end < self.trimmed:
            self.start_over(self.trimmed)
        elif scanned.segments:
            last = scanned.segments[-1]
            last.cut_tail()
            _rewrite(last, scanned.unflushed_from)
            last.sync()
            self._note(self.trimmed, scanned.end)
            self.trim(self.trimmed)
        if not self._segments:
            self._begin_segment()

    def _write_group(self, group: RecordGroup) -> None:
        if not self._segments:
            self._begin_segment()
        if group.base_offset != self.end:
            raise ValueError(f"group begins at {group.base_offset}, the log ends at {self.end}")

        segment = self._segments[-1]
        segment.append(
            segment.codec.encode(
                b"".join(group.pieces),
                base_offset=group.base_offset,
                epoch=self._node_epoch,
                flushed_end=self._state.flushed,
                kind=log_files.FrameKind.RECORDS,
                count=group.count,
            )
        )
        group.pieces.clear()
        self._has_unsynced = True
        self.end += group.count

    def _roll_when_full(self) -> None:
        """Begin a new segment, so that this one can be removed as soon as it is trimmed."""
        if self._segments[-1].size >= self._config.segment_bytes:
            self._sync()
            self._begin_segment()

    def _begin_segment(self) -> None:
        state = self._state.header
        header = log_files.FileHeader(
            log_files.SEGMENT_MAGIC, state.namespace, state.node_id, state.log_id, self.end
        )
        self._segments.append(log_files.LogSegment.create(self._files, self._directory, header))

    def _sync(self) -> None:
        if not self._has_unsynced:
            return
        self._segments[-1].sync()
        self._has_unsynced = False
        self._note(self.trimmed, self.end)

    def _note(self, trimmed: int, flushed: int) -> bool:
        """Write the state if there is space. An older state is never wrong."""
        try:
            self._state.note(trimmed, flushed)
        except DiskFullError:
            return False
        return True

    def _remove_trimmed(self) -> None:
        """Remove the segments before the last one that end below the trimmed position."""
        # A segment ends where the next one begins; the last one is still written to.
        following = [segment.base_offset for segment in self._segments[1:]]
        self._remove_oldest(sum(first <= self.trimmed for first in following))

    def _remove_oldest(self, count: int) -> None:
        """Remove segments, once it is durable that no record in them is needed."""
        if count == 0:
            return
        self._state.sync()
        for segment in self._segments[:count]:
            segment.close()
            self._files.remove(segment.path)
        del self._segments[:count]
        self._files.sync_directory(self._directory)


def _records_of(frames: FrameReader, path: Path, begin: int, end: int) -> Iterator[RecordBatch]:
    """Yield the records of a segment in the range of offsets `[begin, end)`."""
    try:
        while frame := frames.next():
            header, body = frame
            if header.base_offset >= end:
                return
            # A trim may end inside a frame.
            skipped = max(0, begin - header.base_offset)
            yield from islice(log_files.records_in(header, body), skipped, None)
    except BadFrameError as error:
        raise DamagedLogError(path, frames.position, f"the frame there: {error}") from error


def _rewrite(segment: log_files.LogSegment, position: int) -> None:
    """Write again the bytes that may not be on the disk.

    After a failed sync the kernel may consider pages clean that never reached the disk, and a new
    sync would skip them.
    """
    for piece in pieces_of(segment.file, position):
        segment.file.write(position, piece)
        position += len(piece)


def _scan(
    files: FileSystem, directory: Path, identity: LogIdentity, state: log_files.StateFile
) -> _ScannedLog:
    """Read every frame.

    Raises:
        WrongLogError: a segment belongs to another node or namespace, or a newer process wrote it.
        DamagedLogError: flushed records can't be read. It names the first such place.
    """
    segments: list[log_files.LogSegment] = []
    with ExitStack() as undo:
        for path in log_files.segment_paths(files, directory):
            try:
                segment = log_files.LogSegment.open(files, path)
            except log_files.BadHeaderError as error:
                raise DamagedLogError(path, 0, str(error)) from None
            undo.callback(segment.close)
            log_files.check_owner(segment.header, identity, path)
            # A copied segment of another log would insert foreign records.
            if segment.header.log_id != state.header.log_id:
                raise WrongLogError(
                    f"{path} belongs to another write-ahead log of this node. Move the file away"
                )
            segments.append(segment)

        scanned = _read(directory, segments, identity, state)
        undo.pop_all()
    return scanned


def _read(
    directory: Path,
    segments: Sequence[log_files.LogSegment],
    identity: LogIdentity,
    state: log_files.StateFile,
) -> _ScannedLog:
    # Without segments the log is empty, and continues at the trimmed position.
    end = segments[0].base_offset if segments else state.trimmed
    if end > state.trimmed:
        raise DamagedLogError(
            segments[0].path, 0, f"the segment with records from {state.trimmed} on is missing"
        )

    unflushed_from = lost = 0
    for index, segment in enumerate(segments):
        reading = _read_segment(segment, state.flushed)
        following = segments[index + 1] if index + 1 < len(segments) else None
        _check_end(segment, reading, following, state)
        # Two processes of a node must not share a log, and the newer one owns it.
        if reading.newest_epoch > identity.node_epoch:
            raise WrongLogError(
                f"{segment.path} was written by process epoch {reading.newest_epoch} of node"
                f" {identity.node_id}, this process is older ({identity.node_epoch}): stop it, or"
                " start it with a larger node epoch"
            )
        end, unflushed_from, lost = reading.end, reading.unflushed_from, lost + reading.lost

    # The state is written after the sync, so these records were on the disk.
    if end < state.flushed:
        last = segments[-1] if segments else None
        raise DamagedLogError(
            last.path if last else directory,
            last.size if last else 0,
            f"records {end} to {state.flushed - 1} are missing",
        )
    return _ScannedLog(tuple(segments), end, unflushed_from, lost)


def _read_segment(segment: log_files.LogSegment, flushed: int) -> _Reading:
    """Read the frames of one segment, and set its `size` to the end of the last valid one."""
    frames = segment.codec.frames(segment.file, segment.size)
    reading = _Reading(segment.base_offset, segment.size)
    try:
        while frame := frames.next():
            header = frame[0]
            if header.base_offset != reading.end:
                raise BadFrameError(f"it begins with record {header.base_offset}")
            reading.end = header.end_offset
            reading.newest_epoch = max(reading.newest_epoch, header.epoch)
            if header.kind == log_files.FrameKind.LOST:
                reading.lost += header.count
            segment.size = frames.position
            if reading.end <= flushed:
                reading.unflushed_from = segment.size
    except BadFrameError as error:
        reading.problem = f"the frame of record {reading.end}: {error}"

    return reading


def _check_end(
    segment: log_files.LogSegment,
    reading: _Reading,
    following: log_files.LogSegment | None,
    state: log_files.StateFile,
) -> None:
    """Raise `DamagedLogError` if the segment must not end where it was read to.

    Only the end of the last segment may be torn, and only after the records known to be on the
    disk. The state file records how far that is, and each frame does so for the frames before it.
    """
    problem = reading.problem
    if following is not None and problem is None and reading.end != following.base_offset:
        problem = (
            f"it ends before record {reading.end}, the next segment begins with"
            f" {following.base_offset}"
        )
    if problem is not None and (
        following is not None or state.flushed > reading.end or segment.vouches_beyond(reading.end)
    ):
        raise DamagedLogError(segment.path, segment.size, problem)
