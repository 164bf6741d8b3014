"""One batch on its way into the map: prepare ids, build and upload objects, commit them.

Owns what each answer of the controller means for each stream of the batch. It knows neither the
buffer nor the order between batches; the writer calls `upload` when it likes and `commit` in order.
An object whose id expired, or whose id fell behind that of a committed one, is uploaded anew under
a new id, since its records are still in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field

from broker_client import methods
from broker_client.errors import (
    BrokerClientError,
    NodeFencedError,
    NodeNotRegisteredError,
    ObjectExpiredError,
    OffsetMismatchError,
    ProtocolViolationError,
    UploadFailedError,
    refusal,
)
from broker_client.observer import UploadObserver
from broker_client.session import BrokerSession
from broker_client.store_threads import StoreThreads
from broker_client.upload_batch import ObjectPlan, StreamRun, plan_objects
from proto import common_pb2, objects_pb2
from storage.errors import StorageError
from storage.object_format.index_block import StreamRange
from storage.object_format.object_key import key_for

_DESCRIBE_DEADLINE = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UploadSettings:
    """How objects are laid out and registered; see `WriterConfig` for the meaning of each."""

    split_bytes: int
    block_bytes: int
    ttl_ms: int
    commit_deadline: float
    reupload_attempts: int


@dataclass(frozen=True, slots=True)
class UploadedObject:
    """An object in the store that no commit names yet."""

    plan: ObjectPlan
    object_id: int
    size: int


@dataclass(slots=True)
class BatchUpload:
    """The state of one batch: what is in the store, in the map, and what failed, by run."""

    runs: list[StreamRun]
    uploaded: list[UploadedObject] = field(default_factory=list)
    committed: set[StreamRun] = field(default_factory=set)
    failures: dict[StreamRun, Exception] = field(default_factory=dict)


class Uploader:
    """Uploads and commits batches for one session."""

    def __init__(
        self,
        session: BrokerSession,
        store: StoreThreads,
        settings: UploadSettings,
        observer: UploadObserver,
    ) -> None:
        self._session = session
        self._store = store
        self._settings = settings
        self._observer = observer
        self._prepare_order = asyncio.Lock()
        self._newest_shared_id = -1

    async def upload(self, batch: BatchUpload, runs: Iterable[StreamRun]) -> None:
        """Put `runs` of `batch` into the store under fresh ids.

        What can't be prepared or uploaded lands in `batch.failures`; the rest in `batch.uploaded`.
        """
        wanted = list(runs)
        plans = plan_objects(wanted, self._settings.split_bytes)
        try:
            first_id = await self._prepare(len(plans))
        except BrokerClientError as error:
            batch.failures.update(dict.fromkeys(wanted, error))
            return
        outcomes = await asyncio.gather(
            *(self._put(plan, first_id + i) for i, plan in enumerate(plans))
        )
        done = [outcome for outcome in outcomes if isinstance(outcome, UploadedObject)]
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, UploadFailedError):
                batch.failures.update(dict.fromkeys(plans[i].runs, outcome))
                await self._notify(self._observer.on_refused([first_id + i], outcome))
        batch.uploaded.extend(done)
        if done:
            keys = [key_for(one.object_id, self._session.namespace) for one in done]
            await self._notify(self._observer.on_uploaded(keys))

    async def commit(self, batch: BatchUpload) -> None:
        """Register what is uploaded; on return each run is in `committed` or in `failures`."""
        attempts = self._settings.reupload_attempts
        while True:
            await self._drop_failed(batch)
            late = self._overtaken(batch)
            if not late and batch.uploaded:
                late = await self._commit_once(batch)
            batch.uploaded.clear()
            again = [run for run in late if run not in batch.failures]
            if not again:
                return
            if attempts == 0:
                batch.failures.update({run: late[run] for run in again})
                return
            attempts -= 1
            await self.upload(batch, again)

    async def _prepare(self, count: int) -> int:
        """Issue `count` ids, one batch after the other, so that older batches get smaller ids."""
        async with self._prepare_order:
            request = objects_pb2.PrepareObjectsRequest(
                node=self._session.node, count=count, ttl_ms=self._settings.ttl_ms
            )
            answer = await self._session.client.call(methods.PREPARE_OBJECTS, request)
        if answer.error != common_pb2.NONE:
            raise refusal(answer.error, f"preparing {count} objects for {self._node_name()}")
        ids = range(answer.first_object_id, answer.first_object_id + count)
        await self._notify(self._observer.on_prepared(ids, answer.deadline_ms))
        return ids.start

    async def _put(self, plan: ObjectPlan, object_id: int) -> UploadedObject | UploadFailedError:
        key = key_for(object_id, self._session.namespace)
        block_bytes = self._settings.block_bytes

        def build_and_put() -> int:
            built = plan.build(block_bytes)
            self._store.store.put(key, built.data)
            return built.size

        try:
            size = await self._store.run(build_and_put)
        except StorageError as error:
            failed = UploadFailedError(key, object_id, str(error))
            failed.__cause__ = error
            return failed
        return UploadedObject(plan, object_id, size)

    async def _drop_failed(self, batch: BatchUpload) -> None:
        """Leave out objects that have no run left to commit."""
        kept: list[UploadedObject] = []
        for one in batch.uploaded:
            errors = [batch.failures[run] for run in one.plan.runs if run in batch.failures]
            if len(errors) == len(one.plan.runs):
                await self._notify(self._observer.on_refused([one.object_id], errors[0]))
            else:
                kept.append(one)
        batch.uploaded = kept

    def _overtaken(self, batch: BatchUpload) -> dict[StreamRun, Exception]:
        """Return the runs of a batch whose set object is older than a committed one.

        A node's set objects are in the order of their ids, so a later batch must have later ids.
        That fails only after an earlier batch was uploaded anew.
        """
        shared = [one.object_id for one in batch.uploaded if one.plan.shared]
        if not shared or shared[0] > self._newest_shared_id:
            return {}
        error = ObjectExpiredError(
            f"commit of object {shared[0]}",
            detail=f"object {self._newest_shared_id} of a batch before it was committed already",
        )
        return {run: error for one in batch.uploaded for run in one.plan.runs}

    async def _commit_once(self, batch: BatchUpload) -> dict[StreamRun, Exception]:
        """Commit the uploaded objects; return the runs whose object expired."""
        commit = _Commit.of(batch)
        request = commit.request(self._session.node)
        try:
            answer = await self._session.client.call(
                methods.COMMIT_STREAM_SET_OBJECT, request, self._settings.commit_deadline
            )
            verdicts = commit.verdicts(answer)
        except BrokerClientError as error:
            batch.failures.update(dict.fromkeys(commit.runs, error))
            await self._notify(self._observer.on_refused(commit.object_ids, error))
            return {}
        if commit.shared is not None and verdicts[commit.rows[0]] != common_pb2.OBJECT_NOT_EXIST:
            self._newest_shared_id = max(self._newest_shared_id, commit.shared.object_id)
        late = await self._judge(batch, commit, verdicts)
        await self._report(batch, commit, late)
        return late

    async def _judge(
        self,
        batch: BatchUpload,
        commit: _Commit,
        verdicts: dict[StreamRun, common_pb2.ErrorCode.ValueType],
    ) -> dict[StreamRun, Exception]:
        """Sort refused runs into failures of the batch and, as the result, expired ones."""
        late: dict[StreamRun, Exception] = {}
        mismatched: list[StreamRun] = []
        holders = {run: one.object_id for one in commit.objects for run in one.plan.runs}
        for run, code in verdicts.items():
            if code == common_pb2.NONE:
                batch.committed.add(run)
                continue
            subject = f"commit of stream {run.stream.stream_id} [{run.start_offset},"
            subject += f" {run.end_offset}) in object {holders[run]}"
            if code == common_pb2.OBJECT_NOT_EXIST:
                late[run] = refusal(code, subject)
            elif code == common_pb2.OFFSET_NOT_MATCHED:
                mismatched.append(run)
            else:
                batch.failures[run] = refusal(code, f"{subject} by {self._node_name()}")
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
                run.stream.stream_id, ends.get(run.stream.stream_id, -1), run.start_offset
            )
            for run in runs
        }

    async def _report(
        self, batch: BatchUpload, commit: _Commit, late: dict[StreamRun, Exception]
    ) -> None:
        """Tell the observer which objects are in the map, and which never will be."""
        committed: list[int] = []
        ranges: list[StreamRange] = []
        for one in commit.objects:
            errors = [late.get(run) or batch.failures.get(run) for run in one.plan.runs]
            good = [run for run, error in zip(one.plan.runs, errors, strict=True) if error is None]
            if good:
                committed.append(one.object_id)
                ranges.extend(
                    StreamRange(run.stream.stream_id, run.start_offset, run.end_offset)
                    for run in good
                )
            elif errors[0] is not None:
                await self._notify(self._observer.on_refused([one.object_id], errors[0]))
        if committed:
            await self._notify(self._observer.on_committed(committed, ranges))

    async def _notify(self, told: Awaitable[None]) -> None:
        try:
            await told
        except Exception:  # noqa: BLE001 - an observer is foreign code; it is logged in full
            _log.exception("an upload observer failed; the upload goes on")

    def _node_name(self) -> str:
        node = self._session.node
        return f"node {node.node_id} at epoch {node.node_epoch}"


def is_fencing(error: Exception) -> bool:
    """Tell whether `error` bars the whole node, and not only one stream or object."""
    return isinstance(error, NodeFencedError | NodeNotRegisteredError)


@dataclass(frozen=True, slots=True)
class _Commit:
    """The rows of one commit: runs of the set object, then one run for each stream object."""

    objects: tuple[UploadedObject, ...]
    shared: UploadedObject | None
    rows: tuple[StreamRun, ...]
    alone: tuple[UploadedObject, ...]

    @classmethod
    def of(cls, batch: BatchUpload) -> _Commit:
        """Take what is uploaded and has not failed."""
        shared = next((one for one in batch.uploaded if one.plan.shared), None)
        runs = () if shared is None else shared.plan.runs
        rows = tuple(run for run in runs if run not in batch.failures)
        alone = tuple(one for one in batch.uploaded if not one.plan.shared)
        return cls(tuple(batch.uploaded), shared, rows, alone)

    @property
    def runs(self) -> tuple[StreamRun, ...]:
        """All runs, in row order."""
        return (*self.rows, *(one.plan.runs[0] for one in self.alone))

    @property
    def object_ids(self) -> list[int]:
        """All objects of the commit."""
        return [one.object_id for one in self.objects]

    def request(self, node: common_pb2.NodeIdentity) -> objects_pb2.CommitStreamSetObjectRequest:
        """Make the request that accepts valid rows whatever happens to the others."""
        shared_id = -1 if self.shared is None else self.shared.object_id
        alone = [one.plan.runs[0] for one in self.alone]
        return objects_pb2.CommitStreamSetObjectRequest(
            node=node,
            object_id=shared_id,
            order_id=shared_id,
            object_size=0 if self.shared is None else self.shared.size,
            ranges=objects_pb2.RangeColumns(
                stream_id=[run.stream.stream_id for run in self.rows],
                stream_epoch=[run.stream.epoch for run in self.rows],
                start_offset=[run.start_offset for run in self.rows],
                end_offset=[run.end_offset for run in self.rows],
            ),
            stream_objects=objects_pb2.StreamObjectColumns(
                object_id=[one.object_id for one in self.alone],
                object_size=[one.size for one in self.alone],
                stream_id=[run.stream.stream_id for run in alone],
                stream_epoch=[run.stream.epoch for run in alone],
                start_offset=[run.start_offset for run in alone],
                end_offset=[run.end_offset for run in alone],
            ),
            on_conflict=common_pb2.ACCEPT_VALID,
        )

    def verdicts(
        self, answer: objects_pb2.CommitStreamSetObjectResponse
    ) -> dict[StreamRun, common_pb2.ErrorCode.ValueType]:
        """Return the outcome of each run. A refused whole refuses the rows that it has no word on.

        Raises `ProtocolViolationError` when the rows of an accepted commit don't match.
        """
        rows = [*answer.range_errors, *answer.stream_object_errors]
        lengths = (len(answer.range_errors), len(answer.stream_object_errors))
        if lengths != (len(self.rows), len(self.alone)):
            if answer.error == common_pb2.NONE:
                raise ProtocolViolationError(
                    f"commit of objects {self.object_ids}",
                    detail=f"{lengths} verdicts answer {(len(self.rows), len(self.alone))} rows",
                )
            rows = [answer.error] * len(self.runs)
        return {
            run: answer.error if code == common_pb2.NONE else code
            for run, code in zip(self.runs, rows, strict=True)
        }
