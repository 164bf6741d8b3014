"""Driver of a quorum core: passes it messages and time, and executes its effects in order.

Owns the core, the journal's thread and the callers that wait for them, but not delivery and
checkpoints. Appends of one event loop turn become one batch and one flush. Everything runs on one
event loop. No call of the state machine blocks, and none is made from within another.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import structlog

from streammeta.controller.errors import InvariantError, NotLeaderError
from streammeta.controller.ids import EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum import events
from streammeta.controller.quorum.config import QuorumConfig
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.messages import Request, Response
from streammeta.controller.quorum.roles import Leader, Resigned
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.controller.runtime import interfaces
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.persistence import quorum_disk
from streammeta.controller.runtime.persistence.checkpointer import Checkpointer, CheckpointLimits
from streammeta.controller.runtime.persistence.disk_space import DiskSpace
from streammeta.controller.runtime.replication import operations, waiters
from streammeta.controller.runtime.replication.append_batching import AppendTurns, FormingBatch
from streammeta.controller.runtime.replication.core_loop import CoreLoop, Outbox
from streammeta.controller.runtime.replication.delivery import Deliverer
from streammeta.storage.durable_files import DiskFullError

_log = structlog.get_logger(component="quorum")

_STOP_ROUNDS = 20


class QuorumDriver:
    """One replica in production."""

    def __init__(
        self,
        *,
        config: QuorumConfig,
        journal: Journal,
        transport: interfaces.PeerTransport,
        state_machine: interfaces.StateMachine,
        clock: Clock,
        rng: random.Random | None = None,
        checkpoints: CheckpointLimits | None = None,
    ) -> None:
        self._config = config
        self._transport = transport
        self._state_machine = state_machine
        self._clock = clock
        self._core = QuorumCore(
            config, journal.quorum_state, journal.log_start, rng or random.Random()
        )
        self._disk = self._make_disk(journal)
        self.checkpointer = self._make_checkpointer(journal, checkpoints or CheckpointLimits())
        self._deliverer = Deliverer(
            self, self.checkpointer, self._core, journal, self._disk, state_machine
        )
        self._outbox = Outbox(transport)
        self._core_loop = self._make_core_loop()
        self._operations = operations.Operations(self._core_loop.feed)
        self._reads = waiters.ReadIndex(
            waiters.ReadRounds(config.limits.max_pending_reads),
            clock,
            self._core_loop.feed,
            self._schedule_flush,
        )
        self._is_stopping = False
        self._forming = FormingBatch(config.limits)
        self._turns = AppendTurns()
        self._flush_scheduled = False
        self._disk_space = DiskSpace(
            config.local.node_id,
            config.timings.fetch_timeout_ms,
            on_short=self._on_short_of_space,
            on_impatient=state_machine.on_writes_held_up,
        )
        self._elected: events.LeadershipStarted | None = None
        self._claimed_epoch: Epoch | None = None
        self._commits = waiters.OffsetWaiters()
        self._flushes = waiters.FlushWaiters()
        self.fatal: asyncio.Future[None] = asyncio.Future()
        transport.bind(self)

    # -- parts that need threads or the machine's timers; a simulation has its own

    def _make_disk(self, journal: Journal) -> quorum_disk.JournalThread:
        return quorum_disk.JournalThread(
            journal, on_report=self._on_report, on_full=self._on_full, on_error=self._fail
        )

    def _make_checkpointer(self, journal: Journal, limits: CheckpointLimits) -> Checkpointer:
        return Checkpointer(
            host=self,
            journal=journal,
            disk=self._disk,
            state_machine=self._state_machine,
            clock=self._clock,
            limits=limits,
            on_error=self._fail,
        )

    def _make_core_loop(self) -> CoreLoop:
        return CoreLoop(
            self._core,
            self._clock,
            take_appends=self._take_appends,
            carry_out=self._carry_out,
            on_error=self._fail,
        )

    # -- start and stop

    async def start(self) -> None:
        """Start participating in the quorum."""
        self._disk.start()
        self._transport.set_voters(self._core.voters)
        self._core_loop.start()
        self._core_loop.enter(self._deliverer.run)
        self.checkpointer.start()

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested. False also when the replica ends with an error."""
        return self._is_stopping

    async def stop(self, hurried: asyncio.Event) -> None:
        """Wait up to a fetch timeout for commits, resign, notify the voters, flush, and end.

        Once `hurried` is set, only this replica's own disk is waited for.
        """
        await self._finish_appends(hurried)
        self._core_loop.feed(events.Resign())
        for _ in range(_STOP_ROUNDS):
            role = self._core.role
            is_announced = not isinstance(role, Resigned) or not role.unacknowledged
            if self.fatal.done() or is_announced or hurried.is_set():
                break
            await asyncio.sleep(self._config.timings.retry_backoff_ms / 1000)
        self._halt(NotLeaderError())
        await self.checkpointer.stopped()
        await self._deliverer.stop()
        await self._disk.stop()
        await self._transport.close()

    async def _finish_appends(self, hurried: asyncio.Event) -> None:
        self._is_stopping = True
        if self._claimed_epoch is None or not self._core_loop.is_running:
            return
        self._flush()
        hurry = asyncio.create_task(hurried.wait())
        ends: tuple[asyncio.Future[Any], ...] = (
            self.when_committed(self._core.log.end_offset),
            hurry,
        )
        timeout_s = self._config.timings.fetch_timeout_ms / 1000
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()

    def _halt(self, error: Exception) -> None:
        self._core_loop.stop()
        self.checkpointer.halt()
        self._outbox.close()
        self._operations.close(error)
        self._reads.close(error)
        self._commits.fail_all(error)
        self._turns.give()
        self._disk_space.close()

    def _fail(self, error: BaseException) -> None:
        """Stop immediately: a crashed voter is safe, an inconsistent one is not."""
        if self.fatal.done():
            return
        self.fatal.set_exception(error)
        self.fatal.exception()  # marked as retrieved, because the server awaits it later
        try:
            self._lose_leadership()
        finally:
            self._halt(NotLeaderError())
            _log.critical("quorum_failed", error=repr(error), epoch=self._core.epoch)

    # -- requests of the state machine

    @property
    def epoch(self) -> Epoch:
        """Return the current epoch."""
        return self._core.epoch

    @property
    def high_watermark(self) -> EndOffset:
        """Return the end of the entries known to be committed."""
        return self._core.high_watermark

    @property
    def next_offset(self) -> int:
        """Return the offset of the next appended payload."""
        return self._core.log.end_offset + len(self._forming)

    @property
    def is_short_of_space(self) -> bool:
        """Whether appended entries may wait for disk space here or on other voters."""
        return self._disk_space.is_short

    @property
    def is_leader(self) -> bool:
        """Whether leadership was announced to the state machine and has not been lost since."""
        return self._claimed_epoch is not None

    @property
    def leader(self) -> tuple[NodeId, str] | None:
        """Return the leader's node id and where clients reach it, if both are known."""
        leader_id = self._core.leader_id
        if leader_id is None:
            return None
        endpoint = self._transport.endpoints(leader_id).clients
        return None if endpoint is None else (leader_id, endpoint)

    def endpoints(self, node_id: NodeId) -> interfaces.Endpoints:
        """Return the best known addresses of a controller, this one included."""
        return self._transport.endpoints(node_id)

    def leader_hint(self) -> NotLeaderError:
        """Return the error that sends a client to the leader."""
        leader = self.leader
        if leader is None or leader[0] == self._config.local.node_id:
            return NotLeaderError(epoch=self._core.epoch)
        return NotLeaderError(*leader, self._core.epoch, self.endpoints(leader[0]).tokens or "")

    async def append_turn(self) -> None:
        """Wait while enough batches are in flight. Waiting callers share the next one.

        An append without this wait is correct but costs more.
        """
        if len(self._forming) == 0 and not self._disk_space.is_short:
            await self._turns.wait(self._core.uncommitted_batches)

    def append(self, payloads: Sequence[bytes], *, required_base_offset: int) -> int:
        """Replicate payloads in order, and return the end offset at which they are committed.

        Appends of one event loop turn share a batch. A rejection appends nothing.

        Raises:
            NotLeaderError: this node does not lead, or is transferring leadership.
            RecordTooLargeError: a payload is larger than the batch limit.
            UncommittedLogFullError: too many bytes wait for a majority.
            NoDiskSpaceError: this node's disk, or a majority of disks, is full.
            InvariantError: the first payload would not get `required_base_offset`.
        """
        self._require_leadership()
        self.require_disk_space()
        if self._is_stopping or self._core.is_transferring:
            raise self.leader_hint()
        if required_base_offset != self.next_offset:
            raise InvariantError(
                f"append at {required_base_offset} to a log that ends at {self.next_offset}"
            )
        self._forming.add(payloads, self._core.uncommitted_bytes, required_base_offset)
        self._schedule_flush()
        return self.next_offset

    def flush(self) -> None:
        """Begin a batch with the appends of this event loop turn, if there are any.

        Otherwise the batch begins in the next turn, with all appends until then.
        """
        if len(self._forming):
            self._core_loop.flush()

    def require_disk_space(self) -> None:
        """Raise NoDiskSpaceError while appends are rejected because of full disks."""
        self._disk_space.require()

    async def read_barrier(self) -> int:
        """Prove that this node leads from now on. Returns the offset that a read must have applied.

        Everything committed before the call is below that offset and has been delivered when the
        call returns. A majority has echoed a round that began after the call.

        Raises:
            NotLeaderError: this node does not lead, or stopped leading meanwhile.
            TooManyReadsError: too many reads wait for a majority.
        """
        self._require_leadership()
        return await self._reads.join()

    def resign(self) -> None:
        """Give up leadership, if this node leads. The voter with the longest log should follow."""
        self._core_loop.feed(events.Resign())

    def describe(self) -> operations.QuorumDescription:
        """Return the quorum as this node sees it."""
        return operations.describe_quorum(
            self._core,
            self._config,
            self._clock.monotonic_ms(),
            is_disk_full=self._disk_space.is_disk_full,
            endpoints=self._transport.endpoints,
        )

    # -- requests of operators

    async def add_voter(self, voter: Voter, timeout_ms: int) -> EndOffset:
        """Make a fetching replica a voter. Returns the end of the committed change.

        Raises:
            NotLeaderError: this node does not lead.
            VoterChangeError: it was rejected, or did not finish in time and still may.
        """
        self._require_leadership()
        return await self._operations.change_voters(voter, timeout_ms)

    async def remove_voter(self, key: ReplicaKey, timeout_ms: int) -> EndOffset:
        """Remove a voter, itself included: it leads until the commit.

        Returns and raises as `add_voter`.
        """
        self._require_leadership()
        return await self._operations.change_voters(key, timeout_ms)

    async def transfer_leadership(self, to: NodeId | None, timeout_ms: int) -> None:
        """Transfer leadership to a voter, or to the one with the longest log.

        Returns when it ended.

        Appends are rejected meanwhile. A transfer to the leader itself does nothing.

        Raises:
            NotLeaderError: this node does not lead.
            TransferRefusedError: leadership stays, or did not end in time.
        """
        self._require_leadership()
        if to == self._config.local.node_id and not self._core.is_transferring:
            return
        self._flush()
        await self._operations.transfer(to, timeout_ms)

    def _require_leadership(self) -> None:
        if self._claimed_epoch is None:
            raise self.leader_hint()

    async def take_snapshot(self) -> SnapshotId:
        """Write a checkpoint of this replica now. See `Checkpointer.take`."""
        return await self.checkpointer.take()

    def read_disk(self, read: quorum_disk.DiskRead) -> None:
        """Read batches of the log on disk. See `DiskRead`. Not answered once the replica stops."""
        self._disk.submit(read)

    # -- requests of delivery and checkpoints

    @property
    def is_loading(self) -> bool:
        """Whether a snapshot will replace the state before anything else is delivered."""
        return self._deliverer.is_loading

    def enter(self, work: Callable[[], None]) -> None:
        """Run `work` as a turn of the replica, after which it may have caught up."""

        def turn() -> None:
            work()
            self._claim_if_ready()

        self._core_loop.enter(turn)

    def hurry(self) -> None:
        """Deliver committed entries without a pause, for a waiting caller."""
        if self._core_loop.is_running:
            self._deliverer.run_soon()

    def snapshot_point(self) -> interfaces.SnapshotPoint:
        """End the open batch and return the log position that the state machine has reached.

        On a leader that is the end of its log, committed or not.
        """
        self._flush()
        end_offset, epoch = self._deliverer.end_offset, self._deliverer.epoch
        if self._claimed_epoch is not None:
            end_offset, epoch = self._core.log.end_offset, self._core.log.last_epoch
        return interfaces.SnapshotPoint(
            SnapshotId(end_offset, epoch),
            self._config.cluster_id,
            self._core.voters_at(end_offset),
        )

    def when_committed(self, end_offset: EndOffset) -> asyncio.Future[None]:
        """Return a future that is done when everything below is committed.

        It fails with NotLeaderError if leadership is lost before that.
        """
        future = self._commits.until(end_offset)
        self._commits.release(self._core.high_watermark)
        return future

    def tell_flushed(self, end_offset: int, told: Callable[[], None]) -> None:
        """Call `told` when everything below is on this node's disk, if it leads until then."""
        self._flushes.tell(end_offset, self._core.log.flushed_end, told)

    # -- notifications of the network

    def handle(self, request: Request, reply: interfaces.Reply) -> None:
        """Answer a peer's request by calling `reply` in the step that makes the answer.

        A Fetch may wait as long as it asked for. There is no answer if this replica stops
        meanwhile, or receives the same request again.
        """
        if not self._core_loop.is_running:
            reply(None)
            return
        self._outbox.expect(request, reply)
        self._core_loop.feed(events.Received(request))

    def forget(self, request: Request, reply: interfaces.Reply) -> None:
        """Record that this request no longer waits for an answer."""
        self._outbox.forget(request, reply)

    def on_response(self, response: Response) -> None:
        """Process a peer's answer."""
        self._core_loop.feed(events.Received(response))

    def on_request_failed(self, peer: NodeId, request_id: int) -> None:
        """Record that no answer will come."""
        self._core_loop.feed(events.RequestFailed(peer, request_id))

    def on_connection_lost(self, peer: NodeId) -> None:
        """Record that a peer's process has probably ended."""
        self._core_loop.feed(events.PeerConnectionLost(peer))

    # -- effects

    def _carry_out(self, effects: Sequence[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.Send():
                    self._outbox.send(effect)
                case events.AppendLog():
                    # A follower sends nothing before its flush, while a leader sends batches.
                    self._disk.submit(effect, is_awaited=not isinstance(self._core.role, Leader))
                case events.CommitAdvanced(high_watermark=high_watermark):
                    # First, so that callers see the flush before the commit.
                    self._flushes.release(self._core.log.flushed_end)
                    self._commits.release(high_watermark)
                    self._deliver()
                    self._turns.give_if(self._core.uncommitted_batches)
                case events.InstallSnapshot():
                    self.checkpointer.abandon()
                    self._deliverer.install_begins()
                    self._disk.submit(effect)
                case (
                    events.PersistQuorumState()
                    | events.TruncateLog()
                    | events.TrimLog()
                    | events.WriteSnapshotChunk()
                    | events.ClearDamage()
                    | events.ReadLog()
                    | events.ReadSnapshot()
                ):
                    self._disk.submit(effect)
                case events.LeadershipEnded():
                    _log.info(
                        "leadership_ended",
                        epoch=effect.epoch,
                        reason=effect.reason,
                        had_served=self._claimed_epoch is not None,
                    )
                    self._lose_leadership()
                case events.LeadershipStarted():
                    _log.info("leader_elected", epoch=effect.epoch)
                    self._elected = effect
                case _:
                    self._complete(effect)

    def _deliver(self) -> None:
        if self._claimed_epoch is None and self._elected is None:
            self._deliverer.follow()
        else:
            self._deliverer.run()
            self._claim_if_ready()

    def _complete(self, effect: events.Outcome) -> None:
        """Pass an outcome to its waiting callers."""
        match effect:
            case events.ReadIndexReady():
                self._reads.proven(effect)
            case events.ReadIndexRejected():
                self._reads.refused(effect, self.leader_hint())
            case events.VotersChanged(voters=voters):
                _log.info("voters_changed", voters=[*map(operations.voter_option, voters)])
                self._transport.set_voters(voters)
            case events.FullVotersChanged(full_voters=full_voters):
                self._disk_space.on_majority(full_voters)
            case _:
                self._operations.complete(effect)

    # -- notifications of the disk

    def _on_report(self, report: quorum_disk.CoreReport | quorum_disk.StateWritten) -> None:
        if not self._core_loop.is_running:
            return
        if isinstance(report, quorum_disk.StateWritten):
            self._outbox.state_durable(report.token)
            self._core_loop.feed(events.StateDone(report.token))
            return

        match report:
            case events.WriteDone(token=token):
                self._outbox.durable(token)
            case events.SnapshotInstalled(snapshot_id=snapshot_id, voters=voters):
                self._deliverer.install_ended(snapshot_id, is_installed=voters is not None)
                if voters is not None:
                    self.checkpointer.on_newest(snapshot_id)
            case events.SnapshotTaken(snapshot_id=snapshot_id):
                self.checkpointer.on_newest(snapshot_id)
            case events.LogReadDone() | events.SnapshotReadDone():
                pass

        self._core_loop.feed(report)
        self._flushes.release(self._core.log.flushed_end)

    def _on_full(self, error: DiskFullError | None) -> None:
        if not self._core_loop.is_running:
            return
        self._disk_space.on_disk(error)
        self._core_loop.feed(events.DiskFull(error is not None))

    def _on_short_of_space(self) -> None:
        self._turns.give()  # waiting callers are rejected when they append
        self._state_machine.on_writes_refused()

    # -- appending

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self.flush()
        self._reads.begin()

    def _take_appends(self) -> Iterator[events.Append]:
        return self._forming.appends(
            may_append=lambda: self.is_leader, log_end=lambda: self._core.log.end_offset
        )

    # -- leading

    def _claim_if_ready(self) -> None:
        elected = self._elected
        if elected is None or self._claimed_epoch is not None:
            return
        if self._core.is_established and self._deliverer.is_caught_up():
            self._claimed_epoch = elected.epoch
            self._state_machine.on_leadership_claimed(elected.epoch)

    def _lose_leadership(self) -> None:
        was_claimed = self._claimed_epoch is not None
        self._elected = None
        self._claimed_epoch = None
        self._disk_space.leadership_ended()
        self._forming.clear()
        if was_claimed:
            self._state_machine.on_leadership_lost()
        self._commits.fail_all(NotLeaderError(epoch=self._core.epoch))
        self._flushes.forget_all()
        self._turns.give()
        self._operations.leadership_ended()
        self._reads.refuse_forming(self.leader_hint())
