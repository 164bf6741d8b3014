"""Start offsets of leader epochs, which show where each epoch ended (KIP-101, KIP-320)."""

from __future__ import annotations

import struct
from collections.abc import Iterable

_HEAD = struct.Struct(">ii")
_ENTRY = struct.Struct(">iq")
_VERSION = 0


class LeaderEpochs:
    """Epochs in ascending order with their start offsets."""

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self.entries = list(entries)

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Record that `epoch` writes from `start_offset` on, and return whether that is new."""
        if self.entries and self.entries[-1][0] >= epoch:
            return False
        while self.entries and self.entries[-1][1] >= start_offset:
            self.entries.pop()  # wrote nothing
        self.entries.append((epoch, start_offset))
        return True

    def trim(self, start_offset: int) -> None:
        """Drop epochs that ended at or before `start_offset`. The current one then begins there."""
        while len(self.entries) > 1 and self.entries[1][1] <= start_offset:
            self.entries.pop(0)
        if self.entries and self.entries[0][1] < start_offset:
            self.entries[0] = (self.entries[0][0], start_offset)

    def end_of(self, epoch: int, log_end: int) -> tuple[int, int]:
        """Return the largest known epoch up to `epoch`, and the offset after its last record.

        (-1, -1) if there is none, or if `epoch` is larger than all known ones.
        """
        if not self.entries or epoch > self.entries[-1][0]:
            return -1, -1
        found = (-1, -1)
        for index, (known, _) in enumerate(self.entries):
            if known > epoch:
                break
            is_last = index + 1 == len(self.entries)
            found = (known, log_end if is_last else self.entries[index + 1][1])
        return found

    def at(self, offset: int) -> int:
        """Return the epoch that wrote, or will write, the record at `offset`, -1 for none."""
        return max((epoch for epoch, start in self.entries if start <= offset), default=-1)

    def encode(self) -> bytes:
        """Return the value of LEADER_EPOCH_CHECKPOINT."""
        rows = b"".join(_ENTRY.pack(*entry) for entry in self.entries)
        return _HEAD.pack(_VERSION, len(self.entries)) + rows
