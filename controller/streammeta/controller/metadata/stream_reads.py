"""Answers to reads about streams. Nothing here changes the map.

Listings look at columns in id order from the page's token on, and at no more than a page needs.
"""

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.answers import (
    DescribeStreamsAnswer,
    OpeningStream,
    PendingUpload,
    StreamDescription,
    StreamObjectRange,
    StreamRange,
)
from streammeta.controller.metadata.objects import Objects
from streammeta.controller.metadata.paging import (
    first_id,
    page_of_ids,
    page_of_rows,
    page_size,
    token_of,
)
from streammeta.controller.metadata.pending_uploads import StreamSpans
from streammeta.controller.metadata.requests import DescribeStreams
from streammeta.controller.metadata.streams import DELETED, Streams
from streammeta.controller.metadata.values import Int64Column, PageRequest, StreamState, column

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
