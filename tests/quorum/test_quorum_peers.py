"""The transport: what it tells of broken, refused and silent peers, and where it looks for them."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from streammeta.cli.local.local_cluster import Child, free_ports, start_child
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.peers.addresses import PeerAddresses
from streammeta.controller.peers.dialled import IN_FLIGHT_MAX, Identity
from streammeta.controller.peers.server import PeerServer
from streammeta.controller.peers.transport import TcpPeerTransport
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.controller.tls.manager import PeerTls
from tests.kit.grpc_servers import served
from tests.kit.waiting import until
from tests.quorum.fake_replica import FakeReplica
from tests.quorum.peer_messages import FETCH, FETCH_SNAPSHOT, VOTE, with_field

PEER = NodeId(2)
OWN = Endpoints("127.0.0.1:1", "127.0.0.1:2")
TIMEOUT_MS = 1000
CLUSTER = ClusterId("c")
AS_CALLER = Identity(CLUSTER, NodeId(0))
AS_PEER = Identity(CLUSTER, PEER)
NEVER_MS = 100_000
"""Where silence alone must not be what ends a request."""


class SwallowingProxy:
    """Forwards connections; those that were there when `swallow` was called carry nothing more."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.partition(":")
        self._generation = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: list[asyncio.StreamWriter] = []

    def swallow(self) -> None:
        self._generation += 1

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        there = await asyncio.open_connection(self._host, int(self._port))
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._forward(source, sink, self._generation))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, generation: int
    ) -> None:
        while data := await source.read(1 << 16):
            if generation == self._generation:
                sink.write(data)
        sink.close()


class Caller:
    def __init__(self, transport: TcpPeerTransport) -> None:
        self.transport = transport
        self.responses: list[messages.Response] = []
        self.failed: list[int] = []
        self.lost: list[NodeId] = []
        self._told = asyncio.Event()
        transport.bind(self)

    def on_response(self, response: messages.Response) -> None:
        self.responses.append(response)
        self._told.set()

    def on_request_failed(self, peer: NodeId, request_id: int) -> None:
        self.failed.append(request_id)
        self._told.set()

    def on_connection_lost(self, peer: NodeId) -> None:
        self.lost.append(peer)
        self._told.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._told.clear()
                await self._told.wait()

    async def ended(self, request_id: int) -> bool:
        """Wait until the request has ended; return whether it was answered."""

        def answered() -> bool:
            return any(response.header.request_id == request_id for response in self.responses)

        await self.until(lambda: answered() or request_id in self.failed)
        return answered()

    async def ask(self, request: messages.Request) -> bool:
        """Send a request and wait until it has ended; return whether it was answered."""
        self.transport.send(request)
        return await self.ended(request.header.request_id)


@pytest.mark.parametrize("is_stopping", [True, False])
async def test_a_peer_that_stops_is_told_of_once_and_is_no_warning(is_stopping: bool) -> None:
    replica = FakeReplica(2)
    replica.is_stopping = is_stopping
    async with peer_here(replica) as endpoint, caller_with(seed=endpoint) as calling:
        with capture_logs() as logs:
            for number in (1, 2):
                calling.transport.send(fetch(number))
                await until(lambda: len(replica.replies) == number, "it waits")  # noqa: B023
                replica.replies[-1](None)
                assert not await calling.ended(number)
    told = [(log["event"], log["log_level"]) for log in logs if "reason" in log or is_stopping]
    event = ("peer_is_stopping", "info") if is_stopping else ("peer_refuses_request", "warning")
    assert told == [event]


def vote(request_id: int) -> Any:
    return with_field(VOTE, "header.request_id", request_id)


def fetch(request_id: int) -> Any:
    return with_field(FETCH, "header.request_id", request_id)


def fetch_snapshot(request_id: int) -> Any:
    return with_field(FETCH_SNAPSHOT, "header.request_id", request_id)


def voters_at(endpoint: str) -> VoterSet:
    return VoterSet((Voter(ReplicaKey(PEER), endpoint),))


@asynccontextmanager
async def caller_with(
    *,
    seed: str = "",
    override: str = "",
    voters: VoterSet | None = None,
    timeout_ms: int = TIMEOUT_MS,
    tls: PeerTls | None = None,
) -> AsyncIterator[Caller]:
    seeds = {PEER: seed} if seed else {}
    overrides = {PEER: override} if override else {}
    addresses = PeerAddresses(NodeId(0), OWN, seeds, overrides)
    caller = Caller(TcpPeerTransport(addresses, AS_CALLER, timeout_ms, tls))
    caller.transport.set_voters(voters or VoterSet())
    try:
        yield caller
    finally:
        await caller.transport.close()


@asynccontextmanager
async def peer_here(
    replica: FakeReplica | None = None,
    identity: Identity = AS_PEER,
    tls: PeerTls | None = None,
) -> AsyncIterator[str]:
    """A peer in this process; its endpoint."""
    server = PeerServer(replica or FakeReplica(PEER), identity, tls)
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop()


@asynccontextmanager
async def calling(
    replica: FakeReplica | None = None, timeout_ms: int = TIMEOUT_MS
) -> AsyncIterator[Caller]:
    async with (
        peer_here(replica) as endpoint,
        caller_with(seed=endpoint, timeout_ms=timeout_ms) as caller,
    ):
        yield caller


@asynccontextmanager
async def calling_through_proxy(
    timeout_ms: int = TIMEOUT_MS,
) -> AsyncIterator[tuple[Caller, SwallowingProxy]]:
    """A caller of a peer in this process, by way of a proxy."""
    async with peer_here() as target:
        proxy = SwallowingProxy(target)
        server = await asyncio.start_server(proxy.connected, "127.0.0.1", 0)
        endpoint = "{}:{}".format(*server.sockets[0].getsockname())
        async with caller_with(seed=endpoint, timeout_ms=timeout_ms) as caller:
            yield caller, proxy
        server.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[Child, str]]:
    """A peer in a process of its own."""
    command = [sys.executable, "-m", "tests.quorum.stubborn_peer", CLUSTER, str(PEER)]
    child = start_child("peer", command, tmp_path / "peer.log")
    yield child, child.wait_ready()
    child.kill()


# -- broken, refused, silent


@pytest.mark.process
@pytest.mark.parametrize("is_polling", [True, False], ids=["long poll", "nothing under way"])
async def test_a_killed_peer_is_noticed_at_once(peer: tuple[Child, str], is_polling: bool) -> None:
    child, endpoint = peer

    async with caller_with(seed=endpoint, timeout_ms=NEVER_MS) as caller:
        assert await caller.ask(vote(1))
        if is_polling:
            caller.transport.send(fetch(2))
            caller.transport.send(vote(3))  # leaves after the Fetch, so that is under way
            assert await caller.ended(3)
        child.kill()
        await caller.until(lambda: PEER in caller.lost)
        assert not is_polling or not await caller.ended(2)


@pytest.mark.process
async def test_a_stopped_peer_is_silent_not_lost(peer: tuple[Child, str]) -> None:
    child, endpoint = peer
    async with asyncio.timeout(60), caller_with(seed=endpoint) as caller:
        assert await caller.ask(vote(1))
        child.process.send_signal(signal.SIGSTOP)
        for request_id in (2, 3):  # the second meets a connection that is not accepted
            assert not await caller.ask(vote(request_id))
        assert caller.lost == []
        child.process.send_signal(signal.SIGCONT)
        for request_id in count(4):  # until it is found again, or time is up
            caller.transport.send(vote(request_id))
            if await caller.ended(request_id):
                return
            await asyncio.sleep(0.02)  # between attempts to connect requests fail at once


@pytest.mark.parametrize("is_polling", [True, False], ids=["long poll", "nothing under way"])
async def test_a_closed_connection_is_noticed_at_once(is_polling: bool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(peer_here())
        async with caller_with(seed=endpoint, timeout_ms=NEVER_MS) as caller:
            if is_polling:
                caller.transport.send(fetch(1))
            assert await caller.ask(vote(2))
            await stack.aclose()
            await caller.until(lambda: caller.lost == [PEER])
            assert caller.failed == ([1] if is_polling else [])


async def test_the_end_of_a_connection_for_snapshots_is_no_end_of_the_peer() -> None:
    async with calling_through_proxy(NEVER_MS) as (caller, proxy):
        assert await caller.ask(fetch_snapshot(1))
        proxy.connections[0].transport.abort()
        await asyncio.sleep(0.05)
        assert await caller.ask(fetch_snapshot(2))
        assert caller.lost == []


async def test_a_refused_connection_is_noticed_at_once() -> None:
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"

    async with caller_with(seed=endpoint, timeout_ms=NEVER_MS) as caller:
        assert not await caller.ask(vote(1))
        await caller.until(lambda: caller.lost == [PEER])


async def test_a_peer_nobody_has_told_of_is_not_waited_for() -> None:
    async with caller_with(timeout_ms=NEVER_MS) as caller:
        assert not await caller.ask(vote(1))
        assert caller.lost == []


async def test_a_connection_that_carries_nothing_is_not_waited_for() -> None:
    """TCP itself would try an old connection for minutes after a cut has healed."""
    async with calling_through_proxy() as (caller, proxy):
        assert await caller.ask(vote(1))
        proxy.swallow()
        assert not await caller.ask(vote(2))
        assert await caller.ask(vote(3))
        assert caller.lost == []


# -- where peers are


@pytest.mark.parametrize("is_right", ["voters", "seed"])
async def test_of_two_addresses_the_one_that_works_is_found(is_right: str) -> None:
    """Neither a stale voter record nor a stale configuration keeps nodes apart."""
    (port,) = free_ports(1)
    gone = f"127.0.0.1:{port}"

    async with peer_here() as there:
        voter, seed = (there, gone) if is_right == "voters" else (gone, there)
        async with caller_with(seed=seed, voters=voters_at(voter)) as caller:
            caller.transport.send(vote(1))
            if not await caller.ended(1):
                assert caller.lost == [], "another address was not tried yet"
                assert await caller.ask(vote(2))
            assert caller.transport.endpoints(PEER).peers == there


@pytest.mark.parametrize(
    ("impostor", "identity"),
    [
        (FakeReplica(PEER), Identity(CLUSTER, NodeId(3))),
        (FakeReplica(PEER), Identity(ClusterId("other"), PEER)),
        (FakeReplica(3), AS_PEER),
        (FakeReplica(PEER, error=messages.QuorumError.INVALID_VOTER_KEY), AS_PEER),
        (FakeReplica(PEER, error=messages.QuorumError.INCONSISTENT_CLUSTER_ID), AS_PEER),
    ],
    ids=["another node", "another cluster", "another's answer", "another disk", "its cluster"],
)
async def test_an_address_taken_over_by_another_node_is_left(
    impostor: FakeReplica, identity: Identity
) -> None:
    async with (
        peer_here(impostor, identity) as taken,
        peer_here() as there,
        caller_with(seed=there, voters=voters_at(taken)) as caller,
    ):
        caller.transport.send(vote(1))
        await caller.ended(1)
        assert not any(response.header.sender != PEER for response in caller.responses)
        assert await caller.ask(vote(2))
        assert caller.responses[-1].header.error is messages.QuorumError.NONE
        assert caller.lost == []


async def test_a_port_for_clients_is_left(grpc_port: str) -> None:
    """Logs and configurations of older releases name it."""
    async with peer_here() as there, caller_with(seed=there, voters=voters_at(grpc_port)) as caller:
        assert not await caller.ask(vote(1))
        assert await caller.ask(vote(2))


@pytest.fixture
async def grpc_port() -> AsyncIterator[str]:
    async with served() as endpoint:
        yield endpoint


async def test_the_leaders_addresses_are_learnt_from_answers() -> None:
    """A node that joins knows its seeds alone; they say where the leader is."""
    clients = Endpoints(clients="10.0.0.7:9090")
    for named, known in (
        (both := Endpoints("10.0.0.7:9091", "10.0.0.7:9090"), both),
        (Endpoints("no address", "no address"), Endpoints()),
        (clients, clients),
    ):
        async with calling(FakeReplica(PEER, named, leader_id=NodeId(7))) as caller:
            assert await caller.ask(vote(1))
            assert caller.transport.endpoints(NodeId(7)) == known


async def test_an_override_wins_and_is_told_to_nobody() -> None:
    async with (
        peer_here() as proxy,
        caller_with(override=proxy, seed="10.0.0.1:1", voters=voters_at("10.0.0.2:1")) as caller,
    ):
        assert await caller.ask(vote(1))
        assert caller.transport.endpoints(PEER) == Endpoints("10.0.0.2:1")
        assert caller.transport.endpoints(NodeId(0)) == OWN


def test_what_a_leader_says_of_itself_is_newer_than_its_record() -> None:
    addresses = PeerAddresses(NodeId(0), OWN, {}, {})
    addresses.set_voters(VoterSet((Voter(ReplicaKey(PEER), "10.0.0.1:2", "10.0.0.1:1"),)))
    assert addresses.for_clients(NodeId(0)) == OWN.clients
    assert addresses.for_clients(NodeId(3)) is None
    assert addresses.for_clients(PEER) == "10.0.0.1:1"
    addresses.learn_leader(PEER, "10.0.0.1:4", "10.0.0.1:3")
    addresses.learn_leader(PEER, "", "0.0.0.0:9")
    assert addresses.for_clients(PEER) == "10.0.0.1:3", "unknown and malformed ones are ignored"
    assert addresses.is_candidate(PEER, "10.0.0.1:4")
    assert not addresses.is_candidate(PEER, "10.0.0.1:3"), "that is no address for peers"
    addresses.learn_leader(NodeId(3), "10.0.0.2:2", "10.0.0.2:1")
    assert addresses.for_clients(PEER) == "10.0.0.1:1"


# -- limits and separate connections


async def test_snapshots_travel_on_a_connection_of_their_own() -> None:
    async with calling_through_proxy() as (caller, proxy):
        for request_id in (1, 3):
            caller.transport.send(vote(request_id))
            caller.transport.send(fetch_snapshot(request_id + 1))
            assert await caller.ended(request_id)
            assert await caller.ended(request_id + 1)
        assert len(proxy.connections) == 2


async def test_a_peer_that_answers_nothing_holds_a_bounded_number_of_requests() -> None:
    replica = FakeReplica(PEER)
    async with calling(replica) as caller:
        for request_id in range(IN_FLIGHT_MAX + 3):
            caller.transport.send(fetch(request_id))
        await caller.until(lambda: len(caller.failed) >= 3)
        assert sorted(caller.failed) == [IN_FLIGHT_MAX + extra for extra in range(3)]
        for request_id in range(IN_FLIGHT_MAX):
            assert not await caller.ended(request_id)
        assert await caller.ask(vote(1000)), "there is room again"
        assert max(request.header.request_id for request in replica.waiting) < IN_FLIGHT_MAX
        assert len(replica.forgotten) == IN_FLIGHT_MAX, "its requests went with the connection"


async def test_connections_to_nodes_that_are_none_of_ours_any_more_are_closed() -> None:
    async with peer_here() as endpoint, caller_with(voters=voters_at(endpoint)) as caller:
        assert await caller.ask(vote(1))
        assert caller.transport.connected_to == {(PEER, endpoint)}
        caller.transport.set_voters(VoterSet())
        assert caller.transport.connected_to == set()
        assert not await caller.ask(vote(2))
