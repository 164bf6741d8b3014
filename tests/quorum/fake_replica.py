"""A replica that answers votes and reads of snapshots, and lets every Fetch wait."""

from typing import Any

from streammeta.controller.ids import Epoch, NodeId
from streammeta.controller.quorum import messages
from streammeta.controller.runtime.interfaces import Endpoints, Reply

NOWHERE = Endpoints()


class FakeReplica:
    """What a `PeerServer` of the tests serves; `fields` go into the headers of its answers."""

    def __init__(self, node_id: int, at: Endpoints = NOWHERE, **fields: Any) -> None:
        self._node_id = NodeId(node_id)
        self._at = at
        self._fields = fields
        self.is_stopping = False
        self.waiting: list[messages.Request] = []
        self.replies: list[Reply] = []
        self.forgotten: list[messages.Request] = []

    def handle(self, request: messages.Request, reply: Reply) -> None:
        header = answer_header(self._node_id, request.header, **self._fields)
        if isinstance(request, messages.VoteRequest):
            reply(messages.VoteResponse(header=header, pre_vote=request.pre_vote, granted=True))
        elif isinstance(request, messages.FetchSnapshotRequest):
            failed = answer_header(
                self._node_id, request.header, error=messages.QuorumError.SNAPSHOT_NOT_FOUND
            )
            reply(messages.FetchSnapshotResponse(header=failed, snapshot_id=request.snapshot_id))
        else:
            self.waiting.append(request)
            self.replies.append(reply)

    def forget(self, request: messages.Request, reply: Reply) -> None:
        assert reply in self.replies
        self.forgotten.append(request)

    def endpoints(self, _: NodeId) -> Endpoints:
        return self._at


def answer_header(
    node_id: NodeId, asked: messages.RequestHeader, **more: Any
) -> messages.ResponseHeader:
    """Return the header of an answer by `node_id`."""
    fields: dict[str, Any] = {
        "epoch": Epoch(1),
        "leader_id": None,
        "error": messages.QuorumError.NONE,
        **more,
    }
    return messages.ResponseHeader(
        sender=node_id,
        receiver=asked.sender.node_id,
        incarnation=asked.incarnation,
        request_id=asked.request_id,
        **fields,
    )
