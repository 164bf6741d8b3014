"""Rules of election: campaigns, and the granting of votes.

Follows Raft (sections 5.2 and 5.4.1) with KRaft's pre-vote (KIP-996): a replica asks whether it
could win before it opens a new epoch, so one that was cut off can't depose a working leader.
"""

from __future__ import annotations

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.messages import (
    Batch,
    BatchKind,
    QuorumError,
    VoteRequest,
    VoteResponse,
    encode_leader_change,
    encode_voters,
)
from streammeta.controller.quorum.replica import Replica
from streammeta.controller.quorum.roles import (
    Candidate,
    Follower,
    Leader,
    Prospective,
    Resigned,
    Unattached,
)
from streammeta.controller.quorum.voters import ReplicaKey, Voter, majority


class Election:
    """Campaigns and votes on behalf of a replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    # -- asking for votes

    def on_time(self) -> None:
        """Start, repeat or abandon a campaign when its time has come."""
        replica = self._replica
        match replica.role:
            case Unattached(election_deadline=deadline):
                if replica.may_campaign and replica.now >= deadline:
                    self.campaign()
            case Resigned(election_deadline=deadline):
                if replica.now >= deadline:
                    self._leave_resigned_epoch()
            case Prospective() as role:
                if not role.asked and replica.now >= role.starts_at:
                    self._ask(role)
                elif replica.now >= role.deadline:
                    self._lose_pre_vote()
            case Candidate(deadline=deadline):
                if replica.now >= deadline:
                    self._lose_election()
            case Follower() | Leader():
                pass

    def campaign(self) -> None:
        """Ask for pre-votes; the only voter of a quorum wins at once."""
        self._replica.become_prospective()
        self._advance()
        if isinstance(self._replica.role, Prospective):
            self._ask(self._replica.role)

    def on_vote_response(self, response: VoteResponse) -> None:
        """Count an answer; the caller has checked its epoch and matched its request."""
        role = self._replica.role
        if not isinstance(role, Prospective | Candidate):
            return
        if response.pre_vote is not isinstance(role, Prospective):
            return
        (role.granted if response.granted else role.denied).add(response.header.sender)
        self._advance()

    def on_vote_request_failed(self, peer: NodeId) -> None:
        """Count an unreachable peer as a refusal, until the next campaign."""
        role = self._replica.role
        if isinstance(role, Prospective | Candidate):
            role.denied.add(peer)
            self._advance()

    def _ask(self, role: Prospective | Candidate) -> None:
        if isinstance(role, Prospective):
            role.asked = True
        for voter in self._replica.others:
            self._request_vote(voter, pre_vote=isinstance(role, Prospective))

    def _request_vote(self, voter: Voter, *, pre_vote: bool) -> None:
        replica = self._replica
        timeout = replica.config.timings.request_timeout_ms
        request = VoteRequest(
            header=replica.request_header(voter.key.node_id, VoteResponse, timeout),
            pre_vote=pre_vote,
            last_epoch=replica.log.last_epoch,
            end_offset=replica.log.end_offset,
        )
        replica.send(voter.key.node_id, request)

    def _advance(self) -> None:
        """Win or lose as soon as the answers decide it."""
        role = self._replica.role
        if not isinstance(role, Prospective | Candidate):
            return
        voters = len(self._replica.voters)
        needed = majority(voters)
        if len(role.granted) >= needed:
            self._win(role)
        elif voters - len(role.denied - role.granted) < needed:
            if isinstance(role, Candidate):
                self._lose_election()
            else:
                self._lose_pre_vote()

    def _win(self, role: Prospective | Candidate) -> None:
        replica = self._replica
        if isinstance(role, Candidate):
            replica.become_leader()
            batch = Batch(
                replica.log.end_offset,
                replica.epoch,
                BatchKind.CONTROL,
                self._first_payloads(role),
            )
            replica.append((batch,))
            return
        replica.become_candidate()
        self._advance()
        if isinstance(replica.role, Candidate):
            self._ask(replica.role)

    def _first_payloads(self, role: Candidate) -> tuple[bytes, ...]:
        """Return the first payloads of a leader's epoch; the first one names the voters."""
        replica = self._replica
        local = replica.local
        change = encode_leader_change(local.node_id, replica.voters, role.granted)
        if replica.voters_named_at > 0:
            return (change,)
        voters = replica.voters.updated(Voter(local, replica.config.endpoint))
        return change, encode_voters(voters)

    def _lose_pre_vote(self) -> None:
        replica = self._replica
        replica.lost_elections += 1
        if replica.leader_id is None or replica.leader_id == replica.local.node_id:
            replica.become_unattached(replica.epoch)
        else:
            replica.become_follower(replica.epoch, replica.leader_id)

    def _lose_election(self) -> None:
        self._replica.lost_elections += 1
        self._replica.become_prospective(self._replica.draw_backoff())

    def _leave_resigned_epoch(self) -> None:
        # A new epoch, so that this replica stops naming itself the leader.
        replica = self._replica
        replica.become_unattached(type(replica.epoch)(replica.epoch + 1))

    # -- granting votes

    def on_vote_request(self, request: VoteRequest) -> None:
        """Answer; the caller has checked the cluster and adopted a higher epoch."""
        replica = self._replica
        error, granted = self._judge(request)
        response = VoteResponse(
            header=replica.answer(request.header, error),
            pre_vote=request.pre_vote,
            granted=granted,
        )
        replica.send(request.header.sender.node_id, response)

    def _judge(self, request: VoteRequest) -> tuple[QuorumError, bool]:
        replica = self._replica
        if not replica.is_self(request.header.receiver):
            return QuorumError.INVALID_VOTER_KEY, False
        if replica.lost is not None:
            # Its log may lack what it had acknowledged, and would let too short a log win.
            return QuorumError.NONE, False
        is_up_to_date = (request.last_epoch, request.end_offset) >= (
            replica.log.last_epoch,
            replica.log.end_offset,
        )
        if request.pre_vote:
            return QuorumError.NONE, is_up_to_date and self._may_pre_vote()
        return QuorumError.NONE, self._grant(request.header.sender, is_up_to_date=is_up_to_date)

    def _may_pre_vote(self) -> bool:
        match self._replica.role:
            case Leader():
                return False
            case Follower() as follower:
                # Before its first Fetch a follower can't know that its leader lives (KAFKA-17641).
                # Others lose patience a little earlier than this one, by design; a refusal would
                # cost them a whole timeout without a leader.
                patience = self._replica.config.timings.fetch_timeout_ms // 10
                has_lost_patience = self._replica.now >= follower.fetch_deadline - patience
                return follower.leader_gone or not follower.has_fetched or has_lost_patience
            case _:
                return True

    def _grant(self, candidate: ReplicaKey, *, is_up_to_date: bool) -> bool:
        replica = self._replica
        if not isinstance(replica.role, Unattached | Prospective) or replica.leader_id is not None:
            return False
        if replica.vote is not None:
            return replica.vote == candidate
        if not is_up_to_date:
            return False
        replica.vote = candidate
        replica.become_unattached(replica.epoch)
        return True
