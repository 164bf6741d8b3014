"""Periodic sweeps of the leader: overdue prepares, idle producers, remains of deleted streams.

The metadata selects the objects to remove, in bounded parts, so that commits continue in between.
Objects are only marked here, and `deletion` removes their bytes. Stream set objects of an active
node are left to that node's own compaction.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import structlog

from streammeta.controller.errors import ApiError
from streammeta.controller.lifecycle.broker_sessions import NodeState, Sessions
from streammeta.controller.lifecycle.failover import read_nodes
from streammeta.controller.lifecycle.tasks import PeriodicTask, in_thread
from streammeta.controller.metadata.api import answers, requests
from streammeta.controller.metadata.api.validation import TTL_MS_MAX
from streammeta.controller.metadata.tables.values import INT64_MAX, ObjectState
from streammeta.controller.runtime.replication.log_time import JUMP_MS
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.storage.errors import StorageError, StoreUnavailableError
from streammeta.storage.object_format.object_key import OwnKey, parse_key
from streammeta.storage.object_store.protocol.base import MultipartUpload, ObjectStore

# Small entries, so that commits are not delayed by one large entry.
EXPIRE_BATCH_MAX = 2_000
"""Number of objects expired in one log entry."""

PRODUCER_IDLE_MS = 24 * 3_600_000
"""Time without a batch after which a producer of a shared stream is forgotten, in milliseconds."""

SWEEP_BATCH_MAX = 10_000
"""Number of stream objects destroyed in one log entry."""

SET_OBJECT_BATCH_MAX = 200
"""Number of stream set objects examined in one step. Each may have thousands of ranges."""

DOUBTED_MS = 24 * 3_600_000
"""Time into a term after which objects with an impossible deadline expire, in milliseconds."""

UPLOAD_BATCH_MAX = 1_000
"""Number of uploads checked against the metadata in one step."""

_log = structlog.get_logger(component="lifecycle")


class _Sweep(PeriodicTask):
    """A sweep over a controller's metadata."""

    def __init__(self, controller: MetadataController, interval_ms: int) -> None:
        super().__init__(interval_ms)
        self._controller = controller

    async def _write_while(
        self, is_due: Callable[[], bool], request: requests.WriteRequest
    ) -> None:
        """Repeat `request` while this node leads and more is due. An error ends the step."""
        while self._controller.is_active and is_due():
            try:
                await self._controller.write(request)
            except ApiError as error:
                _log.info("sweep_postponed", request=type(request).__name__, reason=str(error))
                return


class Expiry(_Sweep):
    """Expires prepared objects whose writers did not commit in time.

    Looks only at the seconds that have begun, never at all objects. A deadline that no correct
    clock would have left to this term is ignored: its object stays for `DOUBTED_MS` of the term.
    Such a deadline passed long before the term began, or is further ahead than the longest
    validity.
    """

    def __init__(self, controller: MetadataController, interval_ms: int) -> None:
        super().__init__(controller, interval_ms)
        controller.on_leadership(self._on_leadership)

    async def step(self) -> None:
        """Expire every object whose deadline has passed, and end an impossible hold."""
        await self._write_while(self._is_hold_doubted, requests.HoldDeletions(hold_ms=1))
        since_ms, beyond_ms = self._plausible_bounds()
        request = requests.ExpireObjects(
            limit=EXPIRE_BATCH_MAX, since_ms=since_ms, beyond_ms=beyond_ms
        )
        await self._write_while(lambda: self._is_due(request), request)

    def _plausible_bounds(self) -> tuple[int, int]:
        """Return the bounds of deadlines that are plausible now."""
        log_time = self._controller.log_time
        if log_time.elapsed_ms < DOUBTED_MS:
            return max(0, log_time.began_ms - JUMP_MS), INT64_MAX
        return 0, log_time.now_ms() + TTL_MS_MAX + JUMP_MS

    def _on_leadership(self, leads: bool) -> None:
        """Log the implausible deadlines of this term."""
        if not leads:
            return

        cluster_metadata, began_ms = (
            self._controller.cluster_metadata,
            self._controller.log_time.began_ms,
        )
        beyond_ms = began_ms + TTL_MS_MAX + JUMP_MS
        doubted = cluster_metadata.list_expired(
            began_ms - JUMP_MS, EXPIRE_BATCH_MAX, beyond_ms=beyond_ms
        )
        if doubted:
            # A clock that jumped shows as a gap between the newest entry and the start of the term.
            jump_ms = began_ms - cluster_metadata.newest_stamp_ms(INT64_MAX)
            _log.warning(
                "deadlines_doubted", objects=len(doubted), jump_ms=jump_ms, kept_ms=DOUBTED_MS
            )

    def _is_hold_doubted(self) -> bool:
        until_ms = self._controller.cluster_metadata.deletion_hold.until_ms
        return until_ms > self._controller.log_time.now_ms() + TTL_MS_MAX + JUMP_MS

    def _is_due(self, request: requests.ExpireObjects) -> bool:
        now_ms = self._controller.log_time.now_ms()
        due = self._controller.cluster_metadata.list_expired(
            now_ms, 1, request.since_ms, request.beyond_ms
        )
        return bool(due)


class ProducerExpiry(_Sweep):
    """Forgets idempotent producers that have not written to a shared stream for a day.

    Like `Expiry`, it ignores what no correct clock would have left to this term for `DOUBTED_MS`.
    """

    async def step(self) -> None:
        """Forget all idle producers."""
        log_time = self._controller.log_time
        doubts = log_time.elapsed_ms < DOUBTED_MS
        since_ms = max(0, log_time.began_ms - JUMP_MS) if doubts else 0
        request = requests.ExpireProducers(
            limit=EXPIRE_BATCH_MAX, idle_ms=PRODUCER_IDLE_MS, since_ms=since_ms
        )
        await self._write_while(lambda: self._is_due(request), request)

    def _is_due(self, request: requests.ExpireProducers) -> bool:
        before_ms = self._controller.log_time.now_ms() - request.idle_ms
        return self._controller.cluster_metadata.has_idle_producer(
            before_ms, request.since_ms - request.idle_ms
        )


class StreamSweep(_Sweep):
    """Destroys the remains of deleted streams that were too large for one log entry."""

    async def step(self) -> None:
        """Sweep until nothing is left."""
        await self._write_while(
            lambda: self._controller.cluster_metadata.has_sweepings(),  # noqa: PLW0108 (a snapshot replaces the metadata)
            requests.SweepDeletedStreams(limit=SWEEP_BATCH_MAX),
        )


class SetObjectSweep(_Sweep):
    """Destroys stream set objects without live ranges whose nodes are fenced or have departed."""

    def __init__(
        self, controller: MetadataController, sessions: Sessions, interval_ms: int
    ) -> None:
        super().__init__(controller, interval_ms)
        self._sessions = sessions

    async def step(self) -> None:
        """Examine all stream set objects of such nodes once."""
        if not self._controller.is_active:
            return
        try:
            for node in read_nodes(self._controller):
                is_fenced = self._sessions.state(node.node_id) is NodeState.FENCED
                # Active nodes compact their own, and would find objects destroyed in the middle of
                # it.
                if node.stream_set_object_count and (node.departed or is_fenced):
                    await self._sweep_node(node.node_id)
        except ApiError as error:
            _log.info("sweep_postponed", request="DestroyDeadStreamSetObjects", reason=str(error))

    async def _sweep_node(self, node_id: int) -> None:
        after, destroyed = -1, 0
        while True:
            request = requests.DestroyDeadStreamSetObjects(
                node_id=node_id, after_object_id=after, limit=SET_OBJECT_BATCH_MAX
            )
            answer = (await self._controller.write(request)).answer
            assert isinstance(answer, answers.DestroyDeadStreamSetObjectsAnswer)
            destroyed += answer.destroyed
            # The metadata continues after the last examined object, destroyed or not.
            after = answer.next_after
            if after < 0:
                break
        if destroyed:
            _log.info("dead_set_objects_destroyed", node=node_id, count=destroyed)


class UploadSweep(_Sweep):
    """Aborts multipart uploads under object ids that no longer exist.

    A writer that dies during such an upload leaves parts that no listing of objects shows and that
    cost as much as objects. Its id expires like any other and is never issued again, so once the
    metadata has forgotten it the upload can never be committed. Uploads under ids that are known,
    not issued, or undecided after a restore, are left alone, as are uploads under other clusters'
    keys.
    """

    def __init__(
        self,
        controller: MetadataController,
        store: ObjectStore,
        namespace: str,
        interval_ms: int,
        *,
        may_delete: Callable[[], bool],
        is_undecided: Callable[[int], bool],
    ) -> None:
        super().__init__(controller, interval_ms)
        self._is_undecided = is_undecided
        self._store = store
        self._namespace = namespace
        self._may_delete = may_delete

    async def step(self) -> None:
        """List the bucket's unfinished uploads once. Rejected ones wait for the next step."""
        uploads = self._own_uploads()
        try:
            while self._controller.is_active and self._may_delete():
                batch = await in_thread(lambda: list(islice(uploads, UPLOAD_BATCH_MAX)))
                if not batch:
                    return

                if dead := self._dead(batch):
                    aborted, refusals = await in_thread(partial(self._abort, dead))
                    if aborted:
                        count, example = len(aborted), aborted[0].key
                        _log.info("unfinished_uploads_dropped", count=count, example=example)
                    if refusals:
                        _log.warning("unfinished_uploads_not_dropped", reason=str(refusals[0]))
        except StorageError as error:
            _log.warning("unfinished_uploads_not_dropped", reason=str(error))

    def _own_uploads(self) -> Iterator[tuple[int, MultipartUpload]]:
        """List the unfinished uploads of this cluster, with their object ids."""
        for upload in self._store.list_multipart_uploads():
            key = parse_key(upload.key, self._namespace)
            # Ids from before a restore are decided by an operator, and other keys belong to others.
            if isinstance(key, OwnKey) and not self._is_undecided(key.object_id):
                yield key.object_id, upload

    def _dead(self, batch: Sequence[tuple[int, MultipartUpload]]) -> list[MultipartUpload]:
        request = requests.CheckObjects(object_ids=tuple(object_id for object_id, _ in batch))
        answer = self._controller.cluster_metadata.query(request)
        assert isinstance(answer, answers.CheckObjectsAnswer)
        return [
            upload
            for (_, upload), state in zip(batch, answer.states, strict=True)
            if state is ObjectState.REMOVED
        ]

    def _abort(
        self, uploads: Sequence[MultipartUpload]
    ) -> tuple[list[MultipartUpload], list[StorageError]]:
        """Abort uploads. Returns the aborted ones, and the errors of the others.

        Raises `StoreUnavailableError` if the bucket does not answer.
        """
        aborted: list[MultipartUpload] = []
        refusals: list[StorageError] = []
        for upload in uploads:
            try:
                self._store.abort_multipart(upload)
                aborted.append(upload)
            # Further uploads would fail the same way.
            except StoreUnavailableError:
                raise
            except StorageError as error:
                refusals.append(error)
        return aborted, refusals
