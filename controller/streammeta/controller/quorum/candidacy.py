"""Memory of a replica's campaigns: how they went, and how patient it is before the next one.

Disks may take seconds for the vote of each voter, and for the leader's own state. So a candidate
asks again in its epoch, where votes granted too late still count, and a replica that has seen
another candidate waits for writes of its own before it competes. Nothing here outlives progress.
"""

from __future__ import annotations

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.voters import VoterSet, majority

_WRITES_OF_A_LEADER = 2
"""Writes that others wait for once a candidate asks: its state as the leader, and one to spare."""


class Candidacy:
    """What elections have taught a replica since there was a leader."""

    def __init__(self) -> None:
        self.lost_elections = 0
        self.patience = 0
        """Writes of its own to wait for before the next campaign."""
        self._hopeless: set[NodeId] = set()
        """Voters that refused their vote in the present epoch, or whose process is gone."""
        self._has_resumed = False
        self._is_of_this_process = False

    def on_epoch(self) -> None:
        """Forget what voters said in an earlier epoch."""
        self._hopeless.clear()
        self._has_resumed = False
        self._is_of_this_process = False

    def begin(self) -> None:
        """Note that this process stands in the present epoch for the first time."""
        self._is_of_this_process = True

    def on_leader(self) -> None:
        """Forget it all: there is a leader, which works."""
        self.lost_elections = self.patience = 0

    def on_rival(self) -> None:
        """Note that another candidate may be at its writes."""
        self.patience = _WRITES_OF_A_LEADER

    def on_hopeless(self, voter: NodeId) -> None:
        """Note a voter that will not vote for this replica in the present epoch."""
        self._hopeless.add(voter)

    def may_resume(self, voters: VoterSet) -> bool:
        """Whether enough voters may yet grant their votes in the present epoch.

        Once refused, a candidate asks again once: a voter that never answers must not keep it from
        opening another epoch. An earlier process may have led in the epoch that it voted in: its
        state as the leader need not have reached the disk, and its entries may be in other logs.
        """
        if not self._is_of_this_process:
            return False
        may_ask_again = not self._hopeless or not self._has_resumed
        hopeful = len(voters) - len(self._hopeless)
        return may_ask_again and hopeful >= majority(len(voters))

    def resume(self) -> None:
        """Note that the votes of the present epoch are asked for again."""
        self._has_resumed = bool(self._hopeless)
