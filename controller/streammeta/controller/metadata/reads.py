"""Answers to reads that need more than one subject. Nothing here changes the map.

Listings look at columns in id order from the page's token on, and at no more than a page needs.
"""

import numpy as np

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.answers import (
    CheckObjectsAnswer,
    DescribeObjectsAnswer,
    GetNodesAnswer,
    GetObjectsAnswer,
    ListStreamSetObjectsAnswer,
    NodeDescription,
    ObjectDescription,
    ObjectList,
    ObjectSlices,
    StreamSetObject,
)
from streammeta.controller.metadata.bucket_claim import BucketClaim
from streammeta.controller.metadata.nodes import Node, Nodes
from streammeta.controller.metadata.object_facts import UNKNOWN
from streammeta.controller.metadata.objects import Objects
from streammeta.controller.metadata.paging import first_id, page_of_ids, page_size, token_of
from streammeta.controller.metadata.requests import (
    CheckObjects,
    DescribeObjects,
    GetNodes,
    GetObjects,
    ListStreamSetObjects,
    ObjectQuery,
)
from streammeta.controller.metadata.streams import Streams
from streammeta.controller.metadata.values import (
    Int64Column,
    ObjectKind,
    ObjectState,
    RangeColumns,
    column,
)

OBJECTS_LIMIT_DEFAULT = 1_000
"""Objects a query returns when it names no limit."""

_SET_OBJECT_COLUMNS = ("object_id", "order_id", "data_time_ms", "object_size", "range_count")


class Reads:
    """Reads over all subjects."""

    def __init__(
        self, streams: Streams, objects: Objects, nodes: Nodes, bucket_claim: BucketClaim
    ) -> None:
        self._streams = streams
        self._objects = objects
        self._nodes = nodes
        self._bucket_claim = bucket_claim

    # ---- which objects hold a range ----

    def get_objects(self, request: GetObjects) -> GetObjectsAnswer:
        """Return what holds each queried range."""
        return GetObjectsAnswer(results=tuple(self._slices(query) for query in request.queries))

    def _slices(self, query: ObjectQuery) -> ObjectList:
        stream_id = query.stream_id
        if not self._streams.exists(stream_id):
            return ObjectList(error=ErrorCode.STREAM_NOT_EXIST)
        low = int(self._streams["start_offset"][stream_id])
        high = int(self._streams["end_offset"][stream_id])
        if query.start_offset < low:
            error = ErrorCode.OFFSET_NOT_MATCHED
            return ObjectList(error=error, stream_start_offset=low, stream_end_offset=high)
        lost_end = self._streams.lost.end_at(stream_id, query.start_offset)
        if lost_end >= 0:
            return ObjectList(
                error=ErrorCode.NONE,
                stream_start_offset=low,
                stream_end_offset=high,
                lost_end_offset=lost_end,
            )
        ids, starts, ends = self._objects.ranges.rows_from(
            stream_id, query.start_offset, query.end_offset, query.limit or OBJECTS_LIMIT_DEFAULT
        )
        rows = self._objects.rows(ids)
        facts = self._objects.facts.of(rows)
        slices = ObjectSlices(
            ids,
            self._objects["kind"][rows],
            starts,
            ends,
            self._objects["object_size"][rows],
            self._objects["attributes"][rows],
            facts.min_timestamp_ms,
            facts.max_timestamp_ms,
            facts.crc32c,
        )
        return ObjectList(
            error=ErrorCode.NONE,
            objects=slices,
            stream_start_offset=low,
            stream_end_offset=high,
        )

    # ---- objects ----

    def describe_objects(self, request: DescribeObjects) -> DescribeObjectsAnswer:
        """Return one page of objects."""
        if request.object_ids:
            ids, token = page_of_ids(request.object_ids, request.page)
            rows = self._objects.rows(column(ids))
            found = rows[rows >= 0]
        else:
            found, after = self._objects.page_rows(first_id(request.page), page_size(request.page))
            token = token_of(after)
        return DescribeObjectsAnswer(
            objects=tuple(self._describe_object(row) for row in found.tolist()),
            next_page_token=token,
            total=len(self._objects),
        )

    def _describe_object(self, row: int) -> ObjectDescription:
        objects = self._objects
        streams, starts, ends = objects.ranges.columns(objects.range_rows_of(row))
        kind, state = ObjectKind(int(objects["kind"][row])), ObjectState(int(objects["state"][row]))
        one_stream = kind in (ObjectKind.STREAM, ObjectKind.COMPOSITE) and len(streams) == 1
        is_set = kind is ObjectKind.STREAM_SET
        facts = objects.facts.of_one(row)
        return ObjectDescription(
            object_id=int(objects["object_id"][row]),
            state=state,
            kind=kind,
            object_size=int(objects["object_size"][row]),
            timestamp_ms=int(objects["timestamp_ms"][row]),
            attributes=int(objects["attributes"][row]),
            node_id=int(objects["node_id"][row]),
            stream_id=int(streams[0]) if one_stream else -1,
            ranges=RangeColumns(stream_id=streams, start_offset=starts, end_offset=ends),
            composite_id=int(objects["order_id"][row]) if state is ObjectState.LINKED else -1,
            data_time_ms=int(objects["data_time_ms"][row]) if is_set else -1,
            min_timestamp_ms=facts[0],
            max_timestamp_ms=facts[1],
            crc32c=facts[2],
        )

    def check_objects(self, request: CheckObjects) -> CheckObjectsAnswer:
        """Return the states of ids."""
        states = self._objects.states(column(request.object_ids))
        return CheckObjectsAnswer(
            states=tuple(ObjectState(state) for state in states.tolist()),
            next_object_id=self._objects.next_object_id,
            cluster_uuid=self._bucket_claim.current.cluster_uuid,
            issued_below=self._bucket_claim.current.issued_below,
        )

    # ---- nodes ----

    def get_nodes(self, request: GetNodes) -> GetNodesAnswer:
        """Return nodes with what they own."""
        if request.node_ids:
            asked = [self._nodes.get(node_id) for node_id in sorted(set(request.node_ids))]
            nodes = [node for node in asked if node is not None]
        else:
            nodes = self._nodes.in_order()
        with_objects = request.include_stream_set_objects
        return GetNodesAnswer(
            nodes=tuple(self._describe_node(node, with_objects=with_objects) for node in nodes)
        )

    def _describe_node(self, node: Node, *, with_objects: bool) -> NodeDescription:
        return NodeDescription(
            node_id=node.node_id,
            node_epoch=node.node_epoch,
            failover=node.failover,
            wal_config=node.wal_config,
            tags=node.tags,
            has_opening_streams=self._streams.open_counts.get(node.node_id) > 0,
            stream_set_object_count=self._nodes.set_object_count(node.node_id),
            stream_set_objects=self._set_objects(node.node_id) if with_objects else (),
            locked=node.locked,
            pending_upload_count=len(self._streams.active_uploads(node.node_id)),
            recovered_by=node.recovered_by,
            departed=node.departed,
            supervised=node.supervised,
        )

    def _set_objects(self, node_id: int) -> tuple[StreamSetObject, ...]:
        """Return all set objects of a node, in its order."""
        ids = self._objects.set_objects_of(node_id, -1, self._nodes.set_object_count(node_id))
        rows = self._objects.rows(ids)
        order = np.lexsort((ids, self._objects["order_id"][rows]))
        return self._described_set_objects(rows[order])

    def _described_set_objects(self, rows: Int64Column) -> tuple[StreamSetObject, ...]:
        objects, facts = self._objects, self._objects.facts.of(rows)
        known = facts.min_timestamp_ms, facts.max_timestamp_ms, facts.crc32c
        unknown = np.full(len(rows), UNKNOWN)
        columns = (  # in the order of the fields
            *(objects[name][rows] for name in _SET_OBJECT_COLUMNS),
            *(values if len(values) else unknown for values in known),
        )
        return tuple(map(StreamSetObject, *(values.tolist() for values in columns)))

    def list_set_objects(self, request: ListStreamSetObjects) -> ListStreamSetObjectsAnswer:
        """Return one page of a node's set objects."""
        node_id, size = request.node_id, page_size(request.page)
        if self._nodes.get(node_id) is None:
            return ListStreamSetObjectsAnswer(error=ErrorCode.NODE_EPOCH_NOT_EXIST)
        ids = self._objects.set_objects_of(node_id, first_id(request.page) - 1, size + 1)
        return ListStreamSetObjectsAnswer(
            error=ErrorCode.NONE,
            objects=self._described_set_objects(self._objects.rows(ids[:size])),
            next_page_token=token_of(int(ids[size]) if len(ids) > size else -1),
            total=self._nodes.set_object_count(node_id),
        )
