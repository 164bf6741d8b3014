"""Certificates made for a test: an authority, and what it signs."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from streammeta.controller.config import PeerTlsFiles

_VALID = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; its own is in the file `ca`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}-ca.pem"
        own = self._signed(name, self._key, is_authority=True)
        self.ca.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> PeerTlsFiles:
        """Return files with a new certificate, its key, and this authority's certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert_path = self._folder / f"{self._name}-{name}.pem"
        key_path = self._folder / f"{self._name}-{name}.key"
        certificate = self._signed(name, key, is_authority=False)
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return PeerTlsFiles(cert=cert_path, key=key_path, ca=self.ca)

    def _signed(
        self, name: str, key: ec.EllipticCurvePrivateKey, *, is_authority: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        constraints = x509.BasicConstraints(ca=is_authority, path_length=None)
        return (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _VALID)
            .not_valid_after(now + _VALID)
            .add_extension(constraints, critical=True)
            .sign(self._key, hashes.SHA256())
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
