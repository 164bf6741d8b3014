"""Listener for Kafka clients, in plain text or over TLS with files that may be replaced.

Connections that come later get the certificate, and the authorities, that are in the files by then;
those that are open stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable

from streammeta.client.resources.daemon_threads import run_blocking
from streammeta.tls.files import TlsError, TlsFiles, WatchedTls

LOOKED_AT_EVERY_S = 5.0
"""Time between two looks at the files, in seconds."""

_log = logging.getLogger(__name__)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class KafkaListener:
    """Takes connections for `serve`. With `files` over TLS, by a certificate if `is_mutual`."""

    def __init__(self, serve: Serve, files: TlsFiles | None, *, is_mutual: bool = True) -> None:
        """Read the files. Raises `TlsError`."""
        self._serve = serve
        self._is_mutual = is_mutual
        self._watched = None if files is None else WatchedTls(files, "listen-tls")
        self._servers: list[asyncio.Server] = []
        self._looking: asyncio.Task[None] | None = None

    @property
    def certificate_ends_s(self) -> float | None:
        """End of the certificate in use, in seconds since 1970; None without a known one."""
        facts = None if self._watched is None else self._watched.contents.facts
        return None if facts is None else facts.not_after.timestamp()

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, chosen if it is 0. Raises `OSError`."""
        server = await asyncio.start_server(self._serve, host, port, ssl=self._context())
        self._servers = [server]
        if self._watched is not None:
            self._looking = asyncio.create_task(self._look_again(self._watched))
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Take no more connections."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        for server in self._servers:
            server.close()

    def _context(self) -> ssl.SSLContext | None:
        if self._watched is None:
            return None
        context = self._watched.contents.context(ssl.PROTOCOL_TLS_SERVER)
        if not self._is_mutual:
            context.verify_mode = ssl.CERT_NONE
        return context

    async def _look_again(self, watched: WatchedTls) -> None:
        while True:
            await asyncio.sleep(LOOKED_AT_EVERY_S)
            try:
                if await run_blocking(watched.look):
                    await self._renew()
                    _log.info("new connections get the certificate that replaced the one before")
            except (TlsError, OSError) as error:
                _log.error("certificates not replaced: %s", error)

    async def _renew(self) -> None:
        """Take connections of the same sockets with the files that are in use now."""
        former, context = self._servers, self._context()
        sockets = [one.dup() for server in former for one in server.sockets]
        self._servers = [
            await asyncio.start_server(self._serve, sock=one, ssl=context) for one in sockets
        ]
        for server in former:
            server.close()
