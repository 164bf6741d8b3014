"""Write-ahead log of a broker: appends from one event loop, one thread for the disk.

Owns grouping, the limits on disk and memory, and the guarantees when the disk fails or is full. All
records that arrive while the disk is busy are written next and share one sync. Knows nothing of
streams, objects or controllers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from streammeta.client.arguments import check_kind, check_path
from streammeta.client.errors import (
    WriteAheadLogBrokenError,
    WriteAheadLogClosedError,
    WriteAheadLogFullError,
)
from streammeta.client.resources.opening import opening
from streammeta.client.resources.resources import ClosedAtExit, ignore_failure, warn_unclosed
from streammeta.client.wal.disk import disk_log
from streammeta.client.wal.disk.config import LogConfig, LogIdentity
from streammeta.client.wal.disk.files import STATE_NAME, read_state_header
from streammeta.client.wal.disk.quarantine import quarantine
from streammeta.storage.durable_files import (
    DiskFullError,
    FileSystem,
    Lock,
    PosixFileSystem,
    advise_private,
)
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch
from streammeta.storage.segmented_log import FRAME_HEADER_SIZE

_log = logging.getLogger(__name__)

OnDamage = Literal["refuse", "quarantine"]


class _Group(disk_log.RecordGroup):
    """A group and the future of its callers."""

    __slots__ = ("done", "size")

    def __init__(self, base_offset: int, done: asyncio.Future[None]) -> None:
        super().__init__(base_offset, 0, [])
        self.size = FRAME_HEADER_SIZE
        self.done = done


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Groups that the thread has written, the segments, and where the log must still start over."""

    written: int
    segments: tuple[disk_log.SegmentInfo, ...]
    start_over_at: int | None = None


def find_log_id(directory: str | os.PathLike[str]) -> bytes | None:
    """Return the id of the log in a directory, None if there is none yet. Blocking.

    Raises `DamagedLogError`, or `WriteAheadLogBrokenError` if the disk failed.
    """
    path = check_path("directory", directory)
    try:
        header = read_state_header(PosixFileSystem(), path / STATE_NAME)
    except OSError as error:
        raise _disk_error(path, error) from error
    return None if header is None else header.log_id


class WriteAheadLog(ClosedAtExit):
    """An open log. Create it with `open`, use it from that event loop, and `close` it.

    Positions count all records ever appended: `end` is after the last one, `recovered_end` after
    the last one that the log had when it was opened. Records below `trimmed` are settled. `flushes`
    counts the syncs with records, `flushed_bytes` their bytes.
    """

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        disk: disk_log.DiskLog,
        lock: Lock,
        thread: ThreadPoolExecutor,
    ) -> None:
        self._directory = directory
        self._config = config
        self._disk = disk
        self._lock = lock
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self.end = disk.end
        self.trimmed = disk.trimmed
        self.recovered_end = disk.end
        self._segments = disk.segments
        self._kept_bytes = self._count_kept_bytes()
        self._waiting: deque[_Group] = deque()
        self._waiting_trim = False
        self._unflushed = 0
        self._is_working = False
        self._start: asyncio.Handle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._full_until: int | None = None
        self._start_over_at: int | None = None
        self._broken: WriteAheadLogBrokenError | None = None
        self._is_closed = False
        self.flushes = 0
        self.flushed_bytes = 0

    @classmethod
    @opening
    async def open(
        cls,
        directory: str | os.PathLike[str],
        identity: LogIdentity,
        config: LogConfig | None = None,
        *,
        damage: OnDamage = "refuse",
        files: FileSystem | None = None,
    ) -> WriteAheadLog:
        """Open the log in `directory` for one process and create it if it is missing or empty.

        With `damage="quarantine"` a damaged log is repaired as far as it can be read. The damaged
        files are kept aside, and `lost` counts the missing records.

        Raises:
            WrongLogError: the directory belongs to another node or cluster, or is not a log.
            LogLockedError: another process uses it.
            DamagedLogError: flushed data can't be read.
            WriteAheadLogFullError: the disk has no space to open it.
            WriteAheadLogBrokenError: the disk failed.
        """
        path = check_path("directory", directory)
        check_kind("identity", identity, LogIdentity, "a LogIdentity")
        bounds = LogConfig() if config is None else config
        check_kind("config", bounds, LogConfig, "a LogConfig, or None for its defaults")
        if damage not in get_args(OnDamage):
            raise ValueError(f"damage is {damage!r}, expected one of {get_args(OnDamage)}")
        disk_files = files or PosixFileSystem()
        # One thread: `DiskLog` is not safe for more, and the disk has one queue.
        thread = ThreadPoolExecutor(1, thread_name_prefix="write-ahead-log")

        def open_disk() -> tuple[disk_log.DiskLog, Lock]:
            # Everything below changes files, so the lock comes first.
            lock = disk_log.lock_directory(disk_files, path, identity, mends=damage == "quarantine")
            try:
                missing = 0
                if damage == "quarantine":
                    missing = quarantine(disk_files, path, identity)
                if (cure := advise_private(path)) is not None:
                    _log.warning("other users can read the write-ahead log, run: %s", cure)
                disk = disk_log.DiskLog.open(disk_files, path, identity, bounds)
                disk.lost += missing
                return disk, lock
            except BaseException:
                lock.release()
                raise

        try:
            disk, lock = await asyncio.get_running_loop().run_in_executor(thread, open_disk)
        except BaseException as error:
            thread.shutdown(wait=False)
            if isinstance(error, OSError):
                raise _disk_error(path, error) from error
            raise
        return cls(path, bounds, disk, lock, thread)

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warn_unclosed(
                self,
                f"the log in {self._directory} stays locked by this process, and"
                f" {self._unflushed} bytes of it were not on the disk",
                "`await log.close()` after its writer was closed",
            )

    @property
    def lost(self) -> int:
        """Records that a quarantine could not read: now, or earlier and not yet trimmed."""
        return self._disk.lost

    @property
    def used_bytes(self) -> int:
        """Bytes of the segments that are not trimmed and of the records that wait for the disk."""
        return self._kept_bytes + self._unflushed

    @property
    def max_bytes(self) -> int:
        """The configured size up to which the log accepts records."""
        return self._config.max_bytes

    @property
    def max_record_bytes(self) -> int:
        """The size of the largest encoded record that ever fits."""
        room = self._config.max_bytes - self._config.segment_bytes
        return min(room - self._frame_headers(room), 2**31 - 1)

    def has_room(self, size: int) -> bool:
        """Return whether records of `size` encoded bytes may all be appended now.

        The answer changes from false to true only in `trim` and when a group is done. Zero bytes
        always fit. After the disk was full it stays false until all records appended before are
        trimmed, so no record is acknowledged while an earlier one may be lost. Raises
        `WriteAheadLogBrokenError` or `WriteAheadLogClosedError`.
        """
        self._check_usable()
        if size == 0:
            return True
        cost = size + self._frame_headers(size)
        if self._full_until is not None:
            return False
        if self._unflushed and self._unflushed + cost > self._config.max_unflushed_bytes:
            return False
        return self.used_bytes + cost <= self._config.max_bytes

    def append(self, header: bytes, payload: bytes) -> asyncio.Future[None]:
        """Add one encoded record, `header` and `payload`, to the open group.

        The group's records share the result. It is done when they are on the disk. Groups are done
        in order. Wait for it through `asyncio.shield`. It fails with `WriteAheadLogFullError` if
        the disk is full: then the log contains no record of the group, nor of later groups. It
        fails with `WriteAheadLogBrokenError` if the disk failed: then the log may contain them.

        Ask `has_room` first, or the log exceeds its limits. Raises the log's error if it is broken
        or closed, or has been full.
        """
        size = len(header) + len(payload)
        self._check_append(header, payload)
        waiting = self._waiting
        if waiting and waiting[-1].size + size <= self._config.group_bytes:
            group = waiting[-1]
        else:
            group = _Group(self.end, self._loop.create_future())
            group.done.add_done_callback(ignore_failure)
            waiting.append(group)
            self._unflushed += group.size

        group.pieces += (header, payload)
        group.count += 1
        group.size += size
        self._unflushed += size
        self.end += 1
        self._wake()
        return group.done

    def trim(self, position: int) -> None:
        """Settle all records before `position`, so that they are not recovered.

        Their files are removed a little later. Raises `ValueError` for a position above `end`.
        """
        if position > self.end:
            raise ValueError(f"position is {position}, expected at most the end, {self.end}")
        # A broken log keeps its records for the next process.
        if position <= self.trimmed or self._broken is not None or self._is_closed:
            return
        self.trimmed = position
        self._kept_bytes = self._count_kept_bytes()
        self._waiting_trim = True
        if self._full_until is not None and position >= self._full_until:
            self._start_over_at, self._full_until = self._full_until, None
        self._wake()

    def recover(self) -> Iterator[RecordBatch]:
        """Read the records that existed at the opening and are not trimmed, in append order.

        Reads one frame of the files at a time. Don't trim meanwhile. Raises `DamagedLogError` where
        a file has changed since it was opened.
        """
        return self._disk.records(self.recovered_end)

    async def set_aside(self, records: Iterable[RecordBatch], reason: str) -> Path | None:
        """Write records that can't be committed to a separate file, before they are trimmed.

        Returns the durable file, None for no records. Raises `WriteAheadLogFullError` or
        `WriteAheadLogBrokenError`, which do not end the log.
        """
        self._check_usable()
        work = self._disk.set_aside
        try:
            return await self._loop.run_in_executor(self._thread, work, records, reason)
        except OSError as error:
            raise _disk_error(self._directory, error) from error

    async def flush(self) -> None:
        """Wait until all appended records are on the disk, or have failed."""
        self._wake()
        await self._idle.wait()

    async def close(self) -> None:
        """Write all appended records, make the trim durable, and release the directory."""
        if self._is_closed:
            return
        self._is_closed = True
        await self.flush()
        # After a failed sync the state of the file is unknown, so nothing more is written to it.
        work = self._disk.close if self._broken is None else self._disk.release
        try:
            await self._loop.run_in_executor(self._thread, work)
        except OSError as error:
            raise _disk_error(self._directory, error) from error
        finally:
            self._lock.release()
            self._thread.shutdown(wait=False)

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._is_closed:
            raise WriteAheadLogClosedError(f"the write-ahead log in {self._directory} is closed")

    def _frame_headers(self, size: int) -> int:
        """Return the maximum size of the frame headers for `size` bytes of records."""
        # Any two consecutive groups together exceed the size of one.
        return FRAME_HEADER_SIZE * (2 + 2 * size // self._config.group_bytes)

    def _check_append(self, header: bytes, payload: bytes) -> None:
        """Reject records that would make a frame unreadable, or leave a gap in a stream."""
        self._check_usable()
        if len(header) != RECORD_HEADER_SIZE or int.from_bytes(header[29:]) != len(payload):
            raise ValueError(
                f"header of {len(header)} bytes for a payload of {len(payload)}: expected"
                f" {RECORD_HEADER_SIZE} bytes that end with the payload's length"
            )
        if self._full_until is not None:
            raise WriteAheadLogFullError(
                f"the disk of the write-ahead log in {self._directory} was full. Commit and trim"
                " the records appended before, then the log continues"
            )

    def _wake(self) -> None:
        """Schedule the next work after this iteration of the loop: its records share a sync."""
        if not self._is_working and self._start is None and (self._waiting or self._waiting_trim):
            self._idle.clear()
            self._start = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._start = None
        self._is_working = True
        trim_to = self.trimmed if self._waiting_trim else None
        # All waiting groups are written together, with one sync.
        groups = list(self._waiting)
        work = partial(self._run, self._start_over_at, trim_to, groups)
        self._waiting.clear()
        self._waiting_trim = False
        self._start_over_at = None

        running = self._loop.run_in_executor(self._thread, work)
        running.add_done_callback(partial(self._finish, groups))

    def _run(
        self, start_over_at: int | None, trim_to: int | None, groups: Sequence[_Group]
    ) -> _Outcome:
        """Trim and write, in the thread."""
        # Before the groups: they continue at the new position.
        if start_over_at is not None:
            try:
                self._disk.start_over(start_over_at)
            except DiskFullError:
                return _Outcome(0, self._disk.segments, start_over_at)
        if trim_to is not None:
            self._disk.trim(trim_to)
        done = self._disk.write(groups) if groups else 0
        return _Outcome(done, self._disk.segments)

    def _finish(self, groups: Sequence[_Group], running: asyncio.Future[_Outcome]) -> None:
        """Complete the groups in order, and start the next work."""
        self._is_working = False
        # Groups are in order: after the first one without space, no later one may succeed.
        # Any failure of the disk ends the log: which bytes were written is unknown.
        error = running.exception()
        if error is not None:
            self._break(error, groups)
        else:
            outcome = running.result()
            done, self._segments = outcome.written, outcome.segments
            if self._start_over_at is None:
                self._start_over_at = outcome.start_over_at
            self._kept_bytes = self._count_kept_bytes()
            # A sync without records is not counted.
            self.flushes += bool(done)
            for group in groups[:done]:
                self._unflushed -= group.size
                self.flushed_bytes += group.size
                if not group.done.done():
                    group.done.set_result(None)
            if done < len(groups):
                self._reject(groups[done:])

        if not self._waiting and not self._waiting_trim:
            self._idle.set()
        self._wake()

    def _break(self, reason: BaseException, groups: Iterable[_Group]) -> None:
        """Reject all appends from now on."""
        _log.error("the write-ahead log in %s is broken: %s", self._directory, reason)
        self._broken = WriteAheadLogBrokenError(self._directory, str(reason))
        self._broken.__cause__ = reason
        self._waiting_trim = False
        self._drop([*groups, *self._waiting], self._broken)

    def _reject(self, groups: Iterable[_Group]) -> None:
        """Fail the groups without space and all later ones, until all earlier ones are trimmed."""
        error = WriteAheadLogFullError(
            f"the disk of the write-ahead log in {self._directory} is full. Free space on it, the"
            " log continues once all appended records are committed and trimmed"
        )
        # Appends after the lost group would leave a gap, so the log stays closed until it is empty.
        self._full_until = self.end
        if self.trimmed >= self.end:
            self._start_over_at, self._full_until = self.end, None
        self._drop([*groups, *self._waiting], error)

    def _drop(self, groups: Iterable[_Group], error: Exception) -> None:
        self._waiting.clear()
        for group in groups:
            self._unflushed -= group.size
            if not group.done.done():
                group.done.set_exception(error)

    def _count_kept_bytes(self) -> int:
        """Return the bytes of the segments that are not trimmed, or still written to."""
        firsts = [segment.base_offset for segment in self._segments[1:]]
        trimmed = sum(first <= self.trimmed for first in firsts)
        return sum(segment.size for segment in self._segments[trimmed:])


def _disk_error(
    directory: Path, error: OSError
) -> WriteAheadLogFullError | WriteAheadLogBrokenError:
    if isinstance(error, DiskFullError):
        return WriteAheadLogFullError(
            f"the disk of the write-ahead log in {directory} is full: {error}. Free space on it and"
            " retry"
        )
    return WriteAheadLogBrokenError(directory, str(error))
