"""Listener for Kafka clients, in plain text or over TLS, with files that are reloaded.

New connections use the certificate and the authorities that are in the files at that time. Open
connections are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable

from streammeta.client.parts import run_blocking
from streammeta.tls.files import TlsError, TlsFiles, WatchedTls

CHECK_INTERVAL_S = 5.0
"""Interval between two checks of the files, in seconds."""

_log = logging.getLogger(__name__)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class KafkaListener:
    """Listener that passes connections to `serve`.

    `files` enable TLS, `is_mutual` requires client certificates.
    """

    def __init__(self, serve: Serve, files: TlsFiles | None, *, is_mutual: bool = True) -> None:
        """Read the files. Raises `TlsError`."""
        self._serve = serve
        self._is_mutual = is_mutual
        self._watched = None if files is None else WatchedTls(files, "listen-tls")
        self._servers: list[asyncio.Server] = []
        self._looking: asyncio.Task[None] | None = None

    @property
    def certificate_ends_s(self) -> float | None:
        """End of the current certificate's validity, in seconds since 1970; None if not known."""
        facts = None if self._watched is None else self._watched.contents.facts
        return None if facts is None else facts.not_after.timestamp()

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, a free one if `port` is 0. Raises `OSError`."""
        server = await asyncio.start_server(self._serve, host, port, ssl=self._context())
        self._servers = [server]
        if self._watched is not None:
            self._looking = asyncio.create_task(self._look_again(self._watched))
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop accepting connections."""
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
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                if await run_blocking(watched.look):
                    await self._renew()
                    _log.info("loaded the new certificate for new connections")
            except (TlsError, OSError) as error:
                _log.error(
                    "loading the new certificate failed, keeping the previous one: %s", error
                )

    async def _renew(self) -> None:
        """Accept connections on the same sockets with the current files."""
        # A duplicated socket keeps accepting, so clients see no interruption while the server
        # changes.
        former, context = self._servers, self._context()
        sockets = [sock.dup() for server in former for sock in server.sockets]
        self._servers = [
            await asyncio.start_server(self._serve, sock=sock, ssl=context) for sock in sockets
        ]
        for server in former:
            server.close()
