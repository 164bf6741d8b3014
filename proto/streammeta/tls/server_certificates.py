"""Mutual TLS for clients: contexts for connections, and the facts that a handshake has proven.

TLS 1.3 only, for HTTP/2. It validates no principal.
"""

from __future__ import annotations

import ssl
from asyncio import BaseTransport
from collections.abc import Iterable, Mapping

from streammeta.tls.files import TlsContents

PLAIN_TEXT: Mapping[str, Iterable[bytes]] = {"transport_security_type": (b"insecure",)}
"""Facts proven by a plain-text connection."""

_NAMES = {"URI": "peer_uri", "DNS": "peer_dns", "IP Address": "peer_ip", "email": "peer_email"}


class ServerCertificates:
    """Certificate of listeners, and the CAs whose clients they accept.

    It may be replaced while they serve. Later connections use the new set.
    """

    def __init__(self, contents: TlsContents) -> None:
        self.handshakes = 0
        """Handshakes started, whatever their result."""
        self.replace(contents)

    def replace(self, contents: TlsContents) -> None:
        """Use `contents` from now on."""
        self._asking = _context(contents, asks_clients=True)
        self._open = _context(contents, asks_clients=False)

    def context(self, *, asks_clients: bool) -> ssl.SSLContext:
        """Return the context of a new connection, with or without a required client certificate."""
        return self._asking if asks_clients else self._open


def _context(contents: TlsContents, *, asks_clients: bool) -> ssl.SSLContext:
    context = contents.context(ssl.PROTOCOL_TLS_SERVER)
    # Clients of gRPC require HTTP/2 by ALPN.
    context.set_alpn_protocols(["h2"])
    if not asks_clients:
        # Callers that show a token have no certificate.
        context.verify_mode = ssl.CERT_NONE
    return context


def proven_by(transport: BaseTransport) -> Mapping[str, Iterable[bytes]]:
    """Return the facts that a connection's handshake has proven, by gRPC's names."""
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return PLAIN_TEXT

    proven: dict[str, list[bytes]] = {"transport_security_type": [b"ssl"]}
    shown = tls.getpeercert(binary_form=True)
    # The listener asked for no certificate.
    if shown is None:
        return proven

    proven["x509_pem_cert"] = [ssl.DER_cert_to_PEM_cert(shown).encode()]
    facts = tls.getpeercert() or {}

    for part in facts.get("subject", ()):
        for name, value in part:
            if name == "commonName":
                proven.setdefault("x509_common_name", [value.encode()])

    for kind, value in facts.get("subjectAltName", ()):
        if (name := _NAMES.get(kind)) is not None and isinstance(value, str):
            proven.setdefault(name, []).append(value.encode())

    return proven
