"""The voter sets of one replica's log: which was in force up to where.

A set is in force as soon as its record is in the log, committed or not, and no longer once that
record is cut away (KIP-853). Knows nothing of the records themselves.
"""

from __future__ import annotations

from bisect import bisect_right

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset
from streammeta.controller.quorum.voters import VoterSet


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
        is_from_configuration = self.latest_end == 0  # nobody guarantees that those agree
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
