"""Network that can be cut: one TCP relay before each controller.

A cut link is silent, like a network that drops packets: nothing is reset, and data in flight
arrives when the link heals. The process that owns a connection's other end identifies the peer, so
controllers and clients use the same addresses.
"""

import asyncio
import contextlib
from collections.abc import Mapping

import psutil

_CHUNK_BYTES = 64 * 1024


class Relays:
    """Relays by controller id. Bound to the event loop that makes them."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut: int | None = None
        self._whole = asyncio.Event()
        self._whole.set()

    async def start(self, node_id: int, port: int, target_port: int) -> None:
        """Forward connections to loopback `port` to the controller `node_id` on `target_port`."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(
                self._carry(node_id, target_port, reader, writer)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._servers.append(await asyncio.start_server(accept, "127.0.0.1", port))

    def cut(self, node_id: int) -> None:
        """Cut one controller off from all others."""
        self._cut = node_id
        self._whole.clear()

    def heal(self) -> None:
        """Reconnect the controller that was cut off."""
        self._cut = None
        self._whole.set()

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(
        self,
        target: int,
        target_port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        ends = frozenset({target, self._source(writer.get_extra_info("peername")[1])})
        upstream: asyncio.StreamWriter | None = None
        try:
            await self._link_up(ends)
            back, upstream = await asyncio.open_connection("127.0.0.1", target_port)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(ends, reader, upstream))
                pumps.create_task(self._pump(ends, back, writer))
        except* OSError:
            await self._link_up(ends)  # the other end learns of the error when the link heals
        finally:
            for end in filter(None, (writer, upstream)):
                end.transport.abort()

    async def _pump(
        self, ends: frozenset[int | None], reader: asyncio.StreamReader, to: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._link_up(ends)
            to.write(data)
            await to.drain()
        raise ConnectionResetError  # one side has closed, and the other must see it too

    async def _link_up(self, ends: frozenset[int | None]) -> None:
        while self._cut in ends and self._cut is not None:
            await self._whole.wait()

    def _source(self, port: int) -> int | None:
        for node_id, pid in self._pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = psutil.Process(pid).net_connections("tcp")  # gRPC uses IPv6 sockets
                if any(connection.laddr.port == port for connection in connections):
                    return node_id
        return None
