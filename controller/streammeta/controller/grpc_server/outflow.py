"""The sending half of a connection: frames that go out, as far as windows and the transport allow.

A stream with unsent bytes is either ready or stalled. Ready streams wait for the connection's
window or for room in the transport. Stalled streams wait for their own window, and nothing visits
them until the client widens it. Does no I/O.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod

from streammeta.controller.grpc_server.frames import (
    FRAME_BYTES_MAX,
    ErrorCode,
    Flag,
    Kind,
    frame,
    frame_header,
)
from streammeta.controller.grpc_server.stream import Stream

DEFAULT_WINDOW = 65_535

SENT_FRAME_BYTES_MAX = 64 << 10
"""Longest frame that is sent to one that takes longer ones."""

BURST_BYTES = 256 << 10
"""Bytes of messages given out before the transport has to say whether it takes more."""

_SAID_BYTES_MAX = 200
"""Bytes of the reason in a GOAWAY: a reason may quote the bytes that the client has sent."""

U32 = struct.Struct(">I")


class Outflow(ABC):
    """Frames to send, in `out`, and the streams whose bytes wait."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.window = DEFAULT_WINDOW
        self.room = BURST_BYTES
        """Bytes of messages that may be given out before `refill`."""
        self.has_answered = False
        """Whether headers or data have gone out since a ping was answered."""
        self._initial_window = DEFAULT_WINDOW
        self._frame_max = FRAME_BYTES_MAX
        self._table_notice = b""
        self._ready: dict[int, Stream] = {}
        self._stalled: dict[int, Stream] = {}

    @abstractmethod
    def _on_sent(self, stream: Stream) -> None:
        """Take note that nothing of a stream is unsent."""

    @abstractmethod
    def _on_ended(self, stream: Stream) -> None:
        """Take note that the last frame of a stream is on its way."""

    # -- of calls

    def send_head(self, stream: Stream, block: bytes) -> None:
        """Send the headers that begin an answer."""
        self._put_headers(stream.id, block, 0)

    def send(self, stream: Stream, data: bytes) -> bool:
        """Send bytes of an answer as far as windows allow. Return whether all are on their way."""
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
            self.has_answered = True
            self.out.append(frame_header(size, Kind.DATA, 0, stream.id))
            self.out.append(data)
            return True

        stream.unsent.append(memoryview(data))
        stream.unsent_bytes += size
        if len(stream.unsent) == 1:  # else it waits already
            self._send_unsent(stream)

        return not stream.unsent

    def end(self, stream: Stream, block: bytes) -> None:
        """Send the headers that end a stream, after its unsent bytes."""
        # The headers that end a stream follow its data.
        if stream.unsent:
            stream.last = block
        else:
            self._end(stream, block)

    # -- windows and room

    def refill(self) -> None:
        """Allow another burst, now that the transport takes more."""
        self.room = BURST_BYTES

    @property
    def is_due(self) -> bool:
        """Whether unsent bytes of some stream can be sent now."""
        return bool(self._ready) and self.window > 0 and self.room > 0

    def _widen_stream(self, stream: Stream, size: int) -> None:
        stream.window += size
        if self._stalled.pop(stream.id, None) is not None:
            self._ready[stream.id] = stream

    def _change_initial_window(self, value: int) -> None:
        # A smaller window frees nobody. Streams stall by themselves when they are visited.
        grew = value > self._initial_window
        self._initial_window = value
        if grew and self._stalled:
            # Not visited here: each is when its turn comes, and stalls again if it must.
            self._ready.update(self._stalled)
            self._stalled.clear()

    def _send_next(self) -> int:
        """Send unsent bytes of the next stream. Return the number of frames."""
        stream = next(iter(self._ready.values()))
        sent = self._send_unsent(stream)
        if not stream.unsent:
            if stream.last is None:
                self._on_sent(stream)
            else:
                self._end(stream, stream.last)
        return sent

    def _send_unsent(self, stream: Stream) -> int:
        """Send as much of a stream as windows and buffer allow. Return the number of frames."""
        unsent, out, sent = stream.unsent, self.out, 0
        self._ready.pop(stream.id, None)
        while unsent:
            first = unsent[0]
            own = stream.window + self._initial_window
            size = min(len(first), self._frame_max, self.window, own)
            if self.room <= 0 or size <= 0:
                waiting = self._stalled if own <= 0 else self._ready
                # After the other waiting streams, so that all have their turn.
                waiting[stream.id] = stream
                break
            out.append(frame_header(size, Kind.DATA, 0, stream.id))
            out.append(bytes(first[:size]))
            sent += 1
            self.has_answered = True
            self.window -= size
            stream.window -= size
            self.room -= size
            stream.unsent_bytes -= size
            if size == len(first):
                unsent.popleft()
            else:
                unsent[0] = first[size:]

        return sent

    def _drop_unsent(self, stream: Stream) -> None:
        self._ready.pop(stream.id, None)
        self._stalled.pop(stream.id, None)
        stream.unsent.clear()
        stream.unsent_bytes = 0

    # -- frames

    def _end(self, stream: Stream, block: bytes) -> None:
        self._put_headers(stream.id, block, Flag.END_STREAM)
        # A client that has not ended its side is not reset: it might take that for the answer. What
        # it still sends, a window at most, is passed over.
        self._on_ended(stream)

    def _put_headers(self, stream_id: int, block: bytes, flags: int) -> None:
        self.has_answered = True
        if self._table_notice:
            # Size updates must begin the next block (RFC 7541, 4.2).
            block, self._table_notice = self._table_notice + block, b""
        if len(block) <= FRAME_BYTES_MAX:
            self.out.append(
                frame_header(len(block), Kind.HEADERS, flags | Flag.END_HEADERS, stream_id) + block
            )
            return

        kind = Kind.HEADERS
        # No other frame may come between the parts (RFC 9113, 6.10).
        for at in range(0, len(block), FRAME_BYTES_MAX):
            part = block[at : at + FRAME_BYTES_MAX]
            is_last = at + FRAME_BYTES_MAX >= len(block)
            self.out.append(
                frame(kind, flags | (Flag.END_HEADERS if is_last else 0), stream_id, part)
            )
            kind, flags = Kind.CONTINUATION, 0

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self.out.append(frame(Kind.RST_STREAM, 0, stream_id, U32.pack(code)))

    def _go_away(self, last_id: int, code: ErrorCode, message: str) -> None:
        said = U32.pack(last_id) + U32.pack(code) + message.encode()[:_SAID_BYTES_MAX]
        self.out.append(frame(Kind.GOAWAY, 0, 0, said))
