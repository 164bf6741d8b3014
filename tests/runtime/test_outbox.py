"""Nothing leaves a replica before the write it depends on is durable, whatever it carries."""

from __future__ import annotations

import dataclasses

import pytest

from streammeta.controller.ids import ClusterId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.events import Send
from streammeta.controller.quorum.voters import ReplicaKey, VoterSet
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.controller.runtime.replication.core_loop import Outbox

HEADER = messages.RequestHeader(
    cluster_id=ClusterId("c"),
    sender=ReplicaKey(NodeId(1)),
    receiver=ReplicaKey(NodeId(0)),
    epoch=Epoch(4),
    incarnation=1,
    request_id=1,
)
FETCH = messages.FetchRequest(
    header=HEADER,
    fetch_offset=EndOffset(2),
    last_epoch=Epoch(4),
    high_watermark=EndOffset(1),
    read_round=0,
    max_wait_ms=500,
    max_bytes=100,
)
REQUESTS: list[messages.Request] = [
    FETCH,
    dataclasses.replace(FETCH, read_round=1),
    dataclasses.replace(FETCH, read_round=9, fetch_offset=EndOffset(0)),
    dataclasses.replace(FETCH, is_disk_full=True),
    messages.FetchSnapshotRequest(
        header=HEADER, snapshot_id=SnapshotId(EndOffset(9), Epoch(3)), position=0, max_bytes=1
    ),
    messages.VoteRequest(
        header=HEADER, pre_vote=False, last_epoch=Epoch(3), end_offset=EndOffset(2)
    ),
    messages.BeginQuorumEpochRequest(header=HEADER),
]


class RecordingTransport:
    """Keeps what it is to send."""

    def __init__(self) -> None:
        self.sent: list[messages.Request] = []

    def bind(self, listener: object) -> None:
        """Tell nothing."""

    def send(self, request: messages.Request) -> None:
        self.sent.append(request)

    def set_voters(self, voters: VoterSet) -> None:
        """Reach no peer."""

    def endpoints(self, node_id: NodeId) -> Endpoints:
        return Endpoints()

    async def close(self) -> None:
        """Hold nothing."""


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda item: type(item).__name__)
def test_a_request_leaves_when_its_write_is_durable_and_not_before(
    request_: messages.Request,
) -> None:
    transport = RecordingTransport()
    outbox = Outbox(transport)
    outbox.durable(3)
    for request in (request_, FETCH):
        outbox.send(Send(NodeId(0), request, after=5))
    outbox.durable(4)
    assert not transport.sent
    for token in (5, 6):
        outbox.durable(token)
        assert transport.sent == [request_, FETCH], "in order and once"


def test_a_state_ahead_of_its_turn_lets_no_acknowledgement_go() -> None:
    transport = RecordingTransport()
    outbox = Outbox(transport)
    fetch, vote = FETCH, REQUESTS[5]
    outbox.send(Send(NodeId(1), fetch, 3))  # the batch of write 2 waits for room
    outbox.send(Send(NodeId(1), vote, 3, vouches_for_log=False))
    assert transport.sent == []
    outbox.state_durable(3)
    assert transport.sent == [vote]
    outbox.send(Send(NodeId(1), vote, 4, vouches_for_log=False))
    assert transport.sent == [vote], "a later state is not written"
    outbox.durable(3)
    assert transport.sent == [vote, fetch]


def test_what_waits_while_a_later_epoch_is_spoken_for_is_dropped() -> None:
    transport = RecordingTransport()
    outbox = Outbox(transport)
    told: list[messages.Response | None] = []
    outbox.expect(FETCH, told.append)
    answer = messages.FetchResponse(
        header=messages.ResponseHeader(
            sender=NodeId(0),
            receiver=NodeId(1),
            epoch=Epoch(4),
            leader_id=None,
            error=messages.QuorumError.NONE,
            incarnation=1,
            request_id=1,
        ),
        high_watermark=EndOffset(1),
        log_start_offset=EndOffset(0),
        read_round=0,
    )
    outbox.send(Send(NodeId(1), FETCH, 2))  # the batch of write 2 waits for room
    outbox.send(Send(NodeId(1), answer, 2))
    later = dataclasses.replace(FETCH, header=dataclasses.replace(HEADER, epoch=Epoch(5)))
    outbox.send(Send(NodeId(1), later, 3, vouches_for_log=False))
    outbox.state_durable(3)
    outbox.durable(3)
    assert (transport.sent, told) == ([later], [None])
