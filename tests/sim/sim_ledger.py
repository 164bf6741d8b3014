"""What was ever called committed, and the state that follows from it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from controller.quorum.control import voters_named_by
from controller.quorum.messages import Batch, BatchKind
from controller.quorum.voters import VoterSet
from tests.sim.sim_check import check
from tests.sim.sim_map import MAP_KEY, MapWatch
from tests.sim.sim_store import Held, Store


class Ledger:
    """The committed batches, with a store of its own that applies them once."""

    def __init__(self, bootstrap: VoterSet) -> None:
        self.batches: list[Batch] = []
        self.store = Store()
        self._ends: list[int] = []
        self._commit_epochs: list[int] = []
        self._hashes: dict[int, int] = {0: 0}
        self._voters: list[tuple[int, VoterSet]] = [(0, bootstrap)]
        self._past: dict[str, list[tuple[int, Held | None]]] = {}
        self.map_watch = MapWatch()

    @property
    def end(self) -> int:
        """End of what any node ever called committed."""
        return self._ends[-1] if self._ends else 0

    def count_up_to(self, end_offset: int) -> int:
        """Count of batches that end at or before `end_offset`."""
        return bisect_right(self._ends, end_offset)

    def count_before_epoch(self, epoch: int) -> int:
        """Count of batches that leaders of earlier epochs called committed."""
        return bisect_left(self._commit_epochs, epoch)

    def at(self, index: int, batch: Batch, epoch: int) -> Batch:
        """Return the committed batch at `index`; if there is none, `batch` is, from now on.

        `epoch` is that of whoever says so.
        """
        if index == len(self.batches):
            self._commit_epochs.append(max([epoch, *self._commit_epochs[-1:]]))
            self._commit(batch)
        return self.batches[index]

    def _commit(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._ends.append(batch.end_offset)
        if batch.kind is BatchKind.CONTROL:
            named = voters_named_by(batch)
            if named is not None:
                self._voters.append((batch.end_offset, named))
        else:
            for index, payload in enumerate(batch.payloads):
                offset = batch.base_offset + index
                key = self.store.apply(offset, payload)
                self._past.setdefault(key, []).append((offset + 1, self.store.held(key)))
                if key == MAP_KEY:
                    self.map_watch.commit(self.store.replica.map, offset, payload)
        self._hashes[batch.end_offset] = self.store.hash

    def voters_at(self, end_offset: int) -> VoterSet:
        """The voters that the committed batches below `end_offset` put in force."""
        index = bisect_right(self._voters, end_offset, key=lambda item: item[0])
        return self._voters[max(0, index - 1)][1]

    @property
    def voters(self) -> VoterSet:
        """The last committed voters."""
        return self._voters[-1][1]

    def held_at(self, key: str, end_offset: int) -> Held | None:
        """What was stored under `key` when everything below `end_offset` had been applied."""
        past = self._past.get(key, [])
        index = bisect_right(past, end_offset, key=lambda item: item[0])
        return past[index - 1][1] if index else None

    def check_state(self, who: object, end_offset: int, state_hash: int) -> None:
        """A replica that applied everything below `end_offset` has this hash."""
        if self._hashes.get(end_offset) != state_hash:
            known = end_offset in self._hashes
            check(
                known,
                "state ends where a batch does",
                f"{who} applied everything below {end_offset}, where no committed batch ends",
            )
            check(False, "equal states at equal offsets", f"{who} at {end_offset}")
