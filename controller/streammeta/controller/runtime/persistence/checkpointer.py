"""Checkpoints of this controller, one at a time, while everything else continues.

The schedule counts log bytes and time since the last checkpoint. It resets when a checkpoint begins
or is loaded, never on a change of leadership, so that a cluster with frequent elections still gets
its checkpoints. A larger state waits for more log: as much as the last checkpoint, so that the two
cost about the same, or half as much for a very large one, because a restart replays the log.

The state is frozen at the end of a batch and written in a thread that pauses more than it works, so
commits keep their speed. A leader freezes uncommitted entries too, so the file gets its name only
when they are committed. If leadership is lost before that, the file is discarded, and the next one
contains committed state only. A full disk only postpones a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from streammeta.controller.errors import ApiError, NotLeaderError
from streammeta.controller.ids import EndOffset, SnapshotId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.journal.snapshots import SnapshotWriter
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.interfaces import SnapshotPoint, StateMachine
from streammeta.controller.runtime.persistence.quorum_disk import FinishSnapshot, JournalThread
from streammeta.controller.runtime.quorum_errors import NoDiskSpaceError, SnapshotFailedError
from streammeta.controller.snapshot.checkpoint_file import HashedSink, Sink
from streammeta.controller.timings import Times
from streammeta.storage.durable_files import DiskFullError

_log = structlog.get_logger(component="checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLimits:
    """Maximum log and time since the last checkpoint."""

    log_bytes: int = 20 << 20
    """Bytes of committed payload, or more after a large checkpoint."""
    interval_ms: int = 3_600_000
    """Milliseconds, if anything was committed in them."""
    retry_ms: int = 30_000
    """Pause in milliseconds after a checkpoint that found no disk space."""

    def __post_init__(self) -> None:
        for name in ("log_bytes", "interval_ms", "retry_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, must be at least 1")


WHOLE_SIZE_MAX = 64 << 20
"""Size of a checkpoint in bytes up to which the next one waits for as much log."""


def _log_bytes_after(size: int, least: int) -> int:
    """Return how much log to wait for after a checkpoint of `size` bytes, in bytes.

    That is `size` up to `WHOLE_SIZE_MAX`, then the larger of that limit and half of `size`, because
    a restart replays the log. It is never less than `least`.
    """
    return max(least, min(size, WHOLE_SIZE_MAX), size // 2)


class CheckpointSchedule:
    """Counter of committed bytes since the last checkpoint. Times are monotonic milliseconds."""

    def __init__(self, limits: CheckpointLimits, now_ms: int) -> None:
        self._limits = limits
        self._log_bytes = limits.log_bytes
        self._bytes = 0
        self._since = now_ms
        self._not_before = now_ms
        self._is_requested = False

    def record_committed(self, size: int) -> None:
        """Count `size` bytes of committed payload."""
        self._bytes += size

    def request(self, now_ms: int) -> None:
        """Make a checkpoint due immediately, regardless of the counts."""
        self._is_requested = True
        self._not_before = now_ms

    def record_start(self, now_ms: int) -> None:
        """Reset the counts, because a checkpoint has begun or was loaded."""
        # The bytes that arrive while it is written belong to the next one.
        self._bytes = 0
        self._since = self._not_before = now_ms
        self._is_requested = False

    def record_written(self, size: int) -> None:
        """Record the size in bytes of a completed or loaded checkpoint."""
        self._log_bytes = _log_bytes_after(size, self._limits.log_bytes)

    def record_failure(self, now_ms: int) -> None:
        """Record that the checkpoint could not be written. It stays due after a pause."""
        # The counts were reset at its start, so the failed one would be forgotten.
        self._is_requested = True
        self._not_before = now_ms + self._limits.retry_ms

    def is_due(self, now_ms: int) -> bool:
        """Whether a checkpoint should begin."""
        deadline = self.deadline()
        return deadline is not None and deadline <= now_ms

    def deadline(self) -> int | None:
        """Return when a checkpoint is due if nothing more is committed, None for never."""
        if self._is_requested or self._bytes >= self._log_bytes:
            return self._not_before
        # Without new entries a checkpoint would equal the last one.
        if self._bytes:
            return max(self._not_before, self._since + self._limits.interval_ms)
        return None


_REST = 3
"""Pause of the writing thread, as a multiple of its computing time."""


class CheckpointHost(Protocol):
    """The replica as its checkpointer sees it. All calls are made on the event loop."""

    @property
    def is_loading(self) -> bool:
        """Whether a snapshot is about to replace the state."""
        ...

    def snapshot_point(self) -> SnapshotPoint:
        """Return where a snapshot of the state machine's current state ends."""
        ...

    def when_committed(self, end_offset: EndOffset) -> asyncio.Future[None]:
        """Return a future for the commit of everything below. It fails if leadership is lost."""
        ...


class _AbandonedError(Exception):
    """The checkpoint in progress is no longer needed."""


@dataclass(slots=True)
class _Attempt:
    """One checkpoint, from freezing the state to naming the file."""

    point: SnapshotPoint
    write: Callable[[Sink], object]
    abandoned: threading.Event = field(default_factory=threading.Event)
    published: asyncio.Future[None] | None = None

    def abandon(self) -> None:
        self.abandoned.set()
        if self.published is not None and not self.published.done():
            self.published.set_exception(_AbandonedError())

    def require(self) -> None:
        if self.abandoned.is_set():
            raise _AbandonedError


@dataclass(slots=True)
class _WatchfulSink:
    """Sink that throttles the writing thread and stops it when its checkpoint is abandoned."""

    attempt: _Attempt
    sink: HashedSink
    _computed: float = field(default_factory=time.thread_time)

    def write(self, data: bytes) -> None:
        self.sink.write(data)
        # Computing time of this thread holds the interpreter lock, so the pause is proportional to
        # it.
        self.attempt.abandoned.wait(_REST * (time.thread_time() - self._computed))
        self.attempt.require()
        self._computed = time.thread_time()

    @property
    def digest(self) -> bytes:
        return self.sink.digest


@dataclass(slots=True)
class CheckpointTally:
    """Checkpoints of this process since its start."""

    times: Times = field(default_factory=Times)
    """Durations from freezing the state to publishing the file."""
    put_off: int = 0
    """Number of checkpoints that found no disk space."""
    newest_bytes: int | None = None
    """Size of the newest checkpoint, written or loaded. None before the first."""
    newest_ms: int = 0
    """Monotonic time in milliseconds at which the newest checkpoint was written or loaded."""

    def note_newest(self, size: int, now_ms: int) -> None:
        """Record a checkpoint of `size` bytes that was written or loaded now."""
        self.newest_bytes, self.newest_ms = size, now_ms


class Checkpointer:
    """Schedules, writes and publishes checkpoints."""

    def __init__(
        self,
        *,
        host: CheckpointHost,
        journal: Journal,
        disk: JournalThread,
        state_machine: StateMachine,
        clock: Clock,
        limits: CheckpointLimits,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`on_error` receives an error that must end the replica."""
        self._host = host
        self._journal = journal
        self._disk = disk
        self._state_machine = state_machine
        self._clock = clock
        self._on_error = on_error
        self._schedule = CheckpointSchedule(limits, clock.monotonic_ms())
        self.tally = CheckpointTally()
        self._newest = journal.snapshots.kept[-1] if journal.snapshots.kept else None
        self._changed = asyncio.Event()
        self._is_stopping = False
        self._attempt: _Attempt | None = None
        self._asked: list[asyncio.Future[SnapshotId]] = []
        self._task: asyncio.Task[None] | None = None

    # -- notifications of the replica

    def start(self) -> None:
        """Start the task. Called on the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def on_delivered(self, size: int) -> None:
        """Count `size` bytes of committed payload delivered to the state machine."""
        before = self._schedule.deadline()
        self._schedule.record_committed(size)
        if self._schedule.deadline() != before:
            self._changed.set()  # rarely: most commits don't move the deadline

    def on_loaded(self, size: int) -> None:
        """Reset the schedule: a loaded snapshot of `size` bytes covers all counted bytes."""
        now = self._clock.monotonic_ms()
        self._schedule.record_start(now)
        # Otherwise a restart would write a new checkpoint while it replays the log after this one.
        self._schedule.record_written(size)
        self.tally.note_newest(size, now)
        # Callers wait for a checkpoint of the loaded state, which the loading itself does not
        # write.
        if self._asked:
            self._schedule.request(now)
        self._changed.set()

    def on_newest(self, snapshot_id: SnapshotId) -> None:
        """Record a snapshot that is durable under its name, written here or installed."""
        self._newest = snapshot_id
        attempt = self._attempt
        if attempt is not None and attempt.point.snapshot_id == snapshot_id:
            published = attempt.published
            if published is not None and not published.done():
                published.set_result(None)

    def abandon(self) -> None:
        """Abandon the checkpoint in progress, because the log is about to begin above it."""
        if self._attempt is not None:
            self._attempt.abandon()

    def halt(self) -> None:
        """Stop writing. `stopped` waits for the end."""
        self._is_stopping = True
        self.abandon()
        self._changed.set()

    async def stopped(self) -> None:
        """Wait until the task has ended."""
        if self._task is not None:
            await self._task

    async def take(self) -> SnapshotId:
        """Write a checkpoint now, or return the newest if nothing was committed since.

        Raises:
            NoDiskSpaceError: there is no room. It is tried again later.
            SnapshotFailedError: nothing is committed yet, or the replica stops.
        """
        if self._is_stopping:
            raise SnapshotFailedError("this controller is stopping")
        future: asyncio.Future[SnapshotId] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._schedule.request(self._clock.monotonic_ms())
        self._changed.set()
        return await future

    # -- the task

    async def _run(self) -> None:
        try:
            while await self._due():
                await self._take_one()
        except Exception as error:  # noqa: BLE001 (a failed flush, or a defect: the replica ends)
            self._on_error(error)
        finally:
            _answer(self._asked, SnapshotFailedError("this controller is stopping"))

    async def _due(self) -> bool:
        """Wait until a checkpoint is due. Returns False when the replica stops."""
        while not self._is_stopping:
            now = self._clock.monotonic_ms()
            # Cleared before the deadline is read, so that no change in between is lost.
            self._changed.clear()
            # The state is about to be replaced, and its view would be out of date.
            deadline = None if self._host.is_loading else self._schedule.deadline()
            if deadline is not None and deadline <= now:
                return True
            wait_s = None if deadline is None else (deadline - now) / 1000
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        return False

    async def _take_one(self) -> None:
        asked, self._asked = self._asked, []
        point = self._host.snapshot_point()
        self._schedule.record_start(self._clock.monotonic_ms())
        if point.snapshot_id.end_offset == 0:
            _answer(
                asked,
                SnapshotFailedError(
                    "the log has no committed entry, so there is no state to write"
                ),
            )
            return

        # Nothing was committed since, and a file of the same name exists.
        if point.snapshot_id == self._newest:
            _answer(asked, self._newest)
            return

        try:
            await self._attempt_at(point)
        except _AbandonedError:
            _log.info("checkpoint_abandoned", end_offset=point.snapshot_id.end_offset)
            # Callers stay in the order of their requests.
            self._asked[:0] = asked
            self._schedule.request(self._clock.monotonic_ms())
        except DiskFullError as error:
            self._put_off(point, error, asked)
        else:
            _answer(asked, point.snapshot_id)

    def _put_off(
        self,
        point: SnapshotPoint,
        error: DiskFullError,
        asked: list[asyncio.Future[SnapshotId]],
    ) -> None:
        _log.error("checkpoint_put_off", end_offset=point.snapshot_id.end_offset, reason=str(error))
        self._schedule.record_failure(self._clock.monotonic_ms())
        self.tally.put_off += 1
        _answer(asked, NoDiskSpaceError(f"no room for a checkpoint, free disk space: {error}"))

    async def _attempt_at(self, point: SnapshotPoint) -> None:
        """Freeze, write, wait for the commit, publish.

        Raises:
            _AbandonedError: leadership was lost before the commit, or the log was replaced.
            DiskFullError: there is no room. Nothing of the file is left.
        """
        started = self._clock.monotonic_ms()
        attempt = _Attempt(point, self._state_machine.freeze(point))
        # Registered before the long write, so that a lost leadership abandons it immediately.
        committed = self._host.when_committed(point.snapshot_id.end_offset)
        committed.add_done_callback(lambda _: _abandon_if_failed(attempt, committed))
        self._attempt = attempt
        try:
            writer = await asyncio.to_thread(self._write, attempt)
            try:
                await self._seal(attempt, writer, committed)
            except BaseException:
                # Removes the temporary file, which may be large.
                await asyncio.to_thread(writer.abandon)
                raise
            await self._publish(attempt, writer)
        finally:
            self._attempt = None

        self._schedule.record_written(writer.size)
        now = self._clock.monotonic_ms()
        self.tally.note_newest(writer.size, now)
        self.tally.times.add((now - started) / 1000)
        _log.info(
            "checkpoint_written",
            end_offset=point.snapshot_id.end_offset,
            epoch=point.snapshot_id.epoch,
            bytes=writer.size,
            took_ms=now - started,
        )

    def _write(self, attempt: _Attempt) -> SnapshotWriter:
        """Write the file under a temporary name, in a thread."""
        writer = self._journal.snapshots.begin(attempt.point.snapshot_id)
        try:
            attempt.write(_WatchfulSink(attempt, writer))
        except BaseException:
            writer.abandon()
            raise
        return writer

    async def _seal(
        self, attempt: _Attempt, writer: SnapshotWriter, committed: asyncio.Future[None]
    ) -> None:
        # The flush comes before the commit is awaited, so that both take place together.
        await asyncio.to_thread(writer.seal)
        try:
            await committed
        except NotLeaderError as error:
            raise _AbandonedError from error
        attempt.require()

    async def _publish(self, attempt: _Attempt, writer: SnapshotWriter) -> None:
        # Nothing is awaited between the last check of the attempt and this submit, so an
        # installation that begins later follows it in the disk's queue.
        attempt.published = asyncio.get_running_loop().create_future()
        self._disk.submit(FinishSnapshot(writer))
        await attempt.published


def _abandon_if_failed(attempt: _Attempt, committed: asyncio.Future[None]) -> None:
    if committed.cancelled() or committed.exception() is not None:
        attempt.abandon()


def _answer(asked: list[asyncio.Future[SnapshotId]], answer: SnapshotId | ApiError) -> None:
    for future in asked:
        if isinstance(answer, ApiError):
            _reject(future, answer)
        elif not future.done():
            future.set_result(answer)


def _reject(future: asyncio.Future[SnapshotId], error: ApiError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marked as retrieved, because the caller may be cancelled
