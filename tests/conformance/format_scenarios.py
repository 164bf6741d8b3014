"""Scenarios about bytes: records, objects that writes or blocks make, look-ups in their index.

An object is written with the part size that the scenario names, put together from its parts and
read back as any reader would, by the ranges it asks for; facts are taken from what was read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streammeta.storage.object_format import index_block
from streammeta.storage.object_format.object_reader import ByteRange, ObjectReader
from streammeta.storage.object_format.object_writer import ObjectWriter, encode_trailer
from streammeta.storage.object_format.record import (
    BLOCK_HEADER_SIZE,
    RecordBatch,
    decode_block_header,
    decode_record,
    encode_block_header,
    encode_record,
)
from tests.conformance.conformance_report import Mismatch, ScenarioResult, compare, entry_facts
from tests.conformance.scenario_args import Args
from tests.conformance.stream_object_scenarios import delete_composites

MAX_BYTES = 2**31 - 1
_FIELDS = frozenset(("writes", "writes_generated", "blocks"))
"""One of these makes a scenario one about bytes."""
_RECORD_FIELDS = frozenset(("payload", "payload_utf8", "payload_hex"))

_GENERATED = re.compile(
    r"(?P<number>\d+) records i = (?P<first>\d+)\.\.(?P<last>\d+)[^:]*: stream (?P<stream>\d+),"
    r" epoch (?P<epoch>\d+), base_offset (?P<base>\d+)(\+((?P<step>\d+)\*?)?i)?,"
    r" count (?P<count>\d+), payload '(?P<payload>[^']*)'"
)


def is_format(scenario: Mapping[str, Any]) -> bool:
    """Whether a scenario is about bytes of the product's own objects."""
    given = scenario.get("input")
    if not _FIELDS.isdisjoint(scenario):
        return True
    if not isinstance(given, Mapping):
        return False
    listed = given.get("records")
    records = [given, *(listed if isinstance(listed, list) else [])]
    has_record = any(
        isinstance(record, Mapping) and not _RECORD_FIELDS.isdisjoint(record) for record in records
    )
    return has_record or "records_generated" in given or "composites" in given


def check_format(args: Args, result: ScenarioResult) -> Iterator[Mismatch]:
    if args.has("input"):
        given = args.within("input")
        if given.has("composites"):
            facts = delete_composites(given, result)
        elif given.has("records_generated") or given.has("records"):
            facts = _sequence_facts(_generated(given))
        else:
            facts = _record_facts(_record(given))
    else:
        facts = yield from _object_mismatches(args)
    for name in ("expect", "derived"):
        yield from compare(args.take(name, {}), facts, name)


# Records


def _record(given: Args, stream: int | None = None) -> RecordBatch:
    return RecordBatch(
        given.take("stream") if stream is None else stream,
        given.take("epoch", 0),
        given.take("base") if given.has("base") else given.take("base_offset"),
        given.take("count"),
        _payload(given),
    )


def _payload(given: Args) -> bytes:
    """Text, hex, or a number of bytes, all the same."""
    if given.has("payload_utf8"):
        return str(given.take("payload_utf8")).encode()
    if given.has("payload_hex"):
        return bytes.fromhex(given.take("payload_hex"))
    return bytes([given.take("fill", 0)]) * int(given.take("payload"))


def _record_facts(record: RecordBatch) -> dict[str, Any]:
    encoded = encode_record(record)
    read = decode_record(memoryview(encoded), 0)
    return {
        "stream": read.stream_id,
        "epoch": read.epoch,
        "base_offset": read.base_offset,
        "count": read.count,
        "payload_size": len(read.payload),
        "payload_utf8": read.payload.decode(errors="replace"),
        "payload_hex": read.payload.hex(),
        "encoded_size": len(encoded),
        "encoded_hex": encoded.hex(),
        "last_offset": read.end_offset,
    }


def _generated(given: Args) -> list[RecordBatch]:
    if given.has("records"):
        return [_record(row) for row in given.each("records")]
    text = given.take("records_generated")
    found = _GENERATED.search(text)
    if found is None:
        raise ValueError(f"records_generated: not understood: {text!r}")
    number = {
        name: int(found[name] or 1)
        for name in ("number", "first", "last", "stream", "epoch", "base", "step", "count")
    }
    if number["last"] - number["first"] + 1 != number["number"]:
        raise ValueError(f"records_generated: {text!r} counts other records than it names")
    step = number["step"] if "i" in found[0].split("base_offset ")[1].split(",")[0] else 0
    return [
        RecordBatch(
            number["stream"],
            number["epoch"],
            number["base"] + step * i,
            number["count"],
            found["payload"].replace("<i>", str(i)).encode(),
        )
        for i in range(number["first"], number["last"] + 1)
    ]


def _sequence_facts(records: Sequence[RecordBatch]) -> dict[str, Any]:
    data = memoryview(b"".join(map(encode_record, records)))
    read: list[RecordBatch] = []
    at = 0
    for _ in records:
        read.append(decode_record(data, at))
        at += read[-1].encoded_size
    return {
        "parsed_base_offsets": [record.base_offset for record in read],
        "parsed_counts": [record.count for record in read],
        "parsed_payloads": [record.payload.decode(errors="replace") for record in read],
        "bytes_left": len(data) - at,
        "total_size": len(data),
    }


# Objects


@dataclass(frozen=True, slots=True)
class _Object:
    """The bytes of an object, and how reading its index went."""

    data: bytes
    index: index_block.IndexBlock
    reader: ObjectReader
    reads: tuple[ByteRange, ...]

    def records(self, entry: index_block.IndexEntry) -> list[RecordBatch]:
        wanted = self.reader.block_range(entry)
        return self.reader.records(entry, self.data[wanted.start : wanted.end])


def _object_mismatches(args: Args) -> Generator[Mismatch, None, dict[str, Any]]:
    """Yield what does not hold on the way; return all facts of the object."""
    if args.has("blocks"):
        data = b"".join(_block(block) for block in args.each("blocks"))
        entries = [_entry(row) for row in args.each("index")]
        stored = data + encode_trailer(entries, len(data))
    else:
        stored = yield from _written(args)
    held = _read(stored)
    facts = _object_facts(held)
    if args.has("query"):
        facts |= _find_facts(held, args.within("query"))
    for query in args.each("queries", None) or args.each("finds", None):
        yield from compare(query.take("expect"), _find_facts(held, query), query.path)
    return _with_asked(args, held, facts)


def _with_asked(args: Args, held: _Object, facts: dict[str, Any]) -> dict[str, Any]:
    """Add the facts whose question is part of what is expected."""
    expect = args.take("expect", {})
    ranges = {
        stream_range.stream_id: [stream_range.start_offset, stream_range.end_offset]
        for stream_range in index_block.stream_ranges(held.index)
    }
    asked = {stream: ranges.get(stream) for stream in expect.get("range_of_stream", {})}
    finds = [
        _find_facts(held, Args(row))
        | {name: row[name] for name in ("stream", "start", "end", "max_bytes") if name in row}
        for row in expect.get("finds", [])
    ]
    return facts | {"range_of_stream": asked, "finds": finds}


def _written(args: Args) -> Generator[Mismatch, None, bytes]:
    """Yield writes that are judged otherwise than expected; return the bytes of the object."""
    config = args.within("config", {})
    writer = ObjectWriter(
        config.take("block_size_threshold", 1024 * 1024),
        part_size=config.take("part_size_threshold", 16 * 1024 * 1024),
    )
    parts: list[bytes] = []
    for number, (records, expected) in enumerate(_writes(args)):
        try:
            writer.write(records)
            found = "ok"
        except ValueError:
            found = "error"
        if found != expected:
            yield Mismatch(f"writes[{number}].expect", expected, found)
        parts += writer.parts()
    writer.finish()
    return b"".join([*parts, *writer.parts()])


def _writes(args: Args) -> Iterator[tuple[list[RecordBatch], str]]:
    if args.has("writes_generated"):
        for stream in range(args.within("writes_generated").take("streams")):
            yield [RecordBatch(stream, 0, stream, 1, b"x")], "ok"
        return
    for write in args.each("writes"):
        write.pass_over()
        stream = write.take("stream")
        records = [_record(row, stream) for row in write.each("records")]
        yield records, write.take("expect", "ok")


def _block(block: Args) -> bytes:
    stream = block.take("stream")
    records = [_record(row, stream) for row in block.each("records")]
    body = b"".join(map(encode_record, records))
    return encode_block_header(len(records), len(body)) + body


def _entry(entry: Args) -> index_block.IndexEntry:
    start = entry.take("start")
    end = start + entry.take("end_delta")
    counts = (entry.take(name) for name in ("records", "position", "size"))
    return index_block.IndexEntry(entry.take("stream"), start, end, *counts)


def _read(stored: bytes) -> _Object:
    reader = ObjectReader("scenario", len(stored))
    reads: list[ByteRange] = []
    while (needed := reader.needed) is not None:
        reads.append(needed)
        reader.receive(stored[needed.start : needed.end])
    return _Object(stored, reader.index, reader, tuple(reads))


def _object_facts(held: _Object) -> dict[str, Any]:
    data, entries = held.data, list(held.index)
    data_size = held.index.data_size
    for entry in entries:
        held.records(entry)
    sizes = {entry.size for entry in entries}
    return {
        "object_size": len(data),
        "object_size_equals_stored_bytes": held.reads[0].end == len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "data_size": data_size,
        "index_position": data_size,
        "index_size": len(data) - index_block.FOOTER_SIZE - data_size,
        "index_entries": len(entries),
        "index": [entry_facts(entry) for entry in entries],
        "index_hex": data[data_size : len(data) - index_block.FOOTER_SIZE].hex(),
        "footer_hex": data[len(data) - index_block.FOOTER_SIZE :].hex(),
        "block_size": sizes.pop() if len(sizes) == 1 else sorted(sizes),
        "block_sizes": list(_block_sizes(memoryview(data)[:data_size])),
        "stream_ranges": [
            {"stream": one.stream_id, "start": one.start_offset, "end": one.end_offset}
            for one in index_block.stream_ranges(held.index)
        ],
        "first_tail_read_size": held.reads[0].end - held.reads[0].start,
        "second_read_from": held.reads[1].start if len(held.reads) > 1 else None,
    }


def _block_sizes(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        size = BLOCK_HEADER_SIZE + decode_block_header(data, at).data_length
        yield size
        at += size


def _find_facts(held: _Object, query: Args) -> dict[str, Any]:
    found = held.index.find(
        query.take("stream"),
        query.take("start"),
        query.take("end"),
        query.take("max_bytes", MAX_BYTES),
    )
    blocks = [held.records(entry) for entry in found.entries]
    records = [record for block in blocks for record in block]
    return {
        "block_count": len(found.entries),
        "blocks_start": [entry.start_offset for entry in found.entries],
        "blocks_end": [entry.end_offset for entry in found.entries],
        "blocks_position": [entry.position for entry in found.entries],
        "blocks_size": [entry.size for entry in found.entries],
        "blocks_records": [
            [{"base": record.base_offset, "count": record.count} for record in block]
            for block in blocks
        ],
        "record_count": len(records),
        "base_offsets": [record.base_offset for record in records],
        "next_offset": found.next_offset,
        "fulfilled": found.fulfilled,
    }
