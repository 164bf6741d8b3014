"""Sources of stream object compaction: their indexes, and small objects whole.

Owns the reasons that make an object unusable as a source: missing or damaged bytes, or a difference
from the metadata. Such an object is reported and left out. The part of a group loaded at a time is
limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.report import Figures, SourceError
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
from streammeta.storage.object_format.object_reader import ByteRange, ObjectReader, check_length
from streammeta.storage.object_store.protocol.base import ObjectStore

_AT_A_TIME = 32
"""Objects whose indexes are fetched before their entries are counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An object and its index entries, and the links of a composite.

    For a normal object `tail` has the bytes after its blocks, and `whole` all bytes if it is small.
    """

    listed: StreamObject
    entries: EntryTable
    links: tuple[LinkedObject, ...] = ()
    tail: bytes = b""
    whole: bytes | None = None

    @property
    def data_size(self) -> int:
        """Bytes of its blocks, which precede the tail."""
        return self.listed.size - len(self.tail)

    def live_links(self, stream_start: int) -> list[LinkedObject]:
        """Return its links in a new composite, which for a composite are those still visible.

        A normal object is linked as a whole, even if it is partly trimmed.
        """
        if self.links:
            return [link for link in self.links if link.entries[-1].end_offset > stream_start]
        entries = tuple(IndexEntry(*row[1:]) for row in self.entries.rows())
        return [LinkedObject(self.listed.object_id, self.listed.bucket_id, entries)]


@dataclass(slots=True)
class LoadedGroup:
    """First sources of a group, unusable ones with the reason, and the rest, not loaded yet."""

    sources: list[Source] = field(default_factory=list)
    unusable: dict[int, str] = field(default_factory=dict)
    rest: Group = ()


@dataclass(eq=False)
class SourceLoader:
    """Loads groups of one cluster's objects. `key_of` returns the key of an object id."""

    _calls: StoreCalls
    _key_of: Callable[[int], str]
    _config: CompactionConfig

    async def load(self, stream_id: int, group: Group, moved: Figures) -> LoadedGroup:
        """Load a group, or the first part of it with at most `max_source_entries` entries.

        At least two sources are loaded if the group has them. Bytes of small objects are kept, up
        to `fetched_bytes` together.
        """
        loaded = LoadedGroup()
        entries, room = 0, self._config.copy_rules.fetched_bytes
        for at in range(0, len(group), _AT_A_TIME):
            objects = group[at : at + _AT_A_TIME]
            loads = (self._load_one(stream_id, object_, moved) for object_ in objects)
            for number, source in enumerate(await asyncio.gather(*loads)):
                if isinstance(source, SourceError):
                    loaded.unusable[source.object_id] = source.reason
                    continue
                entries += len(source.entries)
                # Two sources at least, or a group of large indexes would never shrink.
                if entries > self._config.max_source_entries and len(loaded.sources) > 1:
                    loaded.rest = group[at + number :]
                    return loaded
                room -= 0 if source.whole is None else len(source.whole)
                loaded.sources.append(source if room >= 0 else replace(source, whole=None))

        return loaded

    async def _load_one(
        self, stream_id: int, listed: StreamObject, moved: Figures
    ) -> Source | SourceError:
        key = self._key_of(listed.object_id)
        load = _ObjectLoad(self._calls.store, key, listed, self._config)
        try:
            return await self._calls.read(load.expected_bytes, lambda: load.run(stream_id))
        except SourceError as unusable:
            return unusable
        except (CorruptObjectError, ObjectNotFoundError, RangeNotSatisfiableError) as error:
            return SourceError(listed.object_id, str(error))
        finally:
            moved.add_reads(load.gets, load.received)


class _ObjectLoad:
    """Reads the index of one object in a thread, and counts the requests and bytes."""

    def __init__(
        self, store: ObjectStore, key: str, listed: StreamObject, config: CompactionConfig
    ) -> None:
        self._store = store
        self._key = key
        self._listed = listed
        # Small objects cost one request instead of two or three.
        self._is_whole = listed.size <= config.whole_object_bytes
        self._most_entries = config.max_source_entries
        self.gets = 0
        self.received = 0

    @property
    def expected_bytes(self) -> int:
        """Estimated bytes to read."""
        if self._listed.composite:
            return FOOTER_SIZE
        return self._listed.size if self._is_whole else 8 * 1024

    def run(self, stream_id: int) -> Source:
        """Read the object. Raises `SourceError`, and errors of the store and the format."""
        source = self._composite() if self._listed.composite else self._normal()
        self._check_range(source.entries, stream_id)
        return source

    def _get(self, start: int, end: int) -> bytes:
        """Read bytes `[start, end)`, fewer if the object ends earlier."""
        self.gets += 1
        data = self._store.get_range(self._key, start, end)
        self.received += len(data)
        return data

    def _normal(self) -> Source:
        listed, parser, whole = self._listed, ObjectReader(self._key, self._listed.size), None
        if self._is_whole:
            whole = self._get(0, listed.size)
            check_length(ByteRange(0, listed.size), whole, self._key)
            self._check_crc(whole)

        data: bytes | memoryview = b""
        while (needed := parser.needed) is not None:
            self._check_index_size(needed.end - needed.start)
            if whole is None:
                data = self._get(needed.start, needed.end)
            else:
                data = memoryview(whole)[needed.start : needed.end]
            parser.receive(data)

        index = parser.index
        tail = bytes(data[len(data) - (listed.size - index.data_size) :])
        return Source(listed, EntryTable.of_index(listed.object_id, index), (), tail, whole)

    def _composite(self) -> Source:
        """Read a link table. Its size is not recorded, so the read is limited."""
        data = self._get(0, self._most_index_bytes + 1)
        # One byte more than allowed was requested, so a longer table is noticed.
        self._check_index_size(len(data))
        self._check_crc(data)
        decoded = decode_composite(data, source=self._key)
        entries = EntryTable.of_index(self._listed.object_id, decoded.index)
        return Source(self._listed, entries, decoded.links)

    @property
    def _most_index_bytes(self) -> int:
        return self._most_entries * INDEX_ENTRY_SIZE + 1024 * 1024

    def _check_index_size(self, size: int) -> None:
        most = self._most_index_bytes
        if size > most:
            raise SourceError(
                self._listed.object_id,
                f"its index has {size} bytes or more, expected at most {most}. Raise"
                " max_source_entries",
            )

    def _check_crc(self, data: bytes) -> None:
        if self._listed.crc32c != ANY_CRC:
            ObjectChecksum.of(data).verify(self._listed.crc32c, source=self._key)

    def _check_range(self, entries: EntryTable, stream_id: int) -> None:
        """Reject an object whose range differs from its metadata."""
        listed, is_one_run = self._listed, len(contiguous_runs(entries)) == 1
        first, end = entries.row(0), int(entries.end_offset[-1])
        found = (first.stream_id, first.start_offset, end)
        if not is_one_run or found != (stream_id, listed.start_offset, listed.end_offset):
            gap = "" if is_one_run else ", with gaps"
            raise SourceError(
                listed.object_id,
                f"its index has offsets [{found[1]}, {found[2]}) of stream {found[0]}{gap}, its"
                f" metadata [{listed.start_offset}, {listed.end_offset}) of stream {stream_id}."
                " Inspect it",
            )
