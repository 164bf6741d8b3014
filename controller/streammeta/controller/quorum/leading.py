"""Leader rules: serving Fetches, committing, proving leadership, resigning.

A Fetch that names the leader's epoch is credited when it arrives, never when its delayed response
leaves. The leader counts itself only up to its flushed end.
"""

from __future__ import annotations

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import NodeId
from streammeta.controller.quorum import events, messages, roles
from streammeta.controller.quorum.membership import FullDisks, Membership
from streammeta.controller.quorum.replica import Replica
from streammeta.controller.quorum.voters import (
    ReplicaKey,
    committed_end,
    majority,
    reached_by_majority,
)

_OBSERVER_SESSION_MS = 300_000
"""Milliseconds without a Fetch after which an observer is forgotten, as in KRaft."""


class LeaderRole:
    """Role of a replica that leads, and announces the end of its epoch."""

    def __init__(self, replica: Replica, membership: Membership) -> None:
        self._replica = replica
        self._membership = membership
        self.full_disks = FullDisks(replica)
        self._next_read_id = 0

    def is_established(self) -> bool:
        """Whether this replica leads and has committed a batch of its own epoch."""
        role = self._replica.role
        return isinstance(role, roles.Leader) and self._replica.high_watermark > role.epoch_start

    # -- appending and committing

    def append(self, payloads: tuple[bytes, ...]) -> None:
        """Append one data batch. The driver has checked that it may."""
        replica = self._replica
        role = replica.role
        if not isinstance(role, roles.Leader) or not self.is_established():
            raise InvariantError("append to a replica that is not an established leader")
        batch = messages.Batch(
            replica.log.end_offset, replica.epoch, messages.BatchKind.DATA, payloads
        )
        replica.append((batch,))
        role.uncommitted.append((batch.end_offset, batch.size))
        role.uncommitted_bytes += batch.size

    def update_high_watermark(self) -> None:
        """Commit everything that a majority has flushed."""
        replica = self._replica
        role = replica.role
        if not isinstance(role, roles.Leader):
            return

        ends = [progress.end_offset for progress in role.progress_of(replica.others)]
        # A leader that is being removed does not count itself (Ongaro, section 4.2.2).
        if replica.is_voter:
            ends.append(replica.log.flushed_end)
        end = committed_end(ends, role.epoch_start)
        if end is None or not replica.raise_high_watermark(end):
            return

        while role.uncommitted and role.uncommitted[0][0] <= end:
            role.uncommitted_bytes -= role.uncommitted.popleft()[1]
        if self._membership.on_committed(role, end):
            # The change is committed, so the next leader knows of it.
            self.resign("this controller was removed from the voters")

    # -- serving Fetches

    def on_fetch(self, request: messages.FetchRequest) -> None:
        """Credit a Fetch of this epoch, and answer it now or later."""
        replica = self._replica
        role = replica.role
        assert isinstance(role, roles.Leader)
        progress = self._heard_from(role, request)
        progress.is_disk_full = request.is_disk_full
        if request.is_disk_full:
            role.idle_until = 0
        if self._needs_snapshot(request):
            replica.answer_fetch(
                request, read_round=role.read_round, snapshot_id=replica.snapshots[-1]
            )
            return

        # Only a log that is a prefix of this one is credited: the sender's last epoch must end here
        # at or after its fetch offset (Raft's consistency check).
        agreed = replica.log.end_of_epoch(request.last_epoch)
        is_start = request.fetch_offset == replica.log.start_offset == 0
        if not is_start and (
            agreed.epoch != request.last_epoch or agreed.end_offset < request.fetch_offset
        ):
            replica.answer_fetch(request, read_round=role.read_round, diverging=agreed)
            return

        self._credit(role, progress, request)
        self._delay(role, progress.key, request)
        self._membership.on_fetched(role, progress)
        if progress.end_offset > replica.high_watermark:
            self.update_high_watermark()
        if replica.role is role:  # a leader that was removed has resigned above
            self._confirm_reads(role)

    def _heard_from(
        self, role: roles.Leader, request: messages.FetchRequest | messages.FetchSnapshotRequest
    ) -> roles.ReplicaProgress:
        progress = self._progress_of(role, request.header)
        progress.earned_by = request.header.sender
        answered = (request.header.incarnation, request.answered_request_id)
        # Only a new answer received proves that messages reach the sender. A follower that can send
        # but not receive must not keep this leader in its role.
        is_same_process = answered[0] == progress.last_answered[0]
        if request.answered_request_id and (
            not is_same_process or answered > progress.last_answered
        ):
            progress.last_answered = answered
            progress.last_contact = self._replica.now
        progress.previous_fetch = progress.last_fetch if progress.has_fetched else None
        progress.last_fetch = self._replica.now
        progress.has_fetched = True
        return progress

    def _needs_snapshot(self, request: messages.FetchRequest) -> bool:
        """Whether the log no longer reaches back to the sender's end."""
        log = self._replica.log
        if not self._replica.snapshots:
            return False
        if request.fetch_offset == 0:
            return True  # cheaper than the whole log (KAFKA-15078)
        if request.fetch_offset <= log.start_offset:
            return request.fetch_offset < log.start_offset or request.last_epoch != log.start_epoch
        return request.last_epoch < log.start_epoch

    def _delay(self, role: roles.Leader, key: ReplicaKey, request: messages.FetchRequest) -> None:
        replica = self._replica
        # A replica has one Fetch in flight, so an earlier one was abandoned by its sender.
        earlier = role.delayed_fetches.pop(key, None)
        if earlier is not None:
            replica.answer_fetch(earlier.request, read_round=role.read_round)
        wait = min(request.max_wait_ms, replica.timings.fetch_max_wait_ms)
        if len(role.delayed_fetches) >= replica.config.limits.max_delayed_fetches:
            wait = 0
        role.delayed_fetches[key] = roles.DelayedFetch(request, replica.now + wait)

    # -- serving snapshots

    def on_fetch_snapshot(self, request: messages.FetchSnapshotRequest) -> None:
        """Read bytes of a snapshot for the sender. The request also counts as contact."""
        replica = self._replica
        role = replica.role
        assert isinstance(role, roles.Leader)
        self._heard_from(role, request)
        if request.position < 0 or request.max_bytes < 1:
            replica.answer_fetch_snapshot(request, error=messages.QuorumError.POSITION_OUT_OF_RANGE)
            return
        if len(role.snapshot_reads) >= replica.config.limits.max_delayed_fetches:
            replica.answer_fetch_snapshot(request, error=messages.QuorumError.REQUEST_TIMED_OUT)
            return

        self._next_read_id += 1
        role.snapshot_reads[self._next_read_id] = request
        size = min(request.max_bytes, replica.config.limits.snapshot_chunk_bytes)
        replica.emit(
            events.ReadSnapshot(self._next_read_id, request.snapshot_id, request.position, size)
        )

    def on_snapshot_read(self, read_id: int, chunk: events.SnapshotChunk | None) -> None:
        """Send the chunk, if the leader that requested it still leads."""
        role = self._replica.role
        if not isinstance(role, roles.Leader) or read_id not in role.snapshot_reads:
            return
        request = role.snapshot_reads.pop(read_id)
        error = messages.QuorumError.NONE
        if chunk is None:
            error = messages.QuorumError.SNAPSHOT_NOT_FOUND
        elif request.position >= chunk.total_bytes:
            error = messages.QuorumError.POSITION_OUT_OF_RANGE
        self._replica.answer_fetch_snapshot(request, error=error, chunk=chunk)

    def _progress_of(
        self, role: roles.Leader, header: messages.RequestHeader
    ) -> roles.ReplicaProgress:
        key = self._find_credited_key(role, header)
        progress = role.progress.get(key)
        if progress is None:
            self._forget_idle_observers(role)
            now = self._replica.now
            progress = roles.ReplicaProgress(key, last_fetch=now, last_contact=now)
            role.progress[key] = progress
        return progress

    def _find_credited_key(self, role: roles.Leader, header: messages.RequestHeader) -> ReplicaKey:
        """Return the key to credit a sender under: a voter's key only with that voter's disk.

        A voter named without a disk means the disk that its node was formed with, which may have
        voted for another leader by now. A replaced disk would commit entries, and prove leadership,
        in its name.
        """
        sender = header.sender
        voter = self._replica.voters.find(sender.node_id)
        if voter is None or voter.key.directory_id is not None or not header.is_founder:
            return sender
        unnamed = voter.key
        is_taken = role.progress[unnamed].earned_by not in (None, sender)
        return sender if is_taken else unnamed

    def _forget_idle_observers(self, role: roles.Leader) -> None:
        replica = self._replica
        oldest = replica.now - _OBSERVER_SESSION_MS
        # Voters keep their entry even when silent, because check-quorum watches them.
        voters = {voter.key for voter in replica.voters}
        idle = [
            key
            for key, progress in role.progress.items()
            if progress.last_fetch < oldest and key not in voters
        ]
        for key in idle:
            del role.progress[key]

    def _credit(
        self, role: roles.Leader, progress: roles.ReplicaProgress, request: messages.FetchRequest
    ) -> None:
        now, leader_end = self._replica.now, self._replica.log.end_offset
        progress.end_offset = request.fetch_offset
        progress.read_round = max(progress.read_round, min(request.read_round, role.read_round))
        # Caught up as in KRaft: the replica has fetched everything that the leader had, now or at
        # the time of its previous Fetch.
        if request.fetch_offset >= leader_end:
            progress.caught_up_at = now
        elif (
            progress.previous_fetch is not None
            and request.fetch_offset >= progress.leader_end_at_previous_fetch
        ):
            progress.caught_up_at = max(progress.caught_up_at or 0, progress.previous_fetch)
        progress.leader_end_at_previous_fetch = leader_end

    def serve_delayed(self) -> None:
        """Answer every delayed Fetch that has something to receive or has waited long enough."""
        replica = self._replica
        role = replica.role
        if not isinstance(role, roles.Leader) or not role.delayed_fetches:
            return
        for key, delayed in list(role.delayed_fetches.items()):
            if self._is_due(role, delayed):
                del role.delayed_fetches[key]
                self._answer(role, delayed.request)

    def _is_due(self, role: roles.Leader, delayed: roles.DelayedFetch) -> bool:
        """Whether a Fetch has something to receive or has waited long enough.

        A new high watermark alone waits a little for batches to travel with.
        """
        replica, request = self._replica, delayed.request
        if replica.log.end_offset > request.fetch_offset and _can_use_batches(role, request):
            return True
        if replica.high_watermark > request.high_watermark < request.fetch_offset:
            linger = replica.now + replica.timings.high_watermark_linger_ms
            delayed.answer_by = min(delayed.answer_by, linger)
        return role.read_round > request.read_round or replica.now >= delayed.answer_by

    def _answer(self, role: roles.Leader, request: messages.FetchRequest) -> None:
        replica = self._replica
        if not _can_use_batches(role, request):
            replica.answer_fetch(request, read_round=role.read_round)
            return
        max_bytes = min(request.max_bytes, replica.config.limits.max_fetch_bytes)
        # None means that the batches are no longer in memory and must be read from disk.
        batches = replica.log.read(request.fetch_offset, max_bytes=max_bytes)
        if batches is None:
            self._next_read_id += 1
            role.log_reads[self._next_read_id] = request
            replica.emit(events.ReadLog(self._next_read_id, request.fetch_offset, max_bytes))
            return
        replica.answer_fetch(request, read_round=role.read_round, batches=batches)

    def on_log_read(self, read_id: int, batches: tuple[messages.Batch, ...]) -> None:
        """Send batches read from disk, if the leader that requested them still leads."""
        role = self._replica.role
        if isinstance(role, roles.Leader) and read_id in role.log_reads:
            request = role.log_reads.pop(read_id)
            self._replica.answer_fetch(request, read_round=role.read_round, batches=batches)

    # -- linearizable reads

    def request_read_index(self, read_id: int) -> None:
        """Prove leadership from now on: a majority must echo a round that starts here."""
        replica = self._replica
        role = replica.role
        if not isinstance(role, roles.Leader) or not self.is_established():
            replica.emit(events.ReadIndexRejected(read_id))
            return
        # A new round per request: an echo of an earlier one proves nothing about the time since.
        role.read_round += 1
        role.pending_reads.append(
            roles.PendingRead(read_id, role.read_round, replica.high_watermark)
        )
        self._confirm_reads(role)

    def _confirm_reads(self, role: roles.Leader) -> None:
        if not role.pending_reads:
            return
        rounds = [progress.read_round for progress in role.progress_of(self._replica.others)]
        if self._replica.is_voter:
            rounds.append(role.read_round)
        # An echo proves that its sender followed this leader after the round began, so no other
        # leader had committed anything by then (Raft thesis, section 6.4).
        confirmed = reached_by_majority(rounds)
        while role.pending_reads and role.pending_reads[0].read_round <= confirmed:
            read = role.pending_reads.popleft()
            self._replica.emit(events.ReadIndexReady(read.read_id, read.index))

    # -- keeping and ending leadership

    def on_time(self) -> None:
        """Announce the epoch, resign when required, and repeat the end of an epoch."""
        role = self._replica.role
        if isinstance(role, roles.Leader):
            if self._replica.now < role.idle_until:
                return
            self._keep_leading(role)
        if isinstance(self._replica.role, roles.Resigned):
            self._announce_end(self._replica.role)

    def _keep_leading(self, role: roles.Leader) -> None:
        if self._has_lost_majority(role):
            limit_ms = self._replica.timings.check_quorum_ms
            self.resign(f"no majority of the voters was heard from for {limit_ms} ms")
            return

        transfer = self._membership.on_time(role)
        if transfer is None:
            self._announce(role)
            # A transfer that this starts runs with the next event, after callers have learned
            # of this event's commits.
            self._check_disks(role)
            role.idle_until = self._idle_until(role)
        else:
            successor = transfer.to.node_id
            reason = f"handed over to controller {successor}, {transfer.reason}"
            self.resign(reason, transfer.to)

    def _idle_until(self, role: roles.Leader) -> int:
        """Return the time before which a leader has only normal traffic to serve.

        Fetches, flushes, appends and reads only move that time later, so it is not computed again
        after each of them. Returns 0 while more than the voters' last contact has to be watched.
        """
        replica = self._replica
        others = role.progress_of(replica.others)
        is_changing = role.transfer is not None or role.voter_change is not None
        is_any_full = replica.is_disk_full or any(voter.is_disk_full for voter in others)
        if is_changing or is_any_full or role.full_majority or not replica.is_known:
            return 0
        deadline = self.quorum_deadline(role)
        times = [self.next_heartbeat(voter) for voter in others]
        return min(times if deadline is None else [*times, deadline], default=0)

    def clear_idle_time(self) -> None:
        """Forget the cached idle time: an unusual event may require action at any time."""
        role = self._replica.role
        if isinstance(role, roles.Leader):
            role.idle_until = 0

    def _check_disks(self, role: roles.Leader) -> None:
        """Report when full disks prevent commits, and choose a successor that can commit."""
        replica = self._replica
        full = self.full_disks.full_majority(role)
        if not full and not role.full_majority and not replica.is_disk_full:
            return
        if full != role.full_majority:
            role.full_majority = full
            replica.emit(events.FullVotersChanged(full))
        if (successor := self.full_disks.successor(role)) is not None:
            deadline = replica.now + replica.timings.election_timeout_ms
            role.transfer = roles.Transfer(successor, deadline, "because this disk is full")

    def quorum_deadline(self, role: roles.Leader) -> int | None:
        """Return the time at which the leader must resign unless more voters make contact.

        None for the only voter, and before the leader's own state is durable and announced.

        Voters with full disks keep a leader in its role for the sake of its reads. The exception is
        a majority of voters with room, silent ones included: another leader could commit with them.
        A majority that needs this replica's disk would have to contact it.
        """
        replica = self._replica
        if replica.writes.is_state_pending:
            return None
        others = role.progress_of(replica.others)
        deadline = self._find_contact_loss(others, counts_itself=replica.is_voter)
        writable = [progress for progress in others if not progress.is_disk_full]
        if len(writable) == len(others) and not replica.is_disk_full:
            return deadline
        # This replica is part of a committing majority only if one of those voters still fetches
        # from it.
        counts_itself = (
            replica.is_voter and not replica.is_disk_full and self._is_any_reachable(writable)
        )
        deadlines = (deadline, self._find_contact_loss(writable, counts_itself=counts_itself))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _is_any_reachable(self, others: list[roles.ReplicaProgress]) -> bool:
        oldest = self._replica.now - self._replica.timings.check_quorum_ms
        return any(progress.last_contact > oldest for progress in others)

    def _find_contact_loss(
        self, others: list[roles.ReplicaProgress], *, counts_itself: bool
    ) -> int | None:
        """Return the time at which a majority of these voters has been silent for too long."""
        needed = majority(len(self._replica.voters)) - counts_itself
        if not 0 < needed <= len(others):
            return None
        heard = sorted([progress.last_contact for progress in others])
        return heard[-needed] + self._replica.timings.check_quorum_ms

    def next_heartbeat(self, progress: roles.ReplicaProgress) -> int:
        """Return the time of the next announcement to this voter. One that fetches needs none."""
        if not progress.has_fetched:
            return progress.next_heartbeat
        heartbeat = self._replica.timings.heartbeat_ms
        return max(progress.next_heartbeat, progress.last_fetch + heartbeat)

    def _has_lost_majority(self, role: roles.Leader) -> bool:
        deadline = self.quorum_deadline(role)
        return deadline is not None and self._replica.now >= deadline

    def resign(self, reason: str, successor: ReplicaKey | None = None) -> None:
        """Stop leading. `successor`, or else the voter with the longest log, should follow."""
        role = self._replica.role
        if not isinstance(role, roles.Leader):
            return
        voters = sorted(
            role.progress_of(self._replica.others),
            key=lambda item: (-item.end_offset, item.is_disk_full, item.key.node_id),
        )
        # A chosen successor is named alone: others would compete with it milliseconds later.
        keys = (successor,) if successor else tuple(item.key for item in voters)
        self._replica.become_resigned(keys, reason)

    def _announce(self, role: roles.Leader) -> None:
        replica = self._replica
        # Only voters learn of the leader this way. Observers search for it themselves.
        for progress in role.progress_of(replica.others):
            if replica.now < self.next_heartbeat(progress):
                continue
            progress.next_heartbeat = replica.now + replica.timings.heartbeat_ms
            header = replica.request_header(progress.key.node_id, messages.BeginQuorumEpochResponse)
            replica.send(messages.BeginQuorumEpochRequest(header=header))

    def on_announcement_failed(self, peer: NodeId) -> None:
        """Retry an unreachable voter sooner than the next heartbeat."""
        role = self._replica.role
        voter = self._replica.voters.find(peer)
        if isinstance(role, roles.Leader) and voter is not None and voter.key in role.progress:
            role.progress[voter.key].next_heartbeat = self._next_attempt()

    def _announce_end(self, role: roles.Resigned) -> None:
        replica = self._replica
        for node_id, due in role.unacknowledged.items():
            if replica.now < due:
                continue
            role.unacknowledged[node_id] = replica.now + replica.timings.heartbeat_ms
            header = replica.request_header(node_id, messages.EndQuorumEpochResponse)
            replica.send(
                messages.EndQuorumEpochRequest(header=header, preferred_successors=role.successors)
            )

    def on_end_failed(self, peer: NodeId) -> None:
        """Retry an unreachable voter, which waits for the list of successors."""
        role = self._replica.role
        if isinstance(role, roles.Resigned) and peer in role.unacknowledged:
            role.unacknowledged[peer] = self._next_attempt()

    def _next_attempt(self) -> int:
        # A quarter of the heartbeat: fast enough after a short outage, without flooding a dead
        # host.
        return self._replica.now + self._replica.timings.heartbeat_ms // 4 + 1

    def on_end_acknowledged(self, sender: NodeId) -> None:
        """Stop announcing the end of the epoch to a voter that has acknowledged it."""
        if isinstance(self._replica.role, roles.Resigned):
            self._replica.role.unacknowledged.pop(sender, None)

    def check(self, request: messages.LeaderRequest) -> messages.QuorumError:
        """Return the error of a request that this replica can't answer as the leader, or NONE."""
        replica = self._replica
        if isinstance(request, messages.FetchRequest) and not _is_valid_fetch(request):
            return messages.QuorumError.INVALID_REQUEST
        if request.header.epoch < replica.epoch:
            return messages.QuorumError.FENCED_LEADER_EPOCH
        if request.header.epoch > replica.epoch:
            return messages.QuorumError.UNKNOWN_LEADER_EPOCH
        return (
            messages.QuorumError.NONE
            if isinstance(replica.role, roles.Leader)
            else messages.QuorumError.NOT_LEADER
        )


def _can_use_batches(role: roles.Leader, request: messages.FetchRequest) -> bool:
    """Whether the sender can accept batches.

    The reserve of a full disk is kept until a commit needs it.
    """
    if request.max_bytes == 0:
        return False
    return not request.is_disk_full or bool(role.full_majority)


def _is_valid_fetch(request: messages.FetchRequest) -> bool:
    if request.fetch_offset < 0 or request.max_wait_ms < 0:
        return False
    return 0 <= request.last_epoch <= request.header.epoch
