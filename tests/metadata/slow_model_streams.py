"""The slow model's streams, nodes and keys: their creation, ownership and end."""

from streammeta.controller.errors import ErrorCode, FeatureLevelError, InvalidRequestError
from streammeta.controller.metadata.api import answers as a
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import NodeIdentity, ObjectKind, ObjectState
from tests.metadata.slow_model_state import HOLDERS, Node, Range, State, Stream

PAGE_SIZE = 1_000
SHARED_LEVEL = 5


FREE_EPOCH_MAX, EPOCH_STEP_MAX = 2**62, 2**32


def check_growth(epoch: int, present: int) -> None:
    """An epoch is of free choice up to 2**62, above it at most 2**32 more than the present one."""
    if epoch > max(FREE_EPOCH_MAX, present + EPOCH_STEP_MAX):
        raise InvalidRequestError("epoch", "leaves no room above it")


def issued_before(
    state: State, key: tuple[str, int, str], count: int
) -> tuple[int, int, int] | None:
    """Return what a request was answered before; the same id for another count is malformed."""
    issued = state.requests.get(key)
    if issued is not None and issued[1] != count:
        raise InvalidRequestError("request_id", "used for another count")
    return issued


def create(state: State, request: r.CreateStreams) -> a.CreateStreamsAnswer:
    """Streams are created once a request id."""
    error = state.check(request.node)
    if error:
        return a.CreateStreamsAnswer(error=error)
    key = ("create", request.node.node_id, request.request_id)
    issued = issued_before(state, key, len(request.streams))
    tags = [(tuple(sorted(stream.tags)), stream.shared) for stream in request.streams]
    if issued is not None and state.streams_of_requests[key] != tags:
        raise InvalidRequestError("request_id", "used for other tags")
    shares = any(stream.shared for stream in request.streams)
    if issued is None and shares and state.feature_level < SHARED_LEVEL:
        raise FeatureLevelError(SHARED_LEVEL, "shared streams")
    if issued is None:
        state.streams_of_requests[key] = tags
        issued = (state.next_stream, len(request.streams), -1)
        state.requests[key] = issued
        for stream in request.streams:
            state.streams[state.next_stream] = Stream(
                tags=tuple(sorted(stream.tags)),
                shared=stream.shared,
                epoch=0 if stream.shared else -1,
            )
            state.next_stream += 1
    ids = tuple(range(issued[0], issued[0] + issued[1]))
    return a.CreateStreamsAnswer(error=ErrorCode.NONE, stream_ids=ids)


def open_streams(state: State, request: r.OpenStreams) -> a.OpenStreamsAnswer:
    for item in request.streams:
        stream = state.streams.get(item.stream_id)
        if stream is not None and not (
            state.check(request.node) or _may_open(state, request.node.node_id, item)
        ):
            check_growth(item.stream_epoch, stream.epoch)
    results = []
    for item in request.streams:
        error = state.check(request.node) or _may_open(state, request.node.node_id, item)
        if error:
            results.append(a.OpenedStream(error))
            continue
        stream = state.streams[item.stream_id]
        results.append(a.OpenedStream(error, stream.start, stream.end))
        if stream.epoch < item.stream_epoch:
            _begin_range(state, request.node.node_id, item)
        stream.opened = True
    return a.OpenStreamsAnswer(streams=tuple(results))


def _may_open(state: State, node_id: int, item: r.StreamToOpen) -> ErrorCode:
    stream = state.streams.get(item.stream_id)
    if stream is None:
        return ErrorCode.STREAM_NOT_EXIST
    if stream.shared:
        return ErrorCode.STREAM_KIND_MISMATCH
    if stream.epoch > item.stream_epoch:
        return ErrorCode.STREAM_FENCED
    if stream.epoch == item.stream_epoch and stream.node != node_id:
        return ErrorCode.STREAM_FENCED
    is_own = item.reopen and stream.node == node_id
    if stream.epoch < item.stream_epoch and stream.opened and not is_own:
        return ErrorCode.STREAM_NOT_CLOSED
    if state.owed(node_id, item.stream_id):
        return ErrorCode.STREAM_NOT_CLOSED
    owner = state.nodes.get(stream.node)
    if stream.node != node_id and owner is not None and owner.locked:
        return ErrorCode.NODE_LOCKED
    return ErrorCode.NONE


def _begin_range(state: State, node_id: int, item: r.StreamToOpen) -> None:
    stream = state.streams[item.stream_id]
    covered = _covered(state, item.stream_id)
    if covered is not None:
        stream.past = [
            past
            for past in stream.past
            if past.start != past.end and not (covered[0] <= past.start and past.end <= covered[1])
        ]
    if stream.index >= 0:
        ended = Range(stream.index, stream.epoch, stream.range_start, stream.end, stream.node)
        stream.past.append(ended)
    stream.index += 1
    stream.epoch, stream.node, stream.range_start = item.stream_epoch, node_id, stream.end
    if not stream.tags:
        stream.tags = tuple(sorted(item.tags))


def _covered(state: State, stream_id: int) -> tuple[int, int] | None:
    """Return the first contiguous run of its stream objects."""
    held = state.stream_objects_of(stream_id)
    if not held:
        return None
    low, high = held[0][2], held[0][0]
    for end, _, start in held[1:]:
        if start != high:
            break
        high = end
    return low, high


def close(state: State, request: r.CloseStreams) -> a.ErrorsAnswer:
    """Each stream on its own; a recovery may close for its node."""
    errors = []
    for item in request.streams:
        error = state.check(request.node, fence=False, recoverer=request.recoverer)
        errors.append(error or _close(state, request.node.node_id, item))
    return a.ErrorsAnswer(errors=tuple(errors))


def _close(state: State, node_id: int, item: r.StreamToClose) -> ErrorCode:
    if item.stream_id in state.streams and state.streams[item.stream_id].shared:
        return ErrorCode.STREAM_KIND_MISMATCH
    error = state.own(node_id, item.stream_id, item.stream_epoch)
    if error:
        return error
    stream, end = state.streams[item.stream_id], item.end_offset
    if not stream.opened:
        return ErrorCode.NONE if end in (None, stream.end) else ErrorCode.OFFSET_NOT_MATCHED
    if end is not None and end < stream.end:
        return ErrorCode.OFFSET_NOT_MATCHED
    stream.opened = False
    if end is not None and end > stream.end:
        state.pending[(node_id, item.stream_id)] = (stream.end, end)
        stream.end = end
    return ErrorCode.NONE


def trim(state: State, request: r.TrimStreams) -> a.TrimStreamsAnswer:
    errors, starts = [], []
    for item in request.streams:
        error = state.check(request.node) or trim_one(state, request.node.node_id, item)
        errors.append(error)
        starts.append(-1 if error else state.streams[item.stream_id].start)
    return a.TrimStreamsAnswer(errors=tuple(errors), start_offsets=tuple(starts))


def trim_one(state: State, node_id: int, item: r.StreamToTrim) -> ErrorCode:
    error = state.own(node_id, item.stream_id, item.stream_epoch)
    if error:
        return error
    stream, start = state.streams[item.stream_id], item.new_start_offset
    if not stream.opened and not stream.shared:
        return ErrorCode.STREAM_NOT_OPENED
    if stream.shared and start > stream.end:
        return ErrorCode.OFFSET_NOT_MATCHED
    if item.appended_end_offset is not None and start > max(stream.end, item.appended_end_offset):
        start = max(stream.end, item.appended_end_offset)
    if start < stream.start or start - stream.end > 2**40:
        return ErrorCode.OFFSET_NOT_MATCHED
    if start == stream.start:
        return ErrorCode.NONE
    stream.start, stream.end = start, max(stream.end, start)
    stream.range_start = max(stream.range_start, start)
    stream.past = [past for past in stream.past if past.end > start]
    for past in stream.past:
        past.start = max(past.start, start)
    stream.lost = {offset for offset in stream.lost if offset >= start}
    data = state.data.get(item.stream_id, set())
    state.data[item.stream_id] = {offset for offset in data if offset >= start}
    return ErrorCode.NONE


def delete(state: State, request: r.DeleteStreams) -> a.ErrorsAnswer:
    """The stream is gone at once; what holds it alone is swept, see `sweep`."""
    errors = tuple(state.check(request.node) or _delete(state, item) for item in request.streams)
    return a.ErrorsAnswer(errors=errors)


def _delete(state: State, item: r.StreamToDelete) -> ErrorCode:
    stream = state.streams.get(item.stream_id)
    if stream is None:
        return ErrorCode.NONE
    if stream.epoch != item.stream_epoch:
        later = stream.epoch > item.stream_epoch
        return ErrorCode.STREAM_FENCED if later else ErrorCode.STREAM_INNER_ERROR
    if stream.opened:
        return ErrorCode.STREAM_NOT_CLOSED
    del state.streams[item.stream_id]
    state.data.pop(item.stream_id, None)
    if swept(state, {item.stream_id}):
        state.sweeping.add(item.stream_id)
    return ErrorCode.NONE


def swept(state: State, streams: set[int]) -> set[int]:
    """What is still to be destroyed of deleted streams."""
    return {
        object_id
        for object_id, item in state.objects.items()
        if item.kind in HOLDERS
        and item.state in (ObjectState.COMMITTED, ObjectState.LINKED)
        and any(stream in streams for stream, _, _ in item.held)
    }


def sweep(state: State, chosen: set[int], now: int) -> None:
    """Destroy some of it; which of it comes first is up to the map."""
    state.destroy(sorted(chosen), now, deep=True)
    state.sweeping = {stream for stream in state.sweeping if swept(state, {stream})}


def opening(state: State, request: r.GetOpeningStreams) -> a.GetOpeningStreamsAnswer:
    """Set the node's epoch, and list what it has open and what it owes."""
    node_id = request.node.node_id
    if request.recoverer is not None:
        error = state.check(request.node, fence=False, recoverer=request.recoverer)
        if error:
            return a.GetOpeningStreamsAnswer(error=error)
    if request.page.page_token:
        error = state.check(request.node, fence=False)
    else:
        error = set_epoch(state, request.node, failover=request.failover)
    if error:
        return a.GetOpeningStreamsAnswer(error=error)
    found = []
    for stream_id in state.open_streams_of(node_id):
        stream = state.streams[stream_id]
        found.append(a.OpeningStream(stream_id, stream.epoch, stream.start, stream.end))
    for stream_id, (first, end) in state.owed_by(node_id).items():
        stream = state.streams[stream_id]
        epochs = [past.epoch for past in stream.past if past.node == node_id and past.end == end]
        if stream.node == node_id and stream.end == end and stream.range_start < end:
            epochs.append(stream.epoch)
        if not epochs:  # a range that was adopted lies over the end of what is owed
            return a.GetOpeningStreamsAnswer(error=ErrorCode.STREAM_INNER_ERROR)
        epoch = epochs[-1]
        found.append(a.OpeningStream(stream_id, epoch, stream.start, first, end))
    found.sort(key=lambda item: item.stream_id)
    if request.page.page_token:
        found = [item for item in found if item.stream_id >= int(request.page.page_token)]
    size = request.page.page_size or PAGE_SIZE
    token = str(found[size].stream_id) if len(found) > size else ""
    return a.GetOpeningStreamsAnswer(
        error=error, streams=tuple(found[:size]), next_page_token=token
    )


def abandon(state: State, request: r.AbandonUploads) -> a.AbandonUploadsAnswer:
    """What the node owes of these streams is lost."""
    if request.node_id not in state.nodes:
        return a.AbandonUploadsAnswer(error=ErrorCode.NODE_EPOCH_NOT_EXIST)
    closed = 0
    if request.close_streams_of_epoch is not None:
        identity = NodeIdentity(request.node_id, request.close_streams_of_epoch)
        error = _is_newest(state, identity)
        if error:
            return a.AbandonUploadsAnswer(error=error)
        closed = _close_all(state, identity)
    given_up = []
    for stream_id, (first, end) in state.owed_by(request.node_id).items():
        if not request.stream_ids or stream_id in request.stream_ids:
            del state.pending[(request.node_id, stream_id)]
            state.streams[stream_id].lost.update(range(first, end))
            given_up.append(a.PendingUpload(request.node_id, stream_id, first, end))
    return a.AbandonUploadsAnswer(
        error=ErrorCode.NONE, abandoned=tuple(given_up), closed_streams=closed
    )


def release(state: State, request: r.ReleaseStreams) -> a.AbandonUploadsAnswer:
    """A process that owes nothing is fenced, and what it has open is closed."""
    error = _is_newest(state, request.node)
    if not error and state.owed_by(request.node.node_id):
        error = ErrorCode.STREAM_NOT_CLOSED
    if error:
        return a.AbandonUploadsAnswer(error=error)
    closed = _close_all(state, request.node)
    return a.AbandonUploadsAnswer(error=error, closed_streams=closed)


def _is_newest(state: State, identity: NodeIdentity) -> ErrorCode:
    known = state.nodes.get(identity.node_id)
    if known is None or known.epoch < identity.node_epoch:
        return ErrorCode.NODE_EPOCH_NOT_EXIST
    newest = known.epoch == identity.node_epoch
    return ErrorCode.NONE if newest else ErrorCode.NODE_EPOCH_EXPIRED


def _close_all(state: State, identity: NodeIdentity) -> int:
    opened = state.open_streams_of(identity.node_id)
    for stream_id in opened:
        state.streams[stream_id].opened = False
        state.nodes[identity.node_id].failover = True
    return len(opened)


def kept_alive(state: State) -> set[int]:
    """Objects a reader of some live stream may ask for, composites' blocks included."""
    needed = {
        object_id
        for object_id, item in state.objects.items()
        if item.state is ObjectState.COMMITTED and state.alive(item.held)
    }
    composites = [i for i in needed if state.objects[i].kind is ObjectKind.COMPOSITE]
    for composite in composites:
        (stream_id, low, _) = state.objects[composite].held[0]
        first = max(low, state.streams[stream_id].start)
        needed |= {block for block, end in block_ends(state, composite).items() if end > first}
    return needed


def block_ends(state: State, composite: int) -> dict[int, int]:
    """Where the blocks of a composite end, of those that are still in the map with a range."""
    ends = {}
    for block in state.blocks.get(composite, ()):
        item = state.objects.get(block)
        if item is not None and item.held:
            ends[block] = item.held[0][2]
    return ends


NODE_ID_MIN = 1_000


def register(state: State, request: r.RegisterNode) -> a.ErrorAnswer:
    """A larger epoch ends failover, recovery and departure."""
    error = _may_register(state, request.node, fence=True)
    if error:
        return a.ErrorAnswer(error=error)
    process_id = request.process_id if state.feature_level >= 4 else ""
    known = state.nodes.get(request.node.node_id)
    held = ""
    if known is not None and known.epoch == request.node.node_epoch:
        held = known.process_id
    if held and process_id not in ("", held):
        return a.ErrorAnswer(error=ErrorCode.NODE_EPOCH_EXPIRED)
    node = _of_epoch(state, request.node)
    node.process_id = process_id or held
    node.wal_config, node.tags = request.wal_config, tuple(sorted(request.tags))
    return a.ErrorAnswer(error=ErrorCode.NONE)


def set_epoch(state: State, node: NodeIdentity, *, failover: bool) -> ErrorCode:
    """GetOpeningStreams registers the node for fencing."""
    error = _may_register(state, node, fence=not failover)
    if error:
        return error
    _of_epoch(state, node).failover = failover
    return ErrorCode.NONE


def _may_register(state: State, identity: NodeIdentity, *, fence: bool) -> ErrorCode:
    """A process that has been fenced needs a larger epoch."""
    known = state.nodes.get(identity.node_id)
    if known is None or known.epoch < identity.node_epoch:
        return ErrorCode.NONE
    return state.check(identity, fence=fence)


def _of_epoch(state: State, identity: NodeIdentity) -> Node:
    known = state.nodes.get(identity.node_id)
    check_growth(identity.node_epoch, 0 if known is None else known.epoch)
    node = state.nodes.setdefault(identity.node_id, Node(identity.node_epoch))
    state.freed_nodes.discard(identity.node_id)
    if node.epoch < identity.node_epoch:
        node.epoch, node.failover, node.departed = identity.node_epoch, False, False
        node.recovered_by, node.process_id = -1, ""
    return node


def unregister(state: State, request: r.UnregisterNode) -> a.ErrorAnswer:
    """Only a node that owns nothing may go; set objects keep a departed node."""
    node_id = request.node.node_id
    node = state.nodes.get(node_id)
    if node is None:
        return a.ErrorAnswer(error=ErrorCode.NONE)
    error = state.check(request.node, fence=False)
    if error:
        return a.ErrorAnswer(error=error)
    if state.open_streams_of(node_id) or state.owed_by(node_id):
        return a.ErrorAnswer(error=ErrorCode.STREAM_NOT_CLOSED)
    if node.locked:
        return a.ErrorAnswer(error=ErrorCode.NODE_LOCKED)
    if state.stream_set_objects_of(node_id):
        node.departed, node.supervised = True, False
    else:
        state.forget_node(node_id)
    return a.ErrorAnswer(error=ErrorCode.NONE)


def supervise(state: State, request: r.SuperviseNode) -> a.ErrorAnswer:
    """Its first heartbeat was heard."""
    error = state.check(request.node)
    if not error:
        state.nodes[request.node.node_id].supervised = True
    return a.ErrorAnswer(error=error)


def lock(state: State, request: r.SetNodeLock) -> a.ErrorAnswer:
    node = state.nodes.get(request.node_id)
    if node is None:
        return a.ErrorAnswer(error=ErrorCode.NODE_EPOCH_NOT_EXIST)
    node.locked = request.locked
    return a.ErrorAnswer(error=ErrorCode.NONE)


def next_node_id(state: State, request: r.GetNextNodeId) -> a.NodeIdAnswer:
    """The smallest freed id, else one above all."""
    key = ("node", -1, request.request_id)
    if key not in state.requests:
        freed = [node_id for node_id in state.freed_nodes if node_id >= NODE_ID_MIN]
        largest = max(state.nodes, default=-1)
        issued = min(freed, default=max(NODE_ID_MIN, state.last_node + 1, largest + 1))
        state.freed_nodes.discard(issued)
        state.last_node = max(state.last_node, issued)
        state.requests[key] = (issued, 1, -1)
    return a.NodeIdAnswer(node_id=state.requests[key][0])


def assign(state: State, request: r.AssignRecoveries) -> a.AssignRecoveriesAnswer:
    """What no longer fits is passed over."""
    assigned = 0
    for target in request.targets:
        node = state.nodes.get(target.node_id)
        fits = node is not None and node.epoch == target.node_epoch
        if fits and node is not None and node.recovered_by != target.target_id:
            node.recovered_by = target.target_id
            assigned += 1
    return a.AssignRecoveriesAnswer(assigned=assigned)


def put(state: State, request: r.PutKVs, offset: int) -> a.KVResultsAnswer:
    """Each key on its own condition; the version is the log offset plus 1."""
    results = []
    for item in request.items:
        key = (item.namespace, item.key)
        allowed = may_put(item, state.kvs.get(key))
        if allowed:
            state.kvs[key] = (item.value, offset + 1)
        error = ErrorCode.NONE if allowed else ErrorCode.KEY_EXIST
        results.append(result(state, key, error))
    return a.KVResultsAnswer(results=tuple(results))


def may_put(item: r.KVToPut, stored: tuple[bytes, int] | None) -> bool:
    if item.expected_version is not None:
        return item.expected_version == (stored[1] if stored else 0)
    return stored is None or item.overwrite


def delete_keys(state: State, request: r.DeleteKVs) -> a.KVResultsAnswer:
    """Answers the value that was deleted, or the one that was kept."""
    results = []
    for item in request.keys:
        key = (item.namespace, item.key)
        stored = state.kvs.get(key)
        if stored is None:
            results.append(a.KVResult(error=ErrorCode.KEY_NOT_EXIST))
        elif item.expected_version not in (None, stored[1]):
            results.append(result(state, key, ErrorCode.KEY_EXIST))
        else:
            results.append(result(state, key, ErrorCode.NONE))
            del state.kvs[key]
    return a.KVResultsAnswer(results=tuple(results))


def result(state: State, key: tuple[str, str], error: ErrorCode) -> a.KVResult:
    """What is stored now."""
    stored = state.kvs.get(key)
    if stored is None:
        return a.KVResult(error=error)
    return a.KVResult(error=error, value=stored[0], version=stored[1], found=True)
