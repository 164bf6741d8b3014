"""Messages survive the wire unchanged; damaged batches do not pass for whole ones."""

from __future__ import annotations

import pytest

from controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId
from controller.quorum.messages import (
    Batch,
    BatchKind,
    BeginQuorumEpochRequest,
    BeginQuorumEpochResponse,
    EndQuorumEpochRequest,
    EndQuorumEpochResponse,
    EpochEnd,
    FetchRequest,
    FetchResponse,
    QuorumError,
    RequestHeader,
    ResponseHeader,
    VoteRequest,
    VoteResponse,
)
from controller.quorum.voters import ReplicaKey
from controller.rpc import quorum_wire as wire
from proto import quorum_pb2 as pb

ASK = RequestHeader(
    cluster_id=ClusterId("c"),
    sender=ReplicaKey(NodeId(0), DirectoryId("d")),
    receiver=ReplicaKey(NodeId(2)),
    epoch=Epoch(5),
    incarnation=(1 << 62) - 1,
    request_id=9,
)
ANSWER = ResponseHeader(
    sender=NodeId(2),
    receiver=NodeId(0),
    epoch=Epoch(5),
    leader_id=None,
    error=QuorumError.NOT_LEADER,
    incarnation=3,
    request_id=9,
)
BATCH = Batch(EndOffset(7), Epoch(5), BatchKind.DATA, (b"a", b"", b"bc"))


def test_requests_are_unchanged() -> None:
    vote = VoteRequest(header=ASK, pre_vote=True, last_epoch=Epoch(4), end_offset=EndOffset(7))
    assert wire.vote_request_from_pb(wire.vote_request_to_pb(vote)) == vote
    begin = BeginQuorumEpochRequest(header=ASK)
    assert wire.begin_request_from_pb(wire.begin_request_to_pb(begin)) == begin
    end = EndQuorumEpochRequest(header=ASK, preferred_successors=(ASK.sender, ASK.receiver))
    assert wire.end_request_from_pb(wire.end_request_to_pb(end)) == end
    fetch = FetchRequest(
        header=ASK,
        fetch_offset=EndOffset(7),
        last_epoch=Epoch(4),
        high_watermark=EndOffset(6),
        read_round=3,
        max_wait_ms=500,
        max_bytes=8,
    )
    assert wire.fetch_request_from_pb(wire.fetch_request_to_pb(fetch)) == fetch


def test_answers_are_unchanged() -> None:
    vote = VoteResponse(header=ANSWER, pre_vote=False, granted=True)
    assert wire.vote_response_from_pb(wire.vote_response_to_pb(vote, "h:1")) == vote
    begin = BeginQuorumEpochResponse(header=ANSWER)
    assert wire.begin_response_from_pb(wire.begin_response_to_pb(begin, "")) == begin
    end = EndQuorumEpochResponse(header=ANSWER)
    assert wire.end_response_from_pb(wire.end_response_to_pb(end, "")) == end


@pytest.mark.parametrize("diverging", [None, EpochEnd(Epoch(0), EndOffset(0))])
def test_fetched_batches_are_unchanged(diverging: EpochEnd | None) -> None:
    fetched = FetchResponse(
        header=ANSWER,
        high_watermark=EndOffset(6),
        log_start_offset=EndOffset(0),
        read_round=3,
        diverging=diverging,
        batches=(BATCH,),
    )
    assert wire.fetch_response_from_pb(wire.fetch_response_to_pb(fetched, "h:1")) == fetched


@pytest.mark.parametrize(
    ("field", "value"), [("base_offset", 8), ("epoch", 6), ("kind", 2), ("checksum", 1)]
)
def test_a_damaged_batch_is_refused(field: str, value: int) -> None:
    message = _message_with(BATCH)
    setattr(message.batches[0], field, value)
    with pytest.raises(wire.BadMessageError, match="batch at"):
        wire.fetch_response_from_pb(message)


def test_payloads_are_covered_with_their_lengths() -> None:
    message = _message_with(BATCH)
    message.batches[0].payloads[:] = [b"a", b"b", b"c"]
    with pytest.raises(wire.BadMessageError, match="checksum"):
        wire.fetch_response_from_pb(message)


def _message_with(batch: Batch) -> pb.FetchResponse:
    fetched = FetchResponse(
        header=ANSWER,
        high_watermark=EndOffset(0),
        log_start_offset=EndOffset(0),
        read_round=0,
        batches=(batch,),
    )
    return wire.fetch_response_to_pb(fetched, "")
