"""HTTP listener for probes, scrapes and pages, with bounds on connections, requests and work.

Every request is authenticated, by the connection's certificate. A connection carries one request
and ends within a few seconds, so slow senders and readers hold no resources for long. Answers are
reused for a moment, and few are computed at a time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from asyncio import BaseTransport
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar, cast

import structlog
from aiohttp import web

from streammeta.controller.errors import ApiError
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.tls.listener import Listener, ListenerTls


@dataclass(frozen=True, slots=True)
class HttpContext:
    """Handshake of one connection, as `streammeta.controller.trust.authenticator.CallContext`."""

    transport: BaseTransport

    def invocation_metadata(self) -> None:
        """Return the caller's metadata: none, because HTTP headers do not authenticate."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the facts that the handshake has proven, under gRPC's names."""
        wrapped = self.transport.get_extra_info("ssl_object")
        # gRPC's name for plain text, so that one authenticator serves both listeners.
        if wrapped is None:
            return {"transport_security_type": [b"insecure"]}
        shown = wrapped.getpeercert() or {}
        # The authenticator reads PEM, which gRPC passes.
        pem = ssl.DER_cert_to_PEM_cert(wrapped.getpeercert(binary_form=True) or b"")
        names = shown.get("subjectAltName", ())
        subject = (pair for part in shown.get("subject", ()) for pair in part)
        return {
            "transport_security_type": [b"ssl"],
            "x509_pem_cert": [pem.encode()],
            "x509_common_name": [value.encode() for key, value in subject if key == "commonName"],
            "peer_uri": [value.encode() for kind, value in names if kind == "URI"],
            "peer_dns": [value.encode() for kind, value in names if kind == "DNS"],
        }


KEPT_S = 1.0
"""Time for which an answer is reused, in seconds: ten open pages cost as much as one."""

AT_A_TIME = 4
"""Maximum number of answers computed at a time. Further ones wait."""

ANSWERS_MAX = 64
"""Maximum number of cached answers."""

_T = TypeVar("_T")


class ResponseCache(Generic[_T]):
    """Cached answers by request."""

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._answers: dict[Hashable, tuple[float, asyncio.Future[_T]]] = {}
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def get(self, asked: Hashable, make: Callable[[], Awaitable[_T]]) -> _T:
        """Return a recent answer, or the result of `make`, which concurrent callers share.

        Its exception is raised to all of them and is not cached.
        """
        found = self._answers.get(asked)
        # An answer in flight is shared even when it is older than the limit.
        if found is None or (found[1].done() and time.monotonic() >= found[0] + self._kept_s):
            self._answers.pop(asked, None)
            # Queries are chosen by callers. The oldest entry goes first: dicts keep the order of
            # insertion.
            while len(self._answers) >= ANSWERS_MAX:
                self._answers.pop(next(iter(self._answers)))
            found = (time.monotonic(), asyncio.ensure_future(self._made(asked, make)))
            self._answers[asked] = found
        # A caller that leaves must not cancel the answer for the others.
        return await asyncio.shield(found[1])

    async def _made(self, asked: Hashable, make: Callable[[], Awaitable[_T]]) -> _T:
        try:
            async with self._turns:
                return await make()
        # Also on cancellation, or the key would return a cancelled future for a second.
        except BaseException:
            self._answers.pop(asked, None)
            raise


CONNECTIONS_MAX = 64
"""Maximum number of connections. Further ones are closed at once."""

CONNECTIONS_MAX_PER_HOST = 16
"""Maximum number of connections of one host, so that one host cannot shut out the probes."""

CONNECTION_AGE_S = 5.0
"""Maximum age of a connection, in seconds, also during a request."""

HEADER_BYTES_MAX = 8 << 10
"""Maximum length of a request line and of a header field, in bytes."""

HEADERS_MAX = 64
"""Maximum number of header fields of a request."""

REQUEST_BYTES_MAX = 64 << 10
"""Maximum number of bytes read from a connection. Requests have no body."""

STOP_TIMEOUT_S = 1.0
"""Time for pending answers when the listener stops, in seconds."""

_SAID_MAX = 1000

_log = structlog.get_logger(component="http")

# Defects are logged here as JSON, so aiohttp's own log lines would only repeat them.
_silent = logging.getLogger("streammeta.http")
_silent.disabled = True


@dataclass(frozen=True, slots=True)
class Page:
    """Answer to a request."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    kept_s: int = 0
    """Seconds for which the caller may cache it."""


@dataclass(frozen=True, slots=True)
class Route:
    """Function that builds a page from the query of a request, and the name of its access rule."""

    rule: str
    make: Callable[[Mapping[str, str]], Awaitable[Page]]


Pages: TypeAlias = Mapping[str, Route]
"""Routes by path, such as `/livez`."""

CONTENT_POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
"""Content security policy: only resources of this listener, and no inline scripts."""


class HttpPlane:
    """Listener that serves pages at one address."""

    def __init__(self, tls: ListenerTls, authenticator: Authenticator, pages: Pages) -> None:
        self._tls = tls
        self._authenticator = authenticator
        self._pages = pages
        self._listener: Listener | None = None
        self._server: _Server | None = None
        self._open: dict[asyncio.Protocol, str] = {}
        """Open connections with their hosts."""
        self._said: set[tuple[str, str]] = set()
        self.refused: Counter[str] = Counter()
        """Number of rejected connections by event."""

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._open)

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT and return the port, chosen by the system if it is 0.

        Raises:
            OSError: the address is in use, or does not belong to this host.
        """
        self._server = _Server(self._handle, self._lost)
        self._listener = Listener(self._tls, self._connected, self._complain)
        return await self._listener.start(address)

    async def stop(self) -> None:
        """Stop listening, and close the connections after their answers are sent."""
        if self._listener is not None:
            await self._listener.stop()
        if self._server is not None:
            # After the listener, so that no connection is accepted while others end.
            await self._server.shutdown(STOP_TIMEOUT_S)

    def _connected(self, host: str) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        assert self._server is not None
        # At most 64 connections are open, so counting is cheaper than a second table.
        from_host = sum(other == host for other in self._open.values())
        if len(self._open) >= CONNECTIONS_MAX or from_host >= CONNECTIONS_MAX_PER_HOST:
            reason = f"{len(self._open)} connections are open, {from_host} of this host"
            self._complain(host, "too_many_connections", reason)
            return _Refused()
        made = _Connection(self._server, partial(self._complain, host, "connection_broken"))
        self._open[made] = host
        # From the accept, so that a slow TLS handshake counts too.
        asyncio.get_running_loop().call_later(CONNECTION_AGE_S, self._end, made)
        return made

    def _end(self, connection: web.RequestHandler) -> None:
        """Close a connection that is too old. After a failed handshake there is only its record."""
        self._lost(connection)
        if connection.transport is not None:
            # Not close: a peer that does not read would keep the buffers until its TCP timeout.
            connection.transport.abort()

    def _lost(self, connection: web.RequestHandler) -> None:
        self._open.pop(connection, None)

    def _complain(self, host: str, event: str, reason: str) -> None:
        """Count an event, and log the first of each kind from each host."""
        self.refused[event] += 1
        # Hosts are chosen by callers, so the table is bounded and later ones are only counted.
        if (host, event) not in self._said and len(self._said) < _SAID_MAX:
            self._said.add((host, event))
            _log.warning(f"http_{event}", host=host, reason=reason)

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        page = await self._page(request)
        response = web.Response(
            body=page.body,
            status=page.status,
            headers={
                "Content-Type": page.content_type,
                "Cache-Control": f"private, max-age={page.kept_s}" if page.kept_s else "no-store",
                "Content-Security-Policy": CONTENT_POLICY,
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
            },
        )
        # One request per connection: an idle connection would keep its place.
        response.force_close()
        return response

    async def _page(self, request: web.BaseRequest) -> Page:
        # Before the route: no page may change anything, whatever its path.
        if request.method not in ("GET", "HEAD"):
            return Page(b"this listener is read only: GET and HEAD\n", 405)

        route = self._pages.get(request.path)
        if route is None:
            return Page(f"not found, available paths: {', '.join(self._pages)}\n".encode(), 404)

        assert request.transport is not None
        # Names of HTTP rules look like methods, so that audit and policy treat both alike.
        rule, context = f"streammeta.http.{route.rule}", HttpContext(request.transport)
        try:
            self._authenticator.authenticate(rule, context)
        except ApiError as error:
            return Page(f"{error}\n".encode(), 403)

        try:
            return await route.make(request.query)
        except Exception as error:  # noqa: BLE001 - the one place that answers for every defect
            _log.error("http_request_failed", path=request.path, exc_info=error)
            return Page(b"defect in the controller: see its log\n", 500)


class _Server(web.Server):
    """A server that reports the end of connections."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        on_lost: Callable[[web.RequestHandler], None],
    ) -> None:
        super().__init__(handler)
        self._on_lost = on_lost

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Report the end of a connection."""
        super().connection_lost(handler, exc)
        self._on_lost(handler)


class _Connection(web.RequestHandler):
    """A connection that is closed once it has sent more bytes than a request may have.

    Data after a rejected request would otherwise stay in memory until the connection ends.
    """

    __slots__ = ("_complain", "_left")

    def __init__(self, server: web.Server, complain: Callable[[str], None]) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            logger=_silent,
            access_log=_silent,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
            # aiohttp would read the rest of a rejected body for 10 s.
            lingering_time=0,
        )
        self._complain = complain
        self._left = REQUEST_BYTES_MAX

    def data_received(self, data: bytes) -> None:
        """Process received bytes up to the limit, then close the connection."""
        # Counted before parsing, because the parser buffers unfinished headers.
        self._left -= len(data)
        if self._left >= 0:
            super().data_received(data)
        elif self.transport is not None and not self.transport.is_closing():
            self._complain(f"it has sent more than {REQUEST_BYTES_MAX} bytes")
            self.transport.abort()


class _Refused(asyncio.Protocol):
    """A connection that is closed as soon as it is accepted."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's classes.
        cast(asyncio.WriteTransport, transport).abort()
