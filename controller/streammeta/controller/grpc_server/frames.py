"""Frames of HTTP/2 (RFC 9113): bytes in, frames out, and the bytes of frames to send.

Refuses a frame from its header, before its payload is waited for: one that is too long, or whose
length or stream its type forbids. Does no I/O, and knows no state of a stream.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, TypeAlias

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384
"""Longest payload that is taken: what SETTINGS_MAX_FRAME_SIZE is until it is said."""
HEADER_BYTES = 9
WINDOW_MAX = (1 << 31) - 1
STREAM_ID_MAX = (1 << 31) - 1


class Kind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag:
    """Flags of frames. Some numbers have different meanings by frame type.

    Plain numbers: each frame is compared with several of them, and comparing members of an
    enumeration costs more than everything else that is done for a frame.
    """

    END_STREAM: Final = 0x1
    ACK: Final = 0x1
    END_HEADERS: Final = 0x4
    PADDED: Final = 0x8
    PRIORITY: Final = 0x20


class ErrorCode(IntEnum):
    """Reasons by which a stream is reset or a connection ended."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    """Settings of HTTP/2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Http2Error(Exception):
    """The client violated the protocol, or a limit of the whole connection."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


Frame: TypeAlias = tuple[int, int, int, bytes]
"""Type, flags, stream and payload."""

_HEADER = struct.Struct(">IBI")

_LENGTHS: Mapping[int, int] = {
    Kind.PRIORITY: 5,
    Kind.RST_STREAM: 4,
    Kind.PING: 8,
    Kind.WINDOW_UPDATE: 4,
}
_OF_STREAMS = frozenset(
    {Kind.DATA, Kind.HEADERS, Kind.PRIORITY, Kind.RST_STREAM, Kind.CONTINUATION}
)
_OF_CONNECTIONS = frozenset({Kind.SETTINGS, Kind.PING, Kind.GOAWAY})


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return _HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the bytes before a payload of `length` bytes."""
    return _HEADER.pack(length << 8 | kind, flags, stream_id)


class FrameParser:
    """Parses what one side sends, in pieces of any size, the preface of a client first."""

    def __init__(self) -> None:
        self._data = b""
        self._at = 0
        self._is_greeted = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        kept = len(self._data) - self._at
        self._data = self._data[self._at :] + data if kept else data
        self._at = 0

    def next(self) -> Frame | None:
        """Return the next complete frame, None until more bytes have arrived.

        Raises:
            Http2Error: the bytes are not a permitted frame.
        """
        if not self._is_greeted and not self._take_preface():
            return None

        data, at = self._data, self._at
        if len(data) - at < HEADER_BYTES:
            return None

        word, flags, stream_id = _HEADER.unpack_from(data, at)
        length, kind = word >> 8, word & 0xFF
        # The highest bit is reserved and must be ignored (RFC 9113, 4.1).
        stream_id &= STREAM_ID_MAX
        # DATA is the most frequent frame, and with a valid length and stream it needs no further
        # check.
        if kind or length > FRAME_BYTES_MAX or not stream_id:
            _check(kind, flags, length, stream_id)

        end = at + HEADER_BYTES + length
        if len(data) < end:
            return None

        self._at = end
        return kind, flags, stream_id, data[at + HEADER_BYTES : end]

    def _take_preface(self) -> bool:
        have = self._data[: len(PREFACE)]
        # Compared as it comes, so that another protocol is rejected at once.
        if not PREFACE.startswith(have):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "no preface of HTTP/2")
        if len(have) < len(PREFACE):
            return False
        self._at, self._is_greeted = len(PREFACE), True
        return True


def _check(kind: int, flags: int, length: int, stream_id: int) -> None:
    if length > FRAME_BYTES_MAX:
        raise Http2Error(
            ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes; at most {FRAME_BYTES_MAX}"
        )

    wanted = _LENGTHS.get(kind, length)
    # Settings have 6 bytes each, and an acknowledgement has none (RFC 9113, 6.5).
    if kind == Kind.SETTINGS and (length % 6 or (flags & Flag.ACK and length)):
        wanted = -1
    if kind == Kind.GOAWAY and length < 8:
        wanted = -1
    if length != wanted:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} and {length} bytes")
    if (kind in _OF_STREAMS and not stream_id) or (kind in _OF_CONNECTIONS and stream_id):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream_id}")
    # Only servers push (RFC 9113, 8.4).
    if kind == Kind.PUSH_PROMISE:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client that pushes")


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return the payload of a frame without its padding.

    Raises:
        Http2Error: there is more padding than payload.
    """
    if not flags & Flag.PADDED:
        return payload
    # Padding of the whole payload is a connection error (RFC 9113, 6.1).
    if not payload or payload[0] >= len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]
