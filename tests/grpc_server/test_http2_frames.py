"""Frames of HTTP/2 and messages of gRPC: whole, torn and wrong ones; none too long is kept."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.controller.grpc_server.frames import (
    FRAME_BYTES_MAX,
    PREFACE,
    ErrorCode,
    Flag,
    Frame,
    FrameParser,
    Http2Error,
    Kind,
    frame,
    frame_header,
    unpadded,
)
from streammeta.controller.grpc_server.messages import (
    CompressedMessageError,
    MessageReader,
    MessageTooLargeError,
    framed,
)


def parsed(parser: FrameParser, data: bytes) -> list[Frame]:
    parser.feed(data)
    found: list[Frame] = []
    while (one := parser.next()) is not None:
        found.append(one)
    return found


def greeted() -> FrameParser:
    parser = FrameParser()
    assert parsed(parser, PREFACE) == []
    return parser


FRAMES = st.lists(
    st.tuples(
        st.sampled_from([Kind.DATA, Kind.HEADERS, Kind.CONTINUATION, 77]),
        st.integers(0, 255),
        st.integers(1, (1 << 31) - 1),
        st.binary(max_size=300),
    ),
    max_size=8,
)


@given(FRAMES, st.lists(st.integers(0, 3_000), max_size=12))
def test_frames_are_the_same_however_their_bytes_are_torn(
    frames: list[Frame], cuts: list[int]
) -> None:
    data = PREFACE + b"".join(frame(*each) for each in frames)
    parser, found, at = FrameParser(), [], 0
    for cut in [*sorted(each for each in cuts if each < len(data)), len(data)]:
        found += parsed(parser, data[at:cut])
        at = cut
    assert found == frames


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ((FRAME_BYTES_MAX + 1, Kind.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        (((1 << 24) - 1, 200, 0, 0), ErrorCode.FRAME_SIZE_ERROR),
        ((7, Kind.PING, 0, 0), ErrorCode.FRAME_SIZE_ERROR),
        ((5, Kind.WINDOW_UPDATE, 0, 0), ErrorCode.FRAME_SIZE_ERROR),
        ((5, Kind.RST_STREAM, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        ((4, Kind.PRIORITY, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        ((5, Kind.SETTINGS, 0, 0), ErrorCode.FRAME_SIZE_ERROR),
        ((6, Kind.SETTINGS, Flag.ACK, 0), ErrorCode.FRAME_SIZE_ERROR),
        ((7, Kind.GOAWAY, 0, 0), ErrorCode.FRAME_SIZE_ERROR),
        ((6, Kind.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        ((8, Kind.PING, 0, 1), ErrorCode.PROTOCOL_ERROR),
        ((1, Kind.DATA, 0, 0), ErrorCode.PROTOCOL_ERROR),
        ((1, Kind.HEADERS, 0, 0), ErrorCode.PROTOCOL_ERROR),
        ((4, Kind.RST_STREAM, 0, 0), ErrorCode.PROTOCOL_ERROR),
        ((4, Kind.PUSH_PROMISE, 0, 2), ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_a_frame_that_may_not_come_is_refused_from_its_header(
    header: tuple[int, int, int, int], code: ErrorCode
) -> None:
    with pytest.raises(Http2Error) as raised:
        parsed(greeted(), frame_header(*header))
    assert raised.value.code is code


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", PREFACE[:22] + b"\n", b"\x16"])
def test_what_is_no_preface_is_refused_as_soon_as_it_shows(said: bytes) -> None:
    with pytest.raises(Http2Error):
        parsed(FrameParser(), said)


def test_padding_is_taken_off_and_may_not_be_all() -> None:
    assert unpadded(Flag.PADDED, b"\x02abc\0\0") == b"abc"
    assert unpadded(0, b"\x02ab") == b"\x02ab"
    for payload in (b"", b"\x01", b"\x03ab"):
        with pytest.raises(Http2Error):
            unpadded(Flag.PADDED, payload)


@given(st.lists(st.binary(max_size=200), max_size=6), st.lists(st.integers(0, 1_500), max_size=9))
def test_messages_are_the_same_however_their_bytes_are_torn(
    messages: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(map(framed, messages))
    reader, found, at = MessageReader(200), [], 0
    for cut in [*sorted(each for each in cuts if each < len(data)), len(data)]:
        found += reader.feed(data[at:cut])
        at = cut
    assert (found, reader.held) == (messages, 0)


def test_a_message_is_refused_from_its_length_and_what_it_lacks_is_known() -> None:
    reader = MessageReader(100)
    assert reader.feed(framed(bytes(100))[:25]) == []
    assert (reader.held, reader.needs) == (25, 80)
    with pytest.raises(MessageTooLargeError):
        MessageReader(100).feed(struct.pack(">BI", 0, 101))
    torn = MessageReader(100)
    assert torn.feed(bytes(3)) == []
    with pytest.raises(MessageTooLargeError):
        torn.feed(struct.pack(">H", 101))


def test_a_compressed_message_is_refused() -> None:
    with pytest.raises(CompressedMessageError):
        MessageReader(100).feed(b"\x01\0\0\0\x01a")
