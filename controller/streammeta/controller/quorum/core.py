"""State machine of the quorum: time and one event in, effects out.

No clock, socket, disk or logger is used here. The only randomness is the `random.Random` passed to
the constructor, so one seed replays one run exactly. The same object runs in production and in the
simulator. Messages may be lost, duplicated, reordered or delayed for any time. An `InvariantError`
means that the quorum's rules were broken, and the process must end.
"""

from __future__ import annotations

import random
from typing import assert_never

from streammeta.controller.errors import InvariantError, LogOfBeforeError
from streammeta.controller.ids import EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import events, messages, recovered_log, roles
from streammeta.controller.quorum.config import QuorumConfig, QuorumState
from streammeta.controller.quorum.election import Election
from streammeta.controller.quorum.following import FollowerRole
from streammeta.controller.quorum.leading import LeaderRole
from streammeta.controller.quorum.log_view import LogStart, LogView
from streammeta.controller.quorum.membership import Membership
from streammeta.controller.quorum.replica import Replica
from streammeta.controller.quorum.voters import VoterSet


class QuorumCore:
    """One replica of the quorum."""

    def __init__(
        self,
        config: QuorumConfig,
        state: QuorumState,
        log_start: LogStart,
        rng: random.Random,
    ) -> None:
        self._replica = Replica(config, state, log_start, rng)
        last_epoch = self._replica.log.last_epoch
        if last_epoch > state.epoch:
            raise InvariantError(
                f"the log contains a batch of epoch {last_epoch} but the quorum-state file ends at "
                f"epoch {state.epoch}: the file was lost or replaced with an older one"
            )
        self._election = Election(self._replica)
        self._membership = Membership(self._replica)
        self._leading = LeaderRole(self._replica, self._membership)
        self._following = FollowerRole(self._replica, self._election)

    # -- views for the driver

    @property
    def role(self) -> roles.Role:
        """Return the current role, read-only."""
        return self._replica.role

    @property
    def epoch(self) -> Epoch:
        """Return the current epoch."""
        return self._replica.epoch

    @property
    def leader_id(self) -> NodeId | None:
        """Return the leader of the current epoch, or None if it is unknown or resigned here."""
        return None if isinstance(self._replica.role, roles.Resigned) else self._replica.leader_id

    @property
    def high_watermark(self) -> EndOffset:
        """Return the exclusive end of the committed log, which never decreases."""
        return self._replica.high_watermark

    @property
    def log(self) -> LogView:
        """Return the index of the log, read-only."""
        return self._replica.log

    @property
    def is_established(self) -> bool:
        """Whether this replica leads and may append and read."""
        return self._leading.is_established()

    @property
    def voters(self) -> VoterSet:
        """Return the current voters, committed or not. The set is empty while they are unknown."""
        return self._replica.voters

    def voters_at(self, end_offset: EndOffset) -> VoterSet:
        """Return the voters named by the log below `end_offset`."""
        return self._replica.voters_at(end_offset)

    @property
    def is_voter(self) -> bool:
        """Whether this replica is one of the current voters."""
        return self._replica.is_voter

    @property
    def is_repairing(self) -> bool:
        """Whether damage removed acknowledged batches that are not restored yet.

        It can't vote then.
        """
        return self._replica.lost is not None

    @property
    def is_transferring(self) -> bool:
        """Whether the leader waits for a chosen successor to catch up."""
        role = self._replica.role
        return isinstance(role, roles.Leader) and role.transfer is not None

    @property
    def full_majority(self) -> tuple[NodeId, ...]:
        """Return the voters with full disks, if this leader can commit nothing without them."""
        role = self._replica.role
        return role.full_majority if isinstance(role, roles.Leader) else ()

    @property
    def newest_snapshot(self) -> SnapshotId | None:
        """Return the newest durable snapshot of this replica."""
        return self._replica.snapshots[-1] if self._replica.snapshots else None

    @property
    def uncommitted_bytes(self) -> int:
        """Return the payload bytes that the leader has appended and not yet committed."""
        role = self._replica.role
        return role.uncommitted_bytes if isinstance(role, roles.Leader) else 0

    @property
    def uncommitted_batches(self) -> int:
        """Return the number of data batches that the leader has appended and not yet committed."""
        role = self._replica.role
        return len(role.uncommitted) if isinstance(role, roles.Leader) else 0

    def next_deadline(self) -> int | None:
        """Return the time of the next `Tick`, or None if only events can change anything.

        A tick at that time may find nothing to do yet.
        """
        role = self._replica.role
        if type(role) is roles.Leader and self._replica.now < role.idle_until:
            return role.next_answer_or_check()
        return min(self._deadlines(), default=None)

    # -- stepping

    def start(self, now_ms: int) -> list[events.Effect]:
        """Assume the role that the recovered state requires. Call once, before any step.

        A replica recorded as the leader starts as Resigned. Its unflushed entries are lost, and it
        must not reuse their offsets in the same epoch.
        """
        replica = self._replica
        replica.now = now_ms
        if replica.leader_id == replica.local.node_id:
            successors = tuple(voter.key for voter in replica.others)
            # Followers campaign immediately instead of waiting for a fetch timeout.
            replica.become_resigned(successors, "restarted")
        elif replica.leader_id is not None:
            replica.become_follower(replica.epoch, replica.leader_id)
        else:
            replica.become_unattached(replica.epoch)
        # A single voter needs no other vote, so it does not wait for an election timeout.
        if replica.may_campaign and len(replica.voters) == 1:
            self._election.campaign()
        return self._finish()

    def step(self, now_ms: int, event: events.Event) -> list[events.Effect]:
        """Process one event at a time that never decreases."""
        self._replica.now = max(self._replica.now, now_ms)
        # Anything but routine traffic may change a deadline that the leader has cached.
        if not _is_routine(event):
            self._leading.clear_idle_time()
        match event:
            case events.Tick():
                pass
            case events.Received(message=message):
                self._on_message(message)
            case events.WriteDone(token=token):
                self._on_write_done(token)
            case events.Append(payloads=payloads):
                self._leading.append(payloads)
                # Overdue work waits for the next event: a resignation here would place a role
                # change between the append and its caller's bookkeeping.
                self._leading.serve_delayed()
                return self._replica.finish()
            case events.ReadIndexRequested(read_id=read_id):
                self._leading.request_read_index(read_id)
            case events.LogReadDone(read_id=read_id, batches=batches):
                self._leading.on_log_read(read_id, batches)
            case events.RequestFailed(peer=peer, request_id=request_id):
                self._on_request_failed(peer, request_id)
            case events.PeerConnectionLost(peer=peer):
                self._following.on_leader_ended(peer)
            case events.Resign():
                self._leading.resign("asked to resign")
            case _:
                self._on_maintenance(event)

        return self._finish()

    def _on_write_done(self, token: int) -> None:
        replica = self._replica
        # Nobody could act on this replica's state before it was durable, so its deadlines move.
        roles.postpone_deadlines(replica.role, replica.writes.done(token, replica.now), replica.now)
        replica.log.write_done(token)
        self._leading.update_high_watermark()
        self._following.on_flushed()

    def _on_maintenance(
        self,
        event: events.TransferRequested
        | events.VoterChangeRequested
        | events.SnapshotTaken
        | events.SnapshotReadDone
        | events.SnapshotInstalled
        | events.StateDone
        | events.TimeLost
        | events.DiskFull,
    ) -> None:
        replica = self._replica
        match event:
            case events.TransferRequested(to=to):
                self._membership.request_transfer(to)
            case events.VoterChangeRequested(change_id=change_id, change=change):
                self._membership.request_change(change_id, change)
                self._leading.update_high_watermark()
            case events.SnapshotTaken(snapshot_id=snapshot_id):
                self._on_snapshot_taken(snapshot_id)
            case events.SnapshotReadDone(read_id=read_id, chunk=chunk):
                self._leading.on_snapshot_read(read_id, chunk)
            case events.SnapshotInstalled():
                self._following.on_snapshot_installed(event)
            case events.StateDone(token=token):
                took_ms = replica.writes.state_done(token, replica.now)
                roles.postpone_deadlines(replica.role, took_ms, replica.now)
            case events.TimeLost(lost_ms=lost_ms):
                roles.postpone_deadlines(replica.role, lost_ms, replica.now)
            case events.DiskFull(is_full=is_full):
                self._following.on_disk_full(is_full=is_full)
            case _:
                assert_never(event)

    def _on_snapshot_taken(self, snapshot_id: SnapshotId) -> None:
        """Move the log's start to the oldest retained snapshot."""
        replica = self._replica
        newest = self.newest_snapshot
        is_newer = newest is None or snapshot_id.end_offset > newest.end_offset
        if not is_newer or replica.installing is not None:
            return

        is_committed = snapshot_id.end_offset <= replica.high_watermark
        if (
            not is_committed
            or replica.log.epoch_before(snapshot_id.end_offset) != snapshot_id.epoch
        ):
            raise InvariantError(
                f"{snapshot_id} was taken of a log that is only committed below "
                f"{replica.high_watermark}"
            )

        # The log keeps reaching back to an older snapshot, so that slow followers can still fetch.
        replica.snapshots.append(snapshot_id)
        del replica.snapshots[: -replica.config.limits.snapshots_kept]
        has_enough = len(replica.snapshots) == replica.config.limits.snapshots_kept
        if has_enough and replica.snapshots[0].end_offset > replica.log.start_offset:
            replica.trim(replica.snapshots[0].end_offset)

    def _finish(self) -> list[events.Effect]:
        # Leaders and followers step most often, and only their own rules can apply to them.
        match self._replica.role:
            case roles.Leader():
                self._leading.on_time()
            case roles.Follower():
                self._following.on_time()
            case _:
                self._election.on_time()
                self._leading.on_time()
                self._following.on_time()
        self._leading.serve_delayed()
        return self._replica.finish()

    def _on_request_failed(self, peer: NodeId, request_id: int) -> None:
        kind, is_late = self._replica.requests.match_failure(peer, request_id, self._replica.now)
        # The failed request belongs to the current role, because a change of role forgets all
        # requests.
        if kind is messages.VoteResponse:
            self._election.on_vote_request_failed(peer, is_late=is_late)
        elif kind in (messages.FetchResponse, messages.FetchSnapshotResponse):
            self._following.on_fetch_failed(peer)
        elif kind is messages.BeginQuorumEpochResponse:
            self._leading.on_announcement_failed(peer)
        elif kind is messages.EndQuorumEpochResponse:
            self._leading.on_end_failed(peer)

    # -- messages

    def _on_message(self, message: messages.Message) -> None:
        if isinstance(message, messages.Request):
            self._on_request(message)
        else:
            self._on_response(message)

    def _on_request(self, request: messages.Request) -> None:
        # The cluster is checked first: epochs of different clusters are not comparable.
        if request.header.cluster_id != self._replica.config.cluster_id:
            self._reject(request, messages.QuorumError.INCONSISTENT_CLUSTER_ID)
        elif recovered_log.carries_log_from_before_recovery(request, self._replica.log.end_offset):
            self._reject(request, messages.QuorumError.LOG_OF_BEFORE)
        elif isinstance(request, messages.LeaderRequest):
            self._on_leader_request(request)
        else:
            self._on_voter_request(request)

    def _on_leader_request(self, request: messages.LeaderRequest) -> None:
        # Only the leader of exactly this epoch may answer: its log and high watermark define the
        # epoch.
        error = self._leading.check(request)
        if error is not messages.QuorumError.NONE:
            self._reject(request, error)
            return
        match request:
            case messages.FetchRequest():
                self._leading.on_fetch(request)
            case messages.FetchSnapshotRequest():
                self._leading.on_fetch_snapshot(request)
            case messages.UpdateVoterRequest():
                self._membership.on_update_voter(request)

    def _on_voter_request(self, request: messages.VoterRequest) -> None:
        replica = self._replica
        epoch = request.header.epoch
        if isinstance(request, messages.VoteRequest) and not _is_valid_vote(request):
            self._reject(request, messages.QuorumError.INVALID_REQUEST)
            return
        # The response carries the newer epoch, so the sender catches up.
        if epoch < replica.epoch:
            self._reject(request, messages.QuorumError.FENCED_LEADER_EPOCH)
            return
        if self._addresses_former_disk(request):
            self._reject(request, messages.QuorumError.INVALID_VOTER_KEY)
            return

        match request:
            case messages.VoteRequest():
                if epoch > replica.epoch:
                    replica.become_unattached(epoch)
                self._election.on_vote_request(request)
            case messages.BeginQuorumEpochRequest():
                self._following.on_begin_quorum_epoch(request)
            case messages.EndQuorumEpochRequest():
                if epoch > replica.epoch:
                    replica.become_follower(epoch, request.header.sender.node_id)
                self._following.on_end_quorum_epoch(request)

    def _addresses_former_disk(self, request: messages.VoterRequest) -> bool:
        """Whether the sender claims to lead a quorum in which another disk of this voter votes.

        No leader of this quorum can: its log would miss a committed change of the voters. A leader
        from before a recovery can, and must not be followed.
        """
        if isinstance(request, messages.VoteRequest):
            return False  # the vote is denied later, after its epoch is adopted
        return self._replica.is_voter and not self._replica.is_self(request.header.receiver)

    def _reject(self, request: messages.Request, error: messages.QuorumError) -> None:
        replica = self._replica
        match request:
            case messages.FetchRequest():
                replica.answer_fetch(request, error=error)
            case messages.FetchSnapshotRequest():
                replica.answer_fetch_snapshot(request, error=error)
            case messages.VoteRequest():
                replica.answer_vote(request, error)
            case _:
                replica.acknowledge(request, error)

    def _on_response(self, response: messages.Response) -> None:
        replica = self._replica
        header = response.header
        if not replica.requests.match_response(header, type(response)):
            return
        if header.error is messages.QuorumError.LOG_OF_BEFORE:
            raise LogOfBeforeError(header.sender, replica.log.end_offset)

        is_rejected = header.error in (
            messages.QuorumError.INCONSISTENT_CLUSTER_ID,
            messages.QuorumError.UNKNOWN_LEADER_EPOCH,
        )
        if is_rejected or header.epoch < replica.epoch:
            if isinstance(response, messages.FetchResponse | messages.FetchSnapshotResponse):
                self._following.on_fetch_failed(header.sender)
            return
        # A response of a newer epoch only teaches the epoch and its leader. Its contents answer a
        # request of a role that has just ended.
        if header.epoch > replica.epoch:
            if header.leader_id is None:
                replica.become_unattached(header.epoch)
            else:
                replica.become_follower(header.epoch, header.leader_id)
            return

        if header.leader_id is not None and self._is_new_leader(header.leader_id):
            replica.become_follower(header.epoch, header.leader_id)
            return

        self._on_answer(response)

    def _is_new_leader(self, leader_id: NodeId) -> bool:
        """Whether this replica does not follow this leader of the current epoch yet."""
        replica = self._replica
        if leader_id != replica.leader_id:
            return True
        # A replica that may not campaign searches again for a leader that it lost contact with.
        return isinstance(replica.role, roles.Unattached) and leader_id != replica.local.node_id

    def _on_answer(self, response: messages.Response) -> None:
        match response:
            case messages.VoteResponse():
                self._election.on_vote_response(response)
            case messages.FetchResponse():
                self._following.on_fetch_response(response)
            case messages.EndQuorumEpochResponse():
                self._leading.on_end_acknowledged(response.header.sender)
            case messages.FetchSnapshotResponse():
                self._following.on_fetch_snapshot_response(response)
            case messages.BeginQuorumEpochResponse() | messages.UpdateVoterResponse():
                pass  # the outcome shows in the voter's Fetches and in the log

    # -- time

    def _deadlines(self) -> list[int]:
        replica = self._replica
        match replica.role:
            case roles.Leader() as leader:
                return self._leader_deadlines(leader)
            case roles.Follower() as follower:
                return [] if replica.installing is not None else self._follower_deadlines(follower)
            case roles.Unattached(election_deadline=deadline, next_search=next_search):
                if replica.may_campaign:
                    return self._unless_writing(deadline)
                return [] if replica.installing is not None else [next_search]
            case roles.Prospective(starts_at=starts_at, deadline=deadline, asked=asked):
                return self._unless_writing(deadline if asked else starts_at)
            case roles.Candidate(deadline=deadline):
                return self._unless_writing(deadline)
            case roles.Resigned(election_deadline=deadline, unacknowledged=unacknowledged):
                return [*self._unless_writing(deadline), *unacknowledged.values()]
            case _:
                assert_never(replica.role)

    def _unless_writing(self, deadline: int) -> list[int]:
        """Return a deadline of the role, or nothing while the quorum-state is being written."""
        return [] if self._replica.writes.is_state_pending else [deadline]

    def _follower_deadlines(self, follower: roles.Follower) -> list[int]:
        replica = self._replica
        waiting = [
            until
            for kind in (messages.FetchResponse, messages.FetchSnapshotResponse)
            if (until := replica.requests.expiry(follower.leader_id, kind)) is not None
            and until > replica.now
        ]
        # An expired request is retried at `next_fetch`, so only running ones postpone the next
        # Fetch.
        deadlines = self._unless_writing(follower.fetch_deadline)
        deadlines.append(max(waiting, default=follower.next_fetch))
        if (keepalive_at := self._following.next_keepalive(follower)) is not None:
            deadlines.append(keepalive_at)
        if self._following.must_update(follower):
            deadlines.append(follower.next_update)
        return deadlines

    def _leader_deadlines(self, leader: roles.Leader) -> list[int]:
        leading = self._leading
        deadlines = [delayed.answer_by for delayed in leader.delayed_fetches.values()]
        deadlines.extend(map(leading.next_heartbeat, leader.progress_of(self._replica.others)))
        others = [leading.quorum_deadline(leader), leading.full_disks.next_check(leader)]
        if leader.transfer is not None:
            others.append(self._membership.next_check(leader.transfer, leader))
        if leader.voter_change is not None:
            others.append(self._membership.round_deadline(leader.voter_change))
        deadlines.extend(deadline for deadline in others if deadline is not None)
        return deadlines


_ROUTINE = frozenset(
    (
        events.Tick,
        events.WriteDone,
        events.StateDone,
        events.Append,
        events.ReadIndexRequested,
        events.LogReadDone,
    )
)


def _is_routine(event: events.Event) -> bool:
    """Whether an event belongs to normal traffic, which never advances a leader's deadlines."""
    if type(event) is events.Received:
        return type(event.message) is messages.FetchRequest
    return type(event) in _ROUTINE


def _is_valid_vote(request: messages.VoteRequest) -> bool:
    if request.last_epoch < 0 or request.end_offset < 0:
        return False
    # A pre-vote opens no epoch, so the sender's current epoch may already have batches.
    if request.pre_vote:
        return request.last_epoch <= request.header.epoch
    return request.last_epoch < request.header.epoch
