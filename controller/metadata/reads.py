"""Answers to reads that need more than one subject. Nothing here changes the map.

Listings look at columns in id order from the page's token on, and at no more than a page needs.
"""

import numpy as np
import numpy.typing as npt

from controller.errors import ErrorCode
from controller.metadata.answers import (
    CheckObjectsAnswer,
    DescribeObjectsAnswer,
    DescribeStreamsAnswer,
    GetNodesAnswer,
    GetObjectsAnswer,
    NodeDescription,
    ObjectDescription,
    ObjectList,
    ObjectSlice,
    OpeningStream,
    StreamDescription,
    StreamObjectRange,
    StreamRange,
    StreamSetObject,
)
from controller.metadata.nodes import Node, Nodes
from controller.metadata.objects import Objects
from controller.metadata.paging import first_id, page_of_ids, page_of_rows, page_size
from controller.metadata.requests import (
    CheckObjects,
    DescribeObjects,
    DescribeStreams,
    GetNodes,
    GetObjects,
    ObjectQuery,
)
from controller.metadata.streams import DELETED, Streams
from controller.metadata.values import (
    ObjectKind,
    ObjectState,
    PageRequest,
    RangeColumns,
    StreamState,
    column,
)

OBJECTS_LIMIT_DEFAULT = 1_000
"""Objects a query returns when it names no limit."""


class Reads:
    """Reads over all subjects."""

    def __init__(self, streams: Streams, objects: Objects, nodes: Nodes) -> None:
        self._streams = streams
        self._objects = objects
        self._nodes = nodes

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
        ids, starts, ends = self._objects.ranges.rows_from(
            stream_id, query.start_offset, query.end_offset, query.limit or OBJECTS_LIMIT_DEFAULT
        )
        rows = self._objects.rows(ids)
        columns = (
            ids,
            self._objects["kind"][rows],
            starts,
            ends,
            self._objects["object_size"][rows],
            self._objects["attributes"][rows],
        )
        slices = tuple(
            ObjectSlice(object_id, ObjectKind(kind), start, end, size, attributes)
            for object_id, kind, start, end, size, attributes in zip(
                *(values.tolist() for values in columns), strict=True
            )
        )
        return ObjectList(
            error=ErrorCode.NONE,
            objects=slices,
            stream_start_offset=low,
            stream_end_offset=high,
        )

    # ---- streams ----

    def describe_streams(self, request: DescribeStreams) -> DescribeStreamsAnswer:
        """Return one page of streams."""
        owner = request.owner_node_id
        if request.stream_ids:
            ids, token = page_of_ids(request.stream_ids, request.page)
            found = [
                stream_id
                for stream_id in ids
                if self._streams.exists(stream_id)
                and owner in (None, int(self._streams["node_id"][stream_id]))
            ]
        else:
            found, token = self._page_of_streams(request.page, owner)
        described = tuple(self._describe_stream(stream_id, request) for stream_id in found)
        return DescribeStreamsAnswer(
            streams=described, next_page_token=token, total=self._streams.live_count()
        )

    def _page_of_streams(self, page: PageRequest, owner: int | None) -> tuple[list[int], str]:
        def wanted(rows: slice) -> npt.NDArray[np.bool_]:
            live: npt.NDArray[np.bool_] = self._streams["state"][rows] != DELETED
            return live if owner is None else live & (self._streams["node_id"][rows] == owner)

        rows, after = page_of_rows(first_id(page), len(self._streams), page_size(page), wanted)
        return rows.tolist(), _token(after)

    def _describe_stream(self, stream_id: int, request: DescribeStreams) -> StreamDescription:
        cell = {
            name: int(self._streams[name][stream_id])
            for name in ("epoch", "range_index", "start_offset", "end_offset", "state", "node_id")
        }
        return StreamDescription(
            stream_id=stream_id,
            epoch=cell["epoch"],
            range_index=cell["range_index"],
            start_offset=cell["start_offset"],
            end_offset=cell["end_offset"],
            state=StreamState(cell["state"]),
            node_id=cell["node_id"],
            tags=self._streams.tags(stream_id),
            ranges=self._ranges(stream_id) if request.include_ranges else (),
            stream_objects=(
                self._stream_objects(stream_id) if request.include_stream_objects else ()
            ),
        )

    def _ranges(self, stream_id: int) -> tuple[StreamRange, ...]:
        streams, past = self._streams, self._streams.past
        if streams["range_index"][stream_id] < 0:
            return ()
        current = StreamRange(
            range_index=int(streams["range_index"][stream_id]),
            epoch=int(streams["epoch"][stream_id]),
            start_offset=int(streams["range_start"][stream_id]),
            end_offset=int(streams["end_offset"][stream_id]),
            node_id=int(streams["node_id"][stream_id]),
        )
        ended = [
            StreamRange(
                *(
                    past.cell(name, row)
                    for name in ("range_index", "epoch", "start_offset", "end_offset", "node_id")
                )
            )
            for row in past.chain(int(streams["past_head"][stream_id]))
        ]
        return (*reversed(ended), current)

    def _stream_objects(self, stream_id: int) -> tuple[StreamObjectRange, ...]:
        rows = self._objects.stream_object_rows(stream_id)
        _, starts, ends = self._objects.ranges.columns(rows)
        ids = self._objects.ranges.object_ids(rows)
        return tuple(
            StreamObjectRange(object_id, start, end)
            for object_id, start, end in zip(
                ids.tolist(), starts.tolist(), ends.tolist(), strict=True
            )
        )

    def opening_streams(
        self, node_id: int, page: PageRequest
    ) -> tuple[tuple[OpeningStream, ...], str]:
        """Return one page of the open streams whose current range is on the node."""
        streams = self._streams

        def wanted(rows: slice) -> npt.NDArray[np.bool_]:
            opened: npt.NDArray[np.bool_] = streams["state"][rows] == StreamState.OPENED
            owned: npt.NDArray[np.bool_] = streams["node_id"][rows] == node_id
            return opened & owned

        rows, after = page_of_rows(first_id(page), len(streams), page_size(page), wanted)
        names = ("epoch", "start_offset", "end_offset")
        columns = (rows.tolist(), *(streams[name][rows].tolist() for name in names))
        opening = tuple(OpeningStream(*cells) for cells in zip(*columns, strict=True))
        return opening, _token(after)

    # ---- objects ----

    def describe_objects(self, request: DescribeObjects) -> DescribeObjectsAnswer:
        """Return one page of objects."""
        if request.object_ids:
            ids, token = page_of_ids(request.object_ids, request.page)
            rows = self._objects.rows(column(ids))
            found = rows[rows >= 0]
        else:
            found, token = self._page_of_objects(request.page)
        return DescribeObjectsAnswer(
            objects=tuple(self._describe_object(row) for row in found.tolist()),
            next_page_token=token,
            total=len(self._objects),
        )

    def _page_of_objects(self, page: PageRequest) -> tuple[npt.NDArray[np.int64], str]:
        ids = self._objects["object_id"]

        def wanted(rows: slice) -> npt.NDArray[np.bool_]:
            present: npt.NDArray[np.bool_] = self._objects["state"][rows] != ObjectState.REMOVED
            return present

        first_row = int(ids.searchsorted(first_id(page)))
        rows, after = page_of_rows(first_row, len(ids), page_size(page), wanted)
        return rows, _token(int(ids[after]) if after >= 0 else -1)

    def _describe_object(self, row: int) -> ObjectDescription:
        objects = self._objects
        first, count = int(objects["first_range"][row]), int(objects["range_count"][row])
        streams, starts, ends = objects.ranges.columns(slice(first, first + count))
        kind = ObjectKind(int(objects["kind"][row]))
        one_stream = kind is ObjectKind.STREAM and count == 1
        return ObjectDescription(
            object_id=int(objects["object_id"][row]),
            state=ObjectState(int(objects["state"][row])),
            kind=kind,
            object_size=int(objects["object_size"][row]),
            timestamp_ms=int(objects["timestamp_ms"][row]),
            attributes=int(objects["attributes"][row]),
            node_id=int(objects["node_id"][row]),
            stream_id=int(streams[0]) if one_stream else -1,
            ranges=RangeColumns(stream_id=streams, start_offset=starts, end_offset=ends),
        )

    def check_objects(self, request: CheckObjects) -> CheckObjectsAnswer:
        """Return the states of ids."""
        states = self._objects.states(column(request.object_ids))
        return CheckObjectsAnswer(
            states=tuple(ObjectState(state) for state in states.tolist()),
            next_object_id=self._objects.next_object_id,
        )

    # ---- nodes ----

    def get_nodes(self, request: GetNodes) -> GetNodesAnswer:
        """Return nodes with what they own."""
        if request.node_ids:
            asked = [self._nodes.get(node_id) for node_id in sorted(set(request.node_ids))]
            nodes = [node for node in asked if node is not None]
        else:
            nodes = self._nodes.in_order()
        opened = self._streams["state"] == StreamState.OPENED
        owners = set(np.unique(self._streams["node_id"][opened]).tolist())
        return GetNodesAnswer(
            nodes=tuple(
                self._describe_node(
                    node,
                    has_opening_streams=node.node_id in owners,
                    with_objects=request.include_stream_set_objects,
                )
                for node in nodes
            )
        )

    def _describe_node(
        self, node: Node, *, has_opening_streams: bool, with_objects: bool
    ) -> NodeDescription:
        objects = self._objects
        held = (
            (objects["kind"] == ObjectKind.STREAM_SET)
            & (objects["state"] == ObjectState.COMMITTED)
            & (objects["node_id"] == node.node_id)
        )
        return NodeDescription(
            node_id=node.node_id,
            node_epoch=node.node_epoch,
            failover=node.failover,
            wal_config=node.wal_config,
            tags=node.tags,
            has_opening_streams=has_opening_streams,
            stream_set_object_count=int(np.count_nonzero(held)),
            stream_set_objects=self._set_objects(np.flatnonzero(held)) if with_objects else (),
        )

    def _set_objects(self, rows: npt.NDArray[np.int64]) -> tuple[StreamSetObject, ...]:
        objects = self._objects
        rows = rows[np.lexsort((objects["object_id"][rows], objects["order_id"][rows]))]
        names = ("object_id", "order_id", "timestamp_ms", "object_size", "range_count")
        columns = (objects[name][rows].tolist() for name in names)
        return tuple(
            StreamSetObject(
                object_id=object_id,
                order_id=order_id,
                data_time_ms=data_time_ms,
                object_size=object_size,
                range_count=range_count,
            )
            for object_id, order_id, data_time_ms, object_size, range_count in zip(
                *columns, strict=True
            )
        )


def _token(next_id: int) -> str:
    return str(next_id) if next_id >= 0 else ""
