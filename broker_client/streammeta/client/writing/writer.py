"""Stream writer: bounded buffering, batched uploads, acknowledgement by ordered commits.

Owns admission (bytes, order, backpressure), the triggers of an upload (size, number of streams,
`linger_s`, flush, a full buffer) and the stages of each batch. Batches are encoded and prepared in
order, uploaded in parallel and committed in order, with several commits in flight. After a failed
write no later record of the stream is committed until it is attached again, which prevents gaps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Self

from streammeta.client.arguments import (
    INT32_MAX,
    as_payload,
    check_int,
    check_kind,
    check_offers,
    check_seconds,
    check_session,
    check_store,
)
from streammeta.client.config import (
    ACK_OVERHEAD,
    RECORD_OVERHEAD,
    RUN_OVERHEAD,
    UPLOAD_BYTES_MAX,
    SilentObserver,
    UploadObserver,
    WriterConfig,
)
from streammeta.client.errors import RecoveryNeededError, WriterClosedError
from streammeta.client.nodes.session import BrokerSession, Heartbeat, OpenedStream
from streammeta.client.resources.fork_check import check_not_forked
from streammeta.client.resources.resources import ClosedAtExit, StoreThreads, warn_unclosed
from streammeta.client.wal.disk.record_log import RecordLog
from streammeta.client.wal.disk.recovery import RecoveryReport, recover_into
from streammeta.client.writing.admission import check_fits, check_offsets
from streammeta.client.writing.attached_streams import AttachedStreams
from streammeta.client.writing.batch import APPEND_SPAN, BatchUpload, CommitOrder
from streammeta.client.writing.record_buffer import (
    NO_TIME,
    StreamRun,
    WriterStream,
    check_payloads,
    time_bounds,
)
from streammeta.client.writing.uploader import Uploader, is_fencing
from streammeta.client.writing.wal_acks import LoggedAcks, LogTrimmer
from streammeta.rpc import tracing
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore

_UNBUILT_MAX = 1024 * 1024
"""Limit of sealed bytes that are not encoded yet. Above it the open batch is sealed at half of its
size: records being encoded exist twice for a moment, and the buffer's limit does not count that."""

_log = logging.getLogger(__name__)


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
        check_session(session)
        check_store(store)
        self._config = WriterConfig() if config is None else config
        check_kind("config", self._config, WriterConfig, "a WriterConfig, or None for its defaults")
        if log is not None:
            check_offers("log", log, "trim", "an open log (await WriteAheadLog.open(...))")
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
        self._open: dict[WriterStream, StreamRun] = {}
        self._open_bytes = 0
        self._unbuilt_bytes = 0
        self._buffered = 0
        self._space_freed = asyncio.Event()
        # Held while one append waits for space, so that later ones queue behind it.
        self._admission = asyncio.Lock()
        self._slots = asyncio.Semaphore(self._config.parallel_uploads)
        self._order = CommitOrder()
        self._linger_timer: asyncio.TimerHandle | None = None
        self._open_span = tracing.NOT_TRACED
        self._in_flight: dict[BatchUpload, asyncio.Task[None]] = {}
        self._last: BatchUpload | None = None
        self._fencing = asyncio.Event()
        self._fenced: Exception | None = None
        self._rejection: Exception | None = None
        # New records must not overtake the log's older records of the same stream.
        if log is not None and next(iter(log.recover()), None) is not None:
            self._rejection = RecoveryNeededError()
        self._closed = False
        self._is_recovering = False

    async def __aenter__(self) -> Self:
        self._start()
        return self

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None and not self._closed:
            advice = "use `async with StreamWriter(...)` or `await writer.close()`"
            warn_unclosed(self, self._losses(), advice)

    def _losses(self) -> str:
        fate = "they may be lost" if self._log is None else "its write-ahead log keeps them"
        return f"{self._streams.describe_pending()} are not known to be committed, {fate}"

    @property
    def buffered_bytes(self) -> int:
        """Bytes admitted and not yet settled, overhead included, at most `max_buffer_bytes`."""
        return self._buffered

    @property
    def oldest_age_s(self) -> float:
        """Time since the oldest unsettled batch was sealed, in seconds, or 0 without one."""
        return next((batch.age_s for batch in self._in_flight), 0.0)

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeats of the session. They continue until `close`."""
        return self._heartbeat

    async def until_fenced(self) -> Exception:
        """Wait until another process or node replaces this one. Return the controllers' error."""
        await self._fencing.wait()
        assert self._fenced is not None
        return self._fenced

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
        return self._stream(stream_id).next_offset

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
        stream = self._stream(stream_id)
        # Type checks before calls: this method runs once a record, and the fast path is plain.
        if type(count) is not int or not 1 <= count <= INT32_MAX:
            count = check_int("count", count, 1, INT32_MAX)
        if timestamp_ms is None and max_timestamp_ms is None:
            times = NO_TIME
        else:
            times = time_bounds(timestamp_ms, max_timestamp_ms)

        if type(payload) is not bytes:
            payload = as_payload("payload", payload)
        size = len(payload)
        cost = size + RECORD_OVERHEAD + ACK_OVERHEAD

        # Appends that wait are served in order, so a newcomer queues behind them even if it fits.
        if self._admission.locked() or not self._has_space(stream, cost, size + RECORD_HEADER_SIZE):
            stream = await self._wait_for_space(stream_id, cost, size + RECORD_HEADER_SIZE)

        run = self._run_for(stream, count)
        # Most streams have no times, and a run without any needs no update.
        if times is not NO_TIME or run.min_timestamp_ms >= 0:
            run.cover(times)
        base_offset = run.end_offset
        header = run.add(payload, count)
        return self._account(
            run, base_offset, cost, size + RECORD_HEADER_SIZE, ((header, payload),)
        )

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
        stream = self._stream(stream_id)
        times = time_bounds(timestamp_ms, max_timestamp_ms)
        payloads = check_payloads(payloads)
        size = sum(map(len, payloads)) + RECORD_HEADER_SIZE * len(payloads)
        cost = size + (RECORD_OVERHEAD - RECORD_HEADER_SIZE) * len(payloads) + ACK_OVERHEAD

        if self._admission.locked() or not self._has_space(stream, cost, size):
            stream = await self._wait_for_space(stream_id, cost, size)

        run = self._run_for(stream, len(payloads))
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

        self._rejection, self._is_recovering = None, True
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
        self._seal_open_batch()
        await self._drain()
        self._raise_fenced()

    async def close(self, deadline_s: float | None = None) -> None:
        """Flush, then stop. Appends that still wait for space are rejected.

        Records that are not committed after `deadline_s` seconds, by default the configuration's
        `close_deadline_s`, fail with `WriterClosedError`. A write-ahead log keeps them.
        """
        if deadline_s is not None:
            check_seconds("deadline_s", deadline_s, may_be_zero=True)
        limit_s = self._config.close_deadline_s if deadline_s is None else deadline_s
        self._closed = True
        self._space_freed.set()

        try:
            async with asyncio.timeout(limit_s):
                self._seal_open_batch()
                await self._drain()
        except TimeoutError:
            _log.warning("close() abandoned %d uncommitted batches", len(self._in_flight))
        finally:
            is_clean = not self._in_flight and self._rejection is None
            for task in self._in_flight.values():
                task.cancel()
            if self._in_flight:
                await asyncio.wait(self._in_flight.values())
            # After the tasks, which use its threads and its pipeline.
            await self._uploader.close(0)
            self._threads.close()
            await self._heartbeat.close(cleanly=is_clean)

    async def _drain(self) -> None:
        """Wait until the last batch is settled, or the node is fenced."""
        if self._last is None or self._fenced is not None:
            return
        # A fenced node's batches may wait for a controller that never answers them.
        await self._last.wait_settled_or(self._fencing)

    # -- rejected appends

    def _stream(self, stream_id: int) -> WriterStream:
        """Return a stream that accepts appends, or raise why it does not."""
        check_not_forked("append")
        if self._closed:
            raise WriterClosedError(f"append to stream {stream_id} came after close")
        if self._rejection is not None:
            raise self._rejection

        stream = self._streams.require(stream_id, f"append to stream {stream_id}")
        if stream.failure is not None:
            raise stream.error_after_failure()
        return stream

    def _raise_fenced(self) -> None:
        if self._fenced is not None:
            raise self._fenced

    def _reject_appends(self, error: Exception) -> None:
        """Reject all appends with `error` from now on."""
        self._rejection = error
        self._space_freed.set()

    def _fence(self, error: Exception) -> None:
        """Fail everything at once: the process no longer owns its node id."""
        if self._fenced is not None:
            return

        _log.error("the writer stops permanently, start a new process for this node: %s", error)
        self._fenced = error
        self._reject_appends(error)
        self._fencing.set()

        for run in self._open.values():
            self._drop(run, error)
        self._open.clear()
        self._open_bytes = 0

        # A submitted batch may still be committed: only the controller's answer settles it.
        for batch in self._in_flight:
            if not batch.submitted.is_set():
                for run in batch.runs:
                    batch.failures.setdefault(run, error)
                    run.fail(error)

    # -- space in the buffer

    def _has_space(self, stream: WriterStream, cost: int, size: int) -> bool:
        # The first record of a stream in a batch also pays for its run.
        if stream not in self._open:
            cost += RUN_OVERHEAD
        if self._buffered + cost > self._config.max_buffer_bytes or size > UPLOAD_BYTES_MAX:
            return False
        if self._unbuilt_bytes > _UNBUILT_MAX and 2 * self._open_bytes > self._config.upload_bytes:
            return False
        return self._log is None or self._log.has_room(size)

    async def _wait_for_space(self, stream_id: int, cost: int, size: int) -> WriterStream:
        """Wait, in order, until `cost` bytes fit. Upload a large open batch early."""
        check_fits(stream_id, cost, size, self._config, self._log)
        async with self._admission:
            # The stream is looked up again each time: it may have failed during the wait.
            while not self._has_space(stream := self._stream(stream_id), cost, size):
                is_idle = len(self._in_flight) < self._config.parallel_uploads
                if is_idle or 2 * self._open_bytes >= self._config.upload_bytes:
                    self._seal_open_batch()
                self._space_freed.clear()
                await self._space_freed.wait()
            return stream

    def _release(self, cost: int) -> None:
        self._buffered -= cost
        self._space_freed.set()

    # -- the open batch

    def _run_for(self, stream: WriterStream, offsets: int) -> StreamRun:
        """Return the run for the next records of `stream`.

        Raises `LimitExceededError` if the stream has no such offsets left.
        """
        check_offsets(stream, offsets)
        run = self._open.get(stream)
        if run is not None:
            # The object format counts the offsets of a run in 32 bits.
            if run.end_offset + offsets - run.start_offset <= INT32_MAX:
                return run
            self._seal_open_batch()
        elif len(self._open) >= self._config.max_streams:
            self._seal_open_batch()

        if not self._open:
            self._open_span = tracing.begin(APPEND_SPAN)
        run = self._open[stream] = StreamRun(stream)
        run.cost = RUN_OVERHEAD
        self._buffered += RUN_OVERHEAD
        return run

    def _account(
        self,
        run: StreamRun,
        base_offset: int,
        cost: int,
        size: int,
        to_log: Sequence[tuple[bytes, bytes]],
    ) -> asyncio.Future[int]:
        """Account for an append that its run contains, and log it. Return its future.

        `to_log` is empty for a record that the log already has.
        """
        loop = self._loop or self._start()
        if tracing.is_on():
            self._open_span = self._open_span.share(APPEND_SPAN)
        if to_log:
            self._tally.count_append(run.end_offset - base_offset, size)

        ack: asyncio.Future[int] = loop.create_future()
        if self._logged is None or not to_log:
            run.add_ack(ack, base_offset)
        else:
            self._buffered += self._logged.append(run, to_log, base_offset, ack)

        run.stream.next_offset = run.end_offset
        run.cost += cost
        self._buffered += cost
        self._open_bytes += size

        if self._open_bytes >= self._config.upload_bytes:
            self._seal_open_batch()
        elif self._linger_timer is None:
            self._linger_timer = loop.call_later(self._config.linger_s, self._seal_open_batch)
        return ack

    async def _append_recovered(self, record: RecordBatch) -> asyncio.Future[int]:
        """Admit a record of the log, without logging it again."""
        cost = len(record.payload) + RECORD_OVERHEAD + ACK_OVERHEAD
        stream = await self._wait_for_space(record.stream_id, cost, 0)
        run = self._run_for(stream, record.count)
        run.require_next(record)
        run.cover(NO_TIME)
        run.add(record.payload, record.count)
        return self._account(run, record.base_offset, cost, record.encoded_size, ())

    def _seal_open_batch(self) -> None:
        """Start the upload of the open batch and begin an empty one."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if not self._open:
            return

        # Only an unsettled predecessor matters; a chain of settled ones would never be freed.
        before = None if self._last is None or self._last.settled.is_set() else self._last
        batch = BatchUpload(list(self._open.values()), self._open_bytes, before)
        batch.span, self._open_span = self._open_span, tracing.NOT_TRACED
        # Recovered records are trimmed once, after all of them are committed.
        if self._log is not None and not self._is_recovering:
            batch.log_end = self._log.end
        self._unbuilt_bytes += self._open_bytes
        self._open = {}
        self._open_bytes = 0
        self._last = batch

        # The task inherits the span of the batch, not of the append that happened to fill it.
        with batch.span.current():
            self._in_flight[batch] = asyncio.create_task(self._process_batch(batch))

    # -- a batch in flight

    async def _process_batch(self, batch: BatchUpload) -> None:
        """Encode, upload, commit and settle one batch."""
        try:
            await self._build(batch)
            # Encoding is outside: it is serial anyway, and must not block an upload.
            async with self._slots:
                with tracing.span("streammeta.upload", {"bytes": batch.encoded_bytes}):
                    await self._uploader.upload(batch)
            await self._order.wait_to_submit(batch)
            batch.exclude_failed_streams()

            with tracing.span("streammeta.commit", {"streams": len(batch.runs)}):
                submission = await self._uploader.submit(batch)
                self._order.mark_submitted(batch)
                await self._order.wait_to_settle(batch)
                await self._uploader.finish(batch, submission, self._order.hold)
            if self._trimmer is not None:
                await self._trimmer.settle(batch)
        except Exception as error:  # noqa: BLE001 - every caller receives it
            _log.exception("a batch of %d streams failed unexpectedly", len(batch.runs))
            for run in batch.runs:
                batch.failures.setdefault(run, error)
        finally:
            self._settle(batch)

    async def _build(self, batch: BatchUpload) -> None:
        try:
            await self._uploader.encode(batch)
        finally:
            self._unbuilt_bytes -= batch.encoded_bytes
            self._space_freed.set()

    def _settle(self, batch: BatchUpload) -> None:
        """Settle every append of the batch and release its bytes of the buffer."""
        was_submitted = batch.submitted.is_set()
        # The trimmer clears `log_end` of a batch whose records the log no longer needs.
        if self._trimmer is not None and batch.log_end is not None:
            self._trimmer.stop("a batch was not committed")

        del self._in_flight[batch]
        for run in batch.runs:
            if run in batch.committed:
                run.stream.acknowledged = run.end_offset
                run.succeed()
            else:
                cancelled = run.cut_short(was_submitted=was_submitted)
                self._fail(run, batch.failures.get(run) or cancelled)
            self._buffered -= run.cost

        lost = len(batch.runs) - len(batch.committed)
        batch.span.end(f"{lost} streams are not committed" if lost else "")
        batch.objects.clear()
        batch.uploaded.clear()
        self._order.mark_settled(batch)
        self._space_freed.set()

    def _fail(self, run: StreamRun, error: Exception) -> None:
        """Fail a run and the records of its stream in the open batch."""
        run.fail(error)
        if run.stream.failure is None:
            run.stream.failure = error
        # The whole node lost its identity, so no other batch can succeed.
        if is_fencing(error):
            self._fence(error)
        # With a log the later records are acknowledged already and stay in the log.
        if self._log is None and (later := self._open.pop(run.stream, None)) is not None:
            self._open_bytes -= later.encoded_bytes
            self._drop(later, run.stream.error_after_failure())

    def _drop(self, run: StreamRun, error: Exception) -> None:
        """Fail a run of the open batch."""
        run.fail(error)
        self._buffered -= run.cost
