"""The slow model's objects, its uploads, and commits that also put values and trim streams."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from streammeta.controller.errors import ErrorCode, FeatureLevelError
from streammeta.controller.metadata.api import answers as a
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.requests import CommitStreamSetObject, CommitUploads
from streammeta.controller.metadata.tables import values as v
from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState
from tests.metadata import slow_model_shared as shared
from tests.metadata import slow_model_streams as streams
from tests.metadata.slow_model_state import Object, State
from tests.metadata.slow_model_streams import issued_before


@dataclass(slots=True)
class Row:
    """One range, of the object that is to hold it."""

    stream: int
    start: int
    end: int
    epoch: int | None
    object_id: int
    size: int = 0
    attributes: int = 0
    times: tuple[int, int] = (-1, -1)
    crc32c: int = -1

    @property
    def held(self) -> tuple[int, int, int]:
        return self.stream, self.start, self.end


Verdicts = tuple[ErrorCode, list[ErrorCode], list[ErrorCode]]
"""Of the whole, of each range, of each stream object. Shared rows have their own results."""


def rows_of(columns: v.RangeColumns | v.StreamObjectColumns, object_id: int) -> list[Row]:
    rows = []
    for index, stream in enumerate(columns.stream_id.tolist()):
        epochs = columns.stream_epoch
        row = Row(
            stream=stream,
            start=int(columns.start_offset[index]),
            end=int(columns.end_offset[index]),
            epoch=int(epochs[index]) if len(epochs) else None,
            object_id=object_id,
        )
        if isinstance(columns, v.StreamObjectColumns):
            row.object_id = int(columns.object_id[index])
            row.size = int(columns.object_size[index])
            row.attributes = int(columns.attributes[index]) if len(columns.attributes) else 0
            row.times = (
                _cell(columns.min_timestamp_ms, index),
                _cell(columns.max_timestamp_ms, index),
            )
            row.crc32c = _cell(columns.crc32c, index)
        rows.append(row)
    return rows


def _cell(values: v.Int64Column, index: int) -> int:
    return int(values[index]) if len(values) else -1


def failed(error: ErrorCode, ranges: list[Row], objects: list[Row]) -> Verdicts:
    """Return the verdicts of a call that fails before its rows are looked at."""
    return error, [error] * len(ranges), [error] * len(objects)


def answer_of(
    verdicts: Verdicts, results: a.SharedRowResults | None = None
) -> a.CommitStreamSetObjectAnswer:
    return a.CommitStreamSetObjectAnswer(
        shared=results,
        error=verdicts[0],
        range_errors=v.column([int(code) for code in verdicts[1]]),
        stream_object_errors=v.column([int(code) for code in verdicts[2]]),
    )


def upload(state: State, request: CommitStreamSetObject, now: int) -> a.CommitStreamSetObjectAnswer:
    ranges = rows_of(request.ranges, request.object_id)
    objects = rows_of(request.stream_objects, -1)
    batches = shared.batches_of(request.shared_rows)
    error = state.check(request.node, fence=not request.failover, recoverer=request.recoverer)
    if error:
        return answer_of(failed(error, ranges, objects), shared.failed_batches(batches, error))
    accept_valid = request.on_conflict == v.OnConflict.ACCEPT_VALID
    return answer_of(
        *_upload(state, request, ranges, objects, batches, accept_valid=accept_valid, now=now)
    )


def uploads(state: State, request: CommitUploads, now: int) -> a.CommitUploadsAnswer:
    errors: list[int] = []
    range_errors: list[int] = []
    first = 0
    for index, object_id in enumerate(request.object_id.tolist()):
        last = first + int(request.range_count[index])
        one = CommitStreamSetObject(
            node=request.node,
            object_id=object_id,
            order_id=object_id,
            object_size=int(request.object_size[index]),
            ranges=_part(request.ranges, first, last),
            min_timestamp_ms=_cell(request.min_timestamp_ms, index),
            max_timestamp_ms=_cell(request.max_timestamp_ms, index),
            crc32c=_cell(request.crc32c, index),
        )
        answer = upload(state, one, now)
        errors.append(answer.error)
        range_errors.extend(answer.range_errors.tolist())
        first = last
    return a.CommitUploadsAnswer(errors=v.column(errors), range_errors=v.column(range_errors))


def _part(ranges: v.RangeColumns, first: int, last: int) -> v.RangeColumns:
    names = ("stream_id", "stream_epoch", "start_offset", "end_offset")
    return v.RangeColumns(**{name: getattr(ranges, name)[first:last] for name in names})


def _upload(
    state: State,
    request: CommitStreamSetObject,
    ranges: list[Row],
    objects: list[Row],
    batches: list[shared.Batch],
    *,
    accept_valid: bool,
    now: int,
) -> tuple[Verdicts, a.SharedRowResults | None]:
    object_id = request.object_id
    deciding = [object_id] if object_id >= 0 else [row.object_id for row in objects]
    content = content_of(request, ranges, objects)
    if any(map(state.was_committed, deciding)):
        verdicts = repeated(state, deciding, content, ranges, objects, accept_valid=accept_valid)
        if verdicts[0]:
            return verdicts, shared.failed_batches(batches, verdicts[0])
        results = shared.repeat(state, batches, object_id, content)
        if shared.leaves_out(batches) and not accept_valid:
            mismatch = ErrorCode.OBJECT_CONTENT_MISMATCH
            return failed(mismatch, ranges, objects), shared.failed_batches(batches, mismatch)
        return verdicts, results
    if object_id >= 0 and not state.is_prepared(object_id):
        missing = ErrorCode.OBJECT_NOT_EXIST
        return failed(missing, ranges, objects), shared.failed_batches(batches, missing)
    range_codes = [_continuity(state, request.node, row) for row in ranges]
    object_codes = [
        object_code(state, row) or _continuity(state, request.node, row) for row in objects
    ]
    shared.judge(state, batches)
    codes = range_codes + object_codes
    every = [*codes, *(batch.code for batch in batches)]
    first_error = next((code for code in every if code), ErrorCode.NONE)
    if first_error and (not accept_valid or all(every)):
        return (first_error, range_codes, object_codes), shared.rejected_batches(batches)
    good_ranges = [row for row, code in zip(ranges, range_codes, strict=True) if not code]
    appended = shared.append(state, batches, object_id, content, now)
    good_ranges += [Row(*span, epoch=None, object_id=object_id) for span in appended]
    good_ranges.sort(key=lambda row: row.stream)
    good_objects = [row for row, code in zip(objects, object_codes, strict=True) if not code]
    if object_id >= 0:
        order = request.order_id if request.order_id >= 0 else object_id
        commit_set_object(state, request, good_ranges, order=order, now=now)
        state.objects[object_id].data_time = now
        state.made_with[object_id] = content
    state.made_with |= dict.fromkeys((row.object_id for row in good_objects), content)
    commit_stream_objects(state, good_objects, now)
    for row, code in zip(ranges + objects, codes, strict=True):
        if code:
            of_commit = str(content) if state.feature_level >= 4 else ""
            state.rejected[(of_commit, row.object_id, row.stream)] = code
    state.raise_ends(row.held for row in good_ranges + good_objects)
    _take_off(state, request.node.node_id, good_ranges + good_objects)
    return (ErrorCode.NONE, range_codes, object_codes), shared.made_batches(batches, now)


def content_of(
    request: CommitStreamSetObject, ranges: list[Row], objects: list[Row]
) -> tuple[object, ...]:
    """What a repeat of a commit has in common with it, whatever the order of its rows."""
    sources = sorted(request.compacted_object_ids.tolist())
    order = request.order_id
    if not sources and order < 0:
        order = request.object_id
    own = (request.object_id, request.node.node_id, order, request.object_size, request.attributes)
    facts = (request.min_timestamp_ms, request.max_timestamp_ms, request.crc32c)
    others = [(row.object_id, row.size, row.attributes, row.times, row.crc32c) for row in objects]
    held = [sorted(row.held for row in ranges), sorted(row.held for row in objects)]
    kind = "compaction" if sources else "upload"
    batches = str(shared.batches_of(request.shared_rows))
    return (kind, own, facts, str(held), sorted(others), sources, effects_of(request), batches)


def effects_of(request: CommitStreamSetObject | r.CommitStreamObject) -> object:
    """What comes with a commit, without conditions and epochs."""
    puts = sorted((item.namespace, item.key, item.value) for item in request.kv_puts)
    return puts, sorted((item.stream_id, item.new_start_offset) for item in request.trims)


def repeated(
    state: State,
    deciding: list[int],
    content: object,
    ranges: list[Row],
    objects: list[Row],
    *,
    accept_valid: bool,
) -> Verdicts:
    """Answer a commit of which an object is committed already."""
    known = [state.made_with[object_id] for object_id in deciding if state.was_committed(object_id)]
    codes = (
        [first_code(state, content, row) for row in ranges],
        [first_object_code(state, content, row) for row in objects],
    )
    same = content in known and (accept_valid or not any((*codes[0], *codes[1])))
    if not same:
        return failed(ErrorCode.OBJECT_CONTENT_MISMATCH, ranges, objects)
    return ErrorCode.NONE, *codes


def first_code(state: State, content: object, row: Row) -> ErrorCode:
    """Return the verdict of the first time about a range: what its object holds was accepted."""
    item = state.objects.get(row.object_id)
    if item is not None and row.stream in {stream for stream, _, _ in item.held}:
        return ErrorCode.NONE
    return remembered(state, content, row) or ErrorCode.NONE


def first_object_code(state: State, content: object, row: Row) -> ErrorCode:
    """Return the verdict of the first time: an object that came with the commit was accepted."""
    if state.was_committed(row.object_id) and state.made_with[row.object_id] == content:
        return ErrorCode.NONE
    unknown = object_code(state, row) or ErrorCode.OFFSET_NOT_MATCHED
    return remembered(state, content, row) or unknown


def remembered(state: State, content: object, row: Row) -> ErrorCode | None:
    """Return the verdict about a row that this commit, or some commit before level 4, left out."""
    codes = [state.rejected.get((key, row.object_id, row.stream)) for key in (str(content), "")]
    return codes[0] or codes[1]


def object_code(state: State, row: Row) -> ErrorCode:
    """Whether the row's own object can be committed."""
    if state.was_committed(row.object_id):
        return ErrorCode.INVALID_REQUEST
    prepared = state.is_prepared(row.object_id)
    return ErrorCode.NONE if prepared else ErrorCode.OBJECT_NOT_EXIST


def _continuity(state: State, node: v.NodeIdentity, row: Row) -> ErrorCode:
    if row.stream >= state.next_stream:
        return ErrorCode.STREAM_NOT_EXIST
    stream = state.streams.get(row.stream)
    if stream is None or row.end <= stream.start:
        return ErrorCode.NONE
    if stream.shared:
        return ErrorCode.STREAM_KIND_MISMATCH
    owed = state.owed(node.node_id, row.stream)
    if owed is not None:
        began_before_trim = row.start < stream.start == owed[0]
        fits = row.end <= owed[1] and (row.start == owed[0] or began_before_trim)
        return ErrorCode.NONE if fits else ErrorCode.OFFSET_NOT_MATCHED
    if row.epoch is not None and stream.epoch != row.epoch:
        later = stream.epoch > row.epoch
        return ErrorCode.STREAM_FENCED if later else ErrorCode.STREAM_INNER_ERROR
    if not stream.opened:
        return ErrorCode.STREAM_NOT_OPENED
    if stream.node != node.node_id:
        return ErrorCode.STREAM_FENCED
    fits = row.start == stream.end if stream.end > stream.start else row.start <= stream.start
    return ErrorCode.NONE if fits else ErrorCode.OFFSET_NOT_MATCHED


def _take_off(state: State, node_id: int, rows: list[Row]) -> None:
    """What was uploaded is owed no more."""
    for row in rows:
        owed = state.owed(node_id, row.stream)
        if owed is not None and row.end > state.streams[row.stream].start:
            state.pending[(node_id, row.stream)] = (row.end, owed[1])


def commit_set_object(
    state: State, request: CommitStreamSetObject, rows: list[Row], *, order: int, now: int
) -> None:
    """The prepared set object holds these rows now."""
    item = state.objects[request.object_id]
    item.state, item.kind, item.timestamp = v.ObjectState.COMMITTED, v.ObjectKind.STREAM_SET, now
    item.size, item.attributes = request.object_size, request.attributes
    item.node, item.order = request.node.node_id, order
    item.held = [row.held for row in rows]
    item.times, item.crc32c = (request.min_timestamp_ms, request.max_timestamp_ms), request.crc32c


def commit_stream_objects(state: State, rows: list[Row], now: int) -> None:
    """Each prepared stream object holds its row now; of a stream that is gone it is of no use."""
    for row in rows:
        item = state.objects[row.object_id]
        item.state, item.timestamp = v.ObjectState.COMMITTED, now
        item.kind = kind_of(row.attributes)
        item.size, item.attributes = row.size, row.attributes
        item.held = [row.held]
        item.times, item.crc32c = row.times, row.crc32c
    state.destroy(
        [row.object_id for row in rows if row.stream not in state.streams], now, deep=True
    )


def kind_of(attributes: int) -> v.ObjectKind:
    """The two lowest bits say which objects are composites."""
    return v.ObjectKind.COMPOSITE if attributes & 3 == 1 else v.ObjectKind.STREAM


def prepare(state: State, request: r.PrepareObjects, now: int) -> a.PrepareObjectsAnswer:
    """Ids are issued once a request id."""
    error = state.check(request.node)
    if error:
        return a.PrepareObjectsAnswer(error=error)
    key = ("prepare", request.node.node_id, request.request_id)
    issued = issued_before(state, key, request.count)
    if issued is None:
        issued = (state.next_object, request.count, now + request.ttl_ms)
        state.requests[key] = issued
        for _ in range(request.count):
            state.objects[state.next_object] = Object(issued[2])
            state.next_object += 1
    return a.PrepareObjectsAnswer(
        error=ErrorCode.NONE, first_object_id=issued[0], deadline_ms=issued[2]
    )


def expire(state: State, request: r.ExpireObjects, now: int) -> a.ExpireObjectsAnswer:
    """Earliest deadlines first."""
    due = sorted(
        (item.timestamp, object_id)
        for object_id, item in state.objects.items()
        if item.state is ObjectState.PREPARED and request.since_ms <= item.timestamp < now
    )
    due += sorted(
        (item.timestamp, object_id)
        for object_id, item in state.objects.items()
        if item.state is ObjectState.PREPARED and item.timestamp >= max(now, request.beyond_ms)
    )
    expired = [object_id for _, object_id in due][: request.limit]
    state.destroy(expired, now)
    return a.ExpireObjectsAnswer(expired=len(expired))


def remove(state: State, request: r.RemoveObjects) -> a.RemoveObjectsAnswer:
    """Only what is marked destroyed can be forgotten."""
    gone = {
        object_id
        for object_id in request.object_ids
        if object_id in state.objects
        and state.objects[object_id].state is ObjectState.MARK_DESTROYED
    }
    for object_id in gone:
        if state.objects.pop(object_id).kind is not ObjectKind.UNKNOWN:
            state.forgotten_commits.add(object_id)
    return a.RemoveObjectsAnswer(removed=len(gone))


def destroy_dead(
    state: State, request: r.DestroyDeadStreamSetObjects, now: int
) -> a.DestroyDeadStreamSetObjectsAnswer:
    """Set objects of which no reader could ask anything."""
    held = sorted(
        i for i in state.stream_set_objects_of(request.node_id) if i > request.after_object_id
    )
    looked_at = held[: request.limit]
    dead = [i for i in looked_at if not state.alive(state.objects[i].held)]
    state.destroy(dead, now)
    more = len(held) > len(looked_at)
    return a.DestroyDeadStreamSetObjectsAnswer(
        destroyed=len(dead), next_after=looked_at[-1] if more else -1
    )


def hold(state: State, request: r.HoldDeletions, now: int) -> a.HoldDeletionsAnswer:
    """Bytes of what is destroyed from now on are kept; a running hold goes on."""
    since, until = state.hold
    if now < until:
        state.hold = (since, max(until, now + request.hold_ms))
    else:
        state.hold = (now, now + request.hold_ms)
    return a.HoldDeletionsAnswer(until_ms=state.hold[1])


def deletable(state: State, marked_before: int, now: int) -> set[int]:
    """Objects marked destroyed before that time whose bytes are not held back."""
    since, until = state.hold
    return {
        object_id
        for object_id, item in state.objects.items()
        if item.state is ObjectState.MARK_DESTROYED
        and item.timestamp < marked_before
        and not (now < until and item.timestamp >= since)
    }


def claim_bucket(state: State, request: r.ClaimBucket) -> a.ClaimBucketAnswer:
    """The first UUID is the cluster's for ever, and the bound is the highest there was."""
    if not state.claim[0]:
        state.claim = (request.cluster_uuid, state.claim[1])
    if request.issued_below > state.claim[1]:
        state.claim = (state.claim[0], request.issued_below)
    return a.ClaimBucketAnswer(cluster_uuid=state.claim[0], issued_below=state.claim[1])


def with_effects(state: State, request: Any, offset: int, commit: Callable[[State], Any]) -> Any:
    """Commit as `commit` does, and do what comes with it."""
    if not (request.kv_puts or request.trims):
        return commit(state)
    if state.feature_level < 3:
        raise FeatureLevelError(3, "values and trims with a commit")
    is_repeat = any(map(state.was_committed, _results(request)))
    trial = pickle.loads(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
    answer = commit(trial)
    if answer.error:
        return answer
    if is_repeat:
        results = tuple(_still(state, item) for item in request.kv_puts)
        return replace(
            answer,
            kv_results=results,
            trim_errors=(ErrorCode.NONE,) * len(request.trims),
            trim_start_offsets=_starts(state, request),
        )
    results = tuple(_put_result(state, item, offset) for item in request.kv_puts)
    node_id = request.node.node_id
    errors = tuple(streams.trim_one(trial, node_id, item) for item in request.trims)
    error = next((e for e in (*(result.error for result in results), *errors) if e), ErrorCode.NONE)
    if error:
        return replace(_refused(request, error), kv_results=results, trim_errors=errors)
    commit(state)
    for item in request.trims:
        streams.trim_one(state, node_id, item)
    for item in request.kv_puts:
        state.kvs[(item.namespace, item.key)] = (item.value, offset + 1)
    return replace(
        answer,
        kv_results=results,
        trim_errors=errors,
        trim_start_offsets=_starts(state, request),
    )


def _starts(state: State, request: Any) -> tuple[int, ...]:
    streams_there = [state.streams.get(item.stream_id) for item in request.trims]
    return tuple(-1 if stream is None else stream.start for stream in streams_there)


def _results(request: Any) -> list[int]:
    """Ids that a repeat of the commit is known by."""
    if request.object_id >= 0:
        return [request.object_id]
    ids: list[int] = request.stream_objects.object_id.tolist()
    return ids[:1] if len(request.compacted_object_ids) else ids


def _put_result(state: State, item: r.KVToPut, offset: int) -> a.KVResult:
    key = (item.namespace, item.key)
    if not streams.may_put(item, state.kvs.get(key)):
        return streams.result(state, key, ErrorCode.KEY_EXIST)
    return a.KVResult(error=ErrorCode.NONE, version=offset + 1, found=True)


def _still(state: State, item: r.KVToPut) -> a.KVResult:
    """The version of a value that was put with the first attempt, unless it is gone."""
    value, version = state.kvs.get((item.namespace, item.key), (None, 0))
    if value != item.value:
        return a.KVResult(error=ErrorCode.NONE)
    return a.KVResult(error=ErrorCode.NONE, version=version, found=True)


def _refused(request: Any, error: ErrorCode) -> Any:
    if isinstance(request, r.CommitStreamObject):
        return a.CommitStreamObjectAnswer(error=error)
    return a.CommitStreamSetObjectAnswer(
        error=error,
        range_errors=v.column([int(error)] * len(request.ranges.stream_id)),
        stream_object_errors=v.column([int(error)] * len(request.stream_objects.stream_id)),
    )
