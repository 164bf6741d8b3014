"""Adoption: objects of before a restore, found in the bucket, become part of the restored map.

An object is adopted by the rules of an upload: each of its ranges continues its stream where the
map ends, under an epoch that is not below the stream's, or is what a node still owes of it. A
request is judged as a whole, its ranges in the order of their offsets, and adopted as a whole.
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

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.answers import AdoptObjectsAnswer
from streammeta.controller.metadata.commit_rules import Repeat, Repeats
from streammeta.controller.metadata.epochs import check_growth
from streammeta.controller.metadata.nodes import Nodes
from streammeta.controller.metadata.objects import Objects
from streammeta.controller.metadata.recovery import Recovery
from streammeta.controller.metadata.request_identity import digests_of_uploads
from streammeta.controller.metadata.requests import AdoptObjects, CommitUploads, as_uploads
from streammeta.controller.metadata.streams import Head, Streams
from streammeta.controller.metadata.uploads import some_uploads, uploads_record
from streammeta.controller.metadata.values import (
    EMPTY_COLUMN,
    Int64Column,
    Mask,
    NodeIdentity,
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
        ahead: _Ahead = {}
        range_errors[is_judged] = self._judge_ranges(request, is_judged, ahead)
        owners = self._owners(request)
        errors[is_new & (errors == 0) & (owners < 0)] = ErrorCode.NODE_EPOCH_NOT_EXIST
        errors = _with_first_error(errors, range_errors, request.range_count)
        answer = AdoptObjectsAnswer(errors=errors, range_errors=range_errors)
        if np.count_nonzero(errors) or not is_new.any():
            return [], answer
        self._objects.require_room(0, request.object_size[is_new])
        return list(self._records(uploads, is_new, digests, owners, ahead, now_ms)), answer

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
        for place in np.lexsort((ranges.start_offset, ranges.stream_id)).tolist():
            cells = (ranges.stream_id, ranges.stream_epoch, ranges.start_offset, ranges.end_offset)
            verdicts[place] = self._judge_range(ahead, *(int(values[place]) for values in cells))
        return verdicts

    def _judge_range(
        self, ahead: _Ahead, stream_id: int, epoch: int, start: int, end: int
    ) -> ErrorCode:
        head = self._streams.heads((stream_id,))[0]
        if head is None:
            return ErrorCode.STREAM_NOT_EXIST
        if stream_id not in ahead:
            ahead[stream_id] = self._as_it_is(stream_id, head)
        stream = ahead[stream_id]
        for node_id, (first, owed_end, owed_epoch) in stream.owed.items():
            if start == first and end <= owed_end and epoch == owed_epoch:
                stream.owed[node_id] = (end, owed_end, owed_epoch)
                stream.filled.add(node_id)
                return ErrorCode.NONE
        if start != stream.end_offset:
            return ErrorCode.OFFSET_NOT_MATCHED
        if epoch < stream.epoch:
            return ErrorCode.STREAM_FENCED
        check_growth("ranges.stream_epoch", epoch, stream.epoch)
        stream.end_offset, stream.epoch = end, epoch
        return ErrorCode.NONE

    def _as_it_is(self, stream_id: int, head: Head[int]) -> _Stream:
        owed = {}
        for node_id in self._streams.nodes_with_pending():
            spans = self._streams.active_uploads(node_id).of_streams(column([stream_id]))
            for _, start, end in spans.rows():
                owed[node_id] = (start, end, self._epoch_of(stream_id, node_id, start, end))
        return _Stream(head.end_offset, head.epoch, owed)

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
        now_ms: int,
    ) -> Iterator[rec.Record]:
        yield from self._openings(ahead)
        yield rec.ObjectsReclaimed(object_id=uploads.object_id[is_new], deadline_ms=now_ms)
        for node_id in np.unique(owners[is_new]).tolist():
            chosen = is_new & (owners == node_id)
            part = replace(some_uploads(uploads, chosen), node=NodeIdentity(node_id, 0))
            yield uploads_record(part, digests[chosen], now_ms)
        yield from _owed_changes(ahead)

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
