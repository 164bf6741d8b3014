"""Where a scenario's compaction is carried out: a real map, a bucket in memory, the real executor.

The map is put in the state that a scenario starts from; objects are written as it says. What came
of it is told by the map and the bucket alone. Knows nothing of how scenarios say things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from streammeta.client.compaction.commit import Replacement, commit
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.listing import Listing
from streammeta.client.compaction.output_writer import OutputJournal
from streammeta.client.compaction.report import Figures
from streammeta.client.compaction.set_object_run import CommitRun, RunContext
from streammeta.client.compaction.set_object_sources import Source, SourceIndex, SourceIndexes
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.controller.metadata.requests import DescribeObjects, GetNodes, RegisterNode
from streammeta.controller.metadata.values import NodeIdentity, ObjectKind, ObjectState
from streammeta.storage.compaction.entries import EntryTable, contiguous_runs, stream_ranges
from streammeta.storage.compaction.plan import CommitPlan
from streammeta.storage.errors import StoreRejectedError
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.storage.object_format.object_key import key_for
from tests.compaction.compaction_map import NAMESPACE, LeadingMap
from tests.compaction.compaction_steps import Steps
from tests.conformance.compaction_inputs import Given, WrittenInput
from tests.conformance.map_rows import MapRows
from tests.kit.built_objects import opened
from tests.kit.memory_store import MemoryObjectStore

NODE = NodeIdentity(1_000, 1)
COMMIT_DEADLINE_S = 10.0
_OPENED, _EPOCH = 1, 1


@dataclass(frozen=True, slots=True)
class MadeObject:
    """An object that a compaction made: what the map says of it."""

    object_id: int
    size: int
    order_id: int
    ranges: tuple[StreamRange, ...]


class Stage:
    """One node with set objects that are compacted; `objects` lie in the bucket."""

    def __init__(self, given: Given) -> None:
        self.objects = {one: held.written() for one, held in given.objects.items()}
        self.map = LeadingMap()
        self.store = MemoryObjectStore(self.map.clock.wall_ms)
        self._streams = _streams_of(given, self.objects)

    async def prepare(self) -> None:
        """Put map and bucket in place."""
        await self.map.write(RegisterNode(node=NODE))
        for one in self.objects.values():
            self.store.put(key_of(one.object_id), one.data)
        rows = MapRows(self.map.controller.cluster_map.freeze().sections())
        counters = rows.counters
        counters["next_object_id"] = max(self.objects, default=-1) + 1
        counters["next_stream_id"] = max(self._known_streams(), default=-1) + 1
        for stream_id, (start, end) in self._streams.items():
            _put_stream(rows, stream_id, start, end)
        for one in self.objects.values():
            _put_object(rows, one)
        self.map.load(rows.sections())

    def _known_streams(self) -> set[int]:
        held = {entry.stream_id for one in self.objects.values() for entry in one.entries}
        return held | self._streams.keys()

    def stream_starts(self) -> dict[int, int]:
        """Return the start offset of each stream there is."""
        return {stream_id: start for stream_id, (start, _) in self._streams.items()}

    def unfinished(self) -> list[str]:
        """Return the keys of uploads that were begun and neither completed nor aborted."""
        return [one.key for one in self.store.list_multipart_uploads()]

    def destroyed(self) -> list[int]:
        """Return the ids of the given objects that are gone."""
        answer = self.map.query(DescribeObjects())
        kept = {one.object_id for one in answer.objects if one.state is ObjectState.COMMITTED}
        return sorted(self.objects.keys() - kept)

    def made(self, kind: ObjectKind) -> list[MadeObject]:
        """Return the committed objects of a kind that are new, by stream and offset."""
        answer = self.map.query(GetNodes(include_stream_set_objects=True))
        orders = {
            held.object_id: held.order_id
            for node in answer.nodes
            for held in node.stream_set_objects
        }
        found = []
        for one in self.map.query(DescribeObjects()).objects:
            is_new = one.object_id not in self.objects
            if is_new and one.state is ObjectState.COMMITTED and one.kind is kind:
                columns = (one.ranges.stream_id, one.ranges.start_offset, one.ranges.end_offset)
                rows = zip(*(column.tolist() for column in columns), strict=True)
                ranges = tuple(StreamRange(*row) for row in rows)
                order = orders.get(one.object_id, -1)
                found.append(MadeObject(one.object_id, one.object_size, order, ranges))
        return sorted(
            found, key=lambda one: [(held.stream_id, held.start_offset) for held in one.ranges]
        )

    def index_of(self, made: MadeObject) -> EntryTable:
        """Read the index of an object that was made, as a reader does."""
        data = self.store.get_range(key_of(made.object_id))
        reader = opened(data, key_of(made.object_id))
        for entry in reader.index:
            place = reader.block_range(entry)
            reader.records(entry, data[place.start : place.end])
        return EntryTable.of_index(made.object_id, reader.index)

    def bytes_by_run(self, table: EntryTable) -> dict[tuple[int, int], bytes]:
        """Return the bytes of each contiguous run of sorted entries, by stream and start."""
        firsts = contiguous_runs(table).tolist()
        found: dict[tuple[int, int], bytes] = {}
        for first, stop in pairwise([*firsts, len(table)]):
            rows = list(table.span(first, stop).rows())
            found[rows[0].stream_id, rows[0].start_offset] = b"".join(
                self.store.get_range(key_of(one.object_id), one.position, one.position + one.size)
                for one in rows
            )
        return found


class Compactor:
    """Reads indexes and carries out plans on a stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._client = stage.map.client(Steps())
        self._target = CompactionTarget(NODE.node_id, NODE.node_epoch)
        config = CompactionConfig(store_patience_s=0.0)
        self._calls = StoreCalls(stage.store, config)
        listing = Listing(self._client)
        self._indexes = SourceIndexes(self._calls, listing, key_of, config.index_cache_bytes)
        self._context = RunContext(
            config, self._calls, self._client, self._target.identity, key_of, OutputJournal()
        )

    async def entries(
        self, object_ids: Sequence[int], missing: Sequence[Source] = ()
    ) -> tuple[EntryTable, dict[int, str]]:
        """Return the entries of all objects whose index can be read, and why others can't be.

        `missing` are objects that are listed and not in the bucket.
        """
        objects = [self._stage.objects[object_id] for object_id in object_ids]
        sources = [
            Source(one.object_id, len(one.data), len({e.stream_id for e in one.entries}))
            for one in objects
        ]
        loaded = await self._indexes.load([*sources, *missing])
        tables = [one.entries for one in loaded.values() if isinstance(one, SourceIndex)]
        reasons = {
            object_id: one.reason
            for object_id, one in loaded.items()
            if not isinstance(one, SourceIndex)
        }
        return EntryTable.concatenate(tables), reasons

    async def carry_out(self, plan: CommitPlan, expired_ids: Sequence[int]) -> None:
        """Write and commit what is planned."""
        run = CommitRun(self._context, self._target, plan, expired_ids, {}, Figures())
        await commit(self._client, await run.run(), COMMIT_DEADLINE_S)

    async def remove(self, expired_ids: Sequence[int]) -> None:
        """Commit that objects go without being replaced."""
        replacement = Replacement(self._target, tuple(expired_ids))
        await commit(self._client, replacement, COMMIT_DEADLINE_S)

    def close(self) -> None:
        """Give up the threads."""
        self._calls.close()


def key_of(object_id: int) -> str:
    """The key of an object of the cluster."""
    return key_for(object_id, NAMESPACE)


def break_uploads(store: MemoryObjectStore, reason: str) -> None:
    """Make every upload from now on fail."""
    for operation in ("put", "start_multipart", "upload_part", "complete_multipart"):
        error = StoreRejectedError(f"{operation} is answered with {reason}")
        store.fail_next(operation, error, times=1_000)


def _streams_of(given: Given, objects: Mapping[int, WrittenInput]) -> dict[int, tuple[int, int]]:
    """Start and end of each live stream; an end is at least that of what objects hold."""
    ends: dict[int, int] = {}
    starts: dict[int, int] = {}
    for entry in (entry for one in objects.values() for entry in one.entries):
        ends[entry.stream_id] = max(entry.end_offset, ends.get(entry.stream_id, 0))
        starts[entry.stream_id] = min(
            entry.start_offset, starts.get(entry.stream_id, entry.start_offset)
        )
    live = starts if given.streams is None else given.streams
    return {one: (start, max(start, ends.get(one, start))) for one, start in live.items()}


def _put_stream(rows: MapRows, stream_id: int, start: int, end: int) -> None:
    owner = {"epoch": _EPOCH, "range_index": 0, "node_id": NODE.node_id}
    offsets = {"start_offset": start, "end_offset": end}
    rows.put("streams", {"stream_id": stream_id}, **owner, **offsets, state=_OPENED)
    rows.put(
        "ranges",
        {"stream_id": stream_id, "range_index": 0},
        epoch=_EPOCH,
        node_id=NODE.node_id,
        **offsets,
    )


def _put_object(rows: MapRows, one: WrittenInput) -> None:
    rows.put(
        "objects",
        {"object_id": one.object_id},
        state=int(ObjectState.COMMITTED),
        kind=int(ObjectKind.STREAM_SET),
        node_id=NODE.node_id,
        object_size=len(one.data),
        order_id=one.object_id,
        timestamp_ms=1,
        data_time_ms=1,
    )
    spans: dict[int, tuple[int, int]] = {}
    for held in stream_ranges(EntryTable.of_rows(one.entries)):
        start, _ = spans.get(held.stream_id, (held.start_offset, 0))
        spans[held.stream_id] = (start, held.end_offset)
    for stream_id, (start, end) in spans.items():
        key = {"object_id": one.object_id, "stream_id": stream_id, "start_offset": start}
        rows.put("object_ranges", key, end_offset=end)
