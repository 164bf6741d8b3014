"""Roles of a replica, each with the state that ends with it.

Epoch, vote and known leader outlive a role and are kept in `replica`. All times are absolute
milliseconds on the driver's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from streammeta.controller.ids import EndOffset, NodeId, SnapshotId
from streammeta.controller.quorum.log_view import EMPTY_LOG_END
from streammeta.controller.quorum.messages import FetchRequest, FetchSnapshotRequest
from streammeta.controller.quorum.voters import ReplicaKey, Voter


@dataclass(slots=True)
class Unattached:
    """Knows an epoch but not its leader. It may have voted.

    A replica that may not campaign asks others for the leader in turn, next at `next_search`.
    """

    election_deadline: int
    next_search: int = 0


@dataclass(slots=True)
class Prospective:
    """Asks for pre-votes at its current epoch (KIP-996), which leaves no durable trace."""

    starts_at: int
    deadline: int
    asked: bool = False
    granted: set[NodeId] = field(default_factory=set)
    denied: set[NodeId] = field(default_factory=set)


@dataclass(slots=True)
class Candidate:
    """Has voted for itself in a new epoch and asks for votes."""

    deadline: int
    granted: set[NodeId] = field(default_factory=set)
    denied: set[NodeId] = field(default_factory=set)


@dataclass(slots=True)
class Download:
    """Snapshot download from the current leader, complete below `position`."""

    snapshot_id: SnapshotId
    position: int = 0
    total_bytes: int = 0
    digest: bytes = b""


@dataclass(slots=True)
class Follower:
    """Fetches from the leader of its epoch."""

    leader_id: NodeId
    fetch_deadline: int
    next_fetch: int
    has_fetched: bool = False
    leader_ended: bool = False
    """The leader resigned or its process ended. Pre-votes may be granted against it."""
    read_round: int = 0
    fetch_offset: EndOffset = EMPTY_LOG_END
    """Offset of the newest Fetch. The leader's answer compares the logs up to there."""
    is_keepalive: bool = False
    """Whether the newest Fetch overtook a slow write and asked for no batches."""
    answered_request_id: int = 0
    """Newest request that this leader has answered."""
    download: Download | None = None
    next_update: int = 0
    """Time of the next UpdateVoter request to the leader."""


@dataclass(slots=True)
class ReplicaProgress:
    """A leader's knowledge of one other replica."""

    key: ReplicaKey
    """Key of the replica in the voter set, which may not name the disk."""
    last_fetch: int
    """Arrival of the last valid Fetch. Before the first, the start of the epoch."""
    last_contact: int
    """Arrival of the last Fetch that acknowledged a new answer. Before the first, the start of the
    epoch."""
    last_answered: tuple[int, int] = (0, 0)
    """Incarnation, and the newest request whose answer the replica has received."""
    is_disk_full: bool = False
    """Whether the last Fetch reported a full disk."""
    has_fetched: bool = False
    end_offset: EndOffset = EMPTY_LOG_END
    read_round: int = 0
    caught_up_at: int | None = None
    previous_fetch: int | None = None
    leader_end_at_previous_fetch: EndOffset = EMPTY_LOG_END
    next_heartbeat: int = 0
    earned_by: ReplicaKey | None = None
    """The replica, disk included, whose requests made this progress. None before the first."""


@dataclass(slots=True)
class DelayedFetch:
    """A Fetch that waits until there is something to send."""

    request: FetchRequest
    answer_by: int


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A read that waits for a majority to echo `read_round`."""

    read_id: int
    read_round: int
    index: EndOffset


@dataclass(slots=True)
class VoterChange:
    """A change of the voters that a caller waits for.

    A replica to be added catches up in rounds. Each round ends when the replica has everything that
    the leader had when the round began. `end_offset` is the end of the appended record.
    """

    change_id: int
    adding: Voter | None = None
    removing: ReplicaKey | None = None
    round_end: EndOffset = EMPTY_LOG_END
    round_started_at: int = 0
    rounds: int = 0
    end_offset: EndOffset | None = None


@dataclass(slots=True)
class Transfer:
    """A planned leadership transfer to a voter that must catch up by the deadline."""

    to: ReplicaKey
    deadline: int
    reason: str = "as asked"


@dataclass(slots=True)
class Leader:
    """Appends, serves Fetches, and decides which entries are committed."""

    epoch_start: EndOffset
    progress: dict[ReplicaKey, ReplicaProgress]
    delayed_fetches: dict[ReplicaKey, DelayedFetch] = field(default_factory=dict)
    read_round: int = 0
    pending_reads: deque[PendingRead] = field(default_factory=deque)
    log_reads: dict[int, FetchRequest] = field(default_factory=dict)
    snapshot_reads: dict[int, FetchSnapshotRequest] = field(default_factory=dict)
    voter_change: VoterChange | None = None
    transfer: Transfer | None = None
    uncommitted: deque[tuple[EndOffset, int]] = field(default_factory=deque)
    uncommitted_bytes: int = 0
    full_majority: tuple[NodeId, ...] = ()
    """Voters with full disks, if the fetching voters with room are not a majority."""
    idle_until: int = 0
    """Time before which only unusual events require action, 0 if unknown."""
    _others: tuple[Voter, ...] = ()
    _progress_of_others: list[ReplicaProgress] = field(default_factory=list)

    def next_answer_or_check(self) -> int:
        """Return the earliest time to answer a delayed Fetch, or else `idle_until`."""
        earliest = self.idle_until
        for delayed in self.delayed_fetches.values():
            if delayed.answer_by < earliest:
                earliest = delayed.answer_by
        return earliest

    def progress_of(self, others: tuple[Voter, ...]) -> list[ReplicaProgress]:
        """Return the progress of the current voters except the leader, in their order.

        Cached per voter set, because every step needs it several times.
        """
        if self._others is not others:
            self._others = others
            self._progress_of_others = [self.progress[voter.key] for voter in others]
        return self._progress_of_others


@dataclass(slots=True)
class Resigned:
    """Led this epoch and no longer does. Grants no vote in it. Restarted leaders begin here."""

    election_deadline: int
    successors: tuple[ReplicaKey, ...]
    unacknowledged: dict[NodeId, int]
    """Voters that have not acknowledged the end of the epoch, with the time of the next attempt."""


def postpone_deadlines(role: Role, ms: int, now: int) -> None:
    """Postpone the deadlines of a role by time in which this replica could not act."""
    if ms == 0:
        return

    match role:
        case Unattached() | Resigned():
            role.election_deadline += ms
        case Prospective() | Candidate():
            role.deadline += ms
        case Follower():
            # A campaign after a lost leader waits for nobody's answer, so it is not postponed.
            if not role.leader_ended:
                role.fetch_deadline += ms
        case Leader():
            for progress in role.progress.values():
                progress.last_contact = min(now, progress.last_contact + ms)
            # The cached time was computed from the contacts changed above.
            role.idle_until = 0


Role: TypeAlias = Unattached | Prospective | Candidate | Follower | Leader | Resigned
