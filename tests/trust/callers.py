"""Contexts of calls, as connections with a certificate or in plain text have them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streammeta.tls.identity import Principal

CLUSTER = "test"


@dataclass(frozen=True)
class ShownContext:
    """A call's context of which only the handshake matters."""

    proven: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    metadata: Sequence[tuple[str, str]] = ()

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self.metadata

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return self.proven


PLAIN_TEXT = ShownContext(
    {"transport_security_type": [b"insecure"], "security_level": [b"TSI_SECURITY_NONE"]}
)


def shown(*uris: Principal | str, certificate: bytes = b"") -> ShownContext:
    """Return the context of a call under TLS whose certificate has these URIs."""
    texts = [one if isinstance(one, str) else one.uri for one in uris]
    body = base64.b64encode(certificate or repr(texts).encode())
    pem = b"-----BEGIN CERTIFICATE-----\n" + body + b"\n-----END CERTIFICATE-----\n"
    return ShownContext(
        {
            "transport_security_type": [b"ssl"],
            "x509_pem_cert": [pem],
            "peer_uri": [text.encode() for text in texts],
        }
    )
