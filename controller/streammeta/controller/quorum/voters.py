"""Voters: replica keys, voter sets, majorities, and the history of voter sets in a log.

Voter sets are immutable values, and a membership change creates a new one. Two sets may follow each
other only if every majority of one overlaps every majority of the other, which `follows` checks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import DirectoryId, EndOffset, NodeId

_Number = TypeVar("_Number", bound=int)


@dataclass(frozen=True, slots=True)
class ReplicaKey:
    """A replica: a node together with its disk (KIP-853).

    A `directory_id` of None means any disk of that node. Voters from a static configuration have no
    known disk until they report it.
    """

    node_id: NodeId
    directory_id: DirectoryId | None = None

    def __hash__(self) -> int:
        # Keys are looked up for every message. Hashing both fields costs several times as much.
        return hash(self.node_id)

    def matches(self, other: ReplicaKey) -> bool:
        """Whether both can be the same replica: same node, and not two different disks."""
        if self.node_id != other.node_id:
            return False
        if self.directory_id is None or other.directory_id is None:
            return True
        return self.directory_id == other.directory_id


@dataclass(frozen=True, slots=True)
class Voter:
    """A replica that votes, and its addresses (`host:port`).

    Peers reach it at `endpoint`, clients at `client_endpoint`. The latter is None until the replica
    has reported it.
    """

    key: ReplicaKey
    endpoint: str
    client_endpoint: str | None = None

    def to_fields(self) -> dict[str, Any]:
        """Return the voter as a JSON object, without an unknown client endpoint."""
        fields = {
            "node_id": self.key.node_id,
            "directory_id": self.key.directory_id,
            "endpoint": self.endpoint,
        }
        if self.client_endpoint is not None:
            fields["client_endpoint"] = self.client_endpoint
        return fields

    @classmethod
    def from_fields(cls, item: Mapping[str, Any]) -> Voter:
        """Parse the result of `to_fields`. Raises KeyError, TypeError or ValueError."""
        disk, clients = item["directory_id"], item.get("client_endpoint")
        return cls(
            ReplicaKey(
                NodeId(int(str(item["node_id"]))), None if disk is None else DirectoryId(str(disk))
            ),
            str(item["endpoint"]),
            None if clients is None else str(clients),
        )


@dataclass(frozen=True, slots=True)
class VoterSet:
    """Replicas whose majority decides, at most one for a node id.

    An empty set means "not known yet" and has no majority.
    """

    voters: tuple[Voter, ...] = ()
    _by_id: dict[NodeId, Voter] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        by_id = {voter.key.node_id: voter for voter in self.voters}
        if len(by_id) != len(self.voters):
            ids = sorted(voter.key.node_id for voter in self.voters)
            raise ValueError(f"voters repeat node ids in {ids}: each voter needs its own")
        object.__setattr__(self, "_by_id", by_id)

    def __iter__(self) -> Iterator[Voter]:
        return iter(self.voters)

    def __len__(self) -> int:
        return len(self.voters)

    def find(self, node_id: NodeId) -> Voter | None:
        """Return the voter with this node id."""
        return self._by_id.get(node_id)

    def contains(self, key: ReplicaKey) -> bool:
        """Whether this replica, disk included, votes."""
        return any(voter.key.matches(key) for voter in self.voters)

    def others(self, node_id: NodeId) -> tuple[Voter, ...]:
        """Return all voters except this node."""
        return tuple(voter for voter in self.voters if voter.key.node_id != node_id)

    def with_voter(self, voter: Voter) -> VoterSet:
        """Return the set plus one voter. Raises ValueError if its node is already a voter."""
        return VoterSet((*self.voters, voter))

    def without_node(self, node_id: NodeId) -> VoterSet:
        """Return the set without this node."""
        return VoterSet(self.others(node_id))

    def with_update(self, voter: Voter) -> VoterSet:
        """Return the set with one voter's disk and endpoints replaced."""
        return VoterSet(
            tuple(voter if old.key.node_id == voter.key.node_id else old for old in self.voters)
        )

    def to_fields(self) -> list[dict[str, Any]]:
        """Return the voters as JSON objects, as in the log and in a data directory."""
        return [voter.to_fields() for voter in self]

    @classmethod
    def from_fields(cls, items: Iterable[Mapping[str, Any]]) -> VoterSet:
        """Parse the result of `to_fields`. Raises KeyError, TypeError or ValueError."""
        return cls(tuple(Voter.from_fields(item) for item in items))

    def follows(self, earlier: VoterSet) -> bool:
        """Whether this set may replace `earlier`: one voter added, removed or updated.

        A swap of two voters in one change is rejected. For odd sizes the two sets have majorities
        that do not overlap.
        """
        # A voter whose disk becomes known is kept: both keys match.
        kept = sum(earlier.contains(voter.key) for voter in self)
        came, went = len(self) - kept, len(earlier) - kept
        return came + went <= 1


def majority(voters: int) -> int:
    """Return the smallest number of `voters` replicas of which any two groups overlap."""
    return voters // 2 + 1


def reached_by_majority(values: Collection[_Number]) -> _Number:
    """Return the highest number that a majority has reached, from one number per voter."""
    # The ascending majority-th largest value: exactly that many voters have reached it.
    return sorted(values, reverse=True)[majority(len(values)) - 1]


def committed_end(flushed_ends: Collection[EndOffset], epoch_start: EndOffset) -> EndOffset | None:
    """Return the high watermark that a leader may announce, or None if there is none yet.

    It must be above the start of the leader's epoch: batches of earlier epochs are committed only
    along with a batch of this one (Raft, figure 8). KAFKA-12619 is why the comparison is strict.
    """
    candidate = reached_by_majority(flushed_ends)
    return candidate if candidate > epoch_start else None


class VoterHistory:
    """Voter sets by the end offset of the batch that names them."""

    def __init__(self, base: VoterSet, base_end: EndOffset) -> None:
        self._ends = [base_end]
        self._sets = [base]

    @property
    def latest(self) -> VoterSet:
        """Return the current voters."""
        return self._sets[-1]

    @property
    def latest_end(self) -> EndOffset:
        """Return the end offset of the batch that named the current voters, or the base's end."""
        return self._ends[-1]

    def at(self, end_offset: EndOffset) -> VoterSet:
        """Return the voters named by the log below `end_offset`."""
        # Below the first named set the base applies.
        return self._sets[max(0, bisect_right(self._ends, end_offset) - 1)]

    def append(self, end_offset: EndOffset, voters: VoterSet) -> None:
        """Add the set named by the batch that ends at `end_offset`."""
        # Configured bootstrap voters may differ from the first ones in the log.
        is_from_configuration = self.latest_end == 0
        if not is_from_configuration and not voters.follows(self.latest):
            raise InvariantError(
                f"the voters named below offset {end_offset} ({voters}) differ from the previous "
                f"ones ({self.latest}) by more than one voter"
            )
        self._ends.append(end_offset)
        self._sets.append(voters)

    def truncate(self, end_offset: EndOffset) -> None:
        """Remove the sets named at or above `end_offset`."""
        while len(self._ends) > 1 and self._ends[-1] > end_offset:
            self._ends.pop()
            self._sets.pop()

    def trim(self, start_offset: EndOffset) -> None:
        """Remove the sets that no offset from `start_offset` on needs."""
        drop = bisect_right(self._ends, start_offset) - 1
        if drop > 0:
            del self._ends[:drop], self._sets[:drop]
