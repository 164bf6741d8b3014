"""Floor of a lone commit: a leader and two followers that send, flush and answer, and nothing else.

Processes of the same shape as controllers and made of the same parts: the product's gRPC server,
uvloop, length-prefixed frames on TCP connections to two followers, and one fdatasync in each
process. A message is answered once two of the three have it on disk. There are no terms, votes or
state, nothing is validated or parsed, and one message is in flight at a time. A controller's lone
commit takes more time than this by the product's own work.
"""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from scripts.benchmarks.committer import Connected, Load, LoadError
from streammeta.controller.grpc_server.server import new_server

PIPELINE, UNARY = "/floor.Floor/Pipeline", "/floor.Floor/Unary"
MESSAGE_BYTES = 160
"""Size of a message in bytes, equal to a commit of one range."""
ANSWER = bytes(8)

_FRAME = struct.Struct(">IQ")
"""Length of the payload, and number of the message."""
_MAJORITY = 2


class _Frames(asyncio.Protocol):
    """Calls `on_frame` with number and payload of each frame that arrives."""

    def __init__(self, on_frame: Callable[[asyncio.WriteTransport, int, bytes], None]) -> None:
        self._on_frame = on_frame
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= _FRAME.size:
            length, number = _FRAME.unpack_from(self._received)
            end = _FRAME.size + length
            if len(self._received) < end:
                return
            payload, self._received = self._received[_FRAME.size : end], self._received[end:]
            self._on_frame(self._transport, number, payload)


class _Log:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._size = 0

    def append(self, data: bytes) -> None:
        self._size += os.pwrite(self._fd, data, self._size)
        os.fdatasync(self._fd)


class _Leader:
    """Replicates one message at a time."""

    def __init__(self, log: _Log) -> None:
        self._log = log
        self._followers: list[asyncio.WriteTransport] = []
        self._number = 0
        self._flushed = 0
        self._committed: asyncio.Future[None] | None = None

    async def connect(self, ports: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        for port in ports:
            transport, _ = await loop.create_connection(
                lambda: _Frames(lambda _, number, __: self._note_flushed(number)),
                "127.0.0.1",
                port,
            )
            self._followers.append(transport)

    async def replicate(self, message: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        self._number += 1
        self._flushed = 0
        self._committed = loop.create_future()
        frame = _FRAME.pack(len(message), self._number) + message
        for follower in self._followers:
            follower.write(frame)

        # The leader's flush blocks the loop, so the followers have to get the message first.
        loop.call_soon(self._flush, self._number, message)
        await self._committed
        return ANSWER

    async def pipeline(self, messages: AsyncIterator[bytes], context: Any) -> None:
        async for message in messages:
            await context.write(await self.replicate(message))

    async def unary(self, message: bytes, _context: Any) -> bytes:
        return await self.replicate(message)

    def _flush(self, number: int, message: bytes) -> None:
        self._log.append(message)
        self._note_flushed(number)

    def _note_flushed(self, number: int) -> None:
        if number != self._number:
            return
        self._flushed += 1
        if self._flushed == _MAJORITY and self._committed is not None:
            self._committed.set_result(None)


async def follow(*, log: str) -> None:
    """Run a follower until the process is ended. Its ready line has its port."""
    disk = _Log(log)

    def on_frame(leader: asyncio.WriteTransport, number: int, payload: bytes) -> None:
        disk.append(payload)
        leader.write(_FRAME.pack(0, number))

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Frames(on_frame), "127.0.0.1", 0)
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def lead(*, log: str, ports: Sequence[int]) -> None:
    """Run the leader of followers on `ports` until the process is ended."""
    leader = _Leader(_Log(log))
    await leader.connect(ports)
    server = new_server()
    handlers: dict[str, Any] = {
        "Pipeline": grpc.stream_stream_rpc_method_handler(leader.pipeline),
        "Unary": grpc.unary_unary_rpc_method_handler(leader.unary),
    }
    service = grpc.method_handlers_generic_handler("floor.Floor", handlers)
    server.add_generic_rpc_handlers([service])
    port = server.listen("127.0.0.1:0")
    await server.start()
    print(f"ready {port}", flush=True)
    await asyncio.Event().wait()


_MESSAGE = bytes(MESSAGE_BYTES)


class UnaryFloor(Connected):
    """One call for each message."""

    def __init__(self, load: Load) -> None:
        if load.in_flight != 1:
            raise ValueError("load.in_flight: the floor accepts one message at a time")
        super().__init__(load)

    async def commit(self, _slot: int) -> None:
        """Send a message and wait for its answer."""
        await self._connection.call(UNARY, _MESSAGE)


class PipelinedFloor(UnaryFloor):
    """All messages on one stream."""

    async def open(self) -> None:
        """Connect and begin the stream."""
        await super().open()
        self._answered: asyncio.Future[None] | None = None
        self._stream_id = self._connection.open(PIPELINE, self._on_answer, self._on_end)

    async def commit(self, _slot: int) -> None:
        """Send a message and wait for its answer."""
        self._answered = asyncio.get_running_loop().create_future()
        self._connection.send(self._stream_id, _MESSAGE)
        await self._answered

    def _on_answer(self, _message: bytes) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _on_end(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(LoadError("the floor ended the stream"))
