"""Listener: accepts connections, over TLS or in plain text depending on their first byte.

Each connection gets the certificates in use at its start, so that they may be replaced at any time.
The listener bounds the handshakes in progress, and starts each only after its first message is
complete. It does not know the protocol of the connections.
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
"""Maximum number of connections without a complete handshake. Further ones are closed at once."""

HANDSHAKES_MAX_PER_HOST = 32
"""The same for one host, so that a silent host leaves places for others."""

HANDSHAKE_TIMEOUT_S = 2.0
"""Seconds for a handshake while many are in progress."""

HANDSHAKE_PATIENCE_S = 10.0
"""Seconds for a handshake while few are, so that a starved peer need not start again."""

_BACKLOG = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of a listener's handshakes, wider for a busy listener."""

    handshakes: int = HANDSHAKES_MAX
    handshakes_of_host: int = HANDSHAKES_MAX_PER_HOST
    handshake_s: float = HANDSHAKE_TIMEOUT_S
    handshake_patience_s: float = HANDSHAKE_PATIENCE_S
    """Seconds for a handshake while less than half of the places are taken."""
    backlog: int = _BACKLOG
    """Connections that wait to be accepted."""


_PAUSE_S = 0.1


@dataclass(slots=True, kw_only=True)
class ListenerTls:
    """TLS settings for new connections, replaceable at any time."""

    listening: ssl.SSLContext | None = None
    """None accepts plain text only."""
    takes_plain_text: bool = True
    """Also accept connections in plain text."""


class ConnectionTls(Protocol):
    """Source of the TLS settings of each connection."""

    @property
    def listening(self) -> ssl.SSLContext | None:
        """Context for a new connection, None for plain text."""
        ...

    @property
    def takes_plain_text(self) -> bool:
        """Whether connections in plain text are accepted too."""
        ...


class Listener:
    """Accepts connections at an address. `factory` creates the protocol of each, given its host.

    `complain` is called for rejected connections: host, event, reason. Events are
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
        """`has_room` returns whether one more may be accepted, given the handshakes in progress."""
        self._bounds = bounds
        self._may_come = has_room
        self._tls = tls
        self._factory = factory
        self._complain = complain
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._untaken: set[socket.socket] = set()
        """Connections whose task has not started. A task cancelled before that never runs."""
        self._places = HandshakePlaces()
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """Handshakes in progress, each with its host."""

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT. Return the port, a free one if it is 0.

        Raises:
            OSError: the address is in use, or does not belong to this host.
        """
        # Resolving a name may wait for DNS.
        port = await asyncio.to_thread(self.bind, address)
        self.begin()
        return port

    def bind(self, address: str) -> int:
        """Bind HOST:PORT without accepting connections until `begin`, otherwise as `start`."""
        host, _, port = address.rpartition(":")
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )

        # getaddrinfo may return an address twice.
        places = dict.fromkeys((address[0], address[4]) for address in found)
        try:
            for family, place in places:
                made = _open_socket(family, place, self._bounds.backlog, is_alone=len(places) == 1)
                self._sockets.append(made)
        except OSError:
            self._close()
            raise
        bound: int = self._sockets[0].getsockname()[1]
        return bound

    def begin(self) -> None:
        """Accept connections at the bound address."""
        loop = asyncio.get_running_loop()
        self._accepting = [loop.create_task(self._accept(socket_)) for socket_ in self._sockets]

    async def stop(self) -> None:
        """Stop accepting connections."""
        tasks = [*self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        # Wait for all tasks, so that none uses a socket that is closed next.
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        for socket_ in (*self._sockets, *self._untaken):
            socket_.close()

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
                self._complain(
                    host, "too_many_connections", "the maximum number of connections is open"
                )
                continue

            if not self._has_room(host):
                opened.close()
                reason = f"{len(self._handshakes)} handshakes are in progress"
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
        """Return the time limit of a new handshake, shorter while places are scarce."""
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
            # One limit for all waits, so that a peer that trickles bytes gains nothing.
            async with asyncio.timeout(limit_s):
                context = await self._choose_context(opened)
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

    async def _choose_context(self, opened: socket.socket) -> ssl.SSLContext | None:
        """Return the context for a connection, None for plain text."""
        # Only one kind is accepted, so the first byte decides nothing.
        if not self._tls.takes_plain_text or self._tls.listening is None:
            return self._tls.listening
        return self._tls.listening if await first_byte(opened) == HANDSHAKE else None


def _open_socket(
    family: socket.AddressFamily, place: tuple[object, ...], backlog: int, *, is_alone: bool
) -> socket.socket:
    """Return a socket at one address. An IPv6 wildcard also accepts IPv4."""
    made = socket.socket(family, socket.SOCK_STREAM)

    try:
        # Connections of an ended process may linger at the port.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Systems without this option keep their default.
            with contextlib.suppress(AttributeError, OSError):
                # Alone it also accepts IPv4. With a socket for IPv4, the two would collide.
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_alone)
        made.bind(place)
        made.listen(backlog)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
