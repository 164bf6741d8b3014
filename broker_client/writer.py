"""Writing: records go into a bounded buffer, leave it in batches, and are acknowledged by commits.

Owns admission (bytes, order, push-back), the triggers of an upload (size, streams, linger, flush)
and the order of batches: prepared in order, uploaded in parallel, committed in order. After a
stream's write failed nothing later of that stream is committed until it is attached again, so its
log never gets a hole. What an upload is made of is `upload`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from broker_client.errors import (
    LimitExceededError,
    StreamFailedError,
    StreamNotOpenedError,
    WriterClosedError,
)
from broker_client.heartbeat import Heartbeat
from broker_client.observer import SilentObserver, UploadObserver
from broker_client.session import BrokerSession, OpenedStream
from broker_client.store_threads import StoreThreads
from broker_client.upload import BatchUpload, Uploader, UploadSettings, is_fencing
from broker_client.upload_batch import RECORD_OVERHEAD, StreamRun, WriterStream
from storage.object_format.record import INT32_MAX, RecordBatch
from storage.object_store.base import ObjectStore

_MIB = 1024 * 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """Bounds and triggers of a writer; sizes in bytes, times in seconds unless named otherwise."""

    max_buffer_bytes: int = 128 * _MIB  # payload and overhead admitted and not yet acknowledged
    upload_bytes: int = 16 * _MIB  # this much in the open batch uploads it
    linger: float = 0.25  # a batch uploads this long after its first record, at the latest
    max_streams: int = 9_999  # a batch has no more; each may need an object id of its own
    split_bytes: int = 8 * _MIB  # a stream with this much payload gets a stream object
    block_bytes: int = 512 * 1024  # payload after which a data block closes
    parallel_uploads: int = 4  # batches prepared or uploading at the same time
    upload_threads: int = 8  # objects uploading at the same time
    ttl_ms: int = 600_000  # how long prepared ids stay valid, 1000..604800000
    commit_deadline: float = 60.0  # how long one commit is repeated
    reupload_attempts: int = 3  # new uploads of a batch whose ids expired; 0: fail instead

    def __post_init__(self) -> None:
        """Refuse bounds that could never be met."""
        for name in ("upload_bytes", "split_bytes", "block_bytes", "parallel_uploads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least 1")
        if self.max_buffer_bytes < self.upload_bytes:
            raise ValueError(
                f"max_buffer_bytes is {self.max_buffer_bytes}, wanted at least upload_bytes,"
                f" {self.upload_bytes}: no batch would ever reach its size"
            )
        if not 1 <= self.max_streams < 10_000:
            raise ValueError(f"max_streams is {self.max_streams}, wanted 1..9999")
        if self.linger < 0 or self.reupload_attempts < 0:
            raise ValueError("linger and reupload_attempts must not be negative")


class StreamWriter:
    """Writes records of many streams of one session through objects in a store.

    Use it from one event loop, as an async context manager or with `close`. From its first append,
    or from entering it on, it sends the session's heartbeats: close it when its streams are closed.
    """

    def __init__(
        self,
        session: BrokerSession,
        store: ObjectStore,
        config: WriterConfig | None = None,
        observer: UploadObserver | None = None,
    ) -> None:
        self._config = config or WriterConfig()
        self._threads = StoreThreads(store, self._config.upload_threads, "upload")
        settings = UploadSettings(
            split_bytes=self._config.split_bytes,
            block_bytes=self._config.block_bytes,
            ttl_ms=self._config.ttl_ms,
            commit_deadline=self._config.commit_deadline,
            reupload_attempts=self._config.reupload_attempts,
        )
        self._heartbeat = Heartbeat(session, self._on_taken_over)
        self._uploader = Uploader(session, self._threads, settings, observer or SilentObserver())
        self._streams: dict[int, WriterStream] = {}
        self._open: dict[WriterStream, StreamRun] = {}
        self._open_payload = 0
        self._buffered = 0
        self._room = asyncio.Event()
        self._admission = asyncio.Lock()
        self._slots = asyncio.Semaphore(self._config.parallel_uploads)
        self._linger_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None
        self._fenced: Exception | None = None
        self._closed = False

    async def __aenter__(self) -> StreamWriter:
        self._heartbeat.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def buffered_bytes(self) -> int:
        """Bytes admitted and not yet acknowledged, never more than `max_buffer_bytes`."""
        return self._buffered

    def attach(self, streams: Iterable[OpenedStream]) -> None:
        """Accept appends to `streams`, each from its next offset on.

        Attaching a stream again, after it was opened again, clears its failure. Raises
        `ValueError` if it still has records on their way: `flush` first.
        """
        opened = list(streams)
        for one in opened:
            known = self._streams.get(one.stream_id)
            if known is not None and known.failure is None and self._is_pending(known):
                raise ValueError(
                    f"stream {one.stream_id} has records that are not acknowledged yet; flush"
                    " before attaching it again"
                )
        for one in opened:
            self._streams[one.stream_id] = WriterStream(
                one.stream_id, one.epoch, one.next_offset, acknowledged=one.next_offset
            )

    def detach(self, stream_ids: Iterable[int]) -> None:
        """Accept no more appends to these streams; what was appended still goes its way."""
        for stream_id in stream_ids:
            self._streams.pop(stream_id, None)

    def next_offset(self, stream_id: int) -> int:
        """Return the offset that the next append to the stream will get."""
        return self._stream(stream_id).next_offset

    async def append(self, stream_id: int, payload: bytes, count: int = 1) -> asyncio.Future[int]:
        """Admit one record of `count` offsets; wait while the buffer is full.

        The result is a future of the record's base offset, done when the object that holds the
        record is committed. Records of a stream are committed in the order of their appends.
        Raises what bars the stream, `LimitExceededError` for a record larger than the buffer,
        `WriterClosedError` after `close`.
        """
        self._stream(stream_id)
        if not 1 <= count <= INT32_MAX:
            raise ValueError(f"count is {count}, wanted 1..{INT32_MAX}")
        self._heartbeat.start()
        cost = len(payload) + RECORD_OVERHEAD
        if cost > self._config.max_buffer_bytes:
            raise LimitExceededError(
                f"record of stream {stream_id}",
                detail=f"it takes {cost} bytes, the buffer has {self._config.max_buffer_bytes}",
            )
        if self._admission.locked() or not self._has_room(cost):
            async with self._admission:
                await self._wait_for_room(cost)
        return self._admit(self._stream(stream_id), bytes(payload), count, cost)

    async def flush(self) -> None:
        """Upload what is buffered now and wait until each record of it is committed or failed.

        Which of the two, each record's own future tells.
        """
        self._archive()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Flush, then stop; appends that still wait for room are refused."""
        self._closed = True
        self._room.set()
        try:
            await self.flush()
        finally:
            self._threads.close()
            await self._heartbeat.stop()

    def _stream(self, stream_id: int) -> WriterStream:
        """Find a stream that takes appends, or raise what bars it."""
        if self._closed:
            raise WriterClosedError(f"append to stream {stream_id} came after close")
        if self._fenced is not None:
            raise self._fenced
        stream = self._streams.get(stream_id)
        if stream is None:
            raise StreamNotOpenedError(f"append to stream {stream_id}", detail="not attached")
        if stream.failure is not None:
            raise _failed_before(stream)
        return stream

    def _on_taken_over(self, error: Exception) -> None:
        self._fenced = error
        self._room.set()

    def _is_pending(self, stream: WriterStream) -> bool:
        return stream.acknowledged < stream.next_offset

    def _has_room(self, cost: int) -> bool:
        return self._buffered + cost <= self._config.max_buffer_bytes

    async def _wait_for_room(self, cost: int) -> None:
        """Wait, as the only one, until `cost` bytes fit; upload early what fills the buffer."""
        while not self._has_room(cost) and not self._closed and self._fenced is None:
            self._archive()
            self._room.clear()
            await self._room.wait()

    def _admit(
        self, stream: WriterStream, payload: bytes, count: int, cost: int
    ) -> asyncio.Future[int]:
        run = self._open.get(stream)
        if run is None:
            if len(self._open) >= self._config.max_streams:
                self._archive()
            run = self._open[stream] = StreamRun(stream)
        record = RecordBatch(stream.stream_id, stream.epoch, stream.next_offset, count, payload)
        ack: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        run.add(record, ack)
        stream.next_offset = record.end_offset
        self._buffered += cost
        self._open_payload += len(payload)
        if self._open_payload >= self._config.upload_bytes:
            self._archive()
        elif self._linger_timer is None:
            loop = asyncio.get_running_loop()
            self._linger_timer = loop.call_later(self._config.linger, self._archive)
        return ack

    def _archive(self) -> None:
        """Send the open batch on its way and begin an empty one."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if not self._open:
            return
        batch = BatchUpload(list(self._open.values()))
        self._open = {}
        self._open_payload = 0
        task = asyncio.create_task(self._carry(batch, self._last))
        self._last = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, batch: BatchUpload, before: asyncio.Task[None] | None) -> None:
        """Take one batch through its stages."""
        try:
            async with self._slots:
                if self._fenced is None:
                    await self._uploader.upload(batch, batch.runs)
            if before is not None:
                await asyncio.wait([before])
            self._bar_failed(batch)
            await self._uploader.commit(batch)
        except Exception as error:  # noqa: BLE001 - callers wait: whatever it is, they hear of it
            _log.exception("a batch of %d streams failed unexpectedly", len(batch.runs))
            for run in batch.runs:
                batch.failures.setdefault(run, error)
        finally:
            self._settle(batch)

    def _bar_failed(self, batch: BatchUpload) -> None:
        """Take out of the batch what must not be committed after earlier failures."""
        for run in batch.runs:
            if self._fenced is not None:
                batch.failures.setdefault(run, self._fenced)
            elif run.stream.failure is not None:
                batch.failures[run] = _failed_before(run.stream)

    def _settle(self, batch: BatchUpload) -> None:
        """Answer every caller of the batch and give its bytes back to the buffer."""
        for run in batch.runs:
            if run in batch.committed:
                run.stream.acknowledged = run.end_offset
                run.succeed()
            else:
                self._fail(run, batch.failures.get(run) or _cut_short(run))
            self._buffered -= run.buffered_bytes
        self._room.set()

    def _fail(self, run: StreamRun, error: Exception) -> None:
        """Fail a run, and with it what its stream has in the open batch."""
        run.fail(error)
        if run.stream.failure is None:
            run.stream.failure = error
        if is_fencing(error):
            self._fenced = error
        later = self._open.pop(run.stream, None)
        if later is not None:
            later.fail(_failed_before(run.stream))
            self._buffered -= later.buffered_bytes
            self._open_payload -= later.payload_bytes


def _cut_short(run: StreamRun) -> WriterClosedError:
    return WriterClosedError(
        f"the upload of stream {run.stream.stream_id} [{run.start_offset}, {run.end_offset}) was"
        " cancelled; it may have been committed, open the stream again to see its next offset"
    )


def _failed_before(stream: WriterStream) -> StreamFailedError:
    error = StreamFailedError(
        f"write to stream {stream.stream_id}", detail=f"first failure: {stream.failure}"
    )
    error.__cause__ = stream.failure
    return error
