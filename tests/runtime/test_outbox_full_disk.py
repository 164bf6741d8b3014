"""What a quorum-state that was written ahead of waiting batches lets go, and what it does not."""

from __future__ import annotations

from typing import Any

from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.quorum.events import Send
from streammeta.controller.quorum.messages import FetchRequest, VoteRequest
from streammeta.controller.runtime.core_loop import Outbox
from tests.quorum.core_harness import Lone


class Sent:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def send(self, request: object) -> None:
        self.messages.append(request)


def test_a_state_ahead_of_its_turn_lets_no_acknowledgement_go() -> None:
    transport: Any = Sent()
    outbox = Outbox(transport)
    header = Lone().header(1, 4)
    vote = VoteRequest(header=header, pre_vote=False, last_epoch=Epoch(3), end_offset=EndOffset(2))
    fetch = FetchRequest(
        header=header,
        fetch_offset=EndOffset(2),
        last_epoch=Epoch(3),
        high_watermark=EndOffset(0),
        read_round=0,
        max_wait_ms=0,
        max_bytes=1,
    )
    outbox.send(Send(NodeId(1), fetch, 3))  # the batch of write 2 waits for room
    outbox.send(Send(NodeId(1), vote, 3, vouches_for_log=False))
    assert transport.messages == []
    outbox.state_durable(3)
    assert transport.messages == [vote]
    outbox.send(Send(NodeId(1), vote, 4, vouches_for_log=False))
    assert transport.messages == [vote], "a later state is not written"
    outbox.durable(3)
    assert transport.messages == [vote, fetch]
