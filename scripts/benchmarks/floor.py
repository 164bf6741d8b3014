"""Floor of a lone commit: a leader and two followers that send, flush and answer, and nothing else.

    python -m scripts.benchmarks.floor LOG follower
    python -m scripts.benchmarks.floor LOG leader PORT,PORT

Processes of the same shape as controllers, out of the same parts: grpc.aio with the product's
options for clients, uvloop, length-prefixed frames on TCP connections to two followers, one
fdatasync in each process. A message is answered once two of the three have it on disk. There are
no terms, no votes and no state, nothing is checked or parsed, and one message is under way at a
time. What a controller's lone commit takes beyond this is the product's own work.
"""

import asyncio
import os
import struct
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop

from streammeta.controller.grpc_server.server import new_server

PIPELINE, UNARY = "/floor.Floor/Pipeline", "/floor.Floor/Unary"
MESSAGE_BYTES = 160
"""Size of a message, in bytes: that of a commit of one range."""
ANSWER = bytes(8)

_FRAME = struct.Struct(">IQ")
"""Length of what follows the header, and the number of the message."""
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
    def __init__(self, path: Path) -> None:
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
        loop.call_soon(self._flush, self._number, message)  # once the followers have it
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


async def _follow(log: _Log) -> None:
    def on_frame(leader: asyncio.WriteTransport, number: int, payload: bytes) -> None:
        log.append(payload)
        leader.write(_FRAME.pack(0, number))

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Frames(on_frame), "127.0.0.1", 0)
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def _lead(log: _Log, ports: Sequence[int]) -> None:
    leader = _Leader(log)
    await leader.connect(ports)
    server = new_server()
    handlers: dict[str, Any] = {
        PIPELINE: grpc.stream_stream_rpc_method_handler(leader.pipeline),
        UNARY: grpc.unary_unary_rpc_method_handler(leader.unary),
    }
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "floor.Floor", {path.rpartition("/")[2]: each for path, each in handlers.items()}
            )
        ]
    )
    port = server.listen("127.0.0.1:0")
    await server.start()
    print(f"ready {port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run the process named on the command line until it is ended."""
    _, path, role, *ports = sys.argv
    log = _Log(Path(path))
    if role == "leader":
        uvloop.run(_lead(log, [*map(int, ports[0].split(","))]))
    else:
        uvloop.run(_follow(log))


if __name__ == "__main__":
    main()
