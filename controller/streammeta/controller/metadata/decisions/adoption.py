"""Adoption: objects of before a restore, found in the bucket, become part of the restored map.

An object is adopted by the rules of an upload: each of its ranges continues its stream where the
map ends, under an epoch that is not below the stream's, or is what a node still owes of it. A
request is judged as a whole, its ranges in the order of their offsets, and adopted as a whole.

A compaction after the restored point has deleted objects that the map reads. A request names them
as replaced: its ranges may then also lie where these are, and the replaced objects leave the map.
Offsets of theirs that no range of the request has are lost: readers pass over them. So are offsets
between a stream's end and a range that may begin after it: the stream was trimmed beyond its end.

Streams take over the largest epoch that their records have: they were opened under it after the
backup, and their next owner needs a larger one. Adopted objects are set objects of the node that
owned their first stream last, or of another that is known.
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
from streammeta.controller.metadata.api.requests import AdoptObjects, CommitUploads, as_uploads
from streammeta.controller.metadata.decisions.commit_rules import Repeat, Repeats
from streammeta.controller.metadata.decisions.uploads import some_uploads, uploads_record
from streammeta.controller.metadata.registries.nodes import Nodes
from streammeta.controller.metadata.registries.objects import Objects
from streammeta.controller.metadata.registries.recovery import Recovery
from streammeta.controller.metadata.registries.stream_ranges import StreamSpans
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables.epochs import check_growth
from streammeta.controller.metadata.tables.values import (
    EMPTY_COLUMN,
    Int64Column,
    Mask,
    NodeIdentity,
    ObjectState,
    column,
)
from streammeta.controller.records import record as rec


@dataclass(slots=True)
class _Stream:
    """A stream as it is behind the ranges that were judged."""

    end_offset: int
    epoch: int
    owed: dict[int, tuple[int, int, int]]
    """By node, what it still owes: the next offset to commit, the end, and their epoch."""
    visible_from: int
    """The first visible offset."""
    free: list[tuple[int, int]]
    """Visible offsets of replaced objects that no range has taken yet, by start."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Offsets that ranges have passed over, by start."""
    filled: set[int] = field(default_factory=set)
    """Nodes that owe less than before."""


_Ahead: TypeAlias = dict[int, _Stream]
"""Streams as they are behind the ranges that were judged, by id."""


class Adoption:
    """Decides AdoptObjects."""

    def __init__(
        self,
        nodes: Nodes,
        streams: Streams,
        objects: Objects,
        repeats: Repeats,
        recovery: Recovery,
    ) -> None:
        self._nodes = nodes
        self._streams = streams
        self._objects = objects
        self._repeats = repeats
        self._recovery = recovery

    def decide(
        self, request: AdoptObjects, now_ms: int
    ) -> tuple[list[rec.Record], AdoptObjectsAnswer]:
        """Adopt all objects that were not adopted before, or none; the request is well-formed."""
        uploads = as_uploads(request)
        digests = digests_of_uploads(uploads)
        errors, is_new = self._judge_objects(request, digests)
        is_judged = np.repeat(is_new & (errors == 0), request.range_count)
        range_errors = np.repeat(errors, request.range_count)
        replaced = _Replaced(self._objects, self._streams, request.replaced)
        ahead: _Ahead = {
            stream_id: self._as_it_is(stream_id, free) for stream_id, free in replaced.free.items()
        }
        range_errors[is_judged] = self._judge_ranges(request, is_judged, ahead)
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

    # ---- judging ----

    def _judge_objects(
        self, request: AdoptObjects, digests: Int64Column
    ) -> tuple[Int64Column, Mask]:
        """Return one verdict an object, and which were not adopted before."""
        errors = np.zeros(len(digests), dtype=np.int64)
        is_new = np.ones(len(digests), dtype=np.bool_)
        present = self._objects.rows(request.object_id) >= 0
        for index, object_id in enumerate(request.object_id.tolist()):
            repeat = self._repeats.judge((object_id,), int(digests[index]))
            if repeat is Repeat.SAME:
                is_new[index] = False
            elif repeat is Repeat.OTHER_CONTENT:
                errors[index] = ErrorCode.OBJECT_CONTENT_MISMATCH
            elif present[index] or not self._recovery.holds(object_id):
                errors[index] = ErrorCode.OBJECT_NOT_EXIST
        return errors, is_new

    def _judge_ranges(self, request: AdoptObjects, rows: Mask, ahead: _Ahead) -> Int64Column:
        """Return one verdict for each of some rows, judged in the order of their offsets."""
        ranges = request.ranges.ranges_at(rows)
        verdicts = np.zeros(len(ranges.stream_id), dtype=np.int64)
        passes = request.after_gap[rows] if len(request.after_gap) else verdicts
        passing = passes.astype(np.bool_).tolist()
        for place in np.lexsort((ranges.start_offset, ranges.stream_id)).tolist():
            cells = (ranges.stream_id, ranges.stream_epoch, ranges.start_offset, ranges.end_offset)
            stream_id, epoch, start, end = (int(values[place]) for values in cells)
            verdicts[place] = self._judge_range(
                ahead, stream_id, epoch, start, end, may_pass=passing[place]
            )
        return verdicts

    def _judge_range(
        self,
        ahead: _Ahead,
        stream_id: int,
        epoch: int,
        start: int,
        end: int,
        *,
        may_pass: bool,
    ) -> ErrorCode:
        head = self._streams.heads((stream_id,))[0]
        if head is None:
            return ErrorCode.STREAM_NOT_EXIST
        if stream_id not in ahead:
            ahead[stream_id] = self._as_it_is(stream_id, [])
        stream = ahead[stream_id]
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
        """Return the epoch under which a node acknowledged what it owes, -1 if that is not known.

        Another's records at these offsets are those of a writer that was fenced.
        """
        epochs = [
            one.epoch
            for one in self._streams.ranges(stream_id)
            if one.node_id == node_id and one.start_offset <= start and one.end_offset == end
        ]
        return max(epochs, default=-1)

    def _owners(self, request: AdoptObjects) -> Int64Column:
        """Return the node that each object is to belong to, -1 if no node is known."""
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
        yield from self._openings(ahead)
        yield rec.ObjectsReclaimed(object_id=uploads.object_id[is_new], deadline_ms=now_ms)
        for node_id in np.unique(owners[is_new]).tolist():
            chosen = is_new & (owners == node_id)
            part = replace(some_uploads(uploads, chosen), node=NodeIdentity(node_id, 0))
            yield uploads_record(part, digests[chosen], now_ms)
        if len(gone):
            yield rec.ObjectsDestroyed(object_id=gone, marked_at_ms=now_ms)
        yield from self._losses(ahead)
        yield from _owed_changes(ahead)

    def _losses(self, ahead: _Ahead) -> Iterator[rec.Record]:
        """Yield what gives up the offsets of replaced objects that no range has, and gaps.

        A node owes them for a moment, one range of a stream at a time, and its list is put back.
        """
        node_id = self._nodes.lowest_id()
        lost = {
            stream_id: [*stream.free, *stream.gaps] for stream_id, stream in sorted(ahead.items())
        }
        for place in range(max(map(len, lost.values()), default=0)):
            rows = [(one, *free[place]) for one, free in lost.items() if place < len(free)]
            ids, starts, ends = (column(values) for values in zip(*rows, strict=True))
            yield rec.PendingUploadsSet(
                node_id=node_id, stream_id=ids, start_offset=starts, end_offset=ends
            )
            yield rec.UploadsAbandoned(node_id=node_id, stream_id=ids)
        for stream_id, free in lost.items():
            if free and node_id in ahead[stream_id].owed:
                ahead[stream_id].filled.add(node_id)

    def _openings(self, ahead: _Ahead) -> Iterator[rec.Record]:
        """Yield what gives streams the epochs of their records; each is closed behind them."""
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
    """Objects that a request takes out of the map, and the visible offsets that they have."""

    def __init__(self, objects: Objects, streams: Streams, object_ids: Int64Column) -> None:
        self._objects = objects
        rows = objects.rows(object_ids)
        states = objects.states(object_ids)
        for index, object_id in enumerate(object_ids.tolist()):
            if states[index] not in _REPLACEABLE:
                raise InvalidRequestError(
                    f"replaced_object_ids[{index}]",
                    f"object {object_id} is none that the map reads; must be a committed one",
                )
        self._ids = object_ids[states == ObjectState.COMMITTED]
        self._places = np.flatnonzero(states == ObjectState.COMMITTED)
        self._spans = [_visible(streams, objects.spans(row[None])) for row in rows[self._places]]
        free: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for stream_id, start, end in sorted(span for spans in self._spans for span in spans):
            free[stream_id].append((start, end))
        self.free = dict(free)
        """By stream, the offsets of all of them, by start."""

    def require_touched(self, ahead: _Ahead) -> None:
        """Require that ranges have taken something of each object.

        A named object has nothing that they could take.

        Raises:
            InvalidRequestError: an object would leave the map for nothing.
        """
        for index, spans in zip(self._places.tolist(), self._spans, strict=True):
            if all((start, end) in ahead[stream_id].free for stream_id, start, end in spans):
                raise InvalidRequestError(
                    f"replaced_object_ids[{index}]",
                    "no range of the request has any offset of this object; must be an object "
                    "that adopted ones replace",
                )

    def with_linked(self) -> Int64Column:
        """Return the ids, and those of what composites among them link."""
        return np.concatenate((self._ids, self._objects.linked_to(self._ids)))


_REPLACEABLE = (ObjectState.COMMITTED, ObjectState.MARK_DESTROYED, ObjectState.REMOVED)
"""States of objects that a request may name as replaced; a repeat finds them destroyed."""


def _visible(streams: Streams, spans: StreamSpans) -> list[tuple[int, int, int]]:
    """Return stream, start and end of ranges' visible parts."""
    starts = streams.live_starts(spans)
    rows = zip(spans.stream_id.tolist(), starts.tolist(), spans.end_offset.tolist(), strict=True)
    return [row for row in rows if row[1] < row[2]]


def _take_free(stream: _Stream, epoch: int, start: int, end: int) -> bool:
    """Take a range's offsets below the stream's end from replaced objects and pending uploads.

    False, and nothing is taken, if it has any that are elsewhere. A part of a pending upload alone
    is for the stricter rule, which compares epochs.
    """
    at, limit = max(start, stream.visible_from), min(end, stream.end_offset)
    free: list[tuple[int, int]] = []
    owed: dict[int, tuple[int, int, int]] = {}
    for low, high in stream.free:
        at = _pass_owed(stream, epoch, at, limit, owed)
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
    """Return the offset after pending uploads that begin at one; note what is left of each."""
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
    """Return objects' verdicts, those without error having that of their first bad range."""
    for index, part in enumerate(np.split(rows, np.cumsum(counts)[:-1])):
        if not errors[index] and part.any():
            errors[index] = part[np.flatnonzero(part)[0]]
    return errors
