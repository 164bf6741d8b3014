"""Files for TLS of one controller: validated as its own, and checked for changes.

Owns the sets of the three planes, which may be one, and hands replaced ones to the listeners for
clients and for HTTP, and to the connections between controllers. Opens no connection.
"""

from __future__ import annotations

import ssl
from asyncio import BaseTransport
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import structlog

from streammeta.controller.config import ConfigError, ControllerConfig, PeerPlainText
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.trust.policy import Denials
from streammeta.tls.files import TlsContents, TlsError, TlsFiles, WatchedTls
from streammeta.tls.identity import IdentityError, KnownClusters, Principal, Role, principal_of
from streammeta.tls.listener import ListenerTls
from streammeta.tls.server_certificates import ServerCertificates

# Mutual TLS between controllers: contexts for connections, and the principal at the other end.
#
# Both sides show a certificate of the same authority that names a controller of this cluster.
# Names are not compared with addresses, so that addresses may change. A policy may deny
# controllers. TLS 1.3 only.

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


if TYPE_CHECKING:  # slow to import, and without TLS not needed
    from streammeta.tls.certificates import CertificateFacts

EXPIRES_SOON = timedelta(days=14)
"""Time before a certificate's end from which the log warns of it daily."""

_log = structlog.get_logger(component="tls")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateState:
    """Certificate of one plane, and how often its files were replaced or could not be."""

    plane: str
    not_after: datetime
    replaced: int
    refused: int


OnReload: TypeAlias = Callable[[str, str, Mapping[str, str]], None]
"""Callback with the changed option, the error or an empty text, and the names of the change."""


class ClientListener(NamedTuple):
    """Where clients are served: the option that says so, and the address."""

    option: str
    address: str
    certificates: ServerCertificates | None
    """None: plain text."""
    by_token: bool = False
    """Clients show a token, and no certificate."""

    @property
    def protection(self) -> str:
        """How it is protected, in words for the log."""
        if self.certificates is None:
            return "plain text"
        return "tls 1.3, by token" if self.by_token else "tls 1.3"


class TlsManager:
    """Certificates of one controller. Connections use `clients` and `peers`."""

    def __init__(
        self,
        config: ControllerConfig,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Read the files.

        Raises:
            ConfigError: they are invalid, or belong to another controller.
        """
        self._config = config
        self._now = now
        self.clients: ServerCertificates | None = None
        self.peers = PeerTls(
            takes_plain_text=_takes_plain_text(config),
            age_ms=config.connection_age_ms,
            former_id=config.known_clusters.former,
        )
        self.http = ListenerTls()
        self._sets = {option: self._opened(option, files) for option, files in _sets(config)}
        self._planes = {
            plane: self._sets[option] for plane, option in _planes(config) if option in self._sets
        }
        use = {
            "clients": self._use_for_clients,
            "peers": self._use_for_peers,
            "http": self._use_for_http,
        }

        for plane, used in self._planes.items():
            use[plane](used)

    def look(self) -> None:
        """Use replaced files, and log their errors."""
        for files in self._sets.values():
            files.look(self._now())

    def tell(self, told: OnReload) -> None:
        """Have `told` called for every file that was replaced or failed to load."""
        for files in self._sets.values():
            files.told = told

    def states(self) -> Sequence[CertificateState]:
        """Return the state of the certificate of each plane that has one."""
        return [
            CertificateState(
                plane=plane,
                not_after=used.facts.not_after,
                replaced=used.replaced,
                refused=used.refused,
            )
            for plane, used in self._planes.items()
        ]

    @property
    def listeners(self) -> Sequence[ClientListener]:
        """The listeners for clients."""
        listeners = [
            ClientListener(option, address, self.clients if is_encrypted else None)
            for option, address, is_encrypted in self._config.listeners
        ]
        if (address := self._config.token_listen) is not None:
            listeners.append(ClientListener("token-listen", address, self.clients, by_token=True))
        return listeners

    @property
    def contents_for_calls(self) -> TlsContents | None:
        """Certificates for calls to other controllers as their client, None for plain text."""
        used = self._planes.get("clients")
        return None if used is None else used.contents

    @property
    def handshakes(self) -> int:
        """TLS handshakes that clients have begun."""
        return 0 if self.clients is None else self.clients.handshakes

    def describe(self) -> dict[str, str]:
        """Return how each plane is protected, in words for the log."""
        clients = [f"{listener.address} {listener.protection}" for listener in self.listeners]
        peers = "plain text" if self.peers.listening is None else "tls 1.3"
        if self.peers.listening is not None and self.peers.takes_plain_text:
            peers += f", plain text {self._config.peer_plain_text}"
        planes = {"clients": ", ".join(clients), "peers": f"{self._config.peer_listen} {peers}"}
        if self._config.http_listen is not None:
            http = "plain text" if self.http.listening is None else "tls 1.3"
            planes["http"] = f"{self._config.http_listen} {http}"
        return planes

    def _opened(self, option: str, files: TlsFiles) -> CertificateSet:
        try:
            opened = CertificateSet(WatchedTls(files, option))
        except TlsError as error:
            raise ConfigError(str(error)) from error
        # A foreign certificate would start and then be rejected by all peers.
        _check_own(option, files, opened.contents, self._config)
        # Warns at the start of a certificate that ends soon.
        opened.look(self._now())
        return opened

    def _use_for_clients(self, used: CertificateSet) -> None:
        self.clients = ServerCertificates(used.contents)
        used.users.append(self.clients.replace)

    def _use_for_peers(self, used: CertificateSet) -> None:
        # During a migration peers of the older configuration accept plain text only.
        is_plain = self._config.peer_plain_text is PeerPlainText.SPOKEN
        use = partial(self.peers.replace, dials_plain_text=is_plain)
        use(used.contents)
        used.users.append(use)

    def _use_for_http(self, used: CertificateSet) -> None:
        def use(contents: TlsContents) -> None:
            self.http.listening = contents.context(ssl.PROTOCOL_TLS_SERVER)

        # Probes in plain text would bypass the authentication of certificates.
        self.http.takes_plain_text = False
        use(used.contents)
        used.users.append(use)


class CertificateSet:
    """One set of files, and the users of its contents."""

    def __init__(self, watched: WatchedTls) -> None:
        self._watched = watched
        self._told_at: datetime | None = None
        self._told_event = ""
        self.users: list[Callable[[TlsContents], None]] = []
        self.replaced = 0
        """Sets that have come into use since the start."""
        self.refused = 0
        """Sets that could not be used, each counted once."""
        self.told: OnReload | None = None

    @property
    def contents(self) -> TlsContents:
        """The files' contents in use."""
        return self._watched.contents

    @property
    def facts(self) -> CertificateFacts:
        """Statements of the certificate in use."""
        facts = self.contents.facts
        assert facts is not None, "a controller has cryptography"
        return facts

    def look(self, now: datetime) -> None:
        """Use replaced files and log their errors."""
        try:
            # Contents are complete and validated here. A half-written set raises and changes
            # nothing.
            if self._watched.look():
                for use in self.users:
                    use(self.contents)
                # The new certificate has its own end, so its warning does not wait for the old one.
                self._told_at = None
                self.replaced += 1
                _log.info("certificate_replaced", **self._named())
                self._tell("")
        except TlsError as error:
            self.refused += 1
            _log.error("certificate_not_replaced", reason=str(error), **self._named())
            self._tell(str(error))
        self._tell_of_its_end(now)

    def _tell(self, reason: str) -> None:
        if self.told is not None:
            self.told("certificates.reload", reason, self._named())

    def _tell_of_its_end(self, now: datetime) -> None:
        facts = self.facts
        if now < facts.not_after - EXPIRES_SOON:
            return
        event = "certificate_expired" if now > facts.not_after else "certificate_expires_soon"
        is_due = self._told_at is None or now - self._told_at >= timedelta(days=1)
        # Once a day while it lasts, and at once when the certificate expires.
        if is_due or event != self._told_event:
            self._told_at, self._told_event = now, event
            _log.warning(event, days_left=facts.days_left(now), **self._named())

    def _named(self) -> dict[str, str]:
        facts = self.facts
        return {
            "file": str(self._watched.files.certificate),
            "not_after": f"{facts.not_after:%Y-%m-%d %H:%M} UTC",
            "fingerprint": facts.fingerprint,
        }


def warn_of_advertised(config: ControllerConfig) -> None:
    """Log the findings of `check_advertised`: clients with other names may still connect."""
    try:
        check_advertised(config)
    except ConfigError as error:
        _log.warning("advertised_name_not_in_certificate", reason=str(error))


def check_advertised(config: ControllerConfig) -> None:
    """Check that the certificate contains the names by which clients connect.

    Raises:
        ConfigError: a name is not in it, or the files are invalid.
    """
    if config.tls is None:
        return
    try:
        facts = config.tls.load().facts
    except TlsError as error:
        raise ConfigError(str(error)) from error

    if facts is None:
        return

    advertised = (("--advertise", config.advertise), ("--token-advertise", config.token_endpoint))
    for option, address in advertised:
        host = (address or config.advertise).rpartition(":")[0].strip("[]")
        if not any(_covers(name, host) for name in facts.hosts):
            raise ConfigError(
                f"tls-cert: {config.tls.certificate} does not name {host!r}, the host that "
                f"{option} advertises to clients. It names {', '.join(facts.hosts) or 'no host'}"
            )


def _covers(name: str, host: str) -> bool:
    """Return whether a name in a certificate, which may begin with `*.`, matches a host."""
    first, _, rest = host.lower().partition(".")
    return name.lower() in (host.lower(), f"*.{rest}" if first and rest else "")


def _sets(config: ControllerConfig) -> Sequence[tuple[str, TlsFiles]]:
    """Return the sets of files by option."""
    sets = (("tls", config.tls), ("peer-tls", config.peer_tls), ("http-tls", config.http_tls))
    return [(option, files) for option, files in sets if files is not None]


def _planes(config: ControllerConfig) -> Sequence[tuple[str, str]]:
    """Return the planes that may be protected, each with the option of its files."""
    # Files of a plane of its own come first, and the common set is the default.
    planes = [("clients", "tls"), ("peers", "peer-tls" if config.peer_tls else "tls")]
    if config.http_listen is not None and not config.http_plain_text:
        planes.append(("http", "http-tls" if config.http_tls else "tls"))
    return planes


def _takes_plain_text(config: ControllerConfig) -> bool:
    return config.peer_files is None or config.peer_plain_text is not PeerPlainText.NONE


def _check_own(
    option: str, files: TlsFiles, contents: TlsContents, config: ControllerConfig
) -> None:
    own = Principal(config.cluster_id, Role.CONTROLLER, str(config.node_id))
    shown = contents.principal
    if shown is None or config.known_clusters.accept(shown) != own:
        named = contents.principal.uri if contents.principal else "no principal"
        raise ConfigError(
            f"{option}-cert: {files.certificate} names {named}, must name {own.uri}, as "
            "--cluster-id and --node-id require"
        )
