"""One node's objects on a virtual clock: in a real map, with real indexes, but without their bytes.

Owns what there is, and what carrying out a plan costs in requests and bytes. Commits are made on a
`ClusterMap`, so a compaction that loses or doubles an offset is refused. Who compacts what, and
when, is the business of those who use it.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.benchmarks.committer import LoadError
from streammeta.controller.errors import ErrorCode
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.requests import (
    CommitStreamSetObject,
    CreateStreams,
    NewStream,
    OpenStreams,
    PrepareObjects,
    RegisterNode,
    RemoveObjects,
    StreamToOpen,
    WriteRequest,
)
from streammeta.controller.metadata.values import (
    NodeIdentity,
    RangeColumns,
    StreamObjectColumns,
    column,
)
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.records.codec import encode_records
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.map_checkpoint import FrozenCheckpoint
from streammeta.storage.compaction.entries import (
    OUTPUT_INDEX_THRESHOLD,
    EntryTable,
    MergeRule,
    contiguous_runs,
    merged_index,
)
from streammeta.storage.compaction.layout import plan_reads
from streammeta.storage.compaction.plan import CommitPlan, OutputKind
from streammeta.storage.compaction.selection import SetObjects
from streammeta.storage.object_format.index_block import FOOTER_SIZE, INDEX_ENTRY_SIZE

MIB = 1 << 20
NODE = NodeIdentity(1_000, 1)
START_MS = 1_700_000_000_000
TTL_MS = 7 * 24 * 3_600_000
IDS_AT_A_TIME = 1_000
READ_UNIT = 4 * MIB
"""Bytes that a reader asks for at most at once."""


@dataclass(slots=True)
class Costs:
    """What compaction asked of the store and the controller; bytes are those of the store."""

    gets: int = 0
    puts: int = 0
    parts: int = 0
    multiparts: int = 0
    """Uploads in parts, each with a request that begins and one that ends it."""
    deleted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    calls: int = 0
    """To the controller."""
    compactions: int = 0

    @property
    def requests(self) -> int:
        """Requests to the store, without deletions, which go a thousand at a time."""
        return self.gets + self.puts + self.parts + 2 * self.multiparts


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRules:
    """How outputs are uploaded: in one request up to `put_bytes`, else in parts."""

    put_bytes: int = 32 * MIB
    part_bytes: int = 16 * MIB
    index_part: bool = False
    """Whether index and footer are a part of their own."""
    read_bytes: int = 16 * MIB
    """The longest read."""

    def count(self, costs: Costs, data_size: int, trailer_size: int) -> int:
        """Count the upload of an object; return its size."""
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
    """A committed set object and its index."""

    object_id: int
    order_id: int
    data_time_ms: int
    size: int
    range_count: int
    entries: EntryTable

    @property
    def row(self) -> tuple[int, int, int, int, int]:
        """What a listing tells of it."""
        return self.object_id, self.order_id, self.data_time_ms, self.size, self.range_count

    @property
    def index_size(self) -> int:
        """Bytes of index and footer."""
        return self.size - self.entries.data_size


@dataclass(slots=True, eq=False)
class World:
    """Streams 0 to `streams` - 1 of one node."""

    streams: int
    now_ms: int = START_MS
    map: ClusterMap = field(default_factory=ClusterMap)
    set_objects: dict[int, StoredSetObject] = field(default_factory=dict)
    stream_objects: list[tuple[int, int]] = field(default_factory=list)
    """Stream and bytes of blocks of each."""
    costs: Costs = field(default_factory=Costs)
    uploaded: NDArray[np.int64] = field(init=False)
    """Bytes of blocks by stream."""
    rewritten: NDArray[np.int64] = field(init=False)
    _ids: list[int] = field(default_factory=list)
    _requests: int = 0

    def __post_init__(self) -> None:
        self.uploaded = np.zeros(self.streams, dtype=np.int64)
        self.rewritten = np.zeros(self.streams, dtype=np.int64)
        self._write(RegisterNode(node=NODE))
        new = (NewStream(),) * self.streams
        created = self._write(CreateStreams(request_id=self._request_id(), node=NODE, streams=new))
        opened = tuple(StreamToOpen(stream_id, 1) for stream_id in created.stream_ids)
        self._write(OpenStreams(node=NODE, streams=opened))

    def listing(self) -> SetObjects:
        """Return the set objects as the map lists them."""
        return SetObjects.of_rows(each.row for each in self.set_objects.values())

    def upload(self, entries: EntryTable) -> None:
        """Commit a set object with these entries, by stream and without gaps."""
        (object_id,) = self._take_ids(1)
        stored = self._stored(object_id, object_id, self.now_ms, entries)
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
        """Carry out one commit of a plan, and count what it costs."""
        sources = [self.set_objects[each] for each in plan.source_ids]
        kept: list[EntryTable] = []
        leaving: list[EntryTable] = []
        for iteration in plan.iterations:
            self._count_reads(plan_reads(iteration, rules.read_bytes).size)
            for output in iteration.outputs:
                (leaving if output.kind is OutputKind.SPLIT else kept).append(output.entries)
        self.costs.compactions += 1
        self.costs.deleted += len(sources)
        np.add.at(self.rewritten, plan.entries.stream_id, plan.entries.size)
        object_ids = self._take_ids(len(leaving) + bool(kept))
        sizes = [_written(each, rules, self.costs) for each in leaving]
        merged: StoredSetObject | None = None
        if kept:
            merged = self._stored(
                object_ids[-1],
                min(each.order_id for each in sources),
                min(each.data_time_ms for each in sources),
                EntryTable.concatenate(kept).placed(),
            )
            _written(merged.entries, rules, self.costs)
        self._commit(
            CommitStreamSetObject(
                node=NODE,
                object_id=-1 if merged is None else merged.object_id,
                order_id=-1,
                object_size=0 if merged is None else merged.size,
                ranges=RangeColumns() if merged is None else _range_columns(merged.entries),
                stream_objects=_stream_object_columns(leaving, object_ids, sizes),
                compacted_object_ids=column(plan.source_ids),
            )
        )
        self._write(RemoveObjects(object_ids=plan.source_ids))
        for each in sources:
            del self.set_objects[each.object_id]
        if merged is not None:
            self.set_objects[merged.object_id] = merged
        self.stream_objects += [(int(each.stream_id[0]), each.data_size) for each in leaving]

    def read_index(self, source: StoredSetObject, gets: int = 1) -> None:
        """Count the requests for an index."""
        self.costs.gets += gets
        self.costs.bytes_read += source.index_size

    def checkpoint_bytes(self) -> int:
        """Return how large a checkpoint of the map is."""
        end = EndOffset(self.map.applied_end_offset)
        point = SnapshotPoint(SnapshotId(end, Epoch(1)), ClusterId("bench"), VoterSet(()))
        return FrozenCheckpoint(point, self.map.freeze(), bytes(32)).write(io.BytesIO())

    def cold_reads(self) -> NDArray[np.int64]:
        """Return for each stream the GETs of a reader of all of it that knows nothing yet.

        For each object that holds the stream one for the index, and one for each `READ_UNIT`.
        """
        gets = np.zeros(self.streams, dtype=np.int64)
        for each in self.set_objects.values():
            held = np.bincount(each.entries.stream_id, each.entries.size, self.streams)
            gets += np.where(held > 0, 1 + np.ceil(held / READ_UNIT), 0).astype(np.int64)
        for stream_id, size in self.stream_objects:
            gets[stream_id] += 1 - (-size // READ_UNIT)
        return gets

    def _count_reads(self, sizes: NDArray[np.int64]) -> None:
        self.costs.gets += len(sizes)
        self.costs.bytes_read += int(sizes.sum())

    @staticmethod
    def _stored(
        object_id: int, order_id: int, data_time_ms: int, entries: EntryTable
    ) -> StoredSetObject:
        merged = merged_index(entries, OUTPUT_INDEX_THRESHOLD, MergeRule.BELOW)
        own = EntryTable(
            np.full(len(merged), object_id, dtype=np.int64),
            *(merged.stream_id, merged.start_offset, merged.end_offset),
            *(merged.record_count, merged.position, merged.size),
        )
        size = own.data_size + len(own) * INDEX_ENTRY_SIZE + FOOTER_SIZE
        ranges = len(contiguous_runs(own))
        return StoredSetObject(object_id, order_id, data_time_ms, size, ranges, own)

    def _take_ids(self, count: int) -> list[int]:
        while len(self._ids) < count:
            request = PrepareObjects(
                request_id=self._request_id(), node=NODE, count=IDS_AT_A_TIME, ttl_ms=TTL_MS
            )
            first = self._write(request).first_object_id
            self._ids += range(first, first + IDS_AT_A_TIME)
        taken, self._ids = self._ids[:count], self._ids[count:]
        return taken

    def _commit(self, request: CommitStreamSetObject) -> None:
        answer = self._write(request)
        if answer.error != ErrorCode.NONE:
            raise LoadError(f"the map answered a commit with error {answer.error!r}: {answer}")

    def _write(self, request: WriteRequest) -> Any:
        offset = self.map.applied_end_offset
        decision = self.map.decide(request, self.now_ms, offset)
        if decision.records:
            encode_records(decision.records)
            self.map.apply(offset, decision.records)
            self.map.forget_undo(offset + 1)
        return decision.answer

    def _request_id(self) -> str:
        self._requests += 1
        return f"bench-{self._requests}"


def _written(entries: EntryTable, rules: WriteRules, costs: Costs) -> int:
    """Count the upload of an object with these blocks; return its size."""
    index = merged_index(entries.placed(), OUTPUT_INDEX_THRESHOLD, MergeRule.BELOW)
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
    leaving: Sequence[EntryTable], object_ids: Iterable[int], sizes: Sequence[int]
) -> StreamObjectColumns:
    return StreamObjectColumns(
        object_id=column([object_id for object_id, _ in zip(object_ids, leaving, strict=False)]),
        object_size=column(sizes),
        stream_id=column([int(each.stream_id[0]) for each in leaving]),
        stream_epoch=column([1] * len(leaving)),
        start_offset=column([int(each.start_offset[0]) for each in leaving]),
        end_offset=column([int(each.end_offset[-1]) for each in leaving]),
    )
