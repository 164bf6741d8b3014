"""One replica's state and the legal ways to change it; the rules of who changes it lie elsewhere.

Owns epoch, vote, leader and role, the outstanding requests and the effects collected in a step. A
change of epoch, vote or leader becomes a `PersistQuorumState` ahead of every other write of the
step, and every message of the step waits for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from controller.errors import InvariantError
from controller.ids import EndOffset, Epoch, NodeId
from controller.quorum.config import QuorumConfig, QuorumState
from controller.quorum.events import (
    AppendLog,
    CommitAdvanced,
    Effect,
    LeadershipEnded,
    LeadershipStarted,
    PersistQuorumState,
    ReadIndexRefused,
    Send,
    TruncateLog,
)
from controller.quorum.log_view import LogView
from controller.quorum.messages import (
    Batch,
    EpochEnd,
    FetchRequest,
    FetchResponse,
    Message,
    QuorumError,
    RequestHeader,
    ResponseHeader,
)
from controller.quorum.roles import (
    Candidate,
    Follower,
    Leader,
    Prospective,
    ReplicaProgress,
    Resigned,
    Role,
    Unattached,
)
from controller.quorum.voters import ReplicaKey


@dataclass(slots=True)
class Outstanding:
    """A request without an answer yet; one of each type for a peer at most."""

    request_id: int
    expires_at: int


class Replica:
    """State shared by the rules of election, leading and following."""

    def __init__(
        self,
        config: QuorumConfig,
        state: QuorumState,
        log: LogView,
        rng: random.Random,
        incarnation: int,
    ) -> None:
        self.config = config
        self.log = log
        self.epoch = state.epoch
        self.vote = state.vote
        self.leader_id = state.leader_id
        self.role: Role = Unattached(0)
        self.high_watermark = log.start_offset
        self.now = 0
        self.lost_elections = 0
        self._rng = rng
        self._incarnation = incarnation
        self._next_request_id = 0
        self._outstanding: dict[tuple[NodeId, type[Message]], Outstanding] = {}
        self._persisted = state
        self._token = 0
        self._state_token = 0
        self._last_write = 0
        self._log_writes: list[tuple[Batch, ...] | EndOffset] = []
        self._first: list[Effect] = []
        self._sends: list[tuple[NodeId, Message]] = []
        self._last: list[Effect] = []

    # -- who and when

    @property
    def local(self) -> ReplicaKey:
        """Return this replica's own key."""
        return self.config.local

    @property
    def is_voter(self) -> bool:
        """Whether this replica votes."""
        return self.config.voters.contains(self.local)

    def draw_election_timeout(self) -> int:
        """Return a random wait in [T, 2T)."""
        timeout = self.config.timings.election_timeout_ms
        return timeout + self._rng.randrange(timeout)

    def draw_backoff(self) -> int:
        """Return a random wait that grows with the elections lost in a row, up to 2T."""
        timeout = self.config.timings.election_timeout_ms
        bound = min(timeout * 2, max(2, timeout // 50) << min(self.lost_elections, 10))
        return self._rng.randrange(bound)

    # -- transitions

    def become_unattached(self, epoch: Epoch) -> None:
        """Adopt `epoch`, if newer, without a leader; or fall back within it, keeping the vote."""
        if epoch > self.epoch:
            self._adopt_epoch(epoch, None)
        self._change_role(Unattached(self.now + self.draw_election_timeout()))

    def become_follower(self, epoch: Epoch, leader_id: NodeId) -> None:
        """Follow the leader of `epoch`; the vote of the same epoch is kept."""
        if leader_id == self.local.node_id:
            raise InvariantError(
                f"node {leader_id} was told that it leads epoch {epoch}, which its data directory "
                f"does not know (it is at epoch {self.epoch}): the directory was lost or replaced"
            )
        if epoch > self.epoch:
            self._adopt_epoch(epoch, leader_id)
        elif self.leader_id not in (None, leader_id):
            raise InvariantError(
                f"epoch {epoch} has two leaders: node {self.leader_id} and node {leader_id}"
            )
        self.leader_id = leader_id
        timings = self.config.timings
        self._change_role(
            Follower(leader_id, self.now + timings.fetch_timeout_ms, next_fetch=self.now)
        )

    def become_prospective(self, delay: int = 0) -> None:
        """Ask for pre-votes after `delay` milliseconds."""
        starts_at = self.now + delay
        role = Prospective(starts_at, starts_at + self.draw_election_timeout())
        role.granted.add(self.local.node_id)
        self._change_role(role)

    def become_candidate(self) -> None:
        """Open a new epoch and vote for itself in it."""
        self._adopt_epoch(Epoch(self.epoch + 1), None)
        self.vote = self.local
        role = Candidate(self.now + self.draw_election_timeout())
        role.granted.add(self.local.node_id)
        self._change_role(role)

    def become_leader(self) -> None:
        """Lead the epoch of the won election."""
        self.leader_id = self.local.node_id
        self.lost_elections = 0
        progress = {
            voter.key: ReplicaProgress(voter.key, last_fetch=self.now, next_heartbeat=self.now)
            for voter in self.config.voters.others(self.local.node_id)
        }
        start = self.log.end_offset
        self._change_role(Leader(start, self.now, progress))
        self._last.append(LeadershipStarted(self.epoch, start))

    def become_resigned(self, successors: tuple[ReplicaKey, ...]) -> None:
        """Stop leading the present epoch, and tell the voters."""
        others = self.config.voters.others(self.local.node_id)
        role = Resigned(
            self.now + self.draw_election_timeout(),
            successors,
            {voter.key.node_id: self.now for voter in others},
        )
        self._change_role(role)

    def _adopt_epoch(self, epoch: Epoch, leader_id: NodeId | None) -> None:
        if epoch <= self.epoch:
            raise InvariantError(f"epoch {epoch} does not follow epoch {self.epoch}")
        self.epoch = epoch
        self.vote = None
        self.leader_id = leader_id

    def _change_role(self, role: Role) -> None:
        old = self.role
        if isinstance(old, Leader):
            self._first.append(LeadershipEnded(self._persisted.epoch))
            self._last.extend(ReadIndexRefused(read.read_id) for read in old.pending_reads)
            self._refuse_parked(old)
        self._outstanding.clear()
        self.role = role

    def _refuse_parked(self, old: Leader) -> None:
        parked = [item.request for item in old.parked.values()]
        for request in (*parked, *old.log_reads.values()):
            self.answer_fetch(request, error=QuorumError.NOT_LEADER)

    # -- the log

    def append(self, batches: tuple[Batch, ...]) -> None:
        """Append to the log; the token is given when the step ends, in write order."""
        self.log.append(batches, self._token + 2 + len(self._log_writes))
        self._log_writes.append(batches)

    def truncate(self, end_offset: EndOffset) -> None:
        """Cut the log, never below the high watermark."""
        if end_offset < self.high_watermark:
            raise InvariantError(
                f"truncation to {end_offset} would remove what is committed up to "
                f"{self.high_watermark}"
            )
        self.log.truncate(end_offset)
        self._log_writes.append(end_offset)

    def raise_high_watermark(self, end_offset: EndOffset) -> bool:
        """Commit up to `end_offset`; a lower one than known changes nothing."""
        if end_offset <= self.high_watermark:
            return False
        if end_offset > self.log.end_offset:
            raise InvariantError(
                f"high watermark {end_offset} lies beyond the log's end {self.log.end_offset}"
            )
        # Up to the old one only: what is committed now is yet to be delivered from memory.
        self.log.trim_tail(self.high_watermark)
        self.high_watermark = end_offset
        self._last.append(CommitAdvanced(end_offset))
        return True

    # -- messages

    def request_header(self, to: NodeId, kind: type[Message], timeout_ms: int) -> RequestHeader:
        """Begin a request; an earlier one of the same type to that peer is forgotten."""
        self._next_request_id += 1
        self._outstanding[to, kind] = Outstanding(self._next_request_id, self.now + timeout_ms)
        voter = self.config.voters.find(to)
        return RequestHeader(
            cluster_id=self.config.cluster_id,
            sender=self.local,
            receiver=voter.key if voter else ReplicaKey(to),
            epoch=self.epoch,
            incarnation=self._incarnation,
            request_id=self._next_request_id,
        )

    def has_outstanding(self, to: NodeId, kind: type[Message]) -> bool:
        """Whether a request of this type waits for that peer's answer; expired ones don't count."""
        waiting = self._outstanding.get((to, kind))
        return waiting is not None and self.now < waiting.expires_at

    def outstanding_until(self, to: NodeId, kind: type[Message]) -> int | None:
        """When the request that waits for that peer expires."""
        waiting = self._outstanding.get((to, kind))
        return waiting.expires_at if waiting else None

    def take_answered(self, header: ResponseHeader, kind: type[Message]) -> bool:
        """Whether this answers an outstanding request, which thereby ends."""
        if header.incarnation != self._incarnation:
            return False
        waiting = self._outstanding.get((header.sender, kind))
        if waiting is None or waiting.request_id != header.request_id:
            return False
        del self._outstanding[header.sender, kind]
        return True

    def take_failed(self, peer: NodeId, request_id: int) -> type[Message] | None:
        """End the outstanding request with this id and return its type."""
        for (to, kind), waiting in self._outstanding.items():
            if to == peer and waiting.request_id == request_id:
                del self._outstanding[to, kind]
                return kind
        return None

    def answer(self, header: RequestHeader, error: QuorumError) -> ResponseHeader:
        """Begin an answer that tells what this replica knows of epoch and leader."""
        return ResponseHeader(
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
        request: FetchRequest,
        *,
        error: QuorumError = QuorumError.NONE,
        read_round: int = 0,
        diverging: EpochEnd | None = None,
        batches: tuple[Batch, ...] = (),
    ) -> None:
        """Answer a Fetch with what is known now."""
        response = FetchResponse(
            header=self.answer(request.header, error),
            high_watermark=self.high_watermark,
            log_start_offset=self.log.start_offset,
            read_round=read_round,
            diverging=diverging,
            batches=batches,
        )
        self.send(request.header.sender.node_id, response)

    def send(self, to: NodeId, message: Message) -> None:
        """Send at the end of the step, after the writes it depends on."""
        self._sends.append((to, message))

    def emit(self, effect: Effect) -> None:
        """Add an effect that needs no write."""
        self._last.append(effect)

    # -- the end of a step

    def finish(self) -> list[Effect]:
        """Return the step's effects in the order they must be carried out."""
        effects = self._first
        state = QuorumState(self.epoch, self.vote, self.leader_id)
        self._token += 1  # reserved for the state, so that log writes know theirs in advance
        if state != self._persisted:
            self._persisted = state
            self._state_token = self._last_write = self._token
            effects.append(PersistQuorumState(self._token, state))
        for write in self._log_writes:
            self._token += 1
            self._last_write = self._token
            if isinstance(write, tuple):
                effects.append(AppendLog(self._token, write))
            else:
                effects.append(TruncateLog(self._token, write))
        for to, message in self._sends:
            # A Fetch acknowledges the log below its offset; all else vouches for the state only.
            after = self._last_write if isinstance(message, FetchRequest) else self._state_token
            effects.append(Send(to, message, after))
        effects.extend(self._last)
        self._first, self._sends, self._last = [], [], []
        self._log_writes = []
        return effects
