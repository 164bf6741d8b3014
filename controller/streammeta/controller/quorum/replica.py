"""State of one replica and its legal transitions. The rules that trigger them are elsewhere.

Owns epoch, vote, leader and role, and the effects collected in a step. A change of epoch, vote or
leader becomes a `PersistQuorumState` ahead of every other write of the step, and every message of
the step waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import events, messages, roles
from streammeta.controller.quorum.candidacy import Candidacy
from streammeta.controller.quorum.config import QuorumConfig, QuorumState
from streammeta.controller.quorum.log_view import EMPTY_LOG_END, LogStart, LogView
from streammeta.controller.quorum.pending import PendingRequests, PendingWrites
from streammeta.controller.quorum.voters import ReplicaKey, VoterHistory, VoterSet

_ACKNOWLEDGEMENTS: dict[
    type[messages.Request],
    type[
        messages.BeginQuorumEpochResponse
        | messages.EndQuorumEpochResponse
        | messages.UpdateVoterResponse
    ],
] = {
    messages.BeginQuorumEpochRequest: messages.BeginQuorumEpochResponse,
    messages.EndQuorumEpochRequest: messages.EndQuorumEpochResponse,
    messages.UpdateVoterRequest: messages.UpdateVoterResponse,
}


class Replica:
    """State shared by the rules for election, leaders and followers."""

    def __init__(
        self,
        config: QuorumConfig,
        state: QuorumState,
        recovered: LogStart,
        rng: random.Random,
    ) -> None:
        self.config = config
        self.timings = config.timings
        self.log = LogView(recovered, config.limits.tail_bytes)
        self.snapshots = list(recovered.snapshots)
        self.lost = recovered.lost
        self.installing: SnapshotId | None = None
        self.is_disk_full = False
        self.full_since = 0
        """Time at which the disk last became full, in ms of the monotonic clock."""
        self.chunk_bytes = config.limits.snapshot_chunk_bytes
        """Bytes of a snapshot to request at once. It shrinks on a link that is too slow for
        more."""
        self.is_chunk_awaited = False
        self.epoch = state.epoch
        self.vote = state.vote
        self.leader_id = state.leader_id
        self.role: roles.Role = roles.Unattached(0)
        self.high_watermark = (
            self.snapshots[-1].end_offset if self.snapshots else self.log.start_offset
        )
        self.now = 0
        self.writes = PendingWrites()
        self.candidacy = Candidacy()
        self.is_founder = config.bootstrap_voters.contains(config.local)
        """Whether this disk was formatted for a first voter."""
        self._history = self._recover_voters(recovered)
        self._cache_voters()
        self._rng = rng
        self.requests = PendingRequests(rng.getrandbits(62))
        self._persisted = state
        self._announced_voters = VoterSet()
        self._token = 0
        self._state_token = 0
        self._last_write = 0
        self._is_probing = False
        self._writes_in_step = 0
        self._writes: list[events.Effect] = []
        self._first: list[events.Effect] = []
        self._sends: list[messages.Message] = []
        self._last: list[events.Effect] = []

    def _recover_voters(self, recovered: LogStart) -> VoterHistory:
        history = VoterHistory(
            recovered.snapshot_voters or self.config.bootstrap_voters,
            recovered.snapshots[-1].end_offset if recovered.snapshots else EMPTY_LOG_END,
        )
        for batch in recovered.control:
            voters = messages.decode_voters(batch)
            # Batches below the snapshot's end are covered by the voters that it names.
            if voters is not None and batch.end_offset > history.latest_end:
                history.append(batch.end_offset, voters)
        return history

    def _cache_voters(self) -> None:
        """Cache the current voters, which every step reads."""
        self.voters = self._history.latest
        """The current voters: the last ones named by the log, committed or not."""
        self.others = self.voters.others(self.local.node_id)
        """The current voters except this replica."""
        self._earlier = [
            voter.key.node_id for voter in self.others if voter.key.node_id < self.local.node_id
        ]
        """Voters that campaign before this replica."""
        named = self.voters.find(self.local.node_id)
        self.is_voter = named is not None and self.is_self(named.key)
        """Whether this replica votes."""
        self.is_known = named == self.config.voter
        """Whether the current voters include this replica's disk and both of its endpoints."""

    # -- voters and times

    @property
    def local(self) -> ReplicaKey:
        """Return this replica's own key."""
        return self.config.local

    @property
    def voters_named_at(self) -> EndOffset:
        """Return the end of the batch that names the current voters, 0 if none does."""
        return self._history.latest_end

    def voters_at(self, end_offset: EndOffset) -> VoterSet:
        """Return the voters named by the log below `end_offset`."""
        return self._history.at(end_offset)

    @property
    def may_campaign(self) -> bool:
        """Whether this replica may ask for votes.

        It may not while its log misses entries that damage removed, or is being replaced with a
        snapshot.
        """
        if self.lost is not None or self.installing is not None:
            return False
        return self.is_voter or self._may_be_voter()

    def _may_be_voter(self) -> bool:
        """Whether it voted before a change that is not known to be committed.

        It may be the only replica that has the change, and then no other can be elected. As the
        leader it does not count itself (Ongaro, section 4.2.2). Changes are made one at a time, so
        the previous set is committed.
        """
        if self.voters_named_at <= self.high_watermark:
            return False
        before = self.voters_at(EndOffset(self.voters_named_at - 1))
        named = before.find(self.local.node_id)
        return named is not None and self.is_self(named.key)

    def is_self(self, key: ReplicaKey) -> bool:
        """Whether `key` is this replica.

        A key without a directory means the disk that the node was formed with. It never means a
        replica that joined later, which may have replaced a disk that had voted.
        """
        if key.directory_id is None:
            return self.is_founder and key.node_id == self.local.node_id
        return key == self.local

    def choose(self, nodes: Sequence[NodeId]) -> NodeId:
        """Return one of `nodes` at random."""
        return self._rng.choice(nodes)

    def draw_election_timeout(self) -> int:
        """Return a random wait in [T, 2T)."""
        timeout = self.timings.election_timeout_ms
        return timeout + self._rng.randrange(timeout)

    def next_fetch_deadline(self, leader_id: NodeId) -> int:
        """Return the time after which the leader counts as lost without a successful Fetch.

        Followers that last heard from the leader together would campaign together and split the
        vote. Each therefore waits a little longer than those before it.
        """
        # A fixed stagger instead of randomness, so that the order of campaigns is predictable.
        return self.now + self.timings.fetch_timeout_ms + self.failover_delay(leader_id)

    def failover_delay(self, leader_id: NodeId) -> int:
        """Return how long this voter waits with a campaign after the loss of `leader_id`."""
        earlier = len(self._earlier) - (leader_id in self._earlier)
        return earlier * self.timings.failover_stagger_ms

    def draw_backoff(self) -> int:
        """Return a random wait that grows with consecutive lost elections, up to 2T."""
        timeout = self.timings.election_timeout_ms
        # At first a fiftieth of the election timeout, doubling with every lost election.
        bound = min(timeout * 2, max(2, timeout // 50) << min(self.candidacy.lost_elections, 10))
        return self._rng.randrange(bound)

    def is_due(self, deadline: int) -> bool:
        """Whether a deadline of the role has passed.

        No deadline passes while the replica's own state is being written: until then it can't act
        in any epoch.
        """
        return self.now >= deadline and not self.writes.is_state_pending

    # -- transitions

    def become_unattached(self, epoch: Epoch) -> None:
        """Adopt a newer `epoch` without a leader, or fall back within the current one.

        Falling back keeps the vote.
        """
        if epoch > self.epoch:
            self._adopt_epoch(epoch, None)
        self._change_role(roles.Unattached(self.now + self.draw_election_timeout()))

    def become_follower(self, epoch: Epoch, leader_id: NodeId) -> None:
        """Follow the leader of `epoch`. The vote of the same epoch is kept."""
        if leader_id == self.local.node_id and not self.is_voter:
            # An earlier disk of this node led. This one has yet to learn of the next leader.
            self.become_unattached(epoch)
            return
        if leader_id == self.local.node_id:
            raise InvariantError(
                f"a peer names node {leader_id} as the leader of epoch {epoch}, but its data "
                f"directory is at epoch {self.epoch}: the directory was lost or replaced"
            )

        if epoch > self.epoch:
            self._adopt_epoch(epoch, leader_id)
        elif self.leader_id not in (None, leader_id):
            raise InvariantError(
                f"epoch {epoch} has two leaders: node {self.leader_id} and node {leader_id}"
            )

        self.leader_id = leader_id
        deadline = self.next_fetch_deadline(leader_id)
        self._change_role(roles.Follower(leader_id, deadline, next_fetch=self.now))

    def become_prospective(self, delay: int = 0) -> None:
        """Ask for pre-votes after `delay` milliseconds."""
        starts_at = self.now + delay
        role = roles.Prospective(
            starts_at, starts_at + self.draw_election_timeout(), granted=self._initial_votes()
        )
        self._change_role(role)

    def become_candidate(self) -> None:
        """Vote for itself in a new epoch, or ask again in an epoch in which it already did.

        An epoch that has had a leader, even this replica itself, is never resumed.
        """
        is_candidacy = self.vote == self.local and self.leader_id is None
        if is_candidacy and self.candidacy.may_resume(self.voters):
            self.candidacy.resume()
        else:
            self._adopt_epoch(Epoch(self.epoch + 1), None)
            self.vote = self.local
            self.candidacy.begin()
        self._change_role(
            roles.Candidate(self.now + self.draw_election_timeout(), granted=self._initial_votes())
        )

    def _initial_votes(self) -> set[NodeId]:
        """Return the initial votes of a campaign: its own, if this replica is a voter."""
        return {self.local.node_id} if self.is_voter else set()

    def become_leader(self) -> None:
        """Lead the epoch of the won election."""
        assert self.vote == self.local, "a candidate votes for itself"
        assert self.leader_id is None, "an epoch has at most one leader"
        assert self.lost is None, "a damaged replica must not lead"
        self.leader_id = self.local.node_id
        self.candidacy.on_leader()
        progress = {
            voter.key: roles.ReplicaProgress(
                voter.key, last_fetch=self.now, last_contact=self.now, next_heartbeat=self.now
            )
            for voter in self.others
        }
        # The first batch of the epoch begins here. Reads and appends wait until it is committed.
        start = self.log.end_offset
        self._change_role(roles.Leader(start, progress))
        self._last.append(events.LeadershipStarted(self.epoch, start))

    def become_resigned(self, successors: tuple[ReplicaKey, ...], reason: str) -> None:
        """Stop leading the current epoch, and notify the voters. Operators read the reason."""
        role = roles.Resigned(
            self.now + self.draw_election_timeout(),
            successors,
            {voter.key.node_id: self.now for voter in self.others},
        )
        self._change_role(role, reason)

    def _adopt_epoch(self, epoch: Epoch, leader_id: NodeId | None) -> None:
        if epoch <= self.epoch:
            raise InvariantError(f"epoch {epoch} does not follow epoch {self.epoch}")
        self.epoch = epoch
        # A vote and a leader belong to one epoch.
        self.vote = None
        self.leader_id = leader_id
        self.candidacy.on_epoch()

    def _change_role(self, role: roles.Role, reason: str = "") -> None:
        old = self.role
        if isinstance(old, roles.Leader):
            why = reason or f"epoch {self.epoch} has begun elsewhere"
            self._first.append(events.LeadershipEnded(self._persisted.epoch, why))
            self._last.extend(events.ReadIndexRejected(read.read_id) for read in old.pending_reads)
            self._reject_waiting(old)
        # Answers to the former role's requests mean nothing to the new role.
        self.requests.forget_all()
        self.role = role

    def _reject_waiting(self, old: roles.Leader) -> None:
        delayed = [item.request for item in old.delayed_fetches.values()]
        for request in (*delayed, *old.log_reads.values()):
            self.answer_fetch(request, error=messages.QuorumError.NOT_LEADER)
        for snapshot_request in old.snapshot_reads.values():
            self.answer_fetch_snapshot(snapshot_request, error=messages.QuorumError.NOT_LEADER)
        if old.voter_change is not None:
            self._last.append(
                events.VoterChangeRejected(
                    old.voter_change.change_id,
                    messages.QuorumError.NOT_LEADER,
                    "leadership was lost and the change may or may not happen: check before retry",
                )
            )

    # -- the log

    def append(self, batches: tuple[messages.Batch, ...]) -> None:
        """Append to the log. Voters named by the batches are the current ones from now on."""
        token = self._next_write()
        self.log.append(batches, token)
        self._writes.append(events.AppendLog(token, batches))
        for batch in batches:
            if (
                batch.kind is messages.BatchKind.CONTROL
                and (voters := messages.decode_voters(batch)) is not None
            ):
                self._history.append(batch.end_offset, voters)
                self._cache_voters()

    def truncate(self, end_offset: EndOffset) -> None:
        """Truncate the log, never below the high watermark."""
        if end_offset < self.high_watermark:
            raise InvariantError(
                f"truncation to {end_offset} would remove committed entries up to "
                f"{self.high_watermark}"
            )
        self.log.truncate(end_offset)
        self._history.truncate(end_offset)
        self._cache_voters()
        self._writes.append(events.TruncateLog(self._next_write(), end_offset))

    def trim(self, start_offset: EndOffset) -> None:
        """Remove the log below the end of a durable snapshot."""
        if not any(start_offset == snapshot.end_offset for snapshot in self.snapshots):
            raise InvariantError(f"the log can't begin at {start_offset}: no snapshot ends there")
        self.log.trim(start_offset)
        self._history.trim(start_offset)
        self._writes.append(events.TrimLog(self._next_write(), start_offset))

    def install(self, snapshot_id: SnapshotId, total_bytes: int, digest: bytes) -> None:
        """Replace the log with a downloaded snapshot. No other write happens until that is done."""
        self.installing = snapshot_id
        self._writes.append(
            events.InstallSnapshot(self._next_write(), snapshot_id, total_bytes, digest)
        )

    def restart_at_snapshot(self, snapshot_id: SnapshotId, voters: VoterSet) -> None:
        """Restart the log at the end of an installed snapshot."""
        self.log.restart_at_snapshot(snapshot_id)
        self.snapshots = [snapshot_id]
        self._history = VoterHistory(voters, snapshot_id.end_offset)
        self._cache_voters()
        # A snapshot only contains committed entries.
        self.raise_high_watermark(snapshot_id.end_offset)

    def clear_damage(self) -> None:
        """Vote again: everything that damage removed is restored."""
        self.lost = None
        self._writes.append(events.ClearDamage(self._next_write()))

    def _next_write(self) -> int:
        # One token is reserved for the state, which is written ahead of everything else.
        self._writes_in_step += 1
        return self._token + 1 + self._writes_in_step

    def raise_high_watermark(self, end_offset: EndOffset) -> bool:
        """Commit up to `end_offset`. Returns False if that is already committed."""
        if end_offset <= self.high_watermark:
            return False
        if end_offset > self.log.end_offset:
            raise InvariantError(
                f"high watermark {end_offset} is above the log's end {self.log.end_offset}"
            )
        # Only up to the old high watermark: the driver still delivers newly committed batches
        # from memory.
        self.log.trim_tail(self.high_watermark)
        self.high_watermark = end_offset
        self._last.append(events.CommitAdvanced(end_offset))
        return True

    # -- messages

    def request_header(self, to: NodeId, kind: type[messages.Response]) -> messages.RequestHeader:
        """Begin a request that `kind` answers. It replaces the previous one to that peer."""
        expires_at = self.now + self.timings.request_timeout_ms
        request_id = self.requests.begin(to, kind, expires_at)
        voter = self.voters.find(to)
        return messages.RequestHeader(
            cluster_id=self.config.cluster_id,
            sender=self.local,
            receiver=voter.key if voter else ReplicaKey(to),
            epoch=self.epoch,
            incarnation=self.requests.incarnation,
            request_id=request_id,
            is_founder=self.is_founder,
        )

    def answer(
        self, header: messages.RequestHeader, error: messages.QuorumError
    ) -> messages.ResponseHeader:
        """Return the header of an answer with this replica's epoch and leader."""
        return messages.ResponseHeader(
            sender=self.local.node_id,
            receiver=header.sender.node_id,
            epoch=self.epoch,
            leader_id=self.leader_id,
            error=error,
            incarnation=header.incarnation,
            request_id=header.request_id,
        )

    def answer_fetch(
        self,
        request: messages.FetchRequest,
        *,
        error: messages.QuorumError = messages.QuorumError.NONE,
        read_round: int = 0,
        diverging: messages.EpochEnd | None = None,
        snapshot_id: SnapshotId | None = None,
        batches: tuple[messages.Batch, ...] = (),
    ) -> None:
        """Answer a Fetch with the current high watermark."""
        response = messages.FetchResponse(
            header=self.answer(request.header, error),
            high_watermark=self.high_watermark,
            log_start_offset=self.log.start_offset,
            read_round=read_round,
            diverging=diverging,
            snapshot_id=snapshot_id,
            batches=batches,
        )
        self.send(response)

    def answer_fetch_snapshot(
        self,
        request: messages.FetchSnapshotRequest,
        *,
        error: messages.QuorumError = messages.QuorumError.NONE,
        chunk: events.SnapshotChunk | None = None,
    ) -> None:
        """Answer with bytes of a snapshot, or with the error."""
        response = messages.FetchSnapshotResponse(
            header=self.answer(request.header, error),
            snapshot_id=request.snapshot_id,
            total_bytes=chunk.total_bytes if chunk else 0,
            position=request.position,
            data=chunk.data if chunk else b"",
            file_digest=chunk.digest if chunk else b"",
        )
        self.send(response)

    def answer_vote(
        self, request: messages.VoteRequest, error: messages.QuorumError, *, granted: bool = False
    ) -> None:
        """Answer whether the vote, or the pre-vote, is granted."""
        header = self.answer(request.header, error)
        self.send(messages.VoteResponse(header=header, pre_vote=request.pre_vote, granted=granted))

    def acknowledge(
        self,
        request: messages.BeginQuorumEpochRequest
        | messages.EndQuorumEpochRequest
        | messages.UpdateVoterRequest,
        error: messages.QuorumError = messages.QuorumError.NONE,
    ) -> None:
        """Answer a request whose response is only a header."""
        kind = _ACKNOWLEDGEMENTS[type(request)]
        self.send(kind(header=self.answer(request.header, error)))

    def send(self, message: messages.Message) -> None:
        """Send at the end of the step, after the writes that the message depends on."""
        self._sends.append(message)

    def emit(self, effect: events.Effect) -> None:
        """Add an effect that needs no write."""
        self._last.append(effect)

    def write_chunk(self, chunk: events.WriteSnapshotChunk) -> None:
        """Write part of a download, in order with the other writes. Nothing waits for it."""
        self._writes.append(chunk)

    def probe_disk(self) -> None:
        """Write the unchanged quorum-state again, to measure how long that takes."""
        self._is_probing = True

    # -- the end of a step

    def _send_after(self, message: messages.Message) -> events.Send:
        """Return the effect that sends a message after the write that it depends on.

        A Fetch acknowledges the log below its offset. Other messages vouch for the quorum-state
        only. So does a Fetch from the flushed end while the disk is full or slow.
        """
        receiver = message.header.receiver
        to = receiver.node_id if isinstance(receiver, ReplicaKey) else receiver
        is_ahead = isinstance(self.role, roles.Follower) and self.role.is_keepalive
        if isinstance(message, messages.FetchRequest) and not (self.is_disk_full or is_ahead):
            return events.Send(to, message, self._last_write)
        return events.Send(to, message, self._state_token, vouches_for_log=False)

    def _has_new_state(self) -> bool:
        """Whether the durable state differs from the last one written."""
        last = self._persisted
        if self.epoch != last.epoch or self.leader_id != last.leader_id:
            return True
        # The identity check is a fast path: this runs in every step.
        return self.vote is not last.vote and self.vote != last.vote

    def finish(self) -> list[events.Effect]:
        """Return the step's effects in the order in which they must be executed."""
        assert self.high_watermark <= self.log.end_offset, "committed entries are in the log"
        effects = self._first
        self._first = []
        self._token += 1
        # The state goes first: a vote or epoch must be durable before any write or message of it.
        if self._is_probing or self._has_new_state():
            self._write_state(effects)
        if self._writes:
            effects.extend(self._writes)
            self._token += self._writes_in_step
            if self._writes_in_step:
                self._last_write = self._token
                self.writes.begin(self._token, self.now, is_state=False)
            self._writes, self._writes_in_step = [], 0

        if self._sends:
            effects.extend(map(self._send_after, self._sends))
            self._sends = []

        if self.voters is not self._announced_voters and self.voters != self._announced_voters:
            self._announced_voters = self.voters
            effects.append(events.VotersChanged(self.voters))

        if self._last:
            effects.extend(self._last)
            self._last = []

        return effects

    def _write_state(self, effects: list[events.Effect]) -> None:
        """Add the write of the quorum-state, and record which messages wait for it.

        Another replica's leadership binds a follower to nothing beyond its vote and epoch, so the
        follower need not write it before it answers. A leader must write its own: it restarts as
        Resigned.
        """
        before = self._persisted
        state = self._persisted = QuorumState(self.epoch, self.vote, self.leader_id)
        is_binding = (state.epoch, state.vote) != (before.epoch, before.vote)
        if is_binding or state.leader_id == self.local.node_id:
            self._state_token = self._token
        self._is_probing = False
        self._last_write = self._token
        self.writes.begin(self._token, self.now, is_state=True)
        effects.append(events.PersistQuorumState(self._token, state))
