"""Connection of frames: an asyncio protocol that parses input and bounds queued output.

Owns the parser and the socket's transport. Its two subclasses, of the dialler and of the listener,
interpret the frames. Anything that is not a valid frame ends the connection.

`Patience` limits the time of a handshake. A peer short of CPU time needs longer, and an interrupted
handshake must start again. The limit therefore doubles each time it cuts off a peer whose host
answers, and shrinks as soon as answers are fast.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from typing import cast

from streammeta.controller.peers.frames import Frame, FrameError, FrameParser, PayloadLimits

_DOUBLINGS_MAX = 3
_SHARE_OF_ANSWER = 4
"""Factor between the last answer's duration and the limit, when the limit shrinks."""


class Patience:
    """The time limit, in seconds."""

    def __init__(self, base_s: float) -> None:
        self.base_s = base_s
        """Limit for a host that does not answer at all, and for a healthy peer."""
        self._doublings = 0

    @property
    def limit_s(self) -> float:
        """Return the current limit."""
        return self.base_s * (1 << self._doublings)

    def cut_off(self) -> None:
        """Record that a peer whose host is up did not answer within the limit."""
        self._doublings = min(self._doublings + 1, _DOUBLINGS_MAX)

    def record_answer(self, took_s: float) -> None:
        """Record an answer and its duration."""
        while self._doublings and took_s * _SHARE_OF_ANSWER <= self.limit_s / 2:
            self._doublings -= 1


class ProtocolError(Exception):
    """The peer broke the protocol with a valid frame that is not allowed now."""


class FramedConnection(asyncio.Protocol, ABC):
    """One end of a connection between controllers."""

    def __init__(self, first: PayloadLimits, output_bytes_max: int) -> None:
        """`first` are the frames allowed first, `output_bytes_max` limits queued output."""
        self.parser = FrameParser(first)
        self.is_closed = False
        """Nothing more is read or written."""
        self.is_congested = False
        """The queued output has reached its limit."""
        self._is_paused = False
        self._output_bytes_max = output_bytes_max
        self._transport: asyncio.Transport | None = None

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the connection's transport."""
        self._transport = cast(asyncio.Transport, transport)
        if self.is_closed:
            self._transport.abort()
            return
        # Beyond this the peer does not read its answers, and is_congested informs the subclass.
        self._transport.set_write_buffer_limits(high=self._output_bytes_max)
        if (opened := transport.get_extra_info("socket")) is not None:
            # Messages are small and complete, so waiting to merge them only adds latency.
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.on_connected()

    def data_received(self, data: bytes) -> None:
        """Handle the frames completed by these bytes."""
        self.parser.feed(data)
        self.handle_frames()

    def pause_writing(self) -> None:
        """Record that too much output is queued."""
        self.is_congested = True

    def resume_writing(self) -> None:
        """Record that there is room again."""
        self.is_congested = False

    # -- for the subclasses

    @abstractmethod
    def on_connected(self) -> None:
        """Begin the exchange."""

    @abstractmethod
    def on_frame(self, frame: Frame) -> None:
        """Handle a frame. Raises ProtocolError if it is not allowed now."""

    @abstractmethod
    def on_broken(self, reason: str) -> None:
        """Handle a protocol error of the peer. Must close the connection."""

    def handle_frames(self) -> None:
        """Handle the complete frames, until reading is paused."""
        try:
            # A handler may close or pause the connection between two frames.
            while not (self.is_closed or self._is_paused):
                frame = self.parser.next()
                if frame is None:
                    return
                self.on_frame(frame)
        except (FrameError, ProtocolError) as error:
            self.on_broken(str(error))

    def write(self, data: bytes) -> None:
        """Send bytes after those already queued."""
        if self._transport is not None and not self.is_closed:
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Handle no further frame until `resume_reading`."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Handle frames again, first the buffered ones."""
        if self._is_paused and not self.is_closed and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
            # Frames that arrived before the pause wait in the parser, and no further data may come.
            self.handle_frames()

    def close(self, *, flush: bool = False) -> None:
        """Disconnect, immediately or once all queued output has been sent."""
        self.is_closed = True
        if self._transport is not None:
            if flush:
                self._transport.close()
            else:
                self._transport.abort()
