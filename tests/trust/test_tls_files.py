"""Files for TLS and other secrets are checked before use, also by commands and controllers."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from streammeta.controller.tls.manager import PeerTls
from streammeta.tls import files as tls
from streammeta.tls.certificates import read_certificates, read_key
from streammeta.tls.files import TlsError, TlsFiles, tls_files
from streammeta.tls.listener import Bounds, Listener
from streammeta.tls.secret_files import is_open_to_others
from tests.kit.certificates import Authority
from tests.kit.waiting import until
from tests.trust.test_tls_channels import asked, serving


def test_a_set_that_fits_names_its_principal(authority: Authority) -> None:
    contents = authority.issue("broker/1007").load()
    assert str(contents.principal) == "broker/1007"
    assert "PRIVATE" not in repr(contents)


def test_some_of_the_files_are_no_set(tmp_path: Path) -> None:
    assert tls_files(None, None, None) is None
    with pytest.raises(TlsError, match=r"peer-tls-key.*--peer-tls-ca"):
        tls_files(tmp_path, tmp_path, None, "peer-tls")


@pytest.fixture
def good(authority: Authority, tmp_path: Path) -> TlsFiles:
    """Give files of the test's own, which it may spoil."""
    files = authority.issue("admin/alice")
    copies = TlsFiles(tmp_path / "ca.pem", tmp_path / "own.pem", tmp_path / "own.key")
    for source, copy in (
        (files.ca, copies.ca),
        (files.certificate, copies.certificate),
        (files.key, copies.key),
    ):
        copy.write_bytes(source.read_bytes())
    copies.key.chmod(0o600)
    return copies


@pytest.mark.parametrize("installed", [True, False])
def test_each_file_must_be_what_it_should_be(
    good: TlsFiles, authority: Authority, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if not installed:
        monkeypatch.setattr(tls, "find_spec", lambda _: None)
    absent, nonsense = good.ca.with_name("absent"), good.ca.with_name("nonsense")
    nonsense.write_text("nonsense")
    nonsense.chmod(0o600)
    other = authority.issue("admin/other")
    for files, told in [
        (replace(good, ca=absent), "tls-ca: can't read .*absent"),
        (replace(good, ca=nonsense), "tls-ca: can't use .*nonsense.*must contain CA certificates"),
        (replace(good, certificate=absent), "tls-cert: can't read .*absent"),
        (replace(good, certificate=nonsense), "tls-cert: can't use .*nonsense"),
        (replace(good, key=other.key), "tls-cert: .*with its key, without a password"),
        (replace(good, key=absent), "tls-key: can't read .*absent"),
    ]:
        with pytest.raises(TlsError, match=f"(?s)^{told}"):
            files.load()
    good.key.chmod(0o640)
    with pytest.raises(TlsError, match=r"tls-key.*0640.*600"):
        good.load()


def test_what_needs_cryptography_is_judged_where_it_is_installed(
    good: TlsFiles, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = replace(good, ca=stranger.ca)
    with pytest.raises(TlsError, match=re.escape(f"tls-cert: {good.certificate} was signed by an")):
        foreign.load()
    monkeypatch.setattr(tls, "find_spec", lambda _: None)
    assert foreign.load().principal is None


def test_a_certificate_of_an_authority_is_no_leaf(authority: Authority) -> None:
    as_leaf = TlsFiles(authority.ca, authority.files.certificate, authority.files.key)
    with pytest.raises(TlsError, match="authority"):
        as_leaf.load()


def test_a_bundle_must_hold_an_authority(good: TlsFiles) -> None:
    with pytest.raises(TlsError, match="tls-ca"):
        replace(good, ca=good.certificate).load()


ROOT, OURS = 0, 10001


def status(owner: int, mode: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, OURS, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("process", "owner", "mode", "is_open"),
    [
        (OURS, OURS, 0o600, False),
        (OURS, OURS, 0o400, False),
        (OURS, OURS, 0o640, True),
        (OURS, ROOT, 0o440, False),  # as Kubernetes places it for a group
        (OURS, ROOT, 0o640, False),
        (OURS, ROOT, 0o660, True),
        (OURS, ROOT, 0o444, True),
        (ROOT, ROOT, 0o600, False),
        (ROOT, ROOT, 0o640, True),
    ],
)
def test_a_secret_is_open_to_others(
    monkeypatch: pytest.MonkeyPatch, process: int, owner: int, mode: int, is_open: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: process)
    assert is_open_to_others(status(owner, mode)) == is_open


BOTH = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)


@dataclass(frozen=True)
class Leaf:
    """Statements of a certificate; its times are from now on."""

    uris: Sequence[str] = ("streammeta://test/controller/1",)
    begin: timedelta = timedelta(hours=-1)
    end: timedelta = timedelta(hours=1)
    usages: Sequence[x509.ObjectIdentifier] = BOTH
    hosts: Sequence[str] = ("127.0.0.1",)

    def issue(self, authority: Authority, folder: Path) -> TlsFiles:
        (issuer,) = read_certificates(authority.ca)
        signer = read_key(authority.files.key)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        names = [
            *map(x509.UniformResourceIdentifier, self.uris),
            *(x509.IPAddress(ip_address(host)) for host in self.hosts),
        ]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + self.begin)
            .not_valid_after(now + self.end)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.ExtendedKeyUsage(self.usages), critical=False)
            .sign(signer, hashes.SHA256())
        )
        files = TlsFiles(authority.ca, folder / "leaf.pem", folder / "leaf.key")
        files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        files.key.chmod(0o600)
        return files


SOUND = Leaf()
DEFECTS: Mapping[str, Leaf] = {
    "expired at .* UTC": replace(SOUND, end=timedelta(minutes=-1)),
    "is not valid before .* UTC: check the clock": replace(SOUND, begin=timedelta(minutes=1)),
    "was not issued for client authentication": replace(SOUND, usages=BOTH[1:]),
    "was not issued for server authentication": replace(SOUND, usages=BOTH[:1]),
}


async def is_taken(endpoint: str, tls: TlsFiles) -> bool:
    try:
        await asked(endpoint, tls.read())  # the judgement of the caller's own side is passed by
    except grpc.aio.AioRpcError:
        return False
    return True


@pytest.mark.parametrize("told", DEFECTS)
async def test_a_defect_is_named_at_home_and_refused_abroad(
    authority: Authority, tmp_path: Path, told: str
) -> None:
    files = DEFECTS[told].issue(authority, tmp_path)
    with pytest.raises(TlsError, match=f"^tls-cert: .*{told}"):
        files.load()
    async with serving(authority.issue("controller/1")) as endpoint:
        assert await is_taken(endpoint, files) == ("server auth" in told)
    async with serving(files.read()) as endpoint:
        assert await is_taken(endpoint, authority.issue("broker/7")) == ("client auth" in told)


@pytest.mark.parametrize(
    "uris", [(), ("spiffe://test/controller/1",), (*SOUND.uris, "streammeta://test/broker/1")]
)
def test_a_certificate_names_one(
    authority: Authority, tmp_path: Path, uris: tuple[str, ...]
) -> None:
    with pytest.raises(TlsError, match="identity"):
        replace(SOUND, uris=uris).issue(authority, tmp_path).load()


@pytest.mark.parametrize(
    ("hosts", "target", "is_good"),
    [
        (("127.0.0.1",), "127.0.0.1", True),
        (("localhost",), "localhost", True),
        (("::1",), "[::1]", True),
        (("localhost",), "127.0.0.1", False),
        (("127.0.0.2",), "127.0.0.1", False),
        (("other.example",), "localhost", False),
        (("::2", "127.0.0.1", "localhost"), "[::1]", False),
    ],
)
async def test_clients_check_the_name_that_they_connect_to(
    authority: Authority, hosts: tuple[str, ...], target: str, is_good: bool
) -> None:
    tls = authority.issue("controller/1", hosts=hosts)
    at = "[::1]:0" if target == "[::1]" else "127.0.0.1:0"
    async with serving(tls, at) as endpoint:
        port = endpoint.rpartition(":")[2]
        assert await is_taken(f"{target}:{port}", authority.issue("broker/7")) == is_good


async def test_hosts_that_show_nothing_take_little_room_and_no_time(
    authority: Authority,
) -> None:
    told: list[str] = []
    tls = PeerTls.of(authority.issue("controller/1").load())
    listening = Listener(
        tls,
        lambda _: asyncio.Protocol(),
        lambda _host, event, _reason: told.append(event),
        bounds=Bounds(handshakes_of_host=3, handshake_s=2.0, handshake_patience_s=2.0),
    )
    port = await listening.start("127.0.0.1:0")
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    assert [await reader.read() for reader, _ in silent] == [b""] * 5
    await until(lambda: len(told) == 5, "complaints")
    assert sorted(told) == ["handshake_failed"] * 3 + ["too_many_handshakes"] * 2
    for _, writer in silent:
        writer.close()
    await listening.stop()
