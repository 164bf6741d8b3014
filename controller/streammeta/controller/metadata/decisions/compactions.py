"""Compactions: decisions on commits of objects that replace others with the same ranges.

The results must contain exactly the data of the sources above the start of existing streams. The
index then swaps the sources' rows for the results' rows within one log entry, so that no reader
ever sees a hole or an overlap. Ranges below a stream's start, or of deleted streams, are dead:
results may contain them or not. The commits of results are replayed by `uploads`.

A result contains no record that is not in a source. Results without time bounds therefore get the
bounds of all sources together. These may be too wide, which look-ups by time must tolerate anyway,
but without them one compaction would make its streams' times unknown forever. Checksums describe
other bytes and are not passed on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import answers
from streammeta.controller.metadata.api.request_identity import digest_of_commit, digest_of_merge
from streammeta.controller.metadata.api.requests import CommitStreamObject, CommitStreamSetObject
from streammeta.controller.metadata.decisions import commit_rules
from streammeta.controller.metadata.decisions.uploads import Uploads, stream_set_object_record
from streammeta.controller.metadata.registries.nodes import Nodes
from streammeta.controller.metadata.registries.object_queries import ObjectQueries
from streammeta.controller.metadata.registries.stream_ranges import StreamSpans
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables import values
from streammeta.controller.metadata.tables.object_facts import UNKNOWN, Facts, facts_of_one
from streammeta.controller.records import record as rec

_NONE = ErrorCode.NONE
_NOT_FOUND = ErrorCode.COMPACTED_OBJECTS_NOT_FOUND


@dataclass(eq=False)
class Compactions:
    """Decisions on CommitStreamSetObject with sources, and on CommitStreamObject."""

    _nodes: Nodes
    _streams: Streams
    _objects: ObjectQueries
    _uploads: Uploads
    _repeats: commit_rules.Repeats

    # ---- stream set objects ----

    def decide_stream_set_object(
        self, request: CommitStreamSetObject, now_ms: int
    ) -> tuple[list[rec.Record], answers.CommitStreamSetObjectAnswer]:
        """Decide a compaction of stream set objects. The request is well-formed."""
        error = self._nodes.check(request.node, fence_failover=not request.failover)
        if error is not _NONE:
            return [], commit_rules.failed_commit(request, error)

        ids = request.compacted_object_ids
        rows = self._objects.rows(ids)
        fit = self._objects.are_stream_set_objects_of(rows, request.node.node_id)
        if ids.tolist() == [request.object_id]:
            records, error = self._replace_attributes(request, rows, fit)
            return records, commit_rules.failed_commit(request, error)

        digest = digest_of_commit(request)
        repeat = self._set_repeat(request, digest)
        if repeat is commit_rules.Repeat.SAME:
            return [], self._repeats.first_answer(request, digest)
        if repeat in commit_rules.REJECTED:
            return [], commit_rules.failed_commit(request, commit_rules.REJECTED[repeat])

        if not fit.all() or not _are_usable(ids, request.object_id):
            return [], commit_rules.failed_commit(request, _NOT_FOUND)
        verdicts = self._check_results(request, rows)
        error = verdicts.error()
        if error is not _NONE:
            return [], verdicts.answer(error)
        self._objects.require_room(request.object_size, request.stream_objects.object_size)
        return list(self._set_records(request, rows, digest, now_ms)), verdicts.answer(error)

    def _set_repeat(self, request: CommitStreamSetObject, digest: int) -> commit_rules.Repeat:
        if request.object_id >= 0:
            return self._repeats.compare_object(request.object_id, digest)
        results = request.stream_objects.object_id
        if len(results):
            # All results were committed together, so the first one decides.
            return self._repeats.compare((int(results[0]),), digest)
        # Without a result only the sources show that the commit was made.
        gone = self._were_destroyed(request.compacted_object_ids, dropped=values.EMPTY_COLUMN)
        return commit_rules.Repeat.SAME if gone else commit_rules.Repeat.NEW

    def _were_destroyed(self, ids: values.Int64Column, dropped: values.Int64Column) -> bool:
        """Return whether all sources of a compaction without result were destroyed.

        Objects in `dropped` need not have been committed, but at least one source must.
        """
        states = self._objects.states(ids)
        gone = (states == values.ObjectState.MARK_DESTROYED) | (
            states == values.ObjectState.REMOVED
        )
        committed = self._objects.was_committed(ids)
        excused = (states == values.ObjectState.MARK_DESTROYED) & np.isin(ids, dropped)
        return bool(gone.all() and committed.any() and (committed | excused).all())

    def _check_results(
        self, request: CommitStreamSetObject, rows: values.Int64Column
    ) -> commit_rules.Verdicts:
        ranges, others = request.ranges, request.stream_objects
        stream_id = np.concatenate((ranges.stream_id, others.stream_id))
        outputs = StreamSpans(
            stream_id,
            np.concatenate((ranges.start_offset, others.start_offset)),
            np.concatenate((ranges.end_offset, others.end_offset)),
        )
        verdicts, covered = self._check_outputs(outputs, self._live_parts(rows))
        of_ranges, of_others = np.split(verdicts, [len(ranges.stream_id)])
        if len(others.object_id):
            self._repeats.reject_unusable(others.object_id, of_others)
        return commit_rules.Verdicts(of_ranges, of_others, covered)

    def _check_outputs(
        self, outputs: StreamSpans, sources: StreamSpans
    ) -> tuple[values.Int64Column, bool]:
        """Check outputs, which do not overlap, against the live parts of their sources."""
        verdicts = np.zeros(len(outputs), dtype=np.int64)
        issued = np.flatnonzero(outputs.stream_id < len(self._streams))
        if len(issued) < len(outputs):
            # No source contains data of a stream that was never created.
            verdicts[outputs.stream_id >= len(self._streams)] = ErrorCode.OFFSET_NOT_MATCHED

        starts = self._streams.live_starts(outputs.take(issued))
        live = starts < outputs.end_offset[issued]
        rows = issued[live]
        # Row order within a stream does not matter to the check.
        order = np.argsort(outputs.stream_id[rows])
        rows = rows[order]
        parts = StreamSpans(outputs.stream_id[rows], starts[live][order], outputs.end_offset[rows])

        outside, covered = commit_rules.check_coverage(parts, sources)
        verdicts[rows[outside]] = ErrorCode.OFFSET_NOT_MATCHED
        return verdicts, covered

    def _live_parts(self, rows: values.Int64Column) -> StreamSpans:
        """Return the parts of objects above the starts of existing streams."""
        spans = self._objects.spans(rows)
        starts = self._streams.live_starts(spans)
        live = starts < spans.end_offset
        parts = StreamSpans(spans.stream_id, starts, spans.end_offset)
        return parts if np.count_nonzero(live) == len(live) else parts.take(live)

    def _set_records(
        self, request: CommitStreamSetObject, rows: values.Int64Column, digest: int, now_ms: int
    ) -> Iterator[rec.Record]:
        bounds = self._objects.time_bounds(rows)
        if request.object_id >= 0:
            if request.order_id < 0:
                # The result takes the place of its first source in the node's order.
                request = replace(request, order_id=self._objects.least_order_id(rows))
            facts = _result_facts(request, bounds)
            oldest = self._objects.least_data_time_ms(rows)
            yield stream_set_object_record(
                request, request.ranges, facts, digest, now_ms, data_time_ms=oldest
            )

        others = _fill_bounds(request.stream_objects, bounds)
        every = np.ones(len(others.stream_id), dtype=np.bool_)
        yield from self._uploads.stream_object_records(others, every, digest, now_ms)
        yield rec.ObjectsDestroyed(object_id=request.compacted_object_ids, marked_at_ms=now_ms)

    # ---- stream objects ----

    def decide_stream_object(
        self, request: CommitStreamObject, now_ms: int
    ) -> tuple[list[rec.Record], answers.CommitStreamObjectAnswer]:
        """Decide a compaction of stream objects. The request is well-formed."""
        records, error = self._decide_stream_object(request, now_ms)
        return records, answers.CommitStreamObjectAnswer(error=error)

    def _decide_stream_object(
        self, request: CommitStreamObject, now_ms: int
    ) -> tuple[list[rec.Record], ErrorCode]:
        node_id = request.node.node_id
        error = self._nodes.check(request.node)
        if error is _NONE:
            error = self._streams.ownership(request.stream_id, request.stream_epoch, node_id)
        if error is not _NONE:
            return [], error

        ids = request.source_object_ids
        rows = self._objects.rows(ids)
        fit = self._objects.are_objects_of_stream(rows, request.stream_id)
        if ids.tolist() == [request.object_id]:
            return self._replace_attributes(request, rows, fit)

        sources = _Sources(ids, rows, _read_operations(request))
        digest = digest_of_merge(request)
        repeat = self._merge_repeat(request, sources, digest)
        if repeat is commit_rules.Repeat.SAME:
            return [], _NONE
        if repeat in commit_rules.REJECTED:
            return [], commit_rules.REJECTED[repeat]

        error = self._source_error(request, sources, fit)
        if error is not _NONE:
            return [], error

        self._objects.require_room(request.object_size, values.EMPTY_COLUMN)
        return list(self._stream_object_records(request, sources, digest, now_ms)), _NONE

    def _merge_repeat(
        self, request: CommitStreamObject, sources: "_Sources", digest: int
    ) -> commit_rules.Repeat:
        if request.object_id >= 0:
            return self._repeats.compare_object(request.object_id, digest)
        dropped = sources.ids[sources.operations == values.SourceOperation.DELETE]
        return (
            commit_rules.Repeat.SAME
            if self._were_destroyed(sources.ids, dropped)
            else commit_rules.Repeat.NEW
        )

    def _source_error(
        self, request: CommitStreamObject, sources: "_Sources", fit: values.Mask
    ) -> ErrorCode:
        rows = sources.rows
        # A source that was never committed may be dropped, but contributes no data.
        dropped = self._objects.are_in_state(rows, values.ObjectState.PREPARED)
        dropped &= sources.operations == values.SourceOperation.DELETE
        if not (fit | dropped).all() or not _are_usable(sources.ids, request.object_id):
            return _NOT_FOUND

        kept = sources.operations == values.SourceOperation.KEEP_DATA
        # A composite has no data of its own that another composite could link to.
        if (self._objects.kinds(rows[kept]) == values.ObjectKind.COMPOSITE).any():
            return ErrorCode.INVALID_REQUEST

        outputs = StreamSpans()
        if request.object_id >= 0:
            outputs = StreamSpans(
                values.column([request.stream_id]),
                values.column([request.start_offset]),
                values.column([request.end_offset]),
            )
        verdicts, covered = self._check_outputs(outputs, self._live_parts(rows))
        return _NONE if covered and not verdicts.any() else ErrorCode.OFFSET_NOT_MATCHED

    def _stream_object_records(
        self, request: CommitStreamObject, sources: "_Sources", digest: int, now_ms: int
    ) -> Iterator[rec.Record]:
        composite = False
        if request.object_id >= 0:
            composite = request.attributes & values.KIND_MASK == values.COMPOSITE_BITS
            committed = sources.rows[
                self._objects.are_in_state(sources.rows, values.ObjectState.COMMITTED)
            ]
            facts = _result_facts(request, self._objects.time_bounds(committed))
            yield rec.StreamObjectsCommitted(
                committed_at_ms=now_ms,
                object_id=values.column([request.object_id]),
                object_size=values.column([request.object_size]),
                attributes=values.column([request.attributes]),
                stream_id=values.column([request.stream_id]),
                start_offset=values.column([request.start_offset]),
                end_offset=values.column([request.end_offset]),
                content_digest=digest,
                **facts.columns(),
            )

        # A composite keeps linked objects of its sources whose data it still covers.
        kept_above = request.start_offset if composite else None
        linked = [sources.with_operation(values.SourceOperation.KEEP_DATA)]
        destroyed: list[rec.ObjectsDestroyed] = []

        for operation in (values.SourceOperation.DELETE, values.SourceOperation.DEEP_DELETE):
            named = sources.with_operation(operation)
            kept, gone = self._links_of(named, kept_above)
            linked.append(kept)
            ids = np.concatenate((named, gone))
            if len(ids):
                deep = operation is values.SourceOperation.DEEP_DELETE
                destroyed.append(
                    rec.ObjectsDestroyed(object_id=ids, marked_at_ms=now_ms, deep=deep)
                )

        held = np.concatenate(linked)
        # Links come first: objects linked to a destroyed composite would be destroyed with it.
        if len(held):
            yield rec.ObjectsLinked(composite_id=request.object_id, object_id=held)
        yield from destroyed

    def _links_of(
        self, composites: values.Int64Column, kept_above: int | None
    ) -> tuple[values.Int64Column, values.Int64Column]:
        """Return the objects linked to composites: those that end above an offset, and the rest."""
        ids = self._objects.list_linked(composites)
        if kept_above is None or not len(ids):
            return values.EMPTY_COLUMN, ids
        # A linked object has one range.
        kept = self._objects.spans(self._objects.rows(ids)).end_offset > kept_above
        return ids[kept], ids[~kept]

    # ---- attributes only ----

    def _replace_attributes(
        self,
        request: CommitStreamSetObject | CommitStreamObject,
        rows: values.Int64Column,
        fit: values.Mask,
    ) -> tuple[list[rec.Record], ErrorCode]:
        if rows[0] < 0:
            return [], ErrorCode.OBJECT_NOT_EXIST
        if not self._objects.are_in_state(rows, values.ObjectState.COMMITTED)[0]:
            return [], ErrorCode.OBJECT_NOT_COMMITTED
        if not fit[0]:
            return [], _NOT_FOUND
        # A repeat finds the attributes in place.
        if self._objects.attributes(rows)[0] == request.attributes:
            return [], _NONE
        record = rec.ObjectAttributesSet(object_id=request.object_id, attributes=request.attributes)
        return [record], _NONE


@dataclass(frozen=True, slots=True, eq=False)
class _Sources:
    """Sources of a compaction of stream objects, with the operation on each."""

    ids: values.Int64Column
    rows: values.Int64Column
    operations: values.Int64Column

    def with_operation(self, operation: values.SourceOperation) -> values.Int64Column:
        """Return the ids of sources with an operation."""
        named: values.Int64Column = self.ids[self.operations == operation]
        return named


def _result_facts(
    request: CommitStreamSetObject | CommitStreamObject, bounds: tuple[int, int]
) -> Facts:
    if request.max_timestamp_ms != UNKNOWN:
        bounds = request.min_timestamp_ms, request.max_timestamp_ms
    return facts_of_one(*bounds, request.crc32c)


def _fill_bounds(
    rows: values.StreamObjectColumns, bounds: tuple[int, int]
) -> values.StreamObjectColumns:
    """Return the rows with these time bounds where their own are unknown."""
    low, high = bounds
    if high == UNKNOWN:
        return rows
    if not len(rows.max_timestamp_ms):
        # Empty columns become explicit, so that each row can get bounds.
        given = np.full(len(rows.object_id), UNKNOWN)
        rows = replace(rows, min_timestamp_ms=given, max_timestamp_ms=given)
    missing = rows.max_timestamp_ms == UNKNOWN
    return replace(
        rows,
        min_timestamp_ms=np.where(missing, low, rows.min_timestamp_ms),
        max_timestamp_ms=np.where(missing, high, rows.max_timestamp_ms),
    )


def _read_operations(request: CommitStreamObject) -> values.Int64Column:
    if request.operations:
        return values.column(request.operations)
    return np.full(
        len(request.source_object_ids), int(values.SourceOperation.DELETE), dtype=np.int64
    )


def _are_usable(ids: values.Int64Column, object_id: int) -> bool:
    """Return whether no source appears twice or is the result."""
    named = set(ids.tolist())
    return len(named) == len(ids) and object_id not in named
