"""Change feed: the newest committed log entries, kept in memory for watchers.

The feed is a ring bounded in bytes. Entries are added as they are committed, on leaders and
followers alike, and the oldest are dropped when the ring is full. A watcher only has a `Cursor`, so
a slow one loses its position but costs no memory. A snapshot that replaces the metadata breaks the
sequence, which cursors report.

Runs on the event loop. Depends neither on records nor on gRPC.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streammeta.controller.errors import ApiError
from streammeta.controller.quorum.messages import Batch, BatchKind

RING_BYTES = 64 << 20
"""Default size of the ring in bytes."""

ENTRY_OVERHEAD_BYTES = 128
"""Bytes of an entry in addition to its payload, so that tiny entries don't fill the memory."""

_COMPACT_AT = 4096
"""Number of dropped slots from which they are freed, once they are more than half."""


class WatcherTooSlowError(ApiError):
    """A watcher was too slow and was dropped. It may resume at `from_offset`."""

    def __init__(self, from_offset: int, reason: str = "") -> None:
        why = reason or (
            f"changes since offset {from_offset} are no longer available: this watcher reads too "
            "slowly"
        )
        super().__init__(f"{why}: watch again from {from_offset}, here or at another controller")
        self.from_offset = from_offset


@dataclass(frozen=True, slots=True)
class Change:
    """One committed log entry: its offset and its payload, a serialized RecordSet."""

    offset: int
    payload: bytes


class ChangeFeed:
    """Committed entries from `start_offset` to `end_offset`, in order."""

    def __init__(self, ring_bytes: int = RING_BYTES) -> None:
        self._ring_bytes = ring_bytes
        self._offsets = array("Q")
        self._payloads: list[bytes] = []
        self._first = 0  # entries before this place have been dropped
        self._bytes = 0
        self._generation = 0
        self._listeners: list[Callable[[], None]] = []
        self.start_offset = 0
        self.end_offset = 0

    @property
    def nbytes(self) -> int:
        """Memory of the retained entries in bytes."""
        return self._bytes

    def extend(self, batches: Sequence[Batch], end_offset: int) -> None:
        """Add committed batches. Everything below `end_offset` is committed with them."""
        for batch in batches:
            # Control batches contain no records, and watchers only know records.
            if batch.kind is BatchKind.DATA:
                for place, payload in enumerate(batch.payloads):
                    self._append(batch.base_offset + place, payload)
        self._drop_oldest()
        if end_offset > self.end_offset:
            self.end_offset = end_offset
            self._notify()

    def restart(self, end_offset: int) -> None:
        """Start again at `end_offset`, because a snapshot replaced everything below."""
        self._offsets, self._payloads, self._first, self._bytes = array("Q"), [], 0, 0
        self.start_offset = self.end_offset = end_offset
        # Offsets alone do not show the break, since the new end may be just where a cursor waits.
        self._generation += 1
        self._notify()

    def cursor(self, from_offset: int) -> Cursor:
        """Return a cursor at `from_offset`, even if the ring no longer reaches back to it."""
        return Cursor(self, from_offset, self._generation)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the end moves. It runs within a commit and must be fast."""
        self._listeners.append(listener)

    def _append(self, offset: int, payload: bytes) -> None:
        if offset < self.end_offset:
            return  # a loaded snapshot already contains it
        self._offsets.append(offset)
        self._payloads.append(payload)
        self._bytes += len(payload) + ENTRY_OVERHEAD_BYTES

    def _drop_oldest(self) -> None:
        while self._bytes > self._ring_bytes:
            # Slots are cleared one by one and removed in bulk, because shifting the list costs its
            # length.
            payload, self._payloads[self._first] = self._payloads[self._first], b""
            self.start_offset = self._offsets[self._first] + 1
            self._bytes -= len(payload) + ENTRY_OVERHEAD_BYTES
            self._first += 1
        if self._first >= _COMPACT_AT and self._first * 2 > len(self._offsets):
            del self._offsets[: self._first], self._payloads[: self._first]
            self._first = 0

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _next(self, from_offset: int) -> Change | None:
        # By offset and not by count: control batches leave gaps in the offsets.
        place = bisect_left(self._offsets, from_offset, lo=self._first)
        if place == len(self._offsets):
            return None
        return Change(self._offsets[place], self._payloads[place])

    def _is_kept(self, from_offset: int) -> bool:
        return from_offset >= self.start_offset


class Cursor:
    """Position of one watcher: everything below `next_offset` was returned or skipped."""

    def __init__(self, feed: ChangeFeed, next_offset: int, generation: int) -> None:
        self._feed = feed
        self._generation = generation
        self.next_offset = next_offset

    @property
    def is_lost(self) -> bool:
        """Whether the ring no longer has the next entry."""
        return not self._feed._is_kept(self.next_offset)

    @property
    def is_replaced(self) -> bool:
        """Whether a snapshot has replaced entries since the cursor was created."""
        return self._generation != self._feed._generation

    def advance(self) -> Change | None:
        """Return the next entry and move past it. At the end, move there and return None.

        The cursor must not be lost.
        """
        change = self._feed._next(self.next_offset)
        if change is not None:
            self.next_offset = change.offset + 1
        else:
            # Control batches have no entry here, so the end may be above the last entry.
            self.next_offset = max(self.next_offset, self._feed.end_offset)
        return change
