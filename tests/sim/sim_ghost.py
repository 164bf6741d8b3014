"""Invariants of the whole quorum, kept outside the nodes and across their restarts.

The names are those of Raft: election safety, log matching, leader completeness, state machine
safety. Every check is incremental, so it can run after every event.
"""

from collections.abc import Sequence

from streammeta.controller.ids import SnapshotId
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LogStart
from streammeta.controller.quorum.messages import (
    Batch,
    BatchKind,
    FetchRequest,
    Message,
    VoteRequest,
    VoteResponse,
)
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from tests.sim.sim_ledger import GhostLog, GhostReplica, Ledger
from tests.sim.sim_time import check, violated


class Ghost:
    """Remembers everything that was promised."""

    def __init__(self, bootstrap: VoterSet) -> None:
        self.ledger = Ledger(bootstrap)
        self.replicas: dict[ReplicaKey, GhostReplica] = {}
        self._first_of: dict[int, ReplicaKey] = {}
        self._leaders: dict[int, tuple[ReplicaKey, int]] = {}
        self._leader_ends: dict[int, int] = {}
        self._votes: dict[tuple[ReplicaKey, int], ReplicaKey] = {}
        self._batches: dict[tuple[int, int], tuple[Batch, int]] = {}

    def replica_of(self, voter: Voter) -> GhostReplica | None:
        """The replica that a voter set names; without a disk it is the first of its node."""
        key = voter.key
        if key.directory_id is None:
            key = self._first_of.get(key.node_id, key)
        return self.replicas.get(key)

    # -- a replica's life

    def on_new_replica(self, key: ReplicaKey, bootstrap: VoterSet) -> None:
        """A disk was formatted."""
        self._first_of.setdefault(key.node_id, key)
        self.replicas[key] = GhostReplica(key, GhostLog(bootstrap))

    def on_start(
        self, key: ReplicaKey, start: LogStart, batches: list[Batch], state: QuorumState
    ) -> None:
        """A process recovered this from its disk."""
        replica = self.replicas[key]
        log = replica.log
        check(
            start.start_offset <= self.ledger.end,
            "the log begins at what is committed",
            f"{key} begins at {start.start_offset}, committed is {self.ledger.end}",
        )
        if start.start_offset > 0:
            newest = start.snapshots[-1].end_offset if start.snapshots else -1
            check(
                newest >= start.start_offset,
                "the log reaches back to a snapshot",
                f"{key} begins at {start.start_offset}, its newest snapshot ends at {newest}",
            )
        found = [*self.ledger.batches[: self.ledger.count_up_to(start.start_offset)], *batches]
        self._check_kept(replica, found, start)
        for batch in log.batches[len(found) :]:
            if batch.epoch > state.epoch:
                # Not even the epoch was durable, so it was never told: it never was.
                self._batches.pop((batch.base_offset, batch.epoch), None)
        log.replace(found)
        check(
            state.epoch >= replica.state.epoch,
            "epochs never fall",
            f"{key} restarted in epoch {state.epoch}, durable was {replica.state.epoch}",
        )
        self.on_state(key, state)
        newest_end = start.snapshots[-1].end_offset if start.snapshots else 0
        replica.delivered = self.ledger.count_up_to(newest_end)
        replica.high_watermark = newest_end

    def _check_kept(self, replica: GhostReplica, found: list[Batch], start: LogStart) -> None:
        log = replica.log
        kept = log.durable <= len(found) and log.shares(found) >= log.durable
        if start.lost is None:
            if replica.is_clearing:
                self.on_damage_cleared(replica.key)
            check(
                kept and replica.lost is None,
                "durability",
                f"{replica.key} restarted with {len(found)} batches as if undamaged, durable were "
                f"{log.durable}; it was damaged before: {replica.lost is not None}",
            )
            return
        check(
            replica.is_rotten or replica.lost is not None,
            "no false alarm",
            f"{replica.key} takes its intact disk for damaged: {start.lost}",
        )
        if not kept:
            replica.promised.append(log.batches[: log.durable])
            check(
                start.lost.end_offset >= log.durable_end,
                "damage is owned up to",
                f"{replica.key} misses batches up to {log.durable_end}, says {start.lost}",
            )
        replica.lost = start.lost
        replica.is_clearing = False

    def on_clearing_damage(self, key: ReplicaKey) -> None:
        """A damaged replica has back, it says, what it had promised, and votes from now on.

        A restart may find the damage forgotten or not.
        """
        replica = self.replicas[key]
        self._check_repaired(replica, len(replica.log.batches))
        replica.is_clearing = True

    def on_damage_cleared(self, key: ReplicaKey) -> None:
        """A replica has forgotten, durably, that it was damaged."""
        replica = self.replicas[key]
        self._check_repaired(replica, replica.log.durable)
        replica.lost = None
        replica.is_clearing = False
        replica.promised.clear()

    def _check_repaired(self, replica: GhostReplica, count: int) -> None:
        """Everything committed that it had promised is among its first `count` batches."""
        for promised in replica.promised:
            for index, batch in enumerate(promised):
                if index >= len(self.ledger.batches) or self.ledger.batches[index] != batch:
                    break
                check(
                    index < count and replica.log.batches[index] == batch,
                    "damage is repaired before it is forgotten",
                    f"{replica.key} lacks the committed batch that ends at {batch.end_offset}",
                )

    # -- election

    def on_state(self, key: ReplicaKey, state: QuorumState) -> None:
        """A quorum-state is durable."""
        replica = self.replicas[key]
        replica.state = state
        if state.vote is not None:
            replica.votes[state.epoch] = state.vote

    def on_leader(self, key: ReplicaKey, life: int, epoch: int) -> None:
        """A replica's leadership is durable; before, a crash leaves no trace of it."""
        known = self._leaders.setdefault(epoch, (key, life))
        check(
            known == (key, life),
            "election safety",
            f"epoch {epoch} was led by {known}, now also by {(key, life)}",
        )

    def on_elected(self, key: ReplicaKey, epoch: int) -> None:
        """A replica won an election: it has what earlier epochs committed."""
        index = self.ledger.count_before_epoch(epoch) - 1
        if index >= 0:
            log, committed = self.replicas[key].log.batches, self.ledger.batches[index]
            check(
                index < len(log) and log[index] == committed,
                "leader completeness",
                f"{key} leads epoch {epoch} without the committed batch that ends at "
                f"{committed.end_offset}",
            )

    def on_sent(self, key: ReplicaKey, message: Message) -> None:
        """A message left its node."""
        replica = self.replicas[key]
        epoch = message.header.epoch
        if epoch < replica.sent_epoch:
            violated("epochs never fall", f"{key} sent epoch {epoch} after {replica.sent_epoch}")
        replica.sent_epoch = epoch
        if isinstance(message, FetchRequest):
            if message.fetch_offset > replica.log.durable_end:
                violated(
                    "acknowledged is flushed",
                    f"{key} fetches at {message.fetch_offset}, flushed is "
                    f"{replica.log.durable_end}",
                )
        elif isinstance(message, VoteResponse):
            if message.granted and not message.pre_vote:
                self._on_vote_granted(replica, message)
        elif isinstance(message, VoteRequest):
            self._check_undamaged(replica, "asks for votes")
            if not message.pre_vote:
                self._on_vote(replica, epoch, key)

    def _on_vote_granted(self, replica: GhostReplica, message: VoteResponse) -> None:
        self._check_undamaged(replica, "grants a vote")
        vote = replica.votes.get(message.header.epoch)
        check(
            vote is not None and vote.node_id == message.header.receiver,
            "a vote is durable before it is sent",
            f"{replica.key} votes for node {message.header.receiver}, durable is {vote}",
        )
        assert vote is not None
        self._on_vote(replica, message.header.epoch, vote)

    def _check_undamaged(self, replica: GhostReplica, what: str) -> None:
        check(
            replica.lost is None or replica.is_clearing,
            "the damaged don't vote",
            f"{replica.key} {what} while it lacks {replica.lost}",
        )

    def _on_vote(self, replica: GhostReplica, epoch: int, candidate: ReplicaKey) -> None:
        known = self._votes.setdefault((replica.key, epoch), candidate)
        check(
            known == candidate,
            "one vote an epoch",
            f"{replica.key} voted in epoch {epoch} for {known} and for {candidate}",
        )

    # -- the log

    def on_append(
        self, key: ReplicaKey, batches: Sequence[Batch], committed: int, leads_from: int | None
    ) -> None:
        """A replica appends; `leads_from` is where its epoch starts if it leads.

        `committed` is its high watermark after the step, of which effects tell later.
        """
        replica = self.replicas[key]
        log = replica.log
        for batch in batches:
            if batch.base_offset != log.end:
                violated("log is gapless", f"{key} at {log.end}: {batch}")
            previous = log.batches[-1].epoch if log.batches else 0
            known, known_previous = self._batches.setdefault(
                (batch.base_offset, batch.epoch), (batch, previous)
            )
            if known_previous != previous or (known is not batch and known != batch):
                violated(
                    "log matching",
                    f"{key} has another batch at offset {batch.base_offset}, epoch {batch.epoch}",
                )
            earlier = log.voters, log.voters_named_at
            log.append(batch)
            if batch.kind is BatchKind.CONTROL and log.voters_named_at == len(log.batches):
                self._check_voters(replica, *earlier, committed, leads_from)

    def _check_voters(
        self,
        replica: GhostReplica,
        old: VoterSet,
        named_at: int,
        committed: int,
        leads_from: int | None,
    ) -> None:
        new = replica.log.voters
        check(len(new), "somebody votes", f"{replica.key} appended an empty voter set")
        if named_at > 0:
            check(
                new.follows(old),
                "voter sets differ by one",
                f"{replica.key}: {old} is followed by {new}",
            )
        if leads_from is None or named_at == 0:
            return
        named_end = replica.log.batches[named_at - 1].end_offset
        check(
            named_end <= committed,
            "one uncommitted voter set",
            f"{replica.key} changes the voters while those named below {named_end} are not "
            f"committed, committed is {committed}",
        )
        check(
            committed > leads_from,
            "no change before an own batch is committed",
            f"{replica.key} leads from {leads_from}, committed is {committed}",
        )

    def on_truncate(self, key: ReplicaKey, end_offset: int, epoch: int) -> None:
        """A replica cuts its log in an epoch.

        What only leaders of later epochs have committed does not need this copy: it did not count,
        for a voter that acknowledges to such a leader is in its epoch.
        """
        replica = self.replicas[key]
        log = replica.log
        ledger = self.ledger.batches[: self.ledger.count_before_epoch(epoch + 1)]
        keep = log.count_up_to(end_offset)
        check(
            end_offset >= replica.high_watermark,
            "committed is never truncated",
            f"{key} cuts to {end_offset}, its high watermark is {replica.high_watermark}",
        )
        lost = keep < len(ledger) and log.batches[keep : keep + 1] == [ledger[keep]]
        check(not lost, "committed is never truncated", f"{key} cuts to {end_offset}")
        log.cut(keep)

    def on_durable(self, key: ReplicaKey, end_offset: int) -> None:
        """A replica's log is flushed up to here."""
        log = self.replicas[key].log
        log.durable = max(log.durable, log.count_up_to(min(end_offset, log.end)))

    # -- snapshots

    def on_installing(self, key: ReplicaKey) -> None:
        """From now on a crash leaves either the log or the snapshot."""
        log = self.replicas[key].log
        log.durable_before_install = log.durable
        log.durable = min(log.durable, log.shares(self.ledger.batches))

    def on_install_rejected(self, key: ReplicaKey) -> None:
        """The snapshot was invalid, so the log is as it was."""
        log = self.replicas[key].log
        log.durable = log.durable_before_install

    def on_installed(self, key: ReplicaKey, snapshot_id: SnapshotId, voters: VoterSet) -> None:
        """A replica's log begins and ends at a snapshot's end."""
        self.check_snapshot(key, snapshot_id, voters)
        count = self.ledger.count_up_to(snapshot_id.end_offset)
        self.replicas[key].log.replace(self.ledger.batches[:count])

    def check_snapshot(self, key: ReplicaKey, snapshot_id: SnapshotId, voters: VoterSet) -> None:
        """A snapshot lies on a committed batch's end and names the voters as of there."""
        count = self.ledger.count_up_to(snapshot_id.end_offset)
        last = self.ledger.batches[count - 1] if count else None
        check(
            last is not None
            and (last.end_offset, last.epoch) == (snapshot_id.end_offset, snapshot_id.epoch),
            "a snapshot ends where a committed batch does",
            f"{key}: {snapshot_id}, committed below is {last and last.end_offset}",
        )
        check(
            voters == self.ledger.voters_at(snapshot_id.end_offset),
            "a snapshot names its voters",
            f"{key}: {snapshot_id} names {voters}",
        )

    # -- commit

    def on_commit(
        self, key: ReplicaKey, high_watermark: int, epoch: int, *, is_leader: bool
    ) -> None:
        """A replica learned, or as the leader decided, what is committed."""
        replica = self.replicas[key]
        log = replica.log
        if not replica.high_watermark < high_watermark <= log.end:
            violated(
                "high watermark grows within the log",
                f"{key}: {replica.high_watermark} to {high_watermark}, log {log.end}",
            )
        replica.high_watermark = high_watermark
        for index in range(replica.delivered, log.count_up_to(high_watermark)):
            batch = log.batches[index]
            known = self.ledger.at(index, batch, epoch)
            if known is not batch and known != batch:
                violated(
                    "state machine safety",
                    f"{key} commits at {batch.base_offset} epoch {batch.epoch}, committed was "
                    f"epoch {known.epoch}",
                )
            replica.delivered = index + 1
        if is_leader:
            self._check_leader_commit(replica, high_watermark, epoch)

    def _check_leader_commit(self, replica: GhostReplica, high_watermark: int, epoch: int) -> None:
        check(
            high_watermark >= self._leader_ends.get(epoch, 0),
            "a leader's high watermark never falls",
            f"{replica.key} in epoch {epoch}",
        )
        self._leader_ends[epoch] = high_watermark
        index = replica.delivered - 1
        # By the offset its clients wait for: only so are older batches safe (Raft, figure 8).
        check(
            self.ledger.batches[index].epoch == epoch,
            "a leader commits by batches of its own epoch",
            f"{replica.key} leads epoch {epoch} and commits up to {high_watermark}",
        )
        self._check_majority(replica, index)

    def _check_majority(self, replica: GhostReplica, index: int) -> None:
        batch = self.ledger.batches[index]
        voters = replica.log.voters
        holders = 0
        for voter in voters:
            holder = self.replica_of(voter)
            holders += holder is not None and holder.vouches_for(index, batch)
        if 2 * holders <= len(voters):
            violated(
                "acknowledged is flushed on a majority",
                f"{replica.key} committed up to {batch.end_offset}, flushed on {holders} of "
                f"{voters}",
            )

    def on_change_done(self, change: Voter | ReplicaKey, end_offset: int) -> None:
        """A leader says that a change of the voters is committed."""
        voters = self.ledger.voters_at(end_offset)
        if isinstance(change, Voter):
            took_place = change.key in [voter.key for voter in voters]
        else:
            took_place = change not in [voter.key for voter in voters]
        check(
            end_offset <= self.ledger.end and took_place,
            "a change is done when it is committed",
            f"{change} below {end_offset}: committed is {self.ledger.end}, voters are {voters}",
        )

    def on_read_index(self, key: ReplicaKey, index: int, committed_before: int) -> None:
        """A leader says how far a read must have applied."""
        check(
            index >= committed_before,
            "linearizable reads",
            f"{key} read at {index}, {committed_before} was committed before it asked",
        )
