"""One stream, its objects in a bucket in memory, and a stand-in for the controllers.

The stand-in lists the stream's objects, issues ids, and writes down the commits it is asked for; it
judges none of them. Knows nothing of scenarios.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor
from streammeta.client.controller_client import ControllerClient
from streammeta.client.model import NodeIdentity
from streammeta.storage.bucket_marker import BucketMarker, create_marker
from streammeta.storage.compaction.stream_objects import StreamCompaction, StreamObject
from streammeta.storage.object_format.composite import decode_composite
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_key import (
    ObjectAttributes,
    ObjectKind,
    decode_attributes,
    encode_attributes,
    key_for,
)
from streammeta.storage.object_format.object_reader import read_entry
from streammeta.v1 import admin_pb2, common_pb2, objects_pb2, streams_pb2
from tests.conformance.stream_object_inputs import PreparedObject
from tests.fake_bucket import FAKE_UUID
from tests.kit.built_objects import opened
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
        self.store = MemoryObjectStore()
        create_marker(self.store, _MARKER)
        for object_id, one in objects.items():
            self.store.put(key_for(object_id, NAMESPACE), one.data)
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
        """Say whose bucket it is."""
        return admin_pb2.DescribeClusterResponse(
            cluster_id=_MARKER.cluster_id,
            cluster_uuid=_MARKER.cluster_uuid,
            object_namespace=NAMESPACE,
        )

    async def call(self, method: Any, request: Any, _deadline: float | None = None) -> Any:
        """Answer one call."""
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
                    object_id=one.object_id,
                    start_offset=one.start_offset,
                    end_offset=one.end_offset,
                )
                for one in self._listed
            ],
        )
        return streams_pb2.DescribeStreamsResponse(streams=[described], total=1)

    def _describe_objects(self, wanted: set[int]) -> objects_pb2.DescribeObjectsResponse:
        return objects_pb2.DescribeObjectsResponse(
            objects=[_description(one) for one in self._listed if one.object_id in wanted]
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
        attributes = decode_attributes(request.attributes)
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
            "block_offsets": [[one.base_offset for one in held] for held in records],
            "last_record_end_offset": records[-1][-1].end_offset,
            "stored_size": len(data),
            "index": [
                {
                    "start": one.start_offset,
                    "end": one.end_offset,
                    "records": one.record_count,
                    "position": one.position,
                    "size": one.size,
                }
                for one in entries
            ],
        }
        if attributes.kind is ObjectKind.COMPOSITE:
            facts["logical_size"] = request.object_size
            facts["linked_objects"] = _linked(data)
        return facts

    def _entries(
        self, object_id: int, kind: ObjectKind, data: bytes
    ) -> tuple[list[IndexEntry], list[int]]:
        """Return the index of an object, and for each entry the object that has its bytes."""
        if kind is ObjectKind.COMPOSITE:
            composite = decode_composite(data, source=str(object_id))
            held = [(one, link.object_id) for link in composite.links for one in link.entries]
            return [entry for entry, _ in held], [holder for _, holder in held]
        index = opened(data, str(object_id)).index
        return list(index), [object_id] * len(index)

    def _block(self, object_id: int, entry: IndexEntry) -> memoryview:
        return memoryview(self._bytes(object_id))[entry.position : entry.position + entry.size]

    def _bytes(self, object_id: int) -> bytes:
        return self.store.objects()[key_for(object_id, NAMESPACE)]


def _linked(data: bytes) -> list[dict[str, int]]:
    composite = decode_composite(data)
    bounds = [*composite.first_ordinals, len(composite.index)]
    return [
        {"object": link.object_id, "first_index": first, "end_index": end}
        for link, first, end in zip(composite.links, bounds, bounds[1:], strict=False)
    ]


def _description(one: StreamObject) -> objects_pb2.ObjectDescription:
    kind = ObjectKind.COMPOSITE if one.composite else ObjectKind.NORMAL
    return objects_pb2.ObjectDescription(
        object_id=one.object_id,
        state=common_pb2.OBJECT_STATE_COMMITTED,
        kind=common_pb2.OBJECT_KIND_COMPOSITE if one.composite else common_pb2.OBJECT_KIND_STREAM,
        object_size=one.size,
        attributes=encode_attributes(ObjectAttributes(kind, one.bucket_id)),
    )
