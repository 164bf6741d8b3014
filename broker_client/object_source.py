"""Fetching the parts of objects that a reader needs, with as few requests as make sense.

Owns the cache of indexes, the merging of neighbouring blocks into one range request, and the
naming of broken and missing objects. It knows objects and entries, not the order of a stream.
Indexes may be cached for good, since an object id is never reused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from broker_client.errors import CorruptObjectError
from broker_client.store_threads import StoreThreads
from proto import common_pb2, objects_pb2
from storage.errors import CorruptObjectError as BrokenFormatError
from storage.errors import RangeNotSatisfiableError
from storage.object_format.composite import CompositeObject, decode_composite
from storage.object_format.index_block import IndexBlock, IndexEntry
from storage.object_format.object_key import key_for
from storage.object_format.object_reader import ObjectReader, read_entry
from storage.object_format.record import RecordBatch

MAX_MERGED_BYTES = 4 * 1024 * 1024
MAX_GAP_BYTES = 64 * 1024

# What an index costs in memory: six columns of 8 bytes each, and the Python objects around them.
_BYTES_PER_ENTRY = 48
_BYTES_PER_INDEX = 1024


@dataclass(frozen=True, slots=True)
class Block:
    """One index entry and the object that has its bytes."""

    object_id: int
    entry: IndexEntry


@dataclass(frozen=True, slots=True)
class ObjectIndex:
    """The index of an object; `composite` if its blocks are in other objects."""

    object_id: int
    index: IndexBlock
    composite: CompositeObject | None = None

    def find(self, stream_id: int, start: int, end: int, max_bytes: int) -> list[Block]:
        """List the blocks that hold `[start, end)` of a stream, up to a gap or `max_bytes`."""
        found = self.index.find(stream_id, start, end, max_bytes)
        return [
            Block(self._holder(found.first_ordinal + i), entry)
            for i, entry in enumerate(found.entries)
        ]

    def _holder(self, ordinal: int) -> int:
        if self.composite is None:
            return self.object_id
        return self.composite.link_of(ordinal).object_id


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Bytes `[start, end)` of one object, and the blocks in them, by position."""

    object_id: int
    start: int
    end: int
    blocks: tuple[Block, ...]


@dataclass(slots=True)
class ReaderStats:
    """What a reader asked of the store so far."""

    requests: int = 0
    bytes_fetched: int = 0
    indexes_fetched: int = 0


def merge_blocks(blocks: Iterable[Block]) -> list[BlockRange]:
    """Cover `blocks` with few ranges: neighbours join up to a small gap and a bounded span.

    A block larger than the bound gets a range of its own.
    """
    merged: list[list[Block]] = []
    for block in sorted(blocks, key=lambda one: (one.object_id, one.entry.position)):
        last = merged[-1] if merged else None
        if last is not None and _joins(last, block):
            last.append(block)
        else:
            merged.append([block])
    return [BlockRange(run[0].object_id, run[0].entry.position, _end(run), tuple(run))
            for run in merged]  # fmt: skip


def _joins(run: list[Block], block: Block) -> bool:
    if run[0].object_id != block.object_id:
        return False
    gap = block.entry.position - _end(run)
    span = block.entry.position + block.entry.size - run[0].entry.position
    return gap <= MAX_GAP_BYTES and span <= MAX_MERGED_BYTES


def _end(run: list[Block]) -> int:
    return run[-1].entry.position + run[-1].entry.size


class ObjectSource:
    """Reads indexes and blocks of one cluster's objects; caches up to `cache_bytes` of indexes."""

    def __init__(self, threads: StoreThreads, namespace: str, cache_bytes: int) -> None:
        self._threads = threads
        self._namespace = namespace
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self.stats = ReaderStats()
        self._cache: OrderedDict[int, ObjectIndex] = OrderedDict()

    def key(self, object_id: int) -> str:
        """Return the key of an object in this cluster's namespace."""
        return key_for(object_id, self._namespace)

    async def index(self, piece: objects_pb2.ObjectSlice, stream_id: int) -> ObjectIndex:
        """Return the index of the object of `piece`, read for `stream_id`, cached or fetched.

        Raises `CorruptObjectError`, or `storage.errors.ObjectNotFoundError` if it is gone.
        """
        cached = self._cache.get(piece.object_id)
        if cached is not None:
            self._cache.move_to_end(piece.object_id)
            return cached
        composite = piece.kind == common_pb2.OBJECT_KIND_COMPOSITE
        object_id, size = piece.object_id, piece.object_size
        fetched, requests, received = await self._threads.run(
            lambda: self._read_index(object_id, size, stream_id, composite=composite)
        )
        self.stats.indexes_fetched += 1
        self._count(requests, received)
        self._remember(fetched)
        return fetched

    async def records(self, wanted: BlockRange) -> list[list[RecordBatch]]:
        """Fetch and decode a range: the records of each of its blocks.

        Raises as `index` does.
        """
        decoded = await self._threads.run(lambda: self._read_range(wanted))
        self._count(1, wanted.end - wanted.start)
        return decoded

    def _count(self, requests: int, received: int) -> None:
        self.stats.requests += requests
        self.stats.bytes_fetched += received

    def _read_index(
        self, object_id: int, size: int, stream_id: int, *, composite: bool
    ) -> tuple[ObjectIndex, int, int]:
        """Read an index, in a thread; also tell how many requests and bytes that took."""
        key = self.key(object_id)
        try:
            if composite:
                # Its recorded size is that of the linked blocks, so only "to the end" is known.
                data = self._threads.store.get_range(key)
                decoded = decode_composite(data, source=key)
                return ObjectIndex(object_id, decoded.index, decoded), 1, len(data)
            parser = ObjectReader(key, size)
            requests, received = 0, 0
            while (needed := parser.needed) is not None:
                data = self._threads.store.get_range(key, needed.start, needed.end)
                requests, received = requests + 1, received + len(data)
                parser.receive(data)
            return ObjectIndex(object_id, parser.index), requests, received
        except (BrokenFormatError, RangeNotSatisfiableError, ValueError) as error:
            raise CorruptObjectError(key, object_id, stream_id, str(error)) from error

    def _read_range(self, wanted: BlockRange) -> list[list[RecordBatch]]:
        """Fetch and decode a range, in a thread."""
        key = self.key(wanted.object_id)
        stream_id = wanted.blocks[0].entry.stream_id
        try:
            data = memoryview(self._threads.store.get_range(key, wanted.start, wanted.end))
            decoded: list[list[RecordBatch]] = []
            for block in wanted.blocks:
                stream_id = block.entry.stream_id
                at = block.entry.position - wanted.start
                decoded.append(read_entry(block.entry, data[at : at + block.entry.size], key))
            return decoded
        except (BrokenFormatError, RangeNotSatisfiableError) as error:
            raise CorruptObjectError(key, wanted.object_id, stream_id, str(error)) from error

    def _remember(self, fetched: ObjectIndex) -> None:
        """Cache an index, and forget the longest unused ones that no longer fit."""
        if fetched.object_id in self._cache:
            return
        self._cache[fetched.object_id] = fetched
        self._cached_bytes += _cost(fetched)
        while self._cached_bytes > self._cache_bytes and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= _cost(dropped)


def _cost(cached: ObjectIndex) -> int:
    return _BYTES_PER_INDEX + _BYTES_PER_ENTRY * len(cached.index)
