"""Expected contents of one replica's disk: batches, the durable ones among them, voters."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LostPromise
from streammeta.controller.quorum.messages import Batch, BatchKind, voters_named_by
from streammeta.controller.quorum.voters import ReplicaKey, VoterSet


class GhostLog:
    """Batches from offset 0 on; what a replica's log no longer reaches back to is committed."""

    def __init__(self, bootstrap: VoterSet) -> None:
        self.batches: list[Batch] = []
        self.durable = 0
        """Count of batches that no crash can take away."""
        self._ends: list[int] = []
        self._voters: list[tuple[int, VoterSet]] = [(0, bootstrap)]

    @property
    def end(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def durable_end(self) -> int:
        return self._ends[self.durable - 1] if self.durable else 0

    @property
    def voters(self) -> VoterSet:
        """The voters in force: the last that were named, committed or not."""
        return self._voters[-1][1]

    @property
    def voters_named_at(self) -> int:
        """Count of batches up to the one that names the voters in force."""
        return self._voters[-1][0]

    def count_up_to(self, end_offset: int) -> int:
        """Count of batches that end at or before `end_offset`."""
        return bisect_right(self._ends, end_offset)

    def append(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._ends.append(batch.end_offset)
        if batch.kind is BatchKind.CONTROL and (named := voters_named_by(batch)) is not None:
            self._voters.append((len(self.batches), named))

    def cut(self, count: int) -> None:
        """Keep the first `count` batches."""
        del self.batches[count:], self._ends[count:]
        self.durable = min(self.durable, count)
        while self._voters[-1][0] > count:
            self._voters.pop()

    def replace(self, batches: list[Batch]) -> None:
        """Hold these batches, all durable, instead of whatever there was."""
        shared = 0
        for old, new in zip(self.batches, batches, strict=False):
            if old is not new and old != new:
                break
            shared += 1
        self.cut(shared)
        for batch in batches[shared:]:
            self.append(batch)
        self.durable = len(self.batches)

    def shares(self, batches: list[Batch]) -> int:
        """Count of batches at the start that are the same in both."""
        for index, (ours, theirs) in enumerate(zip(self.batches, batches, strict=False)):
            if ours is not theirs and ours != theirs:
                return index
        return min(len(self.batches), len(batches))


@dataclass
class GhostReplica:
    """A node together with one disk; a wiped disk begins another replica."""

    key: ReplicaKey
    log: GhostLog
    has_bootstrap: bool
    """It was there from the beginning, so that a voter without a directory id may mean it."""
    sent_epoch: int = 0
    delivered: int = 0
    high_watermark: int = 0
    state: QuorumState = field(default_factory=QuorumState)
    votes: dict[int, ReplicaKey] = field(default_factory=dict)
    """Votes that are durable, by epoch."""
    is_rotten: bool = False
    """Bits of its disk were turned over, and it may not have noticed yet."""
    lost: LostPromise | None = None
    is_clearing: bool = False
    promised: list[list[Batch]] = field(default_factory=list)
    """What it had acknowledged whenever it found itself damaged."""

    def vouches_for(self, index: int, batch: Batch) -> bool:
        """Whether it has a batch durably, or had it and won't vote until it has it back."""
        log = self.log
        if log.durable > index:
            held = log.batches[index]
            if held is batch or held == batch:
                return True
        return any(len(promised) > index and promised[index] == batch for promised in self.promised)
