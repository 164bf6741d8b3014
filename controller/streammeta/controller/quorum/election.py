"""Election rules: campaigns and the granting of votes.

Follows Raft (sections 5.2 and 5.4.1) with KRaft's pre-vote (KIP-996). A replica asks whether it
could win before it opens a new epoch, so a replica that was cut off can't depose a working leader.
"""

from __future__ import annotations

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum import messages, roles
from streammeta.controller.quorum.replica import Replica
from streammeta.controller.quorum.voters import ReplicaKey, Voter, majority


class Election:
    """Campaigns and votes on behalf of a replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    # -- asking for votes

    def on_time(self) -> None:
        """Start, repeat or abandon a campaign when its deadline has passed."""
        replica = self._replica
        match replica.role:
            case roles.Unattached() as role:
                is_due = replica.may_campaign and replica.is_due(role.election_deadline)
                if is_due and self._has_waited_for_rivals():
                    self.campaign()
            case roles.Resigned(election_deadline=deadline):
                if replica.is_due(deadline):
                    self._leave_resigned_epoch()
            case roles.Prospective() as role:
                if not role.asked:
                    if replica.is_due(role.starts_at) and self._has_waited_for_rivals():
                        self._ask(role)
                elif replica.is_due(role.deadline):
                    self._lose_pre_vote()
            case roles.Candidate(deadline=deadline):
                if replica.is_due(deadline):
                    self._lose_election()
            case roles.Follower() | roles.Leader():
                pass

    def _has_waited_for_rivals(self) -> bool:
        """Whether no other candidate can still be busy with the writes of an election.

        Time alone can't show that, because a slow disk may take seconds for each write. The replica
        therefore also waits for writes of its own, which are fast again as soon as the disks are.
        """
        replica = self._replica
        if replica.candidacy.patience == 0:
            return True
        replica.candidacy.patience -= 1
        replica.probe_disk()
        return False

    def campaign(self) -> None:
        """Ask for pre-votes. The only voter of a quorum wins immediately."""
        # Pre-votes first: a replica that can't win must not disturb the current leader (KIP-996).
        self._replica.become_prospective()
        self._advance()
        if isinstance(self._replica.role, roles.Prospective):
            self._ask(self._replica.role)

    def on_vote_response(self, response: messages.VoteResponse) -> None:
        """Count an answer. The caller has checked its epoch and matched its request."""
        role = self._replica.role
        if not isinstance(role, roles.Prospective | roles.Candidate):
            return
        # An answer to the pre-vote must not count as a vote, nor a vote as a pre-vote.
        if response.pre_vote is not isinstance(role, roles.Prospective):
            return
        sender = response.header.sender
        (role.granted if response.granted else role.denied).add(sender)
        if isinstance(role, roles.Candidate) and not response.granted:
            self._replica.candidacy.on_vote_denied(sender)
            self._replica.candidacy.on_rival()
        self._advance()

    def on_vote_request_failed(self, peer: NodeId, *, is_late: bool) -> None:
        """Count an unreachable peer as a denied vote until the next campaign.

        A peer that did not answer in time may still be writing its vote, so it may be asked again
        in this epoch.
        """
        role = self._replica.role
        if isinstance(role, roles.Prospective | roles.Candidate):
            role.denied.add(peer)
            if isinstance(role, roles.Candidate) and not is_late:
                self._replica.candidacy.on_vote_denied(peer)
            self._advance()

    def _ask(self, role: roles.Prospective | roles.Candidate) -> None:
        if isinstance(role, roles.Prospective):
            role.asked = True
        for voter in self._replica.others:
            self._request_vote(voter, pre_vote=isinstance(role, roles.Prospective))

    def _request_vote(self, voter: Voter, *, pre_vote: bool) -> None:
        replica = self._replica
        request = messages.VoteRequest(
            header=replica.request_header(voter.key.node_id, messages.VoteResponse),
            pre_vote=pre_vote,
            last_epoch=replica.log.last_epoch,
            end_offset=replica.log.end_offset,
        )
        replica.send(request)

    def _advance(self) -> None:
        """Win or lose as soon as the answers decide it."""
        role = self._replica.role
        if not isinstance(role, roles.Prospective | roles.Candidate):
            return
        voters = len(self._replica.voters)
        needed = majority(voters)
        if len(role.granted) >= needed:
            self._win(role)
        # Voters that have not denied can no longer form a majority, so waiting longer is useless.
        elif voters - len(role.denied - role.granted) < needed:
            if isinstance(role, roles.Candidate):
                self._lose_election()
            else:
                self._lose_pre_vote()

    def _win(self, role: roles.Prospective | roles.Candidate) -> None:
        replica = self._replica
        if isinstance(role, roles.Candidate):
            replica.become_leader()
            # Entries of earlier epochs commit only along with one of this epoch (Raft, section
            # 5.4.2).
            batch = messages.Batch(
                replica.log.end_offset,
                replica.epoch,
                messages.BatchKind.CONTROL,
                self._first_payloads(role),
            )
            replica.append((batch,))
            return

        replica.become_candidate()
        self._advance()
        if isinstance(replica.role, roles.Candidate):
            self._ask(replica.role)

    def _first_payloads(self, role: roles.Candidate) -> tuple[bytes, ...]:
        """Return the first payloads of a leader's epoch, which name the leader and its voters."""
        replica = self._replica
        local = replica.local
        change = messages.encode_leader_change(local.node_id, replica.voters, role.granted)
        # The log already names its voters. Only a new cluster's first leader writes them down.
        if replica.voters_named_at > 0:
            return (change,)
        voters = replica.voters.with_update(replica.config.voter)
        return change, messages.encode_voters(voters)

    def _lose_pre_vote(self) -> None:
        replica = self._replica
        replica.candidacy.lost_elections += 1
        # Back to the state before the campaign. The epoch is unchanged, so a known leader still
        # leads.
        if replica.leader_id is None or replica.leader_id == replica.local.node_id:
            replica.become_unattached(replica.epoch)
        else:
            replica.become_follower(replica.epoch, replica.leader_id)

    def _lose_election(self) -> None:
        self._replica.candidacy.lost_elections += 1
        # The random backoff keeps candidates from splitting the vote again.
        self._replica.become_prospective(self._replica.draw_backoff())

    def _leave_resigned_epoch(self) -> None:
        # A new epoch is needed: in this one the replica would still name itself as the leader.
        replica = self._replica
        replica.become_unattached(type(replica.epoch)(replica.epoch + 1))

    # -- granting votes

    def on_vote_request(self, request: messages.VoteRequest) -> None:
        """Answer a vote request. The caller has checked the cluster and adopted a higher epoch."""
        if not request.pre_vote:
            self._replica.candidacy.on_rival()
        error, granted = self._decide_vote(request)
        self._replica.answer_vote(request, error, granted=granted)

    def _decide_vote(self, request: messages.VoteRequest) -> tuple[messages.QuorumError, bool]:
        replica = self._replica
        if not replica.is_self(request.header.receiver):
            return messages.QuorumError.INVALID_VOTER_KEY, False
        if replica.lost is not None:
            # Its damaged log may miss acknowledged entries, so its vote could elect a leader
            # whose log misses committed ones.
            return messages.QuorumError.NONE, False

        # Raft, section 5.4.1: the later epoch wins, then the longer log.
        is_up_to_date = (request.last_epoch, request.end_offset) >= (
            replica.log.last_epoch,
            replica.log.end_offset,
        )
        if request.pre_vote:
            may_pre_vote = self._may_pre_vote(request.header.sender)
            return messages.QuorumError.NONE, is_up_to_date and may_pre_vote

        return messages.QuorumError.NONE, self._grant(
            request.header.sender, is_up_to_date=is_up_to_date
        )

    def _may_pre_vote(self, sender: ReplicaKey) -> bool:
        replica = self._replica
        match replica.role:
            case roles.Leader():
                return False
            case roles.Follower() as follower:
                # Before its first Fetch a follower can't know that its leader is alive
                # (KAFKA-17641). By design others time out a little earlier than this one. Denying
                # them would cost a whole timeout without a leader.
                patience = replica.timings.fetch_timeout_ms // 10
                has_lost_patience = replica.now >= follower.fetch_deadline - patience
                return follower.leader_ended or not follower.has_fetched or has_lost_patience
            case _:
                # A vote that is still being written may elect another candidate.
                return not replica.writes.is_state_pending or replica.vote in (None, sender)

    def _grant(self, candidate: ReplicaKey, *, is_up_to_date: bool) -> bool:
        replica = self._replica
        if (
            not isinstance(replica.role, roles.Unattached | roles.Prospective)
            or replica.leader_id is not None
        ):
            return False
        # At most one vote per epoch. A repeated request of the same candidate gets it again.
        if replica.vote is not None:
            return replica.vote == candidate
        if not is_up_to_date:
            return False

        assert replica.lost is None, "a damaged replica must not vote"
        replica.vote = candidate
        replica.become_unattached(replica.epoch)
        return True
