"""Follower rules: fetching, truncation of a divergent log, and loss of the leader.

At most one Fetch is in flight. It leaves only when everything below its offset is flushed.
"""

from __future__ import annotations

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset, NodeId, SnapshotId
from streammeta.controller.quorum import events, messages, roles
from streammeta.controller.quorum.election import Election
from streammeta.controller.quorum.replica import Replica
from streammeta.controller.quorum.voters import ReplicaKey

_SMALLEST_CHUNK_BYTES = 64
"""Smallest snapshot chunk requested. A link that can't carry it is unusable."""


class FollowerRole:
    """Role of a replica that follows a leader or searches for one."""

    def __init__(self, replica: Replica, election: Election) -> None:
        self._replica = replica
        self._election = election

    def on_time(self) -> None:
        """Fetch, search for the leader, or campaign when it has been silent for too long."""
        replica = self._replica
        # The log is being replaced, so there is no offset to fetch from.
        if replica.installing is not None:
            return

        match replica.role:
            case roles.Unattached() as role:
                if not replica.may_campaign and replica.now >= role.next_search:
                    self._search(role)
            case roles.Follower() as role:
                if not replica.is_due(role.fetch_deadline):
                    self._follow(role)
                elif replica.may_campaign:
                    self._election.campaign()
                else:
                    replica.become_unattached(replica.epoch)

    def _search(self, role: roles.Unattached) -> None:
        """Send a Fetch to a random replica. Its answer names the leader, if known."""
        replica = self._replica
        known = {voter.key.node_id for voter in replica.others} | set(replica.config.seeds)
        known.discard(replica.local.node_id)
        # Sooner than a heartbeat, so that several replicas are tried before an operator notices.
        role.next_search = replica.now + replica.timings.heartbeat_ms // 2 + 1
        if known:
            self._fetch_from(replica.choose(sorted(known)), read_round=0, max_wait_ms=0)

    def _follow(self, role: roles.Follower) -> None:
        replica = self._replica
        is_waiting = any(
            replica.requests.is_waiting(role.leader_id, kind, replica.now)
            for kind in (messages.FetchResponse, messages.FetchSnapshotResponse)
        )
        keepalive_at = self.next_keepalive(role)
        if keepalive_at is not None and replica.now >= keepalive_at:
            self._send_keepalive(role)
        elif replica.now >= role.next_fetch and not is_waiting:
            if role.download is None:
                self._fetch_from(role.leader_id, role.read_round, replica.timings.fetch_max_wait_ms)
            else:
                self._fetch_snapshot(role, role.download)

        if self.must_update(role) and replica.now >= role.next_update:
            self._send_update_voter(role)

    def _fetch_from(
        self, node_id: NodeId, read_round: int, max_wait_ms: int, *, is_keepalive: bool = False
    ) -> None:
        replica = self._replica
        role = replica.role
        log = replica.log
        is_ahead = replica.is_disk_full or is_keepalive
        # A Fetch acknowledges everything below its offset. One that does not wait for the disk may
        # only name the flushed end.
        fetch_offset = log.flushed_end if is_ahead else log.end_offset

        if isinstance(role, roles.Follower):
            role.fetch_offset, role.is_keepalive = fetch_offset, is_keepalive
        wants_no_batches = is_keepalive or self._is_stuck()
        request = messages.FetchRequest(
            header=replica.request_header(node_id, messages.FetchResponse),
            fetch_offset=fetch_offset,
            last_epoch=log.epoch_before(fetch_offset),
            high_watermark=replica.high_watermark,
            read_round=read_round,
            max_wait_ms=max_wait_ms,
            max_bytes=0 if wants_no_batches else replica.config.limits.max_fetch_bytes,
            answered_request_id=role.answered_request_id if isinstance(role, roles.Follower) else 0,
            is_disk_full=replica.is_disk_full,
        )
        replica.send(request)

    def _fetch_snapshot(self, role: roles.Follower, download: roles.Download) -> None:
        replica = self._replica
        if replica.is_chunk_awaited:  # the last one timed out, so the link may be slow
            replica.chunk_bytes = max(replica.chunk_bytes // 2, _SMALLEST_CHUNK_BYTES)
        replica.is_chunk_awaited = True
        request = messages.FetchSnapshotRequest(
            header=replica.request_header(role.leader_id, messages.FetchSnapshotResponse),
            snapshot_id=download.snapshot_id,
            position=download.position,
            max_bytes=replica.chunk_bytes,
            answered_request_id=role.answered_request_id,
        )
        replica.send(request)

    # -- a slow disk

    def next_keepalive(self, role: roles.Follower) -> int | None:
        """Return the time of the next keepalive Fetch on a slow disk, or None if none is needed.

        A normal Fetch waits for the disk. Keepalive Fetches ask for no batches and overtake it, so
        that neither side considers the other lost.
        """
        replica = self._replica
        oldest = replica.writes.oldest
        is_apart = replica.is_disk_full or role.download is not None or role.leader_ended
        if oldest is None or is_apart:
            return None
        due = max(oldest + replica.timings.fetch_max_wait_ms, role.next_fetch)
        if not role.is_keepalive:
            return due
        waiting = replica.requests.expiry(role.leader_id, messages.FetchResponse)
        return due if waiting is None else max(due, waiting)

    def _send_keepalive(self, role: roles.Follower) -> None:
        wait_ms = self._replica.timings.fetch_max_wait_ms
        self._fetch_from(role.leader_id, role.read_round, wait_ms, is_keepalive=True)

    # -- a full disk

    def on_disk_full(self, *, is_full: bool) -> None:
        """Fetch from the flushed end while the disk is full, so that reads continue.

        A silent follower would cost its leader the majority that linearizable reads and
        check-quorum need, although neither needs a disk.
        """
        replica = self._replica
        replica.is_disk_full = is_full
        if is_full:
            replica.full_since = replica.now
        self._fetch_again()  # an earlier Fetch may wait for the disk

    def on_flushed(self) -> None:
        """Report entries flushed on a full or slow disk, unlike the current Fetch."""
        replica = self._replica
        role = replica.role
        is_sign = isinstance(role, roles.Follower) and role.is_keepalive
        has_more = not self._is_stuck() if replica.is_disk_full else is_sign
        if has_more and (replica.is_disk_full or replica.writes.is_empty):
            self._fetch_again()

    def _fetch_again(self) -> None:
        role = self._replica.role
        if isinstance(role, roles.Follower):
            self._replica.requests.forget(role.leader_id, messages.FetchResponse)

    def _is_stuck(self) -> bool:
        """Whether appended entries wait for disk space, so that no more can be accepted."""
        replica = self._replica
        return replica.is_disk_full and replica.log.flushed_end < replica.log.end_offset

    # -- reporting endpoints and disk (KIP-853)

    def must_update(self, role: roles.Follower) -> bool:
        """Whether the voters in the log have other endpoints, or no disk, for this voter."""
        return role.has_fetched and self._replica.is_voter and not self._replica.is_known

    def _send_update_voter(self, role: roles.Follower) -> None:
        replica = self._replica
        role.next_update = replica.now + replica.timings.heartbeat_ms
        header = replica.request_header(role.leader_id, messages.UpdateVoterResponse)
        replica.send(messages.UpdateVoterRequest(header=header, voter=replica.config.voter))

    # -- responses of the leader

    def on_fetch_response(self, response: messages.FetchResponse) -> None:
        """Apply a Fetch response. The caller has checked its epoch and matched its request."""
        replica = self._replica
        role = replica.role
        if not isinstance(role, roles.Follower) or response.header.sender != role.leader_id:
            return

        is_usable = self._is_stuck() or role.is_keepalive or self._fits(response)
        if response.header.error is not messages.QuorumError.NONE or not is_usable:
            self._fetch_later(role)
            has_resigned = response.header.error is messages.QuorumError.NOT_LEADER
            if has_resigned and not replica.may_campaign:
                # A voter waits for EndQuorumEpoch, which names the successors. Otherwise it would
                # compete with the successor that its leader has chosen.
                self.on_leader_ended(role.leader_id)
            return

        is_rejected = self._has_no_room_for(response) or self._is_ahead(role, response)
        if is_rejected:
            # The contents are dropped and requested again, but the high watermark is usable.
            if response.snapshot_id is None:  # else the leader has not compared the logs
                known = min(role.fetch_offset, replica.log.flushed_end)
                replica.raise_high_watermark(EndOffset(min(response.high_watermark, known)))
        elif response.snapshot_id is not None:
            self._begin_download(role, response.snapshot_id)
        elif response.diverging is not None:
            replica.truncate(self._truncation_point(response.diverging))
        else:
            if response.batches:
                replica.append(response.batches)
            # The leader's high watermark may lie above the batches that fit into this response.
            end = min(response.high_watermark, replica.log.end_offset)
            replica.raise_high_watermark(EndOffset(end))
            self._clear_damage_if_repaired(response.high_watermark)

        role.read_round = max(role.read_round, response.read_round)
        self._heard_from_leader(role, response.header)
        if is_rejected and (response.batches or response.snapshot_id is not None):
            # The leader would send the same again immediately. A slower pace keeps contact.
            role.next_fetch = replica.now + replica.timings.fetch_max_wait_ms // 5

    def _has_no_room_for(self, response: messages.FetchResponse) -> bool:
        """Whether the response can't be written.

        Batches may still fit into a full disk's reserve.
        """
        if not self._replica.is_disk_full or response.diverging is not None:
            return False
        return self._is_stuck() or response.snapshot_id is not None

    def _is_ahead(self, role: roles.Follower, response: messages.FetchResponse) -> bool:
        """Whether the response answers a keepalive, which does not cover unflushed batches."""
        return role.is_keepalive and response.diverging is None

    def _heard_from_leader(self, role: roles.Follower, header: messages.ResponseHeader) -> None:
        replica = self._replica
        role.answered_request_id = header.request_id
        role.has_fetched = True
        role.leader_ended = False
        role.fetch_deadline = replica.next_fetch_deadline(role.leader_id)
        # Long polling: the next Fetch leaves immediately, and the leader delays its answer.
        role.next_fetch = replica.now
        replica.candidacy.on_leader()

    def _fetch_later(self, role: roles.Follower) -> None:
        role.next_fetch = self._replica.now + self._replica.timings.retry_backoff_ms

    def _clear_damage_if_repaired(self, leader_high_watermark: EndOffset) -> None:
        """Vote again once no entry that this replica ever acknowledged can be missing.

        Everything committed before the current epoch lies below a high watermark of that epoch.
        Entries acknowledged in the current epoch may commit later because of that acknowledgement,
        so all of them must be restored.
        """
        replica = self._replica
        lost, log = replica.lost, replica.log
        if lost is None or log.last_epoch != replica.epoch:
            return
        is_of_this_epoch = (
            leader_high_watermark > log.last_epoch_start or log.start_epoch == replica.epoch
        )
        has_committed = is_of_this_epoch and log.flushed_end >= leader_high_watermark
        if has_committed and (replica.epoch > lost.epoch or log.flushed_end >= lost.end_offset):
            replica.clear_damage()

    # -- snapshots

    def _begin_download(self, role: roles.Follower, snapshot_id: SnapshotId) -> None:
        # A snapshot below the high watermark would remove committed entries.
        if snapshot_id.end_offset <= self._replica.high_watermark:
            raise InvariantError(
                f"the leader sent a snapshot that ends at {snapshot_id.end_offset}, but the log "
                f"is already committed below {self._replica.high_watermark}"
            )
        role.download = roles.Download(snapshot_id)

    def on_fetch_snapshot_response(self, response: messages.FetchSnapshotResponse) -> None:
        """Write a chunk, and install the snapshot after the last one."""
        replica = self._replica
        role = replica.role
        if not isinstance(role, roles.Follower) or response.header.sender != role.leader_id:
            return

        replica.is_chunk_awaited = False
        download = role.download
        if download is None or response.snapshot_id != download.snapshot_id:
            return
        # The leader may have removed the snapshot meanwhile, or another leader's file may differ.
        # The next Fetch names the snapshot to start over with.
        if response.header.error is not messages.QuorumError.NONE or not _continues(
            download, response
        ):
            role.download = None
            self._fetch_later(role)
            return

        chunk = events.WriteSnapshotChunk(download.snapshot_id, download.position, response.data)
        replica.write_chunk(chunk)
        download.position += len(response.data)
        download.total_bytes, download.digest = response.total_bytes, response.file_digest
        self._heard_from_leader(role, response.header)
        if download.position == download.total_bytes:
            role.download = None
            replica.chunk_bytes = replica.config.limits.snapshot_chunk_bytes
            replica.install(download.snapshot_id, download.total_bytes, download.digest)

    def on_snapshot_installed(self, event: events.SnapshotInstalled) -> None:
        """Continue from the snapshot's end, or fetch again if the file was invalid."""
        replica = self._replica
        if event.snapshot_id != replica.installing:
            raise InvariantError(
                f"{event.snapshot_id} was installed, expected {replica.installing}"
            )
        replica.installing = None
        role = replica.role
        if event.voters is not None:
            replica.restart_at_snapshot(event.snapshot_id, event.voters)
        if isinstance(role, roles.Follower):
            role.fetch_deadline = replica.next_fetch_deadline(role.leader_id)
            if event.voters is None:
                self._fetch_later(role)

    def _fits(self, response: messages.FetchResponse) -> bool:
        """Whether the batches continue this log, so that a defective sender can't damage it."""
        end, epoch = self._replica.log.end_offset, self._replica.log.last_epoch
        for batch in response.batches:
            if batch.base_offset != end or not batch.payloads:
                return False
            if not epoch <= batch.epoch <= response.header.epoch:
                return False
            end, epoch = batch.end_offset, batch.epoch
        return True

    def _truncation_point(self, theirs: messages.EpochEnd) -> EndOffset:
        log = self._replica.log
        if theirs.epoch < log.start_epoch:
            raise InvariantError(
                f"the leader's log diverges from this one in epoch {theirs.epoch}, but the log "
                f"below {log.start_offset} is committed and ends in epoch {log.start_epoch}"
            )
        if theirs.epoch == 0:
            return min(theirs.end_offset, log.end_offset)
        # Both logs agree up to the end of the last epoch that both contain (KIP-101).
        ours = log.end_of_epoch(theirs.epoch)
        if ours.epoch != theirs.epoch:
            return ours.end_offset
        return min(ours.end_offset, theirs.end_offset)

    def on_fetch_failed(self, peer: NodeId) -> None:
        """Retry after a backoff, or ask another replica for the leader."""
        role = self._replica.role
        if isinstance(role, roles.Follower) and role.leader_id == peer:
            self._fetch_later(role)
        elif isinstance(role, roles.Unattached):
            retry = self._replica.now + self._replica.timings.retry_backoff_ms
            role.next_search = min(role.next_search, retry)

    def on_leader_ended(self, peer: NodeId) -> None:
        """Campaign soon instead of waiting for the fetch timeout.

        Voters that saw the same crash start one after another, in the order of their ids, so that
        they rarely split the vote.
        """
        replica = self._replica
        role = replica.role
        if not isinstance(role, roles.Follower) or role.leader_id != peer or role.leader_ended:
            return
        delay = replica.failover_delay(peer) + replica.draw_backoff()
        role.leader_ended = True
        role.fetch_deadline = min(role.fetch_deadline, replica.now + delay)

    def on_begin_quorum_epoch(self, request: messages.BeginQuorumEpochRequest) -> None:
        """Follow the sender. The caller has checked the cluster and rejected an older epoch."""
        replica = self._replica
        leader_id = request.header.sender.node_id
        role = replica.role
        # Two leaders of one epoch are impossible: each would need votes of a majority.
        if isinstance(role, roles.Leader) and request.header.epoch == replica.epoch:
            raise InvariantError(
                f"node {leader_id} claims to lead epoch {replica.epoch}, which this node leads"
            )
        is_known = isinstance(role, roles.Follower) and role.leader_id == leader_id
        if request.header.epoch > replica.epoch or not is_known:
            replica.become_follower(request.header.epoch, leader_id)
        is_for_us = replica.is_self(request.header.receiver)
        error = messages.QuorumError.NONE if is_for_us else messages.QuorumError.INVALID_VOTER_KEY
        replica.acknowledge(request, error)

    def on_end_quorum_epoch(self, request: messages.EndQuorumEpochRequest) -> None:
        """Campaign after the delay that this voter's position among the successors requires."""
        replica = self._replica
        leader_id = request.header.sender.node_id
        role = replica.role
        if isinstance(role, roles.Follower) and role.leader_id == leader_id:
            delay = self._successor_delay(request.preferred_successors)
            role.leader_ended = True
            role.fetch_deadline = min(role.fetch_deadline, replica.now + delay)
        replica.acknowledge(request)

    def _successor_delay(self, successors: tuple[ReplicaKey, ...]) -> int:
        replica = self._replica
        for position, key in enumerate(successors):
            if replica.is_self(key):
                return position * replica.timings.failover_stagger_ms
        # Not a chosen successor: wait until those have had their chance.
        return replica.draw_election_timeout()


def _continues(download: roles.Download, response: messages.FetchSnapshotResponse) -> bool:
    """Whether a chunk continues the file of the chunks before it."""
    end = response.position + len(response.data)
    if response.position != download.position or not response.data:
        return False
    if end > response.total_bytes:
        return False
    # The first chunk determines size and digest, and later ones must be of the same file.
    is_first = download.position == 0
    return is_first or (response.total_bytes, response.file_digest) == (
        download.total_bytes,
        download.digest,
    )
