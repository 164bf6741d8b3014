"""What the map says of a node's set objects: which there are, what they hold, what of it is live.

Owns the calls and their pages. Answers are as of different moments: what has changed in between is
found when a compaction is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streammeta.client import methods
from streammeta.client.compaction.target import CompactionTarget
from streammeta.client.controller_client import ControllerClient
from streammeta.client.errors import refusal
from streammeta.storage.compaction.entries import Column
from streammeta.storage.compaction.selection import SetObjects
from streammeta.v1 import common_pb2, nodes_pb2, objects_pb2

_PAGE_SIZE = 10_000
_STREAMS_PER_CALL = 10_000
_IDS_PER_CALL = 10_000
_OBJECTS_PER_CALL = 20
"""Each may have 20000 ranges, and an answer has to fit a message."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeListing:
    """A node's committed set objects; of those that have them time bounds, in ms, and CRC-32C."""

    objects: SetObjects
    time_bounds: Mapping[int, tuple[int, int]]
    checksums: Mapping[int, int]


class NodeMap:
    """Asks the controllers of one cluster."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client

    async def set_objects(self, target: CompactionTarget) -> NodeListing:
        """List the committed set objects of a node. Raises what bars the node."""
        rows: list[tuple[int, int, int, int, int]] = []
        bounds: dict[int, tuple[int, int]] = {}
        checksums: dict[int, int] = {}
        token = ""
        while True:
            page = common_pb2.PageRequest(page_size=_PAGE_SIZE, page_token=token)
            request = nodes_pb2.ListStreamSetObjectsRequest(node_id=target.node_id, page=page)
            answer = await self._client.call(methods.LIST_STREAM_SET_OBJECTS, request)
            if answer.error != common_pb2.ERROR_CODE_NONE:
                raise refusal(answer.error, f"listing the set objects of node {target.node_id}")
            rows.extend(
                (one.object_id, one.order_id, one.data_time_ms, one.object_size, one.range_count)
                for one in answer.objects
            )
            for one in answer.objects:
                if one.HasField("max_timestamp_ms"):
                    bounds[one.object_id] = (one.min_timestamp_ms, one.max_timestamp_ms)
                if one.HasField("crc32c"):
                    checksums[one.object_id] = one.crc32c
            token = answer.next_page_token
            if not token:
                return NodeListing(SetObjects.of_rows(rows), bounds, checksums)

    async def stream_starts(self, stream_ids: Sequence[int]) -> dict[int, int]:
        """Return the first readable offset of each of these streams that there is."""
        starts: dict[int, int] = {}
        for at in range(0, len(stream_ids), _STREAMS_PER_CALL):
            some = stream_ids[at : at + _STREAMS_PER_CALL]
            async for one in self._client.describe_streams(some):
                starts[one.stream_id] = one.start_offset
        return starts

    async def ranges(self, object_ids: Sequence[int]) -> dict[int, Column]:
        """Return what the map has of these objects: a row of stream, start and end a range.

        One that is not committed any more is left out.
        """
        found: dict[int, Column] = {}
        for at in range(0, len(object_ids), _OBJECTS_PER_CALL):
            request = objects_pb2.DescribeObjectsRequest(
                object_ids=object_ids[at : at + _OBJECTS_PER_CALL],
                page=common_pb2.PageRequest(page_size=_PAGE_SIZE),
            )
            answer = await self._client.call(methods.DESCRIBE_OBJECTS, request)
            for one in answer.objects:
                if one.state == common_pb2.OBJECT_STATE_COMMITTED:
                    columns = (
                        *(one.ranges.stream_id, one.ranges.start_offset),
                        one.ranges.end_offset,
                    )
                    found[one.object_id] = np.array(columns, dtype=np.int64).T
        return found

    async def prepare(self, writer: common_pb2.NodeIdentity, count: int, ttl_ms: int) -> list[int]:
        """Prepare object ids for outputs, in the name of the process that writes them."""
        ids: list[int] = []
        while len(ids) < count:
            some = min(_IDS_PER_CALL, count - len(ids))
            request = objects_pb2.PrepareObjectsRequest(node=writer, count=some, ttl_ms=ttl_ms)
            answer = await self._client.call(methods.PREPARE_OBJECTS, request)
            if answer.error != common_pb2.ERROR_CODE_NONE:
                raise refusal(
                    answer.error,
                    f"preparing {some} objects for node {writer.node_id} at epoch"
                    f" {writer.node_epoch}",
                )
            ids.extend(range(answer.first_object_id, answer.first_object_id + some))
        return ids
