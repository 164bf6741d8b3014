"""One connection of HTTP/2 at a server (RFC 9113): bytes in, calls of its user, bytes out.

Owns streams, windows both ways, settings and the bounds of what a client may waste. Knows nothing
of gRPC, does no I/O and reads no clock: times are given.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from streammeta.controller.grpc_server.frames import (
    FRAME_BYTES_MAX,
    STREAM_ID_MAX,
    WINDOW_MAX,
    ErrorCode,
    Flag,
    FrameParser,
    Http2Error,
    Kind,
    Setting,
    frame,
    frame_header,
    unpadded,
)
from streammeta.controller.grpc_server.headers import (
    BLOCK_BYTES_MAX,
    NO_TABLE,
    BlockSkipper,
    Head,
    HeaderDecoder,
)

CONNECTION_WINDOW = 8 << 20
"""Bytes that may be on their way to all streams together; taken ones are granted anew."""

DEFAULT_WINDOW = 65_535

CONTINUATIONS_MAX = 64
"""Frames of one block of headers, beside one for each 8 KiB of it."""

SKIPPED_BYTES_MAX = 4 << 20
"""Bytes of a block that is too long, and passed over, beyond which the connection ends."""

_BLOCK_BYTES_A_FRAME = 256
"""Bytes of headers to decode that are as much work as a frame."""

RESETS = (2_000, 200.0)
SETTINGS_CHANGES = (1_000, 10.0)
WASTED_FRAMES = (10_000, 1_000.0)
"""Streams reset by the client, settings, and frames without effect: at once, and a second."""

SENT_FRAME_BYTES_MAX = 64 << 10
"""Longest frame that is sent to one that takes longer ones."""

BURST_BYTES = 256 << 10
"""Bytes of messages given out before the transport has to say whether it takes more."""

_ALIVE_PING, _END_PING = bytes(8), b"the end?"

_U32 = struct.Struct(">I")
_SETTING = struct.Struct(">HI")


class Allowance:
    """A bound on how often something happens: a number at once, and so many a second."""

    __slots__ = ("_at", "_left", "_most", "_per_s")

    def __init__(self, most: int, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left = float(most)
        self._at = float("-inf")

    def take(self, now: float, what: str) -> None:
        """Count one; raises Http2Error if that is too often."""
        if self._left < 1.0:
            self._left = min(self._most, self._left + (now - self._at) * self._per_s)
            self._at = now
            if self._left < 1.0:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")
        elif self._left == self._most:
            self._at = now
        self._left -= 1.0


class Stream:
    """One stream that is not closed."""

    __slots__ = (
        "call",
        "granted",
        "id",
        "is_ended_there",
        "last",
        "unsent",
        "unsent_bytes",
        "window",
    )

    def __init__(self, stream_id: int, granted: int) -> None:
        self.id = stream_id
        self.call: Any = None
        """Whatever the session's user keeps for it."""
        self.granted = granted
        """Bytes that the client may still send."""
        self.window = 0
        """Bytes that may be sent, beside what settings give to every stream; may be negative."""
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.last: bytes | None = None
        """Block of headers that ends it, behind what is unsent."""
        self.is_ended_there = False


class User(Protocol):
    """What hears of a connection's streams."""

    def on_head(self, stream: Stream, head: Head) -> None:
        """Take a new stream; whether it has ended already is in it."""
        ...

    def on_data(self, stream: Stream, data: bytes) -> None:
        """Take bytes of a stream; whether they are its last is in it."""
        ...

    def on_sent(self, stream: Stream) -> None:
        """Hear that nothing of a stream is unsent."""
        ...

    def on_closed(self, stream: Stream, *, by_client: bool) -> None:
        """Hear that a stream is no more: it has ended, or one of both has reset it."""
        ...

    def on_end_heard(self) -> None:
        """Hear that the client knows that it is to open no more streams."""
        ...


@dataclass(slots=True)
class _Block:
    """Headers whose frames have not all come."""

    stream_id: int
    is_last: bool
    parts: list[bytes]
    size: int
    frames: int = 1
    skipper: BlockSkipper | None = None


class Session:
    """State of one connection; what is to be sent is in `out`."""

    def __init__(
        self, user: User, *, streams_max: int, stream_window: int, header_list_bytes: int
    ) -> None:
        self._user = user
        self._parser = FrameParser()
        self._headers = HeaderDecoder(header_list_bytes)
        self._streams_max = streams_max
        self._stream_window = stream_window
        self.streams: dict[int, Stream] = {}
        self.last_id = 0
        """The newest stream that the client has opened."""
        self.takes_streams = True
        """False: new ones are refused, so that their client tries elsewhere."""
        self._final_id: int | None = None
        self._block: _Block | None = None
        self._spent = 0
        self.has_settings = False
        """The client has sent its preface and its first frame."""
        self._granted = CONNECTION_WINDOW
        self._taken = 0
        self.window = DEFAULT_WINDOW
        self._initial_window = DEFAULT_WINDOW
        self._frame_max = FRAME_BYTES_MAX
        self._table_notice = b""
        self._blocked: dict[int, Stream] = {}
        self.room = BURST_BYTES
        """Bytes of messages that may be given out before `refill`."""
        self._resets = Allowance(*RESETS)
        self._changes = Allowance(*SETTINGS_CHANGES)
        self._wasted = Allowance(*WASTED_FRAMES)
        settings = (
            (Setting.MAX_CONCURRENT_STREAMS, streams_max),
            (Setting.INITIAL_WINDOW_SIZE, stream_window),
            (Setting.MAX_HEADER_LIST_SIZE, header_list_bytes),
        )
        said = b"".join(_SETTING.pack(*each) for each in settings)
        self.out: list[bytes] = [
            frame(Kind.SETTINGS, 0, 0, said),
            frame(Kind.WINDOW_UPDATE, 0, 0, _U32.pack(CONNECTION_WINDOW - DEFAULT_WINDOW)),
        ]

    # -- what comes

    def feed(self, data: bytes) -> None:
        """Take the next bytes; `work` handles them."""
        self._parser.feed(data)

    def work(self, now: float, frames_max: int) -> bool:
        """Handle up to `frames_max` frames; return whether there may be more.

        Raises:
            Http2Error: the connection must end.
        """
        parser, self._spent = self._parser, 0
        while self._spent < frames_max:
            taken = parser.next()
            if taken is None:
                return False
            self._spent += 1
            kind, flags, stream_id, payload = taken
            if self._block is not None:
                self._on_continuation(now, kind, flags, stream_id, payload)
            elif kind == Kind.DATA:
                self._on_data(now, flags, stream_id, payload)
            elif kind == Kind.HEADERS:
                self._on_headers(now, flags, stream_id, payload)
            else:
                self._on_other(now, kind, flags, stream_id, payload)
        return True

    def _on_other(self, now: float, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self.has_settings and kind != Kind.SETTINGS:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "no SETTINGS at first")
        if kind == Kind.WINDOW_UPDATE:
            self._on_window(now, stream_id, _U32.unpack(payload)[0] & WINDOW_MAX)
        elif kind == Kind.PING:
            if flags & Flag.ACK:
                if payload == _END_PING:
                    self._user.on_end_heard()
            else:
                self.out.append(frame(Kind.PING, Flag.ACK, 0, payload))
        elif kind == Kind.RST_STREAM:
            self._on_reset(now, stream_id)
        elif kind == Kind.SETTINGS:
            self._on_settings(now, flags, payload)
        elif kind == Kind.CONTINUATION:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of no headers")
        elif kind == Kind.GOAWAY:
            self._wasted.take(now, "GOAWAY frames")
        else:  # PRIORITY, and types that are not known
            self._wasted.take(now, "frames without effect")

    def _on_headers(self, now: float, flags: int, stream_id: int, payload: bytes) -> None:
        if not self.has_settings:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "no SETTINGS at first")
        if flags & (Flag.PADDED | Flag.PRIORITY):
            payload = unpadded(flags, payload)
            if flags & Flag.PRIORITY:
                if len(payload) < 5:
                    raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "HEADERS of no block")
                payload = payload[5:]
        is_last = bool(flags & Flag.END_STREAM)
        if flags & Flag.END_HEADERS:
            self._on_block(now, stream_id, is_last, payload)
        else:
            self._block = _Block(stream_id, is_last, [payload], len(payload))

    def _on_continuation(
        self, now: float, kind: int, flags: int, stream_id: int, payload: bytes
    ) -> None:
        block = self._block
        assert block is not None
        if kind != Kind.CONTINUATION or stream_id != block.stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "another frame amid headers")
        block.size += len(payload)
        block.frames += 1
        if block.size > SKIPPED_BYTES_MAX or block.frames > CONTINUATIONS_MAX + block.size // 8192:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "headers without an end")
        self._spent += len(payload) // _BLOCK_BYTES_A_FRAME
        if block.skipper is not None:
            block.skipper.feed(payload)
        else:
            block.parts.append(payload)
            if block.size > BLOCK_BYTES_MAX:
                block.skipper = self._headers.skipper()
                block.skipper.feed(b"".join(block.parts))
                block.parts.clear()
        if flags & Flag.END_HEADERS:
            self._block = None
            if block.skipper is None:
                self._on_block(now, stream_id, block.is_last, b"".join(block.parts))
            else:
                self._on_head(now, stream_id, block.is_last, block.skipper.end())

    def _on_block(self, now: float, stream_id: int, is_last: bool, block: bytes) -> None:
        self._spent += len(block) // _BLOCK_BYTES_A_FRAME
        # Always, since later blocks refer to it.
        self._on_head(now, stream_id, is_last, self._headers.decode(block))

    def _on_head(self, now: float, stream_id: int, is_last: bool, head: Head) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._on_trailers(stream, is_last)
            return
        if stream_id <= self.last_id:
            if not is_last:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} is not new")
            self._wasted.take(now, "frames of closed streams")  # the end of one that was reset
            return
        if not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client's stream has an odd number")
        self.last_id = stream_id
        if self._final_id is not None and stream_id > self._final_id:
            return  # its client has been told that it is not served
        if not self.takes_streams or len(self.streams) >= self._streams_max:
            self._resets.take(now, "streams beyond the limit")
            self._reset(stream_id, ErrorCode.REFUSED_STREAM)
        elif head.is_malformed:
            self._resets.take(now, "malformed requests")
            self._reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            stream = self.streams[stream_id] = Stream(stream_id, self._stream_window)
            stream.is_ended_there = is_last
            self._user.on_head(stream, head)

    def _on_trailers(self, stream: Stream, is_last: bool) -> None:
        if not is_last or stream.is_ended_there:
            code = ErrorCode.STREAM_CLOSED if stream.is_ended_there else ErrorCode.PROTOCOL_ERROR
            self.reset(stream, code)
        else:
            stream.is_ended_there = True
            self._user.on_data(stream, b"")

    def _on_data(self, now: float, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        if size > self._granted:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than was granted")
        self._granted -= size
        self._taken += size
        if self._taken >= CONNECTION_WINDOW // 4:
            self.out.append(frame(Kind.WINDOW_UPDATE, 0, 0, _U32.pack(self._taken)))
            self._granted += self._taken
            self._taken = 0
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self.last_id:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"data of stream {stream_id}: idle")
            self._wasted.take(now, "frames of closed streams")
            return
        if stream.is_ended_there:
            self.reset(stream, ErrorCode.STREAM_CLOSED)
            return
        if size > stream.granted:
            self.reset(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return
        stream.granted -= size
        if flags & Flag.PADDED:
            payload = unpadded(flags, payload)
        if flags & Flag.END_STREAM:
            stream.is_ended_there = True
        elif not payload:
            self._wasted.take(now, "empty frames")
        if len(payload) < size:
            self.grant(stream, size - len(payload))
        self._user.on_data(stream, payload)

    def _on_window(self, now: float, stream_id: int, grant: int) -> None:
        if stream_id == 0:
            self.window += grant
            if not grant or self.window > WINDOW_MAX:
                code = ErrorCode.FLOW_CONTROL_ERROR if grant else ErrorCode.PROTOCOL_ERROR
                raise Http2Error(code, f"a window of {self.window} bytes")
            self._send_blocked()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self.last_id:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a window of stream {stream_id}: idle")
            self._wasted.take(now, "frames of closed streams")
            return
        stream.window += grant
        if not grant or stream.window + self._initial_window > WINDOW_MAX:
            self.reset(stream, ErrorCode.FLOW_CONTROL_ERROR if grant else ErrorCode.PROTOCOL_ERROR)
        elif stream.unsent:
            self._send_unsent(stream)

    def _on_reset(self, now: float, stream_id: int) -> None:
        if stream_id > self.last_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a reset of stream {stream_id}: idle")
        self._resets.take(now, "resets")
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._forget(stream, by_client=True)

    def _on_settings(self, now: float, flags: int, payload: bytes) -> None:
        self.has_settings = True
        if flags & Flag.ACK:
            self._wasted.take(now, "acknowledgements")
            return
        self._changes.take(now, "settings")
        window = self._initial_window
        for key, value in _SETTING.iter_unpack(payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                if value > WINDOW_MAX:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
                window = value
            elif key == Setting.MAX_FRAME_SIZE:
                if not FRAME_BYTES_MAX <= value < 1 << 24:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frames of {value} bytes")
                self._frame_max = min(value, SENT_FRAME_BYTES_MAX)
            elif key == Setting.HEADER_TABLE_SIZE:
                self._table_notice = NO_TABLE
            elif key == Setting.ENABLE_PUSH and value > 1:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
        # A client applies its settings once they are acknowledged: until then data that only they
        # allow breaks its rules (RFC 9113, 6.5.3).
        self.out.append(frame(Kind.SETTINGS, Flag.ACK, 0))
        self._change_window(window)

    def _change_window(self, value: int) -> None:
        grew = value > self._initial_window
        self._initial_window = value
        if grew:
            self._send_blocked()

    # -- what goes

    def grant(self, stream: Stream, size: int) -> None:
        """Let a client send so many bytes more on a stream."""
        if not stream.is_ended_there:
            stream.granted += size
            self.out.append(frame(Kind.WINDOW_UPDATE, 0, stream.id, _U32.pack(size)))

    def send_head(self, stream: Stream, block: bytes) -> None:
        """Send the headers that begin an answer."""
        self._put_headers(stream.id, block, 0)

    def send(self, stream: Stream, data: bytes) -> bool:
        """Send bytes of an answer, as far as windows allow; return whether all are on their way."""
        size = len(data)
        if (
            not stream.unsent
            and size <= self._frame_max
            and size <= self.window
            and size <= stream.window + self._initial_window
            and self.room > 0
        ):
            self.window -= size
            stream.window -= size
            self.room -= size
            self.out.append(frame_header(size, Kind.DATA, 0, stream.id))
            self.out.append(data)
            return True
        stream.unsent.append(memoryview(data))
        stream.unsent_bytes += size
        self._send_unsent(stream, tells=False)
        return not stream.unsent

    def end(self, stream: Stream, block: bytes) -> None:
        """Send the headers that end a stream, behind what is unsent of it."""
        if stream.unsent:
            stream.last = block
        else:
            self._end(stream, block)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once, and drop what is unsent of it."""
        self._reset(stream.id, code)
        self._forget(stream, by_client=False)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.out.append(frame(Kind.PING, 0, 0, _ALIVE_PING))

    def announce_end(self) -> None:
        """Tell the client to open no more streams, and ask whether it has heard.

        Those that it has opened until then are served.
        """
        self._go_away(STREAM_ID_MAX, ErrorCode.NO_ERROR, "")
        self.out.append(frame(Kind.PING, 0, 0, _END_PING))

    def take_no_more(self) -> None:
        """Tell the client which stream is the last that is served; later ones are passed over."""
        if self._final_id is None:
            self._final_id = self.last_id
            self._go_away(self.last_id, ErrorCode.NO_ERROR, "")

    def fail(self, error: Http2Error) -> None:
        """Tell the client why the connection ends."""
        self._go_away(self.last_id, error.code, str(error))

    @property
    def is_done(self) -> bool:
        """Whether no stream is open and none will be."""
        return self._final_id is not None and not self.streams

    def refill(self) -> None:
        """Give out more, now that the transport takes more."""
        self.room = BURST_BYTES
        if self._blocked:
            self._send_blocked()

    def close(self) -> None:
        """Forget all streams: the connection is gone."""
        for stream in list(self.streams.values()):
            self._forget(stream, by_client=True)

    def _send_blocked(self) -> None:
        for stream in list(self._blocked.values()):
            if self.window <= 0 or self.room <= 0:
                return
            # The next one goes first the next time.
            self._blocked.pop(stream.id, None)
            self._send_unsent(stream)

    def _send_unsent(self, stream: Stream, *, tells: bool = True) -> None:
        unsent, out = stream.unsent, self.out
        while unsent:
            first = unsent[0]
            size = min(
                len(first), self._frame_max, self.window, stream.window + self._initial_window
            )
            if self.room <= 0 or (size <= 0 and len(first)):
                self._blocked[stream.id] = stream
                return
            out.append(frame_header(size, Kind.DATA, 0, stream.id))
            out.append(bytes(first[:size]))
            self.window -= size
            stream.window -= size
            self.room -= size
            stream.unsent_bytes -= size
            if size == len(first):
                unsent.popleft()
            else:
                unsent[0] = first[size:]
        self._blocked.pop(stream.id, None)
        if stream.last is not None:
            self._end(stream, stream.last)
        elif tells:
            self._user.on_sent(stream)

    def _end(self, stream: Stream, block: bytes) -> None:
        self._put_headers(stream.id, block, Flag.END_STREAM)
        # A client that has not ended its side is not reset: it might take that for the answer. What
        # it still sends, a window at most, is passed over.
        self._forget(stream, by_client=False)

    def _put_headers(self, stream_id: int, block: bytes, flags: int) -> None:
        if self._table_notice:
            block, self._table_notice = self._table_notice + block, b""
        if len(block) <= FRAME_BYTES_MAX:
            self.out.append(
                frame_header(len(block), Kind.HEADERS, flags | Flag.END_HEADERS, stream_id) + block
            )
            return
        kind = Kind.HEADERS
        for at in range(0, len(block), FRAME_BYTES_MAX):
            part = block[at : at + FRAME_BYTES_MAX]
            is_last = at + FRAME_BYTES_MAX >= len(block)
            self.out.append(
                frame(kind, flags | (Flag.END_HEADERS if is_last else 0), stream_id, part)
            )
            kind, flags = Kind.CONTINUATION, 0

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self.out.append(frame(Kind.RST_STREAM, 0, stream_id, _U32.pack(code)))

    def _go_away(self, last_id: int, code: ErrorCode, message: str) -> None:
        said = _U32.pack(last_id) + _U32.pack(code) + message.encode()
        self.out.append(frame(Kind.GOAWAY, 0, 0, said))

    def _forget(self, stream: Stream, *, by_client: bool) -> None:
        self.streams.pop(stream.id, None)
        self._blocked.pop(stream.id, None)
        stream.unsent.clear()
        stream.unsent_bytes = 0
        self._user.on_closed(stream, by_client=by_client)
