"""Client connections that end without a call, logged once a minute.

gRPC does not report failed handshakes: plain text, a foreign certificate, an incomplete handshake.
It reports every connection that begins and the connection of every call, so connections without
calls can be counted. Their reasons and origins are unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

INTERVAL_S = 60.0
"""Time between two lines of the log, in seconds."""

KNOWN_MAX = 16_384
"""Maximum number of remembered connections, far more than may be open.

The oldest is dropped first.
"""

_log = structlog.get_logger(component="rpc")


class UncalledConnections:
    """Counts connections over TLS by which no call has come.

    One whose first call is still to come counts until it does, so that the number is right only
    for as many as are not in that state.
    """

    def __init__(self, begun: Callable[[], int]) -> None:
        """`begun` returns the number of handshakes that have begun since the start."""
        self._begun = begun
        self._known: dict[str, None] = {}
        self._called = 0
        self._told = 0

    def called(self, peer: str) -> None:
        """Note that a call came from an address and port."""
        if peer in self._known:
            return
        self._called += 1
        # Address and port identify one connection, and its later calls must not count.
        self._known[peer] = None
        if len(self._known) > KNOWN_MAX:
            # Dicts keep the order of insertion. A dropped connection that calls again counts twice,
            # which only hides one.
            del self._known[next(iter(self._known))]

    def look(self) -> int:
        """Return the number of uncalled connections that are new since the last look."""
        uncalled = self._begun() - self._called
        # A call may be counted after the look in which its handshake was reported.
        new = max(0, uncalled - self._told)
        self._told += new
        return new

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if new := self.look():
                _log.info("client_connections_without_call", connections=new, seconds=INTERVAL_S)
