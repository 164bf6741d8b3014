"""Messages and frames survive the wire unchanged; nothing else passes, torn or damaged as it is."""

import dataclasses
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.features import UNTOLD, Levels, Software
from streammeta.controller.ids import ClusterId, Epoch, NodeId
from streammeta.controller.peers import wire
from streammeta.controller.peers.frames import (
    ANSWERS,
    BULK_REQUESTS,
    CONTROL_REQUESTS,
    FETCHED_BYTES_MAX,
    HEADER_BYTES,
    HELLO_BYTES_MAX,
    HELLO_ONLY,
    REQUEST_BYTES_MAX,
    Frame,
    FrameError,
    FrameKind,
    FrameParser,
    seal,
)  # fmt: skip
from streammeta.controller.peers.hello import (
    Hello,
    HelloAnswer,
    HelloError,
    Purpose,
    Refusal,
)  # fmt: skip
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.config import QuorumLimits
from streammeta.controller.runtime.interfaces import Endpoints
from tests.kit.seeds import seeds
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


VOTE_FRAME = Frame(FrameKind.VOTE, 1, b"vote")
FETCH_FRAME = Frame(FrameKind.FETCH, (1 << 64) - 1, b"")
THREE = [VOTE_FRAME, FETCH_FRAME, Frame(FrameKind.UPDATE_VOTER, 7, b"x" * 1000)]
SOFTWARE = Software("0.2.0", Levels(1, 2))
HELLO = Hello(ClusterId("c"), NodeId(3), NodeId(4), Purpose.BULK, "[::1]:9090", SOFTWARE)
HELLO_1 = bytes.fromhex("7374726d70656572 0001 00000003 00000004 02 01 000a") + b"c[::1]:9090"
"""The same of version 1, which had no software."""
ANSWER_1 = bytes.fromhex("7374726d70656572 0001 00000003 00 01") + b"c"
GREETED = HelloAnswer(ClusterId("c"), NodeId(1))


def sealed(frames: list[Frame]) -> bytes:
    return b"".join(seal(frame.kind, frame.call_id, [frame.payload]) for frame in frames)


def drained(parser: FrameParser) -> Iterator[Frame]:
    while frame := parser.next():
        yield frame


def parsed(*pieces: bytes) -> list[Frame]:
    parser = FrameParser(CONTROL_REQUESTS)
    frames: list[Frame] = []
    for piece in pieces:
        parser.feed(piece)
        frames += drained(parser)
    return frames


def test_parts_are_joined_and_covered_by_one_checksum() -> None:
    assert parsed(seal(FrameKind.VOTE, 1, [b"vo", b"", b"te"])) == [VOTE_FRAME]


def test_frames_torn_at_any_byte_are_the_same_frames() -> None:
    data = sealed(THREE)
    for cut in range(len(data)):
        assert parsed(data[:cut], data[cut:]) == THREE
    assert parsed(*(data[at : at + 1] for at in range(len(data)))) == THREE


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    data = sealed([VOTE_FRAME])
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            assert parsed(bytes(changed)) == [], "a longer length waits for bytes that never come"
        except FrameError:
            continue
        assert bit < 32


def test_an_oversized_frame_is_refused_from_its_header() -> None:
    parser = FrameParser(CONTROL_REQUESTS)
    header = struct.pack(">IB3sQI", REQUEST_BYTES_MAX + 1, FrameKind.VOTE, bytes(3), 1, 0)
    parser.feed(header[:-1])
    assert parser.next() is None
    parser.feed(header[-1:])
    with pytest.raises(FrameError, match=f"VOTE.*{REQUEST_BYTES_MAX + 1}"):
        parser.next()
    assert parser.buffered == HEADER_BYTES


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack(">IB3sQI", 0, 99, bytes(3), 1, 0), "unknown kind 99"),
        (struct.pack(">IB3sQI", 0, 16, b"\0\0\1", 1, 0), "reserved bytes are 000001"),
        (struct.pack(">IB3sQI", 0, 16, bytes(3), 1, 7), "checksum of a VOTE of 0 bytes"),
        (seal(FrameKind.VOTE_ANSWER, 1, []), "VOTE_ANSWER is not allowed here"),
        (seal(FrameKind.HELLO, 0, []), "HELLO is not allowed here"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "unknown kind 47"),
        (bytes.fromhex("160301020001000001fc0303") + bytes(40), "unknown kind 0"),
    ],
    ids=["kind", "reserved", "checksum", "direction", "second hello", "http", "tls"],
)
def test_what_is_no_frame_here_is_refused_with_the_reason(header: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        parsed(header)


def test_a_frame_before_the_hello_is_refused() -> None:
    parser = FrameParser(HELLO_ONLY)
    parser.feed(sealed([VOTE_FRAME]))
    with pytest.raises(FrameError, match="only HELLO"):
        parser.next()


def test_other_kinds_are_taken_from_the_frame_after_the_hello_on() -> None:
    parser = FrameParser(HELLO_ONLY)
    parser.feed(seal(FrameKind.HELLO, 0, [b"h"]) + sealed([VOTE_FRAME]))
    assert parser.next() == (FrameKind.HELLO, 0, b"h")
    parser.expect(CONTROL_REQUESTS)
    assert parser.next() == VOTE_FRAME


@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_damaged_reordered_and_repeated_frames_never_pass_as_others(seed: int) -> None:
    """What passes was sent, whatever happened on the way."""
    rng = random.Random(seed)
    frames = [
        Frame(kind, rng.getrandbits(64), rng.randbytes(rng.choice((0, 1, 30, 3000))))
        for kind in rng.choices(sorted(ANSWERS), k=20)
    ]
    pieces = [sealed([frame]) for frame in rng.choices(frames, k=40)]
    data = bytearray(b"".join(pieces))
    for _ in range(rng.randrange(3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.5:
        at = rng.randrange(len(data))
        del data[at : at + rng.randrange(100)]
    parser = FrameParser(ANSWERS)
    passed: list[Frame] = []
    try:
        while data:
            size = rng.randrange(1, 5000)
            parser.feed(bytes(data[:size]))
            del data[:size]
            passed += drained(parser)
    except FrameError:
        pass
    assert all(frame in frames for frame in passed)


# -- hello


@pytest.mark.parametrize(
    "hello", [HELLO, Hello(ClusterId("c"), NodeId(0), NodeId(0), Purpose.CONTROL)]
)
def test_a_hello_is_unchanged_by_the_wire_and_short_enough(hello: Hello) -> None:
    assert Hello.decoded(hello.encoded()) == hello
    names = ClusterId("c" * 64), NodeId(0), NodeId(1), Purpose.BULK, "h" * 255
    longest = Hello(*names, Software("9" * 255, Levels(1, 65_535)))
    assert len(longest.encoded()) <= HELLO_BYTES_MAX


@pytest.mark.parametrize("refusal", Refusal)
@pytest.mark.parametrize("token_endpoint", ["", "h:1"])
def test_an_answer_to_a_hello_is_unchanged_by_the_wire(
    refusal: Refusal, token_endpoint: str
) -> None:
    answer = HelloAnswer(ClusterId("c"), NodeId(3), refusal, token_endpoint=token_endpoint)
    assert HelloAnswer.decoded(answer.encoded()) == answer


def test_an_answer_of_version_2_names_no_address_for_tokens_and_is_read_as_it_was() -> None:
    encoded = ANSWER_1.replace(b"\0\1", b"\0\2", 1)
    answer = HelloAnswer(ClusterId("c"), NodeId(3), version=2)
    assert HelloAnswer.decoded(encoded) == answer
    assert replace(answer, token_endpoint="h:1").encoded() == encoded


@pytest.mark.parametrize("length", [b"", b"\0", b"\0\4"], ids=["none", "half", "too much"])
def test_an_answer_that_ends_within_its_address_is_refused(length: bytes) -> None:
    answer = HelloAnswer(ClusterId("c"), NodeId(3), token_endpoint="h:1").encoded()
    with pytest.raises(HelloError):
        HelloAnswer.decoded(answer[: -len(b"\0\3h:1")] + length + b"h:1" * (len(length) > 1))


def test_a_hello_of_version_1_names_no_software_and_is_read_and_written_as_it_was() -> None:
    older = replace(HELLO, software=UNTOLD, version=1)
    assert Hello.decoded(HELLO_1) == older
    assert older.encoded() == HELLO_1
    answer = HelloAnswer(ClusterId("c"), NodeId(3), version=1)
    assert HelloAnswer.decoded(ANSWER_1) == answer
    assert answer.encoded() == ANSWER_1


def test_a_newer_hello_is_read_as_far_as_it_is_known() -> None:
    newer = replace(HELLO, version=9)
    assert Hello.decoded(newer.encoded() + b"more") == newer


def test_of_a_hello_of_a_version_that_is_not_spoken_only_that_is_read() -> None:
    assert Hello.decoded(HELLO_1.replace(b"\0\1", b"\0\0", 1) + b"\xff").version == 0
    for version in (0, 9):
        answer = bytearray(HelloAnswer(ClusterId("c"), NodeId(3)).encoded())
        answer[9] = version
        assert HelloAnswer.decoded(bytes(answer)).refusal is Refusal.UNKNOWN_VERSION


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (Hello, b"", "0 bytes"),
        (Hello, b"x" + HELLO.encoded()[1:], "begins with b'xtrmpeer'"),
        (Hello, HELLO.encoded() + b"x", "1 bytes follow"),
        (Hello, HELLO_1 + b"x", "1 bytes follow"),
        (Hello, HELLO.encoded()[:-1], "are announced"),
        (Hello, HELLO_1[:-1], "are announced"),
        (Hello, HELLO.encoded()[: len(HELLO_1) + 4], "software has 4 bytes"),
        (Hello, HELLO.encoded()[:-1] + b"\xff", "not UTF-8"),
        (Hello, replace(HELLO, software=Software("", Levels(0, 2))).encoded(), "levels are 0 to 2"),
        (Hello, replace(HELLO, software=Software("", Levels(3, 2))).encoded(), "levels are 3 to 2"),
        (Hello, replace(HELLO, sender=NodeId(-1)).encoded(), "node -1"),
        (Hello, HELLO.encoded()[:18] + b"\x07" + HELLO.encoded()[19:], "purpose 7"),
        (HelloAnswer, b"", "0 bytes"),
        (HelloAnswer, GREETED.encoded() + b"x", "1 bytes follow"),
        (HelloAnswer, GREETED.encoded()[:-1], "name has 1 bytes"),
        (HelloAnswer, GREETED.encoded()[:-3], "are announced"),
        (HelloAnswer, GREETED.encoded().replace(b"\0\1c", b"\x09\1c"), "refusal 9"),
    ],
)
def test_what_is_no_hello_and_no_answer_to_one_is_refused_with_the_reason(
    kind: type[Hello] | type[HelloAnswer], data: bytes, message: str
) -> None:
    with pytest.raises(HelloError, match=message):
        kind.decoded(data)


def test_an_answer_has_room_for_the_largest_batch_behind_all_that_a_fetch_asks_for() -> None:
    limits = QuorumLimits()
    assert limits.max_fetch_bytes + limits.max_batch_bytes < FETCHED_BYTES_MAX
