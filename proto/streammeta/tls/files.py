"""TLS files: their contents, read and validated as one set.

A set is a bundle of CA certificates, a certificate and its key. Each end of a connection presents
the certificate and accepts the other side's if a CA signed it. A person's tool may have a token
instead of certificate and key. The standard library validates a part of this, and the package
cryptography the rest where it is installed. Opens no connection.
"""

from __future__ import annotations

import os
import ssl
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from streammeta.tls.identity import Principal
from streammeta.tls.secret_files import is_open_to_others

if TYPE_CHECKING:
    from streammeta.tls.certificates import CertificateFacts


class TlsError(ValueError):
    """Invalid TLS file. The message names option and file."""


@dataclass(frozen=True, slots=True)
class TlsContents:
    """Contents of a consistent set of files, as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes
    facts: CertificateFacts | None = None
    """Facts of the certificate, None if cryptography is not installed."""

    def __repr__(self) -> str:
        return f"TlsContents({self.principal})"  # the key is in no log

    @property
    def principal(self) -> Principal | None:
        """Principal of the certificate, None also if cryptography is not installed."""
        return None if self.facts is None else self.facts.principal

    def context(self, protocol: int) -> ssl.SSLContext:
        """Return a context that presents the certificate and requires the other side's.

        TLS 1.3 only. Host names are not compared with addresses.

        Raises:
            _CaError: the CA bundle contains no certificate.
            OSError, ValueError: certificate and key do not match, or the key is encrypted.
        """
        context = ssl.SSLContext(protocol)
        # The other side is identified by its certificate and not by its address.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            # A resumed session would not notice that an authority was removed.
            context.num_tickets = 0

        try:
            # Bundles often have comments in other encodings.
            context.load_verify_locations(cadata=self.ca.decode("ascii", "ignore"))
        except (OSError, ValueError) as error:
            raise _CaError(str(error)) from error

        # Python takes these from files alone, and those given may be replaced at any time.
        with _as_file(self.certificate + b"\n" + self.key) as path:
            context.load_cert_chain(path, password=_no_password)

        return context


class _CaError(Exception):
    """Unusable CA bundle."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM form: the CA certificates to trust, the certificate to present, and its key.

    A path may be given as a string. Raises `TypeError` for other types.
    """

    ca: Path
    certificate: Path
    key: Path

    def __post_init__(self) -> None:
        """Convert strings to paths."""
        _take_paths(self)

    def load(self, option: str = "tls") -> TlsContents:
        """Return the contents after validating that they can be used now.

        Errors name the options `--OPTION-ca`, `--OPTION-cert` and `--OPTION-key`.

        Raises:
            TlsError: a file is unreadable or invalid, others than its owner may read the key, or
                the three do not match. Where cryptography is installed also: the certificate is
                not valid now, contains no identity, was not issued for both sides of a
                connection, or no CA of the bundle signed it.
        """
        contents = self.read(option)
        self._check_mode(option)
        self._check_fit(option, contents)
        # Clients may be installed without cryptography, and then check less.
        if find_spec("cryptography") is None:
            return contents
        facts = self._validate(option, contents)
        return TlsContents(contents.ca, contents.certificate, contents.key, facts)

    def read(self, option: str = "tls") -> TlsContents:
        """Return the contents without validation.

        Raises:
            TlsError: a file can't be read.
        """
        return TlsContents(
            _read(f"{option}-ca", self.ca),
            _read(f"{option}-cert", self.certificate),
            _read(f"{option}-key", self.key),
        )

    def _check_mode(self, option: str) -> None:
        _check_mode(f"{option}-key", self.key, "key")

    def _check_fit(self, option: str, contents: TlsContents) -> None:
        try:
            contents.context(ssl.PROTOCOL_TLS_CLIENT)
        except _CaError as error:
            raise _bad(f"{option}-ca", self.ca, error, "CA certificates") from error
        except (OSError, ValueError) as error:
            wanted = f"a certificate, with its key, without a password, in --{option}-key"
            raise _bad(f"{option}-cert", self.certificate, error, wanted) from error

    def _validate(self, option: str, contents: TlsContents) -> CertificateFacts:
        from streammeta.tls.certificates import CertificateError, validate

        try:
            facts = validate(contents.certificate, contents.ca, datetime.now(UTC))
        except CertificateError as error:
            raise TlsError(f"{option}-ca: {self.ca}: {error}") from error
        if facts.is_authority:
            raise TlsError(
                f"{option}-cert: {self.certificate} is a CA certificate. Use a"
                " certificate that it issued"
            )
        if facts.problems:
            raise TlsError(f"{option}-cert: {self.certificate} {', '.join(facts.problems)}")
        return facts


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """Files of a caller with a token: the CA certificates to trust, as PEM, and the token.

    The token is read for each call, so that it may be replaced at any time. A path may be given as
    a string. Raises `TypeError` for other types.
    """

    ca: Path
    token: Path

    def __post_init__(self) -> None:
        """Convert strings to paths."""
        _take_paths(self)

    def load(self) -> bytes:
        """Return the CA certificates as PEM, after validating both files.

        Raises:
            TlsError: a file is unreadable or invalid, or others than its owner may read the token.
                The message names `--tls-ca` or `--token-file`.
        """
        _check_mode("token-file", self.token, "token")
        # Checked before the first call, where a bad file would look like a failed connection.
        self.read_token()
        ca = _read("tls-ca", self.ca)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
                cadata=ca.decode("ascii", "ignore")
            )
        except (OSError, ValueError) as error:
            raise _bad("tls-ca", self.ca, error, "CA certificates") from error
        return ca

    def read_token(self) -> str:
        """Return the current token. Raises TlsError."""
        try:
            token = self.token.read_text(encoding="ascii").strip()
        except OSError as error:
            raise TlsError(f"token-file: can't read {self.token}: {error.strerror}") from error
        except ValueError:
            token = ""
        # A line break inside would begin another header.
        if not token or any(character.isspace() for character in token):
            raise TlsError(f"token-file: {self.token}: must contain one token and nothing else")
        return token


CallerFiles: TypeAlias = TlsFiles | TokenFiles
"""Files with which a person's tool or a job calls over TLS."""


class WatchedTls:
    """Set of files that may be replaced while it is in use.

    New files replace the old ones only if they pass the validation of a start and name the same
    principal. Otherwise the old set stays in use.
    """

    def __init__(self, files: TlsFiles, option: str = "tls") -> None:
        """Read the files.

        Raises:
            TlsError: they are invalid, as `TlsFiles.load` explains.
        """
        self.files = files
        self.contents = files.load(option)
        self._option = option
        self._refused: TlsContents | None = None
        self._is_told = False

    def look(self) -> bool:
        """Load replaced files. Return whether there were any.

        Raises:
            TlsError: the new files are invalid, once for each such set. Files that are replaced one
                by one do not match for a moment, so a set only counts if two looks see it.
        """
        try:
            found = self.files.read(self._option)
            if _same(found, self.contents):
                self._refused = None
                return False
            loaded = self.files.load(self._option)
            self._check_principal(loaded)
        except TlsError:
            if self._is_unreported():
                raise
            return False
        self.contents, self._refused = loaded, None
        return True

    def _is_unreported(self) -> bool:
        """Return whether an invalid set was seen before and has not been reported."""
        try:
            # Read once more, because a set that still changes is not reported yet.
            found = self.files.read(self._option)
        except TlsError:
            found = TlsContents(b"", b"", b"")
        if self._refused is None or not _same(found, self._refused):
            self._refused, self._is_told = found, False
            return False
        is_news, self._is_told = not self._is_told, True
        return is_news

    def _check_principal(self, found: TlsContents) -> None:
        if found.principal != self.contents.principal:
            raise TlsError(
                f"{self._option}-cert: {self.files.certificate} names {found.principal}, must"
                f" name {self.contents.principal}, as the one in use. Restart to change the"
                " principal"
            )


def tls_files(
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    option: str = "tls",
) -> TlsFiles | None:
    """Return the three files, None without any.

    Raises:
        TlsError: only some of them are given.
    """
    given: Mapping[str, Path | None] = {"ca": ca, "cert": certificate, "key": key}
    if ca is not None and certificate is not None and key is not None:
        return TlsFiles(ca, certificate, key)
    missing = [name for name, path in given.items() if path is None]
    if len(missing) == len(given):
        return None
    raise TlsError(
        f"{option}-{missing[0]}: missing; set --{option}-ca, --{option}-cert and"
        f" --{option}-key, or none of them"
    )


def _take_paths(files: TlsFiles | TokenFiles) -> None:
    """Convert every field of a set to a `Path`."""
    for field in fields(files):
        given = getattr(files, field.name)
        if not isinstance(given, str | os.PathLike):
            raise TypeError(f"{field.name} is {given!r}, expected the path of a file")
        # The dataclass is frozen, and its construction is not over.
        object.__setattr__(files, field.name, Path(given))


def _same(one: TlsContents, other: TlsContents) -> bool:
    return (one.ca, one.certificate, one.key) == (other.ca, other.certificate, other.key)


def _no_password() -> str:
    """Answer a password prompt with an error, because nobody can type."""
    raise ValueError("the key is encrypted")


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Return the name of a file with these bytes, in memory where the system supports it."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("tls"), "wb") as file:
            file.write(data)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            yield file.name


def _check_mode(option: str, path: Path, what: str) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise TlsError(f"{option}: can't read {path}: {error.strerror}") from error
    if is_open_to_others(status):
        mode = stat.S_IMODE(status.st_mode)
        raise TlsError(
            f"{option}: {path} has mode {mode:04o}, which allows other users to read the"
            f" {what}. Run `chmod 600 {path}`"
        )


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(
            f"{option}: can't read {path}: {error.strerror}, must be a readable PEM file"
        ) from error


def _bad(option: str, path: Path, error: Exception, wanted: str) -> TlsError:
    return TlsError(f"{option}: can't use {path}: {error}, must contain {wanted}, as PEM")
