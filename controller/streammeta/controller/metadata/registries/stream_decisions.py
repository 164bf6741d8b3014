"""Decisions on requests about streams: create, open, close, trim, delete, abandon, release.

Every stream of a request is checked against the state before the request, and the first failing
check is the answer: existence, epoch, state, owner, offsets. Replay is in `streams`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.features import FIELDS
from streammeta.controller.metadata.api import answer_budget as budget
from streammeta.controller.metadata.api import request_identity, requests
from streammeta.controller.metadata.api.answers import (
    AbandonUploadsAnswer,
    CreateStreamsAnswer,
    ErrorsAnswer,
    OpenedStream,
    OpenStreamsAnswer,
    PendingUpload,
    TrimStreamsAnswer,
)
from streammeta.controller.metadata.registries.cluster_modes import FeatureLevel
from streammeta.controller.metadata.registries.nodes import Nodes
from streammeta.controller.metadata.registries.object_queries import ObjectQueries
from streammeta.controller.metadata.registries.stream_heads import Head, check_epoch, check_owner
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables import values
from streammeta.controller.metadata.tables.epochs import check_growth
from streammeta.controller.records import record as rec

CLOSED_AT_ONCE_MAX = 10_000
"""Maximum number of streams of a dead node closed together. The next request closes others."""

SHARED_LEVEL = FIELDS["StreamsCreatedRecord", "shared"]
"""Feature level from which shared streams may be created."""

DESTROYED_AT_ONCE_MAX = 10_000
"""Maximum number of objects destroyed together with their stream. Sweeps destroy the others."""


class StreamDecisions:
    """Decisions on requests about streams, against the current state."""

    def __init__(
        self, streams: Streams, objects: ObjectQueries, nodes: Nodes, level: FeatureLevel
    ) -> None:
        self._streams = streams
        self._objects = objects
        self._nodes = nodes
        self._level = level

    def create(
        self, request: requests.CreateStreams
    ) -> tuple[list[rec.Record], CreateStreamsAnswer]:
        """Issue ids for new streams. A repeat returns the first answer."""
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return [], CreateStreamsAnswer(error=error)

        key = request_identity.RequestKey(
            request_identity.RequestKind.CREATE_STREAMS, request.node.node_id, request.request_id
        )
        issued = self._streams.find_issued(key)
        if issued is not None:
            return [], _first_answer(request, key, issued)

        shared = [stream.shared for stream in request.streams]
        if any(shared):
            self._level.require(SHARED_LEVEL, "shared streams")
        first, count = len(self._streams), len(request.streams)
        tags = tuple(tuple(sorted(stream.tags)) for stream in request.streams)
        record = rec.StreamsCreated(
            request_id=request.request_id,
            node_id=request.node.node_id,
            first_stream_id=first,
            count=count,
            tags=tags if any(tags) else (),
            shared=values.column(shared) if any(shared) else values.EMPTY_COLUMN,
        )
        ids = tuple(range(first, first + count))
        return [record], CreateStreamsAnswer(error=ErrorCode.NONE, stream_ids=ids)

    # ---- open ----

    def open(self, request: requests.OpenStreams) -> tuple[list[rec.Record], OpenStreamsAnswer]:
        """Transfer streams to the node."""
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return [], OpenStreamsAnswer(streams=(OpenedStream(error),) * len(request.streams))

        node_id = request.node.node_id
        owed = set(self._streams.active_uploads(node_id).stream_id.tolist())
        opened, reopened, answers = [], [], []
        heads = self._streams.heads([item.stream_id for item in request.streams])

        for item, head in zip(request.streams, heads, strict=True):
            error = self._open_verdict(head, item, node_id, item.stream_id in owed)
            if head is None or error is not ErrorCode.NONE:
                answers.append(OpenedStream(error))
                continue
            # A larger epoch begins a new range. The same epoch at most reopens the current one.
            if head.epoch < item.stream_epoch:
                place = f"streams[{len(answers)}].stream_epoch"
                check_growth(place, item.stream_epoch, head.epoch)
                opened.append(item)
            elif head.state == values.StreamState.CLOSED:
                reopened.append(item.stream_id)
            answers.append(OpenedStream(error, head.start_offset, head.end_offset))

        records: list[rec.Record] = []
        if opened:
            tags = tuple(tuple(sorted(item.tags)) for item in opened)
            ids = values.column([item.stream_id for item in opened])
            epochs = values.column([item.stream_epoch for item in opened])
            tag_sets = tags if any(tags) else ()
            records.append(
                rec.StreamsOpened(
                    node_id=node_id, stream_id=ids, stream_epoch=epochs, tags=tag_sets
                )
            )
            records.extend(self._remove_covered_ranges(ids))
        if reopened:
            records.append(rec.StreamsReopened(stream_id=values.column(reopened)))
        return records, OpenStreamsAnswer(streams=tuple(answers))

    def _open_verdict(
        self, head: Head[int] | None, item: requests.StreamToOpen, node_id: int, owed: bool
    ) -> ErrorCode:
        if head is None:
            return ErrorCode.STREAM_NOT_EXIST
        if head.state == values.StreamState.SHARED:
            return ErrorCode.STREAM_KIND_MISMATCH
        if head.epoch > item.stream_epoch:
            return ErrorCode.STREAM_FENCED
        # An equal epoch is a retry of the owner, or comes from a fenced process.
        if head.epoch == item.stream_epoch:
            if head.node_id != node_id:
                return ErrorCode.STREAM_FENCED
        # `reopen` lets an owner that lost its state take its stream back.
        elif head.state == values.StreamState.OPENED and not (
            item.reopen and head.node_id == node_id
        ):
            return ErrorCode.STREAM_NOT_CLOSED
        # With a pending upload the next commit would continue at the wrong offset.
        if owed:
            return ErrorCode.STREAM_NOT_CLOSED
        # The last owner of a locked node's stream may still have data for it.
        if head.node_id != node_id and self._nodes.is_locked(head.node_id):
            return ErrorCode.NODE_LOCKED
        return ErrorCode.NONE

    def _remove_covered_ranges(self, stream_ids: values.Int64Column) -> list[rec.Record]:
        # A reader needs a past range to find its node's SSOs. Stream objects are found by stream.
        removed: list[tuple[int, int]] = []
        for stream_id in self._streams.with_past_ranges(stream_ids).tolist():
            start, end = self._objects.stream_object_run(stream_id)
            if start == end:
                continue
            for past in self._streams.past_ranges(stream_id):
                low, high = past.start_offset, past.end_offset
                # Empty ranges and those within the run help no reader.
                if low == high or (start <= low and high <= end):
                    removed.append((stream_id, past.range_index))

        if not removed:
            return []
        ids, indexes = zip(*sorted(removed), strict=True)
        return [rec.RangesRemoved(stream_id=values.column(ids), range_index=values.column(indexes))]

    # ---- close ----

    def close(self, request: requests.CloseStreams) -> tuple[list[rec.Record], ErrorsAnswer]:
        """Close streams of the node. Closed ones are accepted and do not change."""
        # A recovery closes streams on behalf of a fenced node.
        answer, accepted = self._decide_each(
            request, _close_verdict, fence_failover=False, recoverer=request.recoverer
        )
        # Streams that are closed already need no record.
        closed = [item for item, head in accepted if head.state == values.StreamState.OPENED]
        if not closed:
            return [], answer
        ids = values.column([item.stream_id for item in closed])
        ends = [-1 if item.end_offset is None else item.end_offset for item in closed]
        end_offset = values.column(ends) if max(ends) >= 0 else values.EMPTY_COLUMN
        return [rec.StreamsClosed(stream_id=ids, end_offset=end_offset)], answer

    def _decide_each(
        self,
        request: requests.CloseStreams | requests.DeleteStreams,
        verdict: Callable[[Head[int] | None, Any, int], ErrorCode],
        *,
        fence_failover: bool = True,
        recoverer: values.NodeIdentity | None = None,
    ) -> tuple[ErrorsAnswer, list[tuple[Any, Head[int]]]]:
        """Return the answer, and the accepted streams with their heads."""
        error = self._nodes.check(request.node, fence_failover=fence_failover, recoverer=recoverer)
        if error is not ErrorCode.NONE:
            return ErrorsAnswer(errors=(error,) * len(request.streams)), []

        heads = self._streams.heads([item.stream_id for item in request.streams])
        errors, accepted = [], []
        for item, head in zip(request.streams, heads, strict=True):
            error = verdict(head, item, request.node.node_id)
            errors.append(error)
            if error is ErrorCode.NONE and head is not None:
                accepted.append((item, head))
        return ErrorsAnswer(errors=tuple(errors)), accepted

    def abandon(
        self, request: requests.AbandonUploads
    ) -> tuple[list[rec.Record], AbandonUploadsAnswer]:
        """Give up uploads that a node can no longer complete. Completed ones are ignored."""
        node_id, epoch = request.node_id, request.close_streams_of_epoch
        error = ErrorCode.NONE if self._nodes.get(node_id) else ErrorCode.NODE_EPOCH_NOT_EXIST
        if error is ErrorCode.NONE and epoch is not None:
            error = self._nodes.check_newest(values.NodeIdentity(node_id, epoch))
        if error is not ErrorCode.NONE:
            return [], AbandonUploadsAnswer(error=error)

        records: list[rec.Record] = []
        closed = left = 0
        if epoch is not None:
            records, closed, left = self._release_records(values.NodeIdentity(node_id, epoch))

        owed = self._streams.active_uploads(node_id)
        if request.stream_ids:
            owed = owed.of_streams(values.column(request.stream_ids))
        # A partial answer would hide abandoned ranges, so one that is too large is an error.
        fit = budget.ANSWER_BYTES // budget.RANGE_BYTES
        budget.require_all(min(fit, len(owed)), len(owed), "stream_ids")

        abandoned = tuple(PendingUpload(node_id, *cells) for cells in owed.rows())
        answer = AbandonUploadsAnswer(
            error=error, abandoned=abandoned, closed_streams=closed, open_streams=left
        )
        if abandoned:
            records.append(rec.UploadsAbandoned(node_id=node_id, stream_id=owed.stream_id))
        return records, answer

    def release(
        self, request: requests.ReleaseStreams
    ) -> tuple[list[rec.Record], AbandonUploadsAnswer]:
        """Fence a process without pending uploads and close its streams, unless it is outdated."""
        error = self._nodes.check_newest(request.node)
        # With a pending upload the node must be recovered instead.
        if error is ErrorCode.NONE and len(self._streams.active_uploads(request.node.node_id)):
            error = ErrorCode.STREAM_NOT_CLOSED
        if error is not ErrorCode.NONE:
            return [], AbandonUploadsAnswer(error=error)
        records, closed, left = self._release_records(request.node)
        return records, AbandonUploadsAnswer(error=error, closed_streams=closed, open_streams=left)

    def _release_records(self, node: values.NodeIdentity) -> tuple[list[rec.Record], int, int]:
        """Return the records, the number of streams they close, and the number left open."""
        ids, _ = self._streams.page_opened_by(node.node_id, 0, CLOSED_AT_ONCE_MAX)
        if not len(ids):
            return [], 0, 0

        records: list[rec.Record] = []
        # Fence first: the process may still be running.
        fence, _ = self._nodes.decide_epoch(node, failover=True)
        if fence is not None:
            records.append(fence)
        records.append(rec.StreamsClosed(stream_id=ids, end_offset=values.EMPTY_COLUMN))
        return records, len(ids), self._streams.open_count(node.node_id) - len(ids)

    # ---- trim and delete ----

    def trim(self, request: requests.TrimStreams) -> tuple[list[rec.Record], TrimStreamsAnswer]:
        """Raise the starts of streams."""
        node, trims = request.node, request.streams
        error = self._nodes.check(node)
        if error is not ErrorCode.NONE:
            count = len(trims)
            return [], TrimStreamsAnswer(errors=(error,) * count, start_offsets=(-1,) * count)
        records, errors, starts = self.trim_of_node(node.node_id, trims, {})
        return records, TrimStreamsAnswer(errors=errors, start_offsets=starts)

    def trim_of_node(
        self,
        node_id: int,
        trims: Sequence[requests.StreamToTrim],
        raised_ends: Mapping[int, int],
    ) -> tuple[list[rec.Record], tuple[ErrorCode, ...], tuple[int, ...]]:
        """Decide trims of a node whose identity has been checked.

        `raised_ends` are the ends of streams after the commit that contains the trims. Returns the
        records of accepted trims, each trim's outcome, and each stream's new start.
        """
        heads = self._streams.heads([item.stream_id for item in trims])
        errors, starts, trimmed = [], [], []
        for head, item in zip(heads, trims, strict=True):
            error, start = _trim_verdict(head, item, node_id, raised_ends.get(item.stream_id, 0))
            errors.append(error)
            starts.append(start)
            if head is not None and start > head.start_offset:
                trimmed.append((item.stream_id, start))
        return _trim_records(trimmed), tuple(errors), tuple(starts)

    def starts_of(self, stream_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the starts of streams, -1 for unknown ones."""
        heads = self._streams.heads(stream_ids)
        return tuple(-1 if head is None else head.start_offset for head in heads)

    def delete(
        self, request: requests.DeleteStreams, now_ms: int
    ) -> tuple[list[rec.Record], ErrorsAnswer]:
        """Delete closed and shared streams and destroy their stream objects.

        Stream set objects stay. Sweeps destroy the remaining objects of very large streams later.
        """
        answer, accepted = self._decide_each(request, _delete_verdict)
        deleted = [item.stream_id for item, _ in accepted]
        return list(self._deletion(deleted, now_ms)) if deleted else [], answer

    def _deletion(self, stream_ids: Sequence[int], now_ms: int) -> Iterator[rec.Record]:
        yield rec.StreamsDeleted(stream_id=values.column(stream_ids))
        held = self._objects.list_to_destroy(stream_ids, DESTROYED_AT_ONCE_MAX)
        if len(held):
            yield rec.ObjectsDestroyed(object_id=held, marked_at_ms=now_ms, deep=True)


def _first_answer(
    request: requests.CreateStreams,
    key: request_identity.RequestKey,
    issued: request_identity.IssuedIds,
) -> CreateStreamsAnswer:
    issued.require_count(key, len(request.streams))
    tags = [stream.tags for stream in request.streams]
    shared = [stream.shared for stream in request.streams]
    # 0 is the digest of a version that did not store one.
    if issued.content_digest not in (0, request_identity.digest_of_streams(tags, shared)):
        raise InvalidRequestError(
            "request_id",
            f"{request.request_id!r} was used for streams with other tags or of another kind: "
            "use a new id for a new request",
        )
    ids = tuple(range(issued.first_id, issued.first_id + issued.count))
    return CreateStreamsAnswer(error=ErrorCode.NONE, stream_ids=ids)


def _close_verdict(head: Head[int] | None, item: requests.StreamToClose, node_id: int) -> ErrorCode:
    if head is not None and head.state == values.StreamState.SHARED:
        return ErrorCode.STREAM_KIND_MISMATCH
    error = check_owner(head, item.stream_epoch, node_id)
    if error is not ErrorCode.NONE or head is None or item.end_offset is None:
        return error
    # A repeated close must name the same end, and no close may cut off committed data.
    closed = head.state == values.StreamState.CLOSED
    wrong = item.end_offset != head.end_offset if closed else item.end_offset < head.end_offset
    return ErrorCode.OFFSET_NOT_MATCHED if wrong else ErrorCode.NONE


TRIM_AHEAD_MAX = 1 << 40
"""Maximum distance of a trim above a stream's end, so that no trim exhausts its offsets."""


def _trim_verdict(
    head: Head[int] | None, item: requests.StreamToTrim, node_id: int, raised_end: int
) -> tuple[ErrorCode, int]:
    """Return the outcome of a trim and the stream's new start, -1 if rejected.

    A trim cannot pass the appended records: a writer would continue below the start, and its
    records would be acknowledged but never visible. The controller knows the committed end. Only
    the owner knows how far it has appended above that.
    """
    error = check_owner(head, item.stream_epoch, node_id)
    if error is not ErrorCode.NONE or head is None:
        return error, -1
    if head.state == values.StreamState.CLOSED:
        return ErrorCode.STREAM_NOT_OPENED, -1

    end = max(head.end_offset, raised_end)
    start = item.new_start_offset
    if head.state == values.StreamState.SHARED:
        # Nobody has records that are not committed.
        is_within = head.start_offset <= start <= end
        return (ErrorCode.NONE, start) if is_within else (ErrorCode.OFFSET_NOT_MATCHED, -1)
    if item.appended_end_offset is not None:
        # The trim ends where the owner's records end.
        start = min(start, max(end, item.appended_end_offset))
    if start < head.start_offset or start > end + TRIM_AHEAD_MAX:
        return ErrorCode.OFFSET_NOT_MATCHED, -1
    return ErrorCode.NONE, start


def _trim_records(trimmed: Sequence[tuple[int, int]]) -> list[rec.Record]:
    """Return the record that raises the starts of streams, given as (stream, new start)."""
    if not trimmed:
        return []
    ids, starts = zip(*trimmed, strict=True)
    return [rec.StreamsTrimmed(stream_id=values.column(ids), start_offset=values.column(starts))]


def _delete_verdict(
    head: Head[int] | None, item: requests.StreamToDelete, _node_id: int
) -> ErrorCode:
    error = check_epoch(head, item.stream_epoch)
    # A repeat of an accepted deletion is accepted as well.
    if error is ErrorCode.STREAM_NOT_EXIST:
        return ErrorCode.NONE
    if error is ErrorCode.NONE and head is not None and head.state == values.StreamState.OPENED:
        return ErrorCode.STREAM_NOT_CLOSED
    return error
