"""Which objects are due when: a queue of (time, ids) that tolerates stale entries.

Objects of one entry are consecutive ids. What it holds is a hint: whoever asks passes a filter
that says which ids still count, and entries none of whose ids count are dropped. So nothing has
to be taken out when an object changes state, and undo may add entries that are there already.
"""

import heapq
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from controller.metadata.values import Int64Column

StillDue: TypeAlias = Callable[[int, Int64Column], Int64Column]
"""(time_ms, ids) -> those of the ids that are still due at that time."""


class DueObjects:
    """Objects by the time they are due, earliest first."""

    def __init__(self, still_due: StillDue) -> None:
        self._still_due = still_due
        self._entries: list[tuple[int, int, int]] = []

    def add(self, time_ms: int, first_id: int, count: int) -> None:
        """Add `count` consecutive ids."""
        heapq.heappush(self._entries, (time_ms, first_id, count))

    def add_ids(self, time_ms: int, ids: Int64Column) -> None:
        """Add ids, in any order, none twice."""
        ordered = np.sort(ids)
        breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
        for run in np.split(ordered, breaks):
            if len(run):
                self.add(time_ms, int(run[0]), len(run))

    def first_time(self) -> int | None:
        """Return the earliest time at which something is due, or None."""
        while self._entries:
            if len(self._live(self._entries[0])):
                return self._entries[0][0]
            heapq.heappop(self._entries)
        return None

    def before(self, time_ms: int, limit: int) -> tuple[int, ...]:
        """Return at most `limit` ids due before `time_ms`, earliest first; they stay due."""
        found: dict[int, None] = {}
        looked_at = []
        while self._entries and self._entries[0][0] < time_ms and len(found) < limit:
            entry = heapq.heappop(self._entries)
            live = self._live(entry)
            if len(live):
                found.update(dict.fromkeys(live.tolist()))
                looked_at.append(entry)
        for entry in looked_at:
            heapq.heappush(self._entries, entry)
        return tuple(found)[:limit]

    def _live(self, entry: tuple[int, int, int]) -> Int64Column:
        time_ms, first_id, count = entry
        return self._still_due(time_ms, np.arange(first_id, first_id + count, dtype=np.int64))
