"""What a scenario about stream objects is given: objects by their facts, or with all their bytes.

Bytes are made from the index that the scenario states: one block an entry, records of equal spans,
and payloads that fill the size. What scenarios say in words (the bucket, ranges of similar objects)
is read from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streammeta.storage.compaction.stream_objects import StreamObject
from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.record import (
    BLOCK_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    RecordBatch,
)
from tests.conformance.scenario_args import Args, ArgumentMissingError
from tests.kit.built_objects import ObjectBuilder

_UNITS = {"bytes": 1, "byte": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_SIMILAR = re.compile(r"(\d+)\.\.(\d+) (composite|normal) of (\d+) (bytes?|KiB|MiB|GiB)")
_EACH_COVERS = re.compile(r"each covers (\d+) offsets")
_FROM_OFFSET = re.compile(r"contiguous from offset (\d+)")
_BUCKET = re.compile(r"in bucket (-?\d+)")
_STREAM = re.compile(r"[Ss]tream (\d+)")


@dataclass(frozen=True, slots=True)
class PreparedObject:
    """An object and its bytes; `facts.size` is what the map records."""

    facts: StreamObject
    data: bytes
    entries: tuple[IndexEntry, ...]
    links: tuple[LinkedObject, ...] = ()


def listed_objects(content: Sequence[Mapping[str, Any]]) -> tuple[list[StreamObject], list[Any]]:
    """Return objects as they are listed, each with its place there for a checksum, and their tags.

    So two with the same id stay apart, whatever else they have in common.
    """
    objects, tags = [], []
    for place, fields in enumerate(content):
        args = Args(fields, f"objects[{place}]")
        objects.append(_facts(args, place))
        tags.append(args.take("tag", None))
        _refuse_unknown(args)
    return objects, tags


def described_objects(notes: str) -> list[StreamObject]:
    """Return objects that are told of in a sentence: runs of ids that are alike."""
    runs = _SIMILAR.findall(notes)
    covers, begins = _EACH_COVERS.search(notes), _FROM_OFFSET.search(notes)
    if not runs or covers is None:
        raise ArgumentMissingError("scenario.objects is missing, and its notes tell of none")
    span, at = int(covers[1]), int(begins[1]) if begins else 0
    objects = []
    for first, last, kind, size, unit in runs:
        for object_id in range(int(first), int(last) + 1):
            size_bytes = int(size) * _UNITS[unit]
            objects.append(
                StreamObject(object_id, at, at + span, size_bytes, composite=kind == "composite")
            )
            at += span
    return objects


def prepared_objects(section: Mapping[str, Any]) -> tuple[int, dict[int, PreparedObject]]:
    """Make the objects of a section with their bytes; return the stream and the objects by id."""
    args = Args(section, "prepared_objects")
    notes = str(args.take("notes", ""))
    bucket, stream = _BUCKET.search(notes), _STREAM.search(notes)
    stream_id = args.take("stream", int(stream[1]) if stream else 0)
    bucket_id = args.take("bucket", int(bucket[1]) if bucket else 0)
    made: dict[int, PreparedObject] = {}
    for place, fields in enumerate(args.take("objects")):
        one = Args({"bucket": bucket_id, **fields}, f"prepared_objects.objects[{place}]")
        index, links = one.take("index", []), one.take("links", [])
        facts = _facts(one, -1)
        if facts.composite:
            made[facts.object_id] = _composite(facts, [made[each] for each in links])
        else:
            made[facts.object_id] = _normal(facts, stream_id, index)
        _refuse_unknown(one)
    _refuse_unknown(args)
    return stream_id, made


def _facts(args: Args, place: int) -> StreamObject:
    kind = args.take("type", "normal")
    if kind not in ("normal", "composite"):
        raise ValueError(f"type of an object is {kind!r}, wanted normal or composite")
    return StreamObject(
        args.take("object"),
        args.take("start"),
        args.take("end"),
        args.take("size"),
        composite=kind == "composite",
        bucket_id=args.take("bucket", 0),
        crc32c=place,
    )


def _normal(
    facts: StreamObject, stream_id: int, index: Sequence[Mapping[str, int]]
) -> PreparedObject:
    builder = ObjectBuilder(2**31 - 1)
    for entry in index:
        builder.write(list(_records(stream_id, entry)))
    built = builder.finish()
    found = [
        {
            "start": one.start_offset,
            "end": one.end_offset,
            "records": one.record_count,
            "position": one.position,
            "size": one.size,
        }
        for one in built.entries
    ]
    if found != list(index) or built.size != facts.size:
        raise ValueError(
            f"object {facts.object_id} has {built.size} bytes and the index {found}, not"
            f" {facts.size} and {list(index)}"
        )
    return PreparedObject(facts, built.data, built.entries)


def _records(stream_id: int, entry: Mapping[str, int]) -> Iterator[RecordBatch]:
    """Yield the records of a block: equal spans and payloads, the last takes what is left over."""
    count, at = entry["records"], entry["start"]
    span = (entry["end"] - at) // count
    payload = entry["size"] - BLOCK_HEADER_SIZE - count * RECORD_HEADER_SIZE
    for ordinal in range(count):
        is_last = ordinal == count - 1
        covers = entry["end"] - at if is_last else span
        size = payload - (count - 1) * (payload // count) if is_last else payload // count
        fill = (at * 31 + stream_id) % 251
        yield RecordBatch(stream_id, 0, at, covers, bytes([fill]) * size)
        at += covers


def _composite(facts: StreamObject, linked: Sequence[PreparedObject]) -> PreparedObject:
    links = tuple(
        LinkedObject(one.facts.object_id, one.facts.bucket_id, one.entries) for one in linked
    )
    entries = tuple(entry for link in links for entry in link.entries)
    return PreparedObject(facts, encode_composite(links), entries, links)


def _refuse_unknown(args: Args) -> None:
    unknown = [mismatch.field for mismatch in args.unknown()]
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
