"""Small certificate authority in two files, for development, tests and first deployments.

Signs certificates that state an identity (`streammeta.tls.identity`). It keeps no list of them and
there is no revocation list, because certificates are short-lived. It never overwrites files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from streammeta.tls.certificates import CertificateError, describe, read_certificates, read_key
from streammeta.tls.identity import Principal

AUTHORITY_DAYS = 3650
LEAF_DAYS = 90

_BEGINS_EARLIER = timedelta(minutes=5)
"""Tolerance for clocks of other machines that run late."""

_KEY_MODE, _CERTIFICATE_MODE = 0o600, 0o644


@dataclass(frozen=True, slots=True)
class IssuedFiles:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


def create_authority(files: IssuedFiles, name: str, days: int = AUTHORITY_DAYS) -> None:
    """Create an authority: a self-signed certificate, and the key to sign with.

    Raises:
        CertificateError: one of the files exists.
        OSError: they can't be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    # Self-signed: subject and issuer are the same name.
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(own, own, key.public_key(), _validity(days))
    certificate = (
        # path_length=0: it signs certificates of holders, never of another authority.
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(files, certificate, key)


class Authority:
    """Certificate and key of an authority, read from their files."""

    def __init__(self, files: IssuedFiles) -> None:
        """Read both.

        Raises:
            CertificateError: a file is missing, damaged, or readable by others, or the certificate
                is not an authority's, is not valid now, or belongs to another key.
        """
        self._certificate = read_certificates(files.certificate)[0]
        key = read_key(files.key)
        facts = describe(self._certificate, datetime.now(UTC), key=key)
        problems = list(facts.problems)
        if not facts.is_authority:
            problems.insert(0, "is not an authority")
        if problems:
            raise CertificateError(f"{files.certificate}: {', '.join(problems)}")
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{files.key}: not an elliptic curve key. Create one")
        self._key = key

    def issue(
        self,
        files: IssuedFiles,
        principal: Principal,
        hosts: Sequence[str] = (),
        days: int = LEAF_DAYS,
    ) -> None:
        """Issue a certificate for `principal`, valid for both sides of a connection, and its key.

        `hosts` are DNS names and IP addresses at which others reach it. It expires after `days`,
        but not after the authority's own certificate.

        Raises:
            CertificateError: one of the files exists.
            OSError: they can't be written.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(principal))])
        begin, end = _validity(days)
        # A certificate that outlives its authority would fail without a visible cause.
        validity = begin, min(end, self._certificate.not_valid_after_utc)
        names = (x509.UniformResourceIdentifier(principal.uri), *map(_host, hosts))
        # Controllers accept connections and open them, so certificates are valid for both sides.
        usages = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
        builder = _builder(subject, self._certificate.subject, key.public_key(), validity)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            # Tells authorities of the same name apart.
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )

        _write(files, certificate, key)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _validity(days: int) -> tuple[datetime, datetime]:
    # Certificates have whole seconds only.
    now = datetime.now(UTC).replace(microsecond=0)
    return now - _BEGINS_EARLIER, now + timedelta(days=days)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    validity: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
    begin, end = validity
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    # Authorities sign certificates, holders sign handshakes. TLS 1.3 needs no other usage.
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(
    files: IssuedFiles, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    """Write both files, the key first, or none if one exists."""
    for path in (files.key, files.certificate):
        if path.exists():
            raise CertificateError(
                f"{path}: already exists. Move it away first (files are never overwritten)"
            )

    # No passphrase, because controllers start unattended.
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    # After a failure in between there is a key without a certificate, which nobody accepts.
    _create(files.key, key_pem, _KEY_MODE)
    _create(
        files.certificate, certificate.public_bytes(serialization.Encoding.PEM), _CERTIFICATE_MODE
    )


def _create(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Made with its mode, so that a key is never readable between its creation and a change of mode.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
