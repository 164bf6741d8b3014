"""Rules of full disks on a leader: what can still be committed, and which voter can lead instead.

A voter tells in every Fetch whether its disk has room. Reads and leadership need no room, so a
leader stays in office for their sake; it hands over only where the successor can commit.
"""

from __future__ import annotations

from controller.ids import NodeId
from controller.quorum.majority import majority
from controller.quorum.replica import Replica
from controller.quorum.roles import Leader, ReplicaProgress
from controller.quorum.voters import ReplicaKey


class Room:
    """Weighs full disks on behalf of a leader."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def full_majority(self, role: Leader) -> tuple[NodeId, ...]:
        """Return the voters without room if those with room are no majority, else nobody.

        Nothing but what fits their reserves can be committed then, whoever leads.
        """
        voters = self._replica.voters
        full = [voter.key.node_id for voter in voters if self._is_full(role, voter.key)]
        return tuple(full) if len(voters) - len(full) < majority(len(voters)) else ()

    def _is_full(self, role: Leader, key: ReplicaKey) -> bool:
        if self._replica.is_meant(key):
            return self._replica.is_disk_full
        return role.progress[key].is_disk_full

    def successor(self, role: Leader) -> ReplicaKey | None:
        """Return the voter that a leader without room hands over to, if there is one.

        It has room, and so has a majority, by Fetches that are newer than the want of room here:
        disks tend to fill together, and a successor that can't commit either would be no better.
        """
        replica = self._replica
        if not replica.is_disk_full or role.transfer is not None:
            return None
        if replica.high_watermark < replica.log.end_offset:
            return None  # whoever waits for the rest would not hear that it is committed
        others = [role.progress[voter.key] for voter in replica.others]
        writable = [progress for progress in others if self._has_told_of_room(progress)]
        if len(writable) < majority(len(replica.voters)):
            return None
        best = max(writable, key=lambda item: (item.end_offset, -item.key.node_id))
        return best.key if best.end_offset == replica.log.end_offset else None

    def _has_told_of_room(self, progress: ReplicaProgress) -> bool:
        is_news = progress.has_fetched and progress.last_fetch > self._replica.full_since
        return is_news and not progress.is_disk_full
