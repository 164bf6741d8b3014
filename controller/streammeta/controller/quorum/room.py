"""Rules of full disks on a leader: what can still be committed, and which voter can lead instead.

A voter tells in every Fetch whether its disk has room. Reads and leadership need no room, so a
leader stays in office for their sake; it hands over only where the successor can commit.
"""

from __future__ import annotations

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.majority import majority
from streammeta.controller.quorum.replica import Replica
from streammeta.controller.quorum.roles import Leader, ReplicaProgress
from streammeta.controller.quorum.voters import ReplicaKey


class Room:
    """Weighs full disks on behalf of a leader."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def full_majority(self, role: Leader) -> tuple[NodeId, ...]:
        """Return the voters without room if the others that fetch are no majority, else none.

        Nothing but what fits their reserves can be committed then, under any leader.
        """
        replica = self._replica
        others = [role.progress[voter.key] for voter in replica.others]
        full = [progress.key.node_id for progress in others if progress.is_disk_full]
        if replica.is_voter and replica.is_disk_full:
            full.append(replica.local.node_id)
        if not full:
            return ()
        writable = sum(self._fetches_with_room(progress) for progress in others)
        writable += replica.is_voter and not replica.is_disk_full
        return () if writable >= majority(len(replica.voters)) else tuple(sorted(full))

    def _fetches_with_room(self, progress: ReplicaProgress) -> bool:
        silence = self._replica.now - progress.last_fetch
        return (
            not progress.is_disk_full and silence <= self._replica.config.timings.fetch_timeout_ms
        )

    def next_look(self, role: Leader) -> int | None:
        """Return the time at which silence may change `full_majority`; None: it can't."""
        progress = [role.progress[voter.key] for voter in self._replica.others]
        is_any_full = self._replica.is_disk_full or any(each.is_disk_full for each in progress)
        if not is_any_full:
            return None
        heard_at = [each.last_fetch for each in progress if self._fetches_with_room(each)]
        patience = self._replica.config.timings.fetch_timeout_ms
        return min((at + patience + 1 for at in heard_at), default=None)

    def successor(self, role: Leader) -> ReplicaKey | None:
        """Return the voter that a leader without room hands over to, if there is one.

        It has room, and so has a majority, by Fetches that are newer than the want of room here:
        disks tend to fill together, and a successor that can't commit either would be no better.
        """
        replica = self._replica
        if not replica.is_disk_full or role.transfer is not None:
            return None
        if replica.high_watermark < replica.log.end_offset:
            return None  # a caller that waits for the rest would not hear of its commit
        others = [role.progress[voter.key] for voter in replica.others]
        writable = [progress for progress in others if self._has_told_of_room(progress)]
        if len(writable) < majority(len(replica.voters)):
            return None
        best = max(writable, key=lambda item: (item.end_offset, -item.key.node_id))
        return best.key if best.end_offset == replica.log.end_offset else None

    def _has_told_of_room(self, progress: ReplicaProgress) -> bool:
        is_news = progress.has_fetched and progress.last_fetch > self._replica.full_since
        return is_news and not progress.is_disk_full
