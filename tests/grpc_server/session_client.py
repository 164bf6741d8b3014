"""A client of a session, by its frames: what it says, and what comes back."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import pytest

from streammeta.controller.grpc_server.frames import (
    PREFACE,
    ErrorCode,
    Flag,
    Frame,
    FrameParser,
    Http2Error,
    Kind,
    frame,
)
from streammeta.controller.grpc_server.headers import Head
from streammeta.controller.grpc_server.http2_connection import Session
from streammeta.controller.grpc_server.stream import Stream
from tests.grpc_server.test_header_blocks import REQUEST, block

BLOCK = block(*REQUEST)
STREAMS_MAX, WINDOW = 4, 1_000


def setting(key: int, value: int) -> bytes:
    return frame(Kind.SETTINGS, 0, 0, struct.pack(">HI", key, value))


def grant(stream_id: int, size: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream_id, struct.pack(">I", size))


def opened(stream_id: int, *, is_last: bool = False) -> bytes:
    flags = Flag.END_HEADERS | (Flag.END_STREAM if is_last else 0)
    return frame(Kind.HEADERS, flags, stream_id, BLOCK)


def reset(stream_id: int) -> bytes:
    return frame(Kind.RST_STREAM, 0, stream_id, struct.pack(">I", ErrorCode.CANCEL))


@dataclass
class Client:
    """A client's bytes into a session, and what its user hears and it sends."""

    heads: list[tuple[int, Head]] = field(default_factory=list)
    data: dict[int, bytes] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    closed: list[tuple[int, bool]] = field(default_factory=list)
    has_heard: bool = False

    def __post_init__(self) -> None:
        self.session = Session(
            self, streams_max=STREAMS_MAX, stream_window=WINDOW, header_list_bytes=16_384
        )
        self.now = 0.0
        self.frames()

    def on_head(self, stream: Stream, head: Head) -> None:
        self.heads.append((stream.id, head))

    def on_data(self, stream: Stream, data: bytes) -> None:
        self.data[stream.id] = self.data.get(stream.id, b"") + data

    def on_sent(self, stream: Stream) -> None:
        self.sent.append(stream.id)

    def on_closed(self, stream: Stream, *, by_client: bool) -> None:
        self.closed.append((stream.id, by_client))

    def on_end_heard(self) -> None:
        self.has_heard = True

    def say(self, *parts: bytes) -> list[Frame]:
        """Send bytes; return the frames that come back."""
        self.session.feed(b"".join(parts))
        while self.session.work(self.now, 100):
            pass
        return self.frames()

    def frames(self) -> list[Frame]:
        said, parser = b"".join(self.session.out), FrameParser()
        self.session.out.clear()
        parser.feed(PREFACE + said)
        found: list[Frame] = []
        while (one := parser.next()) is not None:
            found.append(one)
        return found

    def stream(self, stream_id: int) -> Stream:
        return self.session.streams[stream_id]


def greeted() -> Client:
    """Return a client that has exchanged settings with its session."""
    client = Client()
    assert client.say(PREFACE, frame(Kind.SETTINGS, 0, 0)) == [(Kind.SETTINGS, Flag.ACK, 0, b"")]
    return client


def refused(client: Client, *parts: bytes) -> ErrorCode:
    with pytest.raises(Http2Error) as raised:
        client.say(*parts)
    return raised.value.code


def resets(frames: list[Frame]) -> dict[int, int]:
    return {
        stream_id: struct.unpack(">I", payload)[0]
        for kind, _, stream_id, payload in frames
        if kind == Kind.RST_STREAM
    }


def sized(stream_id: int, length: int, *, is_last: bool = False) -> bytes:
    """Begin a request that says how many bytes it has."""
    flags = Flag.END_HEADERS | (Flag.END_STREAM if is_last else 0)
    headers = block(*REQUEST, (b"content-length", b"%d" % length))
    return frame(Kind.HEADERS, flags, stream_id, headers)
