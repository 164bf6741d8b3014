"""Mutual TLS between controllers: contexts for the connections they dial and those they take.

Both sides show a certificate, and take every one that the same authority signed: names in it are
not compared with addresses or node ids, so the authority must sign for controllers of this cluster
alone. TLS 1.3 and nothing older.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from streammeta.controller.config import ConfigError, PeerTlsFiles


@dataclass(frozen=True, slots=True)
class PeerTls:
    """Contexts of both directions; None: plain text."""

    dialling: ssl.SSLContext | None = None
    listening: ssl.SSLContext | None = None


PLAIN_TEXT = PeerTls()


def load_tls(files: PeerTlsFiles | None) -> PeerTls:
    """Return contexts made from files in PEM form, plain text without any.

    Raises:
        ConfigError: a file can't be read, or does not hold what it should.
    """
    if files is None:
        return PLAIN_TEXT
    dialling = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    return PeerTls(dialling, _context(ssl.PROTOCOL_TLS_SERVER, files))


def _context(protocol: int, files: PeerTlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise _bad("peer-tls-ca", files.ca, error, "certificates of the authority") from error
    try:
        context.load_cert_chain(files.cert, files.key)
    except OSError as error:
        what = "a certificate, with its key in --peer-tls-key"
        raise _bad("peer-tls-cert", files.cert, error, what) from error
    return context


def _bad(option: str, path: Path, error: OSError, wanted: str) -> ConfigError:
    return ConfigError(f"{option}: can't use {path}: {error}; must hold {wanted}, as PEM")
