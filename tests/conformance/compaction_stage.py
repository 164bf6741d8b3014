"""Where a scenario's compaction is carried out: its input, a real map, the real executor.

The map is put in the state that a scenario starts from; objects are written as it says. What came
of it is told by the map and the bucket alone. Knows nothing of how scenarios say things.

Blocks are written in several ways: in full, as [stream, start, end], or as the writes that produce
them. Where writes are given, the object is built, and the blocks must be what its index says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from streammeta.client.compaction.commit import Replacement, commit
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.listing import Listing
from streammeta.client.compaction.output_writer import OutputJournal
from streammeta.client.compaction.report import Figures
from streammeta.client.compaction.sso_run import CommitRun, RunContext
from streammeta.client.compaction.sso_sources import Source, SourceIndex, SourceIndexes
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.controller.metadata.api.requests import DescribeObjects, GetNodes, RegisterNode
from streammeta.controller.metadata.tables.values import NodeIdentity, ObjectKind, ObjectState
from streammeta.storage.compaction.entries import (
    Entry,
    EntryTable,
    contiguous_runs,
    encode_entries,
    live_entries,
    stream_ranges,
)
from streammeta.storage.compaction.plan import CommitPlan, CompactionLimits
from streammeta.storage.errors import StoreRejectedError
from streammeta.storage.object_format import record
from streammeta.storage.object_format.index_block import Footer, StreamRange, encode_footer
from streammeta.storage.object_format.object_key import key_for
from tests.compaction.compaction_steps import Steps
from tests.compaction.compaction_world import NAMESPACE, LeadingMap
from tests.conformance.compaction_facts import spans_of
from tests.conformance.map_rows import MetadataRows
from tests.conformance.scenario_args import Args, ArgumentMissingError
from tests.kit.built_objects import ObjectBuilder, opened
from tests.kit.memory_store import MemoryObjectStore

NODE = NodeIdentity(1_000, 1)
COMMIT_DEADLINE_S = 60.0
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
        self.objects = {object_id: held.written() for object_id, held in given.objects.items()}
        self.map = LeadingMap()
        self.store = MemoryObjectStore(self.map.clock.wall_ms)
        self._streams = _streams_of(given, self.objects)

    async def prepare(self) -> None:
        await self.map.write(RegisterNode(node=NODE))
        for object_ in self.objects.values():
            self.store.put(key_of(object_.object_id), object_.data)
        rows = MetadataRows(self.map.controller.cluster_metadata.freeze().sections())
        counters = rows.counters
        counters["next_object_id"] = max(self.objects, default=-1) + 1
        counters["next_stream_id"] = max(self._known_streams(), default=-1) + 1
        for stream_id, (start, end) in self._streams.items():
            _put_stream(rows, stream_id, start, end)
        for object_ in self.objects.values():
            _put_object(rows, object_)
        self.map.load(rows.sections())

    def _known_streams(self) -> set[int]:
        held = {entry.stream_id for object_ in self.objects.values() for entry in object_.entries}
        return held | self._streams.keys()

    def stream_starts(self) -> dict[int, int]:
        return {stream_id: start for stream_id, (start, _) in self._streams.items()}

    def unfinished(self) -> list[str]:
        """Return the keys of uploads that were begun and neither completed nor aborted."""
        return [multipart_upload.key for multipart_upload in self.store.list_multipart_uploads()]

    def destroyed(self) -> list[int]:
        answer = self.map.query(DescribeObjects())
        kept = {item.object_id for item in answer.objects if item.state is ObjectState.COMMITTED}
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
        for object_ in self.map.query(DescribeObjects()).objects:
            is_new = object_.object_id not in self.objects
            if is_new and object_.state is ObjectState.COMMITTED and object_.kind is kind:
                held = spans_of(object_).items()
                ranges = tuple(StreamRange(id_, *span) for id_, spans in held for span in spans)
                order = orders.get(object_.object_id, -1)
                found.append(MadeObject(object_.object_id, object_.object_size, order, ranges))
        return sorted(
            found, key=lambda item: [(held.stream_id, held.start_offset) for held in item.ranges]
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
                self.store.get_range(key_of(row.object_id), row.position, row.position + row.size)
                for row in rows
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
            Source(item.object_id, len(item.data), len({e.stream_id for e in item.entries}))
            for item in objects
        ]
        loaded = await self._indexes.load([*sources, *missing])
        tables = [index.entries for index in loaded.values() if isinstance(index, SourceIndex)]
        reasons = {
            object_id: index.reason
            for object_id, index in loaded.items()
            if not isinstance(index, SourceIndex)
        }
        return EntryTable.concatenate(tables), reasons

    async def carry_out(self, plan: CommitPlan, expired_ids: Sequence[int]) -> None:
        run = CommitRun(self._context, self._target, plan, expired_ids, {}, Figures())
        await commit(self._client, await run.run(), COMMIT_DEADLINE_S)

    async def remove(self, expired_ids: Sequence[int]) -> None:
        """Commit that objects go without being replaced."""
        replacement = Replacement(self._target, tuple(expired_ids))
        await commit(self._client, replacement, COMMIT_DEADLINE_S)

    def close(self) -> None:
        self._calls.close()


def key_of(object_id: int) -> str:
    return key_for(object_id, NAMESPACE)


def break_uploads(store: MemoryObjectStore, reason: str) -> None:
    for operation in ("put", "start_multipart", "upload_part", "complete_multipart"):
        error = StoreRejectedError(f"{operation} is answered with {reason}")
        store.fail_next(operation, error, times=1_000)


def _streams_of(given: Given, objects: Mapping[int, WrittenInput]) -> dict[int, tuple[int, int]]:
    """Start and end of each live stream; an end is at least that of what objects hold."""
    ends: dict[int, int] = {}
    starts: dict[int, int] = {}
    for entry in (entry for object_ in objects.values() for entry in object_.entries):
        ends[entry.stream_id] = max(entry.end_offset, ends.get(entry.stream_id, 0))
        starts[entry.stream_id] = min(
            entry.start_offset, starts.get(entry.stream_id, entry.start_offset)
        )
    live = starts if given.streams is None else given.streams
    return {stream: (start, max(start, ends.get(stream, start))) for stream, start in live.items()}


def _put_stream(rows: MetadataRows, stream_id: int, start: int, end: int) -> None:
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


def _put_object(rows: MetadataRows, one: WrittenInput) -> None:
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


UNLIMITED = 2**31 - 1
LARGEST_BLOCK = 64 * 1024
"""Of those that are written here: what a scenario says of larger ones does not need the bytes."""
DEFAULT_BLOCK_SIZE_THRESHOLD = 1024


@dataclass(frozen=True, slots=True)
class GivenObject:
    """Blocks of one object, and its bytes when the scenario says how it was written."""

    object_id: int
    entries: tuple[Entry, ...]
    data: bytes | None

    def written(self) -> WrittenInput:
        """Return the object as it lies in a bucket.

        Blocks that are too small for their records, or have fewer offsets than records, or are
        large, are written with others of the same offsets.
        """
        if self.data is not None:
            return WrittenInput(self.object_id, self.entries, self.data)
        given = [
            one._replace(record_count=min(one.record_count, one.end_offset - one.start_offset))
            for one in self.entries
        ]
        blocks = [_block(clause) for clause in given]
        entries = tuple(
            block._replace(position=sum(map(len, blocks[:number])), size=len(blocks[number]))
            for number, block in enumerate(given)
        )
        index = encode_entries(EntryTable.of_rows(entries))
        data = b"".join(blocks)
        footer = encode_footer(Footer(len(data), len(index)))
        return WrittenInput(self.object_id, entries, data + index + footer)


@dataclass(frozen=True, slots=True)
class WrittenInput:
    """An object and its bytes; `entries` are as its index has them."""

    object_id: int
    entries: tuple[Entry, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Given:
    """All a scenario starts from; `streams` None means that it names no live streams."""

    objects: Mapping[int, GivenObject]
    streams: Mapping[int, int] | None

    @property
    def table(self) -> EntryTable:
        """All entries, object by object as given."""
        return EntryTable.of_rows(row for item in self.objects.values() for row in item.entries)

    def live(self) -> EntryTable:
        """Return the entries that are live; where no streams are named, all of them."""
        return self.table if self.streams is None else live_entries(self.table, self.streams)


def read_given(args: Args, input_sets: Mapping[str, Any]) -> Given:
    """Take the objects and streams of a scenario.

    Raises:
        ArgumentMissingError: the scenario names an input that is not there.
        ValueError: an object that is written has other blocks than the scenario says.
    """
    objects: dict[int, GivenObject] = {}
    streams: Sequence[Mapping[str, int]] | None = None
    if args.has("input"):
        name = args.take("input")
        if name in input_sets:
            objects, streams = _input_set(Args(input_sets[name], f"input_sets.{name}"))
        elif not args.has("objects"):
            raise ArgumentMissingError(f"input set {name!r} is missing")
    for field in ("objects", "extra_objects"):
        for object_id, content in args.take(field, {}).items():
            objects[object_id] = _written_object(object_id, Args(content, f"{field}.{object_id}"))
    for object_id, blocks in args.take("input_blocks", {}).items():
        objects[object_id] = GivenObject(object_id, tuple(_entries(object_id, blocks)), None)
    streams = args.take("streams", streams)
    live = None if streams is None else {stream["stream"]: stream["start"] for stream in streams}
    return Given(objects, live)


def _input_set(args: Args) -> tuple[dict[int, GivenObject], Sequence[Mapping[str, int]] | None]:
    writes, sizes = args.take("writes", {}), args.take("object_sizes", {})
    objects = {}
    for object_id, blocks in args.take("blocks").items():
        given: dict[str, Any] = {"blocks": blocks}
        if object_id in writes:
            given["writes"] = writes[object_id]
        if object_id in sizes:
            given["object_size"] = sizes[object_id]
        objects[object_id] = _written_object(object_id, Args(given, f"blocks.{object_id}"))
    return objects, args.take("streams", None)


def _written_object(object_id: int, args: Args) -> GivenObject:
    entries = tuple(_entries(object_id, args.take("blocks")))
    if not args.has("writes"):
        return GivenObject(object_id, entries, None)
    builder = ObjectBuilder(args.take("block_size_threshold", DEFAULT_BLOCK_SIZE_THRESHOLD))
    for write in args.take("writes"):
        builder.write([_record(write["stream"], fields) for fields in write["records"]])
    built = builder.finish()
    found = tuple(
        Entry(
            *(object_id, e.stream_id, e.start_offset, e.end_offset),
            *(e.record_count, e.position, e.size),
        )
        for e in built.entries
    )
    if found != entries:
        raise ValueError(f"object {object_id} has the blocks {found}, not {entries}")
    size = args.take("object_size", len(built.data))
    if size != len(built.data):
        raise ValueError(f"object {object_id} has {len(built.data)} bytes, not {size}")
    return GivenObject(object_id, entries, built.data)


def block_list(blocks: Sequence[Mapping[str, int]]) -> EntryTable:
    """Return blocks that are given in full, in their order; the object is 0 unless they name it."""
    return EntryTable.of_rows(row for block in blocks for row in _entries(0, [block]))


def limits_of(args: Args) -> CompactionLimits:
    """Take the limits of a scenario; what it does not name is without a limit."""
    config = args.within("config", {})
    config.take("part_size", None)  # changes no result; the parts of the executor are its own
    return CompactionLimits(
        memory_budget=config.take("cache_size", UNLIMITED),
        split_size=config.take("stream_split_size", UNLIMITED),
        max_streams=config.take("max_stream_num_in_stream_set", UNLIMITED),
        max_stream_objects=config.take("max_stream_object_num", UNLIMITED),
        max_rows=UNLIMITED,
    )


def _entries(object_id: int, blocks: Sequence[Any]) -> Iterator[Entry]:
    """Yield blocks in either notation; those without sizes get their span, one after the other."""
    position = 0
    for block in blocks:
        if isinstance(block, Mapping):
            yield Entry(
                *(block.get("object", object_id), block["stream"], block["start"], block["end"]),
                *(block["records"], block["position"], block["size"]),
            )
        else:
            stream, start, end = block
            yield Entry(object_id, stream, start, end, 1, position, end - start)
            position += end - start


def _record(stream_id: int, fields: Mapping[str, int]) -> record.RecordBatch:
    payload = bytes(number % 251 for number in range(fields["payload"]))
    return record.RecordBatch(stream_id, 0, fields["base"], fields["count"], payload)


def _block(entry: Entry) -> bytes:
    """Make a block for an entry, of its size if that is possible and not large."""
    count, span = entry.record_count, entry.end_offset - entry.start_offset
    least = record.BLOCK_HEADER_SIZE + count * record.RECORD_HEADER_SIZE
    payload = bytes(min(max(0, entry.size - least), LARGEST_BLOCK))
    records = [
        record.RecordBatch(entry.stream_id, 0, entry.start_offset + number, 1, b"")
        for number in range(count - 1)
    ]
    last = entry.start_offset + count - 1
    records.append(record.RecordBatch(entry.stream_id, 0, last, span - count + 1, payload))
    body = b"".join(map(record.encode_record, records))
    return record.encode_block_header(count, len(body)) + body
