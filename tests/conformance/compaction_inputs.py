"""What a scenario about compaction is given: blocks of objects, live streams, limits.

Blocks are written in several ways: in full, as [stream, start, end], or as the writes that produce
them. Where writes are given, the object is built, and the blocks must be what its index says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streammeta.storage.compaction.entries import Entry, EntryTable, encode_entries, live_entries
from streammeta.storage.compaction.plan import CompactionLimits
from streammeta.storage.object_format.index_block import Footer, encode_footer
from streammeta.storage.object_format.record import (
    BLOCK_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    RecordBatch,
    encode_block_header,
    encode_record,
)
from tests.conformance.scenario_args import Args, ArgumentMissingError
from tests.kit.built_objects import ObjectBuilder

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
        blocks = [_block(one) for one in given]
        entries = tuple(
            one._replace(position=sum(map(len, blocks[:number])), size=len(blocks[number]))
            for number, one in enumerate(given)
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
        return EntryTable.of_rows(row for one in self.objects.values() for row in one.entries)

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
    live = None if streams is None else {one["stream"]: one["start"] for one in streams}
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


def _record(stream_id: int, fields: Mapping[str, int]) -> RecordBatch:
    payload = bytes(number % 251 for number in range(fields["payload"]))
    return RecordBatch(stream_id, 0, fields["base"], fields["count"], payload)


def _block(entry: Entry) -> bytes:
    """Make a block for an entry, of its size if that is possible and not large."""
    count, span = entry.record_count, entry.end_offset - entry.start_offset
    least = BLOCK_HEADER_SIZE + count * RECORD_HEADER_SIZE
    payload = bytes(min(max(0, entry.size - least), LARGEST_BLOCK))
    records = [
        RecordBatch(entry.stream_id, 0, entry.start_offset + number, 1, b"")
        for number in range(count - 1)
    ]
    last = entry.start_offset + count - 1
    records.append(RecordBatch(entry.stream_id, 0, last, span - count + 1, payload))
    body = b"".join(map(encode_record, records))
    return encode_block_header(count, len(body)) + body
