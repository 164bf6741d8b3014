"""Certificates made for a test, by the product's own authority."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256

from streammeta.cli.security import certificate_authority
from streammeta.cli.security.certificate_authority import IssuedFiles
from streammeta.tls.certificates import read_certificates
from streammeta.tls.files import TlsFiles
from streammeta.tls.identity import Principal, Role

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Authority:
    """Signs certificates; its own is in the file `ca`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._name = name
        self.files = self._files("ca")
        certificate_authority.create_authority(self.files, name)
        self.ca = self.files.certificate
        self._authority = certificate_authority.Authority(self.files)

    def issue(
        self,
        principal: str,
        *,
        cluster_id: str = "test",
        hosts: Sequence[str] = LOOPBACK,
        serial: int = 0,
    ) -> TlsFiles:
        """Return files with the certificate of a principal, such as `broker/1007`, and this CA's.

        The same arguments give the same files; another `serial` another certificate.
        """
        role, _, name = principal.partition("/")
        known = Principal(cluster_id, Role(role), name)
        stem = "-".join((cluster_id, role, name, str(serial), *hosts))
        files = self._files(stem.replace(":", "_").replace("*", "any"))
        if not files.certificate.exists():
            self._authority.issue(files, known, hosts)
        return TlsFiles(ca=self.ca, certificate=files.certificate, key=files.key)

    def fingerprint(self, principal: str) -> str:
        """Return the SHA-256 of a certificate that `issue` gave, hexadecimal."""
        (certificate,) = read_certificates(self.issue(principal).certificate)
        return str(certificate.fingerprint(SHA256()).hex())

    def _files(self, name: str) -> IssuedFiles:
        stem = self.folder / f"{self._name}-{name}"
        return IssuedFiles(Path(f"{stem}.pem"), Path(f"{stem}.key"))
