"""Messages survive the wire unchanged; what no correct peer sends is refused, whatever it is."""

import dataclasses
from typing import Any, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import Epoch
from streammeta.controller.peers import wire
from streammeta.controller.peers.frames import ANSWERS, BULK_REQUESTS, CONTROL_REQUESTS, FrameKind
from streammeta.controller.quorum import messages
from streammeta.controller.runtime.interfaces import Endpoints
from tests.quorum import peer_messages
from tests.quorum.peer_messages import (
    BATCH,
    CHUNK,
    FETCH,
    FETCH_SNAPSHOT,
    FETCHED,
    GOOD,
    NEXT,
    SNAPSHOT,
    UPDATE,
    VOTE,
    VOTED,
    with_field,
)  # fmt: skip

REQUESTS = {**CONTROL_REQUESTS, **BULK_REQUESTS}
Message: TypeAlias = messages.Request | messages.Response
LEADER = Endpoints("h:1", "client:2")
ALL: list[Message] = [*peer_messages.REQUESTS, *peer_messages.RESPONSES]


def encoded(message: Message) -> tuple[FrameKind, bytes]:
    if isinstance(message, messages.Request):
        kind, parts = wire.encode_request(message)
    else:
        kind, parts = wire.encode_answer(message, LEADER)
    return kind, b"".join(parts)


def decoded(kind: FrameKind, payload: bytes) -> Message:
    if kind in REQUESTS:
        return wire.decode_request(kind, payload)
    return wire.decode_answer(kind, payload)[0]


def test_every_kind_of_message_is_tried() -> None:
    kinds = {encoded(message)[0] for message in ALL}
    assert kinds == {*REQUESTS, *ANSWERS} - {FrameKind.FAILURE}
    assert set(wire.ANSWER_KINDS) == set(REQUESTS)


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_a_message_is_unchanged_by_the_wire(message: Message) -> None:
    assert decoded(*encoded(message)) == message


def test_a_batch_is_sent_as_itself_whatever_was_sent_before() -> None:
    """The last one is kept encoded; one at the same place in another epoch is another batch."""
    other = messages.Batch(BATCH.base_offset, Epoch(BATCH.epoch + 1), BATCH.kind, (b"other",))
    for batch in (BATCH, BATCH, other, BATCH):
        answer = with_field(FETCHED, "batches", (batch,))
        assert decoded(*encoded(answer)) == answer


@pytest.mark.parametrize("error", messages.QuorumError)
def test_every_error_has_room_on_the_wire(error: messages.QuorumError) -> None:
    refused = dataclasses.replace(VOTED, header=dataclasses.replace(VOTED.header, error=error))
    assert decoded(*encoded(refused)) == refused


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_a_message_cut_anywhere_or_with_bytes_behind_it_is_refused(message: Message) -> None:
    kind, payload = encoded(message)
    for cut in range(len(payload)):
        with pytest.raises(InvalidRequestError):
            decoded(kind, payload[:cut])
    with pytest.raises(InvalidRequestError, match="1"):
        decoded(kind, payload + b"\0")


def test_the_leaders_addresses_go_with_its_id_alone() -> None:
    named = wire.encode_answer(dataclasses.replace(VOTED, header=GOOD), LEADER)
    unnamed = wire.encode_answer(VOTED, LEADER)
    assert wire.decode_answer(named[0], b"".join(named[1]))[1] == LEADER
    assert wire.decode_answer(unnamed[0], b"".join(unnamed[1]))[1] == Endpoints()


# -- what no correct peer sends


@pytest.mark.parametrize("flipped", range(8 * len(encoded(FETCHED)[1]), 8 * 200, 37))
def test_a_damaged_batch_is_refused(flipped: int) -> None:
    kind, payload = encoded(dataclasses.replace(FETCHED, batches=(BATCH, NEXT)))
    changed = bytearray(payload)
    if flipped >= 8 * len(changed):
        return
    changed[flipped // 8] ^= 1 << flipped % 8
    with pytest.raises(InvalidRequestError, match="batches"):
        decoded(kind, bytes(changed))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"batches": (BATCH, with_field(NEXT, "base_offset", 11))}, "does not continue"),
        ({"batches": (BATCH, with_field(NEXT, "base_offset", 9))}, "does not continue"),
        ({"batches": (BATCH, with_field(NEXT, "epoch", 4))}, "does not continue"),
        ({"batches": (with_field(BATCH, "payloads", ()),)}, "empty"),
        ({"batches": (with_field(BATCH, "base_offset", -1),)}, "batches.base_offset: -1"),
        ({"batches": (with_field(BATCH, "epoch", -1),)}, "batches.epoch: -1"),
        ({"batches": (BATCH,), "snapshot_id": SNAPSHOT}, "at most one"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(fields: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        decoded(*encoded(dataclasses.replace(FETCHED, **fields)))


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (VOTE, "end_offset", -1),
        (VOTE, "last_epoch", -1),
        (VOTE, "header.epoch", -1),
        (VOTE, "header.request_id", -1),
        (VOTE, "header.sender.node_id", -1),
        (VOTE, "header.sender.directory_id", "d" * 65),
        (FETCH, "fetch_offset", -1),
        (FETCH, "high_watermark", -1),
        (FETCH, "max_bytes", -1),
        (FETCH, "max_wait_ms", -1),
        (FETCH_SNAPSHOT, "position", -1),
        (FETCH_SNAPSHOT, "max_bytes", 0),
        (FETCH_SNAPSHOT, "snapshot_id.end_offset", -1),
        (UPDATE, "voter.endpoint", "nowhere"),
        (UPDATE, "voter.endpoint", "0.0.0.0:9090"),
        (UPDATE, "voter.client_endpoint", "nowhere"),
        (UPDATE, "voter.key.node_id", 1),
        (VOTED, "header.error", 200),
        (VOTED, "header.leader_id", -2),
        (VOTED, "header.epoch", -1),
        (FETCHED, "high_watermark", -1),
        (FETCHED, "log_start_offset", -1),
        (CHUNK, "total_bytes", 5),
        (CHUNK, "position", -1),
        (CHUNK, "file_digest", b"short"),
    ],
)
def test_a_field_out_of_its_range_is_refused_by_name(
    message: Message, field: str, value: object
) -> None:
    # The data's end is what total_bytes contradicts, and the key what its node id is part of.
    named = {"total_bytes": "data", "voter.key.node_id": "voter.key"}.get(field, field)
    with pytest.raises(InvalidRequestError, match=rf"^{named}: "):
        decoded(*encoded(with_field(message, field, value)))


@settings(max_examples=100)
@given(
    message=st.sampled_from(ALL),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=8),
)
@example(message=FETCHED, changes=[(0, 0)])
def test_bytes_changed_on_the_way_are_a_message_or_refused(
    message: Message, changes: list[tuple[int, int]]
) -> None:
    kind, payload = encoded(message)
    changed = bytearray(payload)
    for position, value in changes:
        changed[position % len(changed)] = value
    _read_or_refuse(kind, bytes(changed))


@settings(max_examples=100)
@given(kind=st.sampled_from(sorted({*REQUESTS, *ANSWERS} - {FrameKind.FAILURE})), data=st.data())
def test_any_bytes_are_a_message_or_refused(kind: FrameKind, data: st.DataObject) -> None:
    _read_or_refuse(kind, data.draw(st.binary(max_size=200)))


def _read_or_refuse(kind: FrameKind, payload: bytes) -> None:
    try:
        value = decoded(kind, payload)
    except InvalidRequestError:
        return
    assert _numbers_are_sound(value)


def _numbers_are_sound(value: Message) -> bool:
    def walk(part: object) -> bool:
        if dataclasses.is_dataclass(part):
            return all(walk(getattr(part, field.name)) for field in dataclasses.fields(part))
        if isinstance(part, tuple):
            return all(map(walk, part))
        return not isinstance(part, int) or part >= 0

    return walk(value)
