"""Single writer: orders requests, applies and replicates them, and answers once committed.

Every mutation is decided against the latest metadata, uncommitted changes included. It is applied
immediately, appended to the log, and answered when the high watermark passes it. An answer that
changes nothing waits for the state it was decided on. Losing leadership undoes every uncommitted
change. A request's error is only ever a reply and never affects leadership.

Runs on one event loop and contains no rules of its own: those are in `metadata` and `quorum`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import structlog

from streammeta.controller import errors
from streammeta.controller.ids import SnapshotId
from streammeta.controller.metadata.api import answer_budget
from streammeta.controller.metadata.api.answers import Answer
from streammeta.controller.metadata.api.requests import (
    ClaimBucket,
    PrepareObjects,
    ReadRequest,
    WriteRequest,
)
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.registries.limits import MetadataLimits, require_room
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import Record
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.interfaces import ReplicatedLog, SnapshotPoint
from streammeta.controller.runtime.load.admission import Gate, TurnBudget
from streammeta.controller.runtime.persistence import metadata_checkpoint, state_hashes
from streammeta.controller.runtime.quorum_errors import NotCaughtUpError
from streammeta.controller.runtime.replication.log_time import LogTime
from streammeta.controller.runtime.replication.waiters import OffsetWaiters
from streammeta.controller.runtime.writer import bucket_permits
from streammeta.controller.runtime.writer.change_feed import ChangeFeed
from streammeta.controller.runtime.writer.submission import CommitTally, Phases, Submission
from streammeta.controller.snapshot.checkpoint_file import Sink
from streammeta.controller.trust.node_binding import NodeBinding
from streammeta.rpc import tracing
from streammeta.tls.identity import Principal

_log = structlog.get_logger(component="runtime")

WAITING_ANSWERS_MAX = 100_000
"""Maximum number of answers that wait for the high watermark. Further requests are rejected."""

SESSION_READ_TIMEOUT_MS = 5_000
"""Default timeout of a read that waits for an offset, in milliseconds."""


class _ReadAgainError(Exception):
    """The state of a read was undone, or may stay uncommitted for long: retry the read."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, and the end of the log that it depends on.

    A later read that passes `offset` to any controller observes at least this state.
    """

    answer: Answer
    offset: int


@dataclass(frozen=True, slots=True)
class StateHash:
    """Hashes of the metadata and of the log at `offset`.

    `digest` is the metadata's (32 bytes), `log_hash` the log's below the offset (16 bytes).
    """

    offset: int
    digest: bytes
    log_hash: bytes


class MetadataController:
    """Replicated state machine: the metadata on top of the log."""

    def __init__(
        self,
        cluster_metadata: ClusterMetadata,
        clock: Clock,
        object_ids: bucket_permits.ObjectIdGate | None = None,
        read_checkpoint: Callable[
            [BinaryIO, SnapshotId], metadata_checkpoint.LoadedMetadata
        ] = metadata_checkpoint.read_metadata,
        limits: MetadataLimits | None = None,
        lease: bucket_permits.MarkerLease | None = None,
    ) -> None:
        """Assemble the parts. The defaults of `object_ids` and `lease` impose no limit."""
        self._limits = limits or MetadataLimits()
        self._read_checkpoint = read_checkpoint
        self._metadata = cluster_metadata
        self.log_time = LogTime(clock)
        self._object_ids = bucket_permits.open_gate() if object_ids is None else object_ids
        self._log: ReplicatedLog | None = None
        self._answers = OffsetWaiters()
        self._reads = OffsetWaiters()
        self._session_reads = OffsetWaiters()
        self._active = False
        self._committed_end = 0
        self._uncommitted: deque[tuple[int, Sequence[Record]]] = deque()
        self._on_leadership: list[Callable[[bool], None]] = []
        self._changes = ChangeFeed()
        self._gate = Gate(clock)
        self.answer_turns = TurnBudget(1)
        self.binding = NodeBinding()
        self.commits = CommitTally()
        self._log_hash = state_hashes.RollingHash()
        self._awaited_views = state_hashes.AwaitedViews(self._view_at)
        self.lease = bucket_permits.unbounded_lease() if lease is None else lease

    def bind(self, log: ReplicatedLog) -> None:
        """Connect the log. Call once, before the log starts."""
        self._log = log

    def on_leadership(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` with True when this node starts to serve writes, else with False."""
        self._on_leadership.append(listener)

    @property
    def is_active(self) -> bool:
        """Whether this node leads and has applied everything committed."""
        return self._active

    @property
    def committed_end(self) -> int:
        """Exclusive end of the log that is committed and applied here."""
        return self._committed_end

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for entries that are not applied here yet."""
        return len(self._session_reads) > 0

    @property
    def cluster_metadata(self) -> ClusterMetadata:
        """The metadata, for queries whose result may be stale or uncommitted (sizes, deadlines)."""
        return self._metadata

    @property
    def gate(self) -> Gate:
        """Admission control of RPCs."""
        return self._gate

    @property
    def changes(self) -> ChangeFeed:
        """Feed of committed entries for watchers, on every controller."""
        return self._changes

    async def write(self, request: WriteRequest, held_to: Principal | None = None) -> Answered:
        """Decide, replicate and answer one mutation.

        `held_to` is the broker it may speak for, if limited.

        Raises:
            NotYourNodeError: the caller may not speak for the request's node.
            NotLeaderError: this node does not lead.
            InvalidRequestError: the request is malformed.
            LimitExceededError: the request or the backlog is too large, or disks are full.
            QuotaExceededError: the metadata would exceed a limit.
            OutcomeUnknownError: leadership or the lease was lost, or disks became full, before the
                commit.
            MarkerUnseenError, SupersededError, BucketRejectedError, FencePendingError: there is no
                lease on the marker in the bucket, or the bucket belongs to another cluster.
            ObjectIdsNotReadyError, BucketRejectedError, MetadataOlderThanBucketError: the request
                needs object ids, and none can be issued.
        """
        if type(request) is PrepareObjects:
            self._leading_log()
            await self._object_ids.decided()
        if tracing.is_traced():
            return await self._write_traced(request, held_to)
        await self.turn()
        submission = self.submit((request,), held_to)
        await submission.committed()
        return Answered(submission.answers[0], submission.offset)

    async def _write_traced(self, request: WriteRequest, held_to: Principal | None) -> Answered:
        phases = Phases()
        await self.turn()
        phases.pass_on("admitted")
        submission = self.submit((request,), held_to)
        phases.pass_on("decided")
        submission.tell_flushed(partial(phases.pass_on, "flushed"))
        await submission.committed()
        phases.pass_on("committed")
        phases.record(type(request).__name__, (), {"offset": submission.offset})
        return Answered(submission.answers[0], submission.offset)

    async def turn(self) -> None:
        """Wait until a mutation is worth a log batch, so that waiting callers share one.

        Raises:
            NotLeaderError: this node does not lead.
            BusyError: too many requests are waiting.
        """
        self._require_capacity(self._answers)
        log = self._leading_log()
        await self.lease.decided()
        await log.append_turn()

    def submit(
        self,
        requests: Sequence[WriteRequest],
        held_to: Principal | None = None,
        answered_bytes: int = 0,
    ) -> Submission:
        """Decide mutations one after another and replicate them, without waiting.

        An error ends the series. Earlier requests take effect if they commit, but their answers are
        lost, so the caller should repeat all of them, which is safe. `answered_bytes` is the size
        of other answers in the same message. No request is decided if the broker `held_to` may not
        make one of them.

        Raises as `write` does, except OutcomeUnknownError.
        """
        log = self._leading_log()
        lease = self.lease if _need_lease(requests) else None
        if lease is not None:
            lease.require()
        self._require_capacity(self._answers)
        if held_to is not None:
            self.require_own(requests, held_to)
        answers: list[Answer] = []
        is_proven = False
        end_offset = log.next_offset
        for request in requests:
            decision = self._metadata.decide(request, self.log_time.now_ms(), end_offset)
            require_room(self._metadata, decision.records, self._limits)
            if type(request) is PrepareObjects and decision.records:
                self._object_ids.check(self._metadata.next_object_id + request.count)
            answered_bytes += answer_budget.commit_bytes(decision.answer)
            answer_budget.require_rest(answered_bytes, "commits")
            answers.append(decision.answer)
            is_proven = bool(decision.records)
            if is_proven:
                end_offset = self._replicate(log, end_offset, decision.records)

        # The wait begins now, so that no loss of leadership can go unnoticed by the caller.
        if not is_proven and end_offset > self._committed_end:
            log.require_disk_space()  # else the state of the answer may not commit for long
        waiting = self._answers.until(end_offset) if end_offset > self._committed_end else None
        return Submission(answers, end_offset, waiting, log, lease, is_proven)

    def require_own(self, requests: Sequence[WriteRequest], held_to: Principal) -> None:
        """Require that a broker may speak for the nodes of all requests.

        Raises as `submit` does.
        """
        self.binding.require(held_to, requests, self._metadata.node)

    async def read(
        self,
        request: ReadRequest,
        at_least: int | None = None,
        timeout_ms: int = SESSION_READ_TIMEOUT_MS,
    ) -> Answered:
        """Answer a query from committed state only.

        Without `at_least` the read is linearizable: it observes everything acknowledged before it
        began, and only the leader answers. With `at_least` any controller answers once it has
        applied the log below that offset. The reader then observes its own reads and writes, but
        possibly nothing newer.

        Raises:
            NotLeaderError: the read is linearizable, and this node does not lead.
            InvalidRequestError: the request is malformed.
            BusyError: too many requests are waiting.
            NotCaughtUpError: `at_least` was not applied and committed here within `timeout_ms`.
        """
        if at_least is None:
            return await self._read_linearizably(request)
        if at_least < 0:
            raise errors.InvalidRequestError("at_least", f"{at_least}, must be 0 or more")
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._applied(at_least)
                return await self._read_committed(request)
        except TimeoutError:
            wanted = max(at_least, self._shown_end())
            raise NotCaughtUpError(wanted, self._committed_end) from None

    @property
    def is_settled(self) -> bool:
        """Whether the current metadata is committed."""
        return self._bound_log().next_offset <= self._committed_end

    def flush(self) -> None:
        """Replicate the requests of this event loop turn immediately.

        Otherwise they wait for the next turn, and further requests of this turn join them.
        """
        self._bound_log().flush()

    async def settled(self) -> None:
        """Wait until the current metadata is committed. Raises as `write` does."""
        await self._committed(self._leading_log().next_offset)

    async def frozen(self) -> metadata_checkpoint.FrozenCheckpoint:
        """Return an immutable, committed, linearizable view of the metadata. No write waits for it.

        Raises:
            NotLeaderError: this node does not lead, or stopped leading meanwhile.
            BusyError: too many requests are waiting.
        """
        log = self._leading_log()
        await log.read_barrier()
        self._leading_log()
        frozen = self._freeze(log.snapshot_point())
        await self._shown(log, frozen.id.end_offset)
        return frozen

    async def state_hash(self, at_offset: int | None) -> StateHash:
        """Return hashes that are equal on every controller for equal metadata and logs.

        The hash covers the metadata exactly at `at_offset`, or the current metadata for None. Any
        controller answers. An offset ahead of its end is awaited, and the hash is computed in a
        thread.

        Raises:
            InvalidRequestError: `at_offset` is negative, or too far ahead.
            OffsetPassedError: the metadata is already past `at_offset`.
            BusyError: too many hashes are pending.
        """
        if at_offset is not None and at_offset < 0:
            raise errors.InvalidRequestError("at_offset", f"{at_offset}, must be 0 or more")
        seen = await self._committed_view(at_offset)
        return StateHash(seen.offset, await asyncio.to_thread(seen.view.digest), seen.log_hash)

    def on_committed(self, batches: Sequence[Batch], high_watermark: int) -> None:
        """Apply committed batches, except those applied when this node appended them."""
        for batch in batches:
            if batch.kind is BatchKind.DATA:
                self._replay(batch)
        self._metadata.forget_undo(high_watermark)
        self._log_hash.forget_undo(high_watermark)
        self._awaited_views.freeze_up_to(high_watermark)
        self._advance(high_watermark)
        self._changes.extend(batches, high_watermark)

    def freeze(self, point: SnapshotPoint) -> Callable[[Sink], object]:
        """Return a writer of the current metadata, uncommitted entries included."""
        return self._freeze(point).write

    def load(self, file: BinaryIO, snapshot_id: SnapshotId) -> Callable[[], None]:
        """Read metadata from a checkpoint file. The returned call replaces this node's with it.

        Raises:
            CheckpointError: the file is damaged, or another checkpoint.
        """
        return partial(self._replace, self._read_checkpoint(file, snapshot_id))

    def on_leadership_claimed(self, epoch: int) -> None:
        """Start serving: everything committed has been applied."""
        self._active = True
        self.log_time.begin_term()
        _log.info("leadership_claimed", epoch=epoch, end_offset=self._committed_end)
        for listener in self._on_leadership:
            listener(True)

    def on_leadership_lost(self) -> None:
        """Undo uncommitted changes. The next leader decides their outcome."""
        self._active = False
        self._metadata.undo_to(self._committed_end)
        self._log_hash.undo_to(self._committed_end)
        self._uncommitted.clear()
        self._answers.fail_all(
            errors.OutcomeUnknownError(
                "leadership was lost during replication: retry the request with the same id"
            )
        )
        self._reads.fail_all(_ReadAgainError())
        _log.info("leadership_lost", end_offset=self._committed_end)
        for listener in self._on_leadership:
            listener(False)

    def on_writes_refused(self) -> None:
        """Answer reads from committed state: other entries may wait for disk space indefinitely."""
        self._reads.fail_all(_ReadAgainError())

    def on_writes_held_up(self) -> None:
        """Fail callers that wait for disk space. Their entries may still be committed."""
        self._answers.fail_all(
            errors.OutcomeUnknownError(
                "the disks became full during replication, and the request may take effect when "
                "there is room: retry it with the same id"
            )
        )

    def _bound_log(self) -> ReplicatedLog:
        if self._log is None:
            raise errors.InvariantError("the controller was used before its log was bound")
        return self._log

    def _leading_log(self) -> ReplicatedLog:
        log = self._bound_log()
        if not self._active:
            raise log.leader_hint()
        return log

    def _require_capacity(self, waiters: OffsetWaiters) -> None:
        waiting = len(waiters) + len(self._reads)
        if waiting >= WAITING_ANSWERS_MAX:
            raise errors.BusyError(f"{waiting} requests are waiting for a commit, retry later")

    def _replicate(self, log: ReplicatedLog, offset: int, records: Sequence[Record]) -> int:
        # Apply first: a record that can't be applied must never be replicated.
        payload = encode_records(records)
        answer_budget.require_entry(len(payload))
        self._awaited_views.freeze_up_to(offset)
        self._metadata.apply(offset, records)
        try:
            end_offset = log.append([payload], required_base_offset=offset)
        except Exception:
            self._metadata.undo_to(offset)
            raise
        self._uncommitted.append((offset, records))
        self._log_hash.extend(offset, payload)
        self._awaited_views.freeze_up_to(end_offset)
        return end_offset

    def _replay(self, batch: Batch) -> None:
        for index, payload in enumerate(batch.payloads):
            offset = batch.base_offset + index
            if offset < self._metadata.applied_end_offset:
                continue
            if self._active:
                raise errors.InvariantError(
                    f"the record at offset {offset} is committed, but this leader has only "
                    f"replayed its log below {self._metadata.applied_end_offset}"
                )
            self._awaited_views.freeze_up_to(offset)
            self._metadata.apply(offset, decode_records(payload))
            self._log_hash.extend(offset, payload)

    def _advance(self, high_watermark: int) -> None:
        self._committed_end = high_watermark
        # A committed entry can no longer be undone.
        while self._uncommitted and self._uncommitted[0][0] < high_watermark:
            self._uncommitted.popleft()
        self._answers.release(high_watermark)
        self._reads.release(high_watermark)
        self._session_reads.release(high_watermark)

    async def _committed(self, end_offset: int) -> None:
        if end_offset > self._committed_end:
            await self._answers.until(end_offset)

    async def _read_linearizably(self, request: ReadRequest) -> Answered:
        log = self._leading_log()
        self._require_capacity(self._answers)
        await log.read_barrier()
        while True:
            self._leading_log()
            answered = self._query_shown(request)
            if await self._is_committed(answered.offset):
                return answered

    def _query_shown(self, request: ReadRequest) -> Answered:
        """Answer from the latest metadata, or from committed state while disks are full."""
        if self._active and self._bound_log().is_short_of_space:
            return Answered(self._query_committed(request), self._committed_end)
        return Answered(self._metadata.query(request), self._shown_end())

    async def _is_committed(self, end_offset: int) -> bool:
        """Wait until a read's answer is committed. Returns False if the read must be repeated."""
        if end_offset <= self._committed_end:
            return True
        try:
            await self._reads.until(end_offset)
        except _ReadAgainError:
            return False
        return True

    def _query_committed(self, request: ReadRequest) -> Answer:
        """Answer from committed state by undoing uncommitted changes temporarily.

        An answer usually waits until its state is committed. While disks are full, that wait may
        never end.
        """
        self._metadata.undo_to(self._committed_end)
        try:
            return self._metadata.query(request)
        finally:
            for offset, records in self._uncommitted:
                self._metadata.apply(offset, records)

    async def _read_committed(self, request: ReadRequest) -> Answered:
        while True:
            answered = self._query_shown(request)
            if await self._is_committed(answered.offset):
                return answered

    async def _committed_view(self, at_offset: int | None) -> state_hashes.ViewAt:
        while True:
            end_offset = self._shown_end()
            offset = end_offset if at_offset is None else at_offset
            if offset > end_offset + state_hashes.AHEAD_MAX:
                raise errors.InvalidRequestError(
                    "at_offset",
                    f"{offset}, may be at most {state_hashes.AHEAD_MAX} above {end_offset}",
                )
            if offset < self._metadata.applied_end_offset:
                raise errors.OffsetPassedError(offset, self._metadata.applied_end_offset)

            if offset <= end_offset:
                seen = self._view_at(offset)
            else:
                seen = await self._awaited_views.at(offset)

            try:
                if seen.committed is not None:
                    await seen.committed
            except errors.OutcomeUnknownError:
                continue  # the view was undone, take a new one

            return seen

    def _view_at(self, offset: int) -> state_hashes.ViewAt:
        # The wait begins now, so that no undo can go unnoticed by the caller.
        waiting = self._answers.until(offset) if offset > self._committed_end else None
        return state_hashes.ViewAt(offset, self._metadata.freeze(), self._log_hash.value, waiting)

    async def _shown(self, log: ReplicatedLog, end_offset: int) -> None:
        """Wait until the leader's metadata at `end_offset` is committed."""
        try:
            await self._committed(end_offset)
        except errors.OutcomeUnknownError:
            raise log.leader_hint() from None

    def _shown_end(self) -> int:
        return self._bound_log().next_offset if self._active else self._committed_end

    async def _applied(self, end_offset: int) -> None:
        if end_offset <= self._committed_end:
            return
        self._require_capacity(self._session_reads)
        waiting = self._session_reads.until(end_offset)
        self._bound_log().hurry()
        try:
            await waiting
        except asyncio.CancelledError:
            self._session_reads.forget(waiting)  # the offset may never be reached
            raise

    def _freeze(self, point: SnapshotPoint) -> metadata_checkpoint.FrozenCheckpoint:
        if self._metadata.applied_end_offset > point.snapshot_id.end_offset:
            raise errors.InvariantError(
                f"the metadata contains the log below {self._metadata.applied_end_offset}, but its "
                f"snapshot should end at {point.snapshot_id.end_offset}"
            )
        return metadata_checkpoint.FrozenCheckpoint(
            point, self._metadata.freeze(), self._log_hash.value
        )

    def _replace(self, loaded: metadata_checkpoint.LoadedMetadata) -> None:
        if self._active:
            raise errors.InvariantError("a snapshot must not replace the metadata of a leader")
        self._metadata = loaded.cluster_metadata
        self._log_hash = state_hashes.RollingHash(loaded.log_hash)
        end_offset = self._metadata.applied_end_offset
        self._awaited_views.reject_below(end_offset)
        self._awaited_views.freeze_up_to(end_offset)
        self._advance(end_offset)
        self._changes.restart(end_offset)


def _need_lease(requests: Sequence[WriteRequest]) -> bool:
    """Whether any request needs the lease. A claim of the bucket precedes the first lease."""
    return any(type(request) is not ClaimBucket for request in requests)
