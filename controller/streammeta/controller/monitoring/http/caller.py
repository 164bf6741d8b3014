"""Caller of an HTTP request for the authenticator, identified by the connection's certificate."""

from __future__ import annotations

import ssl
from asyncio import BaseTransport
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpContext:
    """Handshake of one connection, as `streammeta.controller.trust.authenticator.CallContext`."""

    transport: BaseTransport

    def invocation_metadata(self) -> None:
        """Return the caller's metadata: none, because HTTP headers do not authenticate."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the facts that the handshake has proven, under gRPC's names."""
        wrapped = self.transport.get_extra_info("ssl_object")
        # gRPC's name for plain text, so that one authenticator serves both listeners.
        if wrapped is None:
            return {"transport_security_type": [b"insecure"]}
        shown = wrapped.getpeercert() or {}
        # The authenticator reads PEM, which gRPC passes.
        pem = ssl.DER_cert_to_PEM_cert(wrapped.getpeercert(binary_form=True) or b"")
        names = shown.get("subjectAltName", ())
        subject = (pair for part in shown.get("subject", ()) for pair in part)
        return {
            "transport_security_type": [b"ssl"],
            "x509_pem_cert": [pem.encode()],
            "x509_common_name": [value.encode() for key, value in subject if key == "commonName"],
            "peer_uri": [value.encode() for kind, value in names if kind == "URI"],
            "peer_dns": [value.encode() for kind, value in names if kind == "DNS"],
        }
