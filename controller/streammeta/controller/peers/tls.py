"""Mutual TLS between controllers: contexts for the connections they dial and those they take.

Both sides show a certificate, and take every one that the same authority signed: names in it are
not compared with addresses or node ids, so the authority must sign for controllers of this cluster
alone. TLS 1.3 and nothing older.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from streammeta.controller.config import ConfigError
from streammeta.rpc.tls import TlsError, TlsFiles, new_context


@dataclass(frozen=True, slots=True)
class PeerTls:
    """Contexts of both directions; None: plain text."""

    dialling: ssl.SSLContext | None = None
    listening: ssl.SSLContext | None = None


PLAIN_TEXT = PeerTls()


def load_tls(files: TlsFiles | None) -> PeerTls:
    """Return contexts made from files in PEM form, plain text without any.

    Raises:
        ConfigError: a file can't be read, or does not hold what it should.
    """
    if files is None:
        return PLAIN_TEXT
    try:
        return PeerTls(
            new_context(ssl.PROTOCOL_TLS_CLIENT, files, "peer-tls"),
            new_context(ssl.PROTOCOL_TLS_SERVER, files, "peer-tls"),
        )
    except TlsError as error:
        raise ConfigError(str(error)) from error
