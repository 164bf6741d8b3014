"""Messages survive the wire unchanged; what no correct peer sends is refused, whatever it is."""

from __future__ import annotations

import dataclasses

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.controller.rpc.quorum_wire import EXCHANGES, batch_to_pb
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.v1 import quorum_pb2 as pb

ASK = messages.RequestHeader(
    cluster_id=ClusterId("c"),
    sender=ReplicaKey(NodeId(0), DirectoryId("d")),
    receiver=ReplicaKey(NodeId(2)),
    epoch=Epoch(5),
    incarnation=(1 << 62) - 1,
    request_id=9,
    is_founder=True,
)
ANSWER = messages.ResponseHeader(
    sender=NodeId(2),
    receiver=NodeId(0),
    epoch=Epoch(5),
    leader_id=None,
    error=messages.QuorumError.NOT_LEADER,
    incarnation=3,
    request_id=9,
)
AT = Endpoints("h:1", "h:2")
GOOD = dataclasses.replace(ANSWER, error=messages.QuorumError.NONE, leader_id=NodeId(2))
BATCH = messages.Batch(EndOffset(7), Epoch(5), messages.BatchKind.DATA, (b"a", b"", b"bc"))
NEXT = messages.Batch(EndOffset(10), Epoch(6), messages.BatchKind.CONTROL, (b"{}",))
SNAPSHOT = SnapshotId(EndOffset(70), Epoch(4))
FETCHED = messages.FetchResponse(
    header=GOOD, high_watermark=EndOffset(6), log_start_offset=EndOffset(2), read_round=3
)
CHUNK = messages.FetchSnapshotResponse(
    header=GOOD,
    snapshot_id=SNAPSHOT,
    total_bytes=10,
    position=4,
    data=b"\x00\xff",
    file_digest=bytes(range(32)),
)

REQUESTS: list[messages.Request] = [
    messages.VoteRequest(header=ASK, pre_vote=True, last_epoch=Epoch(4), end_offset=EndOffset(7)),
    messages.BeginQuorumEpochRequest(header=ASK),
    messages.EndQuorumEpochRequest(header=ASK, preferred_successors=(ASK.sender, ASK.receiver)),
    messages.FetchRequest(
        header=ASK,
        fetch_offset=EndOffset(7),
        last_epoch=Epoch(4),
        high_watermark=EndOffset(6),
        read_round=3,
        max_wait_ms=500,
        max_bytes=8,
        answered_request_id=5,
        is_disk_full=True,
    ),
    messages.FetchSnapshotRequest(
        header=ASK, snapshot_id=SNAPSHOT, position=0, max_bytes=1 << 20, answered_request_id=6
    ),
    messages.UpdateVoterRequest(header=ASK, voter=Voter(ASK.sender, "[::1]:9091")),
    messages.UpdateVoterRequest(header=ASK, voter=Voter(ASK.sender, "[::1]:9091", "h:9090")),
]
RESPONSES: list[messages.Response] = [
    messages.VoteResponse(header=ANSWER, pre_vote=False, granted=True),
    messages.BeginQuorumEpochResponse(header=GOOD),
    messages.EndQuorumEpochResponse(header=ANSWER),
    FETCHED,
    dataclasses.replace(FETCHED, diverging=messages.EpochEnd(Epoch(0), EndOffset(0))),
    dataclasses.replace(FETCHED, snapshot_id=SNAPSHOT),
    dataclasses.replace(FETCHED, batches=(BATCH, NEXT)),
    CHUNK,
    messages.FetchSnapshotResponse(
        header=dataclasses.replace(GOOD, error=messages.QuorumError.SNAPSHOT_NOT_FOUND),
        snapshot_id=SNAPSHOT,
    ),
    messages.UpdateVoterResponse(header=GOOD),
]
_ANSWERED_BY = {
    messages.VoteResponse: messages.VoteRequest,
    messages.BeginQuorumEpochResponse: messages.BeginQuorumEpochRequest,
    messages.EndQuorumEpochResponse: messages.EndQuorumEpochRequest,
    messages.FetchResponse: messages.FetchRequest,
    messages.FetchSnapshotResponse: messages.FetchSnapshotRequest,
    messages.UpdateVoterResponse: messages.UpdateVoterRequest,
}


def encoded(message: messages.Request | messages.Response) -> Message:
    if isinstance(message, messages.Request):
        return EXCHANGES[type(message)].request_to_pb(message)
    return EXCHANGES[_ANSWERED_BY[type(message)]].response_to_pb(message, AT)


def decoded(
    message: messages.Request | messages.Response, wire: Message
) -> messages.Request | messages.Response:
    """Read `wire` as a message of the same kind as `message`."""
    result: messages.Request | messages.Response
    if isinstance(message, messages.Request):
        result = EXCHANGES[type(message)].request_from_pb(wire)
    else:
        result = EXCHANGES[_ANSWERED_BY[type(message)]].response_from_pb(wire)
    return result


ALL = [*REQUESTS, *RESPONSES]


def test_every_kind_of_message_is_tried() -> None:
    assert {type(message) for message in REQUESTS} == set(EXCHANGES)
    assert {_ANSWERED_BY[type(message)] for message in RESPONSES} == set(EXCHANGES)


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_a_message_is_unchanged_by_the_wire(message: messages.Request | messages.Response) -> None:
    wire = encoded(message)
    assert decoded(message, type(wire).FromString(wire.SerializeToString())) == message


@pytest.mark.parametrize("error", messages.QuorumError)
def test_the_contract_names_every_error(error: messages.QuorumError) -> None:
    assert pb.QuorumError.Name(pb.QuorumError.ValueType(error)) == f"QUORUM_ERROR_{error.name}"


def test_the_leaders_endpoints_go_with_its_id_alone() -> None:
    named = encoded(messages.VoteResponse(header=GOOD, pre_vote=False, granted=False))
    unnamed = encoded(messages.VoteResponse(header=ANSWER, pre_vote=False, granted=False))
    assert isinstance(named, pb.VoteResponse)
    assert isinstance(unnamed, pb.VoteResponse)
    assert (named.header.leader_id, named.header.leader_endpoint) == (2, "h:1")
    assert named.header.leader_client_endpoint == "h:2"
    assert not unnamed.header.HasField("leader_id")
    assert unnamed.header.leader_endpoint == unnamed.header.leader_client_endpoint == ""


# -- what no correct peer sends


@pytest.mark.parametrize(
    ("field", "value"), [("base_offset", 8), ("epoch", 6), ("kind", 2), ("checksum", 1)]
)
def test_a_damaged_batch_is_refused(field: str, value: int) -> None:
    message = _message_with(BATCH)
    setattr(message.batches[0], field, value)
    with pytest.raises(InvalidRequestError, match="batch at"):
        decoded(FETCHED, message)


def test_payloads_are_covered_with_their_lengths() -> None:
    message = _message_with(BATCH)
    message.batches[0].payloads[:] = [b"a", b"b", b"c"]
    with pytest.raises(InvalidRequestError, match="checksum"):
        decoded(FETCHED, message)


@pytest.mark.parametrize(
    "second",
    [
        dataclasses.replace(NEXT, base_offset=EndOffset(11)),
        dataclasses.replace(NEXT, base_offset=EndOffset(9)),
        dataclasses.replace(NEXT, epoch=Epoch(4)),
    ],
)
def test_batches_that_do_not_continue_each_other_are_refused(second: messages.Batch) -> None:
    with pytest.raises(InvalidRequestError, match="does not continue"):
        decoded(FETCHED, _message_with(BATCH, second))


def test_an_empty_batch_is_refused() -> None:
    empty = messages.Batch(EndOffset(7), Epoch(5), messages.BatchKind.DATA, ())
    with pytest.raises(InvalidRequestError, match="empty"):
        decoded(FETCHED, _message_with(empty))


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (message, field, value)
        for message, field, value in [
            (REQUESTS[0], "end_offset", -1),
            (REQUESTS[0], "last_epoch", -1),
            (REQUESTS[0], "header.epoch", -1),
            (REQUESTS[0], "header.sender.node_id", -1),
            (REQUESTS[0], "header.sender.directory_id", "d" * 65),
            (REQUESTS[3], "fetch_offset", -1),
            (REQUESTS[3], "high_watermark", -1),
            (REQUESTS[3], "max_bytes", -1),
            (REQUESTS[3], "max_wait_ms", -1),
            (REQUESTS[4], "position", -1),
            (REQUESTS[4], "max_bytes", 0),
            (REQUESTS[4], "snapshot_id.end_offset", -1),
            (REQUESTS[5], "voter.endpoint", "nowhere"),
            (REQUESTS[5], "voter.endpoint", "0.0.0.0:9090"),
            (REQUESTS[5], "voter.key.node_id", 1),
            (RESPONSES[0], "header.error", 9999),
            (RESPONSES[0], "header.leader_id", -2),
            (RESPONSES[0], "header.epoch", -1),
            (FETCHED, "high_watermark", -1),
            (FETCHED, "log_start_offset", -1),
            (CHUNK, "total_bytes", 5),
            (CHUNK, "position", -1),
            (CHUNK, "file_digest", b"short"),
        ]
    ],
)
def test_a_field_out_of_its_range_is_refused_by_name(
    message: messages.Request | messages.Response, field: str, value: object
) -> None:
    wire = encoded(message)
    *path, name = field.split(".")
    part = wire
    for step in path:
        part = getattr(part, step)
    setattr(part, name, value)

    # The data's end is what total_bytes contradicts, and the key what its node id is part of.
    named = {"total_bytes": "data", "voter.key.node_id": "voter.key"}.get(field, field)
    with pytest.raises(InvalidRequestError, match=rf"^{named}: "):
        decoded(message, wire)


def test_an_answer_says_one_thing_at_a_time() -> None:
    both = dataclasses.replace(FETCHED, snapshot_id=SNAPSHOT, batches=(BATCH,))
    with pytest.raises(InvalidRequestError, match="at most one"):
        decoded(both, encoded(both))


@settings(max_examples=60)
@given(
    message=st.sampled_from(ALL),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=8),
)
@example(message=FETCHED, changes=[(0, 0)])
def test_bytes_changed_on_the_way_are_a_message_or_refused(
    message: messages.Request | messages.Response, changes: list[tuple[int, int]]
) -> None:
    """Whatever arrives, it is translated or refused with InvalidRequestError."""
    wire = bytearray(encoded(message).SerializeToString())
    for position, value in changes:
        if wire:
            wire[position % len(wire)] = value
    _read_or_refuse(message, bytes(wire))


@settings(max_examples=60)
@given(message=st.sampled_from(ALL), wire=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(
    message: messages.Request | messages.Response, wire: bytes
) -> None:
    _read_or_refuse(message, wire)


_NUMBERS = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([-1, 0, 1, (1 << 63) - 1])
)


@settings(max_examples=100)
@given(
    batches=st.lists(
        st.builds(
            pb.LogBatch,
            base_offset=_NUMBERS,
            epoch=_NUMBERS,
            payloads=st.lists(st.binary(max_size=8), max_size=3),
            checksum=st.integers(0, (1 << 32) - 1),
        ),
        max_size=3,
    ),
    end=st.builds(pb.EpochEnd, epoch=_NUMBERS, end_offset=_NUMBERS),
    snapshot_id=st.builds(pb.SnapshotId, epoch=_NUMBERS, end_offset=_NUMBERS),
    high_watermark=_NUMBERS,
)
def test_any_fetch_answer_is_refused_or_sound(
    batches: list[pb.LogBatch],
    end: pb.EpochEnd,
    snapshot_id: pb.SnapshotId,
    high_watermark: int,
) -> None:
    for part in (
        pb.FetchResponse(batches=batches),
        pb.FetchResponse(diverging=end),
        pb.FetchResponse(snapshot_id=snapshot_id),
    ):
        part.high_watermark = high_watermark
        _read_or_refuse(FETCHED, part.SerializeToString())


def _read_or_refuse(message: messages.Request | messages.Response, wire: bytes) -> None:
    try:
        parsed = type(encoded(message)).FromString(wire)
    except DecodeError:
        return  # gRPC refuses it before it reaches this code
    try:
        value = decoded(message, parsed)
    except InvalidRequestError:
        return
    assert type(value) is type(message)
    assert _numbers_are_sound(value)


def _numbers_are_sound(value: messages.Request | messages.Response) -> bool:
    """No offset, epoch or size of an accepted message is negative."""
    ignored = {"incarnation", "request_id"}

    def walk(part: object, name: str = "") -> bool:
        if dataclasses.is_dataclass(part):
            fields = dataclasses.fields(part)
            return all(walk(getattr(part, field.name), field.name) for field in fields)
        if isinstance(part, tuple):
            return all(walk(each, name) for each in part)
        return not isinstance(part, int) or name in ignored or part >= 0

    return walk(value)


def _message_with(*batches: messages.Batch) -> pb.FetchResponse:
    message = encoded(FETCHED)
    assert isinstance(message, pb.FetchResponse)
    message.batches.extend(map(batch_to_pb, batches))
    return message
