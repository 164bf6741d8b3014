"""Mutual TLS between controllers: each is the one its certificate names, or refused."""

from __future__ import annotations

import ssl
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from structlog.testing import capture_logs

from streammeta.controller.peers.dialled import REFUSED_CERTIFICATE, STRANGER
from streammeta.controller.peers.server import PeerServer
from streammeta.controller.quorum.messages import Request
from streammeta.controller.runtime.interfaces import Reply
from streammeta.controller.tls.manager import PeerTls
from streammeta.controller.trust.policy import Denials, parse_policy
from streammeta.tls.certificates import read_certificates
from streammeta.tls.files import TlsFiles
from tests.kit.certificates import Authority
from tests.quorum.fake_replica import FakeReplica
from tests.quorum.test_quorum_peers import (
    AS_CALLER,
    AS_PEER,
    CLUSTER,
    PEER,
    caller_with,
    peer_here,
    vote,
)

PLAIN_TEXT = PeerTls()
CALLER_ID = AS_CALLER.node_id


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


def named(authority: Authority, principal: str, cluster_id: str = CLUSTER) -> PeerTls:
    return PeerTls.of(authority.issue(principal, cluster_id=cluster_id).load())


def caller_of(authority: Authority) -> PeerTls:
    return named(authority, f"controller/{CALLER_ID}")


def peer_of(authority: Authority) -> PeerTls:
    return named(authority, f"controller/{PEER}")


class Counting(FakeReplica):
    count = 0

    def handle(self, request: Request, reply: Reply) -> None:
        self.count += 1
        super().handle(request, reply)


async def is_answered(peer: PeerTls, caller: PeerTls) -> bool:
    """Whether a vote is answered; the replica must not have seen one that is not."""
    replica = Counting(PEER)
    async with (
        peer_here(replica, tls=peer) as endpoint,
        caller_with(seed=endpoint, tls=caller) as calling,
    ):
        answered = await calling.ask(vote(1))
        assert calling.lost == []
        assert replica.count == answered
        return answered


async def test_controllers_of_one_authority_speak(ours: Authority) -> None:
    assert await is_answered(peer_of(ours), caller_of(ours))


def trusting(files: TlsFiles, authority: Authority) -> PeerTls:
    """Return the use of a certificate that takes those of another authority."""
    return PeerTls.of(replace(files.read(), ca=authority.ca.read_bytes()))


@pytest.mark.parametrize("is_caller", [True, False])
async def test_who_shows_no_certificate_of_the_authority_is_refused(
    ours: Authority, theirs: Authority, is_caller: bool
) -> None:
    node_id = CALLER_ID if is_caller else PEER
    foreign = theirs.issue(f"controller/{node_id}", cluster_id=CLUSTER)
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.check_hostname = False
    nameless.load_verify_locations(ours.ca)
    strangers = [PLAIN_TEXT, PeerTls.of(foreign.load()), trusting(foreign, ours)]
    if is_caller:
        strangers.append(PeerTls(dialling=nameless))
    for stranger in strangers:
        pair = (peer_of(ours), stranger) if is_caller else (stranger, caller_of(ours))
        assert not await is_answered(*pair)


@pytest.mark.parametrize("is_caller", [True, False])
async def test_who_is_another_by_its_certificate_is_refused(
    ours: Authority, is_caller: bool
) -> None:
    node_id = CALLER_ID if is_caller else PEER
    for stranger, told in (
        (named(ours, "controller/7"), "controller"),
        (named(ours, f"broker/{node_id}"), f"streammeta://{CLUSTER}/broker/{node_id}"),
        (named(ours, "admin/alice"), f"streammeta://{CLUSTER}/admin/alice"),
        (named(ours, f"controller/{node_id}", "other"), "streammeta://other/controller"),
    ):
        pair = (peer_of(ours), stranger) if is_caller else (stranger, caller_of(ours))
        with capture_logs() as logs:
            assert not await is_answered(*pair)
        events = {entry["event"] for entry in logs}
        assert (REFUSED_CERTIFICATE if is_caller else STRANGER) in events
        assert any(told in str(entry) for entry in logs)


@pytest.mark.parametrize("is_caller", [True, False])
async def test_a_controller_that_is_denied_is_refused_and_others_are_not(
    ours: Authority, is_caller: bool
) -> None:
    node_id = CALLER_ID if is_caller else PEER
    files = ours.issue(f"controller/{node_id}", cluster_id=CLUSTER)
    (certificate,) = read_certificates(files.certificate)
    for denied, is_refused in (
        (f'principals = ["controller/{node_id}"]', True),
        (f'fingerprints = ["{certificate.fingerprint(SHA256()).hex()}"]', True),
        (f'serials = ["{certificate.serial_number:x}"]', True),
        (f'principals = ["broker/{node_id}", "controller/7"]\nserials = ["7"]', False),
    ):
        peer, caller = peer_of(ours), caller_of(ours)
        denying = peer if is_caller else caller
        denying.denials = parse_policy(f"[deny]\n{denied}", CLUSTER, "").denials
        with capture_logs() as logs:
            assert await is_answered(peer, caller) != is_refused
        assert any("is denied by the policy" in str(entry) for entry in logs) == is_refused


@pytest.mark.parametrize("by_caller", [True, False])
async def test_a_denial_ends_connections_that_are_there(ours: Authority, by_caller: bool) -> None:
    peer, caller = peer_of(ours), caller_of(ours)
    server = PeerServer(FakeReplica(PEER), AS_PEER, peer)
    port = await server.start("127.0.0.1:0")
    async with caller_with(seed=f"127.0.0.1:{port}", tls=caller) as calling:
        assert await calling.ask(vote(1))
        calling.transport.reauthorize()
        server.reauthorize()
        assert calling.transport.connected_to, "both still accept it"
        denied = PEER if by_caller else CALLER_ID
        denying = caller if by_caller else peer
        denying.denials = parse_policy(
            f'[deny]\nprincipals = ["controller/{denied}"]', CLUSTER, ""
        ).denials
        calling.transport.reauthorize()
        server.reauthorize()
        await calling.until(lambda: not calling.transport.connected_to)
        assert not await calling.ask(vote(2))
        denying.denials = Denials()
        assert await calling.ask(vote(3))
    await server.stop()


async def test_older_versions_of_tls_are_refused(ours: Authority) -> None:
    old = caller_of(ours)
    assert old.dialling is not None
    old.dialling.minimum_version = ssl.TLSVersion.TLSv1_2
    old.dialling.maximum_version = ssl.TLSVersion.TLSv1_2
    assert not await is_answered(peer_of(ours), old)


def moved(tls: PeerTls, *, speaks: bool) -> PeerTls:
    """Return what a controller uses that is moved to TLS, and speaks it or not."""
    return PeerTls(dialling=tls.dialling if speaks else None, listening=tls.listening)


async def test_controllers_move_to_tls_one_by_one(ours: Authority) -> None:
    peer, caller = peer_of(ours), caller_of(ours)
    rounds = [PLAIN_TEXT, moved(caller, speaks=False), moved(caller, speaks=True), caller]
    peers = [PLAIN_TEXT, moved(peer, speaks=False), moved(peer, speaks=True), peer]
    for before, after in zip(range(3), range(1, 4), strict=True):
        assert await is_answered(peers[before], rounds[after])
        assert await is_answered(peers[after], rounds[before])


async def test_a_replaced_certificate_is_shown_from_the_next_connection_on(
    ours: Authority, theirs: Authority
) -> None:
    peer, caller = peer_of(ours), caller_of(ours)
    async with (
        peer_here(tls=peer) as endpoint,
        caller_with(seed=endpoint, tls=caller) as calling,
    ):
        assert await calling.ask(vote(1))
        peer.replace(theirs.issue(f"controller/{PEER}", cluster_id=CLUSTER).load())
        assert await calling.ask(vote(2)), "the connection goes on"
        async with caller_with(seed=endpoint, tls=caller_of(ours)) as another:
            assert not await another.ask(vote(1))
        async with caller_with(seed=endpoint, tls=caller_of(theirs)) as renewed:
            assert await renewed.ask(vote(1))


async def test_connections_are_made_anew_when_they_are_old_and_nobody_is_taken_for_dead(
    ours: Authority,
) -> None:
    peer, caller = peer_of(ours), caller_of(ours)
    caller.age_ms = 0
    async with (
        peer_here(tls=peer) as endpoint,
        caller_with(seed=endpoint, tls=caller) as calling,
    ):
        for number in range(1, 4):
            assert await calling.ask(vote(number))
        assert calling.lost == []


async def test_the_listener_ends_a_connection_that_is_not_made_anew(ours: Authority) -> None:
    peer, caller = peer_of(ours), caller_of(ours)
    peer.age_ms = 1
    async with (
        peer_here(tls=peer) as endpoint,
        caller_with(seed=endpoint, tls=caller) as calling,
    ):
        await calling.ask(vote(1))
        await calling.until(lambda: not calling.transport.connected_to)
