"""Writer to shared streams: gathers appends of all streams, and learns their offsets at the commit.

`shared_core` decides when to seal the buffer, which buffer to store and to commit, and the outcome
of each append. This module owns the futures, timers and tasks, and carries that out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from streammeta.client import arguments
from streammeta.client.commits.pipeline import CommitPipeline
from streammeta.client.config import UPLOAD_BYTES_MAX, SilentObserver, UploadObserver, WriterConfig
from streammeta.client.deprecations import find_rejection_callback
from streammeta.client.errors import (
    BrokerClientError,
    ControllerUnavailableError,
    LimitExceededError,
    StorageError,
)
from streammeta.client.nodes.session import BrokerSession
from streammeta.client.resources.fork_check import check_not_forked
from streammeta.client.resources.resources import ClosedAtExit, StoreThreads, warn_unclosed
from streammeta.client.resources.tally import UPLOAD_ANEW
from streammeta.client.writing import shared_core
from streammeta.client.writing.record_buffer import check_payloads, time_bounds
from streammeta.client.writing.shared_batches import (
    Producer,
    SharedBatch,
    SharedCommit,
    SharedVerdict,
    encode_shared,
)
from streammeta.client.writing.shared_core import SharedUpload, SharedWriterCore
from streammeta.client.writing.store_uploads import StoreUploads
from streammeta.rpc import tracing
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import common_pb2

_log = logging.getLogger(__name__)


class SharedWriter(ClosedAtExit):
    """Appends to shared streams of a cluster, in the name of one session.

    Use it from one event loop, as an async context manager or with `close`. It sends no heartbeats:
    close it before the writer of the session, which does.
    """

    def __init__(
        self,
        session: BrokerSession,
        store: ObjectStore,
        config: WriterConfig | None = None,
        observer: UploadObserver | None = None,
    ) -> None:
        arguments.check_session(session)
        arguments.check_store(store)
        self._config = WriterConfig() if config is None else config
        self._observer = observer or SilentObserver()
        self._on_rejected = find_rejection_callback(self._observer)
        self._tally = session.client.tally
        self._namespace = session.namespace
        self._core = SharedWriterCore(self._config)
        self._threads = StoreThreads(store, self._config.parallel_uploads, "shared-upload")
        self._uploads = StoreUploads(session, self._threads, self._config)
        self._pipeline = CommitPipeline(
            session.client, session.node, deadline_s=self._config.commit_deadline_s
        )
        # One thread: two would encode no faster.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="shared-encode")
        self._linger_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __del__(self) -> None:
        if (core := getattr(self, "_core", None)) is not None and core.buffered:
            warn_unclosed(
                self,
                f"{core.buffered} bytes of appends to shared streams are not known to be committed",
                "use `async with SharedWriter(...)` or `await writer.close()`",
            )

    @property
    def buffered_bytes(self) -> int:
        """Bytes of appends without an answer, overhead included, at most `max_buffer_bytes`."""
        return self._core.buffered

    # -- appending

    async def append(
        self,
        stream_id: int,
        record: bytes | Sequence[bytes],
        count: int = 1,
        *,
        producer: Producer | None = None,
        timestamp_ms: int | None = None,
        max_timestamp_ms: int | None = None,
    ) -> asyncio.Future[int]:
        """Admit a batch: one record of `count` offsets, or a sequence of records of one offset.

        Wait while the buffer is full. The result is a future of the batch's first offset, which the
        commit of its object assigns. The batches that this writer commits in a stream are in the
        order of their appends. A batch of a `producer` that was committed before gets its first
        offset again. The times are as in `StreamWriter.append`.

        Raises `LimitExceededError` for a batch larger than the buffer, `WriterClosedError` after
        `close`, and the error of a fenced node. The future fails with the error of the rejected
        batch, such as `StreamKindMismatchError`, `OutOfOrderSequenceError`, `ProducerFencedError`,
        or with the error of its upload. Commits without an answer are repeated until it is known.
        """
        check_not_forked("append")
        self._core.require_accepting()
        arguments.check_int("stream_id", stream_id)
        arguments.check_int("count", count, 1, arguments.INT32_MAX)
        if producer is not None:
            arguments.check_kind("producer", producer, Producer, "a Producer, or None")
        times = time_bounds(timestamp_ms, max_timestamp_ms)
        records = _records(record, count)

        ack: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        batch = SharedBatch(stream_id, records, ack, producer, times)
        self._require_fit(batch)
        if not self._core.admit(batch):
            await self._wait_for_space(batch)
        self._tally.count_append(batch.count, batch.size)
        self._carry_out()
        return ack

    def _require_fit(self, batch: SharedBatch) -> None:
        limits = (
            (batch.cost, "the buffer has", self._config.max_buffer_bytes),
            (batch.size, "an object at most", UPLOAD_BYTES_MAX),
            (batch.count, "a batch at most", arguments.INT32_MAX),
        )
        for taken, holder, most in limits:
            if taken > most:
                raise LimitExceededError(
                    f"record of stream {batch.stream_id}",
                    detail=f"it takes {taken}, {holder} {most}",
                )

    async def _wait_for_space(self, batch: SharedBatch) -> None:
        """Wait, in order, until a batch is admitted."""
        space = asyncio.Event()
        self._core.wait(space)
        try:
            while True:
                self._core.require_accepting()
                if self._core.admit(batch, space):
                    return
                self._core.make_space()
                self._carry_out()
                space.clear()
                await space.wait()
        finally:
            self._core.leave(space)
            self._carry_out()

    # -- ending

    async def flush(self) -> None:
        """Upload all appends now, and wait until each has its offset or has failed.

        Raises only an error that fences the whole node.
        """
        if self._core.fenced is not None:
            raise self._core.fenced
        await self._drain()
        if self._core.fenced is not None:
            raise self._core.fenced

    async def close(self, deadline_s: float | None = None) -> None:
        """Flush, then stop. Appends that still wait for space are rejected.

        Appends without an answer after `deadline_s` seconds, by default the configuration's
        `close_deadline_s`, fail with `WriterClosedError`.
        """
        if deadline_s is not None:
            arguments.check_seconds("deadline_s", deadline_s, may_be_zero=True)
        limit_s = self._config.close_deadline_s if deadline_s is None else deadline_s
        self._core.close()
        try:
            async with asyncio.timeout(limit_s):
                await self._drain()
        except TimeoutError:
            _log.warning("close() abandoned appends to shared streams")
        finally:
            self._stop_timer()
            self._core.abandon()
            self._carry_out()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._pipeline.close(0)
            self._encoder.shutdown(wait=False, cancel_futures=True)
            self._threads.close()

    async def _drain(self) -> None:
        answered = asyncio.Event()
        self._core.flush(answered)
        self._carry_out()
        await answered.wait()

    # -- effects

    def _carry_out(self) -> None:
        """Carry out the effects of the last events, in order."""
        effects, self._core.effects = self._core.effects, []
        for effect in effects:
            match effect:
                case shared_core.Wake():
                    effect.waiter.set()
                case shared_core.BufferOpened():
                    self._open_buffer()
                case shared_core.Upload():
                    self._start(self._store(effect.upload))
                case shared_core.Submit():
                    self._start(self._commit(effect.upload))

    def _open_buffer(self) -> None:
        self._stop_timer()
        loop = asyncio.get_running_loop()
        linger_s = self._config.shared_linger_ms / 1000
        self._linger_timer = loop.call_later(linger_s, self._end_linger)

    def _end_linger(self) -> None:
        self._core.seal()
        self._carry_out()

    def _stop_timer(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # A task serves many appends, so it is outside the trace of the one that starts it.
        task = asyncio.get_running_loop().create_task(work, context=tracing.outside())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- a buffer in flight

    async def _store(self, upload: SharedUpload) -> None:
        """Encode a buffer, unless it is encoded, and put its object under a fresh id."""
        try:
            if upload.object_id >= 0:
                self._tally.retries[UPLOAD_ANEW] += 1
                # After an expiry the ids of the same age have expired too.
                self._uploads.discard_ids()
            object_id = await self._put(upload)
        except Exception as error:  # noqa: BLE001 - every caller receives it
            if not isinstance(error, BrokerClientError | StorageError):
                _log.exception("the upload of a buffer failed unexpectedly")
            self._core.not_stored(upload, error)
        else:
            self._core.stored(upload, object_id)
        self._carry_out()

    async def _put(self, upload: SharedUpload) -> int:
        if upload.content is None:
            # All batches may have gone to a later buffer.
            if not upload.batches:
                return -1
            build = partial(encode_shared, tuple(upload.batches), self._config.block_bytes)
            loop = asyncio.get_running_loop()
            upload.content = await loop.run_in_executor(self._encoder, build)

        taken = await self._uploads.prepare(1)
        (object_id,) = taken.ids
        await self._notify(self._observer.on_prepared(taken.ids, taken.deadline_ms))
        failure = await self._uploads.put(object_id, upload.content.data)
        if failure is not None:
            await self._notify(self._on_rejected([object_id], failure))
            raise failure
        await self._notify(self._observer.on_uploaded([key_for(object_id, self._namespace)]))
        return object_id

    async def _commit(self, upload: SharedUpload) -> None:
        """Commit a stored object, and report the answer."""
        assert upload.content is not None, "an object is committed before it is built"
        commit = SharedCommit(upload.object_id, upload.content, tuple(upload.batches))
        try:
            verdict = await (await self._pipeline.commit(commit))
        except ControllerUnavailableError as error:
            _log.warning("no answer to a commit to shared streams, repeating it: %s", error)
            self._core.unknown(upload)
        except Exception as error:  # noqa: BLE001 - every caller receives it
            await self._notify(self._on_rejected([upload.object_id], error))
            self._core.rejected(upload, error)
        else:
            await self._report(commit, verdict)
            self._core.answered(upload, verdict)
        self._carry_out()

    async def _report(self, commit: SharedCommit, verdict: SharedVerdict) -> None:
        """Notify the observer if the metadata has the object."""
        ranges: dict[int, StreamRange] = {}
        for batch, code, offset in zip(commit.batches, verdict.codes, verdict.offsets, strict=True):
            if code == common_pb2.ERROR_CODE_NONE and offset >= 0:
                before = ranges.get(batch.stream_id)
                start = offset if before is None else before.start_offset
                ranges[batch.stream_id] = StreamRange(batch.stream_id, start, offset + batch.count)
        if ranges:
            committed = self._observer.on_committed([commit.object_id], list(ranges.values()))
            await self._notify(committed)

    async def _notify(self, notification: Awaitable[None]) -> None:
        try:
            await notification
        except Exception:  # noqa: BLE001 - an observer is foreign code; it is logged in full
            _log.exception("an upload observer failed, the upload continues")


def _records(record: bytes | Sequence[bytes], count: int) -> list[tuple[bytes, int]]:
    """Return payloads and numbers of offsets, after checking them."""
    if isinstance(record, bytes | bytearray | memoryview):
        return [(arguments.as_payload("record", record), count)]
    payloads = check_payloads(record)
    if count != 1:
        raise ValueError(f"count is {count}, expected 1: each record of a sequence has one offset")
    return [(payload, 1) for payload in payloads]
