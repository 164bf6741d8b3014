"""Requests by their frames: lengths, trailers, and frames that come after a stream's end."""

import pytest

from streammeta.controller.grpc_server import http2_connection
from streammeta.controller.grpc_server.frames import ErrorCode, Flag, Kind, frame
from streammeta.controller.grpc_server.headers import STATUS_OK
from tests.grpc_server.session_client import (
    Client,
    greeted,
    opened,
    refused,
    reset,
    resets,
    sized,
)
from tests.grpc_server.test_header_blocks import REQUEST, block


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
