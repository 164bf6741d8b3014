"""Frames and hellos: whole, torn, damaged and misplaced ones; nothing but a frame passes."""

import random
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest

from streammeta.controller.features import UNTOLD, Levels, Software
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.peers.frames import (
    ANSWERS,
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
from streammeta.controller.quorum.config import QuorumLimits

VOTE = Frame(FrameKind.VOTE, 1, b"vote")
FETCH = Frame(FrameKind.FETCH, (1 << 64) - 1, b"")
THREE = [VOTE, FETCH, Frame(FrameKind.UPDATE_VOTER, 7, b"x" * 1000)]
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
    assert parsed(seal(FrameKind.VOTE, 1, [b"vo", b"", b"te"])) == [VOTE]


def test_frames_torn_at_any_byte_are_the_same_frames() -> None:
    data = sealed(THREE)
    for cut in range(len(data)):
        assert parsed(data[:cut], data[cut:]) == THREE
    assert parsed(*(data[at : at + 1] for at in range(len(data)))) == THREE


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    data = sealed([VOTE])
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
    parser.feed(sealed([VOTE]))
    with pytest.raises(FrameError, match="only HELLO"):
        parser.next()


def test_other_kinds_are_taken_from_the_frame_after_the_hello_on() -> None:
    parser = FrameParser(HELLO_ONLY)
    parser.feed(seal(FrameKind.HELLO, 0, [b"h"]) + sealed([VOTE]))
    assert parser.next() == (FrameKind.HELLO, 0, b"h")
    parser.expect(CONTROL_REQUESTS)
    assert parser.next() == VOTE


@pytest.mark.parametrize("seed", range(20))
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
