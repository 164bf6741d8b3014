"""Configuration of one controller process: identity, peers, paths and durations.

It is validated as a whole on creation, so a process that starts has a valid configuration.
Durations end in `_ms`. Files and the environment are read by the command line, not here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from streammeta.controller.ids import ClusterId, NodeId
from streammeta.storage.object_format.object_key import cluster_of
from streammeta.tls.files import TlsFiles
from streammeta.tls.identity import KnownClusters

CONTROLLER_ID_MAX = 999
"""Largest id of a controller. Ids of brokers are larger."""

MEMORY_LIMIT_MB_MIN = 256
"""Minimum memory limit. A controller uses about 100 MiB before its first call."""

_CLUSTER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WILDCARDS = ("0.0.0.0", "[::]")
_PORT_MAX = 65_535
_ENDPOINT = re.compile(r"(?P<host>[^\s:@,/]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


class ConfigError(ValueError):
    """An invalid setting. The message names it and the valid values."""


class AuditFailure(StrEnum):
    """Calls that are rejected while the audit log cannot be written."""

    BLOCK_ADMIN = "block-admin"
    """Calls of operators, and destructive calls."""
    BLOCK_ALL = "block-all"
    """All calls except heartbeats and queries about health and leadership."""
    DROP = "drop"
    """No calls."""


class PeerPlainText(StrEnum):
    """Plain text between controllers that have TLS files, during a migration to TLS."""

    NONE = "none"
    """TLS only."""
    TAKEN = "taken"
    """Both kinds of connections are accepted, outgoing ones use TLS."""
    SPOKEN = "spoken"
    """Both kinds of connections are accepted, outgoing ones use plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Settings of one controller.

    `listen` and `peer_listen` are the local addresses for clients and peers, `advertise` and
    `peer_advertise` those at which they reach this process. `seeds` are controllers to ask for the
    leader, by node id at their peer addresses. An entry of this node is ignored. `peer_overrides`
    are addresses of peers that take precedence over all others. `delete_rate` is in objects per
    second. `reflection` enables server reflection, and `tracing` continues traces of callers.

    With `tls` clients and peers must show certificates. `peer_tls` are separate files for peers.
    With `tls_listen` clients use TLS there, and `listen` is plain text. Plain text outside loopback
    needs `insecure`. Files are checked for changes every `tls_reload_ms`. Connections of clients,
    and of peers over TLS, end after `connection_age_ms`, so that revoked certificates and callers
    that do not read their answers cannot keep them.

    At `memory_limit_mb` of resident memory, calls that need more are rejected. None is a share of
    the memory of the machine or its control group.

    At `token_listen` clients show a token instead of a certificate: one issued by `oidc_issuer` for
    `oidc_audience`, signed by a key in the file or at the address `oidc_keys`, or published by the
    issuer. The policy maps claims to principals. `token_advertise` is the address at which these
    clients reach this controller, by default `token_listen`.

    `http_listen` serves probes and metrics, with the files `http_tls` or else `tls`, or with
    `http_plain_text` without TLS. `http_plain_text_pages` serves the status pages there as well.

    The file `policy` grants and denies calls in addition to the rules of methods.

    The leader copies the committed log to `backup_store` every `backup_interval_ms`. Copies that no
    point of the last `backup_keep_ms` needs are removed.

    Calls are recorded in `audit_log`, `-` being standard output. By default they are not recorded.
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
    max_producers: int = 1_000_000

    def __post_init__(self) -> None:
        # The cluster id becomes part of object keys, the node id part of the voter set: both are
        # checked before anything is derived from them.
        check_cluster_id(self.cluster_id)
        if self.former_cluster_id is not None:
            check_cluster_id(self.former_cluster_id, "former-cluster-id")
        check_controller_id("node-id", self.node_id)
        check_endpoint("listen", self.listen)
        check_reachable("advertise", self.advertise)
        check_endpoint("peer-listen", self.peer_listen)
        check_reachable("peer-advertise", self.peer_advertise)

        # Clients and peers speak different protocols, so they need different ports.
        for option in ("listen", "advertise"):
            _check_apart(option, getattr(self, option), getattr(self, f"peer_{option}"))
        for setting in fields(self):
            least = 0 if setting.name == "delete_delay_ms" else 1
            # Settings that are numbers with a default: durations, rates and sizes.
            if type(setting.default) is int and getattr(self, setting.name) < least:
                option, number = setting.name.replace("_", "-"), getattr(self, setting.name)
                raise ConfigError(f"{option}: {number}, must be at least {least}")

        if self.memory_limit_mb is not None and self.memory_limit_mb < MEMORY_LIMIT_MB_MIN:
            raise ConfigError(
                f"memory-limit-mb: {self.memory_limit_mb}, must be at least {MEMORY_LIMIT_MB_MIN}"
            )

        self._check_tls()
        self._check_tokens()
        self._check_http()

    @property
    def listeners(self) -> Sequence[tuple[str, str, bool]]:
        """Options and addresses of the listeners for clients, and whether they use TLS."""
        if self.tls_listen is None:
            return (("listen", self.listen, self.tls is not None),)
        return (("listen", self.listen, False), ("tls-listen", self.tls_listen, True))

    @property
    def peer_files(self) -> TlsFiles | None:
        """Files for TLS with peers. None means plain text."""
        return self.peer_tls or self.tls

    @property
    def token_endpoint(self) -> str | None:
        """Address at which clients with tokens reach this controller, or None."""
        return self.token_advertise or self.token_listen

    def _check_tokens(self) -> None:
        if self.token_listen is None:
            # A setting without effect is a mistake that must not go unnoticed.
            for option in ("token_advertise", "oidc_issuer", "oidc_audience", "oidc_keys"):
                if getattr(self, option):
                    raise ConfigError(f"{option.replace('_', '-')}: needs --token-listen")
            return
        check_endpoint("token-listen", self.token_listen)
        check_reachable("token-advertise", self.token_advertise or self.token_listen)
        taken = (self.listen, self.tls_listen, self.peer_listen)
        _check_unused("token-listen", self.token_listen, taken)

        needed = {
            "--tls-ca, --tls-cert and --tls-key": self.tls,
            "--policy, which maps the claims of tokens": self.policy,
            "--oidc-issuer": self.oidc_issuer,
            "--oidc-audience": self.oidc_audience,
        }
        for options, value in needed.items():
            if not value:
                raise ConfigError(f"token-listen: needs {options}")

        for option, address in (("oidc-issuer", self.oidc_issuer), ("oidc-keys", self.oidc_keys)):
            if "://" in address and not is_protected(address):
                raise ConfigError(f"{option}: {address!r}, must begin with https://")
        if not self.oidc_keys and "://" not in self.oidc_issuer:
            raise ConfigError(
                f"oidc-issuer: {self.oidc_issuer!r} is not an address that publishes keys: use one "
                "that begins with https://, or --oidc-keys"
            )

    @property
    def http_files(self) -> TlsFiles | None:
        """Files for TLS of the HTTP listener. None means plain text."""
        return None if self.http_plain_text else self.http_tls or self.tls

    @property
    def known_clusters(self) -> KnownClusters:
        """Clusters whose certificates are accepted, including the predecessor of this one."""
        return KnownClusters(self.cluster_id, self.former_cluster_id or cluster_of(self.namespace))

    @property
    def shows_pages(self) -> bool:
        """Whether the HTTP listener serves the status pages."""
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
        taken = (self.listen, self.peer_listen, self.tls_listen, self.token_listen)
        _check_unused("http-listen", self.http_listen, taken)

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
                f"http-listen: {self.http_listen} is plain text, so others on the network can "
                "read the metrics: use --http-tls-ca, --http-tls-cert and --http-tls-key, or "
                "--insecure if that is intended"
            )

    def _check_tls(self) -> None:
        if self.tls_listen is not None:
            check_endpoint("tls-listen", self.tls_listen)
            if self.tls is None:
                raise ConfigError("tls-listen: needs --tls-ca, --tls-cert and --tls-key")
            _check_unused("tls-listen", self.tls_listen, (self.listen, self.peer_listen))

        if self.peer_plain_text is not PeerPlainText.NONE and self.peer_files is None:
            raise ConfigError("peer-plain-text: needs files for TLS")
        if self.insecure:
            return

        # Without TLS every process that reaches a port has full access.
        for option, address, is_encrypted in self.listeners:
            if not is_encrypted:
                _check_loopback(option, address, "--tls-ca, --tls-cert and --tls-key")
        if self.peer_files is None:
            _check_loopback("peer-listen", self.peer_listen, "--tls-ca, --tls-cert and --tls-key")
        elif self.peer_plain_text is not PeerPlainText.NONE:
            _check_loopback("peer-listen", self.peer_listen, "--peer-plain-text none")


def is_protected(address: str) -> bool:
    """Return whether answers of a URL are authentic: over TLS, or from this machine."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:
        return False
    return bool(host) and (
        parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))
    )


def check_controller_id(option: str, node_id: int) -> None:
    """Raise `ConfigError` unless `node_id` is a valid controller id."""
    if not 0 <= node_id <= CONTROLLER_ID_MAX:
        raise ConfigError(f"{option}: {node_id}, must be 0 to {CONTROLLER_ID_MAX}")


def check_cluster_id(cluster_id: str, option: str = "cluster-id") -> None:
    """Raise `ConfigError` unless `cluster_id` is valid in an object's key."""
    if not _CLUSTER_ID.fullmatch(cluster_id):
        raise ConfigError(f"{option}: {cluster_id!r}, must be 1 to 64 letters, digits, '-' and '_'")


def check_endpoint(option: str, endpoint: str) -> None:
    """Raise `ConfigError` unless `endpoint` is `host:port`."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 <= int(match["port"]) <= _PORT_MAX:
        raise ConfigError(f"{option}: {endpoint!r}, must be HOST:PORT, e.g. 127.0.0.1:9090")


def check_reachable(option: str, endpoint: str) -> None:
    """Raise `ConfigError` unless `endpoint` is a `host:port` that others can connect to."""
    check_endpoint(option, endpoint)
    host, _, port = endpoint.rpartition(":")
    if host in _WILDCARDS or int(port) == 0:
        raise ConfigError(
            f"{option}: {endpoint!r} is not an address that others can connect to: use the "
            "HOST:PORT at which they reach this controller"
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
            f"{option}: {address} accepts plain text from other machines, so every process "
            f"that reaches it has full access: use {cure}, or --insecure if that is intended"
        )


def _check_unused(option: str, address: str, taken: Sequence[str | None]) -> None:
    if address in taken:
        raise ConfigError(f"{option}: {address!r} is used by another listener: use a separate port")


def _check_apart(option: str, for_clients: str, for_peers: str) -> None:
    if for_clients == for_peers:
        raise ConfigError(
            f"peer-{option}: {for_peers!r} equals --{option}: peers need a separate port"
        )


def next_port(option: str, endpoint: str) -> str:
    """Return the endpoint on the same host with the next port.

    Raises:
        ConfigError: `endpoint`, the value of `option`, is malformed, or has no next port.
    """
    check_endpoint(option, endpoint)
    host, _, port = endpoint.rpartition(":")
    if not 0 < int(port) < _PORT_MAX:
        raise ConfigError(f"peer-listen: no port follows {endpoint!r} of --{option}: use HOST:PORT")
    return f"{host}:{int(port) + 1}"


def parse_peers(option: str, text: str) -> dict[NodeId, str]:
    """Parse `ID@HOST:PORT,ID@HOST:PORT,...`. An empty text returns no peers.

    Raises:
        ConfigError: an entry does not parse, or an id appears twice.
    """
    peers: dict[NodeId, str] = {}
    # A trailing comma, as generated lists have, is fine.
    for entry in filter(None, (part.strip() for part in text.split(","))):
        node_id, at, endpoint = entry.partition("@")
        if not at or not node_id.isdecimal():
            raise ConfigError(f"{option}: {entry!r}, must be ID@HOST:PORT, e.g. 1@127.0.0.1:9090")
        check_controller_id(option, int(node_id))
        check_reachable(option, endpoint)
        # A second address would silently replace the first.
        if NodeId(int(node_id)) in peers:
            raise ConfigError(f"{option}: id {node_id} appears twice: name each controller once")
        peers[NodeId(int(node_id))] = endpoint
    return peers
