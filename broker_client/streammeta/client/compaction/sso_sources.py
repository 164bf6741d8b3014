"""Indexes of source stream set objects, cached for the next cycle and compared with the metadata.

Owns the cache, the fetch of an index, and the faults of single objects, which are left out. An
index may have ranges that the metadata does not: the controllers rejected them at the commit, so
they do not belong to the object and are never copied. The entries of a relative object get the
offsets of the streams, from the ranges in the metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streammeta.client.compaction.listing import Listing
from streammeta.client.compaction.report import SourceError
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.client.resources.resources import RecentlyUsed
from streammeta.storage import errors as storage_errors
from streammeta.storage.compaction.bases import Bases, at_bases
from streammeta.storage.compaction.entries import Column, EntryTable, Mask, contiguous_runs
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.index_block import FOOTER_SIZE, INDEX_ENTRY_SIZE
from streammeta.storage.object_format.object_reader import ObjectReader, tail_guess

_BYTES_PER_ENTRY = 56
_BYTES_PER_INDEX = 1024


@dataclass(frozen=True, slots=True)
class Source:
    """A stream set object as the metadata lists it."""

    object_id: int
    size: int
    range_count: int


@dataclass(frozen=True, slots=True, eq=False)
class SourceIndex:
    """Entries of an object that its metadata also has.

    After `data_size` bytes of blocks come `tail_size` bytes with the CRC-32C `tail_crc32c`.
    `known_ranges` are set where index and metadata differ: rows of stream, start and end. They are
    always set for a `relative` object: their starts are the bases of its blocks.
    """

    entries: EntryTable
    data_size: int
    tail_size: int
    tail_crc32c: int
    known_ranges: Column | None = None
    relative: bool = False

    @property
    def bases(self) -> Bases | None:
        """The bases of a relative object's blocks, None for another object."""
        if not self.relative or self.known_ranges is None:
            return None
        return Bases.of_ranges(self.known_ranges)

    @property
    def cost(self) -> int:
        """Approximate memory in bytes."""
        known = 0 if self.known_ranges is None else self.known_ranges.nbytes
        return _BYTES_PER_INDEX + _BYTES_PER_ENTRY * len(self.entries) + known


def likely_index_start(size: int, range_count: int, key: str) -> int:
    """Return the start of a read that covers index and footer of an object in one request.

    Raises `CorruptObjectError` when the object is too small to have a footer.
    """
    # Twice the minimum: a range may have more than one block.
    likely = FOOTER_SIZE + INDEX_ENTRY_SIZE * 2 * range_count
    return max(0, min(tail_guess(size, key).start, size - likely))


class SourceIndexes:
    """Reads indexes of one cluster's stream set objects, and caches `cache_bytes` of them."""

    def __init__(
        self, calls: StoreCalls, listing: Listing, key_of: Callable[[int], str], cache_bytes: int
    ) -> None:
        self._calls = calls
        self._listing = listing
        self._key_of = key_of
        self.cache: RecentlyUsed[SourceIndex] = RecentlyUsed(cache_bytes)
        # Objects whose compaction the controllers rejected: their index may differ from the
        # metadata.
        self._suspects: set[int] = set()
        self.reads = 0
        self.bytes_read = 0

    async def load(self, sources: Iterable[Source]) -> dict[int, SourceIndex | SourceError]:
        """Return the index of each source, or the error that prevents reading it."""
        wanted = {source.object_id: source for source in sources}
        found = await asyncio.gather(*map(self._index, wanted.values()), return_exceptions=True)
        loaded: dict[int, SourceIndex | SourceError] = {}
        for object_id, result in zip(wanted, found, strict=True):
            if not isinstance(result, SourceIndex | SourceError):
                raise result
            loaded[object_id] = result
        await self._match_with_metadata(wanted.values(), loaded)
        for object_id, index in loaded.items():
            if isinstance(index, SourceIndex):
                self.cache.put(object_id, index)
        return loaded

    def suspect(self, object_ids: Sequence[int]) -> bool:
        """Compare these objects' indexes with the metadata from now on. Return if any is new."""
        is_new = not self._suspects.issuperset(object_ids)
        self._suspects.update(object_ids)
        for object_id in object_ids:
            self.cache.forget(object_id)
        return is_new

    async def _index(self, source: Source) -> SourceIndex:
        cached = self.cache.get(source.object_id)
        if cached is not None:
            return cached

        object_id, key = source.object_id, self._key_of(source.object_id)
        try:
            return await self._fetch(source, key)
        except storage_errors.ObjectNotFoundError as error:
            reason = (
                f"{key!r} is not in the store. If it is still listed, run the reconciliation report"
            )
            raise SourceError(object_id, reason) from error
        except storage_errors.CorruptObjectError as error:
            raise SourceError(object_id, str(error)) from error
        except storage_errors.StorageError as error:
            reason = f"its index could not be read: {error}"
            raise SourceError(object_id, reason, passing=True) from error

    async def _fetch(self, source: Source, key: str) -> SourceIndex:
        """Read the index, usually with one request, because the number of ranges is known."""
        parser = ObjectReader(key, source.size, accept_relative=True)
        start = likely_index_start(source.size, source.range_count, key)
        tail = memoryview(await self._get(key, start, source.size))
        while (needed := parser.needed) is not None:
            if needed.start < start:
                start = needed.start
                tail = memoryview(await self._get(key, start, needed.end))
            parser.receive(tail[needed.start - start : needed.end - start])

        index = parser.index
        end = ObjectChecksum.of(tail[index.data_size - start :])
        entries = EntryTable.of_index(source.object_id, index)
        return SourceIndex(entries, index.data_size, end.size, end.value, relative=parser.relative)

    async def _get(self, key: str, start: int, end: int) -> bytes:
        store = self._calls.store
        try:
            data = await self._calls.read(end - start, lambda: store.get_range(key, start, end))
        except storage_errors.RangeNotSatisfiableError as error:
            raise storage_errors.CorruptObjectError(
                key, start, "size of the object", str(error), f"{end} bytes"
            ) from error
        self.reads += 1
        self.bytes_read += len(data)
        return data

    async def _match_with_metadata(
        self, sources: Iterable[Source], loaded: dict[int, SourceIndex | SourceError]
    ) -> None:
        """Drop entries that the metadata does not have, where numbers of ranges differ.

        Entries of relative objects move to the offsets of the metadata.
        """
        differing: dict[int, SourceIndex] = {}
        for source in sources:
            index = loaded[source.object_id]
            if isinstance(index, SourceIndex) and index.known_ranges is None:
                ranges = len(contiguous_runs(index.entries))
                # The number of ranges is in the listing, so a difference is found without a call.
                differs = ranges != source.range_count or source.object_id in self._suspects
                if differs or index.relative:
                    differing[source.object_id] = index
        if not differing:
            return

        known = await self._listing.ranges(list(differing))
        for object_id, index in differing.items():
            if object_id not in known:
                loaded[object_id] = SourceError(
                    object_id, "it was replaced meanwhile", passing=True
                )
                continue
            loaded[object_id] = _matched(object_id, index, known[object_id])


def _matched(object_id: int, index: SourceIndex, ranges: Column) -> SourceIndex | SourceError:
    """Return an index without the entries that are not in the metadata's ranges."""
    entries = index.entries
    if index.relative:
        try:
            entries = at_bases(entries, ranges)
        except ValueError as error:
            return SourceError(object_id, f"{error}. Inspect it")
    inside = entries.take(_inside(entries, ranges))
    return replace(index, entries=inside, known_ranges=ranges)


def is_whole(index: SourceIndex, starts: dict[int, int]) -> bool:
    """Return whether the entries cover all live offsets of the object in the metadata.

    `starts` has the first visible offset of each existing stream.
    """
    if index.known_ranges is None:
        return True
    entries, ranges = index.entries, index.known_ranges
    held = _live_offsets(entries.stream_id, entries.start_offset, entries.end_offset, starts)
    return held == _live_offsets(ranges[:, 0], ranges[:, 1], ranges[:, 2], starts)


def _live_offsets(stream: Column, start: Column, end: Column, starts: dict[int, int]) -> int:
    ids, numbers = np.unique(stream, return_inverse=True)
    deleted = np.iinfo(np.int64).max
    lowest = np.array(
        [starts.get(stream_id, deleted) for stream_id in ids.tolist()], dtype=np.int64
    )
    return int(np.maximum(end - np.maximum(start, lowest[numbers]), 0).sum())


def _inside(entries: EntryTable, ranges: Column) -> Mask:
    """Mark the entries inside a range. `ranges` may be in any order, but not overlap.

    Both are sorted together, ranges first where they start alike. The range that may contain an
    entry is the last one before it.
    """
    ordered = ranges[np.lexsort((ranges[:, 1], ranges[:, 0]))]
    count = len(ordered)
    streams = np.concatenate((ordered[:, 0], entries.stream_id))
    starts = np.concatenate((ordered[:, 1], entries.start_offset))
    is_entry = np.arange(len(streams)) >= count
    order = np.lexsort((is_entry, starts, streams))
    latest = np.maximum.accumulate(np.where(is_entry, -1, np.arange(len(streams)))[order])
    range_of = np.empty(len(streams), dtype=np.int64)
    range_of[order] = latest
    at = range_of[count:]
    found: Mask = at >= 0
    found[found] = (ordered[at[found], 0] == entries.stream_id[found]) & (
        entries.end_offset[found] <= ordered[at[found], 2]
    )

    return found
