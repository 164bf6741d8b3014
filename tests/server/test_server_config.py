"""A controller's settings are refused with the name of the option and what would be right."""

import dataclasses
import re
from pathlib import Path

import pytest

from streammeta.controller.config import ConfigError, ControllerConfig, next_port, parse_peers
from streammeta.controller.ids import ClusterId, NodeId

GOOD = ControllerConfig(
    node_id=NodeId(1),
    cluster_id=ClusterId("demo"),
    listen="127.0.0.1:9091",
    advertise="127.0.0.1:9091",
    peer_listen="127.0.0.1:9092",
    peer_advertise="127.0.0.1:9092",
    data_dir=Path("data"),
    store_uri="file:///tmp/bucket",
    namespace="_streammeta_demo",
)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"cluster_id": "a/b"}, "cluster-id: 'a/b'"),
        ({"cluster_id": ""}, "cluster-id"),
        ({"node_id": 1000}, "node-id: 1000"),
        ({"advertise": "h"}, "advertise: 'h'"),
        ({"advertise": "0.0.0.0:9091"}, "advertise: '0.0.0.0:9091' is not an address that others"),
        ({"advertise": "[::]:9091"}, "is not an address that others can connect to"),
        ({"advertise": "h:0"}, "is not an address that others can connect to"),
        ({"peer_listen": "h"}, "peer-listen: 'h'"),
        ({"peer_advertise": "0.0.0.0:9092"}, "peer-advertise: '0.0.0.0:9092' is not an address"),
        ({"peer_listen": "127.0.0.1:9091"}, "peer-listen: '127.0.0.1:9091' equals --listen"),
        ({"peer_advertise": "127.0.0.1:9091"}, "equals --advertise"),
        ({"snapshot_log_bytes": 0}, "snapshot-log-bytes: 0"),
        ({"snapshot_interval_ms": -1}, "snapshot-interval-ms: -1"),
        ({"listen": "localhost"}, "listen: 'localhost'"),
        ({"listen": "h:70000"}, "listen"),
        ({"election_timeout_ms": 0}, "election-timeout-ms: 0"),
        ({"delete_delay_ms": -1}, "delete-delay-ms: -1"),
        ({"delete_rate": 0}, "delete-rate: 0"),
        ({"session_timeout_ms": 0}, "session-timeout-ms: 0"),
        ({"recoveries_per_node": 0}, "recoveries-per-node: 0"),
        ({"sweep_interval_ms": 0}, "sweep-interval-ms: 0"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(names)):
        dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]


def test_peers_are_served_one_port_above_clients() -> None:
    assert next_port("listen", "[::1]:9090") == "[::1]:9091"
    for none_next in ("h:65535", "h:0"):
        with pytest.raises(ConfigError, match=r"peer-listen.*--listen"):
            next_port("listen", none_next)
    with pytest.raises(ConfigError, match=r"^listen: 'h'"):
        next_port("listen", "h")


def test_peers_parse() -> None:
    assert parse_peers("seeds", "1@a:1, 2@[::1]:2") == {1: "a:1", 2: "[::1]:2"}
    assert parse_peers("seeds", "") == {}


@pytest.mark.parametrize(
    "text", ["1", "x@a:1", "1@a", "1@a:1,1@b:2", "1@a:b", "1000@a:1", "1@0.0.0.0:1", "1@a:0"]
)
def test_malformed_peers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^seeds: "):
        parse_peers("seeds", text)
