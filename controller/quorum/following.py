"""Rules of a follower: fetching, truncating what diverges, and noticing that its leader is gone.

One Fetch is in flight at most, and it leaves only when everything below its offset is flushed.
"""

from __future__ import annotations

from controller.errors import InvariantError
from controller.ids import EndOffset, NodeId
from controller.quorum.election import Election
from controller.quorum.messages import (
    BeginQuorumEpochRequest,
    BeginQuorumEpochResponse,
    EndQuorumEpochRequest,
    EndQuorumEpochResponse,
    EpochEnd,
    FetchRequest,
    FetchResponse,
    QuorumError,
)
from controller.quorum.replica import Replica
from controller.quorum.roles import Follower, Leader
from controller.quorum.voters import ReplicaKey


class Following:
    """Follows a leader on behalf of a replica."""

    def __init__(self, replica: Replica, election: Election) -> None:
        self._replica = replica
        self._election = election

    def on_time(self) -> None:
        """Fetch, or campaign when the leader has been silent for too long."""
        replica = self._replica
        role = replica.role
        if not isinstance(role, Follower):
            return
        if replica.is_voter and replica.now >= role.fetch_deadline:
            self._election.campaign()
        elif replica.now >= role.next_fetch and not replica.has_outstanding(
            role.leader_id, FetchResponse
        ):
            self._fetch(role)

    def _fetch(self, role: Follower) -> None:
        replica = self._replica
        timings = replica.config.timings
        header = replica.request_header(role.leader_id, FetchResponse, timings.request_timeout_ms)
        request = FetchRequest(
            header=header,
            fetch_offset=replica.log.end_offset,
            last_epoch=replica.log.last_epoch,
            high_watermark=replica.high_watermark,
            read_round=role.read_round,
            max_wait_ms=timings.fetch_max_wait_ms,
            max_bytes=replica.config.limits.max_fetch_bytes,
        )
        replica.send(role.leader_id, request)

    def on_fetch_response(self, response: FetchResponse) -> None:
        """Take what the leader sent; the caller has dealt with epochs and found the request."""
        replica = self._replica
        role = replica.role
        if not isinstance(role, Follower) or response.header.sender != role.leader_id:
            return
        if response.header.error is not QuorumError.NONE or not self._fits(response):
            role.next_fetch = replica.now + replica.config.timings.retry_backoff_ms
            if response.header.error is QuorumError.NOT_LEADER:
                self.on_leader_gone(role.leader_id)
            return
        if response.diverging is not None:
            replica.truncate(self._truncation_point(response.diverging))
        elif response.batches:
            replica.append(response.batches)
        if response.diverging is None:
            end = min(response.high_watermark, replica.log.end_offset)
            replica.raise_high_watermark(EndOffset(end))
        role.read_round = max(role.read_round, response.read_round)
        role.has_fetched = True
        role.leader_gone = False
        role.fetch_deadline = replica.now + replica.config.timings.fetch_timeout_ms
        role.next_fetch = replica.now
        replica.lost_elections = 0

    def _fits(self, response: FetchResponse) -> bool:
        """Whether the batches continue this log; a sender's defect must not end up in it."""
        end, epoch = self._replica.log.end_offset, self._replica.log.last_epoch
        for batch in response.batches:
            if batch.base_offset != end or not batch.payloads:
                return False
            if not epoch <= batch.epoch <= response.header.epoch:
                return False
            end, epoch = batch.end_offset, batch.epoch
        return True

    def _truncation_point(self, theirs: EpochEnd) -> EndOffset:
        log = self._replica.log
        if theirs.epoch == 0:
            return min(theirs.end_offset, log.end_offset)
        ours = log.end_of_epoch(theirs.epoch)
        if ours.epoch != theirs.epoch:
            return ours.end_offset
        return min(ours.end_offset, theirs.end_offset)

    def on_fetch_failed(self, peer: NodeId) -> None:
        """Try again a little later."""
        role = self._replica.role
        if isinstance(role, Follower) and role.leader_id == peer:
            role.next_fetch = self._replica.now + self._replica.config.timings.retry_backoff_ms

    def on_leader_gone(self, peer: NodeId) -> None:
        """Campaign soon instead of waiting for the fetch timeout.

        Voters that saw the same crash start apart from each other, in the order of their ids, so
        that they rarely split the vote.
        """
        replica = self._replica
        role = replica.role
        if not isinstance(role, Follower) or role.leader_id != peer or role.leader_gone:
            return
        others = replica.config.voters.others(peer)
        earlier = sum(voter.key.node_id < replica.local.node_id for voter in others)
        delay = earlier * replica.config.timings.failover_stagger_ms + replica.draw_backoff()
        role.leader_gone = True
        role.fetch_deadline = min(role.fetch_deadline, replica.now + delay)

    def on_begin_quorum_epoch(self, request: BeginQuorumEpochRequest) -> None:
        """Follow the sender; the caller has checked the cluster and refused an older epoch."""
        replica = self._replica
        leader_id = request.header.sender.node_id
        role = replica.role
        if isinstance(role, Leader) and request.header.epoch == replica.epoch:
            raise InvariantError(
                f"node {leader_id} claims to lead epoch {replica.epoch}, which this node leads"
            )
        is_known = isinstance(role, Follower) and role.leader_id == leader_id
        if request.header.epoch > replica.epoch or not is_known:
            replica.become_follower(request.header.epoch, leader_id)
        is_for_us = replica.local.matches(request.header.receiver)
        error = QuorumError.NONE if is_for_us else QuorumError.INVALID_VOTER_KEY
        header = replica.answer(request.header, error)
        replica.send(leader_id, BeginQuorumEpochResponse(header=header))

    def on_end_quorum_epoch(self, request: EndQuorumEpochRequest) -> None:
        """Campaign when it is this voter's turn among the successors."""
        replica = self._replica
        leader_id = request.header.sender.node_id
        role = replica.role
        if isinstance(role, Follower) and role.leader_id == leader_id:
            delay = self._successor_delay(request.preferred_successors)
            role.leader_gone = True
            role.fetch_deadline = min(role.fetch_deadline, replica.now + delay)
        header = replica.answer(request.header, QuorumError.NONE)
        replica.send(leader_id, EndQuorumEpochResponse(header=header))

    def _successor_delay(self, successors: tuple[ReplicaKey, ...]) -> int:
        replica = self._replica
        for position, key in enumerate(successors):
            if key.matches(replica.local):
                return position * replica.config.timings.failover_stagger_ms
        return replica.draw_election_timeout()
