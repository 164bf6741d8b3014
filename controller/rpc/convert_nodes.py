"""NodeService's messages, from protobuf to requests of the map and back."""

from controller.metadata import answers, requests
from controller.rpc.convert import error_out, node_identity, tags_in, tags_out
from proto import nodes_pb2 as pb


def register_node_in(message: pb.RegisterNodeRequest) -> requests.RegisterNode:
    """Read RegisterNode."""
    return requests.RegisterNode(
        node=node_identity(message.node),
        wal_config=message.wal_config,
        tags=tags_in(message.tags),
    )


def register_node_out(answer: answers.RegisterNodeAnswer) -> pb.RegisterNodeResponse:
    """Write the answer to RegisterNode."""
    return pb.RegisterNodeResponse(error=error_out(answer.error))


def get_nodes_in(message: pb.GetNodesRequest) -> requests.GetNodes:
    """Read GetNodes."""
    return requests.GetNodes(
        node_ids=tuple(message.node_ids),
        include_stream_set_objects=message.include_stream_set_objects,
    )


def get_nodes_out(answer: answers.GetNodesAnswer) -> pb.GetNodesResponse:
    """Write the answer to GetNodes."""
    return pb.GetNodesResponse(nodes=[_description(node) for node in answer.nodes])


def _description(node: answers.NodeDescription) -> pb.NodeDescription:
    return pb.NodeDescription(
        node_id=node.node_id,
        node_epoch=node.node_epoch,
        # Sessions are not built yet: of a node's liveness only an ongoing recovery is known.
        state=pb.NODE_STATE_FENCED if node.failover else pb.NODE_STATE_UNKNOWN,
        failover=node.failover,
        wal_config=node.wal_config,
        tags=tags_out(node.tags),
        has_opening_streams=node.has_opening_streams,
        stream_set_object_count=node.stream_set_object_count,
        stream_set_objects=[
            pb.StreamSetObject(
                object_id=one.object_id,
                order_id=one.order_id,
                data_time_ms=one.data_time_ms,
                object_size=one.object_size,
                range_count=one.range_count,
            )
            for one in node.stream_set_objects
        ],
    )
