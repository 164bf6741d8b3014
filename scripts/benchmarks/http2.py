"""Small HTTP/2 client for gRPC services, so that a load's client does not limit the measurement.

grpc.aio costs its process about 300 microseconds a call, and this client a tenth of that. It has
the parts of RFC 9113 and of gRPC's protocol that a load on loopback needs: requests with literal
headers, flow control both ways, and pings. Headers of answers are not decoded, so the caller of a
failed call learns that there was no answer, but not the error's text.
"""

import asyncio
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from scripts.benchmarks.figures import BenchmarkError
from streammeta.tls.files import TlsFiles
from streammeta.v1 import metadata_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
FRAME_HEADER_BYTES = 9
MESSAGE_HEADER_BYTES = 5
FRAME_BYTES_MAX = 16_384
DEFAULT_WINDOW = 65_535
WINDOW_MAX = 2**31 - 1
REPLENISH_BYTES = 1 << 24
"""Received bytes after which the server may send as many more."""
_SETTING_INITIAL_WINDOW = 4

OnMessage = Callable[[bytes], None]
OnEnd = Callable[[], None]


class Http2Error(BenchmarkError):
    """The connection broke, or a call ended without an answer."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream_id) + payload


def request_headers(path: str, authority: str, *, over_tls: bool = False) -> bytes:
    """Return the header block of a gRPC request, as HPACK (RFC 7541) literals without an index."""

    def text(value: str) -> bytes:
        encoded = value.encode()
        if len(encoded) > 126:
            raise ValueError(f"header value {value!r} is longer than 126 bytes")
        return bytes([len(encoded)]) + encoded

    return b"".join(
        (
            b"\x83",  # :method POST and :scheme are of the static table
            b"\x87" if over_tls else b"\x86",  # https, http
            b"\x04" + text(path),  # :path
            b"\x01" + text(authority),  # :authority
            b"\x0f\x10" + text("application/grpc"),  # content-type
            b"\x00" + text("te") + text("trailers"),
        )
    )


def _context(tls: TlsFiles) -> ssl.SSLContext:
    context = tls.load().context(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    return context


@dataclass(slots=True)
class _Stream:
    on_message: OnMessage
    on_end: OnEnd
    window: int
    unsent: bytearray = field(default_factory=bytearray)
    is_ending: bool = False
    received: bytearray = field(default_factory=bytearray)
    unacknowledged: int = 0


class Http2Connection(asyncio.Protocol):
    """One connection to a gRPC server, with any number of calls at once."""

    def __init__(self, authority: str, *, over_tls: bool = False) -> None:
        self._authority = authority
        self._over_tls = over_tls
        self._headers: dict[str, bytes] = {}
        self._streams: dict[int, _Stream] = {}
        self._next_stream_id = 1
        self._window = self._initial_window = DEFAULT_WINDOW
        self._unacknowledged = 0
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, endpoint: str, tls: TlsFiles | None = None) -> "Http2Connection":
        """Connect to HOST:PORT, over TLS with these files or in plain text."""
        host, _, port = endpoint.rpartition(":")
        over_tls = tls is not None
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cls(endpoint, over_tls=over_tls),
            host,
            int(port),
            ssl=None if tls is None else _context(tls),
        )
        return connection

    def close(self) -> None:
        """Drop the connection and all calls on it."""
        if self._transport is not None:
            self._transport.abort()

    def call(self, path: str, message: bytes) -> asyncio.Future[bytes]:
        """Call a unary method. The future fails with Http2Error if there is no answer."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        messages: list[bytes] = []

        def end() -> None:
            if answer.done():
                return
            if messages:
                answer.set_result(messages[0])
            else:
                answer.set_exception(Http2Error(f"{path} at {self._authority} was not answered"))

        stream_id = self.open(path, messages.append, end)
        self.send(stream_id, message, is_last=True)
        return answer

    def open(self, path: str, on_message: OnMessage, on_end: OnEnd) -> int:
        """Begin a call of messages both ways; return its id for `send`."""
        headers = self._headers.get(path)
        if headers is None:
            headers = self._headers[path] = request_headers(
                path, self._authority, over_tls=self._over_tls
            )
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        self._streams[stream_id] = _Stream(on_message, on_end, self._initial_window)
        self._write(frame(HEADERS, END_HEADERS, stream_id, headers))
        return stream_id

    def begin_watch(
        self, request: metadata_pb2.WatchRequest, on_message: OnMessage, on_end: OnEnd
    ) -> None:
        """Begin a watch of the metadata."""
        stream_id = self.open("/streammeta.v1.MetadataService/Watch", on_message, on_end)
        self.send(stream_id, request.SerializeToString(), is_last=True)

    def send(self, stream_id: int, message: bytes, is_last: bool = False) -> None:
        """Send a message, as far as the server's windows allow at once."""
        stream = self._streams[stream_id]
        stream.unsent += struct.pack(">BI", 0, len(message)) + message
        stream.is_ending = is_last
        self._flush(stream_id, stream)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface and open the windows."""
        # uvloop's transports are no subclass.
        self._transport = cast(asyncio.Transport, transport)
        # The largest windows there are, so that flow control of answers never limits a load.
        settings = struct.pack(">HI", _SETTING_INITIAL_WINDOW, WINDOW_MAX)
        grant = struct.pack(">I", WINDOW_MAX - DEFAULT_WINDOW)
        self._write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, grant))

    def connection_lost(self, exc: Exception | None) -> None:
        """End every call."""
        self._transport = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.on_end()

    def data_received(self, data: bytes) -> None:
        """Process the frames that are complete."""
        self._buffer += data
        at, buffer = 0, self._buffer
        while len(buffer) - at >= FRAME_HEADER_BYTES:
            length_and_kind, flags, stream_id = struct.unpack_from(">IBI", buffer, at)
            body_at = at + FRAME_HEADER_BYTES
            end = body_at + (length_and_kind >> 8)
            if len(buffer) < end:
                break
            self._on_frame(length_and_kind & 0xFF, flags, stream_id, bytes(buffer[body_at:end]))
            at = end
        del buffer[:at]

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        match kind:
            case 0:
                self._on_data(stream_id, payload)
            case 4 if not flags & ACK:
                self._on_settings(payload)
            case 6 if not flags & ACK:
                self._write(frame(PING, ACK, 0, payload))
            case 7:
                self.close()
            case 8:
                self._on_window(stream_id, *struct.unpack(">I", payload))

        # Trailers are HEADERS that end the stream. Calls without an answer end the same way.
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            stream = self._streams.pop(stream_id, None)
            if stream is not None:
                stream.on_end()

    def _on_data(self, stream_id: int, payload: bytes) -> None:
        self._unacknowledged += len(payload)
        # One update for many frames: an update for each would double the packets.
        if self._unacknowledged >= REPLENISH_BYTES:
            self._write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unacknowledged)))
            self._unacknowledged = 0
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.unacknowledged += len(payload)
        if stream.unacknowledged >= REPLENISH_BYTES:
            grant = struct.pack(">I", stream.unacknowledged)
            self._write(frame(WINDOW_UPDATE, 0, stream_id, grant))
            stream.unacknowledged = 0

        received = stream.received
        received += payload
        while len(received) >= MESSAGE_HEADER_BYTES:
            end = MESSAGE_HEADER_BYTES + int.from_bytes(received[1:MESSAGE_HEADER_BYTES], "big")
            if len(received) < end:
                break
            message = bytes(received[MESSAGE_HEADER_BYTES:end])
            del received[:end]
            stream.on_message(message)

    def _on_settings(self, payload: bytes) -> None:
        for key, value in struct.iter_unpack(">HI", payload):
            if key == _SETTING_INITIAL_WINDOW:
                for stream in self._streams.values():
                    stream.window += value - self._initial_window
                self._initial_window = value
        self._write(frame(SETTINGS, ACK, 0))
        self._flush_all()

    def _on_window(self, stream_id: int, grant: int) -> None:
        if stream_id == 0:
            self._window += grant
            self._flush_all()
        elif (stream := self._streams.get(stream_id)) is not None:
            stream.window += grant
            self._flush(stream_id, stream)

    def _flush_all(self) -> None:
        for stream_id, stream in self._streams.items():
            if stream.unsent:
                self._flush(stream_id, stream)

    def _flush(self, stream_id: int, stream: _Stream) -> None:
        frames: list[bytes] = []
        at, unsent = 0, stream.unsent
        while at < len(unsent):
            # A frame has to fit the peer's limit and both windows (RFC 9113, section 5.2).
            size = min(len(unsent) - at, FRAME_BYTES_MAX, stream.window, self._window)
            if size <= 0:
                break
            is_last = stream.is_ending and at + size == len(unsent)
            payload = bytes(unsent[at : at + size])
            frames.append(frame(DATA, END_STREAM if is_last else 0, stream_id, payload))
            at += size
            stream.window -= size
            self._window -= size

        del unsent[:at]
        if frames:
            self._write(b"".join(frames))

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            raise Http2Error(f"the connection to {self._authority} is closed")
        self._transport.write(data)
