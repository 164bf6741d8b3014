"""What one controller process is told: identity, peers, places and durations.

Checked as a whole when it is made, so that a process that starts has a configuration that can work.
Durations end in `_ms`. Reads no file and no environment; the command line does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.ids import ClusterId, NodeId

CONTROLLER_ID_MAX = 999
"""Broker ids start above."""

_CLUSTER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENDPOINT = re.compile(r"(?P<host>[^\s:@,/]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


class ConfigError(ValueError):
    """A setting that can't work; the message names it and says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """One controller's settings.

    `voters` maps every voter's id, this one's included, to the `host:port` where its peers and
    clients reach it. `listen` is where this process binds.
    """

    node_id: NodeId
    cluster_id: ClusterId
    listen: str
    voters: Mapping[NodeId, str]
    data_dir: Path
    store_uri: str
    namespace: str
    election_timeout_ms: int = 1_000
    fetch_timeout_ms: int = 2_000
    lifecycle_interval_ms: int = 1_000
    delete_delay_ms: int = 60_000

    def __post_init__(self) -> None:
        check_cluster_id(self.cluster_id)
        if not 0 <= self.node_id <= CONTROLLER_ID_MAX:
            raise ConfigError(f"node-id: {self.node_id}; must be 0 to {CONTROLLER_ID_MAX}")
        if self.node_id not in self.voters:
            known = ", ".join(map(str, sorted(self.voters)))
            raise ConfigError(f"voters: no entry for this node-id {self.node_id} among {known}")
        check_endpoint("listen", self.listen)
        for name in ("election_timeout_ms", "fetch_timeout_ms", "lifecycle_interval_ms"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ConfigError(f"{option}: {getattr(self, name)}; must be at least 1")
        if self.delete_delay_ms < 0:
            raise ConfigError(f"delete-delay-ms: {self.delete_delay_ms}; must be at least 0")

    @property
    def endpoint(self) -> str:
        """Where others reach this controller."""
        return self.voters[self.node_id]


def check_cluster_id(cluster_id: str) -> None:
    """Raise `ConfigError` unless `cluster_id` can be part of an object's key."""
    if not _CLUSTER_ID.fullmatch(cluster_id):
        raise ConfigError(
            f"cluster-id: {cluster_id!r}; must be 1 to 64 letters, digits, '-' and '_'"
        )


def check_endpoint(option: str, endpoint: str) -> None:
    """Raise `ConfigError` unless `endpoint` is `host:port`."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 <= int(match["port"]) <= 65_535:
        raise ConfigError(f"{option}: {endpoint!r}; must be HOST:PORT, e.g. 127.0.0.1:9090")


def parse_voters(text: str) -> dict[NodeId, str]:
    """Parse `ID@HOST:PORT,ID@HOST:PORT,...`.

    Raises:
        ConfigError: an entry does not parse, or an id appears twice.
    """
    voters: dict[NodeId, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        node_id, at, endpoint = entry.partition("@")
        if not at or not node_id.isdecimal():
            raise ConfigError(f"voters: {entry!r}; must be ID@HOST:PORT, e.g. 1@127.0.0.1:9090")
        check_endpoint("voters", endpoint)
        if NodeId(int(node_id)) in voters:
            raise ConfigError(f"voters: id {node_id} appears twice; each voter needs its own")
        voters[NodeId(int(node_id))] = endpoint
    if not voters:
        raise ConfigError("voters: empty; name every voter as ID@HOST:PORT, separated by commas")
    return voters
