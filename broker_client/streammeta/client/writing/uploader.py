"""Uploader: builds the objects of a batch, uploads them and commits them.

Owns what each answer of the controller means for each stream of the batch. It knows neither the
buffer nor the order between batches; the writer calls `encode`, `upload`, `submit` and `finish` of
each batch, the last two in the order of batches. An object whose id expired, or whose id is smaller
than that of a committed one, is uploaded anew under a new id: its bytes are still in memory and do
not depend on the id.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from streammeta.client.commits.pipeline import CommitPipeline
from streammeta.client.config import UploadObserver, WriterConfig
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.errors import (
    BrokerClientError,
    ControllerUnavailableError,
    NodeFencedError,
    NodeNotRegisteredError,
    ObjectExpiredError,
    OffsetMismatchError,
    OutcomeUnknownError,
    UploadFailedError,
    refusal,
)
from streammeta.client.nodes.session import BrokerSession
from streammeta.client.resources.bandwidth import Grade
from streammeta.client.resources.resources import StoreThreads
from streammeta.client.resources.tally import UPLOAD, UPLOAD_ANEW
from streammeta.client.writing.batch import BatchCommit, BatchUpload, UploadedObject
from streammeta.client.writing.object_encoder import EncodedObject, encode_object
from streammeta.client.writing.object_ids import ObjectIds
from streammeta.client.writing.record_buffer import StreamRun, plan_objects
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.patience import Patience
from streammeta.v1 import common_pb2
from streammeta.v1.common_pb2 import ErrorCode

_DESCRIBE_DEADLINE = 2.0
_PATIENCE = Patience(Backoff(0.5, 10.0))
_RETRY_S = 10.0
_ID_PAUSES = Backoff(0.5, 10.0)
"""Waits before ids are asked for again, in seconds."""

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Verdicts = asyncio.Future[dict[StreamRun, ErrorCode.ValueType]]
Late = dict[StreamRun, Exception]


@dataclass(frozen=True, slots=True)
class Submission:
    """A commit that was handed in; `answer` is None if nothing was left to commit."""

    commit: BatchCommit
    answer: Verdicts | None


class Uploader:
    """Uploads and commits batches for one session.

    What failed for a reason that may pass is repeated for `config.commit_deadline_s`; without limit
    with `is_persistent`, when a log has the records.
    """

    def __init__(
        self,
        session: BrokerSession,
        store: StoreThreads,
        config: WriterConfig,
        observer: UploadObserver,
        *,
        is_persistent: bool = False,
    ) -> None:
        self._session = session
        self._tally = session.client.tally
        self._network = session.client.network
        self._store = store
        self._bucket = BucketCheck(session.client, store.store, session.namespace)
        self._config = config
        self._is_persistent = is_persistent
        self._observer = observer
        self._ids = ObjectIds(session, config.ttl_s, config.commit_deadline_s)
        self._pipeline = CommitPipeline(
            session.client, session.node, deadline_s=config.commit_deadline_s
        )
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._encoding = asyncio.Lock()
        self._preparing = asyncio.Lock()
        self._newest_shared_id = -1
        self._submissions = 0

    async def close(self, deadline_s: float | None = None) -> None:
        """Stop; commits under way have `deadline_s` seconds left."""
        self._encoder.shutdown(wait=False, cancel_futures=True)
        await self._pipeline.close(deadline_s)

    # -- building and uploading

    async def encode(self, batch: BatchUpload) -> None:
        """Move the records of `batch` into objects; batches come in their order."""
        block_bytes = self._config.block_bytes
        plans = plan_objects(batch.runs, self._config.split_bytes)

        def build() -> list[EncodedObject]:
            return [encode_object(plan, block_bytes) for plan in plans]

        async with self._encoding:
            loop = asyncio.get_running_loop()
            batch.objects = await loop.run_in_executor(self._encoder, build)

    async def upload(self, batch: BatchUpload) -> None:
        """Put the objects of `batch` that have open runs into the store under fresh ids.

        What can't be prepared or uploaded lands in `batch.failures`; the rest in `batch.uploaded`.
        """
        contents = [one for one in batch.objects if batch.open_runs(one)]
        if not contents:
            return
        try:
            async with self._preparing:  # in their order: later batches have later ids
                # Before ids are asked for: what is uploaded elsewhere could never be read.
                await self._patiently("check of the bucket", self._bucket.passed)
                taken = await self._patiently(
                    "preparation of objects", lambda: self._ids.take(len(contents))
                )
        except (BrokerClientError, StorageError) as error:
            for content in contents:
                batch.failures.update(dict.fromkeys(batch.open_runs(content), error))
            return
        await self._notify(self._observer.on_prepared(taken.ids, taken.deadline_ms))
        objects = [
            UploadedObject(content, object_id)
            for content, object_id in zip(contents, taken.ids, strict=True)
        ]
        outcomes = await asyncio.gather(*map(self._put, objects))
        for one, failed in zip(objects, outcomes, strict=True):
            if failed is None:
                batch.uploaded.append(one)
            else:
                batch.failures.update(dict.fromkeys(batch.open_runs(one.content), failed))
                await self._notify(self._observer.on_refused([one.object_id], failed))
        if batch.uploaded:
            keys = [key_for(one.object_id, self._session.namespace) for one in batch.uploaded]
            await self._notify(self._observer.on_uploaded(keys))

    async def _put(self, one: UploadedObject) -> UploadFailedError | None:
        key = key_for(one.object_id, self._session.namespace)
        store, data = self._store.store, one.content.data

        async def put() -> None:
            await self._network.sent.take(Grade.UPLOAD, len(data))
            began = time.monotonic()
            try:
                await self._store.run(lambda: store.put(key, data))
            except StorageError:
                self._tally.upload_failed()
                raise
            self._tally.uploaded(len(data), time.monotonic() - began)

        while True:
            try:
                await self._patiently(f"upload of object {one.object_id}", put)
                return None
            except StorageError as error:
                failed = UploadFailedError(key, one.object_id, str(error))
                failed.__cause__ = error
            if not self._is_persistent:
                return failed
            # The log holds the records: an operator may still correct the store.
            _log.error("the store rejects a logged batch, retrying in %g s: %s", _RETRY_S, failed)
            await asyncio.sleep(_RETRY_S)

    async def _patiently(self, subject: str, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Await `work`, again after failures that may pass, until the deadline if there is one."""
        loop = asyncio.get_running_loop()
        limit_s = math.inf if self._is_persistent else self._config.commit_deadline_s
        ends_at = loop.time() + limit_s
        for attempt in itertools.count():
            try:
                return await work()
            except (ControllerUnavailableError, StorageError) as error:
                wait = self._wait_after(error, attempt, ends_at - loop.time())
                if wait is None:
                    raise
                self._tally.retries[UPLOAD] += 1
                _log.warning("%s failed, retrying in %.3g s: %s", subject, wait, error)
            await asyncio.sleep(wait)
        raise AssertionError("attempts without end have ended")

    def _wait_after(self, error: Exception, attempt: int, left_s: float) -> float | None:
        """Return the wait before the next attempt; None to give up."""
        unit = random.random()
        if isinstance(error, StorageError):
            return _PATIENCE.wait_s(error, attempt, left_s, unit)
        return _ID_PAUSES.wait(attempt, unit) if self._is_persistent else None

    # -- committing

    async def submit(self, batch: BatchUpload) -> Submission:
        """Hand in the commit of what is uploaded; batches come in their order.

        What a later batch has overtaken is uploaded anew before.
        """
        await self._drop_failed(batch)
        while late := self._overtaken(batch):
            batch.uploaded.clear()
            if self._may_repeat(batch):
                self._tally.retries[UPLOAD_ANEW] += 1
                await self.upload(batch)
            else:
                batch.failures.update(late)
        return await self._hand_in(batch)

    async def finish(
        self, batch: BatchUpload, submission: Submission, hold: Callable[[], None]
    ) -> None:
        """Wait for the answer; on return each run is in `committed` or in `failures`.

        Every batch before this one is settled. `hold` is called before anything is committed
        anew: no later batch may be submitted until all that are under way are settled.
        """
        while submission.answer is not None:
            late = await self._take_answer(batch, submission.commit, submission.answer)
            if not late:
                return
            if not self._may_repeat(batch):
                batch.failures.update(late)
                return
            hold()
            if not _has(late, OutcomeUnknownError):
                batch.uploaded.clear()
                if _has(late, ObjectExpiredError):
                    self._ids.discard()
                self._tally.retries[UPLOAD_ANEW] += 1
                await self.upload(batch)
            submission = await self._hand_in(batch)
            for run in late:
                run.stream.repeated = batch.submission

    async def _hand_in(self, batch: BatchUpload) -> Submission:
        self._submissions += 1
        batch.submission = self._submissions
        commit = BatchCommit.of(batch.uploaded, batch.committed | batch.failures.keys())
        if not commit.objects:
            return Submission(commit, None)
        if commit.shared is not None:
            self._newest_shared_id = max(self._newest_shared_id, commit.shared.object_id)
        return Submission(commit, await self._pipeline.commit(commit))

    def _may_repeat(self, batch: BatchUpload) -> bool:
        batch.reuploads += 1
        return self._is_persistent or batch.reuploads <= self._config.reupload_attempts

    async def _drop_failed(self, batch: BatchUpload) -> None:
        """Leave out objects that have no run left to commit."""
        kept: list[UploadedObject] = []
        for one in batch.uploaded:
            if batch.open_runs(one.content):
                kept.append(one)
            else:
                errors = (batch.failures[run] for run in one.content.runs if run in batch.failures)
                await self._notify(self._observer.on_refused([one.object_id], next(errors)))
        batch.uploaded = kept

    def _overtaken(self, batch: BatchUpload) -> Late:
        """Return the runs of a batch whose set object is older than a submitted one.

        A node's set objects are in the order of their ids, so a later batch must have later ids.
        That fails only after an earlier batch was uploaded anew.
        """
        shared = [one.object_id for one in batch.uploaded if one.content.shared]
        if not shared or shared[0] > self._newest_shared_id:
            return {}
        error = ObjectExpiredError(
            f"commit of object {shared[0]}",
            detail=f"object {self._newest_shared_id} of a batch before it was committed already",
        )
        return {run: error for one in batch.uploaded for run in batch.open_runs(one.content)}

    async def _take_answer(self, batch: BatchUpload, commit: BatchCommit, answer: Verdicts) -> Late:
        """Sort the runs of a commit by its answer; return those to be committed anew."""
        try:
            verdicts = await answer
        except BrokerClientError as error:
            return await self._take_refusal(batch, commit, error)
        late = await self._judge(batch, commit, verdicts)
        await self._report(batch, commit, late)
        return late

    async def _take_refusal(
        self, batch: BatchUpload, commit: BatchCommit, error: BrokerClientError
    ) -> Late:
        if isinstance(error, ControllerUnavailableError):
            unknown = OutcomeUnknownError(f"the commit of objects {commit.object_ids}", error)
            if self._is_persistent:
                return dict.fromkeys(commit.runs, unknown)
            error = unknown
        for run in commit.runs:
            batch.failures[run] = error
        await self._notify(self._observer.on_refused(commit.object_ids, error))
        return {}

    async def _judge(
        self,
        batch: BatchUpload,
        commit: BatchCommit,
        verdicts: dict[StreamRun, ErrorCode.ValueType],
    ) -> Late:
        """Sort refused runs into failures of the batch and, as the result, those to repeat."""
        late: Late = {}
        mismatched: list[StreamRun] = []
        holders = commit.holders()
        for run, code in verdicts.items():
            if code == common_pb2.ERROR_CODE_NONE:
                batch.committed.add(run)
                continue
            subject = f"commit of stream {run.stream.stream_id} [{run.start_offset},"
            subject += f" {run.end_offset}) in object {holders[run]}"
            if run.stream.failure is not None:
                batch.failures[run] = run.stream.failed_before()
            elif code == common_pb2.ERROR_CODE_OBJECT_NOT_EXIST or (
                code == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED
                and batch.submission < run.stream.repeated
            ):
                late[run] = refusal(code, subject)
            elif code == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED:
                mismatched.append(run)
            else:
                node = self._session.node
                by = f"node {node.node_id} at epoch {node.node_epoch}"
                batch.failures[run] = refusal(code, f"{subject} by {by}")
        if mismatched:
            batch.failures.update(await self._explain_offsets(mismatched))
        return late

    async def _explain_offsets(self, runs: Sequence[StreamRun]) -> dict[StreamRun, Exception]:
        """Ask where the streams end; without an answer the errors say less, but are raised."""
        ends: dict[int, int] = {}
        ids = sorted(run.stream.stream_id for run in runs)
        try:
            async with asyncio.timeout(_DESCRIBE_DEADLINE):
                async for one in self._session.client.describe_streams(ids):
                    ends[one.stream_id] = one.end_offset
        except (BrokerClientError, TimeoutError) as error:
            _log.warning("end offsets of %d refused streams are unknown: %s", len(ids), error)
        return {
            run: OffsetMismatchError(
                run.stream.stream_id, ends.get(run.stream.stream_id), run.start_offset
            )
            for run in runs
        }

    async def _report(self, batch: BatchUpload, commit: BatchCommit, late: Late) -> None:
        """Tell the observer which objects are in the map, and which never will be."""
        asked = set(commit.runs)
        committed: list[int] = []
        ranges: list[StreamRange] = []
        for one in commit.objects:
            runs = [run for run in one.content.runs if run in asked]
            good = [run for run in runs if run in batch.committed]
            if good:
                committed.append(one.object_id)
                ranges.extend(_ranges(good))
            elif runs:
                error = late.get(runs[0]) or batch.failures[runs[0]]
                await self._notify(self._observer.on_refused([one.object_id], error))
        if committed:
            await self._notify(self._observer.on_committed(committed, ranges))

    async def _notify(self, told: Awaitable[None]) -> None:
        try:
            await told
        except Exception:  # noqa: BLE001 - an observer is foreign code; it is logged in full
            _log.exception("an upload observer failed; the upload goes on")


def is_fencing(error: Exception) -> bool:
    """Tell whether `error` bars the whole node, and not only one stream or object."""
    return isinstance(error, NodeFencedError | NodeNotRegisteredError)


def _has(late: Late, kind: type[Exception]) -> bool:
    return any(isinstance(error, kind) for error in late.values())


def _ranges(runs: Iterable[StreamRun]) -> list[StreamRange]:
    return [StreamRange(run.stream.stream_id, run.start_offset, run.end_offset) for run in runs]
