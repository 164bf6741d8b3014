"""The end of a batch: why a run was cut short, and what the write-ahead log may forget.

Acknowledged records leave the log when they are committed, or, if they never can be, when they were
set aside beside it. Anything else keeps them, and all that came later, in the log: whoever opens it
next recovers them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from streammeta.client.errors import (
    OffsetMismatchError,
    StreamEpochMismatchError,
    StreamFailedError,
    StreamFencedError,
    StreamNotFoundError,
    StreamNotOpenedError,
    WriterClosedError,
)
from streammeta.client.record_log import RecordLog
from streammeta.client.upload import BatchUpload
from streammeta.client.upload_batch import StreamRun, WriterStream
from streammeta.storage.object_format.record import RecordBatch

_FOR_GOOD = (
    OffsetMismatchError,
    StreamEpochMismatchError,
    StreamFencedError,
    StreamNotFoundError,
    StreamNotOpenedError,
)

_log = logging.getLogger(__name__)


class LogTrimmer:
    """Trims a log behind settled batches; called in the order of batches.

    A batch that was dealt with has no `log_end` any more.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._has_stopped = False

    async def settle(self, batch: BatchUpload) -> None:
        """Let the log forget `batch`, unless some of it has to stay."""
        if batch.log_end is None or self._has_stopped:
            return
        lost = [run for run in batch.runs if run not in batch.committed]
        for run in lost:
            error = batch.failures.get(run)
            if not _is_for_good(error):
                self.stop(error)
                return
        if lost:
            await self._set_aside(batch, lost)
        self._log.trim(batch.log_end)
        batch.log_end = None

    def stop(self, reason: object) -> None:
        """Keep everything from now on: a trim would take what came before along."""
        if not self._has_stopped:
            _log.error("the write-ahead log is not trimmed any more: %s", reason)
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
        await self._log.set_aside(records, "; ".join({str(batch.failures[run]) for run in lost}))


def cut_short(run: StreamRun, *, was_submitted: bool) -> WriterClosedError:
    """Make the error of a run whose upload was cancelled."""
    end = (
        "it may have been committed, open the stream again to see its next offset"
        if was_submitted
        else "it was not committed"
    )
    return WriterClosedError(
        f"the upload of stream {run.stream.stream_id} [{run.start_offset}, {run.end_offset}) was"
        f" cancelled; {end}"
    )


def losses(streams: Iterable[WriterStream], *, has_log: bool) -> str:
    """Say what a writer of these streams that ends without `close` leaves open."""
    pending = [one for one in streams if one.is_pending]
    offsets = sum(one.next_offset - one.acknowledged for one in pending)
    fate = "its write-ahead log keeps them" if has_log else "they may be lost"
    return f"{offsets} offsets of {len(pending)} streams are not known to be committed, {fate}"


def _is_for_good(error: Exception | None) -> bool:
    """Tell whether a run that failed so can never be committed."""
    if isinstance(error, StreamFailedError):
        error = error.__cause__ if isinstance(error.__cause__, Exception) else None
    return isinstance(error, _FOR_GOOD)
