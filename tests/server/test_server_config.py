"""A controller's settings are refused with the name of the option and what would be right."""

import dataclasses
from pathlib import Path

import pytest

from controller.config import ConfigError, ControllerConfig, parse_voters
from controller.ids import ClusterId, NodeId

GOOD = ControllerConfig(
    node_id=NodeId(1),
    cluster_id=ClusterId("demo"),
    listen="127.0.0.1:9091",
    voters={NodeId(1): "127.0.0.1:9091"},
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
        ({"node_id": 2}, "voters: no entry for this node-id 2 among 1"),
        ({"listen": "localhost"}, "listen: 'localhost'"),
        ({"listen": "h:70000"}, "listen"),
        ({"election_timeout_ms": 0}, "election-timeout-ms: 0"),
        ({"delete_delay_ms": -1}, "delete-delay-ms: -1"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names.replace("(", r"\(")):
        dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]


def test_voters_parse() -> None:
    assert parse_voters("1@a:1, 2@[::1]:2") == {1: "a:1", 2: "[::1]:2"}


@pytest.mark.parametrize("text", ["", "1", "x@a:1", "1@a", "1@a:1,1@b:2", "1@a:b"])
def test_malformed_voters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^voters: "):
        parse_voters(text)
