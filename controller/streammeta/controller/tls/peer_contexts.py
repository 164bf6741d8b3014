"""Mutual TLS between controllers: contexts for connections, and the principal at the other end.

Both sides show a certificate of the same authority that names a controller of this cluster. Names
are not compared with addresses, so that addresses may change. A policy may deny controllers. TLS
1.3 only.
"""

from __future__ import annotations

import ssl
from asyncio import BaseTransport
from dataclasses import dataclass, field

from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.trust.policy import Denials
from streammeta.tls.files import TlsContents
from streammeta.tls.identity import IdentityError, KnownClusters, Role, principal_of
from streammeta.tls.listener import ListenerTls

CONNECTION_AGE_MS = 3_600_000
"""Age at which a TLS connection ends, so that connections with outdated certificates end."""


@dataclass(slots=True, kw_only=True)
class PeerTls(ListenerTls):
    """Contexts of new connections in both directions."""

    dialling: ssl.SSLContext | None = None
    """None: connections are made in plain text."""
    age_ms: int = CONNECTION_AGE_MS
    former_id: str | None = None
    """Cluster whose controllers' certificates are accepted too: the one that this one continues."""
    denials: Denials = field(default_factory=Denials)
    """Controllers and certificates that are refused in both directions."""

    def replace(self, contents: TlsContents, *, dials_plain_text: bool = False) -> None:
        """Use other certificates from now on."""
        # The former dialling context stays None while a migration still speaks plain text.
        if not dials_plain_text:
            self.dialling = contents.context(ssl.PROTOCOL_TLS_CLIENT)
        self.listening = contents.context(ssl.PROTOCOL_TLS_SERVER)

    def controller_at(self, transport: BaseTransport, cluster_id: ClusterId) -> NodeId | None:
        """Return the controller named by the other end's certificate, None for plain text.

        Raises:
            StrangerError: it names no controller of the cluster, or one that is denied.
        """
        if transport.get_extra_info("ssl_object") is None:
            return None

        shown = transport.get_extra_info("peercert") or {}
        # Only URI names count: a DNS name says where a host is, not who it is.
        uris = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
        try:
            principal = principal_of(uris)
        except IdentityError as error:
            raise StrangerError(f"its certificate is of no use: {error}") from None

        # Checked after TLS, because the authority may sign for several clusters.
        accepted = KnownClusters(cluster_id, self.former_id).accept(principal)
        is_controller = accepted is not None and accepted.role is Role.CONTROLLER
        node_id = principal.node_id if is_controller else None
        if accepted is None or node_id is None:
            raise StrangerError(
                f"its certificate names {principal.uri}, must name a controller of {cluster_id}"
            )

        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        # The policy can change while connections live, so this runs for each new one.
        if self.denials.cover(accepted, certificate or b""):
            raise StrangerError(f"its certificate, that of {accepted}, is denied by the policy")

        return NodeId(node_id)

    @classmethod
    def of(cls, contents: TlsContents) -> PeerTls:
        """Return the use of TLS alone."""
        made = cls(takes_plain_text=False)
        made.replace(contents)
        return made


class StrangerError(Exception):
    """A certificate names no controller of this cluster, or is denied."""
