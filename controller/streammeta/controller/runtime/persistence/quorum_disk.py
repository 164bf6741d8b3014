"""Disk work of a replica: executes the core's effects in order.

Owns group commit and the wait for disk space. A write that finds no space waits, with everything
after it, while reads continue. Any error except a full disk ends the replica.

`DiskWorker` does the work. `JournalThread` runs it on a thread, or on the event loop where
`flush_scheduling` allows it, never on both at once. Snapshot chunks are read on other threads, and
a snapshot is written on its own thread, so neither delays the log. Only the rename that publishes a
new snapshot goes through the journal's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeAlias

import structlog

from streammeta.controller.fast_dataclass import value
from streammeta.controller.ids import EndOffset, SnapshotId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.journal.snapshots import SnapshotWriter
from streammeta.controller.quorum import events
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.runtime.persistence.flush_scheduling import FlushPlace
from streammeta.storage.durable_files import DiskFullError

_log = structlog.get_logger(component="journal")

RETRY_FULL_S = 0.25
"""Pause before work that found no disk space is retried, in seconds."""

_SNAPSHOT_THREADS = 2
_IDLE_CHECK_S = 10.0


@value()
class DiskRead:
    """Read whole batches from `start_offset` and pass them to `done` on the event loop."""

    start_offset: EndOffset
    max_bytes: int
    done: Callable[[tuple[Batch, ...]], None]


@value()
class FinishSnapshot:
    """Publish a snapshot that was written and sealed elsewhere. Cheap for any size."""

    writer: SnapshotWriter


@value()
class DiskReadDone:
    """The batches that a `DiskRead` requested, empty if they were removed."""

    read: DiskRead
    batches: tuple[Batch, ...]


@value()
class StateWritten:
    """The quorum-state of this token is durable, ahead of writes that wait for disk space.

    A report announces that. As work it replaces the state, so that it is not written twice.
    """

    token: int


@value()
class SnapshotDropped:
    """A snapshot was not published. The file is removed, and another may be taken later."""

    snapshot_id: SnapshotId
    reason: str


Read: TypeAlias = events.ReadLog | events.ReadSnapshot | DiskRead
Write: TypeAlias = (
    events.PersistQuorumState
    | events.AppendLog
    | events.TruncateLog
    | events.TrimLog
    | events.InstallSnapshot
    | events.ClearDamage
)
Work: TypeAlias = Write | Read | events.WriteSnapshotChunk | FinishSnapshot | StateWritten
CoreReport: TypeAlias = (
    events.WriteDone
    | events.LogReadDone
    | events.SnapshotReadDone
    | events.SnapshotInstalled
    | events.SnapshotTaken
)
Report: TypeAlias = CoreReport | DiskReadDone | SnapshotDropped | StateWritten


@value()
class Progress:
    """Result of a list of work: reports in order, and the work `left` over without disk space.

    `full` is the error of the full disk. With nothing left it means that writes use the reserve.
    """

    reports: tuple[Report, ...]
    left: tuple[Work, ...] = ()
    full: DiskFullError | None = None


@value()
class _Round:
    """Result of one round of the journal's thread, for the event loop."""

    progress: Progress
    given: int
    """Number of queue items that this round processed."""
    flush_s: float | None
    """Duration in seconds, if the round was only appends and their flush."""


class DiskWorker:
    """Executes work on a journal. The caller decides when."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._reports: list[Report] = []
        self._unreported: int | None = None
        self._begun: events.AppendLog | None = None

    def run(self, work: Sequence[Work], *, may_refill: bool = True) -> Progress:
        """Execute work in order, with one flush for all of it.

        Stops at work that finds no disk space and passes the rest to `serve`. Run `left` again
        before newer work. With `may_refill` an incomplete reserve is refilled.
        """
        for index, item in enumerate(work):
            try:
                self._carry_out(item)
            except DiskFullError as error:
                # Data written before the disk filled up becomes durable and is acknowledged.
                self._flush()
                reports = self._take_reports()
                # Votes and reads must continue on a full disk, or the node would be lost to the
                # quorum.
                served = self.serve(work[index:])
                return Progress((*reports, *served.reports), served.left, error)
        self._flush()
        if may_refill and self._journal.reserve.shortage is not None:
            self._journal.reserve.refill()
        return Progress(self._take_reports(), full=self._journal.reserve.shortage)

    def serve(self, work: Sequence[Work]) -> Progress:
        """Execute work that depends on no earlier work: reads, trims, and the quorum-state.

        The state is written from the reserve, ahead of batches that wait for disk space, because an
        epoch or a vote may be newer than the log. Trims also stay in `left`, for their turn.
        """
        work = self._write_last_state(work)
        left: list[Work] = []
        for item in work:
            if isinstance(item, events.ReadLog | DiskRead):
                if item.start_offset >= self._journal.end_offset:
                    left.append(item)  # its batches are not written yet
                    continue
                self._read_log(item)
            elif isinstance(item, events.ReadSnapshot):
                self._read_snapshot(item)
            else:
                if isinstance(item, events.TrimLog) and self._may_trim(item):
                    self._journal.trim(item.start_offset)
                left.append(item)

        return Progress(self._take_reports(), tuple(left))

    # -- parts

    def _write_last_state(self, work: Sequence[Work]) -> Sequence[Work]:
        """Write the newest quorum-state. Returns the work with its states marked as written."""
        states = [item for item in work if isinstance(item, events.PersistQuorumState)]
        if not states:
            return work
        try:
            # Each state replaces the former one, so only the last is written.
            self._journal.write_quorum_state(states[-1].state)
        except DiskFullError:
            return work
        self._reports.append(StateWritten(states[-1].token))
        return [
            StateWritten(item.token) if isinstance(item, events.PersistQuorumState) else item
            for item in work
        ]

    def _carry_out(self, item: Work) -> None:
        journal = self._journal
        match item:
            case events.AppendLog():
                self._append(item)
            case events.PersistQuorumState(state=state):
                journal.write_quorum_state(state)
            case StateWritten():
                pass  # already on disk, only its turn had to come
            case events.TruncateLog(end_offset=end_offset):
                journal.truncate(end_offset)
            case events.TrimLog(start_offset=start_offset):
                journal.trim(start_offset)
            case events.ClearDamage():
                self._flush()  # the repaired entries must be durable first
                journal.clear_damage()
            case events.WriteSnapshotChunk(snapshot_id=snapshot_id, position=position, data=data):
                journal.snapshots.write_chunk(snapshot_id, position, data)
                return
            case events.InstallSnapshot():
                self._install(item)
                return
            case FinishSnapshot(writer=writer):
                self._finish(writer)
                return
            case events.ReadSnapshot():
                self._read_snapshot(item)
                return
            case events.ReadLog() | DiskRead():
                self._read_log(item)
                return

        self._unreported = item.token

    def _append(self, item: events.AppendLog) -> None:
        batches = item.batches
        if item is self._begun:
            # A full disk interrupted this append, and some batches are already written.
            batches = tuple(b for b in batches if b.base_offset >= self._journal.end_offset)
        # Set before the write, because a full disk raises in the middle of it.
        self._begun = item
        self._journal.append(batches)
        self._begun = None

    def _install(self, item: events.InstallSnapshot) -> None:
        self._flush()
        # Earlier writes are flushed first, because the installation replaces the log they belong
        # to.
        voters = self._journal.install_snapshot(item.snapshot_id, item.total_bytes, item.digest)
        self._unreported = item.token
        self._flush()
        self._reports.append(events.SnapshotInstalled(item.snapshot_id, voters))

    def _finish(self, writer: SnapshotWriter) -> None:
        snapshot_id = writer.snapshot_id
        if self._journal.finish_snapshot(writer):
            self._reports.append(events.SnapshotTaken(snapshot_id))
        else:
            reason = f"the log now begins at {self._journal.start_offset}"
            self._reports.append(SnapshotDropped(snapshot_id, reason))

    def _read_log(self, item: events.ReadLog | DiskRead) -> None:
        batches = self._journal.read(item.start_offset, item.max_bytes)
        if isinstance(item, DiskRead):
            self._reports.append(DiskReadDone(item, batches))
        else:
            self._reports.append(events.LogReadDone(item.read_id, batches))

    def _read_snapshot(self, item: events.ReadSnapshot) -> None:
        chunk = self._journal.snapshots.read(item.snapshot_id, item.position, item.max_bytes)
        self._reports.append(events.SnapshotReadDone(item.read_id, chunk))

    def _may_trim(self, item: events.TrimLog) -> bool:
        kept = self._journal.snapshots.kept
        # Without a snapshot that covers them, the entries have no other copy here.
        return bool(kept) and kept[-1].end_offset >= item.start_offset

    def _flush(self) -> None:
        self._journal.sync()
        if self._unreported is not None:
            self._reports.append(events.WriteDone(self._unreported))
            self._unreported = None

    def _take_reports(self) -> tuple[Report, ...]:
        reports, self._reports = tuple(self._reports), []
        return reports


class JournalThread:
    """Runs a journal on a thread, and small appends on the event loop. Callbacks run on the loop.

    The journal belongs to the loop while the thread is idle. Work and results change hands only
    through the queue and through callbacks of the loop.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        on_report: Callable[[CoreReport | StateWritten], None],
        on_full: Callable[[DiskFullError | None], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Set the callbacks.

        `on_report` receives events for the core, in order, and states written ahead of it.
        `on_full` receives the error when only the reserve is left, and None when there is room
        again. `on_error` receives an error that must end the replica.
        """
        self._journal = journal
        self._on_report = on_report
        self._on_full = on_full
        self._on_error = on_error
        self._worker = DiskWorker(journal)
        self._place = FlushPlace()
        self._here: list[events.AppendLog] = []
        """Appends that the loop will write itself."""
        self._is_full = False
        """The last state reported to `on_full`."""
        self._is_stopping = False
        self._queue: SimpleQueue[Sequence[Work] | None] = SimpleQueue()
        """Work for the thread. None, the last item, asks it to end."""
        self._waiting: tuple[Work, ...] = ()
        """Work of the thread that waits for disk space."""
        self._full: DiskFullError | None = None
        """Error of the full disk while the thread retries."""
        self._retry_at = 0.0
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._snapshot_threads = ThreadPoolExecutor(_SNAPSHOT_THREADS, "snapshot")
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread. Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._give(())  # empty work makes the thread check for disk space
        self._thread.start()

    def submit(self, work: Work, *, is_awaited: bool = False) -> None:
        """Queue work. Snapshot chunks are read out of order. Ignored after `stop`.

        The loop writes its own appends in its next turn. With `is_awaited` it writes them before
        this call returns, because nothing else is to be done first.
        """
        if self._is_stopping:
            return
        # Large and independent of the log, so it must not delay a flush.
        if isinstance(work, events.ReadSnapshot):
            self._snapshot_threads.submit(self._read_snapshot, work)
        elif isinstance(work, events.AppendLog) and self._is_here(work):
            self._here.append(work)
            if is_awaited:
                self._write_here()
            elif len(self._here) == 1:
                assert self._loop is not None
                # In the next turn, so that this turn's messages reach the network first.
                self._loop.call_soon(self._write_here)
        else:
            # Appends of the loop go first, since the work may depend on them.
            self._give((*self._take_here(), work))

    async def stop(self) -> None:
        """Finish queued work, except work that waits for disk space, and end the threads."""
        self._is_stopping = True
        if self._here:
            self._give(self._take_here())
        self._queue.put(None)
        await asyncio.to_thread(self._snapshot_threads.shutdown, cancel_futures=True)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    # -- on the event loop

    def _is_here(self, work: events.AppendLog) -> bool:
        """Whether the loop writes this append itself, along with those it already has."""
        size = sum([batch.size for item in (*self._here, work) for batch in item.batches])
        return self._place.is_loop(size, time.monotonic())

    def _take_here(self) -> Sequence[events.AppendLog]:
        here, self._here = self._here, []
        return here

    def _give(self, work: Sequence[Work]) -> None:
        # From here on the journal belongs to the thread, until it has reported everything.
        self._place.record_work()
        self._queue.put(work)

    def _write_here(self) -> None:
        if not (work := self._take_here()):
            return

        began = time.monotonic()
        try:
            progress = self._worker.run(work, may_refill=False)
        except BaseException as error:  # noqa: BLE001 (reported; the process ends on it)
            self._is_stopping = True
            self._on_error(error)
            return

        now = time.monotonic()
        self._place.record_loop_flush(now - began, now)
        if progress.full is not None:
            self._give(progress.left)  # the thread retries, and reports the full disk
        for report in progress.reports:
            self._report(report)

    def _take(self, done: _Round) -> None:
        """Pass on the thread's results. The journal belongs to the loop again if they are all."""
        full = done.progress.full
        self._place.record_results(done.given, is_disk_full=full is not None)
        if done.flush_s is not None:
            self._place.record_flush(done.flush_s)
        if (full is not None) != self._is_full:
            self._is_full = full is not None
            self._on_full(full)
        for report in done.progress.reports:
            self._report(report)

    def _report(self, report: Report) -> None:
        match report:
            case DiskReadDone(read=read, batches=batches):
                read.done(batches)
            case SnapshotDropped(snapshot_id=snapshot_id, reason=reason):
                _log.warning("snapshot_dropped", end_offset=snapshot_id.end_offset, reason=reason)
            case _:
                self._on_report(report)

    # -- the journal's thread

    def _run(self) -> None:
        try:
            while (given := self._next_given()) is not None:
                if given or self._full is not None:
                    work = [item for items in given for item in items]
                    self._post(self._take, self._carry_out(work, len(given)))
                # Idle snapshot files are closed here, because only this thread may touch the
                # journal now.
                self._journal.snapshots.release_idle()
        except BaseException as error:  # noqa: BLE001 (reported; the process ends on it)
            self._post(self._on_error, error)

    def _next_given(self) -> list[Sequence[Work]] | None:
        """Wait for work, or for the next retry. Returns None to end."""
        given: list[Sequence[Work]] = []
        if self._is_ending:
            return None
        with contextlib.suppress(Empty):
            item = self._queue.get(timeout=_IDLE_CHECK_S if self._full is None else RETRY_FULL_S)
            while item is not None:
                given.append(item)
                item = self._queue.get_nowait()
            # `None` is the last item. The work before it is still done.
            self._is_ending = True
        return None if self._is_ending and not given else given

    def _carry_out(self, work: Sequence[Work], given: int) -> _Round:
        began = time.monotonic()
        is_due = began >= self._retry_at
        # Work that waits for space keeps its order. Only independent work is served meanwhile.
        if self._waiting and not is_due:
            served = self._worker.serve(work)
            self._waiting += served.left
            return _Round(Progress(served.reports, full=self._full), given, None)
        progress = self._worker.run([*self._waiting, *work], may_refill=is_due)
        self._waiting, self._full = progress.left, progress.full
        if is_due:
            self._retry_at = time.monotonic() + RETRY_FULL_S
        is_flush = bool(work) and all(isinstance(item, events.AppendLog) for item in work)
        return _Round(progress, given, time.monotonic() - began if is_flush else None)

    # -- the threads that read snapshots

    def _read_snapshot(self, item: events.ReadSnapshot) -> None:
        try:
            chunk = self._journal.snapshots.read(item.snapshot_id, item.position, item.max_bytes)
        except BaseException as error:  # noqa: BLE001 (reported; the process ends on it)
            self._post(self._on_error, error)
        else:
            self._post(self._on_report, events.SnapshotReadDone(item.read_id, chunk))

    # -- from the threads to the loop

    def _post(self, callback: Callable[..., None], argument: object) -> None:
        assert self._loop is not None
        # A thread may finish after the process has given up on it.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, argument)
