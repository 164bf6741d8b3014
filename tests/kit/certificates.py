"""Certificates made for a test, by the product's own authority."""

from __future__ import annotations

from pathlib import Path

from streammeta.cli import certificate_authority
from streammeta.cli.certificate_authority import IssuedFiles
from streammeta.controller.config import PeerTlsFiles
from streammeta.rpc.identity import Principal, Role


class Authority:
    """Signs certificates; its own is in the file `ca`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        files = self._files("ca")
        certificate_authority.create_authority(files, name)
        self.ca = files.certificate
        self._authority = certificate_authority.Authority(files)

    def issue(self, name: str) -> PeerTlsFiles:
        """Return files with a certificate and its key, new for each name, and this authority's."""
        files = self._files(name)
        if not files.certificate.exists():
            self._authority.issue(files, Principal("test", Role.ADMIN, name))
        return PeerTlsFiles(cert=files.certificate, key=files.key, ca=self.ca)

    def _files(self, name: str) -> IssuedFiles:
        stem = self._folder / f"{self._name}-{name}"
        return IssuedFiles(stem.with_suffix(".pem"), stem.with_suffix(".key"))
