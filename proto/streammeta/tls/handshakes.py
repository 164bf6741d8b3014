"""TLS handshakes that a listener computes: bounded in number, and fair between hosts.

A handshake costs the event loop tenths of a millisecond before the other side has proven anything.
A caller can hold back its first message and send it on many connections at once. So a handshake
starts only when that message is complete and a place is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator

COMPUTED_MAX = 64
"""Maximum number of handshakes between their first message and their end."""

COMPUTED_MAX_PER_HOST = 32
"""The same for one host."""

BEGUN_A_TURN = 16
"""Maximum number of handshakes started in one turn of the event loop."""

COMPUTED_S = 2.0
"""Seconds for the rest of a handshake while more than half of the places are taken."""

HANDSHAKE = b"\x16"
"""First byte of a TLS connection. No plain-text frame begins with it."""

_RECORD_HEADER_BYTES = 5
_MESSAGE_HEADER_BYTES = 4


class HandshakePlaces:
    """Places of one listener for handshakes in progress."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()
        self._begun = 0
        self._is_turn_due = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Handshakes that wait for a place, by host. The first host is next."""

    @contextlib.asynccontextmanager
    async def take(self, host: str) -> AsyncIterator[None]:
        """Wait for a place and occupy it during the block.

        Raises:
            TimeoutError: the block takes too long while places are scarce.
        """
        await self._wait(host)
        try:
            # While places are scarce, a slow peer must not keep one.
            async with asyncio.timeout(COMPUTED_S if self._are_scarce_for(host) else None):
                yield
        finally:
            self._give_back(host)

    def _are_scarce_for(self, host: str) -> bool:
        return (
            self._taken.total() > COMPUTED_MAX // 2
            or self._taken[host] > COMPUTED_MAX_PER_HOST // 2
        )

    async def _wait(self, host: str) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, deque()).append(place)
        self._assign_places()
        try:
            await place
        except asyncio.CancelledError:
            # The place was handed out before the cancellation, so it is free again.
            if place.done() and not place.cancelled():
                self._give_back(host)
            raise

    def _give_back(self, host: str) -> None:
        self._taken[host] -= 1
        # Zeros would pile up with the number of hosts.
        if not self._taken[host]:
            del self._taken[host]
        self._assign_places()

    def _assign_places(self) -> None:
        """Give free places to waiting handshakes, one host after the other."""
        while self._taken.total() < COMPUTED_MAX and self._begun < BEGUN_A_TURN:
            for host in self._waiting:
                if self._taken[host] < COMPUTED_MAX_PER_HOST:
                    self._hand_to(host)
                    # The dictionary has changed, so begin again at its first host.
                    break
            else:
                return

    def _hand_to(self, host: str) -> None:
        places = self._waiting.pop(host)
        while places:
            place = places.popleft()
            if not place.done():  # else its connection has given up
                place.set_result(None)
                self._taken[host] += 1
                self._begun += 1
                self._note_turn()
                break
        if places:
            self._waiting[host] = places  # after the other hosts

    def _note_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            # call_soon runs in the next turn of the loop.
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._begun, self._is_turn_due = 0, False
        self._assign_places()


async def first_byte(opened: socket.socket) -> bytes:
    """Wait for the first byte without consuming it. Return nothing if the other side has closed."""
    await _wait_for_bytes(opened, 1)
    return opened.recv(1, socket.MSG_PEEK)


async def wait_for_hello(opened: socket.socket) -> None:
    """Wait until the first message of a handshake is complete, without consuming it.

    Also return if the other side has closed or sends no handshake, which then fails by itself.

    Raises:
        OSError: the message does not end in its first record, so that the handshake would wait
            for it while it occupies a place.
    """
    headers = _RECORD_HEADER_BYTES + _MESSAGE_HEADER_BYTES
    try:
        if await first_byte(opened) != HANDSHAKE:
            return
        await _wait_for_bytes(opened, headers)
        head = opened.recv(headers, socket.MSG_PEEK)
        # The other side has ended.
        if len(head) < headers:
            return

        record = int.from_bytes(head[3:5], "big")
        message = int.from_bytes(head[6:9], "big")
        if message + _MESSAGE_HEADER_BYTES > record:
            raise OSError("its first message is longer than its first TLS record")
        await _wait_for_bytes(opened, _RECORD_HEADER_BYTES + record)
    finally:
        # Otherwise the transport would wait for as many bytes each time.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def _wait_for_bytes(opened: socket.socket, number: int) -> None:
    """Wait until this many bytes are readable, or the end."""
    # The kernel wakes the loop once all bytes are there, so trickled bytes cost nothing.
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, number)
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(opened, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(opened)
