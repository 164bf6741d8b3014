"""Objects whose bytes wait until the entries that destroyed them are in the backup.

A cluster that is restored to the end of its backup would otherwise name objects whose bytes are
gone. Each object waits for an end of the log at which it was destroyed already, so neither clocks
nor the order of destruction matter. Pure; reads nothing but how far the backup is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

WAITING_MAX = 20_000
"""Maximum objects that wait; those destroyed later come after them."""


@dataclass(frozen=True, slots=True)
class _Wait:
    end_offset: int
    since_ms: int


class BackupWait:
    """Objects that are due for deletion but for the backup."""

    def __init__(self, backed_up_end: Callable[[], int]) -> None:
        """Take the end of the log in the backup; 0 as long as the leader does not know it."""
        self._backed_up_end = backed_up_end
        self._waits: dict[int, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def clear(self) -> None:
        """Drop everything, as when another leader takes over."""
        self._waits.clear()

    def covered(
        self,
        due: Sequence[int],
        metadata_end: int,
        now_ms: int,
        choose: Callable[[Sequence[int]], Sequence[int]],
    ) -> Sequence[int]:
        """Return the due objects that `choose` takes of those in the backup; these are let go.

        The others wait, new ones for `metadata_end`, the end of the log that the metadata reflects.
        Objects that are no longer due are dropped.
        """
        known, new = self._waits, _Wait(metadata_end, now_ms)
        self._waits = {one: known.get(one, new) for one in islice(due, WAITING_MAX)}
        end = self._backed_up_end()
        taken = choose([one for one, wait in self._waits.items() if wait.end_offset <= end])
        for object_id in taken:
            del self._waits[object_id]
        return taken

    def oldest_ms(self, now_ms: int) -> int:
        """Return the time since which the first of the waiting waits; 0 if none does."""
        return now_ms - min((one.since_ms for one in self._waits.values()), default=now_ms)
