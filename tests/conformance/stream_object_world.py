"""Objects of one stream in a bucket in memory, and a stand-in for the controllers.

The stand-in lists the stream's objects, issues ids, and writes down the commits it is asked for; it
judges none of them. Knows nothing of scenarios.

Bytes are made from the index that the scenario states: one block an entry, records of equal spans,
and payloads that fill the size. What scenarios say in words (the bucket, ranges of similar objects)
is read from there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.model import NodeIdentity
from streammeta.client.resources.bandwidth import Network
from streammeta.storage.cluster_files.bucket_marker import BucketMarker, create_marker
from streammeta.storage.compaction.stream_objects import StreamCompaction, StreamObject
from streammeta.storage.object_format import object_key, record
from streammeta.storage.object_format.composite import (
    LinkedObject,
    decode_composite,
    encode_composite,
)
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_reader import read_entry
from streammeta.v1 import admin_pb2, common_pb2, objects_pb2, streams_pb2
from tests.conformance.scenario_args import Args, ArgumentMissingError
from tests.fake_bucket import FAKE_UUID
from tests.kit.built_objects import ObjectBuilder, opened
from tests.kit.memory_store import MemoryObjectStore

NAMESPACE = "DEFAULT"
_SPAN: tuple[tuple[str, Any], ...] = (
    ("object", "object_id"),
    ("start", "start_offset"),
    ("end", "end_offset"),
)
_NODE = NodeIdentity(1, 1)
_EPOCH = 1
_MARKER = BucketMarker(
    cluster_id="scenario", cluster_uuid=FAKE_UUID, namespace=NAMESPACE, created_ms=0
)


class StreamObjectWorld:
    """The bucket, the stand-in, and what it was asked for."""

    def __init__(
        self,
        stream_id: int,
        stream_start: int,
        objects: Mapping[int, PreparedObject],
        listed: list[int],
        next_object_id: int,
    ) -> None:
        self.network = Network()
        self.store = MemoryObjectStore()
        create_marker(self.store, _MARKER)
        for object_id, object_ in objects.items():
            self.store.put(object_key.key_for(object_id, NAMESPACE), object_.data)
        self.commits: list[objects_pb2.CommitStreamObjectRequest] = []
        self.prepared: list[int] = []
        self._stream_id = stream_id
        self._stream_start = stream_start
        self._listed = [objects[object_id].facts for object_id in listed]
        self._next_object_id = next_object_id

    def compact(self, kind: StreamCompaction, config: CompactionConfig) -> None:
        """Compact the stream. Raises what ended it early, or that an object was left out."""
        asyncio.run(self._compact(kind, config))

    async def _compact(self, kind: StreamCompaction, config: CompactionConfig) -> None:
        client = cast(ControllerClient, self)
        compactor = StreamObjectCompactor(client, _NODE, NAMESPACE, self.store, config)
        try:
            report = await compactor.compact(self._stream_id, kind)
        finally:
            compactor.close()
        if report.error is not None:
            raise report.error
        if report.left_out:
            raise ValueError(f"objects were left out: {report.left_out}")

    # ---- the controllers ----

    async def describe_cluster(self) -> admin_pb2.DescribeClusterResponse:
        return admin_pb2.DescribeClusterResponse(
            cluster_id=_MARKER.cluster_id,
            cluster_uuid=_MARKER.cluster_uuid,
            object_namespace=NAMESPACE,
        )

    async def call(self, method: Any, request: Any, _deadline: float | None = None) -> Any:
        match method.name:
            case "DescribeStreams":
                return self._describe_streams()
            case "DescribeObjects":
                return self._describe_objects(set(request.object_ids))
            case "PrepareObjects":
                first = self._next_object_id
                self._next_object_id += request.count
                self.prepared.extend(range(first, self._next_object_id))
                return objects_pb2.PrepareObjectsResponse(
                    first_object_id=first, deadline_ms=request.ttl_ms
                )
            case "CommitStreamObject":
                self.commits.append(request)
                return objects_pb2.CommitStreamObjectResponse()
        raise ValueError(f"{method.name} is not answered here")

    def _describe_streams(self) -> streams_pb2.DescribeStreamsResponse:
        described = streams_pb2.StreamDescription(
            stream_id=self._stream_id,
            epoch=_EPOCH,
            start_offset=self._stream_start,
            stream_objects=[
                streams_pb2.StreamObjectRange(
                    object_id=object_.object_id,
                    start_offset=object_.start_offset,
                    end_offset=object_.end_offset,
                )
                for object_ in self._listed
            ],
        )
        return streams_pb2.DescribeStreamsResponse(streams=[described], total=1)

    def _describe_objects(self, wanted: set[int]) -> objects_pb2.DescribeObjectsResponse:
        return objects_pb2.DescribeObjectsResponse(
            objects=[_description(item) for item in self._listed if item.object_id in wanted]
        )

    # ---- what was asked for ----

    def facts(self, request: objects_pb2.CommitStreamObjectRequest) -> dict[str, Any]:
        """Return a commit, and the object that it names, in the words of the scenarios."""
        operations = [
            objects_pb2.SourceOperation.Name(operation).removeprefix("SOURCE_OPERATION_")
            for operation in request.operations
        ]
        facts: dict[str, Any] = {
            **{
                name: getattr(request, field) if request.HasField(field) else -1
                for name, field in _SPAN
            },
            "size": request.object_size,
            "object_size": request.object_size,
            "sources": list(request.source_object_ids),
            "operations": operations or ["DELETE"] * len(request.source_object_ids),
        }
        if request.HasField("object_id"):
            facts |= self._object_facts(request)
        return facts

    def _object_facts(self, request: objects_pb2.CommitStreamObjectRequest) -> dict[str, Any]:
        attributes = object_key.decode_attributes(request.attributes)
        data = self._bytes(request.object_id)
        entries, holders = self._entries(request.object_id, attributes.kind, data)
        records = [
            read_entry(entry, self._block(holder, entry), str(holder))
            for entry, holder in zip(entries, holders, strict=True)
        ]
        facts = {
            "type": attributes.kind.name.lower(),
            "bucket": attributes.bucket_id,
            "index_entries": len(entries),
            "block_offsets": [[batch.base_offset for batch in held] for held in records],
            "last_record_end_offset": records[-1][-1].end_offset,
            "stored_size": len(data),
            "index": [_entry_facts(entry) for entry in entries],
        }
        if attributes.kind is object_key.ObjectKind.COMPOSITE:
            facts["logical_size"] = request.object_size
            facts["linked_objects"] = _linked(data)
        return facts

    def _entries(
        self, object_id: int, kind: object_key.ObjectKind, data: bytes
    ) -> tuple[list[IndexEntry], list[int]]:
        """Return the index of an object, and for each entry the object that has its bytes."""
        if kind is object_key.ObjectKind.COMPOSITE:
            composite = decode_composite(data, source=str(object_id))
            held = [(entry, link.object_id) for link in composite.links for entry in link.entries]
            return [entry for entry, _ in held], [holder for _, holder in held]
        index = opened(data, str(object_id)).index
        return list(index), [object_id] * len(index)

    def _block(self, object_id: int, entry: IndexEntry) -> memoryview:
        return memoryview(self._bytes(object_id))[entry.position : entry.position + entry.size]

    def _bytes(self, object_id: int) -> bytes:
        return self.store.objects()[object_key.key_for(object_id, NAMESPACE)]


def _entry_facts(one: IndexEntry) -> dict[str, int]:
    span = {"start": one.start_offset, "end": one.end_offset}
    return {**span, "records": one.record_count, "position": one.position, "size": one.size}


def _linked(data: bytes) -> list[dict[str, int]]:
    composite = decode_composite(data)
    bounds = [*composite.first_ordinals, len(composite.index)]
    return [
        {"object": link.object_id, "first_index": first, "end_index": end}
        for link, first, end in zip(composite.links, bounds, bounds[1:], strict=False)
    ]


def _description(one: StreamObject) -> objects_pb2.ObjectDescription:
    kind = object_key.ObjectKind.COMPOSITE if one.composite else object_key.ObjectKind.NORMAL
    return objects_pb2.ObjectDescription(
        object_id=one.object_id,
        state=common_pb2.OBJECT_STATE_COMMITTED,
        kind=common_pb2.OBJECT_KIND_COMPOSITE if one.composite else common_pb2.OBJECT_KIND_STREAM,
        object_size=one.size,
        attributes=object_key.encode_attributes(object_key.ObjectAttributes(kind, one.bucket_id)),
    )


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
            made[facts.object_id] = _composite(facts, [made[link] for link in links])
        else:
            made[facts.object_id] = _normal(facts, stream_id, index)
        _refuse_unknown(one)
    _refuse_unknown(args)
    return stream_id, made


def _facts(args: Args, place: int) -> StreamObject:
    kind = args.take("type", "normal")
    if kind not in ("normal", "composite"):
        raise ValueError(f"type of an object is {kind!r}, expected normal or composite")
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
    found = [_entry_facts(entry) for entry in built.entries]
    if found != list(index) or built.size != facts.size:
        raise ValueError(
            f"object {facts.object_id} has {built.size} bytes and the index {found}, not"
            f" {facts.size} and {list(index)}"
        )
    return PreparedObject(facts, built.data, built.entries)


def _records(stream_id: int, entry: Mapping[str, int]) -> Iterator[record.RecordBatch]:
    """Yield the records of a block: equal spans and payloads, the last takes what is left over."""
    count, at = entry["records"], entry["start"]
    span = (entry["end"] - at) // count
    payload = entry["size"] - record.BLOCK_HEADER_SIZE - count * record.RECORD_HEADER_SIZE
    for ordinal in range(count):
        is_last = ordinal == count - 1
        covers = entry["end"] - at if is_last else span
        size = payload - (count - 1) * (payload // count) if is_last else payload // count
        fill = (at * 31 + stream_id) % 251
        yield record.RecordBatch(stream_id, 0, at, covers, bytes([fill]) * size)
        at += covers


def _composite(facts: StreamObject, linked: Sequence[PreparedObject]) -> PreparedObject:
    links = tuple(
        LinkedObject(item.facts.object_id, item.facts.bucket_id, item.entries) for item in linked
    )
    entries = tuple(entry for link in links for entry in link.entries)
    return PreparedObject(facts, encode_composite(links), entries, links)


def _refuse_unknown(args: Args) -> None:
    unknown = [mismatch.field for mismatch in args.unknown()]
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
