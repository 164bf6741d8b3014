"""`streammeta certs`: files made, files shown, requests refused."""

import contextlib
import json
import ssl
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.tls.certificates import describe, read_certificates
from streammeta.tls.identity import Principal

Certs = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def certs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Certs:
    """Run a command with this test's folders; return its exit code and object."""

    def run(*words: str, folder: str = "certs") -> tuple[int, dict[str, Any]]:
        options: tuple[str, ...] = ()
        if words[0] != "show":
            options = ("--dir", str(tmp_path / folder), "--ca-key", str(tmp_path / "ca" / "ca.key"))
        code = run_cli(cli, ["certs", *words, *options, "--format", "json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def made(certs: Certs, tmp_path: Path) -> Path:
    """Folder with an authority, and certificates of each kind."""
    assert certs("ca")[0] == 0
    for words in (
        ("controller", "--id", "3", "--host", "localhost", "--host", "127.0.0.1", "--host", "::1"),
        ("broker", "--id", "1007"),
        ("user", "--role", "admin", "--name", "alice", "--days", "7"),
    ):
        code, answer = certs(*words, "--cluster-id", "demo")
        assert code == 0, answer
    return tmp_path / "certs"


def test_new_certificates_are_shown_without_a_problem(certs: Certs, made: Path) -> None:
    files = [str(path) for path in sorted(made.glob("*.pem"))]
    code, answer = certs("show", *files, "--ca", str(made / "ca.pem"))
    assert code == 0
    shown = {row["identity"]: row for row in answer["certificates"]}
    assert set(shown) == {"authority", "controller/3", "broker/1007", "admin/alice"}
    assert shown["controller/3"]["hosts"] == "localhost 127.0.0.1 ::1"
    assert shown["admin/alice"]["days_left"] == 6
    assert shown["broker/1007"]["days_left"] == 89
    assert not any(row["problems"] for row in shown.values())


def test_keys_are_their_owners_alone_and_that_of_the_authority_lies_elsewhere(made: Path) -> None:
    keys = [*made.glob("*.key"), made.parent / "ca" / "ca.key"]
    assert len(keys) == 4
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert not (made / "ca.key").exists()


def test_both_sides_of_a_connection_take_each_other_s_certificate(made: Path) -> None:
    sides = []
    for protocol, stem in (
        (ssl.PROTOCOL_TLS_CLIENT, "broker-1007"),
        (ssl.PROTOCOL_TLS_SERVER, "controller-3"),
    ):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(made / "ca.pem")
        context.load_cert_chain(made / f"{stem}.pem", made / f"{stem}.key")
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = "localhost" if protocol is ssl.PROTOCOL_TLS_CLIENT else None
        is_server = protocol is ssl.PROTOCOL_TLS_SERVER
        tls = context.wrap_bio(incoming, outgoing, server_side=is_server, server_hostname=name)
        sides.append((tls, incoming, outgoing))
    (client, to_client, from_client), (server, to_server, from_server) = sides
    for _ in range(3):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
            to_server.write(from_client.read())
            to_client.write(from_server.read())
    for tls, uri in ((server, "broker/1007"), (client, "controller/3")):
        seen = tls.getpeercert()
        assert seen is not None
        assert ("URI", f"streammeta://demo/{uri}") in seen["subjectAltName"]


def test_nothing_is_ever_overwritten(certs: Certs, made: Path) -> None:
    before = {path: path.read_bytes() for path in made.parent.rglob("*") if path.is_file()}
    for words in (("ca",), ("broker", "--id", "1007", "--cluster-id", "demo")):
        code, answer = certs(*words)
        assert (code, answer["error"]["code"]) == (1, "CERTIFICATE")
        assert "never overwritten" in answer["error"]["message"]
    assert before == {path: path.read_bytes() for path in made.parent.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("broker", "--id", "seven", "--cluster-id", "demo"), "must be its node id"),
        (("controller", "--id", "3", "--cluster-id", "demo"), "--host: missing"),
        (
            ("controller", "--id", "-1", "--cluster-id", "demo", "--host", "a"),
            "must be its node id",
        ),
        (("broker", "--id", "7", "--cluster-id", "a/b"), "cluster id 'a/b'"),
        (("user", "--role", "broker", "--name", "7", "--cluster-id", "demo"), "not one of"),
        (("user", "--role", "admin", "--name", "a b", "--cluster-id", "demo"), "name 'a b'"),
        (("broker", "--id", "7", "--cluster-id", "demo", "--days", "0"), "--days"),
    ],
)
def test_wrong_identity_is_usage(
    certs: Certs, made: Path, words: tuple[str, ...], told: str
) -> None:
    before = sorted(made.iterdir())
    code, answer = certs(*words)
    assert (code, answer["error"]["code"]) == (2, "USAGE")
    assert told in answer["error"]["message"]
    assert sorted(made.iterdir()) == before


def test_an_authority_key_beside_its_certificates_is_refused(certs: Certs, tmp_path: Path) -> None:
    code, answer = certs("ca", folder="ca")
    assert code == 2
    assert "hoose a folder" in answer["error"]["message"]
    assert not (tmp_path / "ca").exists()


def test_a_key_that_others_may_read_signs_nothing(certs: Certs, made: Path) -> None:
    (made.parent / "ca" / "ca.key").chmod(0o640)
    code, answer = certs("broker", "--id", "8", "--cluster-id", "demo")
    assert code == 1
    assert "chmod 600" in answer["error"]["message"]
    assert not (made / "broker-8.pem").exists()


def test_no_certificate_outlives_its_authority(certs: Certs, tmp_path: Path) -> None:
    assert certs("ca", "--days", "3")[0] == 0
    assert certs("broker", "--id", "7", "--cluster-id", "demo")[0] == 0
    folder = tmp_path / "certs"
    ends = [
        read_certificates(folder / f"{stem}.pem")[0].not_valid_after_utc
        for stem in ("ca", "broker-7")
    ]
    assert ends[0] == ends[1]


def test_a_leaf_signs_nothing(certs: Certs, made: Path) -> None:
    (made / "ca.pem").write_bytes((made / "broker-1007.pem").read_bytes())
    (made.parent / "ca" / "ca.key").write_bytes((made / "broker-1007.key").read_bytes())
    code, answer = certs("broker", "--id", "8", "--cluster-id", "demo")
    assert code == 1
    assert "is not an authority" in answer["error"]["message"]


def _signed(folder: Path, **changes: Any) -> Path:
    """Write a certificate that signs itself, sound but for `changes`; return its file."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    begin, end = changes.get("valid", (now - timedelta(days=1), now + timedelta(days=1)))
    uris = changes.get("uris", ["streammeta://demo/broker/7"])
    usages = changes.get(
        "usages", [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    )
    names = [x509.UniformResourceIdentifier(uri) for uri in uris]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "tried.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


_HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"valid": (-3 * _HOUR, -_HOUR)}, "expired at"),
        ({"valid": (_HOUR, 2 * _HOUR)}, "is not valid before"),
        ({"uris": ["spiffe://example.org/x"]}, "contains no identity"),
        ({"uris": ["streammeta://demo/broker/7", "streammeta://demo/broker/8"]}, "found 2"),
        ({"usages": [ExtendedKeyUsageOID.SERVER_AUTH]}, "was not issued for client authentication"),
        ({"usages": [ExtendedKeyUsageOID.CLIENT_AUTH]}, "was not issued for server authentication"),
        ({}, "was signed by another authority"),
    ],
)
def test_each_defect_of_a_certificate_is_told(
    certs: Certs, made: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    if "valid" in changes:
        now = datetime.now(UTC)
        changes = {"valid": tuple(now + offset for offset in changes["valid"])}
    path = _signed(tmp_path, **changes)
    words = ["--ca", str(made / "ca.pem")] if not changes else []
    code, answer = certs("show", str(path), *words)
    assert (code, answer["error"]["code"]) == (1, "CERTIFICATE")
    (row,) = answer["certificates"]
    assert told in row["problems"]
    assert ";" not in row["problems"], "and nothing else is"


def test_a_key_of_another_certificate_is_told(certs: Certs, made: Path) -> None:
    (made / "broker-1007.key").write_bytes((made / "admin-alice.key").read_bytes())
    code, answer = certs("show", str(made / "broker-1007.pem"))
    assert code == 1
    assert answer["certificates"][0]["problems"] == "does not belong to the key"


@pytest.mark.parametrize("content", [b"", b"no certificate", None])
def test_a_foreign_file_is_named(certs: Certs, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "strange.pem"
    if content is not None:
        path.write_bytes(content)
    code, answer = certs("show", str(path))
    assert code == 1
    assert str(path) in answer["error"]["message"]
    assert "must contain one or more certificates" in answer["error"]["message"]


def test_facts_name_the_principal(made: Path) -> None:
    facts = describe(read_certificates(made / "broker-1007.pem")[0], datetime.now(UTC))
    assert facts.principal == Principal.parse("streammeta://demo/broker/1007")
