"""The thread on which a replica's journal works, in the order it is asked.

Owns group commit: whatever was queued while the last flush ran is written together and made
durable by one flush. Nothing is retried; the first error ends the thread and is reported.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from controller.ids import EndOffset
from controller.journal.journal import Journal
from controller.quorum.events import AppendLog, PersistQuorumState, TruncateLog
from controller.quorum.messages import Batch

Write: TypeAlias = PersistQuorumState | AppendLog | TruncateLog


@dataclass(frozen=True, slots=True)
class DiskRead:
    """Read whole batches from `start_offset`; `done` is called on the event loop."""

    start_offset: EndOffset
    max_bytes: int
    done: Callable[[tuple[Batch, ...]], None]


class JournalThread:
    """Runs a journal in the background; its callbacks run on the event loop that started it."""

    def __init__(
        self,
        journal: Journal,
        on_durable: Callable[[int], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._journal = journal
        self._on_durable = on_durable
        self._on_error = on_error
        self._queue: deque[Write | DiskRead] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, work: Write | DiskRead) -> None:
        """Queue a write or a read behind everything queued before."""
        with self._wake:
            self._queue.append(work)
            self._wake.notify()

    async def stop(self) -> None:
        """Finish everything queued, then end."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._is_stopping:
                    self._wake.wait()
                if not self._queue:
                    return
                work = list(self._queue)
                self._queue.clear()
            try:
                self._carry_out(work)
            except BaseException as error:  # noqa: BLE001 (reported; the process ends on it)
                self._report(self._on_error, error)
                return

    def _carry_out(self, work: list[Write | DiskRead]) -> None:
        token: int | None = None
        for item in work:
            match item:
                case AppendLog(batches=batches):
                    self._journal.append(batches)
                case PersistQuorumState(state=state):
                    self._journal.write_quorum_state(state)
                case TruncateLog(end_offset=end_offset):
                    self._journal.truncate(end_offset)
                case DiskRead():
                    batches = self._journal.read(item.start_offset, item.max_bytes)
                    self._report(item.done, batches)
                    continue
            token = item.token
        if token is not None:
            self._journal.sync()
            self._report(self._on_durable, token)

    def _report(self, callback: Callable[..., None], argument: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, argument)
