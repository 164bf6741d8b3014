"""Memory of a replica's campaigns: their outcomes, and the wait before the next one.

A disk may take seconds to write a vote or a leader's state. A candidate therefore asks again in the
same epoch, where late votes still count. A replica that has seen another candidate waits for writes
of its own before it competes. A new leader clears all of this.
"""

from __future__ import annotations

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.voters import VoterSet, majority

_WRITES_OF_A_LEADER = 2
"""Writes that rivals wait for once a candidate asks: its state as the leader, and one spare."""


class Candidacy:
    """Results of the elections since the last leader."""

    def __init__(self) -> None:
        self.lost_elections = 0
        self.patience = 0
        """Number of own writes to wait for before the next campaign."""
        self._denied_by: set[NodeId] = set()
        """Voters that denied their vote in the current epoch, or whose process has ended."""
        self._has_resumed = False
        self._is_of_this_process = False

    def on_epoch(self) -> None:
        """Forget what voters said in an earlier epoch."""
        self._denied_by.clear()
        self._has_resumed = False
        self._is_of_this_process = False

    def begin(self) -> None:
        """Record that this process stands in the current epoch for the first time."""
        self._is_of_this_process = True

    def on_leader(self) -> None:
        """Clear everything once a leader is elected."""
        self.lost_elections = self.patience = 0

    def on_rival(self) -> None:
        """Record that another candidate may be writing its state."""
        self.patience = _WRITES_OF_A_LEADER

    def on_vote_denied(self, voter: NodeId) -> None:
        """Record a voter that will not vote for this replica in the current epoch."""
        self._denied_by.add(voter)

    def may_resume(self, voters: VoterSet) -> bool:
        """Whether enough voters may still grant their votes in the current epoch.

        After a denial a candidate asks again only once: a voter that never answers must not keep it
        from opening another epoch. A vote cast by an earlier process is never resumed. That process
        may have led the epoch without its state as the leader reaching the disk, and its entries
        may be in other logs.
        """
        if not self._is_of_this_process:
            return False
        may_ask_again = not self._denied_by or not self._has_resumed
        hopeful = len(voters) - len(self._denied_by)
        return may_ask_again and hopeful >= majority(len(voters))

    def resume(self) -> None:
        """Record that the votes of the current epoch are requested again."""
        self._has_resumed = bool(self._denied_by)
