"""The newest committed log entries, kept in memory for whoever follows changes.

A ring bounded by bytes: entries come in as they are committed, on leaders and followers alike, and
the oldest go when the ring is full. A follower of changes holds nothing but a `Cursor`: who is too
slow loses his place, never memory of ours. Leadership does not matter here, since what is
committed stays. A snapshot that replaces the map breaks the sequence; cursors notice that.

Runs on the event loop; knows neither records nor gRPC.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streammeta.controller.errors import ApiError
from streammeta.controller.quorum.messages import Batch, BatchKind

RING_BYTES = 64 << 20
"""Bytes of entries kept unless told otherwise."""

ENTRY_OVERHEAD_BYTES = 128
"""What an entry takes besides its payload; entries of a few bytes must not fill the memory."""

_COMPACT_AT = 4096
"""Places of dropped entries are given back when there are so many, and more than half are such."""


class WatcherTooSlowError(ApiError):
    """A follower of changes was too slow and was given up; it may resume at `from_offset`."""

    def __init__(self, from_offset: int, reason: str = "") -> None:
        why = reason or (
            f"changes from offset {from_offset} on are no longer kept, because this watcher took "
            "them too slowly"
        )
        super().__init__(f"{why}; watch again from {from_offset}, here or at another controller")
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
        self._offsets: list[int] = []
        self._payloads: list[bytes] = []
        self._first = 0  # entries before this place have been dropped
        self._bytes = 0
        self._generation = 0
        self._listeners: list[Callable[[], None]] = []
        self.start_offset = 0
        self.end_offset = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the kept entries take."""
        return self._bytes

    def extend(self, batches: Sequence[Batch], end_offset: int) -> None:
        """Take committed batches; everything below `end_offset` has been committed with them."""
        for batch in batches:
            if batch.kind is BatchKind.DATA:
                for place, payload in enumerate(batch.payloads):
                    self._append(batch.base_offset + place, payload)
        self._drop_oldest()
        if end_offset > self.end_offset:
            self.end_offset = end_offset
            self._tell()

    def restart(self, end_offset: int) -> None:
        """Begin anew at `end_offset`: a snapshot took the place of everything below."""
        self._offsets, self._payloads, self._first, self._bytes = [], [], 0, 0
        self.start_offset = self.end_offset = end_offset
        self._generation += 1
        self._tell()

    def cursor(self, from_offset: int) -> Cursor:
        """Return a place in the sequence, whether the ring still reaches back to it or not."""
        return Cursor(self, from_offset, self._generation)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the end has moved; in the middle of a commit, so it is brief."""
        self._listeners.append(listener)

    def _append(self, offset: int, payload: bytes) -> None:
        if offset < self.end_offset:
            return  # a snapshot that was loaded holds it already
        self._offsets.append(offset)
        self._payloads.append(payload)
        self._bytes += len(payload) + ENTRY_OVERHEAD_BYTES

    def _drop_oldest(self) -> None:
        while self._bytes > self._ring_bytes:
            payload, self._payloads[self._first] = self._payloads[self._first], b""
            self.start_offset = self._offsets[self._first] + 1
            self._bytes -= len(payload) + ENTRY_OVERHEAD_BYTES
            self._first += 1
        if self._first >= _COMPACT_AT and self._first * 2 > len(self._offsets):
            del self._offsets[: self._first], self._payloads[: self._first]
            self._first = 0

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _next(self, from_offset: int) -> Change | None:
        place = bisect_left(self._offsets, from_offset, lo=self._first)
        if place == len(self._offsets):
            return None
        return Change(self._offsets[place], self._payloads[place])

    def _is_kept(self, from_offset: int) -> bool:
        return from_offset >= self.start_offset


class Cursor:
    """How far one follower has come: everything below `next_offset` was given out or passed."""

    def __init__(self, feed: ChangeFeed, next_offset: int, generation: int) -> None:
        self._feed = feed
        self._generation = generation
        self.next_offset = next_offset

    @property
    def is_lost(self) -> bool:
        """Whether the ring no longer has what comes next."""
        return not self._feed._is_kept(self.next_offset)

    @property
    def is_replaced(self) -> bool:
        """Whether a snapshot has taken the place of entries since the cursor was made."""
        return self._generation != self._feed._generation

    def advance(self) -> Change | None:
        """Return the next entry and go behind it; None if there is none, then go to the end.

        The cursor must not be lost.
        """
        change = self._feed._next(self.next_offset)
        if change is not None:
            self.next_offset = change.offset + 1
        else:
            self.next_offset = max(self.next_offset, self._feed.end_offset)
        return change
