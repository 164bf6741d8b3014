"""Connections without sockets, and a meter of the work that they cause in a turn of the event loop.

The meter counts operations by itself, and not what the product charges for them: frames, headers
and changes of the table, streams visited, calls begun and ended, messages.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import hpack
import pytest

from streammeta.controller.grpc_server.call import Call
from streammeta.controller.grpc_server.connection import Connection
from streammeta.controller.grpc_server.frames import PREFACE, Flag, FrameParser, Kind, frame
from streammeta.controller.grpc_server.headers import BlockSkipper, HeaderDecoder, literal
from streammeta.controller.grpc_server.limits import Limits
from streammeta.controller.grpc_server.messages import MessageReader, framed
from streammeta.controller.grpc_server.outflow import Outflow
from streammeta.controller.grpc_server.server import Server

ECHO = "/t.S/Echo"
POUR = "/t.S/Pour"


class Transport:
    """A transport that takes everything, and remembers whether it is to read."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_paused = self.is_closed = False

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        self.is_closed = True

    abort = close


class Client:
    """A connection and its transport."""

    def __init__(self, server: Server, share: Any = None, host: str = "") -> None:
        self.transport = Transport()
        self.connection = Connection(server, share or server.add_share(), host)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def say(self, *parts: bytes) -> None:
        self.connection.data_received(b"".join(parts))

    async def say_when_read(self, data: bytes, chunk: int = 64 << 10) -> None:
        """Send bytes as TCP would: no more while the server does not read."""
        for at in range(0, len(data), chunk):
            await self.settled()
            if self.transport.is_closed:
                return
            self.say(data[at : at + chunk])
        await self.settled()

    async def settled(self) -> None:
        """Wait until all that was sent has been handled."""
        while self.transport.is_paused and not self.transport.is_closed:  # noqa: ASYNC110 - turns
            await asyncio.sleep(0)

    def is_answered(self, ping: bytes) -> bool:
        return frame(Kind.PING, Flag.ACK, 0, ping) in self.transport.sent


class Meter:
    """Operations of the present turn, and the most of any turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: Counter[str] = Counter()
        self.worst: Counter[str] = Counter()
        self.most = 0.0
        self.turns: list[float] = []
        """Operations of each turn."""
        self._patch = monkeypatch
        self._count(FrameParser, "next", "frames", lambda found: found is not None)
        self._count(HeaderDecoder, "_fields", "headers", len)
        self._count(hpack.Decoder, "_update_encoding_context", "table", lambda _: 1)
        self._count(BlockSkipper, "_end_of", "skipped", lambda _: 1)
        self._count(Outflow, "_send_unsent", "visits", lambda _: 1)
        self._count(Call, "__init__", "calls", lambda _: 1)
        self._count(Call, "closed", "calls", lambda _: 1)
        self._count(MessageReader, "feed", "messages", lambda found: len(found) / 8)

    def _count(self, owner: Any, name: str, what: str, size: Callable[[Any], float]) -> None:
        plain = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            found = plain(*args, **options)
            self.now[what] += size(found)  # type: ignore[assignment]
            return found

        self._patch.setattr(owner, name, counted)

    async def run(self) -> None:
        """Count turns until cancelled."""
        while True:
            await asyncio.sleep(0)
            self.end_turn()

    def end_turn(self) -> None:
        self.turns.append(sum(self.now.values()))
        for what, number in self.now.items():
            self.worst[what] = max(self.worst[what], number)
        self.most = max(self.most, self.turns[-1])
        self.now.clear()

    def restart(self) -> None:
        """Forget the turns so far."""
        self.now.clear()
        self.worst.clear()
        self.most = 0.0
        self.turns.clear()


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def pour(messages: Any, context: Any) -> None:
    async for message in messages:
        await context.write(message)


LIMITS = Limits(work_a_turn_s=3_600)
"""Bounds by units alone: how long they take says nothing on a busy machine."""

HANDLERS: dict[str, Any] = {
    "Echo": grpc.unary_unary_rpc_method_handler(echo),
    "Pour": grpc.stream_stream_rpc_method_handler(pour),
}


def new_server(limits: Limits = LIMITS, **handlers: Any) -> Server:
    server = Server(limits)
    served = grpc.method_handlers_generic_handler("t.S", HANDLERS | handlers)
    server.add_generic_rpc_handlers([served])
    return server


def head(path: str) -> bytes:
    """Return the block of a request that changes no table."""
    return b"".join(
        literal(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"here"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(Kind.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def grant(stream_id: int, size: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream_id, struct.pack(">I", size))


def echoed(stream_id: int, message: bytes = bytes(20)) -> bytes:
    """Return a whole call."""
    return frame(Kind.HEADERS, Flag.END_HEADERS, stream_id, head(ECHO)) + frame(
        Kind.DATA, Flag.END_STREAM, stream_id, framed(message)
    )


GREETING = PREFACE + settings()
