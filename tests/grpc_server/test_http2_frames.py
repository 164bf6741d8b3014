"""Frames of HTTP/2, messages of gRPC and requests made of them: whole, torn and wrong ones."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.controller.grpc_server import http2_connection
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
from streammeta.controller.grpc_server.headers import STATUS_OK
from streammeta.controller.grpc_server.messages import (
    CompressedMessageError,
    MessageReader,
    MessageTooLargeError,
    framed,
)
from tests.grpc_server.session_client import Client, greeted, opened, refused, reset, resets, sized
from tests.grpc_server.test_header_blocks import REQUEST, block


def parsed(parser: FrameParser, data: bytes) -> list[Frame]:
    parser.feed(data)
    found: list[Frame] = []
    while (one := parser.next()) is not None:
        found.append(one)
    return found


def parser_after_preface() -> FrameParser:
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
    data = PREFACE + b"".join(frame(*sent) for sent in frames)
    parser, found, at = FrameParser(), [], 0
    for cut in [*sorted(place for place in cuts if place < len(data)), len(data)]:
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
        parsed(parser_after_preface(), frame_header(*header))
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
    for cut in [*sorted(place for place in cuts if place < len(data)), len(data)]:
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


@pytest.fixture
def client() -> Client:
    return greeted()


def data(size: int, *, is_last: bool = False) -> bytes:
    return frame(Kind.DATA, Flag.END_STREAM if is_last else 0, 1, bytes(size))


TRAILERS = frame(Kind.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, 1, block((b"a", b"1")))
PADDED = frame(Kind.DATA, Flag.PADDED | Flag.END_STREAM, 1, b"\2" + bytes(5) + bytes(2))


@pytest.mark.parametrize(
    "parts",
    [
        [sized(1, 5), data(4, is_last=True)],
        [sized(1, 5), data(2), data(2, is_last=True)],
        [sized(1, 5), data(6, is_last=True)],
        [sized(1, 5), data(3), data(3)],
        [sized(1, 5, is_last=True)],
        [sized(1, 5), data(4), TRAILERS],
        [sized(1, 5), data(0, is_last=True)],
        [sized(1, 0), data(1)],
    ],
)
def test_a_request_of_another_length_than_it_says_is_reset_and_never_complete(
    client: Client, parts: list[bytes]
) -> None:
    """A proxy that believes the length would take the rest for another request."""
    assert resets(client.say(*parts)) == {1: ErrorCode.PROTOCOL_ERROR}
    assert not client.session.streams
    assert client.closed == [(1, False)] * (len(parts) > 1)
    assert len(client.data.get(1, b"")) <= 5


@pytest.mark.parametrize(
    "parts",
    [
        [sized(1, 5), data(2), data(3, is_last=True)],
        [sized(1, 5), data(5), data(0, is_last=True)],
        [sized(1, 5), data(5), TRAILERS],
        [sized(1, 5), PADDED],
        [sized(1, 0, is_last=True)],
    ],
)
def test_a_request_of_the_length_that_it_says_is_complete(
    client: Client, parts: list[bytes]
) -> None:
    assert resets(client.say(*parts)) == {}
    assert client.stream(1).is_ended_there


@pytest.mark.parametrize("headers", [REQUEST, [(b":path", b"/")], [(b"A", b"1")]])
def test_headers_that_are_no_trailers_end_no_request(
    client: Client, headers: list[tuple[bytes, bytes]]
) -> None:
    flags = Flag.END_HEADERS | Flag.END_STREAM
    end = frame(Kind.HEADERS, flags, 1, block(*headers))
    assert resets(client.say(opened(1), data(1), end)) == {1: ErrorCode.PROTOCOL_ERROR}
    assert client.closed == [(1, False)]


@pytest.mark.parametrize(
    "ended",
    [[opened(1), reset(1)], [opened(1, is_last=True), reset(1)], [opened(3)]],
    ids=["reset", "ended and reset", "never opened"],
)
def test_frames_of_a_stream_that_its_client_ended_break_the_rules(
    client: Client, ended: list[bytes]
) -> None:
    """Only those are passed over that were on their way when the stream ended here."""
    late = client.say(*ended, frame(Kind.DATA, Flag.END_STREAM, 1, b"a"))
    assert resets(late) == {1: ErrorCode.STREAM_CLOSED}
    assert client.data == {}
    assert refused(client, opened(1, is_last=True)) is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("end", [data(1, is_last=True), TRAILERS], ids=["data", "trailers"])
def test_frames_are_passed_over_until_their_client_has_ended_the_stream(
    client: Client, end: bytes
) -> None:
    client.say(opened(1))
    client.session.end(client.stream(1), STATUS_OK)
    client.frames()
    assert client.say(data(1), end) == []
    assert resets(client.say(data(1))) == {1: ErrorCode.STREAM_CLOSED}


def test_only_the_newest_streams_that_ended_here_are_remembered(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "LEFT_OPEN_MAX", 2)
    for stream_id in (1, 3, 5):
        client.say(opened(stream_id))
        client.session.end(client.stream(stream_id), STATUS_OK)
    client.frames()
    late = [frame(Kind.DATA, 0, stream_id, b"a") for stream_id in (1, 3, 5)]
    assert resets(client.say(*late)) == {1: ErrorCode.STREAM_CLOSED}
