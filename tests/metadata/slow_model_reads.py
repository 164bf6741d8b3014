"""The slow model's answers to reads, put together from what `State` holds."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import answers as a
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_listings import (
    ListStreamObjects,
    ListStreamSetObjects,
    StreamObject,
    StreamSetObject,
)
from streammeta.controller.metadata.api.object_slices import ObjectQuery, ObjectSlice, ObjectSlices
from streammeta.controller.metadata.tables import values as v
from streammeta.controller.metadata.tables.values import column
from tests.metadata.slow_model_state import HOLDERS, Object, State, Stream
from tests.metadata.slow_model_streams import PAGE_SIZE, result

_T = TypeVar("_T")


def _page(
    ids: Sequence[int], page: v.PageRequest, describe: Callable[[int], _T]
) -> tuple[tuple[_T, ...], str]:
    first = int(page.page_token) if page.page_token else 0
    rest = [item for item in sorted(ids) if item >= first]
    size = page.page_size or PAGE_SIZE
    token = str(rest[size]) if len(rest) > size else ""
    return tuple(describe(item) for item in rest[:size]), token


ANSWER_BYTES = 15 << 18
"""Bytes at which a page ends, whatever its size; one item alone may be larger."""


def _cut(
    found: tuple[_T, ...], token: str, size_of: Callable[[_T], int], id_of: Callable[[_T], int]
) -> tuple[tuple[_T, ...], str]:
    """The first items that fit in an answer; the token goes on behind them."""
    total = 0
    for index, item in enumerate(found):
        total += size_of(item)
        if index and total > ANSWER_BYTES:
            return found[:index], str(id_of(item))
    return found, token


def _stream_bytes(one: a.StreamDescription) -> int:
    spans = len(one.ranges) + len(one.stream_objects) + len(one.pending_uploads) + len(one.lost)
    tags = sum(64 + len(key.encode()) + len(value.encode()) for key, value in one.tags)
    looked_up = 12_288 if one.ranges or one.stream_objects else 0
    return 4_096 + looked_up + tags + 48 * spans


def describe_streams(state: State, request: r.DescribeStreams) -> a.DescribeStreamsAnswer:
    """Streams by id order; a page of asked ids counts unknown ones too."""
    owner = request.owner_node_id

    def wanted(stream_id: int) -> bool:
        stream = state.streams.get(stream_id)
        return stream is not None and owner in (None, stream.node)

    if request.stream_ids:
        page, token = _page(sorted(set(request.stream_ids)), request.page, int)
        streams = tuple(describe_stream(state, request, i) for i in page if wanted(i))
    else:
        ids = [stream_id for stream_id in state.streams if wanted(stream_id)]
        streams, token = _page(ids, request.page, lambda i: describe_stream(state, request, i))
    streams, token = _cut(streams, token, _stream_bytes, lambda stream: stream.stream_id)
    return a.DescribeStreamsAnswer(streams=streams, next_page_token=token, total=len(state.streams))


def find_streams(state: State, request: r.FindStreams) -> a.FindStreamsAnswer:
    """Streams with all tags, by a scan of all."""
    ids = [
        stream_id
        for stream_id, stream in state.streams.items()
        if set(request.tags) <= set(stream.tags) and request.owner_node_id in (None, stream.node)
    ]
    plain = r.DescribeStreams()
    streams, token = _page(ids, request.page, lambda i: describe_stream(state, plain, i))
    streams, token = _cut(streams, token, _stream_bytes, lambda stream: stream.stream_id)
    return a.FindStreamsAnswer(streams=streams, next_page_token=token)


def describe_stream(
    state: State, request: r.DescribeStreams, stream_id: int
) -> a.StreamDescription:
    stream = state.streams[stream_id]
    ranges = [
        a.StreamRange(past.index, past.epoch, past.start, past.end, past.node)
        for past in stream.past
    ]
    if stream.index >= 0:
        current = (stream.index, stream.epoch, stream.range_start, stream.end, stream.node)
        ranges.append(a.StreamRange(*current))
    owed = sorted(
        (first, end, node)
        for node, stream_of in state.pending
        if stream_of == stream_id
        for first, end in [state.owed(node, stream_id) or (0, 0)]
        if first < end
    )
    return a.StreamDescription(
        stream_id=stream_id,
        epoch=stream.epoch,
        range_index=stream.index,
        start_offset=stream.start,
        end_offset=stream.end,
        state=_state_of(stream),
        node_id=stream.node,
        tags=stream.tags,
        ranges=tuple(ranges) if request.include_ranges else (),
        stream_objects=_stream_objects(state, stream_id) if request.include_stream_objects else (),
        pending_uploads=tuple(
            a.PendingUpload(node, stream_id, first, end) for first, end, node in owed
        ),
        lost=_runs(stream.lost),
    )


def _state_of(stream: Stream) -> v.StreamState:
    if stream.shared:
        return v.StreamState.SHARED
    return v.StreamState.OPENED if stream.opened else v.StreamState.CLOSED


def _runs(offsets: set[int]) -> tuple[tuple[int, int], ...]:
    starts = sorted(offset for offset in offsets if offset - 1 not in offsets)
    ends = sorted(offset + 1 for offset in offsets if offset + 1 not in offsets)
    return tuple(zip(starts, ends, strict=True))


def _stream_objects(state: State, stream_id: int) -> tuple[a.StreamObjectRange, ...]:
    found = state.stream_objects_of(stream_id)
    return tuple(a.StreamObjectRange(object_id, start, end) for end, object_id, start in found)


def get_objects(state: State, request: r.GetObjects) -> a.GetObjectsAnswer:
    """What holds each queried range, by looking at every row."""
    return a.GetObjectsAnswer(results=tuple(_find(state, query) for query in request.queries))


def _find(state: State, query: ObjectQuery) -> a.ObjectList:
    stream = state.streams.get(query.stream_id)
    if stream is None:
        return a.ObjectList(error=ErrorCode.STREAM_NOT_EXIST)
    if query.start_offset < stream.start:
        return a.ObjectList(
            error=ErrorCode.OFFSET_NOT_MATCHED,
            stream_start_offset=stream.start,
            stream_end_offset=stream.end,
        )
    held = [
        (start, end, object_id)
        for object_id, item in state.objects.items()
        if item.state is v.ObjectState.COMMITTED
        for stream_id, start, end in item.held
        if stream_id == query.stream_id
    ]
    found: list[ObjectSlice] = []
    at = query.start_offset
    while len(found) < (query.limit or PAGE_SIZE):
        if query.end_offset != -1 and found and at >= query.end_offset:
            break
        fitting = [row for row in held if (row[0] == at if found else row[0] <= at) and row[1] > at]
        if not fitting:
            break
        ((start, end, object_id),) = fitting
        item = state.objects[object_id]
        cells = (object_id, item.kind, start, end, item.size, item.attributes)
        found.append(ObjectSlice(*cells, *item.times, item.crc32c))
        at = end
    return a.ObjectList(
        error=ErrorCode.NONE,
        objects=ObjectSlices(*(column(cells) for cells in zip(*found, strict=True))),
        stream_start_offset=stream.start,
        stream_end_offset=stream.end,
        lost_end_offset=state.lost_at(query.stream_id, query.start_offset),
    )


def describe_objects(state: State, request: r.DescribeObjects) -> a.DescribeObjectsAnswer:
    """Objects by id order; a page of asked ids counts unknown ones too."""
    if request.object_ids:
        page, token = _page(sorted(set(request.object_ids)), request.page, int)
        objects = tuple(describe_object(state, i) for i in page if i in state.objects)
    else:
        ids = list(state.objects)
        objects, token = _page(ids, request.page, lambda i: describe_object(state, i))
    objects, token = _cut(
        objects,
        token,
        lambda object_: 8_192 + 26 * len(object_.ranges.stream_id),
        lambda object_: object_.object_id,
    )
    return a.DescribeObjectsAnswer(objects=objects, next_page_token=token, total=len(state.objects))


def describe_object(state: State, object_id: int) -> a.ObjectDescription:
    item = state.objects[object_id]
    streams, starts, ends = zip(*item.held, strict=True) if item.held else ((), (), ())
    of_one = item.kind in HOLDERS and item.held
    return a.ObjectDescription(
        object_id=object_id,
        state=item.state,
        kind=item.kind,
        object_size=item.size,
        timestamp_ms=item.timestamp,
        attributes=item.attributes,
        node_id=item.node,
        stream_id=item.held[0][0] if of_one else -1,
        ranges=v.RangeColumns(
            stream_id=v.column(streams), start_offset=v.column(starts), end_offset=v.column(ends)
        ),
        composite_id=item.composite,
        data_time_ms=item.data_time,
        min_timestamp_ms=item.times[0],
        max_timestamp_ms=item.times[1],
        crc32c=item.crc32c,
    )


def check_objects(state: State, request: r.CheckObjects) -> a.CheckObjectsAnswer:
    """The state of any id."""
    states = tuple(
        state.objects[i].state
        if i in state.objects
        else (v.ObjectState.REMOVED if i < state.next_object else v.ObjectState.NOT_ISSUED)
        for i in request.object_ids
    )
    return a.CheckObjectsAnswer(
        states=states,
        next_object_id=state.next_object,
        cluster_uuid=state.claim[0],
        issued_below=state.claim[1],
    )


def get_nodes(state: State, request: r.GetNodes) -> a.GetNodesAnswer:
    def describe(node_id: int) -> a.NodeDescription:
        return describe_node(state, node_id, with_objects=request.include_stream_set_objects)

    ids = [i for i in sorted(set(request.node_ids) or state.nodes) if i in state.nodes]
    if request.page is None:
        return a.GetNodesAnswer(nodes=tuple(map(describe, ids)))
    nodes, token = _page(ids, request.page, describe)
    return a.GetNodesAnswer(nodes=nodes, next_page_token=token)


def describe_node(state: State, node_id: int, *, with_objects: bool) -> a.NodeDescription:
    node = state.nodes[node_id]
    held = sorted((state.objects[i].order, i) for i in state.stream_set_objects_of(node_id))
    return a.NodeDescription(
        node_id=node_id,
        node_epoch=node.epoch,
        failover=node.failover,
        wal_config=node.wal_config,
        tags=node.tags,
        has_opening_streams=bool(state.open_streams_of(node_id)),
        stream_set_object_count=len(held),
        stream_set_objects=tuple(_set_object(state, i) for _, i in held) if with_objects else (),
        locked=node.locked,
        pending_upload_count=len(state.owed_by(node_id)),
        recovered_by=node.recovered_by,
        departed=node.departed,
        supervised=node.supervised,
    )


def _set_object(state: State, object_id: int, *, with_ranges: bool = False) -> StreamSetObject:
    item = state.objects[object_id]
    return StreamSetObject(
        object_id=object_id,
        order_id=item.order,
        data_time_ms=item.data_time,
        object_size=item.size,
        range_count=len(item.held),
        attributes=item.attributes,
        committed_at_ms=item.timestamp,
        min_timestamp_ms=item.times[0],
        max_timestamp_ms=item.times[1],
        crc32c=item.crc32c,
        ranges=_range_columns(item) if with_ranges else None,
    )


def _range_columns(item: Object) -> v.RangeColumns:
    streams, starts, ends = ([row[at] for row in item.held] for at in range(3))
    return v.RangeColumns(
        stream_id=column(streams), start_offset=column(starts), end_offset=column(ends)
    )


def list_stream_set_objects(
    state: State, request: ListStreamSetObjects
) -> a.ListStreamSetObjectsAnswer:
    if request.node_id not in state.nodes:
        return a.ListStreamSetObjectsAnswer(error=ErrorCode.NODE_EPOCH_NOT_EXIST)
    held = state.stream_set_objects_of(request.node_id)

    def describe(object_id: int) -> StreamSetObject:
        return _set_object(state, object_id, with_ranges=request.include_ranges)

    objects, token = _page(held, request.page, describe)
    return a.ListStreamSetObjectsAnswer(
        error=ErrorCode.NONE, objects=objects, next_page_token=token, total=len(held)
    )


def list_stream_objects(state: State, request: ListStreamObjects) -> a.ListStreamObjectsAnswer:
    if request.stream_id not in state.streams:
        return a.ListStreamObjectsAnswer(error=ErrorCode.STREAM_NOT_EXIST)
    token = request.page.page_token
    first = tuple(int(part) for part in token.split("-")) if token else (0, 0)
    found = [
        (end, object_id, start)
        for end, object_id, start in state.stream_objects_of(request.stream_id)
        if (end, object_id) >= first
        and end > request.start_offset
        and (request.end_offset == -1 or start < request.end_offset)
    ]
    size = request.page.page_size or PAGE_SIZE
    objects = []
    for end, object_id, start in found[:size]:
        item = state.objects[object_id]
        objects.append(
            StreamObject(
                stream_id=request.stream_id,
                object_id=object_id,
                kind=item.kind,
                start_offset=start,
                end_offset=end,
                object_size=item.size,
                attributes=item.attributes,
                committed_at_ms=item.timestamp,
                min_timestamp_ms=item.times[0],
                max_timestamp_ms=item.times[1],
                crc32c=item.crc32c,
            )
        )
    following = "{}-{}".format(*found[size][:2]) if len(found) > size else ""
    return a.ListStreamObjectsAnswer(
        error=ErrorCode.NONE, objects=tuple(objects), next_page_token=following
    )


def get_kvs(state: State, request: r.GetKVs) -> a.KVResultsAnswer:
    """Values; an absent key is no error."""
    results = (result(state, (key.namespace, key.key), ErrorCode.NONE) for key in request.keys)
    return a.KVResultsAnswer(results=tuple(results))


def list_kvs(state: State, request: r.ListKVs) -> a.ListKVsAnswer:
    after = request.page.page_token
    size = request.page.page_size or PAGE_SIZE
    if request.namespaces:
        names = sorted({n for n, _ in state.kvs if n.startswith(request.prefix) and n >= after})
        token = names[size] if len(names) > size else ""
        return a.ListKVsAnswer(namespace_names=tuple(names[:size]), next_page_token=token)
    keys = sorted(
        key
        for namespace, key in state.kvs
        if namespace == request.namespace and key.startswith(request.prefix) and key > after
    )
    entries = []
    for key in keys[:size]:
        value, version = state.kvs[(request.namespace, key)]
        entries.append(
            a.KVEntry(key=key, value=b"" if request.keys_only else value, version=version)
        )
    token = keys[size - 1] if len(keys) > size else ""
    return a.ListKVsAnswer(entries=tuple(entries), next_page_token=token)


def size_of(state: State) -> a.MetadataSize:
    states: list[Any] = [item.state for item in state.objects.values()]
    committed = [i for i in state.objects.values() if i.state is v.ObjectState.COMMITTED]
    return a.MetadataSize(
        streams=len(state.streams),
        objects=len(state.objects),
        prepared_objects=states.count(v.ObjectState.PREPARED),
        committed_objects=len(committed),
        destroyed_objects=states.count(v.ObjectState.MARK_DESTROYED),
        stream_set_objects=sum(item.kind is v.ObjectKind.STREAM_SET for item in committed),
        nodes=len(state.nodes),
        keys=len(state.kvs),
        committed_bytes=sum(item.size for item in committed),
    )
