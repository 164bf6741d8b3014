"""Listener for the other controllers: passes their requests to the replica and sends its answers.

Bounds everything that a peer can use: connections, their time until the hello, requests in flight
per connection and kind, and queued answer bytes. A flood of one kind leaves room for the others.
Answers leave in the step that makes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, Protocol

import structlog

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.features import UNTOLD
from streammeta.controller.ids import NodeId
from streammeta.controller.peers import frames
from streammeta.controller.peers.addresses import PeerAddresses, VoterHosts
from streammeta.controller.peers.connection import FramedConnection, ProtocolError
from streammeta.controller.peers.dialled import IN_FLIGHT_MAX, Identity
from streammeta.controller.peers.hello import (
    OLDEST_VERSION,
    VERSION,
    Hello,
    HelloAnswer,
    HelloError,
    Purpose,
    Refusal,
)
from streammeta.controller.peers.wire import decode_request, encode_answer
from streammeta.controller.quorum.messages import Request, Response
from streammeta.controller.runtime.interfaces import Endpoints, Reply
from streammeta.controller.runtime.replication.peer_versions import PeerVersions
from streammeta.controller.tls.manager import PeerTls, StrangerError
from streammeta.tls.listener import Listener

CONNECTIONS_MAX = 96
"""Maximum number of connections. Further ones are closed immediately. Together with pending
handshakes they stay below the file descriptors reserved for peers."""

OTHERS_MAX = 64
"""The same for all hosts that are not a voter's. The rest is reserved for voters."""

HOST_MAX = 32
"""The same for one host that is not a voter's."""

VOTER_HOST_MAX = 48
"""The same for one voter's host, on which several controllers may run."""

SILENT_MAX = 64
"""Connections without a hello. Further ones are closed immediately."""

SILENT_MAX_PER_HOST = 32
"""The same for one host, so that a silent host leaves room for the others."""

HELLO_TIMEOUT_S = 2.0
"""Time limit for the hello of a connection while many are silent, in seconds."""

HELLO_PATIENCE = 5
"""Multiple of that limit for a starved peer while few connections are silent."""

STOP_TIMEOUT_S = 1.0
"""Time limit for the last answers when the listener stops, in seconds."""

CALLS_MAX = 2 * IN_FLIGHT_MAX
"""Requests in flight at which reading from a connection pauses. Correct peers send fewer."""

OUTPUT_BYTES_MAX = 32 << 20
"""Maximum queued answer bytes, more than a peer requests at a time."""

# A host that lost power sends no FIN. Without probes its slots would stay occupied.
_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 3
"""TCP keepalive probes detect that the host at the other end is down."""

# Callers choose the events by their addresses, so the set of logged ones is bounded.
_SAID_MAX = 1000

_log = structlog.get_logger(component="quorum")


NO_ANSWER = "this replica is not running, or received the request twice"
"""Reason of a request without an answer, unless the replica was asked to stop."""


class Replica(Protocol):
    """The replica that answers."""

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        ...

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer a request by calling `reply`, now or later."""
        ...

    def forget(self, request: Request, reply: Reply) -> None:
        """Drop a request that no longer waits for an answer."""
        ...

    def endpoints(self, node_id: NodeId) -> Endpoints:
        """Return the best known addresses of a controller."""
        ...


class _Room:
    """Limit on the number of requests of some kinds in flight."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._taken = 0

    def take(self) -> None:
        """Occupy one slot. Raises _BusyError if none is free."""
        if self._taken >= self._limit:
            raise _BusyError(f"{self._taken} {self._what} are in flight, which is the limit")
        self._taken += 1

    def give(self) -> None:
        """Free one slot."""
        self._taken -= 1


class _BusyError(Exception):
    """Too many requests are in flight."""


class PeerServer:
    """Serves one replica to its peers."""

    def __init__(
        self,
        replica: Replica,
        identity: Identity,
        tls: PeerTls | None = None,
        addresses: PeerAddresses | None = None,
    ) -> None:
        """`tls` applies to every new connection, None means plain text.

        `addresses` knows the voters' hosts, and learns where clients reach a connected node.
        """
        self._addresses = addresses
        self._voter_hosts = VoterHosts(addresses.of_voters if addresses else tuple)
        self._looking: asyncio.Task[None] | None = None
        self.replica = replica
        self.identity = identity
        self.tls = tls or PeerTls()
        self.versions = PeerVersions(identity.node_id, identity.software)
        self._listener: Listener | None = None
        self._connections: dict[_AcceptedConnection, str] = {}
        """Open connections, each with its host."""
        self._silent: dict[_AcceptedConnection, str] = {}
        """Connections without a hello, each with its host."""
        self._all_left = asyncio.Event()
        self._in_turn: _AcceptedConnection | None = None
        self._said: set[tuple[str, str]] = set()
        self.refused: Counter[str] = Counter()
        """Connections rejected, or closed after a protocol error, by event."""
        # Elections have their own room, so that a flood of fetches cannot keep a leader from being
        # elected.
        control = _Room("votes and announcements", 128)
        self.rooms: Mapping[frames.FrameKind, _Room] = {
            frames.FrameKind.VOTE: control,
            frames.FrameKind.BEGIN_QUORUM_EPOCH: control,
            frames.FrameKind.END_QUORUM_EPOCH: control,
            frames.FrameKind.UPDATE_VOTER: control,
            frames.FrameKind.FETCH: _Room("fetches", 256),
            frames.FrameKind.FETCH_SNAPSHOT: _Room("reads of snapshots", 32),
        }

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT. Returns the port, chosen if it is 0.

        Raises:
            OSError: the address is in use, or is not one of this host's.
        """
        self._listener = Listener(self.tls, lambda _: _AcceptedConnection(self), self.complain)
        self._looking = asyncio.create_task(self._voter_hosts.run())
        return await self._listener.start(address)

    async def stop(self) -> None:
        """Stop listening, and disconnect once queued answers have been sent."""
        if self._looking is not None:
            self._looking.cancel()
        if self._listener is not None:
            await self._listener.stop()
        # Queued answers go out first: a peer that reads STOPPING looks for another leader at once.
        for connection in self._connections:
            connection.close(flush=True)
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_left.wait(), STOP_TIMEOUT_S)
        for connection in self._connections:
            connection.close()

    def reauthorize(self) -> None:
        """Close the connections of controllers that are denied now."""
        for connection in list(self._connections):
            connection.reauthorize()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    # -- for the connections

    def admit(self, connection: _AcceptedConnection, host: str) -> str:
        """Add a connection that has sent nothing yet. Returns why there is no room, or ""."""
        silent, hosts = Counter(self._silent.values()), Counter(self._connections.values())
        # Voters have reserved slots: strangers must not be able to keep a majority apart.
        is_voters = host in self._voter_hosts
        others = sum(count for name, count in hosts.items() if name not in self._voter_hosts)
        for count, limit, what in (
            (hosts[host], VOTER_HOST_MAX if is_voters else HOST_MAX, "of this host"),
            (0 if is_voters else others, OTHERS_MAX, "of hosts without a voter"),
            (len(self._connections), CONNECTIONS_MAX, "in total"),
            (silent.total(), SILENT_MAX, "without a hello"),
            (silent[host], SILENT_MAX_PER_HOST, "of this host without a hello"),
        ):
            if count >= limit:
                return f"{count} connections {what}, the limit is {limit}"

        self._connections[connection] = host
        self._silent[connection] = host
        self._all_left.clear()
        return ""

    def hello_limit_s(self, host: str) -> float:
        """Return how long a new connection may stay silent: less while slots are scarce."""
        silent = Counter(self._silent.values())
        # A starved peer may be slow to say hello. Patience ends when silence costs others their
        # slots.
        is_roomy = silent.total() <= SILENT_MAX // 2 and silent[host] <= SILENT_MAX_PER_HOST // 2
        return HELLO_TIMEOUT_S * (HELLO_PATIENCE if is_roomy else 1)

    def takes_turn(self, connection: _AcceptedConnection) -> bool:
        """Whether a connection's frames may be handled in this event loop turn.

        Only one connection's may. Followers flush a batch at the same time, so their Fetches are
        often read together. The first commits the batch, and its caller's answer should precede the
        second.
        """
        if self._in_turn is None:
            self._in_turn = connection
            asyncio.get_running_loop().call_soon(self._end_turn)
        return self._in_turn is connection

    def _end_turn(self) -> None:
        self._in_turn = None

    def greeted(
        self, connection: _AcceptedConnection, sender: NodeId, client_endpoint: str
    ) -> None:
        """Record that a connection's hello was accepted."""
        self._silent.pop(connection, None)
        if self._addresses is not None:
            self._addresses.record_hello(sender, client_endpoint)

    def leave(self, connection: _AcceptedConnection) -> None:
        """Remove a connection."""
        self._connections.pop(connection, None)
        self._silent.pop(connection, None)
        if not self._connections:
            self._all_left.set()

    def complain(self, host: str, event: str, reason: str) -> None:
        """Count an event, and log the first of each kind from each host."""
        self.refused[event] += 1
        # A host that repeats an error would otherwise fill the log.
        if (host, event) not in self._said and len(self._said) < _SAID_MAX:
            self._said.add((host, event))
            _log.warning(f"peer_{event}", host=host, reason=reason)


class _Call(NamedTuple):
    request: Request
    reply: Reply
    room: _Room


class _AcceptedConnection(FramedConnection):
    """Connection that carries one peer's requests."""

    def __init__(self, server: PeerServer) -> None:
        super().__init__(frames.HELLO_ONLY, OUTPUT_BYTES_MAX)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._host = ""
        self._sender: NodeId | None = None
        self._software = UNTOLD
        self._certified: NodeId | None = None
        self._stranger = ""
        """Reason for which the peer's certificate is rejected."""
        self._calls: dict[int, _Call] = {}
        self._last_call_id = 0
        self._timer: asyncio.TimerHandle | None = None

    # -- events of the connection

    def data_received(self, data: bytes) -> None:
        """Handle the frames completed by these bytes, unless another connection has this turn."""
        self.parser.feed(data)
        if self._server.takes_turn(self):
            self.handle_frames()
        else:
            self._loop.call_soon(self.handle_frames)

    def on_connected(self) -> None:
        """Wait for the hello, if there is room for another connection."""
        assert self._transport is not None
        self._host = str((self._transport.get_extra_info("peername") or ("unknown",))[0])
        if reason := self._server.admit(self, self._host):
            self._break("too_many_connections", reason)
            return
        self._identify(self._transport)
        _probe(self._transport.get_extra_info("socket"))
        limit_s = self._server.hello_limit_s(self._host)
        self._timer = self._loop.call_later(limit_s, self._on_no_hello, limit_s)

    def on_frame(self, frame: frames.Frame) -> None:
        """Handle the hello or a request."""
        if self._sender is None:
            self._on_hello(frame.payload)
            return
        # Ascending ids guarantee that no answer can be matched to an earlier call.
        if frame.call_id <= self._last_call_id:
            raise ProtocolError(
                f"{frame.kind.name} of call {frame.call_id} after call {self._last_call_id}"
            )
        self._last_call_id = frame.call_id
        try:
            self._on_request(self._sender, frame)
        except (InvalidRequestError, _BusyError) as error:
            self._fail(frame.call_id, str(error))
        if len(self._calls) >= CALLS_MAX:
            self.pause_reading()

    def on_broken(self, reason: str) -> None:
        """End the connection."""
        self._break("connection_broken", reason)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the waiting requests."""
        self.is_closed = True
        self._server.leave(self)
        if self._sender is not None:
            self._server.versions.disconnected(self._sender, self._software)
        if self._timer is not None:
            self._timer.cancel()
        # Rooms are shared by all connections, so a lost connection must free its slots.
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.room.give()
            self._server.replica.forget(call.request, call.reply)

    def _on_no_hello(self, limit_s: float) -> None:
        self._break("connection_broken", f"no hello within {limit_s:g} s")

    def _on_aged(self) -> None:
        """Close a connection that its dialler should have replaced by now."""
        self.close(flush=True)

    def _break(self, event: str, reason: str) -> None:
        if not self.is_closed:
            self._server.complain(self._host, event, reason)
            self.close()

    def reauthorize(self) -> None:
        """Close the connection if the peer's certificate is denied now."""
        if self._transport is not None and not self._stranger:
            self._identify(self._transport)
            if self._stranger:
                self._break("certificate_denied", self._stranger)

    def _identify(self, transport: asyncio.Transport) -> None:
        try:
            self._certified = self._server.tls.controller_at(
                transport, self._server.identity.cluster_id
            )
        except StrangerError as error:
            self._stranger = str(error)

    # -- hello

    def _on_hello(self, payload: bytes) -> None:
        try:
            hello = Hello.decoded(payload)
        except HelloError as error:
            raise ProtocolError(str(error)) from None

        refusal = self._refusal(hello)
        identity = self._server.identity
        # Both sides use the lower version, so that controllers can be upgraded one by one.
        version = min(hello.version, VERSION)
        names = identity.cluster_id, identity.node_id
        answer = HelloAnswer(*names, refusal, version, identity.token_endpoint)
        self.write(frames.seal(frames.FrameKind.HELLO_ANSWER, 0, [answer.encoded()]))
        if refusal is not Refusal.NONE:
            reason = f"{refusal.name}: {hello} {self._stranger}".rstrip()
            self._server.complain(self._host, "hello_refused", reason)
            self.close(flush=True)
            return

        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._certified is not None:
            # A certificate is only checked in the handshake, so connections must not live forever.
            self._timer = self._loop.call_later(self._server.tls.age_ms / 1000, self._on_aged)
        self._sender, self._software = hello.sender, hello.software
        self._server.greeted(self, hello.sender, hello.client_endpoint)
        self._server.versions.connected(hello.sender, hello.software)
        is_bulk = hello.purpose is Purpose.BULK
        self.parser.expect(frames.BULK_REQUESTS if is_bulk else frames.CONTROL_REQUESTS)

    def _refusal(self, hello: Hello) -> Refusal:
        if hello.version < OLDEST_VERSION:
            return Refusal.UNKNOWN_VERSION
        if hello.cluster_id != self._server.identity.cluster_id:
            return Refusal.FOREIGN_CLUSTER
        if hello.receiver != self._server.identity.node_id:
            return Refusal.ANOTHER_NODE
        if self._certified not in (None, hello.sender):
            self._stranger = f"its certificate belongs to controller {self._certified}"
        if self._stranger:
            return Refusal.CERTIFICATE_OF_ANOTHER
        return Refusal.NONE

    # -- requests

    def _on_request(self, sender: NodeId, frame: frames.Frame) -> None:
        """Pass a request to the replica.

        Raises:
            InvalidRequestError: the request is malformed, or its node differs from the hello's.
            _BusyError: too many requests of its kind are in flight.
        """
        request = decode_request(frame.kind, frame.payload)
        if request.header.sender.node_id != sender:
            raise InvalidRequestError(
                "header.sender.node_id",
                f"{request.header.sender.node_id}, but the connection is node {sender}'s",
            )
        room = self._server.rooms[frame.kind]
        room.take()
        reply = partial(self._reply, frame.call_id)
        self._calls[frame.call_id] = _Call(request, reply, room)
        self._server.replica.handle(request, reply)

    def _reply(self, call_id: int, response: Response | None) -> None:
        call = self._calls.pop(call_id, None)
        if call is None:
            return

        call.room.give()
        if response is None:
            is_stopping = self._server.replica.is_stopping
            self._fail(call_id, frames.STOPPING if is_stopping else NO_ANSWER)
        else:
            leader_id = response.header.leader_id
            at = Endpoints() if leader_id is None else self._server.replica.endpoints(leader_id)
            kind, parts = encode_answer(response, at)
            self._answer(frames.seal(kind, call_id, parts))

        if len(self._calls) == CALLS_MAX - 1:
            # In a separate turn, because the replica is still in the step that answered.
            self._loop.call_soon(self.resume_reading)

    def _fail(self, call_id: int, reason: str) -> None:
        self._answer(frames.seal(frames.FrameKind.FAILURE, call_id, [reason.encode()[:1000]]))

    def _answer(self, frame: bytes) -> None:
        if self.is_congested:
            self._break("connection_broken", "the peer does not read its answers")
            return
        self.write(frame)


def _probe(opened: socket.socket | None) -> None:
    """Let TCP detect a dead host. Other systems name these options differently."""
    if opened is None:
        return
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
