"""One connection of HTTP/2 at a server (RFC 9113): bytes in, calls of its user, bytes out.

Owns streams, windows both ways, settings and the bounds of what a client may waste. Knows nothing
of gRPC, does no I/O and reads no clock: times are given.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from streammeta.controller.grpc_server import headers, outflow
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
    unpadded,
)
from streammeta.controller.grpc_server.stream import Stream

CONNECTION_WINDOW = 8 << 20
"""Bytes that may be in flight to all streams together. Consumed bytes are granted again."""

CONTINUATIONS_MAX = 64
"""Frames of one block of headers, in addition to one per 8 KiB of the block."""

SKIPPED_BYTES_MAX = 4 << 20
"""Maximum size of a skipped block. A longer one ends the connection."""

_SETTINGS_A_UNIT = 32
"""Settings of a frame that are as much work as a frame."""

_CALL_UNITS = 2
"""Work of a call's begin, and of its end."""

RESETS = (2_000, 200.0)
SETTINGS_CHANGES = (1_000, 10.0)
PINGS = (10_000, 1_000.0)
WASTED_FRAMES = (10_000, 1_000.0)
"""Streams that the client resets or has reset, settings, pings between which nothing is answered,
and frames without effect: at once, and a second.
"""

LEFT_OPEN_MAX = 4_096
"""Streams ended here, and not by their clients, of which late frames are passed over."""

_ALIVE_PING, _END_PING = bytes(8), b"the end?"

_SETTING = struct.Struct(">HI")


class Allowance:
    """A bound on how often something happens: a number at once, and so many a second."""

    __slots__ = ("_at", "_left", "_most", "_per_s")

    def __init__(self, most: int, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left = float(most)
        self._at = float("-inf")

    def take(self, now: float, what: str) -> None:
        """Count one event. Raises Http2Error if they are too frequent."""
        if self._left < 1.0:
            self._left = min(self._most, self._left + (now - self._at) * self._per_s)
            self._at = now
            if self._left < 1.0:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")
        elif self._left == self._most:
            self._at = now
        self._left -= 1.0


class User(Protocol):
    """What hears of a connection's streams."""

    def on_head(self, stream: Stream, head: headers.Head) -> None:
        """Handle a new stream. The stream states whether it has already ended."""
        ...

    def on_data(self, stream: Stream, data: bytes) -> None:
        """Handle bytes of a stream. The stream states whether they are its last."""
        ...

    def on_sent(self, stream: Stream) -> None:
        """Hear that nothing of a stream is unsent."""
        ...

    def on_closed(self, stream: Stream, *, by_client: bool) -> None:
        """Handle the end of a stream, by its last frame or by a reset of either side."""
        ...

    def on_end_heard(self) -> None:
        """Handle the client's confirmation that it opens no more streams."""
        ...


@dataclass(slots=True)
class _Block:
    """Headers whose frames have not all come."""

    stream_id: int
    is_last: bool
    parts: list[bytes]
    size: int
    frames: int = 1
    skipper: headers.BlockSkipper | None = None


class Session(outflow.Outflow):
    """State of one connection. `out` contains the bytes to be sent."""

    def __init__(
        self, user: User, *, streams_max: int, stream_window: int, header_list_bytes: int
    ) -> None:
        super().__init__()
        self._user = user
        self._parser = FrameParser()
        self._headers = headers.HeaderDecoder(header_list_bytes)
        self._streams_max = streams_max
        self._stream_window = stream_window
        self.streams: dict[int, Stream] = {}
        self.last_id = 0
        """The newest stream that the client has opened."""
        self.takes_streams = True
        """False: new ones are refused, so that their client tries elsewhere."""
        self._final_id: int | None = None
        self._block: _Block | None = None
        self.spent = 0

        """Units of work that the last call of `work` took, for frames and for their effects."""
        self.has_settings = False
        """The client has sent its preface and its first frame."""
        self._granted = CONNECTION_WINDOW
        self._taken = 0
        self._left_open: OrderedDict[int, None] = OrderedDict()
        """The newest streams that have ended here, and of which the client may still send."""
        self._now = 0.0
        self._resets = Allowance(*RESETS)
        self._changes = Allowance(*SETTINGS_CHANGES)
        self._pings = Allowance(*PINGS)
        self._wasted = Allowance(*WASTED_FRAMES)
        settings = (
            (Setting.MAX_CONCURRENT_STREAMS, streams_max),
            (Setting.INITIAL_WINDOW_SIZE, stream_window),
            (Setting.MAX_HEADER_LIST_SIZE, header_list_bytes),
        )
        said = b"".join(_SETTING.pack(*setting) for setting in settings)
        self.out += (
            frame(Kind.SETTINGS, 0, 0, said),
            frame(
                Kind.WINDOW_UPDATE,
                0,
                0,
                outflow.U32.pack(CONNECTION_WINDOW - outflow.DEFAULT_WINDOW),
            ),
        )

    # -- input

    def feed(self, data: bytes) -> None:
        """Buffer received bytes, which `work` handles."""
        self._parser.feed(data)

    def work(self, now: float, units: int) -> bool:
        """Send pending bytes and handle frames, for at most `units`.

        Return whether more may follow.

        The work of a frame is never cut short, so the last one may exceed the units.

        Raises:
            Http2Error: the connection must end.
        """
        self._now = now
        parser, self.spent = self._parser, 0
        while self.spent < units:
            if self._ready and self.is_due:
                self.spent += 1 + self._send_next()
                continue
            taken = parser.next()
            if taken is None:
                return False
            self.spent += 1
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
            self._on_window(now, stream_id, outflow.U32.unpack(payload)[0] & WINDOW_MAX)
        elif kind == Kind.PING:
            self._on_ping(now, flags, payload)
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

    def _on_ping(self, now: float, flags: int, payload: bytes) -> None:
        if flags & Flag.ACK:
            self._wasted.take(now, "acknowledgements")
            if payload == _END_PING:
                self._user.on_end_heard()
            return
        # While answers come clients measure the connection by pings, as often as it lets them.
        if not self.has_answered:
            self._pings.take(now, "pings")
        self.has_answered = False
        self.out.append(frame(Kind.PING, Flag.ACK, 0, payload))

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
        if block.skipper is not None:
            self._pass_over(block.skipper, payload)
        else:
            block.parts.append(payload)
            if block.size > headers.BLOCK_BYTES_MAX:
                block.skipper = self._headers.skipper()
                self._pass_over(block.skipper, b"".join(block.parts))
                block.parts.clear()

        if flags & Flag.END_HEADERS:
            self._block = None
            if block.skipper is None:
                self._on_block(now, stream_id, block.is_last, b"".join(block.parts))
            else:
                self._on_head(now, stream_id, block.is_last, block.skipper.end())

    def _pass_over(self, skipper: headers.BlockSkipper, data: bytes) -> None:
        before = self._headers.steps
        try:
            skipper.feed(data)
        finally:
            self.spent += self._headers.steps - before

    def _on_block(self, now: float, stream_id: int, is_last: bool, block: bytes) -> None:
        before = self._headers.steps
        try:
            # Always, since later blocks refer to it.
            head = self._headers.decode(block)
        finally:
            self.spent += self._headers.steps - before
        self._on_head(now, stream_id, is_last, head)

    def _on_head(self, now: float, stream_id: int, is_last: bool, head: headers.Head) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._on_trailers(now, stream, is_last, head)
            return

        if stream_id <= self.last_id:
            if not is_last or stream_id not in self._left_open:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} is not new")
            del self._left_open[stream_id]
            self._wasted.take(now, "frames of closed streams")
            return

        if not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client's stream has an odd number")

        self.last_id = stream_id
        if self._final_id is not None and stream_id > self._final_id:
            self._wasted.take(now, "streams after the last one")  # its client knows which one is
            self._leave_open(stream_id, is_ended_there=is_last)
        elif not self.takes_streams or len(self.streams) >= self._streams_max:
            self._resets.take(now, "streams beyond the limit")
            self._reset(stream_id, ErrorCode.REFUSED_STREAM)
            self._leave_open(stream_id, is_ended_there=is_last)
        elif head.is_malformed or (is_last and head.content_length):
            self._resets.take(now, "malformed requests")
            self._reset(stream_id, ErrorCode.PROTOCOL_ERROR)
            self._leave_open(stream_id, is_ended_there=is_last)
        else:
            stream = self.streams[stream_id] = Stream(stream_id, self._stream_window)
            stream.is_ended_there = is_last
            stream.length = head.content_length
            self.spent += _CALL_UNITS
            self._user.on_head(stream, head)

    def _on_trailers(self, now: float, stream: Stream, is_last: bool, head: headers.Head) -> None:
        if stream.is_ended_there:
            self._break(now, stream, ErrorCode.STREAM_CLOSED)
        elif not is_last or not head.may_end or stream.length:
            self._break(now, stream, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.is_ended_there = True
            self._user.on_data(stream, b"")

    def _on_data(self, now: float, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._count_data(size)
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self.last_id:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"data of stream {stream_id}: idle")
            self._on_late_data(now, flags, stream_id)
            return

        if stream.is_ended_there:
            self._break(now, stream, ErrorCode.STREAM_CLOSED)
            return

        if size > stream.granted:
            self._break(now, stream, ErrorCode.FLOW_CONTROL_ERROR)
            return

        stream.granted -= size
        if flags & Flag.PADDED:
            payload = unpadded(flags, payload)

        is_last = bool(flags & Flag.END_STREAM)
        if not stream.count(len(payload), is_last=is_last):
            self._break(now, stream, ErrorCode.PROTOCOL_ERROR)
            return

        if is_last:
            stream.is_ended_there = True
        elif not payload:
            self._wasted.take(now, "empty frames")

        if len(payload) < size:
            self.grant(stream, size - len(payload))

        self._user.on_data(stream, payload)

    def _count_data(self, size: int) -> None:
        """Count bytes of any stream, and grant as many again from time to time."""
        if size > self._granted:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than was granted")
        self._granted -= size
        self._taken += size
        if self._taken >= CONNECTION_WINDOW // 4:
            self.out.append(frame(Kind.WINDOW_UPDATE, 0, 0, outflow.U32.pack(self._taken)))
            self._granted += self._taken
            self._taken = 0

    def _on_late_data(self, now: float, flags: int, stream_id: int) -> None:
        """Skip data that was in flight when the stream ended.

        A client may send no other data for it.
        """
        if stream_id not in self._left_open:
            self._resets.take(now, "data of closed streams")
            self._reset(stream_id, ErrorCode.STREAM_CLOSED)
            return
        self._wasted.take(now, "frames of closed streams")
        if flags & Flag.END_STREAM:
            del self._left_open[stream_id]

    def _on_window(self, now: float, stream_id: int, grant: int) -> None:
        if stream_id == 0:
            self.window += grant
            if not grant or self.window > WINDOW_MAX:
                code = ErrorCode.FLOW_CONTROL_ERROR if grant else ErrorCode.PROTOCOL_ERROR
                raise Http2Error(code, f"a window of {self.window} bytes")
            return

        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self.last_id:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a window of stream {stream_id}: idle")
            self._wasted.take(now, "frames of closed streams")
            return

        if not grant or stream.window + grant + self._initial_window > WINDOW_MAX:
            code = ErrorCode.FLOW_CONTROL_ERROR if grant else ErrorCode.PROTOCOL_ERROR
            self._break(now, stream, code)
        else:
            self._widen_stream(stream, grant)

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
        self.spent += len(payload) // (_SETTING.size * _SETTINGS_A_UNIT)
        window = self._initial_window
        for key, value in _SETTING.iter_unpack(payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                if value > WINDOW_MAX:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
                window = value
            elif key == Setting.MAX_FRAME_SIZE:
                if not FRAME_BYTES_MAX <= value < 1 << 24:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frames of {value} bytes")
                self._frame_max = min(value, outflow.SENT_FRAME_BYTES_MAX)
            elif key == Setting.HEADER_TABLE_SIZE:
                self._table_notice = headers.NO_TABLE
            elif key == Setting.ENABLE_PUSH and value > 1:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")

        if window > self._initial_window:
            self._require_windows(window)

        # A client applies its settings once they are acknowledged: until then data that only they
        # allow breaks its rules (RFC 9113, 6.5.3).
        self.out.append(frame(Kind.SETTINGS, Flag.ACK, 0))
        self._change_initial_window(window)

    def _require_windows(self, initial: int) -> None:
        """Raise Http2Error if a window of some stream would be longer than any may be (6.9.2)."""
        self.spent += len(self.streams) // _SETTINGS_A_UNIT
        if any(stream.window + initial > WINDOW_MAX for stream in self.streams.values()):
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"windows beyond {WINDOW_MAX} bytes")

    # -- what goes

    def grant(self, stream: Stream, size: int) -> None:
        """Let a client send so many bytes more on a stream."""
        if not stream.is_ended_there:
            stream.granted += size
            self.out.append(frame(Kind.WINDOW_UPDATE, 0, stream.id, outflow.U32.pack(size)))

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once, and drop its unsent bytes."""
        self._reset(stream.id, code)
        self._forget(stream, by_client=False)

    def _break(self, now: float, stream: Stream, code: ErrorCode) -> None:
        """Reset a stream whose client broke a rule: that counts as a reset of the client's."""
        self._resets.take(now, "streams that break a rule")
        self.reset(stream, code)

    def count_broken(self) -> None:
        """Count a call that its client broke off by a message that is none.

        Raises:
            Http2Error: it breaks calls off too often, as if it had reset their streams.
        """
        self._resets.take(self._now, "broken calls")

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.out.append(frame(Kind.PING, 0, 0, _ALIVE_PING))

    def announce_end(self) -> None:
        """Ask the client to open no more streams and to confirm that.

        Streams that it has opened until then are served.
        """
        self._go_away(STREAM_ID_MAX, ErrorCode.NO_ERROR, "")
        self.out.append(frame(Kind.PING, 0, 0, _END_PING))

    def take_no_more(self) -> None:
        """Announce the last stream that is served. Later streams are ignored."""
        if self._final_id is None:
            self._final_id = self.last_id
            self._go_away(self.last_id, ErrorCode.NO_ERROR, "")

    def fail(self, error: Http2Error) -> None:
        """Send the client the reason why the connection ends."""
        self._go_away(self.last_id, error.code, str(error))

    @property
    def is_done(self) -> bool:
        """Whether no stream is open and none will be."""
        return self._final_id is not None and not self.streams

    def close(self, units: int) -> bool:
        """Forget streams of a closed connection. Return whether more are left."""
        self.spent = 0
        while self.streams and self.spent < units:
            self._forget(next(iter(self.streams.values())), by_client=True)
        return bool(self.streams)

    def _leave_open(self, stream_id: int, *, is_ended_there: bool) -> None:
        """Remember a stream that has ended here, unless it has ended at its client too."""
        if is_ended_there:
            return
        self._left_open[stream_id] = None
        if len(self._left_open) > LEFT_OPEN_MAX:
            self._left_open.popitem(last=False)

    def _forget(self, stream: Stream, *, by_client: bool) -> None:
        self.spent += _CALL_UNITS
        self.streams.pop(stream.id, None)
        if not by_client:
            self._leave_open(stream.id, is_ended_there=stream.is_ended_there)
        self._drop_unsent(stream)
        self._user.on_closed(stream, by_client=by_client)

    def _on_sent(self, stream: Stream) -> None:
        self._user.on_sent(stream)

    def _on_ended(self, stream: Stream) -> None:
        self._forget(stream, by_client=False)
