"""Block cache within a byte bound, and the per-reader cursors with adaptive prefetch windows.

The cache evicts blocks that no reader is expected to read first, then the least recently used, and
notifies the reader that a prefetched block was evicted unread. Room for blocks in flight is
reserved within the same bound. A window grows while a sequential reader meets missing blocks, and
shrinks when prefetched blocks were evicted unread. Readers are recognised by their next offset
alone. Pure but for a clock.
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
    """Keeps blocks of at most `limit` bytes; a block larger than that is not kept."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: OrderedDict[BlockKey, _Kept] = OrderedDict()
        self._expected: OrderedDict[BlockKey, _Kept] = OrderedDict()
        self._positions: defaultdict[int, set[int]] = defaultdict(set)
        self._kept_bytes = 0
        self._expected_bytes = 0
        self._reserved = 0

    @property
    def size(self) -> int:
        """Bytes kept and reserved."""
        return self._kept_bytes + self._reserved

    def __len__(self) -> int:
        return len(self._idle) + len(self._expected)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._expected or key in self._idle

    def get(self, key: BlockKey) -> BlockData | None:
        """Return a block, which is thereby used."""
        for part in (self._expected, self._idle):
            kept = part.get(key)
            if kept is not None:
                part.move_to_end(key)
                return kept.data
        return None

    def has_room(self, key: BlockKey, size: int) -> bool:
        """Whether a block of `size` bytes can be kept without one going that is expected."""
        kept = self._expected.get(key)
        replaced = 0 if kept is None else kept.size
        return self._reserved + self._expected_bytes - replaced + size <= self.limit

    def reserve(self, nbytes: int) -> bool:
        """Take room for blocks on their way, if no block that is expected to be read must go."""
        if self._reserved + self._expected_bytes + nbytes > self.limit:
            return False
        self._evict(self._idle, nbytes)
        self._reserved += nbytes
        return True

    def release(self, nbytes: int) -> None:
        """Give back room that was reserved."""
        self._reserved -= nbytes

    def put(self, key: BlockKey, data: BlockData, size: int, reader: Cursor | None) -> None:
        """Keep a block of `size` bytes for `reader`, or for any reader, while there is room.

        Without a `reader` no block is evicted that a reader is expected to read.
        """
        readers: set[Cursor] = set() if reader is None else {reader}
        before = self._pop(key)
        if before is not None:
            readers |= before.readers
        needed = self._reserved + size + (0 if readers else self._expected_bytes)
        if needed > self.limit:
            for each in readers:
                each.on_evicted(key)
            return
        self._evict(self._idle, size)
        self._evict(self._expected, size)
        self._keep(key, _Kept(data, size, readers))

    def expect(self, key: BlockKey, reader: Cursor) -> None:
        """Note that `reader` will come for a block, if it is here."""
        kept = self._pop(key)
        if kept is not None:
            kept.readers.add(reader)
            self._keep(key, kept)

    def consumed(self, key: BlockKey, reader: Cursor, *, keep: bool) -> None:
        """Note that `reader` is done with a block, if it is here.

        With that it goes, unless another reader is expected; with `keep` it goes when room is
        needed.
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
        """Drop blocks of one part, the longest unused first, until `nbytes` more fit."""
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
"""A cursor that is idle for this long is forgotten, in seconds."""

CALM_S = 60.0
"""A window stays fixed for this long after a wasted prefetch, in seconds."""

MAX_CURSORS = 10_000

READERS_BESIDE = 32
"""Readers that are served by the prefetch of another."""

BYTES_BESIDE = 4 * 1024 * 1024
"""Distance from its position up to which a reader is served by another's prefetch, in bytes."""


@dataclass(slots=True, eq=False)
class Cursor:
    """Position of one reader, and the blocks that are prefetched for it."""

    stream_id: int
    next_offset: int
    window: int
    """Prefetch window, in bytes."""
    ahead_offset: int = 0
    """End offset of what is prefetched."""
    ahead: dict[BlockKey, int] = field(default_factory=dict)
    """Prefetched blocks that are not read yet, with their sizes."""
    partial: BlockKey | None = None
    """The block that was read in part."""
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
    """Cursors of all readers; windows start at `smallest` bytes and grow to `largest`."""

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
        """Take the cursor that continues at `offset`, or a new one, out until `put_back`."""
        self._expire()
        cursor = self._idle_cursors.pop((stream_id, offset), None)
        if cursor is None:
            return Cursor(stream_id, offset, self._smallest)
        cursor.goes_on = True
        self._reading[cursor] = None
        return cursor

    def put_back(self, cursor: Cursor) -> None:
        """Keep a cursor for its next read; two at the same offset become one."""
        self._reading.pop(cursor, None)
        cursor.used_at = self._clock()
        key = (cursor.stream_id, cursor.next_offset)
        other = self._idle_cursors.pop(key, None)
        if other is not None:
            self._leave(other if other.window <= cursor.window else cursor)
            cursor = cursor if other.window <= cursor.window else other
        self._idle_cursors[key] = cursor
        self._expire()

    def note_missing(self, cursor: Cursor) -> None:
        """Grow the window of a sequential reader that had to wait for blocks."""
        self._note_lost(cursor)
        if cursor.goes_on and self._clock() >= cursor.calm_until:
            cursor.window = min(self._largest, cursor.window * 2)

    def wanted_ahead(self, cursor: Cursor) -> int:
        """Return how many bytes to prefetch now; 0 while enough is prefetched."""
        self._note_lost(cursor)
        missing = cursor.window - cursor.ahead_bytes
        return missing if cursor.goes_on and missing * 2 >= cursor.window else 0

    def others(self, cursor: Cursor) -> tuple[list[Cursor], int]:
        """List other sequential readers, and how far each may be served by the prefetch of one.

        These are the ones that read now and the last that did. The distance is in bytes; all of
        them together leave half of the cache to prefetches of their own.
        """
        latest = chain(reversed(self._reading), reversed(self._idle_cursors.values()))
        sequential = islice(latest, READERS_BESIDE)
        found = [one for one in sequential if one is not cursor and one.goes_on]
        return found, min(BYTES_BESIDE, self._cache.limit // (2 * (len(found) + 1)))

    def _note_lost(self, cursor: Cursor) -> None:
        if not cursor.lost:
            return
        self._stats.blocks_evicted_unread += len(cursor.lost)
        cursor.lost.clear()
        cursor.window = max(self._smallest, cursor.window // 2)
        cursor.calm_until = self._clock() + CALM_S

    def _expire(self) -> None:
        """Forget cursors that are idle for too long, or one too many."""
        oldest = self._clock() - EXPIRY_S
        while self._idle_cursors:
            first = next(iter(self._idle_cursors.values()))
            if first.used_at >= oldest and len(self._idle_cursors) <= MAX_CURSORS:
                return
            self._idle_cursors.popitem(last=False)
            self._leave(first)

    def _leave(self, cursor: Cursor) -> None:
        """Release the blocks of a cursor: they are evicted first."""
        self._note_lost(cursor)
        kept = [*cursor.ahead, *([] if cursor.partial is None else [cursor.partial])]
        cursor.ahead.clear()
        for key in kept:
            self._cache.consumed(key, cursor, keep=True)
