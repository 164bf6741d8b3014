"""Write-ahead log of a broker: appends from one event loop, one thread for the disk.

Owns grouping, the bounds on disk and memory, and the promises when the disk fails or is full.
All records that arrive while the disk is busy are written next and share one sync. Knows nothing of
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
from streammeta.client.resources.resources import ClosedAtExit, ignore_failure, warn_unclosed
from streammeta.client.wal.disk.config import LogConfig, LogIdentity
from streammeta.client.wal.disk.disk_log import (
    DiskLog,
    RecordGroup,
    SegmentInfo,
    lock_directory,
)
from streammeta.client.wal.disk.errors import (
    WriteAheadLogBrokenError,
    WriteAheadLogClosedError,
    WriteAheadLogFullError,
)
from streammeta.client.wal.disk.files import STATE_NAME, read_state_header
from streammeta.client.wal.disk.quarantine import quarantine
from streammeta.storage.durable_files import DiskFullError, FileSystem, Lock, PosixFileSystem
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch
from streammeta.storage.private_files import advise_private
from streammeta.storage.segmented_log import FRAME_HEADER_SIZE

_log = logging.getLogger(__name__)

OnDamage = Literal["refuse", "quarantine"]


class _Group(RecordGroup):
    """A group and the future its callers wait for."""

    __slots__ = ("done", "size")

    def __init__(self, base_offset: int, done: asyncio.Future[None]) -> None:
        super().__init__(base_offset, 0, [])
        self.size = FRAME_HEADER_SIZE
        self.done = done


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Groups that the thread has written, the segments, and where the log has yet to start over."""

    written: int
    segments: tuple[SegmentInfo, ...]
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
    """An open log. Make it with `open`; use it from that event loop, and `close` it.

    Positions count the records that there ever were: `end` is behind the last one appended,
    `recovered_end` behind the last one that the log had when it was opened, and the records below
    `trimmed` are settled. `flushes` counts the syncs with records, of `flushed_bytes` together.
    """

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        disk: DiskLog,
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
    async def open(
        cls,
        directory: str | os.PathLike[str],
        identity: LogIdentity,
        config: LogConfig | None = None,
        *,
        damage: OnDamage = "refuse",
        files: FileSystem | None = None,
    ) -> WriteAheadLog:
        """Open the log in `directory`, made if it is missing or empty, for one process.

        With `damage="quarantine"` a damaged log is mended as far as it can be read; the damaged
        files are kept aside, and `lost` counts the missing records.

        Raises:
            WrongLogError: the directory is another node's or cluster's, or no log at all.
            LogLockedError: another process uses it.
            DamagedLogError: something that had been flushed can't be read.
            WriteAheadLogFullError: there is no room to open it.
            WriteAheadLogBrokenError: the disk failed.
        """
        path = check_path("directory", directory)
        check_kind("identity", identity, LogIdentity, "a LogIdentity")
        bounds = LogConfig() if config is None else config
        check_kind("config", bounds, LogConfig, "a LogConfig, or None for its defaults")
        if damage not in get_args(OnDamage):
            raise ValueError(f"damage is {damage!r}, wanted one of {get_args(OnDamage)}")
        disk_files = files or PosixFileSystem()
        thread = ThreadPoolExecutor(1, thread_name_prefix="write-ahead-log")

        def open_disk() -> tuple[DiskLog, Lock]:
            lock = lock_directory(disk_files, path, identity, mends=damage == "quarantine")
            try:
                missing = 0
                if damage == "quarantine":
                    missing = quarantine(disk_files, path, identity)
                if (cure := advise_private(path)) is not None:
                    _log.warning("other users can read the write-ahead log, run: %s", cure)
                disk = DiskLog.open(disk_files, path, identity, bounds)
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
        """The size up to which it takes records, as configured."""
        return self._config.max_bytes

    @property
    def max_record_bytes(self) -> int:
        """The size of the largest encoded record that can ever have room."""
        room = self._config.max_bytes - self._config.segment_bytes
        return min(room - self._frame_headers(room), 2**31 - 1)

    def has_room(self, size: int) -> bool:
        """Tell whether records of `size` encoded bytes, all of them, may be appended now.

        It changes from false to true only in `trim` and when a group is done; nothing, 0 bytes, has
        always room. After the disk was full it is false until all that was appended by then is
        trimmed: so no record is acknowledged here while an earlier one is not known to be safe.
        Raises `WriteAheadLogBrokenError` or `WriteAheadLogClosedError`.
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
        """Take one encoded record, `header` and `payload`, into the group that is gathered.

        The result is shared by the records of the group, and done when they are on the disk;
        groups are done in order. Wait for it through `asyncio.shield`. It fails with
        `WriteAheadLogFullError` if the disk has no room: then none of the group, nor of those
        behind it, is in the log. It fails with `WriteAheadLogBrokenError` if the disk failed: then
        that is unknown.

        Ask `has_room` first, or the log outgrows its bounds. Raises the log's error if it is
        broken, closed, or full since the disk was.
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
        """Settle all records before `position`: they are not recovered. Files go a little later.

        Raises `ValueError` for a position that no record has yet.
        """
        if position > self.end:
            raise ValueError(f"position is {position}, wanted at most the end, {self.end}")
        if position <= self.trimmed or self._broken is not None or self._is_closed:
            return
        self.trimmed = position
        self._kept_bytes = self._count_kept_bytes()
        self._waiting_trim = True
        if self._full_until is not None and position >= self._full_until:
            self._start_over_at, self._full_until = self._full_until, None
        self._wake()

    def recover(self) -> Iterator[RecordBatch]:
        """Read the records that were there at the opening and are not trimmed, in append order.

        Reads the files as it goes, at most one frame at a time; don't trim meanwhile. Raises
        `DamagedLogError` where a file has changed since it was opened.
        """
        return self._disk.records(self.recovered_end)

    async def set_aside(self, records: Iterable[RecordBatch], reason: str) -> Path | None:
        """Keep records that can't be committed in a file of their own, before they are trimmed.

        Returns the durable file, None without records. Raises `WriteAheadLogFullError` or
        `WriteAheadLogBrokenError`; the log itself goes on.
        """
        self._check_usable()
        work = self._disk.set_aside
        try:
            return await self._loop.run_in_executor(self._thread, work, records, reason)
        except OSError as error:
            raise _disk_error(self._directory, error) from error

    async def flush(self) -> None:
        """Wait until everything appended is on the disk, or has failed."""
        self._wake()
        await self._idle.wait()

    async def close(self) -> None:
        """Write everything appended, make the trim durable, and release the directory."""
        if self._is_closed:
            return
        self._is_closed = True
        await self.flush()
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
        """Bound the bytes of frame headers for `size` bytes of records: two groups hold one's."""
        return FRAME_HEADER_SIZE * (2 + 2 * size // self._config.group_bytes)

    def _check_append(self, header: bytes, payload: bytes) -> None:
        """Refuse records that would make a frame unreadable, or leave a hole in a stream."""
        self._check_usable()
        if len(header) != RECORD_HEADER_SIZE or int.from_bytes(header[29:]) != len(payload):
            raise ValueError(
                f"header of {len(header)} bytes for a payload of {len(payload)}: wanted"
                f" {RECORD_HEADER_SIZE} bytes that end with the payload's length"
            )
        if self._full_until is not None:
            raise WriteAheadLogFullError(
                f"the disk of the write-ahead log in {self._directory} was full; commit and trim"
                " what was appended by then, the log goes on after that"
            )

    def _wake(self) -> None:
        """Schedule the next work after this turn of the loop, so that one turn shares a sync."""
        if not self._is_working and self._start is None and (self._waiting or self._waiting_trim):
            self._idle.clear()
            self._start = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._start = None
        self._is_working = True
        trim_to = self.trimmed if self._waiting_trim else None
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
        error = running.exception()
        if error is not None:
            self._break(error, groups)
        else:
            outcome = running.result()
            done, self._segments = outcome.written, outcome.segments
            if self._start_over_at is None:
                self._start_over_at = outcome.start_over_at
            self._kept_bytes = self._count_kept_bytes()
            self.flushes += bool(done)
            for group in groups[:done]:
                self._unflushed -= group.size
                self.flushed_bytes += group.size
                if not group.done.done():
                    group.done.set_result(None)
            if done < len(groups):
                self._refuse(groups[done:])
        if not self._waiting and not self._waiting_trim:
            self._idle.set()
        self._wake()

    def _break(self, reason: BaseException, groups: Iterable[_Group]) -> None:
        """Refuse all appends from here on."""
        _log.error("the write-ahead log in %s is broken: %s", self._directory, reason)
        self._broken = WriteAheadLogBrokenError(self._directory, str(reason))
        self._broken.__cause__ = reason
        self._waiting_trim = False
        self._drop([*groups, *self._waiting], self._broken)

    def _refuse(self, groups: Iterable[_Group]) -> None:
        """Fail the groups without room and all behind them, until everything before is trimmed."""
        error = WriteAheadLogFullError(
            f"the disk of the write-ahead log in {self._directory} has no room; free some, the log"
            " goes on by itself once all that was appended is committed and trimmed"
        )
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
        """Add up the segments that are not trimmed, or written to."""
        firsts = [segment.base_offset for segment in self._segments[1:]]
        trimmed = sum(first <= self.trimmed for first in firsts)
        return sum(segment.size for segment in self._segments[trimmed:])


def _disk_error(
    directory: Path, error: OSError
) -> WriteAheadLogFullError | WriteAheadLogBrokenError:
    if isinstance(error, DiskFullError):
        return WriteAheadLogFullError(
            f"the disk of the write-ahead log in {directory} has no room: {error}; free some and"
            " repeat"
        )
    return WriteAheadLogBrokenError(directory, str(error))
