"""The slow model's compactions: what they may replace by what, offset by offset."""

from collections.abc import Callable

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api.answers import (
    CommitStreamObjectAnswer,
    CommitStreamSetObjectAnswer,
)
from streammeta.controller.metadata.api.requests import CommitStreamObject, CommitStreamSetObject
from streammeta.controller.metadata.tables import values as v
from tests.metadata import slow_model_uploads as uploads
from tests.metadata.slow_model_state import HOLDERS, Object, State

GONE = (v.ObjectState.MARK_DESTROYED, v.ObjectState.REMOVED)
Fits = Callable[[Object], bool]
"""Whether an object is of the kind and owner that the compaction may replace."""


def compact_set_objects(
    state: State, request: CommitStreamSetObject, now: int
) -> CommitStreamSetObjectAnswer:
    ranges = uploads.rows_of(request.ranges, request.object_id)
    objects = uploads.rows_of(request.stream_objects, -1)
    return uploads.answer_of(_compact(state, request, ranges, objects, now))


def _compact(
    state: State,
    request: CommitStreamSetObject,
    ranges: list[uploads.Row],
    objects: list[uploads.Row],
    now: int,
) -> uploads.Verdicts:
    def fits(item: Object) -> bool:
        return item.kind is v.ObjectKind.STREAM_SET and item.node == request.node.node_id

    sources = request.compacted_object_ids.tolist()
    error = state.check(request.node, fence=not request.failover)
    if error:
        return uploads.failed(error, ranges, objects)
    if sources == [request.object_id]:
        error = _set_attributes(state, request.object_id, request.attributes, fits)
        return uploads.failed(error, ranges, objects)
    content = uploads.content_of(request, ranges, objects)
    results = [request.object_id] if request.object_id >= 0 else [r.object_id for r in objects[:1]]
    if any(map(state.was_committed, results)):
        accept_valid = request.on_conflict == v.OnConflict.ACCEPT_VALID
        return uploads.repeated(state, results, content, ranges, objects, accept_valid=accept_valid)
    if not results and all(_is_gone(state, s) and state.was_committed(s) for s in sources):
        return ErrorCode.NONE, [], []
    if request.object_id >= 0 and not state.is_prepared(request.object_id):
        return uploads.failed(ErrorCode.OBJECT_NOT_EXIST, ranges, objects)
    items = _committed(state, sources, fits)
    if items is None or _is_ambiguous(sources, request.object_id):
        return uploads.failed(ErrorCode.COMPACTED_OBJECTS_NOT_FOUND, ranges, objects)
    verdicts = _judge(state, items, ranges, objects)
    if verdicts[0]:
        return verdicts
    bounds = _bounds(items)
    for row in objects:
        row.times = bounds if row.times == (-1, -1) else row.times
    if request.object_id >= 0:
        order = request.order_id if request.order_id >= 0 else min(item.order for item in items)
        uploads.commit_set_object(state, request, ranges, order=order, now=now)
        result = state.objects[request.object_id]
        result.data_time = min(item.data_time for item in items)
        result.times = bounds if result.times == (-1, -1) else result.times
        state.made_with[request.object_id] = content
    state.made_with |= dict.fromkeys((row.object_id for row in objects), content)
    uploads.commit_stream_objects(state, objects, now)
    state.destroy(sources, now)
    return verdicts


def _bounds(sources: list[Object]) -> tuple[int, int]:
    """Between which times the records of all of them are."""
    times = [time for item in sources for time in item.times]
    return (-1, -1) if -1 in times or not times else (min(times), max(times))


def _is_gone(state: State, object_id: int) -> bool:
    item = state.objects.get(object_id)
    return object_id < state.next_object if item is None else item.state in GONE


def _committed(state: State, sources: list[int], fits: Fits) -> list[Object] | None:
    items = [state.objects.get(source) for source in sources]
    found = [
        item
        for item in items
        if item is not None and item.state is v.ObjectState.COMMITTED and fits(item)
    ]
    return found if len(found) == len(sources) else None


def _is_ambiguous(sources: list[int], result: int) -> bool:
    """A source is named twice, or is the result too."""
    return len(set(sources)) < len(sources) or result in sources


def _set_attributes(state: State, object_id: int, attributes: int, fits: Fits) -> ErrorCode:
    """An object that "replaces" itself changes its attributes alone."""
    item = state.objects.get(object_id)
    if item is None:
        return ErrorCode.OBJECT_NOT_EXIST
    if item.state is not v.ObjectState.COMMITTED:
        return ErrorCode.OBJECT_NOT_COMMITTED
    if not fits(item):
        return ErrorCode.COMPACTED_OBJECTS_NOT_FOUND
    item.attributes = attributes
    return ErrorCode.NONE


def _judge(
    state: State, sources: list[Object], ranges: list[uploads.Row], objects: list[uploads.Row]
) -> uploads.Verdicts:
    """Outputs lie inside the sources, and cover what a reader could ask of these."""
    held = state.alive(row for item in sources for row in item.held)
    range_codes = [_inside(state, held, row) for row in ranges]
    object_codes = [uploads.object_code(state, row) or _inside(state, held, row) for row in objects]
    first_error = next((code for code in range_codes + object_codes if code), ErrorCode.NONE)
    if first_error:
        return first_error, range_codes, object_codes
    brought = state.alive(row.held for row in ranges + objects)
    covered = all(offsets <= brought.get(stream, set()) for stream, offsets in held.items())
    error = ErrorCode.NONE if covered else ErrorCode.OFFSET_NOT_MATCHED
    return error, range_codes, object_codes


def _inside(state: State, held: dict[int, set[int]], row: uploads.Row) -> ErrorCode:
    if row.stream >= state.next_stream:
        return ErrorCode.OFFSET_NOT_MATCHED
    alive = state.alive([row.held]).get(row.stream, set())
    inside = alive <= held.get(row.stream, set())
    return ErrorCode.NONE if inside else ErrorCode.OFFSET_NOT_MATCHED


def compact_stream_objects(
    state: State, request: CommitStreamObject, now: int
) -> CommitStreamObjectAnswer:
    error = (
        state.check(request.node)
        or state.own(request.node.node_id, request.stream_id, request.stream_epoch)
        or _compact_stream(state, request, now)
    )
    return CommitStreamObjectAnswer(error=error)


def _compact_stream(state: State, request: CommitStreamObject, now: int) -> ErrorCode:
    sources = request.source_object_ids.tolist()
    operations = request.operations or (v.SourceOperation.DELETE,) * len(sources)
    pairs = list(zip(sources, operations, strict=True))
    fits = _of_stream(request.stream_id)
    if sources == [request.object_id]:
        return _set_attributes(state, request.object_id, request.attributes, fits)
    if request.object_id >= 0:
        if state.was_committed(request.object_id):
            same = state.made_with[request.object_id] == _content(request)
            return ErrorCode.NONE if same else ErrorCode.OBJECT_CONTENT_MISMATCH
        if not state.is_prepared(request.object_id):
            return ErrorCode.OBJECT_NOT_EXIST
    elif _expiry_was_made(state, pairs):
        return ErrorCode.NONE
    unused = [
        source
        for source, operation in pairs
        if state.is_prepared(source) and operation == v.SourceOperation.DELETE
    ]
    items = _committed(state, [source for source in sources if source not in unused], fits)
    if items is None or _is_ambiguous(sources, request.object_id):
        return ErrorCode.COMPACTED_OBJECTS_NOT_FOUND
    for source, operation in pairs:
        is_composite = state.objects[source].kind is v.ObjectKind.COMPOSITE
        if is_composite and operation == v.SourceOperation.KEEP_DATA:
            return ErrorCode.INVALID_REQUEST
    if not _covers(state, request, items):
        return ErrorCode.OFFSET_NOT_MATCHED
    times = request.min_timestamp_ms, request.max_timestamp_ms
    _replace(state, request, pairs, times if times != (-1, -1) else _bounds(items), now)
    return ErrorCode.NONE


def _content(request: CommitStreamObject) -> tuple[object, ...]:
    own = (request.object_id, request.stream_id, request.start_offset, request.end_offset)
    facts = (request.min_timestamp_ms, request.max_timestamp_ms, request.crc32c)
    sources = request.source_object_ids.tolist()
    operations = request.operations or (v.SourceOperation.DELETE,) * len(sources)
    replaced = sorted(zip(sources, operations, strict=True))
    effects = uploads.effects_of(request)
    return ("merge", own, request.object_size, request.attributes, facts, replaced, effects)


def _of_stream(stream_id: int) -> Fits:
    def fits(item: Object) -> bool:
        return item.kind in HOLDERS and item.held[0][0] == stream_id

    return fits


def _expiry_was_made(state: State, pairs: list[tuple[int, v.SourceOperation]]) -> bool:
    """An id that was never committed may be among them, see `unused` above."""
    for source, operation in pairs:
        known = state.was_committed(source) or (
            operation == v.SourceOperation.DELETE and source in state.objects
        )
        if not (known and _is_gone(state, source)):
            return False
    return any(state.was_committed(source) for source, _ in pairs)


def _covers(state: State, request: CommitStreamObject, sources: list[Object]) -> bool:
    held = state.alive(row for item in sources for row in item.held)
    row = (request.stream_id, request.start_offset, request.end_offset)
    brought = state.alive([row]) if request.object_id >= 0 else {}
    return held.get(request.stream_id, set()) == brought.get(request.stream_id, set())


def _replace(
    state: State,
    request: CommitStreamObject,
    pairs: list[tuple[int, v.SourceOperation]],
    times: tuple[int, int],
    now: int,
) -> None:
    result = request.object_id
    blocks: set[int] = set()
    for source, operation in pairs:
        if operation == v.SourceOperation.KEEP_DATA:
            blocks.add(source)
            continue
        blocks |= state.blocks.get(source, set())
        for link in state.links_of(source):
            ends_below = state.objects[link].held[0][2] <= request.start_offset
            if (
                result < 0
                or uploads.kind_of(request.attributes) is v.ObjectKind.STREAM
                or ends_below
            ):
                state.destroy([link], now, deep=operation == v.SourceOperation.DEEP_DELETE)
            else:
                _link(state, link, result)
        state.destroy([source], now, deep=operation == v.SourceOperation.DEEP_DELETE)
    if result < 0:
        return
    row = uploads.Row(
        stream=request.stream_id,
        start=request.start_offset,
        end=request.end_offset,
        epoch=None,
        object_id=result,
        size=request.object_size,
        attributes=request.attributes,
        times=times,
        crc32c=request.crc32c,
    )
    state.made_with[result] = _content(request)
    uploads.commit_stream_objects(state, [row], now)
    if state.objects[result].kind is v.ObjectKind.COMPOSITE:
        state.blocks[result] = blocks
    for source, operation in pairs:
        if operation == v.SourceOperation.KEEP_DATA:
            _link(state, source, result)


def _link(state: State, object_id: int, composite: int) -> None:
    item = state.objects[object_id]
    item.state, item.composite = v.ObjectState.LINKED, composite
