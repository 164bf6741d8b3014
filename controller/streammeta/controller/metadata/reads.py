"""Answers to reads, which never change the metadata.

Listings examine columns in id order from the page's token on, and only as far as a page needs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from streammeta.controller.errors import ErrorCode
from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.api import answer_budget as budget
from streammeta.controller.metadata.api import answers, requests
from streammeta.controller.metadata.api import object_listings as listings
from streammeta.controller.metadata.api.object_slices import ObjectQuery, ObjectQueryColumns
from streammeta.controller.metadata.decisions.maintenance import BucketClaim
from streammeta.controller.metadata.registries.nodes import Node, Nodes
from streammeta.controller.metadata.registries.object_descriptions import ObjectDescriptions
from streammeta.controller.metadata.registries.stream_heads import Head
from streammeta.controller.metadata.registries.stream_ranges import StreamSpans
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables.values import (
    Int64Column,
    ObjectState,
    PageRequest,
    StreamState,
    column,
    first_id,
    page_of_ids,
    page_size,
    token_of,
)

OBJECTS_LIMIT_DEFAULT = 1_000
"""Number of objects returned by a query without a limit."""


@dataclass(eq=False)
class Reads:
    """Reads over all registries."""

    _streams: Streams
    _objects: ObjectDescriptions
    _nodes: Nodes
    _bucket_claim: BucketClaim

    # ---- objects with a range ----

    def get_objects(self, request: requests.GetObjects) -> answers.GetObjectsAnswer:
        """Return the objects that contain each queried range.

        Raises:
            LimitExceededError: the result exceeds one answer, and the answer may not stop.
        """
        asked = request.queries
        results: Sequence[answers.ObjectList]
        if isinstance(asked, ObjectQueryColumns):
            results = self._slices_of_each(asked)
        else:
            results, _ = budget.take_fitting(map(self._slices, asked), budget.object_list_bytes)
        if not request.may_stop:
            budget.require_all(len(results), len(asked), "queries", "set may_stop")
        return answers.GetObjectsAnswer(results=results)

    def _slices_of_each(self, asked: ObjectQueryColumns) -> answers.ObjectLists:
        """Answer many queries by vector operations, as many as fit."""
        error = np.full(len(asked), int(ErrorCode.STREAM_NOT_EXIST))
        low, high, lost_end = (np.full(len(asked), NONE_ID) for _ in range(3))

        known = self._streams.find_existing(asked.stream_id)
        low[known] = self._streams.start_offsets(asked.stream_id[known])
        high[known] = self._streams.end_offsets(asked.stream_id[known])

        # A query ends early below the stream's start, or in a lost range. Others read the index.
        is_below = asked.start_offset[known] < low[known]
        error[known] = np.where(is_below, ErrorCode.OFFSET_NOT_MATCHED, ErrorCode.NONE)
        visible = known[~is_below]
        lost_end[visible] = self._streams.lost_ends(
            asked.stream_id[visible], asked.start_offset[visible]
        )

        there = visible[lost_end[visible] == NONE_ID]
        which, rows = self._objects.range_rows_of_each(
            asked.take(there),
            np.where(asked.limit[there] == 0, OBJECTS_LIMIT_DEFAULT, asked.limit[there]),
            budget.SLICES_MAX,
        )

        counts = np.zeros_like(error)
        counts[there] = np.bincount(which, minlength=len(there))
        fit = budget.lists_that_fit(counts)
        bounds = np.append(0, np.cumsum(counts[:fit]))

        return answers.ObjectLists(
            error=error[:fit],
            stream_start_offset=low[:fit],
            stream_end_offset=high[:fit],
            lost_end_offset=lost_end[:fit],
            bounds=bounds,
            slices=self._objects.slices_in(rows[: bounds[-1]]),
        )

    def _slices(self, query: ObjectQuery) -> answers.ObjectList:
        stream_id = query.stream_id
        if not self._streams.exists(stream_id):
            return answers.ObjectList(error=ErrorCode.STREAM_NOT_EXIST)

        low, high = self._streams.offsets(stream_id)
        if query.start_offset < low:
            error = ErrorCode.OFFSET_NOT_MATCHED
            return answers.ObjectList(error=error, stream_start_offset=low, stream_end_offset=high)

        lost_end = self._streams.lost_end(stream_id, query.start_offset)
        if lost_end >= 0:
            return answers.ObjectList(
                error=ErrorCode.NONE,
                stream_start_offset=low,
                stream_end_offset=high,
                lost_end_offset=lost_end,
            )

        slices = self._objects.slices(
            stream_id, query.start_offset, query.end_offset, query.limit or OBJECTS_LIMIT_DEFAULT
        )
        return answers.ObjectList(
            error=ErrorCode.NONE,
            objects=slices,
            stream_start_offset=low,
            stream_end_offset=high,
        )

    # ---- objects ----

    def describe_objects(self, request: requests.DescribeObjects) -> answers.DescribeObjectsAnswer:
        """Return one page of objects."""
        if request.object_ids:
            ids, token = page_of_ids(request.object_ids, request.page)
            rows = self._objects.rows(column(ids))
            found = rows[rows >= 0]
        else:
            found, after = self._objects.page_rows(first_id(request.page), page_size(request.page))
            token = token_of(after)
        described = map(self._objects.describe, found.tolist())
        objects, following = budget.take_fitting(described, budget.object_bytes)
        return answers.DescribeObjectsAnswer(
            objects=objects,
            next_page_token=token if following is None else token_of(following.object_id),
            total=len(self._objects),
        )

    def check_objects(self, request: requests.CheckObjects) -> answers.CheckObjectsAnswer:
        """Return the states of ids, and the cluster's claim on the bucket."""
        states = self._objects.states(column(request.object_ids))
        return answers.CheckObjectsAnswer(
            states=tuple(ObjectState(state) for state in states.tolist()),
            next_object_id=self._objects.next_object_id,
            cluster_uuid=self._bucket_claim.current.cluster_uuid,
            issued_below=self._bucket_claim.current.issued_below,
        )

    # ---- nodes ----

    def get_nodes(self, request: requests.GetNodes) -> answers.GetNodesAnswer:
        """Return a page of nodes, or all nodes.

        Raises:
            LimitExceededError: all nodes, or a single one, exceed an answer.
        """
        nodes = self._nodes_from(request.node_ids, first_id(request.page or PageRequest()))
        size = len(nodes) if request.page is None else page_size(request.page)
        described = self._describe_nodes(nodes, with_objects=request.include_stream_set_objects)
        found, following = budget.page_of(described, size, budget.node_bytes)
        if request.page is None:
            budget.require_all(len(found), len(nodes), "node_ids", "set page")
        token = "" if following is None else token_of(following.node_id)
        return answers.GetNodesAnswer(nodes=found, next_page_token=token)

    def describe_nodes(self, node_ids: Sequence[int]) -> tuple[answers.NodeDescription, ...]:
        """Return these nodes, or all, without a limit. For callers in this process only."""
        return tuple(self._describe_nodes(self._nodes_from(node_ids, 0), with_objects=False))

    def _nodes_from(self, node_ids: Sequence[int], first: int) -> list[Node]:
        """Return these nodes, or all, from the id `first` on."""
        if node_ids:
            requested = sorted(node_id for node_id in set(node_ids) if node_id >= first)
            asked = (self._nodes.get(node_id) for node_id in requested)
            return [node for node in asked if node is not None]
        return [node for node in self._nodes.in_order() if node.node_id >= first]

    def _describe_nodes(
        self, nodes: Iterable[Node], *, with_objects: bool
    ) -> Iterator[answers.NodeDescription]:
        return (self._describe_node(node, with_objects=with_objects) for node in nodes)

    def _describe_node(self, node: Node, *, with_objects: bool) -> answers.NodeDescription:
        if with_objects:
            # Check the size first: describing very many objects would only fail later.
            held = self._nodes.stream_set_object_count(node.node_id)
            what = f"node {node.node_id} with its {held} stream set objects"
            size = budget.STREAM_SET_OBJECT_BYTES * held
            budget.require_sendable(size, "include_stream_set_objects", what)

        return answers.NodeDescription(
            node_id=node.node_id,
            node_epoch=node.node_epoch,
            failover=node.failover,
            wal_config=node.wal_config,
            tags=node.tags,
            has_opening_streams=self._streams.open_count(node.node_id) > 0,
            stream_set_object_count=self._nodes.stream_set_object_count(node.node_id),
            stream_set_objects=self._set_objects(node.node_id) if with_objects else (),
            locked=node.locked,
            pending_upload_count=len(self._streams.active_uploads(node.node_id)),
            recovered_by=node.recovered_by,
            departed=node.departed,
            supervised=node.supervised,
        )

    def _set_objects(self, node_id: int) -> tuple[listings.StreamSetObject, ...]:
        """Return all stream set objects of a node, in its order."""
        ids = self._objects.stream_set_objects_of(
            node_id, -1, self._nodes.stream_set_object_count(node_id)
        )
        return self._objects.describe_stream_set_objects(ids, by_order=True)

    def list_stream_set_objects(
        self, request: listings.ListStreamSetObjects
    ) -> answers.ListStreamSetObjectsAnswer:
        """Return one page of a node's stream set objects."""
        node_id, size = request.node_id, page_size(request.page)
        if self._nodes.get(node_id) is None:
            return answers.ListStreamSetObjectsAnswer(error=ErrorCode.NODE_EPOCH_NOT_EXIST)

        ids = self._objects.stream_set_objects_of(node_id, first_id(request.page) - 1, size + 1)
        counts = self._objects.range_counts(self._objects.rows(ids))
        size = min(size, budget.set_objects_that_fit(counts * request.include_ranges))
        return answers.ListStreamSetObjectsAnswer(
            error=ErrorCode.NONE,
            objects=self._objects.describe_stream_set_objects(
                ids[:size], with_ranges=request.include_ranges
            ),
            next_page_token=token_of(int(ids[size]) if len(ids) > size else -1),
            total=self._nodes.stream_set_object_count(node_id),
        )

    def list_stream_objects(
        self, request: listings.ListStreamObjects
    ) -> answers.ListStreamObjectsAnswer:
        """Return one page of a stream's stream objects and composites."""
        if not self._streams.exists(request.stream_id):
            return answers.ListStreamObjectsAnswer(error=ErrorCode.STREAM_NOT_EXIST)
        # A full page must fit into one answer.
        most = budget.ANSWER_BYTES // budget.STREAM_SET_OBJECT_BYTES
        size = min(page_size(request.page), most)
        objects, token = self._objects.page_of_stream_objects(request, size)
        return answers.ListStreamObjectsAnswer(
            error=ErrorCode.NONE, objects=objects, next_page_token=token
        )

    # ---- streams ----

    def describe_streams(self, request: requests.DescribeStreams) -> answers.DescribeStreamsAnswer:
        """Return one page of streams."""
        owner = request.owner_node_id
        if request.stream_ids:
            ids, token = page_of_ids(request.stream_ids, request.page)
            heads = zip(ids, self._streams.heads(ids), strict=True)
            found = [
                stream_id
                for stream_id, head in heads
                if head is not None and owner in (None, head.node_id)
            ]
        else:
            page = request.page
            rows, after = self._streams.page(first_id(page), page_size(page), owner)
            found, token = rows.tolist(), token_of(after)

        described, following = budget.take_fitting(
            self._describe_streams(
                column(found),
                with_ranges=request.include_ranges,
                with_objects=request.include_stream_objects,
            ),
            budget.stream_bytes,
        )
        if following is not None:
            token = token_of(following.stream_id)

        return answers.DescribeStreamsAnswer(
            streams=described, next_page_token=token, total=self._streams.live_count()
        )

    def find_streams(self, request: requests.FindStreams) -> answers.FindStreamsAnswer:
        """Return one page of the streams that have all tags of the request."""
        page = request.page
        found, after = self._streams.find_by_tags(
            request.tags, request.owner_node_id, first_id(page), page_size(page)
        )
        described, following = budget.take_fitting(
            self._describe_streams(found), budget.stream_bytes
        )
        return answers.FindStreamsAnswer(
            streams=described,
            next_page_token=token_of(after if following is None else following.stream_id),
        )

    def _list_pending(self, stream_id: Int64Column) -> dict[int, list[answers.PendingUpload]]:
        """Return the pending uploads of these streams, by start offset."""
        found: dict[int, list[answers.PendingUpload]] = {}
        for node_id in self._streams.nodes_with_pending():
            spans = self._streams.active_uploads(node_id).of_streams(stream_id)
            for cells in spans.rows():
                found.setdefault(cells[0], []).append(answers.PendingUpload(node_id, *cells))

        for uploads in found.values():
            # Uploads come node by node, and a stream may have some of a former owner.
            uploads.sort(key=lambda upload: upload.start_offset)
        return found

    def _describe_streams(
        self, ids: Int64Column, *, with_ranges: bool = False, with_objects: bool = False
    ) -> Iterator[answers.StreamDescription]:
        streams, pending = self._streams, self._list_pending(ids)
        columns = (ids, *streams.head_columns(ids), streams.range_indexes(ids))
        rows = zip(*(values.tolist() for values in columns), strict=True)
        for stream_id, *cells, range_index in rows:
            head: Head[int] = Head._make(cells)
            yield answers.StreamDescription(
                stream_id=stream_id,
                epoch=head.epoch,
                range_index=range_index,
                start_offset=head.start_offset,
                end_offset=head.end_offset,
                state=StreamState(head.state),
                node_id=head.node_id,
                tags=streams.tags_of(stream_id),
                ranges=streams.ranges(stream_id) if with_ranges else (),
                stream_objects=self._stream_objects(stream_id) if with_objects else (),
                pending_uploads=tuple(pending.get(stream_id, ())),
                lost=streams.lost_of(stream_id),
            )

    def _stream_objects(self, stream_id: int) -> tuple[answers.StreamObjectRange, ...]:
        held = self._objects.stream_objects(stream_id)
        what = f"stream {stream_id} with its {len(held[0])} stream objects"
        size = budget.RANGE_BYTES * len(held[0])
        budget.require_sendable(size, "include_stream_objects", what)
        columns = (values.tolist() for values in held)
        return tuple(map(answers.StreamObjectRange, *columns))

    # ---- open streams and pending uploads of a node ----

    def opening_streams(self, node_id: int, page: PageRequest) -> answers.GetOpeningStreamsAnswer:
        """Return one page of the node's open streams and pending uploads.

        STREAM_INNER_ERROR, with an empty list, if an upload belongs to no range of the node, or to
        a stream that it has open.
        """
        first, size = first_id(page), page_size(page)
        opened, after = self._streams.page_opened_by(node_id, first, size)
        owed = self._streams.active_uploads(node_id)
        if not len(owed):
            return answers.GetOpeningStreamsAnswer(
                error=ErrorCode.NONE,
                streams=self._describe_open(opened),
                next_page_token=token_of(after),
            )

        # Earlier pages contain the others.
        owed = owed.take(owed.stream_id >= first)
        epochs = self._streams.owed_epochs(node_id, owed)
        ids = np.concatenate((opened, owed.stream_id))
        if epochs is None:
            return answers.GetOpeningStreamsAnswer(error=ErrorCode.STREAM_INNER_ERROR)

        # The page ends after `size` streams of both kinds together.
        listed = np.sort(ids if after < 0 else np.append(ids, after))
        end = int(listed[size]) if len(listed) > size else -1
        if end >= 0:
            opened, chosen = opened[opened < end], owed.stream_id < end
            owed, epochs = owed.take(chosen), epochs[chosen]

        streams = (*self._describe_open(opened), *self._describe_owed(owed, epochs))
        by_id = tuple(sorted(streams, key=lambda stream: stream.stream_id))
        return answers.GetOpeningStreamsAnswer(
            error=ErrorCode.NONE, streams=by_id, next_page_token=token_of(end)
        )

    def _describe_open(self, ids: Int64Column) -> tuple[answers.OpeningStream, ...]:
        head = self._streams.head_columns(ids)
        columns = (ids, head.epoch, head.start_offset, head.end_offset)
        return tuple(map(answers.OpeningStream, *(values.tolist() for values in columns)))

    def _describe_owed(
        self, owed: StreamSpans, epochs: Int64Column
    ) -> tuple[answers.OpeningStream, ...]:
        low = self._streams.start_offsets(owed.stream_id)
        columns = (owed.stream_id, epochs, low, owed.start_offset, owed.end_offset)
        cells = zip(*(values.tolist() for values in columns), strict=True)
        return tuple(answers.OpeningStream(*cell) for cell in cells)
