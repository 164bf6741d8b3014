"""Expected contents of one replica's disk, and the committed log as any node announced it."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LostEntries
from streammeta.controller.quorum.messages import Batch, BatchKind, decode_voters
from streammeta.controller.quorum.voters import ReplicaKey, VoterSet
from streammeta.controller.records.codec import decode_records
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH, RollingHash
from tests.sim.sim_map import MAP_KEY, MapWatch
from tests.sim.sim_shared_streams import AppendWatch
from tests.sim.sim_store import Held, Store, StoreImage
from tests.sim.sim_time import check


class Batches:
    """Batches from offset 0 on."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._ends: list[int] = []

    @property
    def end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def count_up_to(self, end_offset: int) -> int:
        """Count of batches that end at or before `end_offset`."""
        return bisect_right(self._ends, end_offset)


class Ledger(Batches):
    """What any node ever called committed, with a store of its own that applies it once."""

    def __init__(self, bootstrap: VoterSet) -> None:
        super().__init__()
        self.store = Store()
        self._commit_epochs: list[int] = []
        self._hashes: dict[int, tuple[int, bytes]] = {0: (0, EMPTY_LOG_HASH)}
        self._log_hash = RollingHash()
        self._log_hashes = [EMPTY_LOG_HASH]
        self._offsets: list[int] = []
        self._payloads: list[bytes] = []
        self._voters: list[tuple[int, VoterSet]] = [(0, bootstrap)]
        self._past: dict[str, list[tuple[int, Held | None]]] = {}
        self.map_watch = MapWatch()
        self.append_watch = AppendWatch()

    def count_before_epoch(self, epoch: int) -> int:
        """Count of batches that leaders of earlier epochs called committed."""
        return bisect_left(self._commit_epochs, epoch)

    def at(self, index: int, batch: Batch, epoch: int) -> Batch:
        """Return the committed batch at `index`; if there is none, `batch` is, from now on.

        `epoch` is that of the node that says so.
        """
        if index == len(self.batches):
            self._commit_epochs.append(max([epoch, *self._commit_epochs[-1:]]))
            self._commit(batch)
        return self.batches[index]

    def _commit(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._ends.append(batch.end_offset)
        if batch.kind is BatchKind.CONTROL:
            named = decode_voters(batch)
            if named is not None:
                self._voters.append((batch.end_offset, named))
        else:
            for index, payload in enumerate(batch.payloads):
                offset = batch.base_offset + index
                records = decode_records(payload)
                key = self.store.apply(offset, records)
                self.store.forget_undo(offset + 1)
                self._log_hash.extend(offset, payload)
                self._log_hashes.append(self._log_hash.value)
                self._offsets.append(offset)
                self._payloads.append(payload)
                self._past.setdefault(key, []).append((offset + 1, self.store.held(key)))
                if key == MAP_KEY:
                    self.map_watch.commit(self.store.map, offset, records)
                    self.append_watch.commit(records, offset)
            self._log_hash.forget_undo(batch.end_offset)
        self._hashes[batch.end_offset] = self.store.hash, self._log_hash.value

    def voters_at(self, end_offset: int) -> VoterSet:
        """The voters that the committed batches below `end_offset` put in force."""
        index = bisect_right(self._voters, end_offset, key=lambda item: item[0])
        return self._voters[max(0, index - 1)][1]

    @property
    def voters(self) -> VoterSet:
        return self._voters[-1][1]

    def held_at(self, key: str, end_offset: int) -> Held | None:
        """What was stored under `key` when everything below `end_offset` had been applied."""
        past = self._past.get(key, [])
        index = bisect_right(past, end_offset, key=lambda item: item[0])
        return past[index - 1][1] if index else None

    def entry_from(self, offset: int) -> tuple[int, bytes] | None:
        """The first committed entry at or above an offset, None if there is none yet."""
        place = bisect_left(self._offsets, offset)
        return (self._offsets[place], self._payloads[place]) if place < len(self._offsets) else None

    def log_hash_at(self, end_offset: int) -> bytes:
        """The rolling hash of the committed entries below an offset."""
        return self._log_hashes[bisect_left(self._offsets, end_offset)]

    def check_state(self, who: object, end_offset: int, state_hash: int, log_hash: bytes) -> None:
        """A replica that applied everything below `end_offset` has these hashes."""
        known = self._hashes.get(end_offset)
        if known == (state_hash, log_hash):
            return
        check(
            known,
            "state ends where a batch does",
            f"{who} applied everything below {end_offset}, where no committed batch ends",
        )
        check(False, "equal states at equal offsets", f"{who} at {end_offset}")

    def check_image(self, who: object, image: StoreImage) -> None:
        """An image is that of everything committed below its end."""
        end_offset = image.snapshot_id.end_offset
        self.check_state(who, end_offset, image.hash, image.log_hash)
        if image.map_name:
            self.map_watch.check_replica(who, end_offset, bytes.fromhex(image.map_name))


class GhostLog(Batches):
    """A replica's log; what it no longer reaches back to is committed."""

    def __init__(self, bootstrap: VoterSet) -> None:
        super().__init__()
        self.durable = 0
        """Count of batches that no crash can take away."""
        self.durable_before_install = 0
        self._voters: list[tuple[int, VoterSet]] = [(0, bootstrap)]

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

    def append(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._ends.append(batch.end_offset)
        if batch.kind is BatchKind.CONTROL and (named := decode_voters(batch)) is not None:
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
    sent_epoch: int = 0
    delivered: int = 0
    high_watermark: int = 0
    state: QuorumState = field(default_factory=QuorumState)
    votes: dict[int, ReplicaKey] = field(default_factory=dict)
    """Votes that are durable, by epoch."""
    is_rotten: bool = False
    """Bits of its disk were turned over, and it may not have noticed yet."""
    lost: LostEntries | None = None
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
