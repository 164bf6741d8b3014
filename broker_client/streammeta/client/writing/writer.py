"""Stream writer: bounded buffering, batched uploads, acknowledgement by ordered commits.

Owns admission (bytes, order, push-back), the triggers of an upload (size, streams, linger_s, flush,
a full buffer) and the way of each batch: built and prepared in order, uploaded in parallel,
committed in order with several commits under way. After a stream's write failed nothing later of
that stream is committed until it is attached again, so its log never gets a hole. The contents of
an upload are the uploader's; early acknowledgement by a write-ahead log is in `writer_log`.
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
    check_items,
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
from streammeta.client.errors import RecoveryNeededError, StreamNotOpenedError, WriterClosedError
from streammeta.client.nodes.session import BrokerSession, Heartbeat, OpenedStream
from streammeta.client.resources.fork_check import check_not_forked
from streammeta.client.resources.resources import ClosedAtExit, StoreThreads, warn_unclosed
from streammeta.client.wal.disk.record_log import RecordLog
from streammeta.client.wal.disk.recovery import RecoveryReport, recover_into
from streammeta.client.writing.admission import check_fits, check_offsets, checked_streams
from streammeta.client.writing.batch import APPEND_SPAN, BatchUpload, CommitOrder
from streammeta.client.writing.record_buffer import (
    NO_TIME,
    StreamRun,
    WriterStream,
    checked_payloads,
    time_bounds,
)
from streammeta.client.writing.uploader import Uploader, is_fencing
from streammeta.client.writing.wal_acks import LoggedAcks, LogTrimmer
from streammeta.rpc import tracing
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore

_UNBUILT_MAX = 1024 * 1024
"""While more than this waits to be moved into objects, the open batch gets only half full: what is
moved is for a moment in memory that a writer in a hurry would not let go."""

_log = logging.getLogger(__name__)


class StreamWriter(ClosedAtExit):
    """Writes records of many streams of one session through objects in a store.

    Use it from one event loop, as an async context manager or with `close`. From its first append,
    or from entering it on, it sends the session's heartbeats: close it when its streams are closed.
    With `durability="wal"` it takes a `log`, an open write-ahead log, which stays the caller's to
    close.
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
            check_offers("log", log, "trim", "an open log; await WriteAheadLog.open(...)")
        self._config.check_log(log)
        self._session = session
        self._tally = session.client.tally
        self._threads = StoreThreads(store, self._config.upload_threads, "upload")
        self._heartbeat = Heartbeat(session, self._fence)
        self._uploader = Uploader(
            session,
            self._threads,
            self._config,
            observer or SilentObserver(),
            is_persistent=log is not None,
        )
        self._log = log
        self._trimmer = None if log is None else LogTrimmer(log)
        self._logged = None if log is None else LoggedAcks(log, self._release, self._bar)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, WriterStream] = {}
        self._open: dict[WriterStream, StreamRun] = {}
        self._open_bytes = 0
        self._unbuilt_bytes = 0
        self._buffered = 0
        self._room = asyncio.Event()
        self._admission = asyncio.Lock()
        self._slots = asyncio.Semaphore(self._config.parallel_uploads)
        self._order = CommitOrder()
        self._linger_timer: asyncio.TimerHandle | None = None
        self._open_span = tracing.NOT_TRACED
        self._under_way: dict[BatchUpload, asyncio.Task[None]] = {}
        self._last: BatchUpload | None = None
        self._fencing = asyncio.Event()
        self._fenced: Exception | None = None
        self._barred: Exception | None = None
        if log is not None and next(iter(log.recover()), None) is not None:
            self._barred = RecoveryNeededError()
        self._closed = False
        self._is_recovering = False

    async def __aenter__(self) -> Self:
        self._start()
        return self

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None and not self._closed:
            warn_unclosed(
                self,
                self._losses(),
                "use `async with StreamWriter(...)` or `await writer.close()`",
            )

    def _losses(self) -> str:
        pending = [one for one in self._streams.values() if one.is_pending]
        offsets = sum(one.next_offset - one.acknowledged for one in pending)
        fate = "they may be lost" if self._log is None else "its write-ahead log keeps them"
        return f"{offsets} offsets of {len(pending)} streams are not known to be committed, {fate}"

    @property
    def buffered_bytes(self) -> int:
        """Bytes admitted and not yet settled, overhead included, at most `max_buffer_bytes`."""
        return self._buffered

    @property
    def oldest_age_s(self) -> float:
        """Time since the oldest batch that is not settled was closed, in seconds; 0 without one."""
        return next((one.age_s for one in self._under_way), 0.0)

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeats of the session, which go on until `close`."""
        return self._heartbeat

    async def until_fenced(self) -> Exception:
        """Wait until the process no longer holds its node id; return what said so."""
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
        opened = checked_streams(streams)
        self.require_attachable(one.stream_id for one in opened)
        for one in opened:
            self._streams[one.stream_id] = WriterStream(
                one.stream_id, one.epoch, one.next_offset, acknowledged=one.next_offset
            )

    def require_attachable(self, stream_ids: Iterable[int]) -> None:
        """Raise `ValueError` for a stream that has records on their way and has not failed."""
        for stream in map(self._streams.get, stream_ids):
            if stream is not None and stream.failure is None and stream.is_pending:
                raise ValueError(
                    f"stream {stream.stream_id} has records that are not acknowledged yet; flush"
                    " before attaching it again"
                )

    def detach(self, stream_ids: Iterable[int]) -> None:
        """Accept no more appends to these streams; what was appended still goes its way."""
        for stream_id in check_items("stream_ids", stream_ids, "a sequence of stream ids"):
            self._streams.pop(stream_id, None)

    def next_offset(self, stream_id: int) -> int:
        """Return the offset that the next append to the stream will get."""
        return self._stream(stream_id).next_offset

    def ends(self, stream_id: int) -> tuple[int, int]:
        """Return the ends of what is known to be committed to the stream, and of all appends."""
        stream = self._streams.get(stream_id)
        if stream is None:
            raise StreamNotOpenedError(f"stream {stream_id}", detail="not attached")
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
        """Admit one record of `count` offsets; wait while the buffer is full.

        The result is a future of the record's base offset, done when the object that holds the
        record is committed, or with a write-ahead log when that has it on disk. Records of a
        stream are committed in the order of their appends. `timestamp_ms` is the time of the
        record in ms since 1970, of its earliest part if `max_timestamp_ms` gives that of the
        latest; a record without one can't be looked up by time.

        Raises what bars the stream or the node, `LimitExceededError` for a record larger than the
        buffer, `WriterClosedError` after `close`.
        """
        stream = self._stream(stream_id)
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
        if self._admission.locked() or not self._has_room(stream, cost, size + RECORD_HEADER_SIZE):
            stream = await self._wait_for_room(stream_id, cost, size + RECORD_HEADER_SIZE)
        run = self._run_for(stream, count)
        if times is not NO_TIME or run.min_timestamp_ms >= 0:
            run.cover(times)
        base_offset = run.end_offset
        header = run.add(payload, count)
        return self._appended(
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

        Much cheaper than as many calls of `append`. The future is of the first one's offset, done
        when all are committed; all else as `append`, the times being those of all records.
        """
        stream = self._stream(stream_id)
        times = time_bounds(timestamp_ms, max_timestamp_ms)
        payloads = checked_payloads(payloads)
        size = sum(map(len, payloads)) + RECORD_HEADER_SIZE * len(payloads)
        cost = size + (RECORD_OVERHEAD - RECORD_HEADER_SIZE) * len(payloads) + ACK_OVERHEAD
        if self._admission.locked() or not self._has_room(stream, cost, size):
            stream = await self._wait_for_room(stream_id, cost, size)
        run = self._run_for(stream, len(payloads))
        run.cover(times)
        base_offset = run.end_offset
        records = [(run.add(payload, 1), payload) for payload in payloads]
        return self._appended(run, base_offset, cost, size, records)

    async def recover(self) -> RecoveryReport:
        """Upload what the write-ahead log holds and the map does not, and only that.

        Without it a log that holds something takes no appends. Call it after the inherited streams
        are attached, and before the first append. Records that can't be committed any more are set
        aside beside the log; the report says so.

        Raises the first failure; the log is then kept as it was.
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

        self._barred, self._is_recovering = None, True
        try:
            report = await recover_into(self._log, self._session, upload, self._threads.store)
            await self.flush()
            await asyncio.sleep(0)  # the last callbacks
            if failures:
                raise failures[0]
        except Exception as error:
            self._bar(error)
            raise
        finally:
            self._is_recovering = False
        self._log.trim(self._log.recovered_end)
        return report

    # -- ending

    async def flush(self) -> None:
        """Upload what is buffered now and wait until each record of it is committed or failed.

        Which of the two, each record's own future tells. Raises only what bars the whole node.
        """
        self._raise_fenced()
        self._archive()
        await self._drained()
        self._raise_fenced()

    async def close(self, deadline_s: float | None = None) -> None:
        """Flush, then stop; appends that still wait for room are refused.

        What is not committed after `deadline_s` seconds, by default `close_deadline_s` of the
        configuration, fails with `WriterClosedError`; in a write-ahead log it stays.
        """
        if deadline_s is not None:
            check_seconds("deadline_s", deadline_s, may_be_zero=True)
        self._closed = True
        self._room.set()
        try:
            async with asyncio.timeout(
                self._config.close_deadline_s if deadline_s is None else deadline_s
            ):
                self._archive()
                await self._drained()
        except TimeoutError:
            _log.warning("close gave up %d batches that are not committed", len(self._under_way))
        finally:
            is_clean = not self._under_way and self._barred is None
            for task in self._under_way.values():
                task.cancel()
            if self._under_way:
                await asyncio.wait(self._under_way.values())
            await self._uploader.close(0)
            self._threads.close()
            await self._heartbeat.close(cleanly=is_clean)

    async def _drained(self) -> None:
        """Wait until the last batch is settled, or the node is fenced."""
        if self._last is None or self._fenced is not None:
            return
        waits = [asyncio.create_task(one.wait()) for one in (self._last.settled, self._fencing)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # -- what bars an append

    def _stream(self, stream_id: int) -> WriterStream:
        """Find a stream that takes appends, or raise what bars it."""
        check_not_forked("append")
        if self._closed:
            raise WriterClosedError(f"append to stream {stream_id} came after close")
        if self._barred is not None:
            raise self._barred
        stream = self._streams.get(stream_id)
        if stream is None:
            check_int("stream_id", stream_id)
            raise StreamNotOpenedError(f"append to stream {stream_id}", detail="not attached")
        if stream.failure is not None:
            raise stream.failed_before()
        return stream

    def _raise_fenced(self) -> None:
        if self._fenced is not None:
            raise self._fenced

    def _bar(self, error: Exception) -> None:
        """Refuse all appends from now on."""
        self._barred = error
        self._room.set()

    def _fence(self, error: Exception) -> None:
        """Fail everything, at once: the process no longer holds its node id."""
        if self._fenced is not None:
            return
        _log.error("the writer stops for good: %s", error)
        self._fenced = error
        self._bar(error)
        self._fencing.set()
        for run in self._open.values():
            self._drop(run, error)
        self._open.clear()
        self._open_bytes = 0
        for batch in self._under_way:
            if not batch.submitted.is_set():
                for run in batch.runs:
                    batch.failures.setdefault(run, error)
                    run.fail(error)

    # -- room

    def _has_room(self, stream: WriterStream, cost: int, size: int) -> bool:
        if stream not in self._open:
            cost += RUN_OVERHEAD
        if self._buffered + cost > self._config.max_buffer_bytes or size > UPLOAD_BYTES_MAX:
            return False
        if self._unbuilt_bytes > _UNBUILT_MAX and 2 * self._open_bytes > self._config.upload_bytes:
            return False
        return self._log is None or self._log.has_room(size)

    async def _wait_for_room(self, stream_id: int, cost: int, size: int) -> WriterStream:
        """Wait, in order, until `cost` bytes fit; upload early what fills the buffer."""
        check_fits(stream_id, cost, size, self._config, self._log)
        async with self._admission:
            while not self._has_room(stream := self._stream(stream_id), cost, size):
                is_idle = len(self._under_way) < self._config.parallel_uploads
                if is_idle or 2 * self._open_bytes >= self._config.upload_bytes:
                    self._archive()
                self._room.clear()
                await self._room.wait()
            return stream

    def _release(self, cost: int) -> None:
        self._buffered -= cost
        self._room.set()

    # -- the open batch

    def _run_for(self, stream: WriterStream, offsets: int) -> StreamRun:
        """Return the run that the next records of `stream` go to.

        Raises `LimitExceededError` if the stream has no such offsets left.
        """
        check_offsets(stream, offsets)
        run = self._open.get(stream)
        if run is not None:
            if run.end_offset + offsets - run.start_offset <= INT32_MAX:
                return run
            self._archive()
        elif len(self._open) >= self._config.max_streams:
            self._archive()
        if not self._open:
            self._open_span = tracing.begin(APPEND_SPAN)
        run = self._open[stream] = StreamRun(stream)
        run.cost = RUN_OVERHEAD
        self._buffered += RUN_OVERHEAD
        return run

    def _appended(
        self,
        run: StreamRun,
        base_offset: int,
        cost: int,
        size: int,
        to_log: Sequence[tuple[bytes, bytes]],
    ) -> asyncio.Future[int]:
        """Account for an append that is in its run, and log it; return its future.

        One that the log holds already has nothing `to_log`.
        """
        loop = self._loop or self._start()
        if tracing.is_on():
            self._open_span = self._open_span.shared(APPEND_SPAN)
        if to_log:
            self._tally.appended(run.end_offset - base_offset, size)
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
            self._archive()
        elif self._linger_timer is None:
            self._linger_timer = loop.call_later(self._config.linger_s, self._archive)
        return ack

    async def _append_recovered(self, record: RecordBatch) -> asyncio.Future[int]:
        """Admit a record that the log holds already."""
        cost = len(record.payload) + RECORD_OVERHEAD + ACK_OVERHEAD
        stream = await self._wait_for_room(record.stream_id, cost, 0)
        run = self._run_for(stream, record.count)
        if record.base_offset != run.end_offset:
            raise ValueError(
                f"record of stream {record.stream_id} starts at offset {record.base_offset},"
                f" wanted {run.end_offset}"
            )
        run.cover(NO_TIME)
        run.add(record.payload, record.count)
        return self._appended(run, record.base_offset, cost, record.encoded_size, ())

    def _archive(self) -> None:
        """Send the open batch on its way and begin an empty one."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if not self._open:
            return
        before = None if self._last is None or self._last.settled.is_set() else self._last
        batch = BatchUpload(list(self._open.values()), self._open_bytes, before)
        batch.span, self._open_span = self._open_span, tracing.NOT_TRACED
        if self._log is not None and not self._is_recovering:
            batch.log_end = self._log.end
        self._unbuilt_bytes += self._open_bytes
        self._open = {}
        self._open_bytes = 0
        self._last = batch
        with batch.span.current():
            self._under_way[batch] = asyncio.create_task(self._carry(batch))

    # -- a batch on its way

    async def _carry(self, batch: BatchUpload) -> None:
        """Take one batch through its stages."""
        try:
            await self._build(batch)
            async with self._slots:
                with tracing.span("streammeta.upload", {"bytes": batch.encoded_bytes}):
                    await self._uploader.upload(batch)
            await self._order.submission(batch)
            self._bar_failed(batch)
            with tracing.span("streammeta.commit", {"streams": len(batch.runs)}):
                submission = await self._uploader.submit(batch)
                self._order.submitted(batch)
                await self._order.settlement(batch)
                await self._uploader.finish(batch, submission, self._order.hold)
            if self._trimmer is not None:
                await self._trimmer.settle(batch)
        except Exception as error:  # noqa: BLE001 - every caller gets it
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
            self._room.set()

    def _bar_failed(self, batch: BatchUpload) -> None:
        """Take out of the batch what must not be committed after earlier failures."""
        for run in batch.runs:
            if run.stream.failure is not None:
                batch.failures.setdefault(run, run.stream.failed_before())

    def _settle(self, batch: BatchUpload) -> None:
        """Answer every caller of the batch and give its bytes back to the buffer."""
        was_submitted = batch.submitted.is_set()
        if self._trimmer is not None and batch.log_end is not None:
            self._trimmer.stop("a batch was not committed")
        del self._under_way[batch]
        for run in batch.runs:
            if run in batch.committed:
                run.stream.acknowledged = run.end_offset
                run.succeed()
            else:
                self._fail(
                    run, batch.failures.get(run) or run.cut_short(was_submitted=was_submitted)
                )
            self._buffered -= run.cost
        lost = len(batch.runs) - len(batch.committed)
        batch.span.end(f"{lost} streams are not committed" if lost else "")
        batch.objects.clear()
        batch.uploaded.clear()
        self._order.settled(batch)
        self._room.set()

    def _fail(self, run: StreamRun, error: Exception) -> None:
        """Fail a run, and with it what its stream has in the open batch."""
        run.fail(error)
        if run.stream.failure is None:
            run.stream.failure = error
        if is_fencing(error):
            self._fence(error)
        if self._log is None and (later := self._open.pop(run.stream, None)) is not None:
            self._open_bytes -= later.encoded_bytes
            self._drop(later, run.stream.failed_before())

    def _drop(self, run: StreamRun, error: Exception) -> None:
        """Fail a run of the open batch."""
        run.fail(error)
        self._buffered -= run.cost
