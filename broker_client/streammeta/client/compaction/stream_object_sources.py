"""Sources of stream object compaction: their indexes, and small ones whole.

Owns what makes an object unusable as a source: bytes that are missing, damaged, or differ from the
metadata. Such an object is named and left out. The part of a group that is loaded at a time is
bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.report import Figures
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.storage.compaction.entries import EntryTable, contiguous_runs
from streammeta.storage.compaction.stream_objects import ANY_CRC, Group, StreamObject
from streammeta.storage.errors import (
    CorruptObjectError,
    ObjectNotFoundError,
    RangeNotSatisfiableError,
)
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.composite import LinkedObject, decode_composite
from streammeta.storage.object_format.index_block import FOOTER_SIZE, INDEX_ENTRY_SIZE, IndexEntry
from streammeta.storage.object_format.object_reader import ByteRange, ObjectReader, exactly
from streammeta.storage.object_store.base import ObjectStore

_AT_A_TIME = 32
"""Objects whose indexes are fetched before their entries are counted."""


class UnusableSourceError(Exception):
    """An object that cannot be compacted, with the reason."""

    def __init__(self, object_id: int, reason: str) -> None:
        self.object_id = object_id
        self.reason = reason
        super().__init__(f"object {object_id} is left out of compaction: {reason}")


@dataclass(frozen=True, slots=True)
class NormalSource:
    """A normal object: its entries, the bytes behind its blocks, and all bytes if it is small."""

    listed: StreamObject
    entries: EntryTable
    tail: bytes
    whole: bytes | None = None

    @property
    def data_size(self) -> int:
        """Bytes of its blocks, which are in front of the tail."""
        return self.listed.size - len(self.tail)

    def link(self) -> LinkedObject:
        """Return its link in a composite: all of it, whatever is trimmed."""
        rows = self.entries.rows()
        entries = tuple(
            IndexEntry(
                r.stream_id, r.start_offset, r.end_offset, r.record_count, r.position, r.size
            )
            for r in rows
        )
        return LinkedObject(self.listed.object_id, self.listed.bucket_id, entries)


@dataclass(frozen=True, slots=True)
class CompositeSource:
    """A composite and its links."""

    listed: StreamObject
    links: tuple[LinkedObject, ...]


Source: TypeAlias = NormalSource | CompositeSource


@dataclass(slots=True)
class LoadedGroup:
    """The first sources of a group, unusable ones with the reason, and the rest, not loaded."""

    sources: list[Source] = field(default_factory=list)
    unusable: dict[int, str] = field(default_factory=dict)
    rest: Group = ()


class SourceLoader:
    """Loads groups of one cluster's objects; `key_of` gives the key of an object id."""

    def __init__(
        self, calls: StoreCalls, key_of: Callable[[int], str], config: CompactionConfig
    ) -> None:
        self._calls = calls
        self._key_of = key_of
        self._config = config

    async def load(self, stream_id: int, group: Group, moved: Figures) -> LoadedGroup:
        """Load a group, or as much of its front as has `max_source_entries` entries at most.

        At least two sources are loaded if there are as many. Bytes of small ones are kept as long
        as they are not more than `fetched_bytes` together.
        """
        loaded = LoadedGroup()
        entries, room = 0, self._config.copy_rules.fetched_bytes
        for at in range(0, len(group), _AT_A_TIME):
            some = group[at : at + _AT_A_TIME]
            for number, source in enumerate(await self._load_some(stream_id, some, moved)):
                if isinstance(source, UnusableSourceError):
                    loaded.unusable[source.object_id] = source.reason
                    continue
                entries += _entry_count(source)
                if entries > self._config.max_source_entries and len(loaded.sources) > 1:
                    loaded.rest = group[at + number :]
                    return loaded
                room -= _kept_bytes(source)
                loaded.sources.append(source if room >= 0 else _without_bytes(source))
        return loaded

    async def _load_some(
        self, stream_id: int, some: Sequence[StreamObject], moved: Figures
    ) -> list[Source | UnusableSourceError]:
        return await asyncio.gather(*(self._load_one(stream_id, one, moved) for one in some))

    async def _load_one(
        self, stream_id: int, one: StreamObject, moved: Figures
    ) -> Source | UnusableSourceError:
        read = _read_composite if one.composite else _read_normal
        key, fetched = self._key_of(one.object_id), _Fetched(self._calls.store, self._config)
        try:
            source = await self._calls.read(
                self._expected_bytes(one), lambda: read(fetched, key, one)
            )
            _check_range(source, stream_id)
        except UnusableSourceError as unusable:
            return unusable
        except (CorruptObjectError, ObjectNotFoundError, RangeNotSatisfiableError) as error:
            return UnusableSourceError(one.object_id, str(error))
        finally:
            moved.add_reads(fetched.gets, fetched.received)
        return source

    def _expected_bytes(self, one: StreamObject) -> int:
        """Estimate what reading an index will move."""
        if one.composite:
            return FOOTER_SIZE
        return one.size if one.size <= self._config.whole_object_bytes else 8 * 1024


class _Fetched:
    """Reads for one object, counted."""

    def __init__(self, store: ObjectStore, config: CompactionConfig) -> None:
        self._store = store
        self.config = config
        self.gets = 0
        self.received = 0

    def get(self, key: str, start: int, end: int) -> bytes:
        """Read bytes `[start, end)`, fewer if the object ends before."""
        self.gets += 1
        data = self._store.get_range(key, start, end)
        self.received += len(data)
        return data


def _read_normal(fetched: _Fetched, key: str, one: StreamObject) -> NormalSource:
    parser = ObjectReader(key, one.size)
    whole = None
    if one.size <= fetched.config.whole_object_bytes:
        whole = fetched.get(key, 0, one.size)
        exactly(ByteRange(0, one.size), whole, key)
        _check_crc(one, whole, key)
    data: bytes | memoryview = b""
    while (needed := parser.needed) is not None:
        _check_index_size(one, needed.end - needed.start, fetched.config.max_source_entries)
        if whole is None:
            data = fetched.get(key, needed.start, needed.end)
        else:
            data = memoryview(whole)[needed.start : needed.end]
        parser.receive(data)
    index = parser.index
    tail = bytes(data[len(data) - (one.size - index.data_size) :])
    return NormalSource(one, EntryTable.of_index(one.object_id, index), tail, whole)


def _read_composite(fetched: _Fetched, key: str, one: StreamObject) -> CompositeSource:
    """Read a link table; only the size of what it links is recorded, so its own is bounded."""
    most = _most_index_bytes(fetched.config.max_source_entries)
    data = fetched.get(key, 0, most + 1)
    _check_index_size(one, len(data), fetched.config.max_source_entries)
    _check_crc(one, data, key)
    return CompositeSource(one, decode_composite(data, source=key).links)


def _most_index_bytes(max_source_entries: int) -> int:
    return max_source_entries * INDEX_ENTRY_SIZE + 1024 * 1024


def _check_index_size(one: StreamObject, size: int, max_source_entries: int) -> None:
    most = _most_index_bytes(max_source_entries)
    if size > most:
        raise UnusableSourceError(
            one.object_id,
            f"its index has {size} bytes or more, wanted at most {most}; raise max_source_entries",
        )


def _check_crc(one: StreamObject, data: bytes, key: str) -> None:
    if one.crc32c != ANY_CRC:
        checksum = ObjectChecksum()
        checksum.update(data)
        checksum.verify(one.crc32c, source=key)


def _entry_count(source: Source) -> int:
    if isinstance(source, NormalSource):
        return len(source.entries)
    return sum(len(link.entries) for link in source.links)


def _kept_bytes(source: Source) -> int:
    if isinstance(source, NormalSource) and source.whole is not None:
        return len(source.whole)
    return 0


def _without_bytes(source: Source) -> Source:
    return replace(source, whole=None) if isinstance(source, NormalSource) else source


def _check_range(source: Source, stream_id: int) -> None:
    """Refuse an object that does not hold exactly the range in its metadata."""
    one = source.listed
    if isinstance(source, NormalSource):
        entries = source.entries
        is_one_run = len(contiguous_runs(entries)) == 1
        first, last = entries.row(0), entries.row(len(entries) - 1)
        held = (first.stream_id, first.start_offset, last.end_offset)
    else:
        is_one_run = True  # or it would not have been decoded
        head, end = source.links[0].entries[0], source.links[-1].entries[-1]
        held = (head.stream_id, head.start_offset, end.end_offset)
    if not is_one_run or held != (stream_id, one.start_offset, one.end_offset):
        gap = "" if is_one_run else ", with gaps"
        raise UnusableSourceError(
            one.object_id,
            f"its index holds offsets [{held[1]}, {held[2]}) of stream {held[0]}{gap}, its"
            f" metadata [{one.start_offset}, {one.end_offset}) of stream {stream_id}; inspect it",
        )
