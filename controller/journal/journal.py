"""The durable side of one replica: its log in segments, and its quorum-state.

All calls block on the disk and belong on one thread. A write is durable after `sync`; an exception
from a write or a sync leaves the state of the disk unknown, and the process must end. What was
flushed is never cut away at start: damage there is an error, never a shorter log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller.ids import ClusterId, EndOffset, NodeId
from controller.journal.batch_codec import BadBatchError
from controller.journal.directory import (
    LOCK_NAME,
    MARK_NAME,
    STATE_NAME,
    DirectoryIdentity,
    check_identity,
    format_directory,
    read_identity,
)
from controller.journal.errors import DirectoryNotFormattedError, JournalDamagedError
from controller.journal.files import FileSystem, Lock, PosixFileSystem
from controller.journal.flushed_mark import FlushedMark
from controller.journal.segment import Segment, is_temporary_segment, segment_base
from controller.journal.state_file import read_quorum_state, write_quorum_state
from controller.quorum.config import QuorumState
from controller.quorum.log_view import EpochStart, LogStart
from controller.quorum.messages import Batch

DEFAULT_SEGMENT_BYTES = 64 << 20
_RECOVERED_TAIL_BYTES = 4 << 20


@dataclass(slots=True)
class _Recovery:
    """What scanning the segments adds up to."""

    end_offset: EndOffset
    epoch_starts: list[EpochStart] = field(default_factory=list)
    tail: deque[Batch] = field(default_factory=deque)
    tail_size: int = 0

    def take(self, batch: Batch) -> None:
        if batch.base_offset != self.end_offset:
            raise BadBatchError(
                f"its base offset is {batch.base_offset}, the log ends at {self.end_offset}"
            )
        last_epoch = self.epoch_starts[-1].epoch if self.epoch_starts else -1
        if batch.epoch < last_epoch:
            raise BadBatchError(f"its epoch is {batch.epoch}, the one before is {last_epoch}")
        if batch.epoch > last_epoch:
            self.epoch_starts.append(EpochStart(batch.epoch, batch.base_offset))
        self.end_offset = batch.end_offset
        self.tail.append(batch)
        self.tail_size += batch.size
        while self.tail_size > _RECOVERED_TAIL_BYTES and len(self.tail) > 1:
            self.tail_size -= self.tail.popleft().size


class Journal:
    """An open data directory."""

    def __init__(
        self,
        directory: Path,
        files: FileSystem,
        identity: DirectoryIdentity,
        lock: Lock,
        segment_bytes: int,
    ) -> None:
        self.identity = identity
        self._directory = directory
        self._files = files
        self._lock = lock
        self._segment_bytes = segment_bytes
        self._has_failed = False
        self.quorum_state = read_quorum_state(files, directory / STATE_NAME)
        self._mark = FlushedMark.open(files, directory / MARK_NAME, identity.log_id)
        self._segments = self._open_segments()
        self.log_start = self._recover()
        self._end_offset = self.log_start.end_offset
        self._flushed_end = self._end_offset

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        cluster_id: ClusterId,
        node_id: NodeId,
        format_if_empty: bool = False,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        files: FileSystem | None = None,
    ) -> Journal:
        """Check whose directory this is, lock it, and recover the log.

        A torn tail, which was never flushed, is cut. `quorum_state` and `log_start` hold what was
        found. `format_if_empty` formats an empty or missing directory first: not for a node that
        has voted before, whose promises would be forgotten.

        Raises:
            DirectoryNotFormattedError: it is empty or missing.
            WrongDirectoryError: it belongs to another node or cluster, or is not a controller's.
            DirectoryLockedError: another process uses it.
            JournalDamagedError: something that was flushed is missing or altered.
        """
        files = files or PosixFileSystem()
        try:
            identity = read_identity(directory, files)
        except DirectoryNotFormattedError:
            if not format_if_empty:
                raise
            identity = format_directory(
                directory, cluster_id=cluster_id, node_id=node_id, files=files
            )
        check_identity(identity, directory, cluster_id, node_id)
        lock = files.lock(directory / LOCK_NAME)
        try:
            return cls(directory, files, identity, lock, segment_bytes)
        except BaseException:
            lock.release()
            raise

    # -- writing

    def write_quorum_state(self, state: QuorumState) -> None:
        """Replace the quorum-state, durably."""
        write_quorum_state(self._files, self._directory / STATE_NAME, state)
        self.quorum_state = state

    def append(self, batches: Sequence[Batch]) -> None:
        """Write batches that continue the log; durable after `sync`."""
        for batch in batches:
            if batch.base_offset != self._end_offset:
                raise ValueError(
                    f"batch at {batch.base_offset} does not continue a log that ends at "
                    f"{self._end_offset}"
                )
            self._segment_for_append().append(batch, self._flushed_end)
            self._end_offset = batch.end_offset

    def sync(self) -> None:
        """Make everything appended durable."""
        if self._flushed_end == self._end_offset:
            return
        self._has_failed = True  # unless what follows returns
        self._segments[-1].sync()
        self._has_failed = False
        self._flushed_end = self._end_offset
        self._mark.advance(self._flushed_end)

    def truncate(self, end_offset: EndOffset) -> None:
        """Cut the log so that it ends at `end_offset`, where a batch must begin; durably."""
        if end_offset >= self._end_offset:
            return
        self._mark.lower(end_offset)
        batch_starts = {self._segments[0].base_offset}
        while len(self._segments) > 1 and self._segments[-1].base_offset >= end_offset:
            segment = self._segments.pop()
            batch_starts.add(segment.base_offset)
            segment.close()
            self._files.remove(segment.path)
            self._files.sync_directory(self._directory)
        position = self._segments[-1].position_of(end_offset)
        if position is not None:
            self._segments[-1].cut(position)
        elif end_offset not in batch_starts:
            raise ValueError(f"no batch begins at {end_offset}, the log can't be cut there")
        self._end_offset = end_offset
        self._flushed_end = min(self._flushed_end, end_offset)

    def close(self) -> None:
        """Flush, release the files and the lock; a flush that failed is not tried again."""
        if not self._has_failed:
            self.sync()
            self._mark.close()
        for segment in self._segments:
            segment.close()
        self._lock.release()

    # -- reading

    def read(self, start_offset: EndOffset, max_bytes: int) -> tuple[Batch, ...]:
        """Return whole batches from `start_offset`, at least one if there is any.

        Raises JournalDamagedError if what is read is not what was written.
        """
        for segment in reversed(self._segments):
            if segment.base_offset <= start_offset:
                return tuple(segment.read(start_offset, max_bytes))
        return ()

    # -- recovery

    def _open_segments(self) -> list[Segment]:
        names = self._files.names(self._directory)
        for name in names:
            if is_temporary_segment(name) or name == f"{STATE_NAME}.tmp":
                self._files.remove(self._directory / name)
        paths = [self._directory / name for name in names if segment_base(name) is not None]
        log_id = self.identity.log_id
        return [Segment.open(self._files, path, log_id) for path in sorted(paths)]

    def _recover(self) -> LogStart:
        start = self._segments[0].base_offset if self._segments else EndOffset(0)
        if start != 0:
            raise JournalDamagedError(
                self._segments[0].path, 0, "the segments before it are missing"
            )
        recovery = _Recovery(start)
        for index, segment in enumerate(self._segments):
            is_last = index + 1 == len(self._segments)
            self._recover_segment(segment, recovery, is_last=is_last)
        self._check_mark(recovery.end_offset)
        return LogStart(
            start, recovery.end_offset, tuple(recovery.epoch_starts), tuple(recovery.tail)
        )

    def _recover_segment(self, segment: Segment, recovery: _Recovery, *, is_last: bool) -> None:
        if segment.base_offset != recovery.end_offset:
            raise JournalDamagedError(
                segment.path, 0, f"the log before it ends at offset {recovery.end_offset}"
            )
        good_size = segment.size
        try:
            for batch, _ in segment.scan():
                recovery.take(batch)
                good_size = segment.size
        except BadBatchError as error:
            segment.size = good_size
            was_flushed = (
                not is_last  # the next segment was begun after this one had been flushed
                or max(self._mark.end_offset, segment.later_flushed_end()) > recovery.end_offset
            )
            if was_flushed:
                raise JournalDamagedError(
                    segment.path, good_size, f"the batch at {recovery.end_offset}: {error}"
                ) from None
            segment.cut(good_size)

    def _check_mark(self, end_offset: EndOffset) -> None:
        if self._mark.end_offset > end_offset:
            path = self._segments[-1].path if self._segments else self._directory
            size = self._segments[-1].size if self._segments else 0
            raise JournalDamagedError(
                path, size, f"the log ends at {end_offset}, {self._mark.end_offset} was flushed"
            )
        if end_offset > self._mark.end_offset and self._segments:
            # The tail may have reached the disk unflushed; from here on it counts as flushed.
            self._segments[-1].sync()
            self._mark.advance(end_offset)

    def _segment_for_append(self) -> Segment:
        if not self._segments or self._segments[-1].size >= self._segment_bytes:
            self.sync()
            segment = Segment.create(
                self._files, self._directory, self.identity.log_id, self._end_offset
            )
            self._segments.append(segment)
        return self._segments[-1]
