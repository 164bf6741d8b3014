"""Audit writer: a thread that takes lines from a bounded queue and writes them in order.

The event loop never waits for the disk: it hands a line over, and a call that must be on record
first waits for a future. Lines that found no room are counted, and the next line written says how
many. While the log can't be written the lines taken are kept and tried again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

import structlog

from streammeta.controller.errors import AuditUnavailableError
from streammeta.controller.trust.audit.file import AuditLog, Entry
from streammeta.controller.trust.audit.lines import AuditLine, Chain

CAPACITY = 10_000
"""Maximum number of lines not yet written."""

SYNC_EVERY_S = 1.0
"""Maximum time that a written line is not durable, in seconds."""

_log = structlog.get_logger(component="audit")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A line in the queue, and its caller if it waits."""

    entry: Entry
    durable: asyncio.Future[None] | None


class AuditWriter:
    """The thread and its queue. `put`, `written` and `stop` are of the event loop."""

    def __init__(
        self, log: AuditLog, *, capacity: int = CAPACITY, sync_every_s: float = SYNC_EVERY_S
    ) -> None:
        self._log = log
        self._capacity = capacity
        self._sync_every_s = sync_every_s
        self._changed = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._taken: list[_Waiting] = []
        self._unsynced: list[asyncio.Future[None]] = []
        self._dropped = 0
        self.lost = 0

        """Lines that found no room in the queue, since the start."""
        self._is_stopping = self._wants_reopening = self._is_unsynced = False
        self._synced_at = time.monotonic()
        self._head = replace(log.chain)
        self._durable_head = self._head
        self.failure = ""
        """Reason why lines can't be written at the moment, empty if they can."""
        # Daemon, so that a hanging disk does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    @property
    def head(self) -> Chain:
        """Number and hash of the last line written."""
        return self._head

    @property
    def durable_head(self) -> Chain:
        """Number and hash of the last line that no crash takes back."""
        return self._durable_head

    @property
    def problem(self) -> str:
        """Reason why lines can't be recorded now, empty if they can."""
        if self.failure:
            return self.failure
        waiting = len(self._queue) + len(self._taken)
        return f"{waiting} lines wait to be written" if waiting >= self._capacity else ""

    def put(self, line: AuditLine) -> bool:
        """Queue a line. Return False if the queue is full and the line is lost."""
        return self._put(line, None)

    async def written(self, line: AuditLine) -> None:
        """Hand a line over and wait until it is durable.

        Raises:
            AuditUnavailableError: it is not, and may never be.
        """
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._put(line, durable):
            raise AuditUnavailableError(self.problem)
        await durable

    def _put(self, line: AuditLine, durable: asyncio.Future[None] | None) -> bool:
        with self._changed:
            # Lines kept after a failed write count too, or an outage of the disk would fill the
            # memory.
            if self._is_stopping or len(self._queue) + len(self._taken) >= self._capacity:
                self._dropped += 1
                self.lost += 1
                return False
            self._queue.append(_Waiting(Entry(line, self._dropped), durable))
            # The line in the queue now states the number, so it is not reported twice.
            self._dropped = 0
            self._changed.notify()
        return True

    def reopen(self) -> None:
        """Continue in a file of the log's name, after all queued lines."""
        with self._changed:
            self._wants_reopening = True
            self._changed.notify()

    async def stop(self) -> None:
        """Write queued lines, end the thread and close the log."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        # Joined outside of the event loop, because the thread settles futures through the loop.
        await asyncio.to_thread(self._thread.join)
        self._log.close()

    # -- the thread

    def _run(self) -> None:
        while True:
            is_stopping = self._wait()
            try:
                self._write()
                self._tell_recovered()
            except OSError as error:
                self._tell_failed(error)
            # A failing disk gets one last attempt. Waiting longer would block the stop.
            if is_stopping and (self.failure or not self._has_work()):
                return

    def _has_work(self) -> bool:
        return bool(self._queue or self._taken or self._wants_reopening or self._is_unsynced)

    def _wait(self) -> bool:
        """Wait for work, or until failed lines are due again, and take the queued lines.

        Returns True if the remaining lines are to be tried once.
        """
        with self._changed:
            while not self._is_stopping:
                if self.failure:
                    # New lines must not shorten the pause, or a full disk would be tried for every
                    # call.
                    self._changed.wait(self._sync_every_s)
                    break
                if self._queue or self._wants_reopening or self._is_sync_due():
                    break
                self._changed.wait(self._until_sync_s())
            self._taken.extend(self._queue)
            self._queue.clear()
            return self._is_stopping

    def _until_sync_s(self) -> float | None:
        if not self._is_unsynced:
            return None
        return max(0.0, self._synced_at + self._sync_every_s - time.monotonic())

    def _is_sync_due(self) -> bool:
        return self._is_unsynced and self._until_sync_s() == 0

    def _write(self) -> None:
        if self._taken:
            self._log.append([waiting.entry for waiting in self._taken])
            self._head = replace(self._log.chain)
            self._is_unsynced = True

        self._unsynced += [queued.durable for queued in self._taken if queued.durable is not None]
        self._taken = []
        # A waiting caller is the reason for an early flush. Other lines share one flush a second.
        if self._unsynced or self._is_stopping or self._is_sync_due():
            self._log.sync()
            self._is_unsynced, self._synced_at = False, time.monotonic()
            # Anchors name this line only: a crash must not take back an anchored line.
            self._durable_head = self._head

        _settle(self._unsynced, None)
        self._unsynced = []
        # After the lines are durable: the old file is complete when its owner moves it.
        if self._wants_reopening:
            self._log.reopen()
            self._wants_reopening = False

    def _tell_failed(self, error: OSError) -> None:
        if not self.failure:
            _log.error("audit_log_failed", error=str(error))
        self.failure = f"the audit log can't be written: {error}"
        # They are on no disk. Keep and write their content when that is possible again.
        waiting = [queued.durable for queued in self._taken if queued.durable is not None]
        _settle([*self._unsynced, *waiting], error)
        self._unsynced = []
        self._taken = [replace(queued, durable=None) for queued in self._taken]

    def _tell_recovered(self) -> None:
        if self.failure:
            _log.info("audit_log_works_again", seq=self._head.seq)
            self.failure = ""


def _settle(waiting: list[asyncio.Future[None]], error: OSError | None) -> None:
    for future in waiting:
        # Futures of asyncio are not thread safe.
        future.get_loop().call_soon_threadsafe(_end, future, error)


def _end(future: asyncio.Future[None], error: OSError | None) -> None:
    # The caller may have been cancelled while the line was written.
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(AuditUnavailableError(f"the audit log can't be written: {error}"))
