"""One node's objects on a virtual clock, in real metadata, with indexes but without bytes.

Owns the objects, and the requests and bytes that plans cost. Commits go to a `ClusterMetadata`,
which rejects a compaction that loses or duplicates an offset. Callers decide what is compacted.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scripts.benchmarks.metadata_driver import NODE, NOW_MS, MetadataDriver
from streammeta.controller.metadata.api.requests import CommitStreamSetObject, RemoveObjects
from streammeta.controller.metadata.tables.values import RangeColumns, StreamObjectColumns, column
from streammeta.storage.compaction.entries import (
    OUTPUT_INDEX_THRESHOLD,
    EntryTable,
    MergeRule,
    contiguous_runs,
    merge_entries,
)
from streammeta.storage.compaction.layout import plan_reads
from streammeta.storage.compaction.plan import CommitPlan, OutputKind
from streammeta.storage.compaction.selection import StreamSetObjects
from streammeta.storage.object_format.index_block import FOOTER_SIZE, INDEX_ENTRY_SIZE

MIB = 1 << 20
IDS_AT_A_TIME = 1_000
READ_UNIT = 4 * MIB
"""Most bytes of one request of a reader."""


@dataclass(slots=True)
class Costs:
    """Requests of compaction to the store and the controller, and bytes at the store."""

    gets: int = 0
    puts: int = 0
    parts: int = 0
    multiparts: int = 0
    """Uploads in parts, each with a request that begins and one that ends it."""
    deleted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    calls: int = 0
    """Calls to the controller."""
    compactions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRules:
    """Uploads of outputs: in one request up to `put_bytes`, else in parts."""

    put_bytes: int = 32 * MIB
    part_bytes: int = 16 * MIB
    index_part: bool = False
    """Whether index and footer are a separate part."""
    read_bytes: int = 16 * MIB
    """Longest read."""

    def count(self, costs: Costs, data_size: int, trailer_size: int) -> int:
        """Count the upload of an object and return its size."""
        size = data_size + trailer_size
        costs.bytes_written += size
        if size <= self.put_bytes:
            costs.puts += 1
        else:
            costs.multiparts += 1
            counted = data_size if self.index_part else size
            costs.parts += -(-counted // self.part_bytes) + self.index_part
        return size


@dataclass(frozen=True, slots=True, eq=False)
class StoredSetObject:
    """A committed SSO and its index."""

    object_id: int
    order_id: int
    data_time_ms: int
    size: int
    range_count: int
    entries: EntryTable

    @property
    def row(self) -> tuple[int, int, int, int, int]:
        """Row of a listing."""
        return self.object_id, self.order_id, self.data_time_ms, self.size, self.range_count

    @property
    def index_size(self) -> int:
        """Bytes of index and footer."""
        return self.size - self.entries.data_size


@dataclass(slots=True, eq=False)
class World:
    """Streams 0 to `streams` - 1 of one node."""

    streams: int
    now_ms: int = NOW_MS
    set_objects: dict[int, StoredSetObject] = field(default_factory=dict)
    stream_objects: list[tuple[int, int]] = field(default_factory=list)
    """Stream, and bytes of blocks, of each stream object."""
    costs: Costs = field(default_factory=Costs)
    uploaded: NDArray[np.int64] = field(init=False)
    """Bytes of blocks by stream."""
    rewritten: NDArray[np.int64] = field(init=False)
    _driver: MetadataDriver = field(default_factory=lambda: MetadataDriver(IDS_AT_A_TIME))

    def __post_init__(self) -> None:
        self.uploaded = np.zeros(self.streams, dtype=np.int64)
        self.rewritten = np.zeros(self.streams, dtype=np.int64)
        self._driver.add_streams(self.streams)

    def listing(self) -> StreamSetObjects:
        """Return the SSOs as the metadata lists them."""
        return StreamSetObjects.of_rows(stored.row for stored in self.set_objects.values())

    def upload(self, entries: EntryTable) -> None:
        """Commit an SSO with these entries, by stream and without gaps."""
        (object_id,) = self._driver.take_ids(1)
        stored = _store(object_id, object_id, self.now_ms, entries)
        self._commit(
            CommitStreamSetObject(
                node=NODE,
                object_id=object_id,
                order_id=object_id,
                object_size=stored.size,
                ranges=_range_columns(entries),
            )
        )
        self.set_objects[object_id] = stored
        np.add.at(self.uploaded, entries.stream_id, entries.size)

    def replace(self, plan: CommitPlan, rules: WriteRules) -> None:
        """Carry out one commit of a plan, and count its costs."""
        sources = [self.set_objects[object_id] for object_id in plan.source_ids]
        kept: list[EntryTable] = []
        split: list[EntryTable] = []
        for iteration in plan.iterations:
            reads = plan_reads(iteration, rules.read_bytes).size
            self.costs.gets += len(reads)
            self.costs.bytes_read += int(reads.sum())
            for output in iteration.outputs:
                (split if output.kind is OutputKind.SPLIT else kept).append(output.entries)
        self.costs.compactions += 1
        self.costs.deleted += len(sources)
        np.add.at(self.rewritten, plan.entries.stream_id, plan.entries.size)

        object_ids = self._driver.take_ids(len(split) + bool(kept))
        sizes = [_write(entries, rules, self.costs) for entries in split]
        merged: StoredSetObject | None = None
        if kept:
            merged = _store(
                object_ids[-1],
                min(source.order_id for source in sources),
                min(source.data_time_ms for source in sources),
                EntryTable.concatenate(kept).place(),
            )
            _write(merged.entries, rules, self.costs)
        self._commit(
            CommitStreamSetObject(
                node=NODE,
                object_id=-1 if merged is None else merged.object_id,
                order_id=-1,
                object_size=0 if merged is None else merged.size,
                ranges=RangeColumns() if merged is None else _range_columns(merged.entries),
                stream_objects=_stream_object_columns(split, object_ids[: len(split)], sizes),
                compacted_object_ids=column(plan.source_ids),
            )
        )

        # The lifecycle would remove the sources later. Nothing else refers to them here.
        self._driver.write(RemoveObjects(object_ids=plan.source_ids))
        for source in sources:
            del self.set_objects[source.object_id]
        if merged is not None:
            self.set_objects[merged.object_id] = merged
        self.stream_objects += [(int(entries.stream_id[0]), entries.data_size) for entries in split]

    def read_index(self, source: StoredSetObject, gets: int = 1) -> None:
        """Count the requests for an index."""
        self.costs.gets += gets
        self.costs.bytes_read += source.index_size

    def checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint of the metadata."""
        return self._driver.freeze().write(io.BytesIO())

    def cold_reads(self) -> NDArray[np.int64]:
        """Return for each stream the GETs of a reader of all of it that has nothing in memory.

        Each object of the stream costs a GET for the index, and one for each `READ_UNIT`.
        """
        gets = np.zeros(self.streams, dtype=np.int64)
        for stored in self.set_objects.values():
            bytes_of = np.bincount(stored.entries.stream_id, stored.entries.size, self.streams)
            needed = np.where(bytes_of > 0, 1 + np.ceil(bytes_of / READ_UNIT), 0)
            gets += needed.astype(np.int64)
        for stream_id, size in self.stream_objects:
            gets[stream_id] += 1 - (-size // READ_UNIT)
        return gets

    def _commit(self, request: CommitStreamSetObject) -> None:
        self._driver.now_ms = self.now_ms
        self._driver.commit(request)


def _store(
    object_id: int, order_id: int, data_time_ms: int, entries: EntryTable
) -> StoredSetObject:
    """Return an SSO with these entries."""
    merged = merge_entries(entries, OUTPUT_INDEX_THRESHOLD, MergeRule.BELOW)
    own = EntryTable(
        np.full(len(merged), object_id, dtype=np.int64),
        *(merged.stream_id, merged.start_offset, merged.end_offset),
        *(merged.record_count, merged.position, merged.size),
    )
    size = own.data_size + len(own) * INDEX_ENTRY_SIZE + FOOTER_SIZE
    return StoredSetObject(object_id, order_id, data_time_ms, size, len(contiguous_runs(own)), own)


def _write(entries: EntryTable, rules: WriteRules, costs: Costs) -> int:
    """Count the upload of an object with these blocks and return its size."""
    index = merge_entries(entries.place(), OUTPUT_INDEX_THRESHOLD, MergeRule.BELOW)
    return rules.count(costs, entries.data_size, len(index) * INDEX_ENTRY_SIZE + FOOTER_SIZE)


def _range_columns(entries: EntryTable) -> RangeColumns:
    firsts = contiguous_runs(entries)
    lasts = np.append(firsts[1:], len(entries)) - 1
    return RangeColumns(
        stream_id=column(entries.stream_id[firsts]),
        stream_epoch=column(np.ones_like(firsts)),
        start_offset=column(entries.start_offset[firsts]),
        end_offset=column(entries.end_offset[lasts]),
    )


def _stream_object_columns(
    split: Sequence[EntryTable], object_ids: Sequence[int], sizes: Sequence[int]
) -> StreamObjectColumns:
    return StreamObjectColumns(
        object_id=column(object_ids),
        object_size=column(sizes),
        stream_id=column([int(entries.stream_id[0]) for entries in split]),
        stream_epoch=column([1] * len(split)),
        start_offset=column([int(entries.start_offset[0]) for entries in split]),
        end_offset=column([int(entries.end_offset[-1]) for entries in split]),
    )
