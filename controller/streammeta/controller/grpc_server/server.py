"""gRPC server over HTTP/2 on the event loop, without threads.

Accepts the handlers that gRPC's generated code registers. Begins calls in the order of arrival, a
limited number in each turn of the event loop, and rejects calls above its limits unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import random
from time import monotonic
from typing import Any, NamedTuple

import grpc

from streammeta.controller.grpc_server.call import Call
from streammeta.controller.grpc_server.connection import Connection
from streammeta.controller.grpc_server.limits import DEFAULT, Limits
from streammeta.controller.grpc_server.method import Method
from streammeta.controller.grpc_server.shares import Budget, Share, TurnQueue, take_calls
from streammeta.tls.files import TlsFiles
from streammeta.tls.listener import Bounds, Listener
from streammeta.tls.server_certificates import ServerCertificates

_BACKLOG = 1_024

_ABORT_S = 1.0
"""Time for transports to report that they are aborted, in seconds."""
_LOOK_S = 0.005

_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def open_connections() -> int:
    """Return how many connections the servers of this process have, handshakes aside."""
    return sum(len(server.connections) for server in _servers)


class _Details(NamedTuple):
    """The part of a call that its handler is found by."""

    method: str
    invocation_metadata: tuple[()] = ()


class Server:
    """Serves clients at any number of addresses."""

    def __init__(self, limits: Limits = DEFAULT) -> None:
        self.limits = limits
        self.connections: set[Connection] = set()
        self.is_stopping = False
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._methods: dict[str, Method] = {}
        self._listeners: list[Listener] = []
        self._shares: list[Share] = []
        self._begun = self._begun_priority = 0
        self.budget = Budget(limits.work_a_turn, limits.work_a_turn_s)
        """Work that may still be done in this turn."""
        self._queue: TurnQueue[Connection] = TurnQueue()
        self._is_turn_due = self._do_calls_wait = False
        _servers.add(self)

    @property
    def calls(self) -> int:
        """Calls under way."""
        return sum(share.calls for share in self._shares)

    @property
    def held(self) -> int:
        """Bytes of requests that are not complete, or not taken by their handlers."""
        return sum(share.held for share in self._shares)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Serve these services."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Serve these methods of a service."""
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = Method.of(handler)

    def prioritize(self, paths: Sequence[str]) -> None:
        """Begin calls of these methods, such as `/a.Service/Method` before all other work.

        They have their own number of calls per turn and are never rejected for other calls.

        Raises:
            ValueError: none of the services has such a method.
        """
        for path in paths:
            handler = self._handler(path)
            if handler is None:
                raise ValueError(f"{path} is not a method of the services")
            self._methods[path] = Method.of(handler, is_priority=True)

    def method(self, path: str) -> Method | None:
        """Return the method at a path, None if there is none."""
        found = self._methods.get(path)
        if found is None and (handler := self._handler(path)) is not None:
            # Only existing methods are kept: paths come from callers.
            found = self._methods[path] = Method.of(handler)
        return found

    def _handler(self, path: str) -> grpc.RpcMethodHandler[Any, Any] | None:
        details: Any = _Details(path)
        return next(filter(None, (handler.service(details) for handler in self._handlers)), None)

    # -- listening

    def listen(
        self,
        address: str,
        tls: TlsFiles | ServerCertificates | None = None,
        *,
        asks_clients: bool = True,
    ) -> int:
        """Listen on `address`, HOST:PORT, and return the port, chosen if it is 0.

        `start` begins to serve.

        With `tls` every client must show a certificate of the authorities, unless `asks_clients` is
        False: then each call must carry a token. Without `tls` the listener is plain text.

        Raises:
            OSError: the address is in use, or does not belong to this host.
            TlsError: the TLS files are invalid.
        """
        shown = ServerCertificates(tls.load()) if isinstance(tls, TlsFiles) else tls
        limits, share = self.limits, self.add_share()
        listener = Listener(
            _ClientTls(shown, asks_clients=asks_clients),
            partial(self._new_connection, shown, share),
            _keep_quiet,
            bounds=Bounds(
                handshakes=limits.handshakes,
                handshakes_of_host=limits.handshakes_of_host,
                handshake_s=limits.handshake_s,
                handshake_patience_s=limits.handshake_s,
                backlog=_BACKLOG,
            ),
            has_room=lambda handshakes: share.connections + handshakes < limits.connections,
        )
        port = listener.bind(address)
        self._listeners.append(listener)

        return port

    def add_share(self) -> Share:
        """Return an equal part of the limits for one more listener."""
        self._shares.append(Share(self.limits))
        # Shares of the listeners before become smaller.
        for share in self._shares:
            share.divide(len(self._shares))
        return self._shares[-1]

    def _new_connection(
        self, shown: ServerCertificates | None, share: Share, host: str
    ) -> Connection:
        if shown is not None:
            shown.handshakes += 1
        return Connection(self, share, host)

    async def start(self) -> None:
        """Take connections."""
        for listener in self._listeners:
            listener.begin()

    async def stop(self, grace: float | None, hurried: asyncio.Event | None = None) -> None:
        """Accept no more connections and calls. Calls in flight have `grace` seconds to end.

        They have no more time once `hurried` is set.
        """
        self.is_stopping = True
        for listener in self._listeners:
            # First, so that no connection arrives after the server has asked the others to end.
            await listener.stop()
        for connection in tuple(self.connections):
            connection.retire()
        await self._emptied(grace or 0.0, hurried)
        for connection in tuple(self.connections):
            connection.abort()
        await self._emptied(_ABORT_S)

    async def _emptied(self, within_s: float, hurried: asyncio.Event | None = None) -> None:
        """Wait until no connection is left, and no longer than it may take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.connections and not (hurried and hurried.is_set()):  # noqa: ASYNC110 - ends in time
                    await asyncio.sleep(_LOOK_S)

    # -- turns

    def enqueue(self, call: Call, share: Share) -> None:
        """Begin a call now, in a later turn, or never."""
        limits, waiting = self.limits, len(share.waiting)
        if call.method.is_priority:
            # After those that wait, so that priority calls keep their order.
            if share.priority or self._begun_priority >= limits.begun_a_turn:
                share.priority.append(call)
                self._do_calls_wait = True
            else:
                self._begun_priority += 1
                call.start()
        elif not waiting and self._begun < limits.begun_a_turn:
            self._begun += 1
            call.start()
        elif waiting >= limits.waiting_most or (
            waiting >= limits.waiting_some
            and random() * (limits.waiting_most - limits.waiting_some)
            < waiting - limits.waiting_some
        ):
            call.drop()
            return
        else:
            share.waiting.append(call)
            self._do_calls_wait = True

        self.note_turn()

    def ask(self, connection: Connection) -> None:
        """Do a connection's work now if the turn has room for it, else in a later one."""
        # Not ahead of connections that wait already.
        if self._queue or self.budget.is_spent:
            self.wait_turn(connection)
        else:
            self._run(connection)

    def wait_turn(self, connection: Connection) -> None:
        """Do a connection's work in a later turn."""
        connection.wait()
        self._queue.push(connection)
        self.note_turn()

    def note_turn(self) -> None:
        """Begin another turn with the next one of the event loop."""
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Begin waiting calls, and continue the work of waiting connections."""
        self._begun = self._begun_priority = 0
        self._is_turn_due = False
        self.budget.renew()
        if self._do_calls_wait:
            self._begin_calls()
        if self._queue:
            self._work()
        if self._begun or self._begun_priority or self._queue:
            self.note_turn()

    def _begin_calls(self) -> None:
        most, shares = self.limits.begun_a_turn, self._shares
        for call in take_calls((share.priority for share in shares), most):
            self._begun_priority += 1
            call.start()
        for call in take_calls((share.waiting for share in shares), most):
            self._begun += 1
            call.start()
        self._do_calls_wait = any(share.priority or share.waiting for share in shares)

    def _work(self) -> None:
        while self._queue and not self.budget.is_spent:
            self._run(self._queue.pop())

    def _run(self, connection: Connection) -> None:
        budget, begun = self.budget, monotonic()
        more = connection.work(min(budget.units, self.limits.work_of_connection))
        if more:
            self._queue.push(connection)
        if budget.spend(connection.session.spent, monotonic() - begun) or more:
            self.note_turn()


class _ClientTls:
    """Contexts of a listener's new connections: those in use when each comes."""

    takes_plain_text = False

    def __init__(self, shown: ServerCertificates | None, *, asks_clients: bool) -> None:
        self._shown = shown
        self._asks_clients = asks_clients

    @property
    def listening(self) -> ssl.SSLContext | None:
        """Return the TLS context for a new connection, None for plain text."""
        if self._shown is None:
            return None
        return self._shown.context(asks_clients=self._asks_clients)


def _keep_quiet(host: str, event: str, reason: str) -> None:
    """Log nothing about a refused connection, because strangers could fill the log."""


def new_server(connection_age_ms: int | None = None, connections_max: int | None = None) -> Server:
    """Return a server without services and addresses.

    Each listener has at most `connections_max` connections, `CONNECTIONS_MAX` for None. A
    connection of age `connection_age_ms` accepts no more calls and ends after a grace period, so
    clients reconnect with their current certificates. None: there is no age limit.
    """
    limits = DEFAULT
    if connection_age_ms is not None:
        limits = replace(limits, age_s=connection_age_ms / 1000)
    if connections_max is not None:
        limits = replace(limits, connections=connections_max)
    return Server(limits)
