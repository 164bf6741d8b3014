"""Uploads: decisions on commits of new objects, and replay of all commits.

A batch of uploads whose rows all continue their streams is decided as one. Any other batch is
decided upload by upload, each with the effects of the preceding ones. The rules for rows are in
`commit_rules`. Compactions are decided in `compactions`, and their commits are replayed here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from streammeta.controller.errors import ErrorCode
from streammeta.controller.features import FIELDS
from streammeta.controller.metadata.api import answers, request_identity
from streammeta.controller.metadata.api.requests import CommitStreamSetObject, CommitUploads
from streammeta.controller.metadata.decisions import commit_rules, shared_rows
from streammeta.controller.metadata.registries.cluster_modes import FeatureLevel
from streammeta.controller.metadata.registries.nodes import Nodes
from streammeta.controller.metadata.registries.objects import Objects
from streammeta.controller.metadata.registries.stream_ranges import StreamSpans
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables import values
from streammeta.controller.metadata.tables.object_facts import Facts, facts_of_one, select_facts
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.records import record as rec

# Looking enum members up is slow, and every commit needs these.
_NONE = ErrorCode.NONE
_PREPARED = int(values.ObjectState.PREPARED)

_DIGESTS_OF_LEFT_OUT_ROWS = FIELDS["CommitRowsRejectedRecord", "content_digest"]
"""Feature level from which left-out rows are remembered with their commit's digest."""


@dataclass(eq=False)
class Uploads:
    """Decisions on CommitUploads and CommitStreamSetObject, and replay of every commit."""

    _nodes: Nodes
    _streams: Streams
    _objects: Objects
    _repeats: commit_rules.Repeats
    _feature_level: FeatureLevel

    def __post_init__(self) -> None:
        self._continuity = commit_rules.Continuity(self._streams)

    # ---- deciding one upload ----

    def decide(
        self, request: CommitStreamSetObject, now_ms: int
    ) -> tuple[list[rec.Record], answers.CommitStreamSetObjectAnswer]:
        """Decide an upload. The request is well-formed and not a compaction."""
        error = self._nodes.check(
            request.node, fence_failover=not request.failover, recoverer=request.recoverer
        )
        if error is not _NONE:
            return [], commit_rules.failed_commit(request, error)

        if request.order_id < 0 <= request.object_id:
            request = replace(request, order_id=request.object_id)

        digest = request_identity.digest_of_commit(request)
        repeat = self._repeat_of(request, digest)
        if repeat is commit_rules.Repeat.SAME:
            return [], self._repeats.first_answer(request, digest)
        if repeat in commit_rules.REJECTED:
            return [], commit_rules.failed_commit(request, commit_rules.REJECTED[repeat])

        verdicts = self._check(request)
        error = verdicts.error()
        if error is not _NONE and (
            request.on_conflict is values.OnConflict.REJECT_ALL or not verdicts.any_valid()
        ):
            return [], verdicts.answer(error)

        self._objects.require_room(request.object_size, request.stream_objects.object_size)
        records = list(self._records(request, verdicts, digest, now_ms))
        # Verdicts of left-out rows are remembered: a repeat must get the same answer.
        if error is not _NONE:
            has_digests = self._feature_level.current >= _DIGESTS_OF_LEFT_OUT_ROWS
            left_out_of = digest if has_digests else request_identity.NO_DIGEST
            records.append(_rejection_record(request, verdicts, left_out_of))
        return records, verdicts.answer(_NONE, now_ms)

    def _repeat_of(self, request: CommitStreamSetObject, digest: int) -> commit_rules.Repeat:
        if request.object_id >= 0:
            return self._repeats.compare_object(request.object_id, digest)
        return self._repeats.compare(request.stream_objects.object_id.tolist(), digest)

    def _check(self, request: CommitStreamSetObject) -> commit_rules.Verdicts:
        rows = request.stream_objects
        ranges = self._check_rows(request.node.node_id, request.ranges)
        shared = self._repeats.shared.check(request.shared_rows)
        if not len(rows.stream_id):
            return commit_rules.Verdicts(ranges, shared=shared)
        verdicts = self._check_rows(request.node.node_id, rows)
        self._repeats.reject_unusable(rows.object_id, verdicts)
        return commit_rules.Verdicts(ranges, verdicts, shared=shared)

    def _check_rows(self, node_id: int, rows: values.RangeColumns) -> values.Int64Column:
        owed = self._streams.pending_of(node_id)
        may_be_simple = len(rows.stream_id) and not len(owed)
        if may_be_simple and self._continuity.all_continue(node_id, rows, repeats=False):
            return np.zeros(len(rows.stream_id), dtype=np.int64)
        return self._continuity.check(node_id, rows, commit_rules.Ahead(owed))

    def _records(
        self,
        request: CommitStreamSetObject,
        verdicts: commit_rules.Verdicts,
        digest: int,
        now_ms: int,
    ) -> Iterator[rec.Record]:
        ranges = request.ranges

        if np.count_nonzero(verdicts.ranges):
            ranges = ranges.ranges_at(verdicts.ranges == 0)
        if request.object_id >= 0:
            facts = facts_of_one(request.min_timestamp_ms, request.max_timestamp_ms, request.crc32c)
            appended = shared_rows.ranges_of(request.shared_rows, verdicts.shared)
            every = shared_rows.merge_ranges(ranges, appended)
            yield stream_set_object_record(
                request, every, facts, digest, now_ms, data_time_ms=now_ms
            )
            yield from shared_rows.producer_records(request.shared_rows, verdicts.shared, now_ms)

        rows, owed = request.stream_objects, self._streams.pending_of(request.node.node_id)
        if not (len(rows.stream_id) or len(owed)):
            return
        good = verdicts.stream_objects == 0
        yield from self.stream_object_records(rows, good, digest, now_ms)

        if len(owed):
            stream_id = np.concatenate((ranges.stream_id, rows.stream_id[good]))
            end = np.concatenate((ranges.end_offset, rows.end_offset[good]))
            after = self._continuity.advance_owed(owed, stream_id, end)
            yield from _owed_changes(request.node.node_id, owed, after)

    def stream_object_records(
        self, rows: values.StreamObjectColumns, valid: values.Mask, digest: int, now_ms: int
    ) -> Iterator[rec.Record]:
        """Yield the records that commit the valid rows and destroy objects of deleted streams.

        `digest` is the digest of their commit.
        """
        if not valid.any():
            return

        attributes = rows.attributes if len(rows.attributes) else np.zeros_like(rows.object_id)
        stream_id, object_id = rows.stream_id[valid], rows.object_id[valid]
        yield rec.StreamObjectsCommitted(
            committed_at_ms=now_ms,
            object_id=object_id,
            object_size=rows.object_size[valid],
            attributes=attributes[valid],
            stream_id=stream_id,
            start_offset=rows.start_offset[valid],
            end_offset=rows.end_offset[valid],
            content_digest=digest,
            **select_facts(rows, valid).columns(),
        )
        gone = ~self._streams.exist(stream_id)
        if gone.any():
            # Readers and compactions will never need an object of a deleted stream.
            yield rec.ObjectsDestroyed(object_id=object_id[gone], marked_at_ms=now_ms, deep=True)

    # ---- deciding a batch ----

    def decide_batch(
        self, request: CommitUploads, now_ms: int
    ) -> tuple[list[rec.Record], answers.CommitUploadsAnswer]:
        """Decide uploads one after the other. The request is well-formed."""
        error = self._nodes.check(request.node)
        if error is not _NONE:
            return [], answers.CommitUploadsAnswer(
                errors=np.full(len(request.object_id), int(error)),
                range_errors=np.full(len(request.ranges.stream_id), int(error)),
            )

        digests = request_identity.digests_of_uploads(request)
        if not self._all_can_be_committed(request):
            return self._decide_in_turn(request, digests, now_ms)
        self._objects.require_room(0, request.object_size)
        record = uploads_record(request, digests, now_ms)
        return [record], answers.CommitUploadsAnswer(
            errors=np.zeros(len(request.object_id), dtype=np.int64),
            range_errors=np.zeros(len(request.ranges.stream_id), dtype=np.int64),
        )

    def _all_can_be_committed(self, request: CommitUploads) -> bool:
        node_id, ids = request.node.node_id, request.object_id
        if len(self._streams.pending_of(node_id)):
            return False
        # With pending uploads or several rows per stream, rows depend on those before them.
        several = len(ids) > 1
        if not self._continuity.all_continue(node_id, request.ranges, repeats=several):
            return False
        if not several:
            return self._objects.is_prepared(int(ids[0]))
        return bool(np.count_nonzero(self._objects.states(ids) == _PREPARED) == len(ids))

    def _decide_in_turn(
        self, request: CommitUploads, digests: values.Int64Column, now_ms: int
    ) -> tuple[list[rec.Record], answers.CommitUploadsAnswer]:
        node_id = request.node.node_id
        owed = self._streams.pending_of(node_id)
        turn = commit_rules.Ahead(owed)
        count, rows = request.range_count, request.ranges
        errors = np.zeros(len(count), dtype=np.int64)
        row_errors = np.zeros(len(rows.stream_id), dtype=np.int64)
        accepted = np.zeros(len(count), dtype=np.bool_)

        stops = np.cumsum(count).tolist()
        for index, (object_id, stop) in enumerate(
            zip(request.object_id.tolist(), stops, strict=True)
        ):
            part = slice(stop - int(count[index]), stop)
            repeat = self._repeats.compare_object(object_id, int(digests[index]))
            if repeat in commit_rules.REJECTED:
                errors[index] = row_errors[part] = commit_rules.REJECTED[repeat]
            elif repeat is commit_rules.Repeat.SAME:
                row_errors[part] = self._repeats.range_verdicts(
                    object_id, rows.stream_id[part], int(digests[index])
                )
            else:
                verdicts = commit_rules.Verdicts(
                    self._take_turn(node_id, rows.ranges_at(part), turn)
                )
                row_errors[part] = verdicts.ranges
                errors[index] = verdicts.error()
                accepted[index] = not errors[index]

        records: list[rec.Record] = []
        if accepted.any():
            chosen = select_uploads(request, accepted)
            self._objects.require_room(0, chosen.object_size)
            records.append(uploads_record(chosen, digests[accepted], now_ms))
            records.extend(_owed_changes(node_id, owed, turn.owed))
        return records, answers.CommitUploadsAnswer(errors=errors, range_errors=row_errors)

    def _take_turn(
        self, node_id: int, rows: values.RangeColumns, turn: commit_rules.Ahead
    ) -> values.Int64Column:
        """Check one upload and, if it is accepted, apply its effects to `turn`."""
        verdicts = self._continuity.check(node_id, rows, turn)
        if np.count_nonzero(verdicts):
            return verdicts

        high = self._streams.end_offsets(rows.stream_id)
        for stream_id, end, before in zip(
            rows.stream_id.tolist(), rows.end_offset.tolist(), high.tolist(), strict=True
        ):
            if end > turn.ends.get(stream_id, before):
                turn.ends[stream_id] = end
        if len(turn.owed):
            turn.owed = self._continuity.advance_owed(turn.owed, rows.stream_id, rows.end_offset)
        return verdicts

    # ---- replaying ----

    def replay_stream_set_objects(self, record: rec.StreamSetObjectsCommitted, undo: Undo) -> None:
        """Replay `StreamSetObjectsCommitted`."""
        rows = self._objects.replay_stream_set_objects(record, undo)
        streams, ends = record.ranges.stream_id, record.ranges.end_offset
        if len(record.object_id) == 1 or not self._may_have_twins(record.ranges):
            self._advance(streams, ends, rows, undo)
            return
        # Lists are appended to by vectors, which need each stream once.
        for turn in _split_turns(streams):
            self._advance(streams[turn], ends[turn], rows[turn], undo)

    def _may_have_twins(self, ranges: rec.StreamSetObjectRanges) -> bool:
        """Return whether a stream may appear twice. Not if all rows continue theirs."""
        expected = self._streams.end_offsets(ranges.stream_id)
        if np.count_nonzero(ranges.start_offset == expected) == len(expected):
            return False
        return commit_rules.has_twins(ranges.stream_id)

    def replay_stream_objects(self, record: rec.StreamObjectsCommitted, undo: Undo) -> None:
        """Replay `StreamObjectsCommitted`."""
        rows = self._objects.replay_stream_objects(record, undo)
        self._advance(record.stream_id, record.end_offset, rows, undo)

    def _advance(
        self,
        streams: values.Int64Column,
        ends: values.Int64Column,
        rows: values.Int64Column,
        undo: Undo,
    ) -> None:
        """Raise the ends of streams and add range rows to their lists.

        A stream whose end rises must appear once. Compactions raise no end.
        """
        if len(streams) == 1 and self._streams.exists(stream_id := streams.item()):
            is_newest = self._streams.raise_end(stream_id, ends.item(), undo)
            self._objects.link_range(streams, rows, undo, is_newest=is_newest)
            return

        existing = self._streams.exist(streams)
        if np.count_nonzero(existing) < len(existing):
            streams, ends, rows = streams[existing], ends[existing], rows[existing]
        if not len(streams):
            return
        before = self._streams.raise_ends(streams, ends, undo)
        self._objects.link_ranges(streams, rows, ends > before, undo)


def _split_turns(stream_id: values.Int64Column) -> list[values.Int64Column]:
    """Split rows so that no part has a stream twice: first occurrences, then second ones, ..."""
    order = np.argsort(stream_id, kind="stable")
    ids = stream_id[order]
    first = np.concatenate(([True], ids[1:] != ids[:-1]))
    places = np.arange(len(ids))
    turn = places - np.maximum.accumulate(np.where(first, places, 0))
    return [order[turn == number] for number in range(int(turn.max()) + 1)]


def stream_set_object_record(
    request: CommitStreamSetObject,
    ranges: values.RangeColumns,
    facts: Facts,
    digest: int,
    now_ms: int,
    *,
    data_time_ms: int,
) -> rec.StreamSetObjectsCommitted:
    """Return the record that commits a request's SSO with these ranges and facts."""
    return rec.StreamSetObjectsCommitted(
        node_id=request.node.node_id,
        committed_at_ms=now_ms,
        data_time_ms=data_time_ms,
        object_id=np.array([request.object_id]),
        order_id=np.array([request.order_id]),
        object_size=np.array([request.object_size]),
        attributes=np.array([request.attributes]),
        range_count=np.array([len(ranges.stream_id)]),
        ranges=ranges.to_record(),
        content_digest=np.array([digest]),
        **facts.columns(),
    )


def uploads_record(
    request: CommitUploads, digests: values.Int64Column, now_ms: int
) -> rec.StreamSetObjectsCommitted:
    """Return the record that commits all stream set objects of a request."""
    return rec.StreamSetObjectsCommitted(
        node_id=request.node.node_id,
        committed_at_ms=now_ms,
        data_time_ms=now_ms,
        object_id=request.object_id,
        order_id=request.object_id,
        object_size=request.object_size,
        attributes=np.zeros(len(request.object_id), dtype=np.int64),
        range_count=request.range_count,
        ranges=request.ranges.to_record(),
        content_digest=digests,
        **select_facts(request).columns(),
    )


def select_uploads(request: CommitUploads, chosen: values.Mask) -> CommitUploads:
    """Return a request with a subset of its uploads."""
    return CommitUploads(
        node=request.node,
        object_id=request.object_id[chosen],
        object_size=request.object_size[chosen],
        range_count=request.range_count[chosen],
        ranges=request.ranges.ranges_at(np.repeat(chosen, request.range_count)),
        **select_facts(request, chosen).columns(),
    )


def _owed_changes(
    node_id: int, before: StreamSpans, after: StreamSpans
) -> Iterator[rec.PendingUploadsSet]:
    """Yield the change from `before` to `after`, which have the same streams in order."""
    changed = before.start_offset != after.start_offset
    if np.count_nonzero(changed):
        spans = after.take(changed)
        yield rec.PendingUploadsSet(
            node_id=node_id,
            stream_id=spans.stream_id,
            start_offset=spans.start_offset,
            end_offset=spans.end_offset,
        )


def _rejection_record(
    request: CommitStreamSetObject, verdicts: commit_rules.Verdicts, digest: int
) -> rec.CommitRowsRejected:
    bad, bad_objects = verdicts.ranges != 0, verdicts.stream_objects != 0
    rows = request.stream_objects
    shared, shared_errors = shared_rows.left_out_streams(request.shared_rows, verdicts.shared)
    owners = np.full(int(np.count_nonzero(bad)) + len(shared), request.object_id)
    streams = (request.ranges.stream_id[bad], shared, rows.stream_id[bad_objects])
    errors = (verdicts.ranges[bad], shared_errors, verdicts.stream_objects[bad_objects])
    return rec.CommitRowsRejected(
        object_id=np.concatenate((owners, rows.object_id[bad_objects])),
        stream_id=np.concatenate(streams),
        error=np.concatenate(errors),
        content_digest=digest,
    )
