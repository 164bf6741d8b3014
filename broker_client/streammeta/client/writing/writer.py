"""Stream writer: bounded buffering, batched uploads, acknowledgement by ordered commits.

`core` decides which appends to admit, when to seal a batch, which stage it may enter, and the
outcome of each append. This module owns the futures, timers and tasks, and carries that out: it
encodes, uploads and commits batches, and writes appends to the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Self

from streammeta.client import arguments
from streammeta.client.config import (
    ACK_OVERHEAD,
    RECORD_OVERHEAD,
    SilentObserver,
    UploadObserver,
    WriterConfig,
)
from streammeta.client.errors import RecoveryNeededError
from streammeta.client.nodes.session import BrokerSession, Heartbeat, OpenedStream
from streammeta.client.resources.fork_check import check_not_forked
from streammeta.client.resources.resources import ClosedAtExit, StoreThreads, warn_unclosed
from streammeta.client.wal.disk.record_log import RecordLog
from streammeta.client.wal.disk.recovery import RecoveryReport, recover_into
from streammeta.client.writing import core, record_buffer
from streammeta.client.writing.admission import AttachedStreams, check_fits
from streammeta.client.writing.batch import APPEND_SPAN, BatchUpload, Stage
from streammeta.client.writing.uploader import Uploader
from streammeta.client.writing.wal_acks import LoggedAcks, LogTrimmer
from streammeta.rpc import tracing
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore

_log = logging.getLogger(__name__)


class _Turn(asyncio.Future[None]):
    """Wait of a batch for its next stage. It costs a third of an `asyncio.Event`."""

    def set(self) -> None:
        """Let the batch continue, unless it was cancelled meanwhile."""
        if not self.done():
            self.set_result(None)


class StreamWriter(ClosedAtExit):
    """Writes records of many streams of one session through objects in a store.

    Use it from one event loop, as an async context manager or with `close`. It sends the session's
    heartbeats from `async with` or its first append on, so close it after its streams are closed.
    With `durability="wal"` it needs a `log`, an open write-ahead log, which the caller closes.
    """

    def __init__(
        self,
        session: BrokerSession,
        store: ObjectStore,
        config: WriterConfig | None = None,
        observer: UploadObserver | None = None,
        log: RecordLog | None = None,
    ) -> None:
        arguments.check_session(session)
        arguments.check_store(store)
        self._config = WriterConfig() if config is None else config
        arguments.check_kind(
            "config", self._config, WriterConfig, "a WriterConfig, or None for its defaults"
        )
        if log is not None:
            arguments.check_offers(
                "log", log, "trim", "an open log (await WriteAheadLog.open(...))"
            )
        self._config.check_log(log)
        self._session = session
        self._tally = session.client.tally
        self._threads = StoreThreads(store, self._config.upload_threads, "upload")
        self._heartbeat = Heartbeat(session, self._fence)
        # A log makes the uploader persistent: its records are acknowledged already, so they must
        # not fail for a reason that may pass.
        self._uploader = Uploader(
            session,
            self._threads,
            self._config,
            observer or SilentObserver(),
            is_persistent=log is not None,
        )
        self._log = log
        self._trimmer = None if log is None else LogTrimmer(log)
        self._logged = None if log is None else LoggedAcks(log, self._release, self._reject_appends)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams = AttachedStreams()
        self._core = core.WriterCore(self._config, self._streams, is_logged=log is not None)
        self._linger_timer: asyncio.TimerHandle | None = None
        self._open_span = tracing.NOT_TRACED
        self._tasks: dict[BatchUpload, asyncio.Task[None]] = {}
        self._fencing = asyncio.Event()
        # New records must not overtake the log's older records of the same stream.
        if log is not None and next(iter(log.recover()), None) is not None:
            self._core.reject(RecoveryNeededError())
        self._is_recovering = False

    async def __aenter__(self) -> Self:
        self._start()
        return self

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None and not self._core.is_closed:
            advice = "use `async with StreamWriter(...)` or `await writer.close()`"
            warn_unclosed(self, self._losses(), advice)

    def _losses(self) -> str:
        fate = "they may be lost" if self._log is None else "its write-ahead log keeps them"
        return f"{self._streams.describe_pending()} are not known to be committed, {fate}"

    @property
    def buffered_bytes(self) -> int:
        """Bytes admitted and not yet settled, overhead included, at most `max_buffer_bytes`."""
        return self._core.buffered

    @property
    def oldest_age_s(self) -> float:
        """Time since the oldest unsettled batch was sealed, in seconds, or 0 without one."""
        oldest = next(iter(self._core.in_flight), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.sealed_at

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeats of the session. They continue until `close`."""
        return self._heartbeat

    async def until_fenced(self) -> Exception:
        """Wait until another process or node replaces this one. Return the controllers' error."""
        await self._fencing.wait()
        assert self._core.fenced is not None
        return self._core.fenced

    def _start(self) -> asyncio.AbstractEventLoop:
        """Start the heartbeats."""
        self._heartbeat.start()
        self._loop = asyncio.get_running_loop()
        return self._loop

    # -- streams

    def attach(self, streams: Iterable[OpenedStream]) -> None:
        """Accept appends to `streams`, each from its next offset on.

        Attaching a stream that was opened again clears its failure. Raises as `require_attachable`.
        """
        self._streams.attach(streams)

    def require_attachable(self, stream_ids: Iterable[int]) -> None:
        """Raise `ValueError` for a stream that has records in flight and has not failed."""
        self._streams.require_attachable(stream_ids)

    def detach(self, stream_ids: Iterable[int]) -> None:
        """Accept no more appends to these streams. Records appended before are still committed."""
        self._streams.detach(stream_ids)

    def next_offset(self, stream_id: int) -> int:
        """Return the offset of the next append to the stream."""
        return self._core.accepting(stream_id).next_offset

    def ends(self, stream_id: int) -> tuple[int, int]:
        """Return the end of the records known to be committed, and the end of all appends."""
        stream = self._streams.require(stream_id, f"stream {stream_id}")
        return stream.acknowledged, stream.next_offset

    # -- appending

    async def append(
        self,
        stream_id: int,
        payload: bytes,
        count: int = 1,
        *,
        timestamp_ms: int | None = None,
        max_timestamp_ms: int | None = None,
    ) -> asyncio.Future[int]:
        """Admit one record of `count` offsets. Wait while the buffer is full.

        The result is a future of the record's base offset. It is done when the record's object is
        committed, or when a write-ahead log has the record on disk. Records of a stream are
        committed in the order of their appends. `timestamp_ms` is the time of the record in ms
        since 1970. A record that spans several times also passes its latest as `max_timestamp_ms`.
        A record without a time can't be looked up by time.

        Raises the error of a failed stream or a fenced node, `LimitExceededError` for a record
        larger than the buffer, `WriterClosedError` after `close`.
        """
        check_not_forked("append")
        stream = self._core.accepting(stream_id)
        # Type checks before calls: this method runs once a record, and the fast path is plain.
        if type(count) is not int or not 1 <= count <= arguments.INT32_MAX:
            count = arguments.check_int("count", count, 1, arguments.INT32_MAX)
        if timestamp_ms is None and max_timestamp_ms is None:
            times = record_buffer.NO_TIME
        else:
            times = record_buffer.time_bounds(timestamp_ms, max_timestamp_ms)

        if type(payload) is not bytes:
            payload = arguments.as_payload("payload", payload)
        size = len(payload)
        cost = size + RECORD_OVERHEAD + ACK_OVERHEAD

        size += RECORD_HEADER_SIZE
        run = None
        if self._log is None or self._log.has_room(size):
            run = self._core.admit(stream, count, cost, size)
        if run is None:
            run = await self._wait_for_space(stream_id, count, cost, size)
        # Most streams have no times, and a run without any needs no update.
        if times is not record_buffer.NO_TIME or run.min_timestamp_ms >= 0:
            run.cover(times)
        base_offset = run.end_offset
        header = run.add(payload, count)
        return self._account(run, base_offset, cost, size, ((header, payload),))

    async def append_many(
        self,
        stream_id: int,
        payloads: Sequence[bytes],
        *,
        timestamp_ms: int | None = None,
        max_timestamp_ms: int | None = None,
    ) -> asyncio.Future[int]:
        """Admit a record of one offset for each of `payloads`, all of them together.

        Much cheaper than as many calls of `append`. The future has the first record's offset and is
        done when all records are committed. The times are the bounds of all records. For the rest,
        see `append`.
        """
        check_not_forked("append")
        stream = self._core.accepting(stream_id)
        times = record_buffer.time_bounds(timestamp_ms, max_timestamp_ms)
        payloads = record_buffer.check_payloads(payloads)
        size = sum(map(len, payloads)) + RECORD_HEADER_SIZE * len(payloads)
        cost = size + (RECORD_OVERHEAD - RECORD_HEADER_SIZE) * len(payloads) + ACK_OVERHEAD

        run = None
        if self._log is None or self._log.has_room(size):
            run = self._core.admit(stream, len(payloads), cost, size)
        if run is None:
            run = await self._wait_for_space(stream_id, len(payloads), cost, size)
        run.cover(times)
        base_offset = run.end_offset
        records = [(run.add(payload, 1), payload) for payload in payloads]
        return self._account(run, base_offset, cost, size, records)

    async def recover(self) -> RecoveryReport:
        """Upload the write-ahead log's records that are not committed yet, and only them.

        A log with records accepts no appends before. Call this after the inherited streams are
        attached, and before the first append. Records that can no longer be committed are set aside
        next to the log and listed in the report.

        Raises the first failure. The log then keeps all its records.
        """
        if self._log is None:
            raise ValueError('recover() is for durability="wal"')
        failures: list[Exception] = []

        def note(ack: asyncio.Future[int]) -> None:
            error = ack.exception()
            if isinstance(error, Exception):
                failures.append(error)

        async def upload(record: RecordBatch) -> None:
            (await self._append_recovered(record)).add_done_callback(note)

        self._core.accept()
        self._is_recovering = True
        try:
            report = await recover_into(self._log, self._session, upload, self._threads.store)
            await self.flush()
            # Callbacks of futures that are done run one iteration of the loop later.
            await asyncio.sleep(0)
            if failures:
                raise failures[0]
        except Exception as error:
            self._reject_appends(error)
            raise
        finally:
            self._is_recovering = False

        self._log.trim(self._log.recovered_end)
        return report

    # -- ending

    async def flush(self) -> None:
        """Upload all buffered records now and wait until each is committed or failed.

        The future of each append has its result. Raises only an error that fences the whole node.
        """
        self._raise_fenced()
        await self._drain()
        self._raise_fenced()

    async def close(self, deadline_s: float | None = None) -> None:
        """Flush, then stop. Appends that still wait for space are rejected.

        Records that are not committed after `deadline_s` seconds, by default the configuration's
        `close_deadline_s`, fail with `WriterClosedError`. A write-ahead log keeps them.
        """
        if deadline_s is not None:
            arguments.check_seconds("deadline_s", deadline_s, may_be_zero=True)
        limit_s = self._config.close_deadline_s if deadline_s is None else deadline_s
        self._core.close()

        try:
            async with asyncio.timeout(limit_s):
                await self._drain()
        except TimeoutError:
            _log.warning("close() abandoned %d uncommitted batches", len(self._core.in_flight))
        finally:
            is_clean = not self._core.in_flight and self._core.rejection is None
            self._stop_timer()
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values())
            # After the tasks, which use its threads and its pipeline.
            await self._uploader.close(0)
            self._threads.close()
            await self._heartbeat.close(cleanly=is_clean)

    async def _drain(self) -> None:
        """Upload all buffered records, and wait until they are settled or the node is fenced."""
        settled = asyncio.Event()
        self._core.flush(settled)
        self._carry_out()
        await settled.wait()

    def _raise_fenced(self) -> None:
        if self._core.fenced is not None:
            raise self._core.fenced

    # -- events of the log and the session

    def _release(self, cost: int) -> None:
        self._core.release(cost)
        self._carry_out()

    def _reject_appends(self, error: Exception) -> None:
        self._core.reject(error)
        self._carry_out()

    def _fence(self, error: Exception) -> None:
        self._core.fence(error)
        self._carry_out()

    # -- an append

    async def _wait_for_space(
        self, stream_id: int, offsets: int, cost: int, size: int
    ) -> record_buffer.StreamRun:
        """Wait, in order, until an append fits. Return its run."""
        check_fits(stream_id, cost, size, self._config, self._log)
        space = asyncio.Event()
        self._core.wait(space)
        try:
            while True:
                # The stream is looked up again each time: it may have failed during the wait.
                stream = self._core.accepting(stream_id)
                if self._log is None or self._log.has_room(size):
                    run = self._core.admit(stream, offsets, cost, size, space)
                    if run is not None:
                        return run
                self._core.make_space()
                self._carry_out()
                space.clear()
                await space.wait()
        finally:
            self._core.leave(space)
            self._carry_out()

    def _account(
        self,
        run: record_buffer.StreamRun,
        base_offset: int,
        cost: int,
        size: int,
        to_log: Sequence[tuple[bytes, bytes]],
    ) -> asyncio.Future[int]:
        """Account for an append that its run contains, and log it. Return its future.

        `to_log` is empty for a record that the log already has.
        """
        # The admission may have sealed a batch. Its end in the log is before these records.
        if self._core.effects:
            self._carry_out()
        loop = self._loop or self._start()
        if tracing.is_on():
            self._open_span = self._open_span.share(APPEND_SPAN)
        if to_log:
            self._tally.count_append(run.end_offset - base_offset, size)

        ack: asyncio.Future[int] = loop.create_future()
        if self._logged is None or not to_log:
            run.add_ack(ack, base_offset)
        else:
            self._core.charge(self._logged.append(run, to_log, base_offset, ack))

        self._core.count_append(run, cost, size)
        if self._core.effects:
            self._carry_out()
        return ack

    async def _append_recovered(self, record: RecordBatch) -> asyncio.Future[int]:
        """Admit a record of the log, without logging it again."""
        cost = len(record.payload) + RECORD_OVERHEAD + ACK_OVERHEAD
        run = await self._wait_for_space(record.stream_id, record.count, cost, 0)
        run.require_next(record)
        run.cover(record_buffer.NO_TIME)
        run.add(record.payload, record.count)
        return self._account(run, record.base_offset, cost, record.encoded_size, ())

    # -- effects

    def _carry_out(self) -> None:
        """Carry out the effects of the last events, in order."""
        effects, self._core.effects = self._core.effects, []
        for effect in effects:
            # Patterns with attributes would cost as much as the effects of a small batch.
            match effect:
                case core.Wake():
                    effect.waiter.set()
                case core.Answer():
                    for run in effect.runs:
                        run.answer()
                case core.BatchOpened():
                    self._open_batch()
                case core.BatchSealed():
                    self._start_batch(effect.batch)
                case core.Fenced():
                    _log.error("node fenced, start a new process for it: %s", effect.error)
                    self._fencing.set()

    def _open_batch(self) -> None:
        self._stop_timer()
        self._open_span = tracing.begin(APPEND_SPAN)
        loop = asyncio.get_running_loop()
        self._linger_timer = loop.call_later(self._config.linger_s, self._end_linger)

    def _end_linger(self) -> None:
        self._core.seal()
        self._carry_out()

    def _stop_timer(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _start_batch(self, batch: BatchUpload) -> None:
        self._stop_timer()
        batch.sealed_at = time.monotonic()
        batch.span, self._open_span = self._open_span, tracing.NOT_TRACED
        # Recovered records are trimmed once, after all of them are committed.
        if self._log is not None and not self._is_recovering:
            batch.log_end = self._log.end

        # The task inherits the span of the batch, not of the append that happened to fill it.
        with batch.span.current():
            self._tasks[batch] = asyncio.create_task(self._process_batch(batch))

    # -- a batch in flight

    async def _process_batch(self, batch: BatchUpload) -> None:
        """Encode, upload, commit and settle one batch, each in its turn."""
        try:
            await self._turn(batch, Stage.ENCODE)
            await self._uploader.encode(batch)

            await self._turn(batch, Stage.UPLOAD)
            with tracing.span("streammeta.upload", {"bytes": batch.encoded_bytes}):
                await self._uploader.upload(batch)

            await self._turn(batch, Stage.SUBMIT)
            with tracing.span("streammeta.commit", {"streams": len(batch.runs)}):
                submission = await self._uploader.submit(batch)
                await self._turn(batch, Stage.FINISH)
                await self._uploader.finish(batch, submission, self._core.hold)
            if self._trimmer is not None:
                await self._trimmer.settle(batch)
        except Exception as error:  # noqa: BLE001 - every caller receives it
            _log.exception("a batch of %d streams failed unexpectedly", len(batch.runs))
            for run in batch.runs:
                batch.failures.setdefault(run, error)
        finally:
            self._settle(batch)

    async def _turn(self, batch: BatchUpload, stage: Stage) -> None:
        turn = None
        if not self._core.enter(batch, stage):
            batch.turn = turn = _Turn()
        if self._core.effects:
            self._carry_out()
        if turn is not None:
            await turn

    def _settle(self, batch: BatchUpload) -> None:
        """Settle every append of the batch and free its memory."""
        # The trimmer clears `log_end` of a batch whose records the log no longer needs.
        if self._trimmer is not None and batch.log_end is not None:
            self._trimmer.stop("a batch was not committed")
        del self._tasks[batch]
        self._core.settle(batch)
        self._carry_out()

        lost = len(batch.runs) - len(batch.committed)
        batch.span.end(f"{lost} streams are not committed" if lost else "")
        # The traceback of an error may refer to the batch for as long as its stream exists.
        batch.objects.clear()
        batch.uploaded.clear()
