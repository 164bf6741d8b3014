"""Block cache within a byte bound, and the per-reader cursors with adaptive prefetch windows.

The cache first evicts blocks that no reader is expected to read, then the least recently used, and
notifies the reader whose prefetched block was evicted unread. Space for blocks in flight is
reserved within the same limit. A window grows while a sequential reader meets missing blocks, and
shrinks when prefetched blocks were evicted unread. A reader is recognised by its next offset alone.
Pure except for a clock.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeAlias

from streammeta.client.config import ReaderStats
from streammeta.storage.object_format.record import RecordBatch

BlockKey: TypeAlias = tuple[int, int]
"""Object id and position of a block in it."""

BlockData: TypeAlias = bytes | list[RecordBatch]
"""The bytes of a block, or its records."""


@dataclass(slots=True)
class _Kept:
    data: BlockData
    size: int
    readers: set[Cursor]


class BlockCache:
    """Caches blocks up to `limit` bytes in total. Larger blocks are not cached."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Two parts: blocks that no reader expects are evicted first. Both are in order of use.
        self._idle: OrderedDict[BlockKey, _Kept] = OrderedDict()
        self._expected: OrderedDict[BlockKey, _Kept] = OrderedDict()
        # Blocks by object, to drop all blocks of a deleted object without a scan.
        self._positions: defaultdict[int, set[int]] = defaultdict(set)
        self._kept_bytes = 0
        self._expected_bytes = 0
        self._reserved = 0

    @property
    def size(self) -> int:
        """Cached and reserved bytes."""
        return self._kept_bytes + self._reserved

    def __len__(self) -> int:
        return len(self._idle) + len(self._expected)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._expected or key in self._idle

    def get(self, key: BlockKey) -> BlockData | None:
        """Return a block and mark it as recently used."""
        for part in (self._expected, self._idle):
            kept = part.get(key)
            if kept is not None:
                part.move_to_end(key)
                return kept.data
        return None

    def has_room(self, key: BlockKey, size: int) -> bool:
        """Return whether a block of `size` bytes fits without evicting an expected block."""
        kept = self._expected.get(key)
        replaced = 0 if kept is None else kept.size
        return self._reserved + self._expected_bytes - replaced + size <= self.limit

    def reserve(self, nbytes: int) -> bool:
        """Reserve space for blocks in flight, unless that evicts an expected block."""
        if self._reserved + self._expected_bytes + nbytes > self.limit:
            return False
        self._evict(self._idle, nbytes)
        self._reserved += nbytes
        return True

    def release(self, nbytes: int) -> None:
        """Release reserved space."""
        self._reserved -= nbytes

    def put(self, key: BlockKey, data: BlockData, size: int, reader: Cursor | None) -> None:
        """Cache a block of `size` bytes for `reader`, or for any reader, if it fits.

        Without a `reader` no block that a reader is expected to read is evicted.
        """
        readers: set[Cursor] = set() if reader is None else {reader}
        # A replaced block keeps its readers: only its form changes, bytes or records.
        before = self._pop(key)
        if before is not None:
            readers |= before.readers
        needed = self._reserved + size + (0 if readers else self._expected_bytes)
        if needed > self.limit:
            for expecting in readers:
                expecting.on_evicted(key)
            return
        self._evict(self._idle, size)
        self._evict(self._expected, size)
        self._keep(key, _Kept(data, size, readers))

    def expect(self, key: BlockKey, reader: Cursor) -> None:
        """Mark a cached block as expected by `reader`."""
        kept = self._pop(key)
        if kept is not None:
            kept.readers.add(reader)
            self._keep(key, kept)

    def release_block(self, key: BlockKey, reader: Cursor, *, keep: bool) -> None:
        """Mark a cached block as read by `reader`.

        It is dropped unless another reader expects it, or with `keep` when space is needed.
        """
        kept = self._expected.get(key) or self._idle.get(key)
        if kept is None:
            return
        kept.readers.discard(reader)
        if kept.readers:
            return
        self._pop(key)
        if keep:
            self._keep(key, kept)

    def forget_object(self, object_id: int) -> None:
        """Drop all blocks of an object."""
        for position in list(self._positions.get(object_id, ())):
            dropped = self._pop((object_id, position))
            for reader in () if dropped is None else dropped.readers:
                reader.on_evicted((object_id, position))

    def _evict(self, part: OrderedDict[BlockKey, _Kept], nbytes: int) -> None:
        """Drop blocks of one part, least recently used first, until `nbytes` more fit."""
        while part and self.size + nbytes > self.limit:
            key = next(iter(part))
            dropped = self._pop(key)
            for reader in () if dropped is None else dropped.readers:
                reader.on_evicted(key)

    def _keep(self, key: BlockKey, kept: _Kept) -> None:
        (self._expected if kept.readers else self._idle)[key] = kept
        self._positions[key[0]].add(key[1])
        self._kept_bytes += kept.size
        self._expected_bytes += kept.size if kept.readers else 0

    def _pop(self, key: BlockKey) -> _Kept | None:
        kept = self._expected.pop(key, None)
        if kept is not None:
            self._expected_bytes -= kept.size
        else:
            kept = self._idle.pop(key, None)
        if kept is not None:
            self._kept_bytes -= kept.size
            positions = self._positions[key[0]]
            positions.discard(key[1])
            if not positions:
                del self._positions[key[0]]
        return kept


EXPIRY_S = 60.0
"""Idle time after which a cursor is dropped, in seconds."""

CALM_S = 60.0
"""Time for which a window stays fixed after a wasted prefetch, in seconds."""

MAX_CURSORS = 10_000

READERS_BESIDE = 32
"""Number of other readers that one prefetch serves."""

BYTES_BESIDE = 4 * 1024 * 1024
"""Distance from a reader's position up to which another prefetch serves it, in bytes."""


@dataclass(slots=True, eq=False)
class Cursor:
    """Position of one reader, and the blocks that are prefetched for it."""

    stream_id: int
    next_offset: int
    window: int
    """Prefetch window, in bytes."""
    ahead_offset: int = 0
    """End offset of the prefetched blocks."""
    ahead: dict[BlockKey, int] = field(default_factory=dict)
    """Prefetched blocks that are not read yet, with their sizes."""
    partial: BlockKey | None = None
    """The partly read block."""
    goes_on: bool = False
    """True for a sequential reader: it has continued at its last offset."""
    is_read_ahead: bool = False
    """True while a prefetch is in flight."""
    used_at: float = 0.0
    calm_until: float = float("-inf")
    lost: list[BlockKey] = field(default_factory=list)
    """Prefetched blocks that were evicted unread."""

    @property
    def ahead_bytes(self) -> int:
        """Bytes prefetched and not read yet."""
        return sum(self.ahead.values())

    def on_evicted(self, key: BlockKey) -> None:
        """Handle the eviction of a block."""
        if self.ahead.pop(key, None) is not None:
            self.lost.append(key)


class Cursors:
    """Cursors of all readers. Windows start at `smallest` bytes and grow to `largest`."""

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
        self._idle_cursors: OrderedDict[tuple[int, int], Cursor] = OrderedDict()
        self._reading: dict[Cursor, None] = {}

    def __len__(self) -> int:
        return len(self._idle_cursors)

    def take(self, stream_id: int, offset: int) -> Cursor:
        """Take the cursor that continues at `offset`, or a new one, until `put_back`."""
        self._expire()
        cursor = self._idle_cursors.pop((stream_id, offset), None)
        # A new position may be a random read, so it does not count as sequential yet.
        if cursor is None:
            return Cursor(stream_id, offset, self._smallest)
        cursor.goes_on = True
        self._reading[cursor] = None
        return cursor

    def put_back(self, cursor: Cursor) -> None:
        """Return a cursor for its next read. Two at the same offset are merged."""
        self._reading.pop(cursor, None)
        cursor.used_at = self._clock()
        key = (cursor.stream_id, cursor.next_offset)
        other = self._idle_cursors.pop(key, None)
        if other is not None:
            # The larger window has proven itself, so it is the one that stays.
            self._leave(other if other.window <= cursor.window else cursor)
            cursor = cursor if other.window <= cursor.window else other
        self._idle_cursors[key] = cursor
        self._expire()

    def note_missing(self, cursor: Cursor) -> None:
        """Grow the window of a sequential reader that had to wait for blocks."""
        self._note_lost(cursor)
        if cursor.goes_on and self._clock() >= cursor.calm_until:
            cursor.window = min(self._largest, cursor.window * 2)

    def bytes_to_prefetch(self, cursor: Cursor) -> int:
        """Return how many bytes to prefetch now, 0 while enough is prefetched."""
        self._note_lost(cursor)
        missing = cursor.window - cursor.ahead_bytes
        # Half a window at least, so that prefetches are few and large.
        return missing if cursor.goes_on and missing * 2 >= cursor.window else 0

    def others(self, cursor: Cursor) -> tuple[list[Cursor], int]:
        """List other sequential readers, and how far one prefetch may serve each of them.

        They are the reading and the most recent readers. The distance is in bytes. Together they
        leave half of the cache to their own prefetches.
        """
        # Most recent first: old readers may never come back.
        latest = chain(reversed(self._reading), reversed(self._idle_cursors.values()))
        sequential = islice(latest, READERS_BESIDE)
        found = [other for other in sequential if other is not cursor and other.goes_on]
        return found, min(BYTES_BESIDE, self._cache.limit // (2 * (len(found) + 1)))

    def _note_lost(self, cursor: Cursor) -> None:
        if not cursor.lost:
            return
        self._stats.blocks_evicted_unread += len(cursor.lost)
        cursor.lost.clear()
        # The cache is too small for all readers' windows.
        cursor.window = max(self._smallest, cursor.window // 2)
        cursor.calm_until = self._clock() + CALM_S

    def _expire(self) -> None:
        """Drop cursors that are idle for too long, or too many."""
        oldest = self._clock() - EXPIRY_S
        while self._idle_cursors:
            first = next(iter(self._idle_cursors.values()))
            if first.used_at >= oldest and len(self._idle_cursors) <= MAX_CURSORS:
                return
            self._idle_cursors.popitem(last=False)
            self._leave(first)

    def _leave(self, cursor: Cursor) -> None:
        """Release the blocks of a cursor, so that they are evicted first."""
        self._note_lost(cursor)
        kept = [*cursor.ahead, *([] if cursor.partial is None else [cursor.partial])]
        cursor.ahead.clear()
        for key in kept:
            self._cache.release_block(key, cursor, keep=True)
