"""Voters: replica keys, voter sets, the arithmetic of majorities, and the history of sets in a log.

Voter sets are values: a change of membership makes a new one. Two sets may follow each other only
if any majority of the one meets any majority of the other, which is what `follows` checks.
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

    A `directory_id` of None is "whatever disk that node has": voters named by a static
    configuration have no known disk until they report it.
    """

    node_id: NodeId
    directory_id: DirectoryId | None = None

    def __hash__(self) -> int:
        # Looked up for every message; hashing both fields would cost several times as much.
        return hash(self.node_id)

    def matches(self, other: ReplicaKey) -> bool:
        """Whether both may be the same replica: same node, and no two different disks."""
        if self.node_id != other.node_id:
            return False
        if self.directory_id is None or other.directory_id is None:
            return True
        return self.directory_id == other.directory_id


@dataclass(frozen=True, slots=True)
class Voter:
    """A replica that votes, and its addresses (`host:port`).

    `endpoint` is where its peers reach it, `client_endpoint` where clients do; None while it has
    not reported that.
    """

    key: ReplicaKey
    endpoint: str
    client_endpoint: str | None = None

    def to_fields(self) -> dict[str, Any]:
        """Return the voter as a JSON object; an unknown client endpoint is left out."""
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
        """Read what `to_fields` returned; raises KeyError, TypeError or ValueError."""
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
    """The replicas whose majority decides; one voter for a node id at most.

    A set without voters stands for "not known yet": no majority of it exists.
    """

    voters: tuple[Voter, ...] = ()
    _by_id: dict[NodeId, Voter] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        by_id = {voter.key.node_id: voter for voter in self.voters}
        if len(by_id) != len(self.voters):
            ids = sorted(voter.key.node_id for voter in self.voters)
            raise ValueError(f"voters: node ids {ids} repeat; each voter needs its own")
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

    def to_fields(self) -> list[dict[str, Any]]:
        """Return the voters as JSON objects, as the log and a data directory hold them."""
        return [voter.to_fields() for voter in self]

    @classmethod
    def from_fields(cls, items: Iterable[Mapping[str, Any]]) -> VoterSet:
        """Read what `to_fields` returned; raises KeyError, TypeError or ValueError."""
        return cls(tuple(Voter.from_fields(item) for item in items))

    def follows(self, earlier: VoterSet) -> bool:
        """Whether this set may replace `earlier`: one voter more, one less, or one known better.

        A swap of two voters in one change is refused: for odd sizes there are majorities of both
        sets that do not meet.
        """
        kept = sum(earlier.contains(voter.key) for voter in self)
        came, went = len(self) - kept, len(earlier) - kept
        return came + went <= 1


def majority(voters: int) -> int:
    """Return the smallest count of `voters` replicas that any two of which overlap."""
    return voters // 2 + 1


def reached_by_majority(values: Collection[_Number]) -> _Number:
    """Return the highest number that a majority has reached, given one for each voter."""
    return sorted(values, reverse=True)[majority(len(values)) - 1]


def committed_end(flushed_ends: Collection[EndOffset], epoch_start: EndOffset) -> EndOffset | None:
    """Return the high watermark a leader may announce, or None while it may announce none.

    It must lie beyond the start of the leader's epoch: batches of earlier epochs are committed
    only along with one of its own (Raft, figure 8; KAFKA-12619 for the strict comparison).
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
        """Return the voters in force."""
        return self._sets[-1]

    @property
    def latest_end(self) -> EndOffset:
        """Return the end offset of the batch that named them; that of the base before any."""
        return self._ends[-1]

    def at(self, end_offset: EndOffset) -> VoterSet:
        """Return the voters named by the log below `end_offset`."""
        return self._sets[max(0, bisect_right(self._ends, end_offset) - 1)]

    def append(self, end_offset: EndOffset, voters: VoterSet) -> None:
        """Take the set named by the batch that ends at `end_offset`."""
        is_from_configuration = self.latest_end == 0  # nothing guarantees that those agree
        if not is_from_configuration and not voters.follows(self.latest):
            raise InvariantError(
                f"the voters named below offset {end_offset}, {voters}, differ from those before, "
                f"{self.latest}, by more than one"
            )
        self._ends.append(end_offset)
        self._sets.append(voters)

    def truncate(self, end_offset: EndOffset) -> None:
        """Forget what was named at or beyond `end_offset`."""
        while len(self._ends) > 1 and self._ends[-1] > end_offset:
            self._ends.pop()
            self._sets.pop()

    def trim(self, start_offset: EndOffset) -> None:
        """Forget what no offset from `start_offset` on needs."""
        drop = bisect_right(self._ends, start_offset) - 1
        if drop > 0:
            del self._ends[:drop], self._sets[:drop]
