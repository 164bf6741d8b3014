"""Blocks in memory, within a number of bytes: read ahead, or read in part.

Owns what is kept and what goes first: blocks that nobody is known to come back for, then those used
longest ago. Who read a block ahead is told when it goes unread. Room for blocks that are on their
way is taken from the same bound. Knows neither streams nor the store.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from streammeta.storage.object_format.record import RecordBatch

BlockKey: TypeAlias = tuple[int, int]
"""Object id and position of a block in it."""

BlockData: TypeAlias = bytes | list[RecordBatch]
"""The bytes of a block, or its records."""


class BlockReader(Protocol):
    """Who is expected to read a block soon."""

    def on_evicted(self, key: BlockKey) -> None:
        """Learn that a block had to go."""


@dataclass(slots=True)
class _Kept:
    data: BlockData
    size: int
    readers: set[BlockReader]


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

    def put(self, key: BlockKey, data: BlockData, size: int, reader: BlockReader | None) -> None:
        """Keep a block of `size` bytes for `reader`, or for whoever comes, while there is room.

        For the latter no block has to go that somebody is expected to read.
        """
        readers: set[BlockReader] = set() if reader is None else {reader}
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

    def expect(self, key: BlockKey, reader: BlockReader) -> None:
        """Note that `reader` will come for a block, if it is here."""
        kept = self._pop(key)
        if kept is not None:
            kept.readers.add(reader)
            self._keep(key, kept)

    def consumed(self, key: BlockKey, reader: BlockReader, *, keep: bool) -> None:
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
