"""NodeService's messages, from protobuf to requests of the map and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from streammeta.controller.lifecycle.sessions import NodeState
from streammeta.controller.metadata import answers, requests
from streammeta.controller.metadata.object_facts import UNKNOWN
from streammeta.controller.rpc.convert import (
    error_out,
    node_identity,
    optional_out,
    page_request,
    require,
    tags_in,
    tags_out,
)
from streammeta.v1 import nodes_pb2 as pb


def register_node_in(message: pb.RegisterNodeRequest) -> requests.RegisterNode:
    """Read RegisterNode."""
    return requests.RegisterNode(
        node=node_identity(message.node),
        wal_config=message.wal_config,
        tags=tags_in(message.tags),
    )


def register_node_out(answer: answers.ErrorAnswer) -> pb.RegisterNodeResponse:
    """Write the answer to RegisterNode."""
    return pb.RegisterNodeResponse(error=error_out(answer.error))


def get_nodes_in(message: pb.GetNodesRequest) -> requests.GetNodes:
    """Read GetNodes."""
    return requests.GetNodes(
        node_ids=tuple(message.node_ids),
        include_stream_set_objects=message.include_stream_set_objects,
    )


@dataclass(frozen=True, slots=True)
class LeaderView:
    """What the leader knows of a node id beside the map: its state, and who compacts for it."""

    state_of: Callable[[int], NodeState]
    compacted_by: Callable[[int], int]


def get_nodes_out(answer: answers.GetNodesAnswer, view: LeaderView) -> pb.GetNodesResponse:
    """Write the answer to GetNodes."""
    return pb.GetNodesResponse(nodes=[_description(node, view) for node in answer.nodes])


def list_stream_set_objects_in(
    message: pb.ListStreamSetObjectsRequest,
) -> requests.ListStreamSetObjects:
    """Read ListStreamSetObjects."""
    require(message, "", "node_id")
    return requests.ListStreamSetObjects(node_id=message.node_id, page=page_request(message.page))


def list_stream_set_objects_out(
    answer: answers.ListStreamSetObjectsAnswer,
) -> pb.ListStreamSetObjectsResponse:
    """Write the answer to ListStreamSetObjects."""
    return pb.ListStreamSetObjectsResponse(
        error=error_out(answer.error),
        objects=[_set_object(one) for one in answer.objects],
        next_page_token=answer.next_page_token,
        total=answer.total,
    )


def unregister_node_in(message: pb.UnregisterNodeRequest) -> requests.UnregisterNode:
    """Read UnregisterNode."""
    return requests.UnregisterNode(request_id=message.request_id, node=node_identity(message.node))


def unregister_node_out(answer: answers.ErrorAnswer) -> pb.UnregisterNodeResponse:
    """Write the answer to UnregisterNode."""
    return pb.UnregisterNodeResponse(error=error_out(answer.error))


def get_next_node_id_in(message: pb.GetNextNodeIdRequest) -> requests.GetNextNodeId:
    """Read GetNextNodeId."""
    return requests.GetNextNodeId(request_id=message.request_id)


def get_next_node_id_out(answer: answers.NodeIdAnswer) -> pb.GetNextNodeIdResponse:
    """Write the answer to GetNextNodeId."""
    return pb.GetNextNodeIdResponse(node_id=answer.node_id)


def lock_node_in(message: pb.LockNodeRequest) -> requests.SetNodeLock:
    """Read LockNode."""
    require(message, "", "node_id")
    return requests.SetNodeLock(request_id=message.request_id, node_id=message.node_id, locked=True)


def lock_node_out(answer: answers.ErrorAnswer) -> pb.LockNodeResponse:
    """Write the answer to LockNode."""
    return pb.LockNodeResponse(error=error_out(answer.error))


def unlock_node_in(message: pb.UnlockNodeRequest) -> requests.SetNodeLock:
    """Read UnlockNode."""
    require(message, "", "node_id")
    return requests.SetNodeLock(
        request_id=message.request_id, node_id=message.node_id, locked=False
    )


def unlock_node_out(answer: answers.ErrorAnswer) -> pb.UnlockNodeResponse:
    """Write the answer to UnlockNode."""
    return pb.UnlockNodeResponse(error=error_out(answer.error))


def _description(node: answers.NodeDescription, view: LeaderView) -> pb.NodeDescription:
    state = NodeState.FENCED if node.failover else view.state_of(node.node_id)
    return pb.NodeDescription(
        node_id=node.node_id,
        node_epoch=node.node_epoch,
        state=cast(pb.NodeState.ValueType, int(state)),
        failover=node.failover,
        wal_config=node.wal_config,
        tags=tags_out(node.tags),
        has_opening_streams=node.has_opening_streams,
        stream_set_object_count=node.stream_set_object_count,
        stream_set_objects=[_set_object(one) for one in node.stream_set_objects],
        locked=node.locked,
        pending_upload_count=node.pending_upload_count,
        recovered_by=optional_out(node.recovered_by),
        departed=node.departed,
        supervised=node.supervised,
        compacted_by=optional_out(view.compacted_by(node.node_id)),
    )


def _set_object(one: answers.StreamSetObject) -> pb.StreamSetObject:
    known = one.max_timestamp_ms != UNKNOWN
    return pb.StreamSetObject(
        object_id=one.object_id,
        order_id=one.order_id,
        data_time_ms=one.data_time_ms,
        object_size=one.object_size,
        range_count=one.range_count,
        min_timestamp_ms=one.min_timestamp_ms if known else None,
        max_timestamp_ms=one.max_timestamp_ms if known else None,
        crc32c=one.crc32c if one.crc32c != UNKNOWN else None,
    )
