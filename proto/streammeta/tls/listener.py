"""Listener of one plane: takes connections, each over TLS or in plain text, as its first byte says.

Each connection gets the certificates that are in use when it comes, so that they may be replaced.
Bounds the handshakes under way, and begins each once its first message is there. Knows nothing of
what the connections carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from streammeta.tls.handshakes import (
    HANDSHAKE,
    HandshakePlaces,
    first_byte,
    wait_for_hello,
)

HANDSHAKES_MAX = 64
"""Connections that have not shown what they are; more are closed as soon as they are made."""

HANDSHAKES_MAX_PER_HOST = 32
"""The same of one host: one that shows nothing leaves room for the others."""

HANDSHAKE_TIMEOUT_S = 2.0
"""Time for a handshake while many are under way, in seconds."""

HANDSHAKE_PATIENCE_S = 10.0
"""Time for a handshake while few are: a peer that is starved is not made to begin again."""

_BACKLOG = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of a listener's handshakes; those of a busy one are wider."""

    handshakes: int = HANDSHAKES_MAX
    handshakes_of_host: int = HANDSHAKES_MAX_PER_HOST
    handshake_s: float = HANDSHAKE_TIMEOUT_S
    handshake_patience_s: float = HANDSHAKE_PATIENCE_S
    """Time for a handshake while less than half of the places are taken."""
    backlog: int = _BACKLOG
    """Connections that wait to be taken."""


_PAUSE_S = 0.1


@dataclass(slots=True, kw_only=True)
class ListenerTls:
    """Protection of new connections; replaced while connections are taken."""

    listening: ssl.SSLContext | None = None
    """None: connections are taken in plain text alone."""
    takes_plain_text: bool = True
    """Connections in plain text are taken as well."""


class ConnectionTls(Protocol):
    """What a listener asks for each connection."""

    @property
    def listening(self) -> ssl.SSLContext | None:
        """Context of a connection that comes now; None: plain text."""
        ...

    @property
    def takes_plain_text(self) -> bool:
        """Whether connections in plain text are taken as well."""
        ...


class Listener:
    """Takes connections at an address; `factory` makes the protocol of each, given its host.

    `complain` is told of those that are refused: host, event, reason. Events are
    `too_many_handshakes`, `too_many_connections` and `handshake_failed`.
    """

    def __init__(
        self,
        tls: ConnectionTls,
        factory: Callable[[str], asyncio.Protocol],
        complain: Callable[[str, str, str], None],
        *,
        bounds: Bounds = Bounds(),
        has_room: Callable[[int], bool] = lambda handshakes: True,
    ) -> None:
        """`has_room` says whether one more may come, given the handshakes under way."""
        self._bounds = bounds
        self._may_come = has_room
        self._tls = tls
        self._factory = factory
        self._complain = complain
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._untaken: set[socket.socket] = set()
        """Connections whose task has not begun: one that is cancelled before never does."""
        self._places = HandshakePlaces()
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """Those under way, each with its host."""

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT; return the port, chosen if it is 0.

        Raises:
            OSError: the address is taken, or is none of this host's.
        """
        # Resolving a name may wait for DNS.
        port = await asyncio.to_thread(self.bind, address)
        self.begin()
        return port

    def bind(self, address: str) -> int:
        """Take HOST:PORT, and no connection until `begin`; else as `start`."""
        host, _, port = address.rpartition(":")
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # getaddrinfo may return an address twice.
        places = dict.fromkeys((each[0], each[4]) for each in found)
        try:
            for family, place in places:
                made = _listening(family, place, self._bounds.backlog, is_alone=len(places) == 1)
                self._sockets.append(made)
        except OSError:
            self._close()
            raise
        bound: int = self._sockets[0].getsockname()[1]
        return bound

    def begin(self) -> None:
        """Take connections at what was bound."""
        loop = asyncio.get_running_loop()
        self._accepting = [loop.create_task(self._accept(each)) for each in self._sockets]

    async def stop(self) -> None:
        """Take no more connections."""
        tasks = [*self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        # Wait for all tasks, so that none uses a socket that is closed next.
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        for each in (*self._sockets, *self._untaken):
            each.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                opened, address = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(_PAUSE_S)  # no descriptor is free: others will be closed
                continue
            host = str(address[0])
            if not self._may_come(len(self._handshakes)):
                opened.close()
                self._complain(host, "too_many_connections", "as many as may be are open")
                continue
            if not self._has_room(host):
                opened.close()
                reason = f"{len(self._handshakes)} are under way"
                self._complain(host, "too_many_handshakes", reason)
                continue
            self._untaken.add(opened)
            task = loop.create_task(self._take(opened, host))
            self._handshakes[task] = host
            task.add_done_callback(self._handshakes.pop)

    def _has_room(self, host: str) -> bool:
        from_host = sum(other == host for other in self._handshakes.values())
        bounds = self._bounds
        return len(self._handshakes) < bounds.handshakes and from_host < bounds.handshakes_of_host

    def _limit_s(self, host: str) -> float:
        """Return the time for a new handshake: less while its places are scarce."""
        bounds = self._bounds
        from_host = sum(other == host for other in self._handshakes.values())
        is_roomy = (
            len(self._handshakes) <= bounds.handshakes // 2
            and from_host <= bounds.handshakes_of_host // 2
        )
        return bounds.handshake_patience_s if is_roomy else bounds.handshake_s

    async def _take(self, opened: socket.socket, host: str) -> None:
        loop = asyncio.get_running_loop()
        self._untaken.discard(opened)
        untaken: socket.socket | None = opened
        limit_s = self._limit_s(host)
        try:
            async with asyncio.timeout(limit_s):
                context = await self._wanted(opened)
                made = partial(self._factory, host)
                if context is None:
                    untaken = None  # its protocol closes it from here on
                    await loop.connect_accepted_socket(made, opened)
                    return
                await wait_for_hello(opened)
                async with self._places.take(host):
                    untaken = None
                    await loop.connect_accepted_socket(made, opened, ssl=context)
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no handshake within {limit_s:g} s"
            self._complain(host, "handshake_failed", reason)
        finally:
            if untaken is not None:
                untaken.close()

    async def _wanted(self, opened: socket.socket) -> ssl.SSLContext | None:
        """Return the context for a connection, None for plain text."""
        # Only one kind is accepted, so the first byte decides nothing.
        if not self._tls.takes_plain_text or self._tls.listening is None:
            return self._tls.listening
        return self._tls.listening if await first_byte(opened) == HANDSHAKE else None


def _listening(
    family: socket.AddressFamily, place: tuple[object, ...], backlog: int, *, is_alone: bool
) -> socket.socket:
    """Return a socket at one address; one of IPv6 alone takes IPv4 too where it has any address."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an ended process may linger at the port.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Systems without this option keep their default.
            with contextlib.suppress(AttributeError, OSError):
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_alone)
        made.bind(place)
        made.listen(backlog)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
