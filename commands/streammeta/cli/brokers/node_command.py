"""`streammeta node`: list brokers, lock and unregister them, abandon their pending uploads."""

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
        "`streammeta node list` shows the registered nodes"
    ),
    common_pb2.ERROR_CODE_NODE_EPOCH_EXPIRED: (
        "its broker has restarted meanwhile. Check it and repeat"
    ),
    common_pb2.ERROR_CODE_STREAM_NOT_CLOSED: (
        "it has open streams or pending uploads. Let it close its streams, or another node"
        " recover it. If its write-ahead log is lost, `streammeta node abandon"
        " --close-streams` closes the streams and abandons the uploads"
    ),
    common_pb2.ERROR_CODE_NODE_LOCKED: (
        "run `streammeta node unlock` first, unless its streams must be kept for it"
    ),
}

_ALIVE = (nodes_pb2.NODE_STATE_ACTIVE, nodes_pb2.NODE_STATE_CONTROLLED_SHUTDOWN)

node_id_option = click.option(
    "--node-id", type=click.IntRange(0, NODE_ID_MAX), required=True, help="Id of the node."
)


@click.group()
def node() -> None:
    """Show brokers, and clean up after departed ones.

    \b
    Example:
      streammeta node list --connect 127.0.0.1:9091
    """


@node.command("list")
@with_client()
@with_output
def list_command(client: ControllerClient, output: Output) -> None:
    """List the nodes: state, nodes that recover or compact for them, and their stream set objects.

    \b
    Example:
      streammeta node list --connect 127.0.0.1:9091
    """
    found = _get_nodes(client)
    rows = [[field_value(node, field) for field in _NODE_FIELDS] for node in found]
    output.rows("nodes", _NODE_COLUMNS, rows)


@node.command()
@with_client()
@node_id_option
@with_output
def lock(client: ControllerClient, node_id: int, output: Output) -> None:
    """Keep other nodes from opening the streams that a node owned last.

    Use it for a broker whose disk will come back: nobody takes over its streams meanwhile. Other
    nodes can't open its closed streams until `streammeta node unlock`.

    \b
    Example:
      streammeta node lock --connect 127.0.0.1:9091 --node-id 1007
    """
    # One id for all retries of the call, so that a retry after an unknown outcome changes nothing.
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
    """Remove a departed node that owns nothing.

    A node with stream set objects stays in the list as departed, until they are compacted. The
    controllers reject the call while the node has open streams or pending uploads, or is locked.

    \b
    Example:
      streammeta node unregister --connect 127.0.0.1:9091 --node-id 1007
    """
    described = _get_node(client, node_id)
    # The epoch names the described process. If the broker restarts now, the request is rejected.
    identity = common_pb2.NodeIdentity(node_id=node_id, node_epoch=described.node_epoch)
    request = nodes_pb2.UnregisterNodeRequest(request_id=_new_id(), node=identity)
    answer = client.call(lambda channel: NodeServiceStub(channel).UnregisterNode, request)
    _require(answer.error, node_id)

    # A node with stream set objects stays listed as departed, so look again.
    left = _get_nodes(client, node_id)
    output.summary(
        {
            "node_id": node_id,
            "departed": any(node.departed for node in left),
            "stream_set_objects": sum(node.stream_set_object_count for node in left),
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
    help="Only this stream. Repeatable. [default: all its pending uploads]",
)
@click.option(
    "--close-streams",
    is_flag=True,
    help="Also close its open streams, so that other nodes can open them. The node must have"
    " no process.",
)
@click.option(
    "--dry-run", is_flag=True, help="Show the uploads that would be abandoned. Change nothing."
)
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
    """Abandon pending uploads of a node that can no longer be completed, as its log is lost.

    Their offsets are lost permanently: readers skip them, and the streams can be opened again. Try
    --dry-run first. Repeating the command is harmless.

    With --close-streams the node is fenced and its open streams are closed, so that other nodes can
    open them. If its write-ahead log comes back, records that only the log contains are set aside.
    A node that registered without a log needs no command: the controllers close its streams when
    its session ends.

    \b
    Examples:
      streammeta node abandon --connect 127.0.0.1:9091 --node-id 1007 --dry-run
      streammeta node abandon --connect 127.0.0.1:9091 --node-id 1007 --stream 3 --stream 4
      streammeta node abandon --connect 127.0.0.1:9091 --node-id 1007 --close-streams
    """
    described = _get_node(client, node_id)
    # The request would fence a live broker. A restart after this check has another epoch and is
    # rejected.
    if close_streams and described.state in _ALIVE:
        raise CommandError(
            "NODE_IS_ALIVE",
            f"node {node_id} sends heartbeats, so its streams were not closed",
            "stop its broker, wait until `streammeta node list` shows FENCED, and repeat",
        )

    closed = 0
    if dry_run:
        uploads = list(_list_pending(client, node_id, stream_ids))
    else:
        request = streams_pb2.AbandonUploadsRequest(
            request_id=_new_id(), node_id=node_id, stream_ids=stream_ids
        )
        if close_streams:
            # The call also fences this process, so that it can't write to the closed streams.
            request.close_streams_of_epoch = described.node_epoch
        uploads = []
        # A call closes at most 10,000 streams, and is idempotent. Repeat it until none is open.
        while True:
            answer = client.call(lambda channel: StreamServiceStub(channel).AbandonUploads, request)
            _require(answer.error, node_id)
            uploads += answer.abandoned
            closed += answer.closed_streams
            if not answer.open_streams:
                break

    offsets = sum(upload.end_offset - upload.start_offset for upload in uploads)
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
        output.note(f"node {node_id} has open streams. --close-streams closes them")
    output.note("")
    rows = [(upload.stream_id, upload.start_offset, upload.end_offset) for upload in uploads]
    output.rows("uploads", _UPLOAD_COLUMNS, rows)


def _list_pending(
    client: ControllerClient, node_id: int, stream_ids: tuple[int, ...]
) -> Iterator[streams_pb2.PendingUpload]:
    """Look at every stream, because a node may have pending uploads in streams of other owners."""
    request = streams_pb2.DescribeStreamsRequest(stream_ids=stream_ids)
    request.page.page_size = PAGE_SIZE
    while True:
        page = client.call(lambda channel: StreamServiceStub(channel).DescribeStreams, request)
        for stream in page.streams:
            yield from (upload for upload in stream.pending_uploads if upload.node_id == node_id)
        if not page.next_page_token:
            return
        request.page.page_token = page.next_page_token


def _get_nodes(client: ControllerClient, *node_ids: int) -> list[nodes_pb2.NodeDescription]:
    """Describe these nodes, or all nodes if none is named."""
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
    # GetNodes omits unknown ids. Report them with the contract's own error code.
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
        common_pb2.ERROR_CODE_STREAM_NOT_CLOSED: f"node {node_id} still has open streams or"
        " pending uploads",
    }
    message = words.get(error, f"the controllers rejected node {node_id} with {name}")
    raise CommandError(name, message, _HINTS.get(error, "nothing was changed"))


def _new_id() -> str:
    return uuid.uuid4().hex
