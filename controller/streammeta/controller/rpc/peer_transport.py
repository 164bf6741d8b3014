"""Transport of the quorum's requests to the other controllers over gRPC, and their addresses.

Owns the connections to peers and reports the result of every request to the driver. A refused or
reset connection is reported apart from silence: the peer's process is probably gone, while one that
is stopped, or cut off, answers nothing. Addresses change while nodes are away, so all sources of
an address are kept; one is in use, and when it fails the next is tried.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field

import grpc
import structlog

from streammeta.controller.config import ConfigError, check_reachable
from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.messages import (
    FetchSnapshotRequest,
    QuorumError,
    Request,
    Response,
)
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.rpc.quorum_wire import EXCHANGES
from streammeta.controller.runtime.interfaces import Endpoints, PeerListener
from streammeta.rpc.connections import peer_channel
from streammeta.v1 import quorum_pb2_grpc


class PeerAddresses:
    """Addresses of the peers of one controller, and where clients reach them.

    `own` are the addresses of this controller itself. `seeds` and `overrides` name addresses for
    peers. An entry of `overrides` is used instead of all others and never published: it is valid
    from this controller's place in the network alone.
    """

    def __init__(
        self,
        local: NodeId,
        own: Endpoints,
        seeds: Mapping[NodeId, str],
        overrides: Mapping[NodeId, str],
    ) -> None:
        self._local = local
        self._own = own
        self._seeds = seeds
        self._overrides = overrides
        self._voters = VoterSet()
        self._leader: tuple[NodeId, Endpoints] | None = None
        self._in_use: dict[NodeId, str] = {}
        self._failed: dict[NodeId, set[str]] = {}

    def set_voters(self, voters: VoterSet) -> None:
        """Take over the addresses of the voters now in force."""
        self._voters = voters

    def learn_leader(self, node_id: NodeId, endpoint: str, client_endpoint: str) -> None:
        """Note the leader's addresses in an answer; ignore malformed and empty ones."""
        known = self._told_of_leader(node_id)
        self._leader = (
            node_id,
            Endpoints(
                _if_reachable(endpoint) or known.peers,
                _if_reachable(client_endpoint) or known.clients,
            ),
        )

    def in_use(self, node_id: NodeId) -> str | None:
        """Return the address for requests to this node; None if none is known."""
        if node_id in self._overrides:
            return self._overrides[node_id]
        return self.published(node_id)

    def published(self, node_id: NodeId) -> str | None:
        """Return the address for peers to publish to others; None if none is known."""
        if node_id == self._local:
            return self._own.peers
        candidates = self._candidates(node_id)
        if not candidates:
            return None
        if self._in_use.get(node_id) not in candidates:
            self._in_use[node_id] = candidates[0]
        return self._in_use[node_id]

    def for_clients(self, node_id: NodeId) -> str | None:
        """Return where clients reach this node; None if that is not known.

        What the leader says of itself is newer than the record of it in the log.
        """
        if node_id == self._local:
            return self._own.clients
        voter = self._voters.find(node_id)
        return self._told_of_leader(node_id).clients or (voter.client_endpoint if voter else None)

    def is_candidate(self, node_id: NodeId, endpoint: str) -> bool:
        """Return whether this may still be the node's address."""
        if node_id in self._overrides:
            return endpoint == self._overrides[node_id]
        return endpoint in self._candidates(node_id)

    def worked(self, node_id: NodeId) -> None:
        """Note that the address in use led to the node."""
        self._failed.pop(node_id, None)

    def failed(self, node_id: NodeId, endpoint: str) -> bool:
        """Note that an address did not lead to the node, and use another from now on.

        Returns whether every known address has failed since one worked last.
        """
        candidates = self._candidates(node_id)
        if node_id in self._overrides or len(candidates) < 2:
            return True
        failed = self._failed.setdefault(node_id, set())
        failed.add(endpoint)
        if self._in_use.get(node_id) == endpoint and endpoint in candidates:
            following = candidates.index(endpoint) + 1
            self._in_use[node_id] = candidates[following % len(candidates)]
        return failed.issuperset(candidates)

    def _candidates(self, node_id: NodeId) -> list[str]:
        """Return every address that this node may have, the likeliest first."""
        voter = self._voters.find(node_id)
        told = [
            voter.endpoint if voter else None,
            self._told_of_leader(node_id).peers,
            self._seeds.get(node_id),
        ]
        return list(dict.fromkeys(filter(None, told)))

    def _told_of_leader(self, node_id: NodeId) -> Endpoints:
        """Return what answers said of this node as the leader."""
        return self._leader[1] if self._leader and self._leader[0] == node_id else Endpoints()


def _if_reachable(endpoint: str) -> str | None:
    """Return an address that others could connect to, None for anything else."""
    try:
        check_reachable("endpoint", endpoint)
    except ConfigError:
        return None
    return endpoint


IN_FLIGHT_PER_PEER_MAX = 32
"""Maximum number of requests in flight to a peer: one of each kind, and those given up."""

_MEANT_FOR_ANOTHER = {
    QuorumError.INCONSISTENT_CLUSTER_ID: "peer_is_of_another_cluster",
    QuorumError.INVALID_VOTER_KEY: "peer_has_another_disk",
}
"""Refusals that suggest a wrong address, and their log events."""

_NO_PEER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # The port of a controller's clients: older logs and configurations name it.
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Statuses of an address at which no peer answers."""

_log = structlog.get_logger(component="quorum")


@dataclass(slots=True)
class _Link:
    """Connections to one address; snapshots have their own, so that votes never queue."""

    peer: NodeId
    endpoint: str
    timeout_ms: int
    control: grpc.aio.Channel = field(init=False)
    watcher: asyncio.Task[None] | None = None
    _bulk: grpc.aio.Channel | None = None
    _stubs: dict[bool, quorum_pb2_grpc.QuorumServiceAsyncStub] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.control = peer_channel(self.endpoint, self.timeout_ms)
        self._stubs[False] = quorum_pb2_grpc.QuorumServiceStub(self.control)

    def stub(self, *, for_bulk: bool) -> quorum_pb2_grpc.QuorumServiceAsyncStub:
        """Return the stub of one of the connections; the one for bulk is made on first use."""
        if for_bulk and self._bulk is None:
            self._bulk = peer_channel(self.endpoint, self.timeout_ms, for_snapshots=True)
            self._stubs[True] = quorum_pb2_grpc.QuorumServiceStub(self._bulk)
        return self._stubs[for_bulk]

    async def close(self, grace_s: float) -> None:
        """Disconnect once the requests under way have ended, or after `grace_s`."""
        if self.watcher is not None:
            self.watcher.cancel()
            await asyncio.gather(self.watcher, return_exceptions=True)
        channels = [self.control, *([self._bulk] if self._bulk else [])]
        await asyncio.gather(*(channel.close(grace_s) for channel in channels))


class GrpcPeerTransport:
    """Implements `PeerTransport`; must be created on the event loop that uses it."""

    def __init__(self, addresses: PeerAddresses, timeout_ms: int) -> None:
        self._addresses = addresses
        self._timeout_ms = timeout_ms
        self._links: dict[tuple[NodeId, str], _Link] = {}
        self._in_flight: Counter[NodeId] = Counter()
        self._exchanges: set[asyncio.Task[None]] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self._said: set[tuple[QuorumError, NodeId, str]] = set()
        self._listener: PeerListener | None = None

    def bind(self, listener: PeerListener) -> None:
        """Set the listener, once, before the first `send`."""
        self._listener = listener

    def set_voters(self, voters: VoterSet) -> None:
        """Take over the addresses of the voters now in force; close connections to former ones."""
        self._addresses.set_voters(voters)
        self._drop_unused()

    def endpoints(self, node_id: NodeId) -> Endpoints:
        """Return the addresses of this node to publish to others."""
        return Endpoints(self._addresses.published(node_id), self._addresses.for_clients(node_id))

    @property
    def connected_to(self) -> set[tuple[NodeId, str]]:
        """The connected peers, each with its address."""
        return set(self._links)

    def send(self, request: Request) -> None:
        """Start sending to the request's receiver; never blocks, never raises."""
        _begin(self._exchange(request), self._exchanges)

    async def close(self) -> None:
        """Cancel requests in flight and disconnect."""
        for task in list(self._exchanges):
            task.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        for key in list(self._links):
            self._drop(key)
        await asyncio.gather(*self._closings, return_exceptions=True)

    async def _exchange(self, request: Request) -> None:
        peer = request.header.receiver.node_id
        endpoint = self._addresses.in_use(peer)
        if endpoint is None or self._in_flight[peer] >= IN_FLIGHT_PER_PEER_MAX:
            self._told().on_request_failed(peer, request.header.request_id)
            return
        self._in_flight[peer] += 1
        try:
            response = await self._call(self._link(peer, endpoint), request)
        except grpc.aio.AioRpcError as error:
            self._on_failure(request, endpoint, error)
        except InvalidRequestError as error:
            _log.error("bad_quorum_answer", peer=peer, endpoint=endpoint, error=str(error))
            self._told().on_request_failed(peer, request.header.request_id)
        else:
            self._on_response(request, endpoint, response)
        finally:
            self._in_flight[peer] -= 1

    async def _call(self, link: _Link, request: Request) -> Response:
        exchange = EXCHANGES[type(request)]
        stub = link.stub(for_bulk=isinstance(request, FetchSnapshotRequest))
        answer = await getattr(stub, exchange.method)(
            exchange.request_to_pb(request), timeout=self._timeout_ms / 1000
        )
        if answer.header.HasField("leader_id"):
            self._addresses.learn_leader(
                NodeId(answer.header.leader_id),
                answer.header.leader_endpoint,
                answer.header.leader_client_endpoint,
            )
        response: Response = exchange.response_from_pb(answer)
        return response

    def _on_response(self, request: Request, endpoint: str, response: Response) -> None:
        peer = request.header.receiver.node_id
        if response.header.sender != peer:
            _log.warning(
                "wrong_peer_answers", peer=peer, endpoint=endpoint, sender=response.header.sender
            )
            self._addresses.failed(peer, endpoint)
            self._told().on_request_failed(peer, request.header.request_id)
            return
        if response.header.error in _MEANT_FOR_ANOTHER:
            self._addresses.failed(peer, endpoint)
            self._say_once(response.header.error, peer, endpoint)
        else:
            self._addresses.worked(peer)
        self._told().on_response(response)

    def _on_failure(self, request: Request, endpoint: str, error: grpc.aio.AioRpcError) -> None:
        peer = request.header.receiver.node_id
        all_failed = False
        if error.code() in _NO_PEER:
            all_failed = self._addresses.failed(peer, endpoint)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            # TCP may wait for minutes before it retransmits after a cut; a new connection does not.
            self._drop((peer, endpoint))
        self._told().on_request_failed(peer, request.header.request_id)
        if all_failed and _is_refused(error):
            self._told().on_connection_lost(peer)

    def _say_once(self, error: QuorumError, peer: NodeId, endpoint: str) -> None:
        if (error, peer, endpoint) not in self._said:
            self._said.add((error, peer, endpoint))
            _log.warning(_MEANT_FOR_ANOTHER[error], peer=peer, endpoint=endpoint)

    # -- connections

    def _link(self, peer: NodeId, endpoint: str) -> _Link:
        self._drop_unused()
        key = (peer, endpoint)
        if key not in self._links:
            link = _Link(peer, endpoint, self._timeout_ms)
            link.watcher = asyncio.get_running_loop().create_task(self._watch(link))
            self._links[key] = link
        return self._links[key]

    def _drop_unused(self) -> None:
        for key in [key for key in self._links if not self._addresses.is_candidate(*key)]:
            self._drop(key)

    def _drop(self, key: tuple[NodeId, str]) -> None:
        link = self._links.pop(key, None)
        if link is not None:
            # Requests under way have deadlines of their own and end before the grace does.
            _begin(link.close(self._timeout_ms / 1000), self._closings)

    async def _watch(self, link: _Link) -> None:
        """Report when the connection breaks, even if no request is under way."""
        state = link.control.get_state()
        while True:
            await link.control.wait_for_state_change(state)
            before, state = state, link.control.get_state()
            if before is grpc.ChannelConnectivity.READY:
                self._told().on_connection_lost(link.peer)

    def _told(self) -> PeerListener:
        assert self._listener is not None, "bind comes before send"
        return self._listener


def _begin(work: Coroutine[None, None, None], among: set[asyncio.Task[None]]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    among.add(task)
    task.add_done_callback(among.discard)


def _is_refused(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the host refused the connection; a paused process does not refuse."""
    return (
        error.code() is grpc.StatusCode.UNAVAILABLE
        and "connection refused" in (error.details() or "").lower()
    )
