"""Places for connections of peers: no host takes those of the others, and voters keep theirs."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.peers import server as peer_server
from streammeta.controller.peers.addresses import PeerAddresses, VoterHosts
from streammeta.controller.peers.server import PeerServer
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.runtime.interfaces import Endpoints
from tests.quorum.fake_replica import FakeReplica
from tests.quorum.test_peer_server import HERE

VOTERS = ("10.0.0.1", "10.0.0.2")


@pytest.fixture
async def server() -> PeerServer:
    """A server whose voters have addresses in the log and among the seeds."""
    addresses = PeerAddresses(NodeId(7), Endpoints(), {NodeId(2): f"{VOTERS[1]}:9100"}, {})
    key = ReplicaKey(NodeId(1), DirectoryId("disk"))
    addresses.set_voters(VoterSet((Voter(key, f"{VOTERS[0]}:9100"),)))
    return PeerServer(FakeReplica(HERE.node_id), HERE, addresses=addresses)


def taken(server: PeerServer, host: str, tries: int = 200) -> int:
    """Connect from a host, each connection with its hello; return how many found a place."""
    found = 0
    for _ in range(tries):
        connection: Any = object()
        if not server.admit(connection, host):
            found += 1
            server.greeted(connection, NodeId(9), "")
    return found


async def test_one_host_takes_no_more_than_its_share(server: PeerServer) -> None:
    assert taken(server, "192.0.2.1") == peer_server.HOST_MAX
    assert taken(server, "192.0.2.2") == peer_server.HOST_MAX


async def test_hosts_of_strangers_leave_places_for_voters(server: PeerServer) -> None:
    strangers = sum(taken(server, f"192.0.2.{number}") for number in range(20))
    assert strangers == peer_server.OTHERS_MAX
    kept = peer_server.CONNECTIONS_MAX - peer_server.OTHERS_MAX
    assert taken(server, VOTERS[0], 8) == taken(server, f"::ffff:{VOTERS[1]}", 8) == 8
    assert kept >= 16


async def test_a_voters_host_leaves_places_for_the_other_voters(server: PeerServer) -> None:
    assert taken(server, VOTERS[0]) == peer_server.VOTER_HOST_MAX
    assert taken(server, VOTERS[1]) == peer_server.VOTER_HOST_MAX


async def test_names_of_voters_are_looked_up_and_kept_while_the_look_fails() -> None:
    answers: list[Iterable[str] | OSError] = [["10.0.0.9"], OSError("no name server")]
    looked = asyncio.Event()

    async def resolve(name: str) -> Iterable[str]:
        assert name == "voter.example"
        answer = answers.pop(0)
        looked.set()
        if isinstance(answer, OSError):
            raise answer
        return answer

    hosts = VoterHosts(lambda: ["voter.example:9100", "[::1]:9100"], resolve)
    assert "10.0.0.9" not in hosts
    assert "::1" in hosts
    for _ in range(2):
        looked.clear()
        looking = asyncio.create_task(hosts.run())
        await looked.wait()
        await asyncio.sleep(0)
        assert "10.0.0.9" in hosts
        looking.cancel()


async def test_a_name_that_can_not_be_looked_up_leaves_the_others_theirs() -> None:
    looked: set[str] = set()

    async def resolve(name: str) -> Iterable[str]:
        looked.add(name)
        name.encode("idna")
        return ["10.0.0.9"]

    hosts = VoterHosts(lambda: [f"{'a' * 64}.example:9100", "voter.example:9100"], resolve)
    looking = asyncio.create_task(hosts.run())
    while len(looked) < 2 and not looking.done():  # noqa: ASYNC110 - turns
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "10.0.0.9" in hosts
    assert not looking.done()
    looking.cancel()
