"""Who may vote: replicas, and the sets of them whose majority decides.

Voter sets are values: a change of membership makes a new one. Two sets may follow each other only
if any majority of the one meets any majority of the other, which is what `follows` checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from streammeta.controller.ids import DirectoryId, NodeId


@dataclass(frozen=True, slots=True)
class ReplicaKey:
    """A replica: a node together with its disk (KIP-853).

    A `directory_id` of None is "whatever disk that node has": voters named by a static
    configuration are known so until they tell which one it is.
    """

    node_id: NodeId
    directory_id: DirectoryId | None = None

    def matches(self, other: ReplicaKey) -> bool:
        """Whether both may be the same replica: same node, and no two different disks."""
        if self.node_id != other.node_id:
            return False
        if self.directory_id is None or other.directory_id is None:
            return True
        return self.directory_id == other.directory_id


@dataclass(frozen=True, slots=True)
class Voter:
    """A replica that votes, and where it listens (`host:port`)."""

    key: ReplicaKey
    endpoint: str


@dataclass(frozen=True, slots=True)
class VoterSet:
    """The replicas whose majority decides; one voter for a node id at most.

    A set without voters stands for "not known yet": no majority of it exists.
    """

    voters: tuple[Voter, ...] = ()

    def __post_init__(self) -> None:
        ids = [voter.key.node_id for voter in self.voters]
        if len(set(ids)) != len(ids):
            raise ValueError(f"voters: node ids {sorted(ids)} repeat; each voter needs its own")

    def __iter__(self) -> Iterator[Voter]:
        return iter(self.voters)

    def __len__(self) -> int:
        return len(self.voters)

    def find(self, node_id: NodeId) -> Voter | None:
        """Return the voter with this node id."""
        return next((voter for voter in self.voters if voter.key.node_id == node_id), None)

    def contains(self, key: ReplicaKey) -> bool:
        """Whether this replica, disk included, votes."""
        return any(voter.key.matches(key) for voter in self.voters)

    def others(self, node_id: NodeId) -> tuple[Voter, ...]:
        """Return all voters but this node."""
        return tuple(voter for voter in self.voters if voter.key.node_id != node_id)

    def added(self, voter: Voter) -> VoterSet:
        """Return the set with one more voter; raises ValueError if its node votes already."""
        return VoterSet((*self.voters, voter))

    def removed(self, node_id: NodeId) -> VoterSet:
        """Return the set without this node."""
        return VoterSet(self.others(node_id))

    def updated(self, voter: Voter) -> VoterSet:
        """Return the set with what is known of one of its voters replaced."""
        return VoterSet(
            tuple(voter if old.key.node_id == voter.key.node_id else old for old in self.voters)
        )

    def follows(self, earlier: VoterSet) -> bool:
        """Whether this set may replace `earlier`: one voter more, one less, or one known better.

        A swap of two voters in one change is refused: for odd sizes there are majorities of both
        sets that do not meet.
        """
        kept = sum(earlier.contains(voter.key) for voter in self)
        came, went = len(self) - kept, len(earlier) - kept
        return came + went <= 1
