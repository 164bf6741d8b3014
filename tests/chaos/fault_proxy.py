"""A network that can be broken: TCP proxies on loopback, one for each ordered pair of members.

Owns the listening ports, the connections through them, and what each direction does with bytes:
pass them, hold them back, swallow them, delay or slow them, or reset the connection. Knows nothing
of what the bytes mean, nor when or why a direction is broken.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

_CHUNK_BYTES = 64 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Mode(IntEnum):
    """What a direction does with bytes; of several faults at once the largest number counts."""

    PASS = 0
    SLOW = 1
    """Deliver late (`delay_s`) and at most `bytes_per_s`."""
    HOLD = 2
    """Deliver nothing; what was sent arrives when the fault ends, however old it is by then."""
    DROP = 3
    """Swallow everything, ends of connections too. Connections that lost bytes are reset when the
    fault ends, because a TCP stream with a hole in it does not exist."""
    RESET = 4
    """Reset what is connected, and every new connection as soon as it is made."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """A mode; for `Mode.SLOW` also seconds for each chunk and bytes a second (0: no limit)."""

    mode: Mode = Mode.PASS
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


PASS = Behaviour()


@dataclass(slots=True, eq=False)
class Direction:
    """One way through a proxy; wakes those who wait when its behaviour changes."""

    behaviour: Behaviour = PASS
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def become(self, behaviour: Behaviour) -> None:
        """Behave so from now on."""
        self.behaviour = behaviour
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def mode(self) -> Mode:
        return self.behaviour.mode

    async def until_not(self, *modes: Mode) -> None:
        while self.mode in modes:
            await self.changed.wait()


@dataclass(slots=True, eq=False)
class _Connection:
    """Both ends of one proxied connection. `has_hole`: bytes of it were swallowed."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    has_hole: bool = False

    def reset(self) -> None:
        """Close both ends the hard way: the peers see ECONNRESET, not an orderly end."""
        for writer in (self.client, self.server):
            if writer is not None and not writer.is_closing():
                opened: socket.socket = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                writer.transport.abort()

    def close(self) -> None:
        """Close both ends in good order."""
        for writer in (self.client, self.server):
            if writer is not None:
                writer.close()


class LinkProxy:
    """Proxies connections that one member makes to another: listens on `port`, dials `target`.

    `forward` carries what the dialling member sends, `backward` what it is answered.
    """

    def __init__(self, target_port: int) -> None:
        self.forward = Direction()
        self.backward = Direction()
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        """Listen on a free loopback port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def apply(self, forward: Behaviour, backward: Behaviour) -> None:
        """Change both directions; reset connections that can't go on."""
        was_dropping = Mode.DROP in (self.forward.mode, self.backward.mode)
        self.forward.become(forward)
        self.backward.become(backward)
        modes = (forward.mode, backward.mode)
        if Mode.RESET in modes:
            self._reset_where(lambda _: True)
        elif was_dropping and Mode.DROP not in modes:
            self._reset_where(lambda connection: connection.has_hole)

    def _reset_where(self, condition: Callable[[_Connection], bool]) -> None:
        for connection in list(self._connections):
            if condition(connection):
                connection.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection(writer)
        self._connections.add(connection)
        try:
            await self._carry(connection, reader)
            connection.close()
        except (OSError, asyncio.CancelledError):
            pass  # cancelled by `close` alone, and asyncio would report that as a failure
        finally:
            self._connections.discard(connection)
            self._tasks.discard(task)
            connection.reset()

    async def _carry(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        """Dial the target once the way there is open, then pump both ways until one end closes.

        Raises OSError if an end was reset, or the target refuses.
        """
        if Mode.RESET in (self.forward.mode, self.backward.mode):
            raise ConnectionResetError
        await self.forward.until_not(Mode.HOLD, Mode.DROP)
        server_reader, connection.server = await asyncio.open_connection(
            "127.0.0.1", self._target_port
        )
        pumps = [
            asyncio.create_task(_pump(reader, connection.server, self.forward, connection)),
            asyncio.create_task(_pump(server_reader, connection.client, self.backward, connection)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        for pump in done:
            pump.result()


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    direction: Direction,
    connection: _Connection,
) -> None:
    """Carry one direction of one connection until its source ends."""
    while True:
        try:
            data = await reader.read(_chunk_bytes(direction.behaviour))
        except OSError:
            await direction.until_not(Mode.HOLD, Mode.DROP)
            raise
        if direction.mode is Mode.DROP:
            connection.has_hole = True
            if not data:
                await direction.until_not(Mode.DROP)
            continue
        await direction.until_not(Mode.HOLD, Mode.DROP)
        if not data:
            return
        await _slow_down(direction.behaviour, len(data))
        if writer.is_closing():
            raise ConnectionResetError
        writer.write(data)
        await writer.drain()


def _chunk_bytes(behaviour: Behaviour) -> int:
    """How much to take at a time: a twentieth of a second's worth on a slow link."""
    if not behaviour.bytes_per_s:
        return _CHUNK_BYTES
    return max(1, min(_CHUNK_BYTES, int(behaviour.bytes_per_s / 20)))


async def _slow_down(behaviour: Behaviour, size: int) -> None:
    wait_s = behaviour.delay_s
    if behaviour.bytes_per_s:
        wait_s += size / behaviour.bytes_per_s
    if wait_s:
        await asyncio.sleep(wait_s)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One fault of the network: what these ordered pairs (who sends, who receives) do meanwhile."""

    pairs: frozenset[tuple[int, int]]
    behaviour: Behaviour


class FaultNetwork:
    """Proxies between all members, and between their clients (member `CLIENTS`) and each of them.

    `ports` are where members listen for clients, `peer_ports` where they listen for each other.

    Bytes from i to j travel forward through the link (i, j) and backward through the link (j, i),
    so that a one-way cut hits requests of the one and answers to the other.
    """

    CLIENTS = 0

    def __init__(self, ports: Mapping[int, int], peer_ports: Mapping[int, int]) -> None:
        self._links = {(self.CLIENTS, target): LinkProxy(port) for target, port in ports.items()}
        self._links |= {
            (source, target): LinkProxy(port)
            for target, port in peer_ports.items()
            for source in peer_ports
            if source != target
        }
        self._cuts: list[Cut] = []

    async def start(self) -> None:
        for link in self._links.values():
            await link.start()

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def endpoint(self, source: int, target: int) -> str:
        return f"127.0.0.1:{self._links[source, target].port}"

    def cut(self, cut: Cut) -> None:
        """Begin a fault; faults add up until each is healed."""
        self._cuts.append(cut)
        self._apply()

    def heal(self, cut: Cut) -> None:
        """End a fault; unknown and ended ones are ignored."""
        if cut in self._cuts:
            self._cuts.remove(cut)
            self._apply()

    def heal_all(self) -> None:
        self._cuts.clear()
        self._apply()

    def _apply(self) -> None:
        for (source, target), link in self._links.items():
            wanted = self._behaviour(source, target), self._behaviour(target, source)
            if wanted != (link.forward.behaviour, link.backward.behaviour):
                link.apply(*wanted)

    def _behaviour(self, sender: int, receiver: int) -> Behaviour:
        """The worst that any fault does to this pair."""
        active = [cut.behaviour for cut in self._cuts if (sender, receiver) in cut.pairs]
        return max(active, key=lambda behaviour: behaviour.mode, default=PASS)
