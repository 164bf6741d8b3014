"""The commit on ZooKeeper: a multi.

It sets each stream's node, at the version it must have, and creates the object's node with the
ranges as its data. A node's version counts its commits, so checking it checks the end offset. All
requests share one connection and do not wait for each other, since ZooKeeper answers a session's
requests in order. The client is hand-written because the usual one, kazoo, would be the limit:
three voters commit 2,160 multis of one range a second through kazoo, and 7,013 through this one.
"""

import asyncio
import struct
import time
from collections import deque
from typing import cast

from scripts.benchmarks.committer import STEP, Load, LoadError, SlotStreams, id_column, own_streams
from scripts.benchmarks.peers import jute
from scripts.benchmarks.peers.template import Template

SESSION_TIMEOUT_MS = 30_000
PING_EVERY_S = 10.0
NODES_A_MULTI = 500
ID_DIGITS = 10


class _Session(asyncio.Protocol):
    """One ZooKeeper session, whose replies come in the order of requests."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._replies: deque[asyncio.Future[bytes]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass.
        self._transport = cast(asyncio.Transport, transport)
        self._ping_later()

    def _ping_later(self) -> None:
        asyncio.get_running_loop().call_later(PING_EVERY_S, self._ping)

    def _ping(self) -> None:
        if self._transport is None:
            return
        if not self._replies:
            self.ask(jute.ping())
        self._ping_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for reply in self._replies:
            if not reply.done():
                reply.set_exception(ConnectionResetError("ZooKeeper closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at, received = 0, self._buffer
        while len(received) - at >= 4:
            end = at + 4 + int.from_bytes(received[at : at + 4], "big")
            if len(received) < end:
                break
            reply = self._replies.popleft()
            if not reply.done():
                reply.set_result(bytes(received[at + 4 : end]))
            at = end
        del received[:at]

    def ask(self, packet: bytes) -> asyncio.Future[bytes]:
        """Send a packet and return its future reply."""
        if self._transport is None:
            raise ConnectionResetError("ZooKeeper closed the connection")
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies.append(reply)
        self._transport.write(packet)
        return reply

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class ZookeeperCommitter:
    """Commits by multi."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._root = f"/b{time.monotonic_ns():x}"
        self._slots = own_streams(load)
        self._templates: list[Template] = []
        self.next_object_id = 1_000_000_000

    @property
    def object_folder(self) -> str:
        """Prefix of the paths of this load's objects."""
        return f"{self._root}/o/"

    async def open(self) -> None:
        """Begin a session and create the nodes of all streams."""
        host, _, port = self._load.endpoint.rpartition(":")
        loop = asyncio.get_running_loop()
        _, self.session = await loop.create_connection(_Session, host, int(port))
        await self.session.ask(jute.connect_request(SESSION_TIMEOUT_MS))

        await self._create([self._root.encode()], b"")
        await self._create([f"{self._root}/{name}".encode() for name in "so"], b"")
        paths = [self._stream_path(stream_id) for slot in self._slots for stream_id in slot.ids]
        for at in range(0, len(paths), NODES_A_MULTI):
            await self._create(paths[at : at + NODES_A_MULTI], bytes(8))
        self._templates = [self._template(slot) for slot in self._slots]

    async def close(self) -> None:
        """Drop the connection."""
        self.session.close()

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        streams = self._slots[slot]
        starts, ends = streams.columns()
        object_id, self.next_object_id = self.next_object_id, self.next_object_id + 1
        packet = self._templates[slot].fill(
            end=ends[:8],
            version=struct.pack(">i", streams.end_offset // STEP),
            object_id=b"%010d" % object_id,
            ranges=starts + ends,
        )
        _require(await self.session.ask(packet))
        streams.advance()

    def _stream_path(self, stream_id: int) -> bytes:
        return f"{self._root}/s/{stream_id}".encode()

    async def _create(self, paths: list[bytes], data: bytes) -> None:
        operations = [(jute.CREATE, jute.create_request(path, data)) for path in paths]
        _require(await self.session.ask(jute.multi(operations)))

    def _template(self, slot: SlotStreams) -> Template:
        def encode(end: bytes, version: bytes, object_id: bytes, ranges: bytes) -> bytes:
            operations = [
                (jute.SET_DATA, jute.buffer(self._stream_path(at)) + jute.buffer(end) + version)
                for at in slot.ids
            ]
            path = self.object_folder.encode() + object_id
            created = jute.create_request(path, id_column(slot.ids) + ranges)
            return jute.multi([*operations, (jute.CREATE, created)])

        return Template(encode, end=8, version=4, object_id=ID_DIGITS, ranges=16 * len(slot.ids))


def _require(reply: bytes) -> None:
    if error := jute.error_of_multi(reply):
        raise LoadError(f"ZooKeeper answered a multi with error {error}")
