"""Mutual TLS between controllers: the same authority on both sides, or no connection."""

import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from streammeta.controller.config import ConfigError
from streammeta.controller.peers.tls import PLAIN_TEXT, PeerTls, load_tls
from tests.kit.certificates import Authority
from tests.quorum.test_quorum_peers import caller_with, peer_here, vote


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


async def is_answered(peer: PeerTls, stranger: PeerTls) -> bool:
    async with (
        peer_here(tls=peer.listening) as endpoint,
        caller_with(seed=endpoint, tls=stranger.dialling) as caller,
    ):
        answered = await caller.ask(vote(1))
        assert caller.lost == []
        return answered


async def test_two_certificates_of_one_authority_speak(ours: Authority) -> None:
    assert await is_answered(
        load_tls(ours.issue("controller/1")), load_tls(ours.issue("controller/2"))
    )


@pytest.mark.parametrize("is_caller", [True, False])
async def test_who_shows_no_certificate_of_the_authority_is_refused(
    ours: Authority, theirs: Authority, is_caller: bool
) -> None:
    foreign = theirs.issue("controller/3")
    trusting = replace(foreign, ca=ours.ca)
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.check_hostname = False
    nameless.load_verify_locations(ours.ca)
    strangers = [PLAIN_TEXT, load_tls(foreign), load_tls(trusting)]
    if is_caller:
        strangers.append(PeerTls(dialling=nameless))
    member = load_tls(ours.issue("controller/1"))
    for stranger in strangers:
        pair = (member, stranger) if is_caller else (stranger, member)
        assert not await is_answered(*pair)


async def test_older_versions_of_tls_are_refused(ours: Authority) -> None:
    old = load_tls(ours.issue("controller/1"))
    assert old.dialling is not None
    old.dialling.minimum_version = ssl.TLSVersion.TLSv1_2
    old.dialling.maximum_version = ssl.TLSVersion.TLSv1_2
    assert not await is_answered(load_tls(ours.issue("controller/2")), old)


def test_without_files_controllers_speak_plain_text() -> None:
    assert load_tls(None) is PLAIN_TEXT


def test_a_file_that_can_not_be_used_is_named_with_its_option(
    ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    good, other = ours.issue("controller/1"), theirs.issue("controller/2")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    absent = tmp_path / "absent"
    for files, message in (
        (replace(good, ca=absent), "peer-tls-ca: can't use .*absent"),
        (replace(good, ca=nonsense), "peer-tls-ca: can't use .*nonsense"),
        (replace(good, certificate=nonsense), "peer-tls-cert: can't use .*nonsense"),
        (replace(good, key=other.key), "peer-tls-cert: .* its key, .* in --peer-tls-key"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tls(files)
