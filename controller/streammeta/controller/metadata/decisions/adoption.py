"""Adoption of objects written after a backup, found in the bucket, into restored metadata.

An object is adopted by the rules of an upload. Each of its ranges continues its stream at the end
known to the metadata, under an epoch not below the stream's, or belongs to a pending upload. A
request is checked as a whole, its ranges in offset order, and adopted as a whole.

A compaction after the restored point may have deleted objects that the metadata refers to. A
request names them as replaced: its ranges may then cover their offsets as well, and the replaced
objects are destroyed. Offsets of theirs that no range covers are lost, and readers skip them. The
same holds for offsets between a stream's end and a range that may begin after it, because the
stream was trimmed past its end.

Streams adopt the largest epoch of their records: they were opened under it after the backup, and
their next owner needs a larger one. Adopted objects become stream set objects of the last owner of
their first stream, or of another known node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api.answers import AdoptObjectsAnswer
from streammeta.controller.metadata.api.request_identity import digests_of_uploads
from streammeta.controller.metadata.api.requests import AdoptObjects, CommitUploads, to_uploads
from streammeta.controller.metadata.decisions.commit_rules import Repeat, Repeats
from streammeta.controller.metadata.decisions.uploads import select_uploads, uploads_record
from streammeta.controller.metadata.registries.cluster_modes import Recovery
from streammeta.controller.metadata.registries.nodes import Nodes
from streammeta.controller.metadata.registries.objects import Objects
from streammeta.controller.metadata.registries.stream_ranges import StreamSpans
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables.epochs import check_growth
from streammeta.controller.metadata.tables.values import (
    EMPTY_COLUMN,
    SHARED_EPOCH,
    Int64Column,
    Mask,
    NodeIdentity,
    ObjectState,
    StreamState,
    column,
)
from streammeta.controller.records import record as rec


@dataclass(slots=True)
class _Stream:
    """State of a stream after the ranges checked so far."""

    end_offset: int
    epoch: int
    owed: dict[int, tuple[int, int, int]]
    """Pending uploads by node: the next offset to commit, the end, and their epoch."""
    visible_from: int
    """The first visible offset."""
    free: list[tuple[int, int]]
    """Visible offsets of replaced objects that no range covers yet, by start."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Offsets skipped by ranges, by start."""
    filled: set[int] = field(default_factory=set)
    """Nodes whose pending uploads have shrunk."""


_Ahead: TypeAlias = dict[int, _Stream]
"""Streams after the ranges checked so far, by id."""


@dataclass(eq=False)
class Adoption:
    """Decisions on AdoptObjects."""

    _nodes: Nodes
    _streams: Streams
    _objects: Objects
    _repeats: Repeats
    _recovery: Recovery

    def decide(
        self, request: AdoptObjects, now_ms: int
    ) -> tuple[list[rec.Record], AdoptObjectsAnswer]:
        """Adopt all new objects, or none. The request is well-formed."""
        uploads = to_uploads(request)
        digests = digests_of_uploads(uploads)
        errors, is_new = self._check_objects(request, digests)

        is_judged = np.repeat(is_new & (errors == 0), request.range_count)
        range_errors = np.repeat(errors, request.range_count)

        # The ranges see the offsets of replaced objects as free from the start.
        replaced = _Replaced(self._objects, self._streams, request.replaced)
        ahead: _Ahead = {
            stream_id: self._as_it_is(stream_id, free) for stream_id, free in replaced.free.items()
        }
        range_errors[is_judged] = self._check_ranges(request, is_judged, ahead)

        owners = self._owners(request)
        errors[is_new & (errors == 0) & (owners < 0)] = ErrorCode.NODE_EPOCH_NOT_EXIST
        errors = _with_first_error(errors, range_errors, request.range_count)
        answer = AdoptObjectsAnswer(errors=errors, range_errors=range_errors)

        if np.count_nonzero(errors) or not is_new.any():
            return [], answer
        replaced.require_touched(ahead)
        self._objects.require_room(0, request.object_size[is_new])
        gone = replaced.with_linked()
        return list(self._records(uploads, is_new, digests, owners, ahead, gone, now_ms)), answer

    # ---- checks ----

    def _check_objects(
        self, request: AdoptObjects, digests: Int64Column
    ) -> tuple[Int64Column, Mask]:
        """Return one verdict per object, and which objects were not adopted before."""
        errors = np.zeros(len(digests), dtype=np.int64)
        is_new = np.ones(len(digests), dtype=np.bool_)
        present = self._objects.rows(request.object_id) >= 0
        for index, object_id in enumerate(request.object_id.tolist()):
            repeat = self._repeats.compare((object_id,), int(digests[index]))
            if repeat is Repeat.SAME:
                is_new[index] = False
            elif repeat is Repeat.OTHER_CONTENT:
                errors[index] = ErrorCode.OBJECT_CONTENT_MISMATCH
            # Only ids issued after the backup can belong to unknown objects.
            elif present[index] or not self._recovery.holds(object_id):
                errors[index] = ErrorCode.OBJECT_NOT_EXIST
        return errors, is_new

    def _check_ranges(self, request: AdoptObjects, rows: Mask, ahead: _Ahead) -> Int64Column:
        """Return one verdict for each of some rows, checked in offset order."""
        ranges = request.ranges.ranges_at(rows)
        verdicts = np.zeros(len(ranges.stream_id), dtype=np.int64)
        passes = request.after_gap[rows] if len(request.after_gap) else verdicts
        passing = passes.astype(np.bool_).tolist()

        # In offset order a range may continue another one of the request.
        for place in np.lexsort((ranges.start_offset, ranges.stream_id)).tolist():
            cells = (ranges.stream_id, ranges.stream_epoch, ranges.start_offset, ranges.end_offset)
            stream_id, epoch, start, end = (int(values[place]) for values in cells)
            verdicts[place] = self._check_range(
                ahead, stream_id, epoch, start, end, may_pass=passing[place]
            )
        return verdicts

    def _check_range(
        self,
        ahead: _Ahead,
        stream_id: int,
        epoch: int,
        start: int,
        end: int,
        *,
        may_pass: bool,
    ) -> ErrorCode:
        """Check one range and record its effects in `ahead`."""
        head = self._streams.heads((stream_id,))[0]
        if head is None:
            return ErrorCode.STREAM_NOT_EXIST
        if head.state == StreamState.SHARED and epoch != SHARED_EPOCH:
            return ErrorCode.STREAM_KIND_MISMATCH
        if stream_id not in ahead:
            ahead[stream_id] = self._as_it_is(stream_id, [])
        stream = ahead[stream_id]

        # A range that continues a pending upload may lie anywhere in the stream.
        for node_id, (first, owed_end, owed_epoch) in stream.owed.items():
            if start == first and end <= owed_end and epoch == owed_epoch:
                stream.owed[node_id] = (end, owed_end, owed_epoch)
                stream.filled.add(node_id)
                return ErrorCode.NONE

        if start > stream.end_offset:
            if not may_pass:
                return ErrorCode.OFFSET_NOT_MATCHED
            stream.gaps.append((stream.end_offset, start))
            stream.end_offset = start
        if start < stream.end_offset and not _take_free(stream, epoch, start, end):
            return ErrorCode.OFFSET_NOT_MATCHED

        if end <= stream.end_offset:
            return ErrorCode.NONE
        # It may not continue the stream under an epoch that was fenced.
        if epoch < stream.epoch:
            return ErrorCode.STREAM_FENCED
        check_growth("ranges.stream_epoch", epoch, stream.epoch)
        stream.end_offset, stream.epoch = end, epoch
        return ErrorCode.NONE

    def _as_it_is(self, stream_id: int, free: list[tuple[int, int]]) -> _Stream:
        (head,) = self._streams.heads((stream_id,))
        assert head is not None
        owed = {}
        for node_id in self._streams.nodes_with_pending():
            spans = self._streams.active_uploads(node_id).of_streams(column([stream_id]))
            for _, start, end in spans.rows():
                owed[node_id] = (start, end, self._epoch_of(stream_id, node_id, start, end))
        return _Stream(head.end_offset, head.epoch, owed, head.start_offset, list(free))

    def _epoch_of(self, stream_id: int, node_id: int, start: int, end: int) -> int:
        """Return the epoch under which a node acknowledged a pending upload, -1 if unknown.

        Records of another epoch at these offsets come from a fenced writer.
        """
        epochs = [
            range_.epoch
            for range_ in self._streams.ranges(stream_id)
            if range_.node_id == node_id
            and range_.start_offset <= start
            and range_.end_offset == end
        ]
        return max(epochs, default=-1)

    def _owners(self, request: AdoptObjects) -> Int64Column:
        """Return the new owner of each object, -1 if no node is known."""
        firsts = np.cumsum(request.range_count) - request.range_count
        heads = self._streams.heads(request.ranges.stream_id[firsts].tolist())
        return column([self._owner(-1 if head is None else head.node_id) for head in heads])

    def _owner(self, node_id: int) -> int:
        return node_id if self._nodes.get(node_id) is not None else self._nodes.lowest_id()

    # ---- records ----

    def _records(
        self,
        uploads: CommitUploads,
        is_new: Mask,
        digests: Int64Column,
        owners: Int64Column,
        ahead: _Ahead,
        gone: Int64Column,
        now_ms: int,
    ) -> Iterator[rec.Record]:
        # Streams take their new epochs first, and losses are recorded once all data is committed.
        yield from self._openings(ahead)
        yield rec.ObjectsReclaimed(object_id=uploads.object_id[is_new], deadline_ms=now_ms)
        for node_id in np.unique(owners[is_new]).tolist():
            chosen = is_new & (owners == node_id)
            # Records contain the node but no epoch of it.
            part = replace(select_uploads(uploads, chosen), node=NodeIdentity(node_id, 0))
            yield uploads_record(part, digests[chosen], now_ms)
        if len(gone):
            yield rec.ObjectsDestroyed(object_id=gone, marked_at_ms=now_ms)
        yield from self._losses(ahead)
        yield from _owed_changes(ahead)

    def _losses(self, ahead: _Ahead) -> Iterator[rec.Record]:
        """Yield the records that abandon gaps and uncovered offsets of replaced objects.

        They are briefly pending uploads of a node, one range per stream at a time. Its list is
        restored after.
        """
        node_id = self._nodes.lowest_id()
        lost = {
            stream_id: [*stream.free, *stream.gaps] for stream_id, stream in sorted(ahead.items())
        }
        for place in range(max(map(len, lost.values()), default=0)):
            rows = [(stream, *free[place]) for stream, free in lost.items() if place < len(free)]
            ids, starts, ends = (column(values) for values in zip(*rows, strict=True))
            yield rec.PendingUploadsSet(
                node_id=node_id, stream_id=ids, start_offset=starts, end_offset=ends
            )
            yield rec.UploadsAbandoned(node_id=node_id, stream_id=ids)

        for stream_id, free in lost.items():
            if free and node_id in ahead[stream_id].owed:
                ahead[stream_id].filled.add(node_id)

    def _openings(self, ahead: _Ahead) -> Iterator[rec.Record]:
        """Yield the records that raise epochs of streams, which are closed again afterwards."""
        raised: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for stream_id, stream in sorted(ahead.items()):
            head = self._streams.head_cells(stream_id)
            if stream.epoch > head.epoch:
                raised[self._owner(head.node_id)].append((stream_id, stream.epoch))

        for node_id, rows in sorted(raised.items()):
            ids, epochs = (column(values) for values in zip(*rows, strict=True))
            yield rec.StreamsOpened(node_id=node_id, stream_id=ids, stream_epoch=epochs)
            yield rec.StreamsClosed(stream_id=ids, end_offset=EMPTY_COLUMN)


class _Replaced:
    """Objects replaced by a request, and their visible offsets."""

    def __init__(self, objects: Objects, streams: Streams, object_ids: Int64Column) -> None:
        self._objects = objects
        rows = objects.rows(object_ids)
        states = objects.states(object_ids)
        for index, object_id in enumerate(object_ids.tolist()):
            if states[index] not in _REPLACEABLE:
                raise InvalidRequestError(
                    f"replaced_object_ids[{index}]",
                    f"object {object_id} is not a committed object of this metadata",
                )

        self._ids = object_ids[states == ObjectState.COMMITTED]
        self._places = np.flatnonzero(states == ObjectState.COMMITTED)
        self._spans = [_visible(streams, objects.spans(row[None])) for row in rows[self._places]]

        free: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for stream_id, start, end in sorted(span for spans in self._spans for span in spans):
            free[stream_id].append((start, end))
        self.free = dict(free)
        """Visible offsets of all replaced objects by stream, sorted by start."""

    def require_touched(self, ahead: _Ahead) -> None:
        """Require that ranges cover some offset of each object.

        A named object has no offsets that a range could cover.

        Raises:
            InvalidRequestError: an object would be destroyed without a replacement.
        """
        for index, spans in zip(self._places.tolist(), self._spans, strict=True):
            if all((start, end) in ahead[stream_id].free for stream_id, start, end in spans):
                raise InvalidRequestError(
                    f"replaced_object_ids[{index}]",
                    "no range of the request covers any offset of this object: it must be an "
                    "object that adopted ones replace",
                )

    def with_linked(self) -> Int64Column:
        """Return the ids, including objects linked to composites among them."""
        return np.concatenate((self._ids, self._objects.list_linked(self._ids)))


_REPLACEABLE = (ObjectState.COMMITTED, ObjectState.MARK_DESTROYED, ObjectState.REMOVED)
"""States in which an object may be replaced. A repeat finds it destroyed."""


def _visible(streams: Streams, spans: StreamSpans) -> list[tuple[int, int, int]]:
    """Return (stream, start, end) of the visible parts of ranges."""
    starts = streams.live_starts(spans)
    rows = zip(spans.stream_id.tolist(), starts.tolist(), spans.end_offset.tolist(), strict=True)
    return [row for row in rows if row[1] < row[2]]


def _take_free(stream: _Stream, epoch: int, start: int, end: int) -> bool:
    """Cover a range's offsets below the stream's end by replaced objects and pending uploads.

    Returns False, without effect, if any offset is elsewhere. Parts of pending uploads alone are
    not covered here, because the stricter rule for them compares epochs.
    """
    at, limit = max(start, stream.visible_from), min(end, stream.end_offset)
    free: list[tuple[int, int]] = []
    owed: dict[int, tuple[int, int, int]] = {}

    for low, high in stream.free:
        at = _pass_owed(stream, epoch, at, limit, owed)
        # The part before `at` and the rest stay free for other ranges.
        if low <= at < min(high, limit):
            stop = min(high, limit)
            free += [(low, at), (stop, high)]
            at = stop
        else:
            free.append((low, high))
    at = _pass_owed(stream, epoch, at, limit, owed)

    if at < limit or (free == stream.free and end <= stream.end_offset):
        return False

    stream.free = [(low, high) for low, high in free if low < high]
    stream.owed |= owed
    stream.filled |= owed.keys()
    return True


def _pass_owed(
    stream: _Stream,
    epoch: int,
    at: int,
    limit: int,
    owed: dict[int, tuple[int, int, int]],
) -> int:
    """Return the offset after pending uploads that begin at `at`. Note what remains of each."""
    for node_id, (first, owed_end, owed_epoch) in sorted(
        stream.owed.items(), key=lambda item: item[1]
    ):
        if first == at < min(owed_end, limit) and epoch >= owed_epoch >= 0:
            at = min(owed_end, limit)
            owed[node_id] = (at, owed_end, owed_epoch)
    return at


def _owed_changes(ahead: _Ahead) -> Iterator[rec.PendingUploadsSet]:
    by_node: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for stream_id, stream in sorted(ahead.items()):
        for node_id in stream.filled:
            start, end, _ = stream.owed[node_id]
            by_node[node_id].append((stream_id, start, end))
    for node_id, rows in sorted(by_node.items()):
        ids, starts, ends = (column(values) for values in zip(*rows, strict=True))
        yield rec.PendingUploadsSet(
            node_id=node_id, stream_id=ids, start_offset=starts, end_offset=ends
        )


def _with_first_error(errors: Int64Column, rows: Int64Column, counts: Int64Column) -> Int64Column:
    """Return objects' verdicts. One without an error gets the error of its first bad range."""
    for index, part in enumerate(np.split(rows, np.cumsum(counts)[:-1])):
        if not errors[index] and part.any():
            errors[index] = part[np.flatnonzero(part)[0]]
    return errors
