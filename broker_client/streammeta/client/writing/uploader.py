"""Uploader: encodes the objects of a batch, uploads them and commits them.

Owns the meaning of each answer of the controller for each stream of the batch. It knows neither the
buffer nor the order between batches. The writer calls `encode`, `upload`, `submit` and `finish` of
each batch, the last two in the order of batches. An object whose id expired, or whose id is smaller
than a committed one, is uploaded again under a new id: its bytes are still in memory and do not
depend on the id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from streammeta.client.commits.pipeline import CommitPipeline
from streammeta.client.config import UploadObserver, WriterConfig
from streammeta.client.deprecations import find_rejection_callback
from streammeta.client.errors import (
    BrokerClientError,
    ControllerUnavailableError,
    ObjectExpiredError,
    OffsetMismatchError,
    OutcomeUnknownError,
    rejection,
)
from streammeta.client.nodes.session import BrokerSession
from streammeta.client.resources.resources import StoreThreads
from streammeta.client.resources.tally import UPLOAD_ANEW
from streammeta.client.writing.batch import BatchCommit, BatchUpload, UploadedObject
from streammeta.client.writing.object_encoder import EncodedObject, encode_object
from streammeta.client.writing.record_buffer import StreamRun, plan_objects
from streammeta.client.writing.store_uploads import StoreUploads
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.storage.object_format.object_key import key_for
from streammeta.v1 import common_pb2
from streammeta.v1.common_pb2 import ErrorCode

_DESCRIBE_DEADLINE = 2.0
_log = logging.getLogger(__name__)

Verdicts = asyncio.Future[dict[StreamRun, ErrorCode.ValueType]]
Late = dict[StreamRun, Exception]


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted commit. `answer` is None if nothing was left to commit."""

    commit: BatchCommit
    answer: Verdicts | None


class Uploader:
    """Uploads and commits batches for one session.

    Failures that may pass are retried for `config.commit_deadline_s`, and without a limit with
    `is_persistent`, when a log has the records.
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
        # The pipeline and the ids belong to this session: both name its node in every call.
        self._uploads = StoreUploads(session, store, config, is_persistent=is_persistent)
        self._config = config
        self._is_persistent = is_persistent
        self._observer = observer
        self._on_rejected = find_rejection_callback(observer)
        self._pipeline = CommitPipeline(
            session.client, session.node, deadline_s=config.commit_deadline_s
        )
        # One thread: two would encode no faster, and memory may hold only one object twice.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        # The controllers reject a stream set object with an id below the node's last committed one.
        self._newest_shared_id = -1
        self._submissions = 0

    async def close(self, deadline_s: float | None = None) -> None:
        """Stop. Commits in flight have `deadline_s` seconds left."""
        self._encoder.shutdown(wait=False, cancel_futures=True)
        await self._pipeline.close(deadline_s)

    # -- building and uploading

    async def encode(self, batch: BatchUpload) -> None:
        """Move the records of `batch` into objects. Call it in the order of batches."""
        block_bytes = self._config.block_bytes
        plans = plan_objects(batch.runs, self._config.split_bytes)

        def build() -> list[EncodedObject]:
            return [encode_object(plan, block_bytes) for plan in plans]

        loop = asyncio.get_running_loop()
        batch.objects = await loop.run_in_executor(self._encoder, build)

    async def upload(self, batch: BatchUpload) -> None:
        """Put the objects of `batch` that have open runs into the store under fresh ids.

        Runs that can't be prepared or uploaded are added to `batch.failures`, uploaded objects to
        `batch.uploaded`.
        """
        contents = [content for content in batch.objects if batch.open_runs(content)]
        if not contents:
            return

        try:
            taken = await self._uploads.prepare(len(contents))
        except (BrokerClientError, StorageError) as error:
            for content in contents:
                batch.failures.update(dict.fromkeys(batch.open_runs(content), error))
            return

        await self._notify(self._observer.on_prepared(taken.ids, taken.deadline_ms))
        objects = [
            UploadedObject(content, object_id)
            for content, object_id in zip(contents, taken.ids, strict=True)
        ]
        # Failures are results: one object that fails must not cancel the others.
        outcomes = await asyncio.gather(
            *(self._uploads.put(upload.object_id, upload.content.data) for upload in objects)
        )

        for uploaded, failure in zip(objects, outcomes, strict=True):
            if failure is None:
                batch.uploaded.append(uploaded)
            else:
                batch.failures.update(dict.fromkeys(batch.open_runs(uploaded.content), failure))
                await self._notify(self._on_rejected([uploaded.object_id], failure))
        if batch.uploaded:
            namespace = self._session.namespace
            keys = [key_for(uploaded.object_id, namespace) for uploaded in batch.uploaded]
            await self._notify(self._observer.on_uploaded(keys))

    # -- committing

    async def submit(self, batch: BatchUpload) -> Submission:
        """Submit the commit of the uploaded objects. Call it in the order of batches.

        Objects with smaller ids than a submitted later batch are uploaded again first.
        """
        await self._drop_failed(batch)
        while late := self._find_overtaken(batch):
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
        """Wait for the answer. On return each run is in `committed` or in `failures`.

        Every batch before this one is settled. `hold` is called before anything is committed again:
        no later batch may be submitted until all batches in flight are settled.
        """
        while submission.answer is not None:
            late = await self._process_answer(batch, submission.commit, submission.answer)
            if not late:
                return
            if not self._may_repeat(batch):
                batch.failures.update(late)
                return

            hold()
            # After an unknown outcome the identical commit is repeated: if the first attempt took
            # effect, the controllers recognise it by its object ids. New ids would duplicate it.
            if not _has(late, OutcomeUnknownError):
                batch.uploaded.clear()
                if _has(late, ObjectExpiredError):
                    self._uploads.discard_ids()
                self._tally.retries[UPLOAD_ANEW] += 1
                await self.upload(batch)

            submission = await self._hand_in(batch)
            for run in late:
                run.stream.repeated = batch.submission

    async def _hand_in(self, batch: BatchUpload) -> Submission:
        # Numbers submissions to order them against `WriterStream.repeated`.
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
        """Drop objects that have no run left to commit."""
        remaining: list[UploadedObject] = []
        for uploaded in batch.uploaded:
            runs = uploaded.content.runs
            if batch.open_runs(uploaded.content):
                remaining.append(uploaded)
            else:
                errors = (batch.failures[run] for run in runs if run in batch.failures)
                await self._notify(self._on_rejected([uploaded.object_id], next(errors)))
        batch.uploaded = remaining

    def _find_overtaken(self, batch: BatchUpload) -> Late:
        """Return the runs of a batch whose stream set object is older than a submitted one.

        A node's stream set objects are in the order of their ids, so a later batch must have later
        ids. Only an earlier batch that was uploaded again breaks this order.
        """
        shared = [uploaded.object_id for uploaded in batch.uploaded if uploaded.content.shared]
        if not shared or shared[0] > self._newest_shared_id:
            return {}

        error = ObjectExpiredError(
            f"commit of object {shared[0]}",
            detail=f"object {self._newest_shared_id} of an earlier batch is already committed",
        )
        contents = (uploaded.content for uploaded in batch.uploaded)
        return {run: error for content in contents for run in batch.open_runs(content)}

    async def _process_answer(
        self, batch: BatchUpload, commit: BatchCommit, answer: Verdicts
    ) -> Late:
        """Sort the runs of a commit by its answer and return those to commit again."""
        try:
            verdicts = await answer
        except BrokerClientError as error:
            return await self._process_rejection(batch, commit, error)
        late = await self._sort_runs(batch, commit, verdicts)
        await self._report(batch, commit, late)
        return late

    async def _process_rejection(
        self, batch: BatchUpload, commit: BatchCommit, error: BrokerClientError
    ) -> Late:
        if isinstance(error, ControllerUnavailableError):
            # No answer: the commit may have taken effect, so its runs have not failed for certain.
            unknown = OutcomeUnknownError(f"the commit of objects {commit.object_ids}", error)
            if self._is_persistent:
                return dict.fromkeys(commit.runs, unknown)
            error = unknown
        for run in commit.runs:
            batch.failures[run] = error
        await self._notify(self._on_rejected(commit.object_ids, error))
        return {}

    async def _sort_runs(
        self,
        batch: BatchUpload,
        commit: BatchCommit,
        verdicts: dict[StreamRun, ErrorCode.ValueType],
    ) -> Late:
        """Add rejected runs to the failures of the batch and return those to commit again."""
        late: Late = {}
        mismatched: list[StreamRun] = []
        holders = commit.holders()

        for run, code in verdicts.items():
            if code == common_pb2.ERROR_CODE_NONE:
                batch.committed.add(run)
                continue

            subject = f"commit of stream {run.stream.stream_id} [{run.start_offset},"
            subject += f" {run.end_offset}) in object {holders[run]}"
            # The first failure explains this one, which is only its consequence.
            if run.stream.failure is not None:
                batch.failures[run] = run.stream.error_after_failure()
            # An expired id, or a range that starts too late because an earlier batch is being
            # committed again, says nothing about the records: a repeat may succeed.
            elif code == common_pb2.ERROR_CODE_OBJECT_NOT_EXIST or (
                code == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED
                and batch.submission < run.stream.repeated
            ):
                late[run] = rejection(code, subject)
            elif code == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED:
                mismatched.append(run)
            else:
                node = self._session.node
                by = f"node {node.node_id} at epoch {node.node_epoch}"
                batch.failures[run] = rejection(code, f"{subject} by {by}")

        if mismatched:
            batch.failures.update(await self._explain_offsets(mismatched))
        return late

    async def _explain_offsets(self, runs: Sequence[StreamRun]) -> dict[StreamRun, Exception]:
        """Look up the streams' end offsets for the errors. Without an answer they have none."""
        ends: dict[int, int] = {}
        ids = sorted(run.stream.stream_id for run in runs)
        try:
            # Only the wording of the error depends on it, so it must not delay the failure for
            # long.
            async with asyncio.timeout(_DESCRIBE_DEADLINE):
                async for stream in self._session.client.describe_streams(ids):
                    ends[stream.stream_id] = stream.end_offset
        except (BrokerClientError, TimeoutError) as error:
            _log.warning("end offsets of %d rejected streams are unknown: %s", len(ids), error)

        return {
            run: OffsetMismatchError(
                run.stream.stream_id, ends.get(run.stream.stream_id), run.start_offset
            )
            for run in runs
        }

    async def _report(self, batch: BatchUpload, commit: BatchCommit, late: Late) -> None:
        """Notify the observer of committed objects, and of those that never will be."""
        asked = set(commit.runs)
        committed: list[int] = []
        ranges: list[StreamRange] = []

        for uploaded in commit.objects:
            runs = [run for run in uploaded.content.runs if run in asked]
            good = [run for run in runs if run in batch.committed]
            if good:
                committed.append(uploaded.object_id)
                ranges.extend(_ranges(good))
            elif runs:
                error = late.get(runs[0]) or batch.failures[runs[0]]
                await self._notify(self._on_rejected([uploaded.object_id], error))

        if committed:
            await self._notify(self._observer.on_committed(committed, ranges))

    async def _notify(self, notification: Awaitable[None]) -> None:
        try:
            await notification
        except Exception:  # noqa: BLE001 - an observer is foreign code; it is logged in full
            _log.exception("an upload observer failed, the upload continues")


def _has(late: Late, kind: type[Exception]) -> bool:
    return any(isinstance(error, kind) for error in late.values())


def _ranges(runs: Iterable[StreamRun]) -> list[StreamRange]:
    return [StreamRange(run.stream.stream_id, run.start_offset, run.end_offset) for run in runs]
