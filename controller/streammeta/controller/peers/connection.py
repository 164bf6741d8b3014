"""Connection of frames: an asyncio protocol that parses what comes and bounds what waits to leave.

Owns the parser and the socket's transport; its two kinds, of the dialler and of the listener, say
what a frame means. Whatever is no frame ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from typing import cast

from streammeta.controller.peers.frames import Frame, FrameError, FrameParser, PayloadLimits


class ProtocolError(Exception):
    """The other side broke the protocol: a frame that is sound and may not come now."""


class FramedConnection(asyncio.Protocol, ABC):
    """One end of a connection between controllers."""

    def __init__(self, first: PayloadLimits, output_bytes_max: int) -> None:
        """Take the frames that may come first, and the bytes that may wait to leave."""
        self.parser = FrameParser(first)
        self.is_closed = False
        """Nothing more is read or written."""
        self.is_congested = False
        """As many bytes wait to leave as may."""
        self._is_paused = False
        self._output_bytes_max = output_bytes_max
        self._transport: asyncio.Transport | None = None

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection's transport."""
        self._transport = cast(asyncio.Transport, transport)
        if self.is_closed:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=self._output_bytes_max)
        if (opened := transport.get_extra_info("socket")) is not None:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.on_connected()

    def data_received(self, data: bytes) -> None:
        """Take the frames that these bytes complete."""
        self.parser.feed(data)
        self.take_frames()

    def pause_writing(self) -> None:
        """Note that too much waits to leave."""
        self.is_congested = True

    def resume_writing(self) -> None:
        """Note that there is room again."""
        self.is_congested = False

    # -- for the two kinds of connections

    @abstractmethod
    def on_connected(self) -> None:
        """Begin."""

    @abstractmethod
    def on_frame(self, frame: Frame) -> None:
        """Take a frame; raises ProtocolError if it may not come now."""

    @abstractmethod
    def on_broken(self, reason: str) -> None:
        """Take note that the other side broke the protocol; must close."""

    def take_frames(self) -> None:
        """Take the frames that are there, until reading is paused."""
        try:
            while not (self.is_closed or self._is_paused):
                frame = self.parser.next()
                if frame is None:
                    return
                self.on_frame(frame)
        except (FrameError, ProtocolError) as error:
            self.on_broken(str(error))

    def write(self, data: bytes) -> None:
        """Send bytes, behind those that wait to leave."""
        if self._transport is not None and not self.is_closed:
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Take no further frame until `resume_reading`."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take frames again, first those that are there."""
        if self._is_paused and not self.is_closed and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
            self.take_frames()

    def close(self, *, flush: bool = False) -> None:
        """Disconnect: at once, or once everything that waits to leave has left."""
        self.is_closed = True
        if self._transport is not None:
            if flush:
                self._transport.close()
            else:
                self._transport.abort()
