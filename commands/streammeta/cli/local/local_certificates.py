"""Certificates of a cluster on this machine, signed by a throw-away CA.

Owns two folders of the cluster: `certificates`, and `private` with the key of the CA. Their files
grant full access to the cluster, so use them for development only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from streammeta.cli.security.certificate_authority import Authority, IssuedFiles, create_authority
from streammeta.tls.files import TlsError, TlsFiles
from streammeta.tls.identity import Principal, Role

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class LocalCertificates:
    """Certificates of one cluster below `root`. Certificates of an earlier run are reused."""

    def __init__(self, root: Path, cluster_id: str) -> None:
        """Create the CA if it does not exist.

        Raises:
            CertificateError: the existing CA is invalid.
            OSError: the files can't be written.
        """
        self.folder = root / "certificates"
        self.ca_key = root / "private" / "ca.key"
        self._cluster_id = cluster_id
        files = IssuedFiles(self.folder / "ca.pem", self.ca_key)
        # Another CA would invalidate the certificates of earlier runs.
        if not files.certificate.exists():
            create_authority(files, f"throw-away CA of {cluster_id}")
        self._authority = Authority(files)

    def of(self, role: Role, name: str | int) -> TlsFiles:
        """Return the files of a principal on loopback, created on the first call."""
        stem = f"{role}-{name}"
        ca, certificate, key = (self.folder / n for n in ("ca.pem", f"{stem}.pem", f"{stem}.key"))
        files = TlsFiles(ca, certificate, key)
        # Files are never overwritten, so expired ones are removed first.
        if not self._is_of_use(files):
            certificate.unlink(missing_ok=True)
            key.unlink(missing_ok=True)
            principal = Principal(self._cluster_id, role, str(name))
            self._authority.issue(IssuedFiles(certificate, key), principal, LOOPBACK)
        return files

    def controllers(self, node_ids: Sequence[int]) -> Mapping[int, TlsFiles]:
        """Return the files of these controllers."""
        return {node_id: self.of(Role.CONTROLLER, node_id) for node_id in node_ids}

    @staticmethod
    def _is_of_use(files: TlsFiles) -> bool:
        if not files.certificate.exists():
            return False
        try:
            files.load()
        except TlsError:
            return False  # it has expired
        return True


def environment(connect: str, files: TlsFiles) -> Mapping[str, str]:
    """Return the variables with which commands connect. `connect` is in the form of `--connect`."""
    return {
        "STREAMMETA_CONNECT": connect,
        "STREAMMETA_TLS_CA": str(files.ca),
        "STREAMMETA_TLS_CERT": str(files.certificate),
        "STREAMMETA_TLS_KEY": str(files.key),
    }
