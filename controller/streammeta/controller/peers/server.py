"""Listener for the other controllers: takes their requests to the replica, sends its answers.

Bounds everything a peer can take: connections, their time until the hello, requests in flight on
each and of each kind, and bytes of answers that wait to leave. A flood of one kind leaves room for
the others. Answers leave in the step that makes them.
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
from streammeta.controller.peers.addresses import PeerAddresses
from streammeta.controller.peers.connection import FramedConnection, ProtocolError
from streammeta.controller.peers.dialled import IN_FLIGHT_MAX, Identity
from streammeta.controller.peers.frames import (
    BULK_REQUESTS,
    CONTROL_REQUESTS,
    HELLO_ONLY,
    STOPPING,
    Frame,
    FrameKind,
    seal,
)
from streammeta.controller.peers.hello import (
    OLDEST_VERSION,
    VERSION,
    Hello,
    HelloAnswer,
    HelloError,
    Purpose,
    Refusal,
)
from streammeta.controller.peers.voter_hosts import VoterHosts
from streammeta.controller.peers.wire import decode_request, encode_answer
from streammeta.controller.quorum.messages import Request, Response
from streammeta.controller.runtime.interfaces import Endpoints, Reply
from streammeta.controller.runtime.replication.peer_versions import PeerVersions
from streammeta.controller.tls.peer_contexts import PeerTls, StrangerError
from streammeta.tls.listener import Listener

CONNECTIONS_MAX = 96
"""Maximum number of connections; more are closed as soon as they are made.

With the handshakes under way they are fewer than the file descriptors kept from clients.
"""

OTHERS_MAX = 64
"""The same of all hosts that are no voter's: the rest is for voters."""

HOST_MAX = 32
"""The same of one host that is no voter's."""

VOTER_HOST_MAX = 48
"""The same of one voter's host, where several controllers may run."""

SILENT_MAX = 64
"""Connections whose hello has not come; more are closed as soon as they are made."""

SILENT_MAX_PER_HOST = 32
"""The same of one host: one that says nothing leaves room for the others."""

HELLO_TIMEOUT_S = 2.0
"""Time limit for the hello of a connection while many are silent, in seconds."""

HELLO_PATIENCE = 5
"""Times as long that a starved peer may take while few are silent."""

STOP_TIMEOUT_S = 1.0
"""Time limit for the last answers when the listener stops, in seconds."""

CALLS_MAX = 2 * IN_FLIGHT_MAX
"""Requests in flight on a connection beyond which nothing is read from it; peers send fewer."""

OUTPUT_BYTES_MAX = 32 << 20
"""Bytes of answers that may wait to leave: more than a peer has asked for at a time."""

_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 3
"""TCP's probes find out that the host at the other end is gone, and the connection with it."""

_SAID_MAX = 1000

_log = structlog.get_logger(component="quorum")


NO_ANSWER = "this replica does not run, or has had the request twice"
"""Reason of a request without an answer while the replica was not asked to end."""


class Replica(Protocol):
    """The replica that answers."""

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        ...

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer a request by a call of `reply`, now or later."""
        ...

    def forget(self, request: Request, reply: Reply) -> None:
        """Drop a request whose answer is not waited for any more."""
        ...

    def endpoints(self, node_id: NodeId) -> Endpoints:
        """Return the best known addresses of a controller."""
        ...


class _Room:
    """Bound on the number of requests of some kinds in flight."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._taken = 0

    def take(self) -> None:
        """Take one place; raises _BusyError if there is none."""
        if self._taken >= self._limit:
            raise _BusyError(f"{self._taken} {self._what} are under way, as many as may be")
        self._taken += 1

    def give(self) -> None:
        """Give one place back."""
        self._taken -= 1


class _BusyError(Exception):
    """Too much is under way."""


class PeerServer:
    """Serves one replica to its peers."""

    def __init__(
        self,
        replica: Replica,
        identity: Identity,
        tls: PeerTls | None = None,
        addresses: PeerAddresses | None = None,
    ) -> None:
        """Take the replica, and its name for the hello.

        `tls` is used for every new connection; None: plain text. `addresses` says which hosts are
        voters', and hears where clients reach a node that has connected.
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
        """Those that are open, each with its host."""
        self._silent: dict[_AcceptedConnection, str] = {}
        """Those whose hello has not come, each with its host."""
        self._all_left = asyncio.Event()
        self._in_turn: _AcceptedConnection | None = None
        self._said: set[tuple[str, str]] = set()
        self.refused: Counter[str] = Counter()
        """Connections refused, or closed because the other side broke the protocol, by event."""
        control = _Room("votes and announcements", 128)
        self.rooms: Mapping[FrameKind, _Room] = {
            FrameKind.VOTE: control,
            FrameKind.BEGIN_QUORUM_EPOCH: control,
            FrameKind.END_QUORUM_EPOCH: control,
            FrameKind.UPDATE_VOTER: control,
            FrameKind.FETCH: _Room("fetches", 256),
            FrameKind.FETCH_SNAPSHOT: _Room("reads of snapshots", 32),
        }

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT; return the port, chosen if it is 0.

        Raises:
            OSError: the address is taken, or is none of this host's.
        """
        self._listener = Listener(self.tls, lambda _: _AcceptedConnection(self), self.complain)
        self._looking = asyncio.create_task(self._voter_hosts.run())
        return await self._listener.start(address)

    async def stop(self) -> None:
        """Stop listening, and disconnect once the answers that were made have left."""
        if self._looking is not None:
            self._looking.cancel()
        if self._listener is not None:
            await self._listener.stop()
        for connection in self._connections:
            connection.close(flush=True)
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_left.wait(), STOP_TIMEOUT_S)
        for connection in self._connections:
            connection.close()

    def judge_again(self) -> None:
        """End the connections of controllers that are denied by now."""
        for connection in list(self._connections):
            connection.judge()

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    # -- for the connections

    def admit(self, connection: _AcceptedConnection, host: str) -> str:
        """Take a connection, which has said nothing yet; return why there is no room, or ""."""
        silent, hosts = Counter(self._silent.values()), Counter(self._connections.values())
        is_voters = host in self._voter_hosts
        others = sum(count for name, count in hosts.items() if name not in self._voter_hosts)
        for count, limit, what in (
            (hosts[host], VOTER_HOST_MAX if is_voters else HOST_MAX, "this host has"),
            (0 if is_voters else others, OTHERS_MAX, "hosts that are no voter's have"),
            (len(self._connections), CONNECTIONS_MAX, "there are"),
            (silent.total(), SILENT_MAX, "without a hello there are"),
            (silent[host], SILENT_MAX_PER_HOST, "without a hello this host has"),
        ):
            if count >= limit:
                return f"{what} {count}"

        self._connections[connection] = host
        self._silent[connection] = host
        self._all_left.clear()
        return ""

    def hello_limit_s(self, host: str) -> float:
        """Return how long a new connection may say nothing: less while its places are scarce."""
        silent = Counter(self._silent.values())
        is_roomy = silent.total() <= SILENT_MAX // 2 and silent[host] <= SILENT_MAX_PER_HOST // 2
        return HELLO_TIMEOUT_S * (HELLO_PATIENCE if is_roomy else 1)

    def takes_turn(self, connection: _AcceptedConnection) -> bool:
        """Whether a connection's frames may be handled in this turn of the event loop.

        Those of one may. Followers flush a batch at the same time, so that their Fetches are often
        read together: the first commits the batch, and the answer to its caller goes ahead of the
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
        """Note that a connection's hello was taken."""
        self._silent.pop(connection, None)
        if self._addresses is not None:
            self._addresses.greeted(sender, client_endpoint)

    def leave(self, connection: _AcceptedConnection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)
        self._silent.pop(connection, None)
        if not self._connections:
            self._all_left.set()

    def complain(self, host: str, event: str, reason: str) -> None:
        """Count an event; log the first of each kind from each host."""
        self.refused[event] += 1
        if (host, event) not in self._said and len(self._said) < _SAID_MAX:
            self._said.add((host, event))
            _log.warning(f"peer_{event}", host=host, reason=reason)


class _Call(NamedTuple):
    request: Request
    reply: Reply
    room: _Room


class _AcceptedConnection(FramedConnection):
    """Connection on which one peer's requests arrive."""

    def __init__(self, server: PeerServer) -> None:
        super().__init__(HELLO_ONLY, OUTPUT_BYTES_MAX)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._host = ""
        self._sender: NodeId | None = None
        self._software = UNTOLD
        self._certified: NodeId | None = None
        self._stranger = ""
        """Reason for which the other side's certificate is not taken."""
        self._calls: dict[int, _Call] = {}
        self._last_call_id = 0
        self._timer: asyncio.TimerHandle | None = None

    # -- events of the connection

    def data_received(self, data: bytes) -> None:
        """Take the frames that these bytes complete, behind what another's of this turn set off."""
        self.parser.feed(data)
        if self._server.takes_turn(self):
            self.take_frames()
        else:
            self._loop.call_soon(self.take_frames)

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

    def on_frame(self, frame: Frame) -> None:
        """Take the hello or a request."""
        if self._sender is None:
            self._on_hello(frame.payload)
            return
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
        """Forget the requests that wait."""
        self.is_closed = True
        self._server.leave(self)
        if self._sender is not None:
            self._server.versions.disconnected(self._sender, self._software)
        if self._timer is not None:
            self._timer.cancel()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.room.give()
            self._server.replica.forget(call.request, call.reply)

    def _on_no_hello(self, limit_s: float) -> None:
        self._break("connection_broken", f"no hello within {limit_s:g} s")

    def _on_aged(self) -> None:
        """End a connection that its dialler should have made anew by now."""
        self.close(flush=True)

    def _break(self, event: str, reason: str) -> None:
        if not self.is_closed:
            self._server.complain(self._host, event, reason)
            self.close()

    def judge(self) -> None:
        """End the connection if the certificate at its other end is denied by now."""
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
        version = min(hello.version, VERSION)
        names = identity.cluster_id, identity.node_id
        answer = HelloAnswer(*names, refusal, version, identity.token_endpoint)
        self.write(seal(FrameKind.HELLO_ANSWER, 0, [answer.encoded()]))
        if refusal is not Refusal.NONE:
            reason = f"{refusal.name}: {hello} {self._stranger}".rstrip()
            self._server.complain(self._host, "hello_refused", reason)
            self.close(flush=True)
            return

        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._certified is not None:
            self._timer = self._loop.call_later(self._server.tls.age_ms / 1000, self._on_aged)
        self._sender, self._software = hello.sender, hello.software
        self._server.greeted(self, hello.sender, hello.client_endpoint)
        self._server.versions.connected(hello.sender, hello.software)
        is_bulk = hello.purpose is Purpose.BULK
        self.parser.expect(BULK_REQUESTS if is_bulk else CONTROL_REQUESTS)

    def _refusal(self, hello: Hello) -> Refusal:
        if hello.version < OLDEST_VERSION:
            return Refusal.UNKNOWN_VERSION
        if hello.cluster_id != self._server.identity.cluster_id:
            return Refusal.FOREIGN_CLUSTER
        if hello.receiver != self._server.identity.node_id:
            return Refusal.ANOTHER_NODE
        if self._certified not in (None, hello.sender):
            self._stranger = f"its certificate is that of controller {self._certified}"
        if self._stranger:
            return Refusal.CERTIFICATE_OF_ANOTHER
        return Refusal.NONE

    # -- requests

    def _on_request(self, sender: NodeId, frame: Frame) -> None:
        """Pass a request to the replica.

        Raises:
            InvalidRequestError: it is malformed, or of another node than the hello.
            _BusyError: too many of its kind are under way.
        """
        request = decode_request(frame.kind, frame.payload)
        if request.header.sender.node_id != sender:
            raise InvalidRequestError(
                "header.sender.node_id",
                f"{request.header.sender.node_id}; the connection is node {sender}'s",
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
            self._fail(call_id, STOPPING if is_stopping else NO_ANSWER)
        else:
            leader_id = response.header.leader_id
            at = Endpoints() if leader_id is None else self._server.replica.endpoints(leader_id)
            kind, parts = encode_answer(response, at)
            self._answer(seal(kind, call_id, parts))

        if len(self._calls) == CALLS_MAX - 1:
            # In a turn of its own: the replica is in the middle of the step that answered.
            self._loop.call_soon(self.resume_reading)

    def _fail(self, call_id: int, reason: str) -> None:
        self._answer(seal(FrameKind.FAILURE, call_id, [reason.encode()[:1000]]))

    def _answer(self, frame: bytes) -> None:
        if self.is_congested:
            self._break("connection_broken", "it does not read its answers")
            return
        self.write(frame)


def _probe(opened: socket.socket | None) -> None:
    """Let TCP find out when the other host is gone; other systems name their options otherwise."""
    if opened is None:
        return
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
