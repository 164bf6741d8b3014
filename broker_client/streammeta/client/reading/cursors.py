"""Who reads which stream where, and how far ahead of him it is read.

Owns the size of each read-ahead: it grows while a reader who goes on where he stopped finds blocks
missing, and shrinks when blocks that were read for him had to go unread; then it does not grow for
a while. Readers are known by the offset they go on at alone. Pure but for a clock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from streammeta.client.reading.block_cache import BlockCache, BlockKey
from streammeta.client.reading.reader_stats import ReaderStats

EXPIRY_S = 60.0
"""A reader who has not gone on for so long is forgotten."""

CALM_S = 60.0
"""For so long read-ahead does not grow after it was in vain."""

MAX_CURSORS = 10_000


@dataclass(slots=True, eq=False)
class Cursor:
    """One reader's place: the next offset, and what is there, or on its way, for him."""

    stream_id: int
    next_offset: int
    window: int
    """Bytes to be read ahead."""
    ahead_offset: int = 0
    """Read ahead up to here."""
    ahead: dict[BlockKey, int] = field(default_factory=dict)
    """Blocks read ahead and not read yet, with their bytes."""
    partial: BlockKey | None = None
    """The block that was read in part."""
    goes_on: bool = False
    """Whether he has read on where he stopped."""
    is_read_ahead: bool = False
    """Whether something is on its way for him."""
    used_at: float = 0.0
    calm_until: float = float("-inf")
    lost: list[BlockKey] = field(default_factory=list)
    """Blocks read ahead that had to go."""

    @property
    def ahead_bytes(self) -> int:
        """Bytes read ahead and not read yet."""
        return sum(self.ahead.values())

    def on_evicted(self, key: BlockKey) -> None:
        """Learn that a block had to go."""
        if self.ahead.pop(key, None) is not None:
            self.lost.append(key)


class Cursors:
    """All readers; read-ahead starts at `smallest` bytes and grows to `largest`."""

    def __init__(
        self,
        cache: BlockCache,
        stats: ReaderStats,
        smallest: int,
        largest: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._stats = stats
        self._smallest = min(smallest, largest)
        self._largest = largest
        self._clock = clock
        self._parked: OrderedDict[tuple[int, int], Cursor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parked)

    def take(self, stream_id: int, offset: int) -> Cursor:
        """Return who goes on at `offset`, or somebody new; nobody else has him until `park`."""
        self._expire()
        cursor = self._parked.pop((stream_id, offset), None)
        if cursor is None:
            return Cursor(stream_id, offset, self._smallest)
        cursor.goes_on = True
        return cursor

    def park(self, cursor: Cursor) -> None:
        """Keep a reader for his next step; two at the same offset become one."""
        cursor.used_at = self._clock()
        key = (cursor.stream_id, cursor.next_offset)
        other = self._parked.pop(key, None)
        if other is not None:
            self._leave(other if other.window <= cursor.window else cursor)
            cursor = cursor if other.window <= cursor.window else other
        self._parked[key] = cursor
        self._expire()

    def note_missing(self, cursor: Cursor) -> None:
        """A reader who goes on had to wait for blocks: read further ahead of him."""
        self._note_lost(cursor)
        if cursor.goes_on and self._clock() >= cursor.calm_until:
            cursor.window = min(self._largest, cursor.window * 2)

    def wanted_ahead(self, cursor: Cursor) -> int:
        """Return how many bytes are to be read ahead now; 0 while enough is there."""
        self._note_lost(cursor)
        missing = cursor.window - cursor.ahead_bytes
        return missing if cursor.goes_on and missing * 2 >= cursor.window else 0

    def _note_lost(self, cursor: Cursor) -> None:
        if not cursor.lost:
            return
        self._stats.blocks_evicted_unread += len(cursor.lost)
        cursor.lost.clear()
        cursor.window = max(self._smallest, cursor.window // 2)
        cursor.calm_until = self._clock() + CALM_S

    def _expire(self) -> None:
        """Forget who did not go on for long, or one too many."""
        oldest = self._clock() - EXPIRY_S
        while self._parked:
            first = next(iter(self._parked.values()))
            if first.used_at >= oldest and len(self._parked) <= MAX_CURSORS:
                return
            self._parked.popitem(last=False)
            self._leave(first)

    def _leave(self, cursor: Cursor) -> None:
        """Whatever was kept for him may go first."""
        self._note_lost(cursor)
        kept = [*cursor.ahead, *([] if cursor.partial is None else [cursor.partial])]
        cursor.ahead.clear()
        for key in kept:
            self._cache.consumed(key, cursor, keep=True)
