"""Rules of voter changes, leadership transfer, and voters with full disks.

Changes follow KIP-853. A change takes effect when its record is appended. None begins before the
leader has committed a batch of its own epoch and the previous change. Without that gate, two
leaders' changes can have majorities that do not overlap (Ongaro, raft-dev 2015).

A voter reports in every Fetch whether its disk has room. Reads and leadership need no room, so a
leader keeps leading for their sake and transfers leadership only to a voter that can commit.
"""

from __future__ import annotations

from streammeta.controller.ids import EndOffset, NodeId
from streammeta.controller.quorum import events, messages, roles
from streammeta.controller.quorum.replica import Replica
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet, majority


class Membership:
    """Changes the voters on behalf of a leader."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    # -- requests of operators

    def request_change(self, change_id: int, change: Voter | ReplicaKey) -> None:
        """Begin to add or remove a voter, or reject the request."""
        role = self._replica.role
        if not isinstance(role, roles.Leader):
            self._reject(change_id, messages.QuorumError.NOT_LEADER, "this node does not lead")
        elif (busy := self._find_obstacle(role)) is not None:
            self._reject(change_id, messages.QuorumError.REQUEST_TIMED_OUT, busy)
        elif isinstance(change, Voter):
            self._begin_adding(role, change_id, change)
        else:
            self._remove(role, change_id, change)

    def _find_obstacle(self, role: roles.Leader) -> str | None:
        replica = self._replica
        if replica.high_watermark <= role.epoch_start:
            return "the leader has not committed a batch of its epoch yet, retry"
        if role.voter_change is not None:
            return "another change of the voters is in progress, retry when it has ended"
        if replica.voters_named_at > replica.high_watermark:
            return "the last change of the voters is not committed yet, retry"
        return None

    def _begin_adding(self, role: roles.Leader, change_id: int, voter: Voter) -> None:
        replica = self._replica
        key = voter.key
        if (named := replica.voters.find(key.node_id)) is not None:
            if named.key == key:
                self._confirm(change_id)
                return
            reason = f"node {key.node_id} is already a voter: remove its old disk to replace it"
            self._reject(change_id, messages.QuorumError.DUPLICATE_VOTER, reason)
            return

        progress = role.progress.get(key)
        if progress is None or not self._fetches(progress):
            reason = (
                f"node {key.node_id} with directory {key.directory_id} does not fetch from this "
                "leader: start it, and retry when it is listed as an observer"
            )
            self._reject(change_id, messages.QuorumError.REQUEST_TIMED_OUT, reason)
            return

        role.voter_change = roles.VoterChange(
            change_id,
            adding=voter,
            round_end=replica.log.end_offset,
            round_started_at=replica.now,
        )
        # A replica that is already caught up ends its first round immediately.
        self.on_fetched(role, progress)

    def _fetches(self, progress: roles.ReplicaProgress) -> bool:
        age = self._replica.now - progress.last_fetch
        return progress.has_fetched and age <= self._replica.timings.fetch_timeout_ms

    def _remove(self, role: roles.Leader, change_id: int, key: ReplicaKey) -> None:
        replica = self._replica
        voter = replica.voters.find(key.node_id)
        if voter is None:
            self._confirm(change_id)
        elif not voter.key.matches(key):
            reason = f"node {key.node_id} is a voter, but not with directory {key.directory_id}"
            self._reject(change_id, messages.QuorumError.VOTER_NOT_FOUND, reason)
        elif len(replica.voters) == 1:
            reason = f"node {key.node_id} is the only voter: add another one first"
            self._reject(change_id, messages.QuorumError.INVALID_REQUEST, reason)
        else:
            role.voter_change = roles.VoterChange(change_id, removing=voter.key)
            self._append(role, replica.voters.without_node(key.node_id))

    def _confirm(self, change_id: int) -> None:
        """Answer a request that repeats a completed change."""
        end_offset = self._replica.voters_named_at
        self._replica.emit(events.VoterChangeDone(change_id, end_offset))

    def _reject(self, change_id: int, error: messages.QuorumError, reason: str) -> None:
        self._replica.emit(events.VoterChangeRejected(change_id, error, reason))

    # -- a change in progress

    def on_fetched(self, role: roles.Leader, progress: roles.ReplicaProgress) -> None:
        """End a catch-up round, and add the voter after one that was fast enough.

        A voter that lags would delay every commit as soon as it counts (Ongaro, section 4.2.1).
        """
        change, replica = role.voter_change, self._replica
        if change is None or change.adding is None or change.end_offset is not None:
            return
        if change.adding.key != progress.key or progress.end_offset < change.round_end:
            return
        if replica.now - change.round_started_at <= replica.timings.election_timeout_ms:
            self._append(role, replica.voters.with_voter(change.adding))
            return
        change.rounds += 1
        if change.rounds >= replica.timings.catch_up_rounds:
            self._abandon(role, change, f"did not catch up in {change.rounds} rounds")
            return
        change.round_end, change.round_started_at = replica.log.end_offset, replica.now

    def round_deadline(self, change: roles.VoterChange) -> int | None:
        """Return the time at which the current round is too slow for the replica to be added."""
        if change.adding is None or change.end_offset is not None:
            return None
        return (
            change.round_started_at
            + self._replica.timings.catch_up_rounds * self._replica.timings.election_timeout_ms
        )

    def _abandon(self, role: roles.Leader, change: roles.VoterChange, why: str) -> None:
        assert change.adding is not None
        role.voter_change = None
        reason = f"node {change.adding.key.node_id} {why} and stays an observer"
        self._reject(change.change_id, messages.QuorumError.REQUEST_TIMED_OUT, reason)

    def _append(self, role: roles.Leader, voters: VoterSet) -> None:
        replica = self._replica
        batch = messages.Batch(
            replica.log.end_offset,
            replica.epoch,
            messages.BatchKind.CONTROL,
            (messages.encode_voters(voters),),
        )
        replica.append((batch,))
        # The record counts from here on, before it is committed (KIP-853, Raft section 6).
        if role.voter_change is not None:
            role.voter_change.end_offset = batch.end_offset
        self._follow_progress_of(role, voters)

    def _follow_progress_of(self, role: roles.Leader, voters: VoterSet) -> None:
        """Ensure a progress entry for every voter, under its key in the set."""
        replica = self._replica
        for voter in voters.others(replica.local.node_id):
            unnamed = ReplicaKey(voter.key.node_id)
            if voter.key != unnamed and unnamed in role.progress:
                self._name_disk(role, unnamed, voter.key)
            if voter.key not in role.progress:
                role.progress[voter.key] = roles.ReplicaProgress(
                    voter.key,
                    last_fetch=replica.now,
                    last_contact=replica.now,
                    next_heartbeat=replica.now,
                )

    def _name_disk(self, role: roles.Leader, unnamed: ReplicaKey, named: ReplicaKey) -> None:
        """Leave the progress of a voter without a known disk to the disk that earned it."""
        # Another disk may have earned this progress. Crediting it to the named one could commit
        # entries that no majority has.
        progress = role.progress.pop(unnamed)
        delayed = role.delayed_fetches.pop(unnamed, None)
        if progress.earned_by is not None:
            progress.key = progress.earned_by
            role.progress[progress.key] = progress
        if delayed is not None:
            role.delayed_fetches[delayed.request.header.sender] = delayed
        if role.transfer is not None and role.transfer.to == unnamed:
            role.transfer.to = named

    def on_committed(self, role: roles.Leader, end_offset: EndOffset) -> bool:
        """Report a committed change. Returns whether the leader itself is no longer a voter."""
        replica = self._replica
        change = role.voter_change
        if change is not None and change.end_offset is not None and change.end_offset <= end_offset:
            role.voter_change = None
            if change.removing is not None:
                role.progress.pop(change.removing, None)  # an observer from now on, if it fetches
            replica.emit(events.VoterChangeDone(change.change_id, change.end_offset))
        return not replica.is_voter and replica.voters_named_at <= end_offset

    # -- UpdateVoter

    def on_update_voter(self, request: messages.UpdateVoterRequest) -> None:
        """Record a voter's endpoints and disk. The answer does not wait for the commit."""
        role = self._replica.role
        assert isinstance(role, roles.Leader)
        self._replica.acknowledge(request, self._update(role, request.voter))

    def _update(self, role: roles.Leader, voter: Voter) -> messages.QuorumError:
        replica = self._replica
        named = replica.voters.find(voter.key.node_id)
        if named is None or not named.key.matches(voter.key):
            return messages.QuorumError.VOTER_NOT_FOUND
        if voter.key.directory_id is None or not voter.endpoint:
            return messages.QuorumError.INVALID_REQUEST
        if named == voter:
            return messages.QuorumError.NONE
        if self._find_obstacle(role) is not None:
            return messages.QuorumError.REQUEST_TIMED_OUT
        self._append(role, replica.voters.with_update(voter))
        return messages.QuorumError.NONE

    # -- leadership transfer

    def request_transfer(self, to: NodeId | None) -> None:
        """Choose a successor, or reject the request.

        The leader resigns when the successor has caught up.
        """
        replica = self._replica
        role = replica.role
        if not isinstance(role, roles.Leader) or replica.high_watermark <= role.epoch_start:
            replica.emit(events.TransferRejected("this node does not lead"))
            return

        voters = [voter for voter in replica.others if to is None or voter.key.node_id == to]
        if not voters:
            why = "it is the only voter" if to is None else f"node {to} is not a voter"
            if to == replica.local.node_id:
                why = "it already leads"
            replica.emit(events.TransferRejected(f"this leader has no successor: {why}"))
            return

        progress = [role.progress[voter.key] for voter in voters]
        best = max(progress, key=lambda item: (not item.is_disk_full, item.end_offset))
        deadline = replica.now + replica.timings.election_timeout_ms
        role.transfer = roles.Transfer(best.key, deadline)

    # -- time

    def on_time(self, role: roles.Leader) -> roles.Transfer | None:
        """Do overdue work. Returns the transfer that is to be carried out now."""
        replica = self._replica
        change = role.voter_change
        if change is not None:
            deadline = self.round_deadline(change)
            if deadline is not None and replica.now >= deadline:
                self._abandon(role, change, "stopped catching up")
        # The leader has no leader to send UpdateVoter to, so it records its own endpoints and disk.
        if replica.is_voter and not replica.is_known:
            self._update(role, replica.config.voter)
        return self._due_transfer(role)

    def next_check(self, transfer: roles.Transfer, role: roles.Leader) -> int:
        """Return the time to check a transfer: now if it can be carried out."""
        progress = role.progress.get(transfer.to)
        is_due = progress is not None and progress.end_offset >= self._replica.log.end_offset
        return self._replica.now if is_due else transfer.deadline

    def _due_transfer(self, role: roles.Leader) -> roles.Transfer | None:
        replica = self._replica
        transfer = role.transfer
        if transfer is None:
            return None
        progress = role.progress.get(transfer.to)
        if progress is not None and progress.end_offset >= replica.log.end_offset:
            return transfer
        if progress is None or replica.now >= transfer.deadline:
            role.transfer = None
            reason = f"node {transfer.to.node_id} did not catch up within an election timeout"
            replica.emit(events.TransferRejected(reason))
        return None


class FullDisks:
    """Full disks of the voters, as their leader knows them."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def full_majority(self, role: roles.Leader) -> tuple[NodeId, ...]:
        """Return the voters with full disks if the others that fetch are not a majority, else ().

        Only entries that fit their reserves can be committed then, under any leader.
        """
        replica = self._replica
        others = role.progress_of(replica.others)
        full = [progress.key.node_id for progress in others if progress.is_disk_full]
        if replica.is_voter and replica.is_disk_full:
            full.append(replica.local.node_id)
        if not full:
            return ()
        writable = sum(self._fetches_with_room(progress) for progress in others)
        writable += replica.is_voter and not replica.is_disk_full
        return () if writable >= majority(len(replica.voters)) else tuple(sorted(full))

    def _fetches_with_room(self, progress: roles.ReplicaProgress) -> bool:
        silence = self._replica.now - progress.last_fetch
        return not progress.is_disk_full and silence <= self._replica.timings.fetch_timeout_ms

    def next_check(self, role: roles.Leader) -> int | None:
        """Return the time at which silence may change `full_majority`, or None."""
        progress = role.progress_of(self._replica.others)
        is_any_full = self._replica.is_disk_full or any(voter.is_disk_full for voter in progress)
        if not is_any_full:
            return None
        heard_at = [voter.last_fetch for voter in progress if self._fetches_with_room(voter)]
        patience = self._replica.timings.fetch_timeout_ms
        return min((at + patience + 1 for at in heard_at), default=None)

    def successor(self, role: roles.Leader) -> ReplicaKey | None:
        """Return the voter to which a leader with a full disk transfers leadership, or None.

        The successor and a majority must have reported room after this disk filled up. Disks tend
        to fill together, and a successor that can't commit either would not help.
        """
        replica = self._replica
        if not replica.is_disk_full or role.transfer is not None:
            return None
        if replica.high_watermark < replica.log.end_offset:
            return None  # callers that wait for the rest would not learn of its commit
        others = role.progress_of(replica.others)
        writable = [progress for progress in others if self._has_reported_room(progress)]
        if len(writable) < majority(len(replica.voters)):
            return None
        # The lowest id breaks ties, so that the choice is deterministic.
        best = max(writable, key=lambda item: (item.end_offset, -item.key.node_id))
        return best.key if best.end_offset == replica.log.end_offset else None

    def _has_reported_room(self, progress: roles.ReplicaProgress) -> bool:
        is_recent = progress.has_fetched and progress.last_fetch > self._replica.full_since
        return is_recent and not progress.is_disk_full
