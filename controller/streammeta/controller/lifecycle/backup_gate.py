"""Backup gate: an object's bytes wait until the entries that destroyed it are in the backup.

A cluster restored to the end of its backup would otherwise name objects whose bytes are deleted.
Each object waits for an end of the log at which it was already destroyed, so neither clocks nor the
order of destruction matter. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

WAITING_MAX = 20_000
"""Maximum number of waiting objects. Objects destroyed later follow them."""


@dataclass(frozen=True, slots=True)
class _Wait:
    end_offset: int
    since_ms: int


class BackupWait:
    """Objects whose deletion only waits for the backup."""

    def __init__(self, backed_up_end: Callable[[], int]) -> None:
        """`backed_up_end` returns the end of the log in the backup, 0 while it is unknown."""
        self._backed_up_end = backed_up_end
        self._waits: dict[int, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def clear(self) -> None:
        """Remove everything when another leader is elected."""
        self._waits.clear()

    def release_covered(
        self,
        due: Sequence[int],
        metadata_end: int,
        now_ms: int,
        choose: Callable[[Sequence[int]], Sequence[int]],
    ) -> Sequence[int]:
        """Return the due objects that `choose` selects from those in the backup, and forget them.

        The others wait: new ones for `map_end`, the current end of the metadata. Objects that are
        no longer due are removed.
        """
        # All new objects are destroyed at this end of the log, whatever their order.
        known, new = self._waits, _Wait(metadata_end, now_ms)
        self._waits = {key: known.get(key, new) for key in islice(due, WAITING_MAX)}
        # Read after the waits are set, so that a new object is never compared with an older end.
        end = self._backed_up_end()
        taken = choose([key for key, wait in self._waits.items() if wait.end_offset <= end])
        for object_id in taken:
            del self._waits[object_id]
        return taken

    def oldest_ms(self, now_ms: int) -> int:
        """Return how long the first object has waited, 0 without one."""
        return now_ms - min((wait.since_ms for wait in self._waits.values()), default=now_ms)
