"""The slow model's nodes and keys."""

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata import answers as a
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.values import NodeIdentity
from tests.metadata.slow_model_state import Node, State

NODE_ID_MIN = 1_000


def register(state: State, request: r.RegisterNode) -> a.ErrorAnswer:
    """A larger epoch ends failover, recovery and departure."""
    known = state.nodes.get(request.node.node_id)
    if known is not None and known.epoch > request.node.node_epoch:
        return a.ErrorAnswer(error=ErrorCode.NODE_EPOCH_EXPIRED)
    node = _of_epoch(state, request.node)
    node.wal_config, node.tags = request.wal_config, tuple(sorted(request.tags))
    return a.ErrorAnswer(error=ErrorCode.NONE)


def set_epoch(state: State, node: NodeIdentity, *, failover: bool) -> ErrorCode:
    """GetOpeningStreams registers the node for fencing."""
    known = state.nodes.get(node.node_id)
    if known is not None and known.epoch > node.node_epoch:
        return ErrorCode.NODE_EPOCH_EXPIRED
    _of_epoch(state, node).failover = failover
    return ErrorCode.NONE


def _of_epoch(state: State, identity: NodeIdentity) -> Node:
    node = state.nodes.setdefault(identity.node_id, Node(identity.node_epoch))
    state.freed_nodes.discard(identity.node_id)
    if node.epoch < identity.node_epoch:
        node.epoch, node.failover, node.departed = identity.node_epoch, False, False
        node.recovered_by = -1
    return node


def unregister(state: State, request: r.UnregisterNode) -> a.ErrorAnswer:
    """Only who owns nothing may go; set objects keep a departed node."""
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
    if state.set_objects_of(node_id):
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
    """Lock or unlock."""
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
        allowed = _may_put(item, state.kvs.get(key))
        if allowed:
            state.kvs[key] = (item.value, offset + 1)
        error = ErrorCode.NONE if allowed else ErrorCode.KEY_EXIST
        results.append(result(state, key, error))
    return a.KVResultsAnswer(results=tuple(results))


def _may_put(item: r.KVToPut, stored: tuple[bytes, int] | None) -> bool:
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
