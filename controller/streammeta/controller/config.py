"""Configuration of one controller process: identity, peers, places and durations.

Checked as a whole when it is made, so that a process that starts has a configuration that works.
Durations end in `_ms`. Reads no file and no environment; the command line does.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from streammeta.controller.ids import ClusterId, NodeId
from streammeta.storage.object_format.object_key import cluster_of
from streammeta.tls.files import TlsFiles
from streammeta.tls.identity import KnownClusters

CONTROLLER_ID_MAX = 999
"""Broker ids start above."""

MEMORY_LIMIT_MB_MIN = 256
"""A controller holds about 100 MiB before it has served a call."""

_CLUSTER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WILDCARDS = ("0.0.0.0", "[::]")
_AT_LEAST_ONE = (
    "election_timeout_ms",
    "fetch_timeout_ms",
    "lifecycle_interval_ms",
    "delete_rate",
    "session_timeout_ms",
    "recoveries_per_node",
    "sweep_interval_ms",
    "snapshot_log_bytes",
    "snapshot_interval_ms",
    "backup_interval_ms",
    "backup_keep_ms",
    "tls_reload_ms",
    "connection_age_ms",
    "request_memory_mb",
    "max_streams",
    "max_prepared_objects",
    "max_nodes",
    "max_kv_keys",
    "max_kv_bytes",
    "max_tag_bytes",
)
_PORT_MAX = 65_535
_ENDPOINT = re.compile(r"(?P<host>[^\s:@,/]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


class ConfigError(ValueError):
    """An invalid setting; the message names it and what is valid."""


class AuditFailure(StrEnum):
    """Calls that are refused while the audit log can't be written."""

    BLOCK_ADMIN = "block-admin"
    """Those of operators, and those that destroy."""
    BLOCK_ALL = "block-all"
    """All but heartbeats and questions about health and leadership."""
    DROP = "drop"
    """None."""


class PeerPlainText(StrEnum):
    """Use of plain text between controllers that have files for TLS, while they are moved to it."""

    NONE = "none"
    """TLS alone."""
    TAKEN = "taken"
    """Connections of both kinds are taken, those made speak TLS."""
    SPOKEN = "spoken"
    """Connections of both kinds are taken, those made speak plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """One controller's settings.

    `listen` and `peer_listen` are where this process binds for clients and for its peers,
    `advertise` and `peer_advertise` where those reach it. `seeds` are controllers to ask for the
    leader, by node id at their peers' addresses; an entry of this node itself is ignored.
    `peer_overrides` say where to reach a peer whatever else is known of its address. `delete_rate`
    is in objects a second. With `reflection` the contract is described to all that may connect;
    with `tracing` calls that come with a trace are traced.

    With `tls` clients and peers must show certificates; `peer_tls` are other files for peers. With
    `tls_listen` too, clients do so there, and `listen` is plain text. Plain text beyond loopback
    needs `insecure`. Files are looked at every `tls_reload_ms`; a connection of a client, or
    over TLS of a peer, ends after `connection_age_ms`, so that those of certificates no longer
    taken end too, and those whose callers do not read their answers.

    At `memory_limit_mb` of resident memory calls that need more are refused; None is a share of
    what the machine, or its control group, has.

    At `token_listen` clients show a token in place of a certificate: one of `oidc_issuer` for
    `oidc_audience`, signed by a key in the file or at the address `oidc_keys`, or that the issuer
    publishes. What the token's claims stand for is in the policy. Where these clients reach this
    controller is `token_advertise`, by default where it listens.

    With `http_listen` probes and metrics are served there, by the files `http_tls`, else by `tls`,
    or with `http_plain_text` by none. `http_plain_text_pages` shows the status pages there too.

    Beside the rules of methods the file `policy` grants and denies calls.

    The leader copies the committed log to `backup_store` every `backup_interval_ms`; copies that no
    point of the last `backup_keep_ms` needs are removed.

    Calls are recorded in `audit_log`, `-` being standard output; without it they are not.
    """

    node_id: NodeId
    cluster_id: ClusterId
    listen: str
    advertise: str
    peer_listen: str
    peer_advertise: str
    data_dir: Path
    store_uri: str
    namespace: str
    former_cluster_id: str | None = None
    seeds: Mapping[NodeId, str] = field(default_factory=dict)
    peer_overrides: Mapping[NodeId, str] = field(default_factory=dict)
    tls: TlsFiles | None = None
    tls_listen: str | None = None
    peer_tls: TlsFiles | None = None
    peer_plain_text: PeerPlainText = PeerPlainText.NONE
    http_listen: str | None = None
    http_tls: TlsFiles | None = None
    http_plain_text: bool = False
    http_plain_text_pages: bool = False
    insecure: bool = False
    tls_reload_ms: int = 5_000
    connection_age_ms: int = 3_600_000
    token_listen: str | None = None
    token_advertise: str | None = None
    oidc_issuer: str = ""
    oidc_audience: str = ""
    oidc_keys: str = ""
    reflection: bool = False
    tracing: bool = False
    policy: Path | None = None
    audit_log: Path | None = None
    audit_failure: AuditFailure = AuditFailure.BLOCK_ADMIN
    election_timeout_ms: int = 1_000
    fetch_timeout_ms: int = 2_000
    lifecycle_interval_ms: int = 1_000
    delete_delay_ms: int = 60_000
    delete_rate: int = 2_000
    session_timeout_ms: int = 9_000
    recoveries_per_node: int = 1
    sweep_interval_ms: int = 300_000
    snapshot_log_bytes: int = 20 << 20
    snapshot_interval_ms: int = 3_600_000
    backup_store: str | None = None
    backup_interval_ms: int = 10_000
    backup_keep_ms: int = 7 * 86_400_000
    request_memory_mb: int = 512
    memory_limit_mb: int | None = None
    max_streams: int = 50_000_000
    max_prepared_objects: int = 5_000_000
    max_nodes: int = 10_000
    max_kv_keys: int = 1_000_000
    max_kv_bytes: int = 512 << 20
    max_tag_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        check_cluster_id(self.cluster_id)
        if self.former_cluster_id is not None:
            check_cluster_id(self.former_cluster_id, "former-cluster-id")
        check_controller_id("node-id", self.node_id)
        check_endpoint("listen", self.listen)
        check_reachable("advertise", self.advertise)
        check_endpoint("peer-listen", self.peer_listen)
        check_reachable("peer-advertise", self.peer_advertise)
        for option in ("listen", "advertise"):
            _check_apart(option, getattr(self, option), getattr(self, f"peer_{option}"))
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ConfigError(f"{option}: {getattr(self, name)}; must be at least 1")
        if self.memory_limit_mb is not None and self.memory_limit_mb < MEMORY_LIMIT_MB_MIN:
            raise ConfigError(
                f"memory-limit-mb: {self.memory_limit_mb}; must be at least {MEMORY_LIMIT_MB_MIN}"
            )
        if self.delete_delay_ms < 0:
            raise ConfigError(f"delete-delay-ms: {self.delete_delay_ms}; must be at least 0")
        self._check_tls()
        self._check_tokens()
        self._check_http()

    @property
    def listeners(self) -> Sequence[tuple[str, str, bool]]:
        """The options and addresses at which clients are served, and whether over TLS."""
        if self.tls_listen is None:
            return (("listen", self.listen, self.tls is not None),)
        return (("listen", self.listen, False), ("tls-listen", self.tls_listen, True))

    @property
    def peer_files(self) -> TlsFiles | None:
        """The files for TLS with peers; None: plain text."""
        return self.peer_tls or self.tls

    @property
    def token_endpoint(self) -> str | None:
        """Where clients with tokens reach this controller; None: nowhere."""
        return self.token_advertise or self.token_listen

    def _check_tokens(self) -> None:
        if self.token_listen is None:
            for option in ("token_advertise", "oidc_issuer", "oidc_audience", "oidc_keys"):
                if getattr(self, option):
                    raise ConfigError(f"{option.replace('_', '-')}: needs --token-listen")
            return
        check_endpoint("token-listen", self.token_listen)
        check_reachable("token-advertise", self.token_advertise or self.token_listen)
        if self.token_listen in (self.listen, self.tls_listen, self.peer_listen):
            raise ConfigError(
                f"token-listen: {self.token_listen!r} is taken by another listener; give a port of "
                "its own"
            )
        needed = {
            "--tls-ca, --tls-cert and --tls-key": self.tls,
            "--policy, which says what the claims of tokens stand for": self.policy,
            "--oidc-issuer": self.oidc_issuer,
            "--oidc-audience": self.oidc_audience,
        }
        for what, given in needed.items():
            if not given:
                raise ConfigError(f"token-listen: needs {what}")
        for option, address in (("oidc-issuer", self.oidc_issuer), ("oidc-keys", self.oidc_keys)):
            if "://" in address and not is_protected(address):
                raise ConfigError(f"{option}: {address!r}; must begin with https://")
        if not self.oidc_keys and "://" not in self.oidc_issuer:
            raise ConfigError(
                f"oidc-issuer: {self.oidc_issuer!r} is no address that publishes keys; give one "
                "that begins with https://, or --oidc-keys"
            )

    @property
    def http_files(self) -> TlsFiles | None:
        """The files for TLS of the listener for HTTP; None: plain text."""
        return None if self.http_plain_text else self.http_tls or self.tls

    @property
    def known_clusters(self) -> KnownClusters:
        """Clusters whose certificates are accepted: also the one that this one continues."""
        return KnownClusters(self.cluster_id, self.former_cluster_id or cluster_of(self.namespace))

    @property
    def shows_pages(self) -> bool:
        """Whether the listener for HTTP shows the status pages."""
        return not self.http_plain_text or self.http_plain_text_pages

    def _check_http(self) -> None:
        if self.http_plain_text_pages and not self.http_plain_text:
            raise ConfigError("http-plain-text-pages: needs --http-plain-text")
        if self.http_listen is None:
            if self.http_tls is not None or self.http_plain_text:
                option = "http-plain-text" if self.http_tls is None else "http-tls-ca"
                raise ConfigError(f"{option}: needs --http-listen")
            return
        check_endpoint("http-listen", self.http_listen)
        if self.http_listen in (
            *(self.listen, self.peer_listen),
            *(self.tls_listen, self.token_listen),
        ):
            raise ConfigError(
                f"http-listen: {self.http_listen!r} is taken by another listener; give a port of "
                "its own"
            )
        if self.http_plain_text and self.http_tls is not None:
            raise ConfigError(
                "http-plain-text: excludes --http-tls-ca, --http-tls-cert, --http-tls-key"
            )
        if (
            self.http_files is None
            and not self.insecure
            and not _is_loopback(_host(self.http_listen))
        ):
            raise ConfigError(
                f"http-listen: {self.http_listen} is plain text, which lets others on the network "
                "read the metrics; give --http-tls-ca, --http-tls-cert and --http-tls-key, or "
                "--insecure if that is wanted"
            )

    def _check_tls(self) -> None:
        if self.tls_listen is not None:
            check_endpoint("tls-listen", self.tls_listen)
            if self.tls is None:
                raise ConfigError("tls-listen: needs --tls-ca, --tls-cert and --tls-key")
            if self.tls_listen in (self.listen, self.peer_listen):
                raise ConfigError(
                    f"tls-listen: {self.tls_listen!r} is taken by another listener; give a port "
                    "of its own"
                )
        if self.peer_plain_text is not PeerPlainText.NONE and self.peer_files is None:
            raise ConfigError("peer-plain-text: is for controllers that have files for TLS")
        if self.insecure:
            return
        for option, address, is_encrypted in self.listeners:
            if not is_encrypted:
                _check_loopback(option, address, "--tls-ca, --tls-cert and --tls-key")
        if self.peer_files is None:
            _check_loopback("peer-listen", self.peer_listen, "--tls-ca, --tls-cert and --tls-key")
        elif self.peer_plain_text is not PeerPlainText.NONE:
            _check_loopback("peer-listen", self.peer_listen, "--peer-plain-text none")


def is_protected(address: str) -> bool:
    """Whether answers of a URL are those of its host: over TLS, or from this machine."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:
        return False
    return bool(host) and (
        parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))
    )


def check_controller_id(option: str, node_id: int) -> None:
    """Raise `ConfigError` unless `node_id` can be a controller's."""
    if not 0 <= node_id <= CONTROLLER_ID_MAX:
        raise ConfigError(f"{option}: {node_id}; must be 0 to {CONTROLLER_ID_MAX}")


def check_cluster_id(cluster_id: str, option: str = "cluster-id") -> None:
    """Raise `ConfigError` unless `cluster_id` can be part of an object's key."""
    if not _CLUSTER_ID.fullmatch(cluster_id):
        raise ConfigError(f"{option}: {cluster_id!r}; must be 1 to 64 letters, digits, '-' and '_'")


def check_endpoint(option: str, endpoint: str) -> None:
    """Raise `ConfigError` unless `endpoint` is `host:port`."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 <= int(match["port"]) <= _PORT_MAX:
        raise ConfigError(f"{option}: {endpoint!r}; must be HOST:PORT, e.g. 127.0.0.1:9090")


def check_reachable(option: str, endpoint: str) -> None:
    """Raise `ConfigError` unless `endpoint` is `host:port` that others could connect to."""
    check_endpoint(option, endpoint)
    host, _, port = endpoint.rpartition(":")
    if host in _WILDCARDS or int(port) == 0:
        raise ConfigError(
            f"{option}: {endpoint!r} is no address that others can connect to; give HOST:PORT as "
            "they reach this controller"
        )


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_loopback(option: str, address: str, cure: str) -> None:
    if not _is_loopback(_host(address)):
        raise ConfigError(
            f"{option}: {address} takes plain text from other machines, and every process "
            f"that reaches it may do everything; give {cure}, or --insecure if that is wanted"
        )


def _check_apart(option: str, for_clients: str, for_peers: str) -> None:
    if for_clients == for_peers:
        raise ConfigError(
            f"peer-{option}: {for_peers!r} is what --{option} says; peers need a port of their own"
        )


def next_port(option: str, endpoint: str) -> str:
    """Return the endpoint of the same host one port above.

    Raises:
        ConfigError: `endpoint`, what `option` says, is malformed, or there is no such port.
    """
    check_endpoint(option, endpoint)
    host, _, port = endpoint.rpartition(":")
    if not 0 < int(port) < _PORT_MAX:
        raise ConfigError(
            f"peer-listen: no port is next to that of --{option}, {endpoint!r}; give HOST:PORT"
        )
    return f"{host}:{int(port) + 1}"


def parse_peers(option: str, text: str) -> dict[NodeId, str]:
    """Parse `ID@HOST:PORT,ID@HOST:PORT,...`; the empty text gives none.

    Raises:
        ConfigError: an entry does not parse, or an id appears twice.
    """
    peers: dict[NodeId, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        node_id, at, endpoint = entry.partition("@")
        if not at or not node_id.isdecimal():
            raise ConfigError(f"{option}: {entry!r}; must be ID@HOST:PORT, e.g. 1@127.0.0.1:9090")
        check_controller_id(option, int(node_id))
        check_reachable(option, endpoint)
        if NodeId(int(node_id)) in peers:
            raise ConfigError(f"{option}: id {node_id} appears twice; name each controller once")
        peers[NodeId(int(node_id))] = endpoint
    return peers
