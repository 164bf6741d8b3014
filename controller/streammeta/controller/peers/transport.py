"""Transport of the quorum's requests to the other controllers.

Dials peers when there is something to send, and reports the outcome of every request to the driver.
A refused or reset connection is reported separately from silence: the peer's process has probably
ended, while a stopped or unreachable one answers nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import structlog

from streammeta.controller.ids import NodeId
from streammeta.controller.peers import dialled
from streammeta.controller.peers.addresses import PeerAddresses
from streammeta.controller.peers.connection import Patience
from streammeta.controller.peers.frames import STOPPING
from streammeta.controller.peers.hello import OLDEST_VERSION, VERSION, Purpose
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.interfaces import Endpoints, PeerListener
from streammeta.controller.tls.manager import PeerTls

_MEANT_FOR_ANOTHER = {
    messages.QuorumError.INCONSISTENT_CLUSTER_ID: dialled.FOREIGN_CLUSTER,
    messages.QuorumError.INVALID_VOTER_KEY: "peer_has_another_disk",
}
"""Errors that suggest a wrong address, and their log events."""

# Early enough for a handshake and the answers in flight before the listener closes it.
_OLD_AT = 0.8
"""Share of a connection's maximum age at which it is replaced."""

_SAID_MAX = 1000
"""Maximum number of peers' events that are remembered as logged."""

_log = structlog.get_logger(component="quorum")


class TcpPeerTransport:
    """Implementation of `PeerTransport`. Must be created on the event loop that uses it."""

    def __init__(
        self,
        addresses: PeerAddresses,
        identity: dialled.Identity,
        timeout_ms: int,
        tls: PeerTls | None = None,
    ) -> None:
        """`timeout_ms` limits every request.

        `tls` applies to new connections, None means plain text.
        """
        self._addresses = addresses
        self._identity = identity
        self._timeout_s = timeout_ms / 1000
        self._patience: dict[NodeId, Patience] = {}
        self._tls = tls or PeerTls()
        self._connections: dict[dialled.Place, dialled.DialledConnection] = {}
        self._dials: dict[dialled.DialledConnection, asyncio.Task[None]] = {}
        self._retired: set[dialled.DialledConnection] = set()
        self._older: set[dialled.Place] = set()
        """Places whose listener has rejected a hello of this version."""
        self._said: set[tuple[str, NodeId, str]] = set()
        self._stopping: set[NodeId] = set()
        """Peers that have announced their stop and sent no hello since."""
        self._leader: tuple[NodeId, Endpoints] | None = None
        """The leader and its addresses in the last answer that named one."""
        self._listener: PeerListener | None = None
        self.failed: Counter[NodeId] = Counter()
        """Requests without an answer since the start, by peer."""

    def bind(self, listener: PeerListener) -> None:
        """Set the listener, once, before the first `send`."""
        self._listener = listener

    def set_voters(self, voters: VoterSet) -> None:
        """Use the addresses of the current voters, and close connections to former addresses."""
        self._addresses.set_voters(voters)
        others = {voter.key.node_id for voter in voters} - {self._identity.node_id}
        self.failed.update(dict.fromkeys(others, 0))  # adds 0, so that every voter has a count
        self._drop_unused()

    def endpoints(self, node_id: NodeId) -> Endpoints:
        """Return the addresses of this node to publish to others."""
        addresses = self._addresses
        return Endpoints(
            addresses.published(node_id),
            addresses.for_clients(node_id),
            addresses.for_tokens(node_id),
        )

    @property
    def connected_to(self) -> set[tuple[NodeId, str]]:
        """The connected peers, each with its address."""
        return {(place.peer, place.endpoint) for place in self._connections}

    def send(self, request: messages.Request) -> None:
        """Start sending to the request's receiver. Never blocks and never raises."""
        peer = request.header.receiver.node_id
        connection = self._connection(peer, _purpose(request))
        if connection is None or not connection.ask(request):
            # In a separate turn, because the caller may still be sending other requests.
            asyncio.get_running_loop().call_soon(self._fail, request)

    def reauthorize(self) -> None:
        """Close the connections to controllers that are denied now."""
        # Retired connections still wait for answers, and a denied peer must not send them.
        for connection in [*self._connections.values(), *self._retired]:
            connection.reauthorize()

    async def close(self) -> None:
        """Drop requests in flight and disconnect."""
        dials = list(self._dials.values())
        for connection in [*self._connections.values(), *self._retired]:
            connection.shut()
        await asyncio.gather(*dials, return_exceptions=True)
        await asyncio.sleep(0)  # a turn in which the sockets are closed

    # -- outcomes of connections

    def on_greeted(self, place: dialled.Place, token_endpoint: str) -> None:
        """Record that a peer is up, and where clients with tokens reach it."""
        self._stopping.discard(place.peer)
        self._addresses.record_hello_answer(place.peer, token_endpoint)

    def on_answer(
        self, place: dialled.Place, response: messages.Response, leader: Endpoints
    ) -> None:
        """Pass a peer's answer to the driver, unless another node made it."""
        # An address can be reused by another controller after a reconfiguration.
        if response.header.sender != place.peer:
            self._log_once(dialled.ANOTHER_NODE, place, sender=response.header.sender)
            self._addresses.record_failure(place.peer, place.endpoint)
            self._bound_listener().on_request_failed(place.peer, response.header.request_id)
            return
        # Answers with an error name the leader too, so this comes before errors are looked at.
        self._learn_leader(response.header.leader_id, leader)
        if (event := _MEANT_FOR_ANOTHER.get(response.header.error)) is not None:
            self._addresses.record_failure(place.peer, place.endpoint)
            self._log_once(event, place)
        else:
            self._addresses.record_success(place.peer)
        self._bound_listener().on_response(response)

    def on_failure(self, place: dialled.Place, request: messages.Request, reason: str) -> None:
        """Report that a request gets no answer."""
        if reason == STOPPING:
            # Many requests may be in flight to a stopping peer, and one line is enough.
            if place.peer not in self._stopping:
                self._stopping.add(place.peer)
                _log.info("peer_is_stopping", peer=place.peer, endpoint=place.endpoint)
        else:
            self._log_once("peer_refuses_request", place, reason=reason)
        self._fail(request)

    def on_ended(
        self,
        connection: dialled.DialledConnection,
        end: dialled.End,
        unanswered: list[messages.Request],
    ) -> None:
        """Report a connection's unanswered requests, and whether the peer has probably ended."""
        place = connection.place
        is_retired = connection in self._retired
        self._forget(connection)
        if end is dialled.End.CLOSED:
            return
        # The listener is of an older release and said so. It is reachable, so no address has
        # failed.
        if self._is_older(connection, end):
            self._older.add(place)
            for request in unanswered:
                self._fail(request)
            return

        self._older.discard(place)  # the peer may have been upgraded meanwhile
        if end is dialled.End.MISMATCH:
            self._log_mismatch(connection)
        elif connection.detail:
            self._log_once("peer_connection_broken", place, reason=connection.detail)

        # A peer that breaks the protocol or closes an idle connection is not unreachable.
        is_answering = end in (dialled.End.BROKEN, dialled.End.LOST) and not unanswered
        all_failed = not is_answering and self._addresses.record_failure(place.peer, place.endpoint)
        for request in unanswered:
            self._fail(request)
        # Bulk connections break in the middle of large chunks for other reasons, and retired ones
        # end anyway.
        was_reset = end is dialled.End.LOST and place.purpose is Purpose.CONTROL and not is_retired
        if was_reset or (end is dialled.End.REFUSED and all_failed):
            self._bound_listener().on_connection_lost(place.peer)

    def _is_older(self, connection: dialled.DialledConnection, end: dialled.End) -> bool:
        """Return whether the listener may accept the hello of an older version."""
        is_refused = end is dialled.End.MISMATCH and connection.detail == dialled.ANOTHER_VERSION
        return is_refused and connection.version > OLDEST_VERSION

    def _learn_leader(self, leader_id: NodeId | None, at: Endpoints) -> None:
        """Record the leader's addresses if an answer names others than the previous one."""
        if leader_id is not None and at != Endpoints() and (leader_id, at) != self._leader:
            self._leader = (leader_id, at)
            self._addresses.learn_leader(leader_id, at.peers or "", at.clients or "")

    def _fail(self, request: messages.Request) -> None:
        header = request.header
        self.failed[header.receiver.node_id] += 1
        self._bound_listener().on_request_failed(header.receiver.node_id, header.request_id)

    def _log_mismatch(self, connection: dialled.DialledConnection) -> None:
        more = {"reason": connection.reason} if connection.reason else {}
        self._log_once(connection.detail, connection.place, **more)

    def _log_once(self, event: str, place: dialled.Place, **details: object) -> None:
        key = (event, place.peer, place.endpoint)
        if key not in self._said and len(self._said) < _SAID_MAX:
            self._said.add(key)
            _log.warning(event, peer=place.peer, endpoint=place.endpoint, **details)

    # -- connections

    def _connection(self, peer: NodeId, purpose: Purpose) -> dialled.DialledConnection | None:
        endpoint = self._addresses.in_use(peer)
        if endpoint is None:
            return None
        place = dialled.Place(peer, endpoint, purpose)
        connection = self._connections.get(place)
        # A listener closes connections at their maximum age, which would look like a lost peer.
        if connection is not None and self._is_aged(connection):
            self._retire(connection)
            connection = None
        return connection or self._dial(place)

    def _is_aged(self, connection: dialled.DialledConnection) -> bool:
        """Return whether a TLS connection is about to reach the age at which the peer closes it."""
        if self._tls.dialling is None:
            return False
        age_s = asyncio.get_running_loop().time() - connection.dialled_at
        return age_s * 1000 > _OLD_AT * self._tls.age_ms

    def _dial(self, place: dialled.Place) -> dialled.DialledConnection:
        # The addresses may have changed since the last dial.
        self._drop_unused()
        # Version 1 listeners reject every other hello, so the second attempt uses the oldest.
        version = OLDEST_VERSION if place in self._older else VERSION
        patience = self._patience.setdefault(place.peer, Patience(self._timeout_s))
        connection = dialled.DialledConnection(
            place, self._identity, self, patience, version, self._tls
        )
        self._connections[place] = connection
        self._dials[connection] = asyncio.get_running_loop().create_task(connection.dial())
        return connection

    def _drop_unused(self) -> None:
        for place, connection in list(self._connections.items()):
            if not self._addresses.is_candidate(place.peer, place.endpoint):
                self._retire(connection)

    def _retire(self, connection: dialled.DialledConnection) -> None:
        """Send no further requests on a connection."""
        del self._connections[connection.place]
        self._retired.add(connection)
        connection.retire()

    def _forget(self, connection: dialled.DialledConnection) -> None:
        self._retired.discard(connection)
        if self._connections.get(connection.place) is connection:
            del self._connections[connection.place]
        if (dial := self._dials.pop(connection, None)) is not None and not dial.done():
            dial.cancel()

    def _bound_listener(self) -> PeerListener:
        assert self._listener is not None, "bind comes before send"
        return self._listener


def _purpose(request: messages.Request) -> Purpose:
    return Purpose.BULK if isinstance(request, messages.FetchSnapshotRequest) else Purpose.CONTROL
