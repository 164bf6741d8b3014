"""`streammeta node`: list brokers, lock and unregister them, abandon uploads they owe."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import click

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.framework.connecting import with_client
from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.client.errors import code_name
from streammeta.shell.documents import field_value
from streammeta.v1 import common_pb2, nodes_pb2, streams_pb2
from streammeta.v1.nodes_pb2_grpc import NodeServiceStub
from streammeta.v1.streams_pb2_grpc import StreamServiceStub

NODE_ID_MAX = 2**31 - 1
PAGE_SIZE = 10_000

_NODE_FIELDS = (
    *("node_id", "node_epoch", "state", "supervised", "locked", "departed", "failover"),
    *("recovered_by", "compacted_by", "has_opening_streams"),
    *("pending_upload_count", "stream_set_object_count"),
)
_NODE_COLUMNS = (*_NODE_FIELDS[:-2], "pending_uploads", "stream_set_objects")
_UPLOAD_COLUMNS = ("stream_id", "start_offset", "end_offset")
_HINTS = {
    common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST: (
        "`streammeta node list` shows the nodes that have registered"
    ),
    common_pb2.ERROR_CODE_NODE_EPOCH_EXPIRED: (
        "its broker has started again meanwhile; look at it and repeat"
    ),
    common_pb2.ERROR_CODE_STREAM_NOT_CLOSED: (
        "it has open streams or owes uploads: let it close its streams, or another node recover it;"
        " if it is gone with its write-ahead log, `streammeta node abandon --close-streams` closes"
        " them and gives up its uploads"
    ),
    common_pb2.ERROR_CODE_NODE_LOCKED: (
        "`streammeta node unlock` first, if nothing is to be kept for it"
    ),
}

_ALIVE = (nodes_pb2.NODE_STATE_ACTIVE, nodes_pb2.NODE_STATE_CONTROLLED_SHUTDOWN)

node_id_option = click.option(
    "--node-id", type=click.IntRange(0, NODE_ID_MAX), required=True, help="The node's id."
)


@click.group()
def node() -> None:
    """Look at brokers, and settle what one has left behind.

    \b
    Example:
      streammeta node list --connect 127.0.0.1:9091
    """


@node.command("list")
@with_client()
@with_output
def list_command(client: ControllerClient, output: Output) -> None:
    """List the nodes: state, nodes that recover or compact for them, and their set objects.

    \b
    Example:
      streammeta node list --connect 127.0.0.1:9091
    """
    found = _get_nodes(client)
    rows = [[field_value(each, field) for field in _NODE_FIELDS] for each in found]
    output.rows("nodes", _NODE_COLUMNS, rows)


@node.command()
@with_client()
@node_id_option
@with_output
def lock(client: ControllerClient, node_id: int, output: Output) -> None:
    """Keep other nodes from opening the streams that a node owned last.

    For a broker whose disk comes back: its streams are not taken over meanwhile. Its closed streams
    can't be opened by others until `streammeta node unlock`.

    \b
    Example:
      streammeta node lock --connect 127.0.0.1:9091 --node-id 1007
    """
    request = nodes_pb2.LockNodeRequest(request_id=_new_id(), node_id=node_id)
    answer = client.call(lambda channel: NodeServiceStub(channel).LockNode, request)
    _require(answer.error, node_id)
    output.summary({"node_id": node_id, "locked": True})


@node.command()
@with_client()
@node_id_option
@with_output
def unlock(client: ControllerClient, node_id: int, output: Output) -> None:
    """Undo `streammeta node lock`.

    \b
    Example:
      streammeta node unlock --connect 127.0.0.1:9091 --node-id 1007
    """
    request = nodes_pb2.UnlockNodeRequest(request_id=_new_id(), node_id=node_id)
    answer = client.call(lambda channel: NodeServiceStub(channel).UnlockNode, request)
    _require(answer.error, node_id)
    output.summary({"node_id": node_id, "locked": False})


@node.command()
@with_client()
@node_id_option
@with_output
def unregister(client: ControllerClient, node_id: int, output: Output) -> None:
    """Forget a node that has left for good and owns nothing any more.

    While it holds set objects it stays in the list as departed, until they are compacted. Refused
    while it has open streams, owes uploads, or is locked.

    \b
    Example:
      streammeta node unregister --connect 127.0.0.1:9091 --node-id 1007
    """
    described = _get_node(client, node_id)
    identity = common_pb2.NodeIdentity(node_id=node_id, node_epoch=described.node_epoch)
    request = nodes_pb2.UnregisterNodeRequest(request_id=_new_id(), node=identity)
    answer = client.call(lambda channel: NodeServiceStub(channel).UnregisterNode, request)
    _require(answer.error, node_id)
    left = _get_nodes(client, node_id)
    output.summary(
        {
            "node_id": node_id,
            "departed": any(each.departed for each in left),
            "stream_set_objects": sum(each.stream_set_object_count for each in left),
        }
    )


@node.command()
@with_client()
@node_id_option
@click.option(
    "--stream",
    "stream_ids",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only of this stream; may be repeated.  [default: all it owes]",
)
@click.option(
    "--close-streams",
    is_flag=True,
    help="Also close the streams that it has open, for other nodes to open. It must be gone.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be given up, and change nothing.")
@with_output
def abandon(
    *,
    client: ControllerClient,
    node_id: int,
    stream_ids: tuple[int, ...],
    close_streams: bool,
    dry_run: bool,
    output: Output,
) -> None:
    """Give up uploads that a node owes and can never make, as its write-ahead log is lost.

    The offsets are lost for good: readers pass over them, and the streams can be opened again. Try
    --dry-run first. Repeating the command does no harm.

    With --close-streams the node is fenced and the streams that it has open are closed, so that
    other nodes can open them. Records that only its write-ahead log holds are then set aside if
    that log comes back. A node that registered without a log needs no command: the controllers
    close its streams when its session ends.

    \b
    Examples:
      streammeta node abandon --connect 127.0.0.1:9091 --node-id 1007 --dry-run
      streammeta node abandon --connect 127.0.0.1:9091 --node-id 1007 --stream 3 --stream 4
      streammeta node abandon --connect 127.0.0.1:9091 --node-id 1007 --close-streams
    """
    described = _get_node(client, node_id)
    if close_streams and described.state in _ALIVE:
        raise CommandError(
            "NODE_IS_ALIVE",
            f"node {node_id} sends heartbeats, so its streams are not closed for it",
            "stop its broker, wait until `streammeta node list` shows FENCED, and repeat",
        )
    closed = 0
    if dry_run:
        uploads = list(_owed(client, node_id, stream_ids))
    else:
        request = streams_pb2.AbandonUploadsRequest(
            request_id=_new_id(), node_id=node_id, stream_ids=stream_ids
        )
        if close_streams:
            request.close_streams_of_epoch = described.node_epoch
        uploads = []
        while True:
            answer = client.call(lambda channel: StreamServiceStub(channel).AbandonUploads, request)
            _require(answer.error, node_id)
            uploads += answer.abandoned
            closed += answer.closed_streams
            if not answer.open_streams:
                break
    offsets = sum(each.end_offset - each.start_offset for each in uploads)
    output.summary(
        {
            "node_id": node_id,
            "dry_run": dry_run,
            "streams": len(uploads),
            "lost_offsets": offsets,
            "closed_streams": closed,
        }
    )
    if described.has_opening_streams and not close_streams:
        output.note(f"node {node_id} has open streams: --close-streams closes them")
    output.note("")
    rows = [(each.stream_id, each.start_offset, each.end_offset) for each in uploads]
    output.rows("uploads", _UPLOAD_COLUMNS, rows)


def _owed(
    client: ControllerClient, node_id: int, stream_ids: tuple[int, ...]
) -> Iterator[streams_pb2.PendingUpload]:
    """Look at every stream: a node may owe uploads of a stream that it does not own."""
    request = streams_pb2.DescribeStreamsRequest(stream_ids=stream_ids)
    request.page.page_size = PAGE_SIZE
    while True:
        page = client.call(lambda channel: StreamServiceStub(channel).DescribeStreams, request)
        for stream in page.streams:
            yield from (each for each in stream.pending_uploads if each.node_id == node_id)
        if not page.next_page_token:
            return
        request.page.page_token = page.next_page_token


def _get_nodes(client: ControllerClient, *node_ids: int) -> list[nodes_pb2.NodeDescription]:
    """Describe these nodes, or all of them if none is named."""
    request = nodes_pb2.GetNodesRequest(node_ids=node_ids)
    request.page.page_size = PAGE_SIZE
    nodes: list[nodes_pb2.NodeDescription] = []
    while True:
        page = client.call(lambda channel: NodeServiceStub(channel).GetNodes, request)
        nodes.extend(page.nodes)
        if not page.next_page_token:
            return nodes
        request.page.page_token = page.next_page_token


def _get_node(client: ControllerClient, node_id: int) -> nodes_pb2.NodeDescription:
    found = _get_nodes(client, node_id)
    if not found:
        _require(common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST, node_id)
    return found[0]


def _require(error: common_pb2.ErrorCode.ValueType, node_id: int) -> None:
    """Turn an error code of the contract into the command's failure."""
    if error == common_pb2.ERROR_CODE_NONE:
        return
    name = code_name(error)
    words = {
        common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST: f"node {node_id} has not registered",
        common_pb2.ERROR_CODE_NODE_LOCKED: f"node {node_id} is locked",
        common_pb2.ERROR_CODE_STREAM_NOT_CLOSED: f"node {node_id} is not done with its streams",
    }
    message = words.get(error, f"node {node_id} was refused with {name}")
    raise CommandError(name, message, _HINTS.get(error, "nothing was changed"))


def _new_id() -> str:
    return uuid.uuid4().hex
