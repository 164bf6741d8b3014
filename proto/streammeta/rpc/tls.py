"""Files for TLS: their contents, read and judged as one set.

A set is a bundle of authorities, a certificate and its key; whoever connects or listens shows the
certificate and takes the other side's if an authority signed it. Judges with the standard library
what it can, with the package cryptography, where it is installed, everything else. Opens no
connection.
"""

from __future__ import annotations

import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from streammeta.rpc.identity import Principal

_READABLE_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class TlsError(ValueError):
    """A file for TLS does not hold what it should; the message names option and file."""


@dataclass(frozen=True, slots=True)
class TlsContents:
    """Contents of a set of files that fit each other, as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes
    principal: Principal | None
    """Whom the certificate names; None also if cryptography is not installed."""

    def __repr__(self) -> str:
        return f"TlsContents({self.principal})"  # the key is in no log


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM form: the authorities to trust, the certificate to show, and its key."""

    ca: Path
    certificate: Path
    key: Path

    def load(self, option: str = "tls") -> TlsContents:
        """Return the contents, once they are judged to be of use now.

        Errors name the options `--OPTION-ca`, `--OPTION-cert` and `--OPTION-key`.

        Raises:
            TlsError: a file can't be read or does not hold what it should, others than its owner
                may read the key, or the three do not fit each other. Where cryptography is
                installed: the certificate is not valid now, names no identity, is not made for
                both sides of a connection, or none of the authorities signed it.
        """
        ca = _read(f"{option}-ca", self.ca)
        certificate = _read(f"{option}-cert", self.certificate)
        key = _read(f"{option}-key", self.key)
        self._check_mode(option)
        new_context(ssl.PROTOCOL_TLS_CLIENT, self, option)
        principal = None
        if find_spec("cryptography") is not None:
            principal = _judged(self, option, ca, certificate)
        # Files that are replaced one by one may have been judged in part old, in part new.
        if (ca, certificate, key) != tuple(
            _read(f"{option}-{name}", path)
            for name, path in (("ca", self.ca), ("cert", self.certificate), ("key", self.key))
        ):
            raise TlsError(f"{option}-cert: {self.certificate} is being replaced; try again")
        return TlsContents(ca, certificate, key, principal)

    def _check_mode(self, option: str) -> None:
        mode = stat.S_IMODE(self.key.stat().st_mode)
        if mode & _READABLE_BY_OTHERS:
            raise TlsError(
                f"{option}-key: {self.key} has mode {mode:04o}, which lets others than its owner "
                f"at the key; run `chmod 600 {self.key}`"
            )


def tls_files(
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    option: str = "tls",
) -> TlsFiles | None:
    """Return the three files, None without any.

    Raises:
        TlsError: some of them are given, and not all.
    """
    given: Mapping[str, Path | None] = {"ca": ca, "cert": certificate, "key": key}
    if ca is not None and certificate is not None and key is not None:
        return TlsFiles(ca, certificate, key)
    missing = [name for name, path in given.items() if path is None]
    if len(missing) == len(given):
        return None
    raise TlsError(
        f"{option}-{missing[0]}: not given; give --{option}-ca, --{option}-cert and "
        f"--{option}-key, or none of them"
    )


def new_context(protocol: int, files: TlsFiles, option: str = "tls") -> ssl.SSLContext:
    """Return a context that shows the certificate and demands the other side's; TLS 1.3 alone.

    Names are not compared with addresses.

    Raises:
        TlsError: a file can't be read, or does not hold what it should.
    """
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise _bad(f"{option}-ca", files.ca, error, "certificates of authorities") from error
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ValueError) as error:
        wanted = f"a certificate, with its key, without a password, in --{option}-key"
        raise _bad(f"{option}-cert", files.certificate, error, wanted) from error
    return context


def _no_password() -> str:
    """Stand in for a prompt, which would wait for a person."""
    raise ValueError("the key is encrypted")


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(
            f"{option}: can't read {path}: {error.strerror}; must be a readable PEM file"
        ) from error


def _judged(files: TlsFiles, option: str, ca: bytes, certificate: bytes) -> Principal | None:
    """Return whom a certificate names, once it is judged."""
    from streammeta.rpc.certificates import CertificateError, judge

    try:
        facts = judge(certificate, ca, datetime.now(UTC))
    except CertificateError as error:
        raise TlsError(f"{option}-ca: {files.ca}: {error}") from error
    if facts.is_authority:
        raise TlsError(f"{option}-cert: {files.certificate} is an authority's; give its leaf's")
    if facts.problems:
        raise TlsError(f"{option}-cert: {files.certificate} {'; '.join(facts.problems)}")
    return facts.principal


def _bad(option: str, path: Path, error: Exception, wanted: str) -> TlsError:
    return TlsError(f"{option}: can't use {path}: {error}; must hold {wanted}, as PEM")
