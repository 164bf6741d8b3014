"""Write-ahead logging in a writer: early acknowledgement, and trimming after commits.

Owns the appends that wait for each group of the log, and the position up to which it is trimmed.
Acknowledged records leave the log when they are committed, or when they can never be committed and
were set aside next to the log. Any other failure keeps them, and all later records, in the log. The
process that opens the log next recovers them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from streammeta.client import errors
from streammeta.client.wal.disk.record_log import RecordLog
from streammeta.client.writing.batch import BatchUpload
from streammeta.client.writing.record_buffer import StreamRun
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.patience import Patience


@dataclass(slots=True, eq=False)
class _Group:
    """Appends that become durable together."""

    durable: asyncio.Future[None]
    waiting: list[tuple[StreamRun, int, asyncio.Future[int]]] = field(default_factory=list)
    logged_bytes: int = 0


class LoggedAcks:
    """Appends that wait for the log.

    `on_durable` is called with the bytes that the log no longer keeps in memory, `on_broken` with
    the reason why the log accepts no more records.
    """

    def __init__(
        self,
        log: RecordLog,
        on_durable: Callable[[int], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._log = log
        self._on_durable = on_durable
        self._on_broken = on_broken
        self._group: _Group | None = None

    def append(
        self,
        run: StreamRun,
        records: Sequence[tuple[bytes, bytes]],
        base_offset: int,
        ack: asyncio.Future[int],
    ) -> int:
        """Log the encoded `records` of one append and return the bytes that wait for the disk."""
        size = 0
        for header, payload in records:
            # The log returns the same future for all records of a group.
            durable = self._log.append(header, payload)
            group = self._group
            # Records of one append may fall into two groups; the last one decides its ack.
            if group is None or group.durable is not durable:
                group = self._group = _Group(durable)
                durable.add_done_callback(partial(self._done, group))
            group.logged_bytes += len(header) + len(payload)
            size += len(header) + len(payload)

        if self._group is not None:
            self._group.waiting.append((run, base_offset, ack))
        return size

    def _done(self, group: _Group, durable: asyncio.Future[None]) -> None:
        # A cancelled future has no exception to read.
        error = (
            asyncio.CancelledError("the log was closed")
            if durable.cancelled()
            else durable.exception()
        )

        if isinstance(error, errors.WriteAheadLogFullError):
            # These records are not in the log, so only their commit acknowledges them.
            for run, base_offset, ack in group.waiting:
                run.add_ack(ack, base_offset)
        elif error is None:
            for _, base_offset, ack in group.waiting:
                if not ack.done():
                    ack.set_result(base_offset)
        else:
            for _, _, ack in group.waiting:
                if not ack.done():
                    ack.set_exception(error)
            # A cancellation is the end of the process, not a defect of the log.
            if isinstance(error, Exception):
                self._on_broken(error)
        self._on_durable(group.logged_bytes)


_PERMANENT_ERRORS = (
    errors.OffsetMismatchError,
    errors.StreamEpochMismatchError,
    errors.StreamFencedError,
    errors.StreamNotFoundError,
    errors.StreamNotOpenedError,
)

_PATIENCE = Patience(Backoff(0.5, 10.0))

_log = logging.getLogger(__name__)


class LogTrimmer:
    """Trims a log after settled batches, called in the order of batches.

    A batch whose records have left the log has no `log_end`.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._has_stopped = False

    async def settle(self, batch: BatchUpload) -> None:
        """Trim the log up to the end of `batch`, unless some of its records must stay."""
        if batch.log_end is None or self._has_stopped:
            return

        lost = [run for run in batch.runs if run not in batch.committed]
        # One failure that may pass is enough to keep the log: a trim can't skip records.
        for run in lost:
            error = batch.failures.get(run)
            if not _is_permanent(error):
                self.stop(error)
                return

        if lost:
            await self._set_aside(batch, lost)
        self._log.trim(batch.log_end)
        batch.log_end = None

    def stop(self, reason: object) -> None:
        """Keep all records from now on: a trim removes everything before its position."""
        if not self._has_stopped:
            _log.error("the write-ahead log keeps all records from now on: %s", reason)
        self._has_stopped = True

    async def _set_aside(self, batch: BatchUpload, lost: list[StreamRun]) -> None:
        records: list[RecordBatch] = []
        for content in batch.objects:
            for run in content.runs:
                if run in lost:
                    records.extend(content.records_of(run))
                    _log.error(
                        "acknowledged records of stream %d [%d, %d) can't be committed: %s",
                        run.stream.stream_id,
                        run.start_offset,
                        run.end_offset,
                        batch.failures[run],
                    )

        # Until the records are set aside the log must not be trimmed, so only success ends this.
        reason = "; ".join({str(batch.failures[run]) for run in lost})
        for attempt in itertools.count():
            try:
                await self._log.set_aside(records, reason)
                return
            except StorageError as error:
                wait = _PATIENCE.wait_s(error, attempt, random_unit=random.random())
                if wait is None:
                    raise
                _log.warning("set-aside failed, retrying in %.3g s: %s", wait, error)
            await asyncio.sleep(wait)


def _is_permanent(error: Exception | None) -> bool:
    """Return whether a run that failed with `error` can never be committed."""
    # The cause decides: the error itself only says that an earlier write failed.
    if isinstance(error, errors.StreamFailedError):
        error = error.__cause__ if isinstance(error.__cause__, Exception) else None
    return isinstance(error, _PERMANENT_ERRORS)
