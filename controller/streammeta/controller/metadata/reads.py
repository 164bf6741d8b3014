"""Answers to reads. Nothing here changes the map.

Listings look at columns in id order from the page's token on, and at no more than a page needs.
"""

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.answers import (
    CheckObjectsAnswer,
    DescribeObjectsAnswer,
    DescribeStreamsAnswer,
    GetNodesAnswer,
    GetObjectsAnswer,
    ListStreamSetObjectsAnswer,
    NodeDescription,
    ObjectDescription,
    ObjectList,
    ObjectSlices,
    OpeningStream,
    PendingUpload,
    StreamDescription,
    StreamObjectRange,
    StreamRange,
    StreamSetObject,
)
from streammeta.controller.metadata.maintenance import BucketClaim
from streammeta.controller.metadata.nodes import Node, Nodes
from streammeta.controller.metadata.object_facts import UNKNOWN
from streammeta.controller.metadata.objects import Objects
from streammeta.controller.metadata.requests import (
    CheckObjects,
    DescribeObjects,
    DescribeStreams,
    GetNodes,
    GetObjects,
    ListStreamSetObjects,
    ObjectQuery,
)
from streammeta.controller.metadata.stream_ranges import StreamSpans
from streammeta.controller.metadata.streams import DELETED, Streams
from streammeta.controller.metadata.values import (
    Int64Column,
    ObjectKind,
    ObjectState,
    PageRequest,
    RangeColumns,
    StreamState,
    column,
    first_id,
    page_of_ids,
    page_of_rows,
    page_size,
    token_of,
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


_RANGE_CELLS = ("range_index", "epoch", "start_offset", "end_offset", "node_id")


class StreamReads:
    """Describes streams and lists what a node has open or owes."""

    def __init__(self, streams: Streams, objects: Objects) -> None:
        self._streams = streams
        self._objects = objects

    # ---- descriptions ----

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
        pending = self._pending_of(column(found))
        described = tuple(
            self._describe_stream(stream_id, request, tuple(pending.get(stream_id, ())))
            for stream_id in found
        )
        return DescribeStreamsAnswer(
            streams=described, next_page_token=token, total=self._streams.live_count()
        )

    def _page_of_streams(self, page: PageRequest, owner: int | None) -> tuple[list[int], str]:
        def wanted(rows: slice) -> npt.NDArray[np.bool_]:
            live: npt.NDArray[np.bool_] = self._streams["state"][rows] != DELETED
            return live if owner is None else live & (self._streams["node_id"][rows] == owner)

        rows, after = page_of_rows(first_id(page), len(self._streams), page_size(page), wanted)
        return rows.tolist(), token_of(after)

    def _pending_of(self, stream_id: Int64Column) -> dict[int, list[PendingUpload]]:
        """Return what is owed of these streams, by start offset."""
        found: dict[int, list[PendingUpload]] = {}
        for node_id, _ in self._streams.pending.in_order():
            spans = self._streams.active_uploads(node_id).of_streams(stream_id)
            for cells in spans.rows():
                found.setdefault(cells[0], []).append(PendingUpload(node_id, *cells))
        for uploads in found.values():
            uploads.sort(key=lambda upload: upload.start_offset)
        return found

    def _describe_stream(
        self, stream_id: int, request: DescribeStreams, pending: tuple[PendingUpload, ...]
    ) -> StreamDescription:
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
            pending_uploads=pending,
            lost=self._streams.lost.of_stream(stream_id),
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
            StreamRange(*(past.cell(name, row) for name in _RANGE_CELLS))
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

    # ---- what a node has open or owes ----

    def opening_streams(
        self, node_id: int, page: PageRequest
    ) -> tuple[ErrorCode, tuple[OpeningStream, ...], str]:
        """Return one page of the streams open on the node and of the uploads it owes.

        STREAM_INNER_ERROR, and nothing listed, if an upload is of no range of the node, or of a
        stream it has open.
        """
        first, size = first_id(page), page_size(page)
        opened, after = self._open_on(node_id, first, size)
        owed = self._streams.active_uploads(node_id)
        if not len(owed):
            return ErrorCode.NONE, self._open_streams(opened), token_of(after)
        owed = owed.take(owed.stream_id >= first)
        epochs = self._epochs_owed_under(node_id, owed)
        ids = np.concatenate((opened, owed.stream_id))
        if epochs is None:
            return ErrorCode.STREAM_INNER_ERROR, (), ""
        # The page ends where `size` streams of both kinds are on it.
        listed = np.sort(ids if after < 0 else np.append(ids, after))
        end = int(listed[size]) if len(listed) > size else -1
        if end >= 0:
            opened, chosen = opened[opened < end], owed.stream_id < end
            owed, epochs = owed.take(chosen), epochs[chosen]
        streams = (*self._open_streams(opened), *self._owed_streams(owed, epochs))
        by_id = tuple(sorted(streams, key=lambda stream: stream.stream_id))
        return ErrorCode.NONE, by_id, token_of(end)

    def _open_on(self, node_id: int, first: int, size: int) -> tuple[Int64Column, int]:
        streams = self._streams
        if not streams.open_counts.get(node_id):
            return np.zeros(0, dtype=np.int64), -1

        def wanted(rows: slice) -> npt.NDArray[np.bool_]:
            opened: npt.NDArray[np.bool_] = streams["state"][rows] == StreamState.OPENED
            owned: npt.NDArray[np.bool_] = streams["node_id"][rows] == node_id
            return opened & owned

        return page_of_rows(first, len(streams), size, wanted)

    def _open_streams(self, rows: Int64Column) -> tuple[OpeningStream, ...]:
        names = ("epoch", "start_offset", "end_offset")
        columns = (rows.tolist(), *(self._streams[name][rows].tolist() for name in names))
        return tuple(OpeningStream(*cells) for cells in zip(*columns, strict=True))

    def _epochs_owed_under(self, node_id: int, owed: StreamSpans) -> Int64Column | None:
        """Return the epoch of the node's range that holds each upload.

        None if one has no such range or several: then it can't be told whose data it is.
        """
        streams, past, at = self._streams, self._streams.past, owed.stream_id
        found = (
            (streams["node_id"][at] == node_id)
            & (streams["range_start"][at] <= owed.start_offset)
            & (streams["end_offset"][at] == owed.end_offset)
        )
        epochs = np.where(found, streams["epoch"][at], -1)
        count = found.astype(np.int64)
        heads = streams["past_head"][at].copy()
        while np.count_nonzero(heads):
            on = np.flatnonzero(heads)
            rows = heads[on] - 1
            cells = {name: past.cells(name, rows) for name in _RANGE_CELLS}
            holds = (
                (cells["node_id"] == node_id)
                & (cells["start_offset"] <= owed.start_offset[on])
                & (cells["end_offset"] == owed.end_offset[on])
            )
            epochs[on[holds]] = cells["epoch"][holds]
            count[on] += holds
            heads[on] = past.cells("previous", rows)
        opened = (streams["state"][at] == StreamState.OPENED) & (streams["node_id"][at] == node_id)
        return epochs if np.count_nonzero((count == 1) & ~opened) == len(count) else None

    def _owed_streams(self, owed: StreamSpans, epochs: Int64Column) -> tuple[OpeningStream, ...]:
        low = self._streams["start_offset"][owed.stream_id]
        columns = (owed.stream_id, epochs, low, owed.start_offset, owed.end_offset)
        cells = zip(*(values.tolist() for values in columns), strict=True)
        return tuple(OpeningStream(*cell) for cell in cells)
